"""Text generation: a causal language model whose cache is the graph's interface, checked token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from generic_export.devices import CPU
from generic_export.errors import NotEnoughMemoryError, OptionError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.bundles import bundles_size, make_bundles
from t2n_llm.check.cache_range import by_kind, require_range
from t2n_llm.check.devices import DEVICE_TEXT, EngineKeepsCaches, device_checks
from t2n_llm.check.options import CheckingOptions
from t2n_llm.check.reference import plan_check, run_reference, run_reference_apart
from t2n_llm.check.runner import open_runner
from t2n_llm.check.turns import validate_archive
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.document import build_graph
from t2n_llm.graph.interface import interface, text_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.prefill import prefill_chunks, recorded_chunks
from t2n_llm.graph.ranges import RangeRequest
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.tasks.protocol import CheckSubject, Task, TaskGraph
from t2n_llm.weights.f32_model import require_resident
from t2n_llm.weights.placement import Residency, plan_residency


class TextGeneration(Task):
    """`(input_ids, *past) -> (logits, *present)`, or `input_ids -> logits` where the engine keeps the cache."""

    name = TEXT_GENERATION
    diagnosed = True

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """See `Task.refuse`."""
        if adapter is not None and compression.calibrates():
            raise OptionError(
                "calibration runs the base model, without its adapter.",
                "Use an algorithm without calibration (--compress q4_0), or merge the adapter with peft first.",
            )

    def graphs(
        self, source: ModelSource, options: GraphOptions, ranges: RangeRequest | None = None
    ) -> tuple[TaskGraph, ...]:
        """See `Task.graphs`."""
        skeleton, graph = build_graph(
            source.config,
            options,
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            ranges=ranges,
        )
        states, kept = skeleton.states, skeleton.engine_states
        return (TaskGraph(skeleton, graph, states=states, engine_states=kept, ranges=skeleton.ranges),)

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        return meta_model(source.config, trust_remote_code=source.trust_remote_code)

    def refuse_check(
        self,
        graphs: Sequence[TaskGraph],
        source: ModelSource,
        compression: CompressionOptions,
        checking: CheckingOptions,
    ) -> None:
        """See `Task.refuse_check`."""
        residency = _residency(graphs[-1].skeleton.network, source, checking)
        if residency.offloaded and compression.recipe() is not None:
            raise NotEnoughMemoryError(
                "the check of a compressed export needs the PyTorch model in memory in f32, which does not fit.",
                "Pass --no-check, and run t2n-llm validate on a larger machine.",
            )

    def check(self, subject: CheckSubject) -> ValidationReport:
        """Run the four checks; see `check.turns`."""
        source, options, checking = subject.source, subject.options, subject.checking
        residency = _residency(subject.network, source, checking)
        on_gpu = checking.device != CPU
        plan = plan_check(
            source.config,
            subject.tokenizer,
            checking.decode_steps,
            teacher_forced=residency.offloaded,
            at_least=DEVICE_TEXT if on_gpu else 0,
        )
        about = f": {residency.summary(source.folder, plan.passes)}" if residency.offloaded else ""
        subject.reporter.stage(f"Running PyTorch in f32 for reference{about}")
        run = run_reference_apart if checking.low_memory else run_reference
        reference = run(
            source.weights,
            plan,
            trust_remote_code=source.trust_remote_code,
            residency=residency,
            adapter=subject.adapter,
            overrides=subject.overrides,
            tell=subject.reporter.steps,
        )
        require_range(reference.largest_states, options)
        if subject.bundles is not None:
            subject.bundles.mkdir()
            fed_back = {state.input_name: state.output_name for state in subject.states}
            for bundle in make_bundles(reference, subject.states, options.num_logits_to_keep):
                bundle.write(subject.bundles, fed_back)
        steps = subject.reporter.steps
        with open_runner(subject.archive, subject.states, options.dtype, checking, tell=steps) as opened:
            runner = EngineKeepsCaches(opened) if on_gpu else opened
            report = validate_archive(
                runner, reference, options.dtype, tolerance=subject.tolerance, on_check=subject.announce
            )
            further = device_checks(runner, reference, subject.tolerance, subject.announce) if on_gpu else ()
            report = replace(report, checks=(*report.checks, *further))
        return replace(report, largest_states=by_kind(reference.largest_states))

    def interface(self, source: ModelSource, graphs: Sequence[TaskGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        (part,) = graphs
        return {
            "graph": interface(part.graph, part.states, options.dtype)
            | {
                "engine_states": [asdict(state) for state in part.engine_states],
                "prefill": recorded_chunks(prefill_chunks(source.config, part.graph, options)),
            },
            "model": text_model(source.config, part.graph.variables),
        }

    def bundle_bytes(self, graphs: Sequence[TaskGraph], options: GraphOptions, checking: CheckingOptions) -> int:
        """See `Task.bundle_bytes`."""
        (part,) = graphs
        config = part.skeleton.network.config
        # At its longest: whether weights stay on disk is not known yet.
        plan = plan_check(config, None, checking.decode_steps, teacher_forced=True)
        return bundles_size(part.states, config, len(plan.text_ids), options.num_logits_to_keep)

    def check_bytes(self, graphs: Sequence[TaskGraph], stored_bytes: int, checking: CheckingOptions) -> int:
        """See `Task.check_bytes`."""
        (part,) = graphs
        reference = 4 * part.parameters - plan_residency(part.skeleton.network, checking.placement).disk_bytes
        return max(reference, stored_bytes) if checking.low_memory else reference + stored_bytes


def _residency(network: nn.Module, source: ModelSource, checking: CheckingOptions) -> Residency:
    """Return where the reference's weights stay.

    Raises:
        NotEnoughMemoryError: a quantised checkpoint does not fit as a whole.
    """
    residency = plan_residency(network, checking.placement)
    require_resident(source, residency.offloaded)
    return residency
