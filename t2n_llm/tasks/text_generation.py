"""Text generation: a causal language model whose cache is the graph's interface, checked token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from generic_export.devices import CPU
from generic_export.errors import NotEnoughMemoryError, OptionError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.bundles import bundles_size, make_bundles
from t2n_llm.check.devices import DEVICE_TEXT
from t2n_llm.check.llm_checks import agreement_with_original, validate_in_engine
from t2n_llm.check.options import CheckingOptions
from t2n_llm.check.reference import plan_check, run_reference, run_reference_apart
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.causal_lm import build_graph, typical_inputs
from t2n_llm.graph.interface import interface, text_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.prefill import prefill_chunks, recorded_chunks
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.tasks.protocol import CheckSubject, ReferenceAnswers, Task
from t2n_llm.weights.f32_model import require_resident
from t2n_llm.weights.placement import Residency, plan_residency


class TextGeneration(Task):
    """`(input_ids, *past) -> (logits, *present)`, or `input_ids -> logits` where the engine keeps the cache."""

    name = TEXT_GENERATION
    diagnosed = True
    compares_original = True

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """See `Task.refuse`."""
        if adapter is not None and compression.calibrates():
            raise OptionError(
                "calibration runs the base model, without its adapter.",
                "Use an algorithm without calibration (--compress q4_0), or merge the adapter with peft first.",
            )

    def graphs(self, source: ModelSource, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """See `Task.graphs`."""
        graph = build_graph(
            source.config,
            options,
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
        )
        return (graph,)

    def typical_inputs(
        self, graph: ModelGraph, tokens: Sequence[int], given: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Task.typical_inputs`."""
        del given
        return typical_inputs(graph, tokens)

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        return meta_model(source.config, trust_remote_code=source.trust_remote_code)

    def refuse_check(
        self,
        graphs: Sequence[ModelGraph],
        source: ModelSource,
        compression: CompressionOptions,
        checking: CheckingOptions,
    ) -> None:
        """See `Task.refuse_check`."""
        residency = _residency(graphs[-1].network, source, checking)
        if residency.offloaded and compression.recipe() is not None:
            raise NotEnoughMemoryError(
                "the check of a compressed export needs the PyTorch model in memory in f32, which does not fit.",
                "Pass --no-check, and run t2n-llm validate on a larger machine.",
            )

    def reference(self, subject: CheckSubject) -> ReferenceAnswers:
        """Run the text, and generate from it; see `check.reference`."""
        source, checking = subject.source, subject.checking
        residency = _residency(subject.network, source, checking)
        plan = plan_check(
            source.config,
            subject.tokenizer,
            checking.decode_steps,
            teacher_forced=residency.offloaded,
            at_least=DEVICE_TEXT if checking.device != CPU else 0,
        )
        about = f": {residency.summary(source.folder, plan.passes)}" if residency.offloaded else ""
        subject.reporter.stage(f"Running PyTorch in f32 for reference{about}")
        run = run_reference_apart if checking.low_memory else run_reference
        answers = run(
            source.weights,
            plan,
            trust_remote_code=source.trust_remote_code,
            residency=residency,
            adapter=subject.adapter,
            overrides=subject.overrides,
            decodes=subject.decodes,
            tell=subject.reporter.steps,
        )
        return ReferenceAnswers(answers, answers.largest_states)

    def check(
        self, subject: CheckSubject, reference: ReferenceAnswers, original: ReferenceAnswers | None = None
    ) -> ValidationReport:
        """Run the four checks; see `check.turns`."""
        options, answers, checking = subject.options, reference.answers, subject.checking
        if subject.bundles is not None:
            subject.bundles.mkdir()
            fed_back = {state.input_name: state.output_name for state in subject.states}
            for bundle in make_bundles(answers, subject.states, options.num_logits_to_keep):
                bundle.write(subject.bundles, fed_back)
        report = validate_in_engine(
            subject.archive,
            subject.states,
            answers,
            options.dtype,
            checking,
            tolerance=subject.tolerance,
            on_check=subject.announce,
            tell=subject.reporter.steps,
        )
        agreement = agreement_with_original(answers, original.answers) if original is not None else None
        return replace(report, original=agreement)

    def interface(self, source: ModelSource, graphs: Sequence[ModelGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        (part,) = graphs
        return {
            "graph": interface(part.document, part.states, options.dtype)
            | {
                "engine_states": [asdict(state) for state in part.engine_states],
                "prefill": recorded_chunks(prefill_chunks(source.config, part.document, options)),
            },
            "model": text_model(source.config, part.document.variables),
        }

    def bundle_bytes(self, graphs: Sequence[ModelGraph], options: GraphOptions, checking: CheckingOptions) -> int:
        """See `Task.bundle_bytes`."""
        (part,) = graphs
        config = part.config
        # At its longest: whether weights stay on disk is not known yet.
        plan = plan_check(config, None, checking.decode_steps, teacher_forced=True)
        return bundles_size(part.states, config, len(plan.text_ids), options.num_logits_to_keep)

    def check_bytes(self, graphs: Sequence[ModelGraph], stored_bytes: int, checking: CheckingOptions) -> int:
        """See `Task.check_bytes`."""
        (part,) = graphs
        reference = 4 * part.stored_values - plan_residency(part.network, checking.placement).disk_bytes
        return max(reference, stored_bytes) if checking.low_memory else reference + stored_bytes


def _residency(network: nn.Module, source: ModelSource, checking: CheckingOptions) -> Residency:
    """Return where the reference's weights stay.

    Raises:
        NotEnoughMemoryError: a quantised checkpoint does not fit as a whole.
    """
    residency = plan_residency(network, checking.placement)
    require_resident(source, residency.offloaded)
    return residency
