"""Every single-pass task: one class, whose rows are `table.HEADS`; no state is kept from call to call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from generic_export.errors import MissingTensorError, OptionError
from generic_export.nnef.graph import NnefVariable
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.options import CheckingOptions
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.interface import interface, text_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import instantiate
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.frontends.frontend import frontend_graphs
from t2n_llm.tasks.heads.cases import HeadCase, plan_cases
from t2n_llm.tasks.heads.check import check_head, run_head_reference, write_head_bundles
from t2n_llm.tasks.heads.image_size import image_size_of
from t2n_llm.tasks.heads.inputs import BATCH, Reading, reading_of
from t2n_llm.tasks.heads.model import HeadModule, build_head_graph, head_module, typical_inputs
from t2n_llm.tasks.heads.pooling import Pooling, pooling_of
from t2n_llm.tasks.heads.table import Head, Reads, kind_of
from t2n_llm.tasks.heads.towers import cut_into_towers, open_archives
from t2n_llm.tasks.protocol import CheckSubject, ReferenceAnswers, Task

_SENSED = ("pixel_values", "input_values", "input_features")  # what a front end can make
_TEXTS_ALONE = (Reads.TEXT, Reads.CHOICES)


class HeadTask(Task):
    """`(*inputs) -> (*outputs)` as a row of the table says.

    Options of decoding (`num_logits_to_keep`, `batch`, `decode_steps`, `low_memory`) have no meaning here.
    """

    def __init__(self, head: Head) -> None:
        """Make the task of a head."""
        self.head = head
        self.name = head.name
        self.reads_text = head.reads in (*_TEXTS_ALONE, Reads.IMAGE_AND_TEXTS)

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """See `Task.refuse`."""
        if options.image_size is not None and self.head.reads in (*_TEXTS_ALONE, Reads.SOUND, Reads.SERIES):
            raise OptionError(f"--task {self.name} takes no images.", "Omit --image-size.")
        if options.towers and self.head.reads is not Reads.IMAGE_AND_TEXTS:
            raise OptionError(f"--task {self.name} does not compare images with texts.", "Omit --towers.")
        super().refuse(source, options, compression, adapter)
        if source.gguf is not None:
            raise OptionError(
                f"{source.name}: GGUF files are supported for text generation only.",
                "Use the original checkpoint, a folder or a hub id.",
            )
        if compression.calibrates():
            raise OptionError(
                f"calibration runs a language model, which --task {self.name} does not have.",
                "Use an algorithm without calibration, such as --compress q4_0.",
            )

    def graphs(self, source: ModelSource, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """See `Task.graphs`."""
        graph = build_head_graph(
            source.config,
            replace(self.head, kind=kind_of(self.head, source.config)),
            options,
            image_size=image_size_of(source.config, source.folder, options.image_size),
            pooling=self._pooling(source),
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            source=source,
        )
        sensed = () if self.head.reads in _TEXTS_ALONE else (name for name in graph.inputs if name in _SENSED)
        return (*(each for name in sensed for each in frontend_graphs(source, options, name)), graph)

    def typical_inputs(
        self, graph: ModelGraph, tokens: Sequence[int], given: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Task.typical_inputs`."""
        del given
        return typical_inputs(graph, tokens)

    def archives(self, graph: ModelGraph, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """See `Task.archives`."""
        if not options.towers:
            return (graph,)
        towers = cut_into_towers(graph.document, head_module(graph).outputs, options.computes_in)
        return tuple(replace(graph, role=role, nnef=document) for role, document in towers.items())

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        kind = kind_of(self.head, source.config)
        network: nn.Module = instantiate(kind, source.config, torch.float32, "eager", "eager", source.trust_remote_code)
        return network

    def explained(self, error: MissingTensorError, graph: ModelGraph) -> MissingTensorError:
        """Say of a missing weight that it is the head's."""
        base = getattr(graph.network, "base_model_prefix", "")
        inside = error.message.partition("'")[2].startswith(f"{base}.")
        if self.head.kind.auto_class == "AutoModel" or inside:
            return error
        what = "classification head" if self.head.labelled else f"head of a {self.head.kind.description}"
        return MissingTensorError(
            f"{error.message[:-1]}, a weight of the {what}.",
            f"Use a checkpoint that was trained for {self.name}, or --task feature-extraction.",
        )

    def reference(self, subject: CheckSubject) -> ReferenceAnswers:
        """Answer a few questions; see `heads.cases`."""
        subject.reporter.stage("Running PyTorch in f32 for reference")
        model = subject.reference_model(kind_of(self.head, subject.source.config))
        cases = self._cases(subject, self._reading_of(subject))
        return ReferenceAnswers(run_head_reference(model, cases, self._pooling(subject.source)))

    def check(
        self, subject: CheckSubject, reference: ReferenceAnswers, original: ReferenceAnswers | None = None
    ) -> ValidationReport:
        """Compare the answers to those questions; see `heads.check`."""
        del original
        reading, expected = self._reading_of(subject), reference.answers
        cases, outputs = self._cases(subject, reading), self.head.read_of(expected[0])
        if subject.bundles is not None:
            subject.bundles.mkdir()
            write_head_bundles(subject.bundles, cases, outputs, expected)
        with open_archives(subject.archives, reading.names, outputs, subject.checking) as answerer:
            return check_head(
                answerer,
                self.head,
                outputs,
                subject.options.dtype,
                cases,
                expected,
                tolerance=subject.tolerance,
                on_case=subject.announce,
            )

    def _cases(self, subject: CheckSubject, reading: Reading) -> Sequence[HeadCase]:
        tokenizer = subject.tokenizer if self.reads_text else None
        return plan_cases(self.head, reading, subject.source.config, tokenizer)

    def interface(self, source: ModelSource, graphs: Sequence[ModelGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        module = head_module(graphs[-1])
        stored = [variable for part in graphs for variable in part.document.variables]
        return {
            "graph": interface(graphs[-1].document, (), options.dtype)
            | {"interface": described_tensors(module, options.computes_in)},
            "model": described_model(module, graphs[-1].config, stored),
        }

    def bundle_bytes(self, graphs: Sequence[ModelGraph], options: GraphOptions, checking: CheckingOptions) -> int:
        """See `Task.bundle_bytes`."""
        module = head_module(graphs[-1])
        reading = module.reading
        cases = plan_cases(self.head, reading, graphs[-1].config, None)
        traced = sum(prod(each.shape(reading.traced)) for each in reading.inputs)
        answered = sum(
            prod(reading.traced[axis] if isinstance(axis, str) else axis or 1 for axis in axes)
            for axes in module.outputs.values()
        )
        return sum(8 * case.values + 4 * (answered * case.values // traced + 1) for case in cases)

    def _pooling(self, source: ModelSource) -> Pooling | None:
        return pooling_of(source.folder) if self.head.pooled else None

    def _reading_of(self, subject: CheckSubject) -> Reading:
        source = subject.source
        size = image_size_of(source.config, source.folder, subject.options.image_size)
        found = reading_of(self.head, subject.network, size)
        return Reading(found.inputs, found.lengths, reads_batches=BATCH in subject.symbols)


# --- entries of export.json --------------------------------------------------------------------------


def described_tensors(module: HeadModule, dtype: str) -> dict[str, Any]:
    """Return shape and element type of each input and output; a size that follows from those of the inputs is null.

    Args:
        module: the model.
        dtype: that the graph computes in.
    """
    reading = module.reading
    inputs = {
        each.name: {"shape": list(reading.axes(each)), "dtype": "i64" if each.is_integer else dtype}
        for each in reading.inputs
    }
    return inputs | {name: {"shape": list(axes), "dtype": dtype} for name, axes in module.outputs.items()}


def described_model(module: HeadModule, config: Any, variables: Iterable[NnefVariable]) -> dict[str, Any]:
    """Return what a reader of an archive should know of its model.

    Args:
        module: the model.
        config: of transformers.
        variables: everything that is stored.
    """
    stored = list(variables)
    text = config.get_text_config(decoder=True)
    found: dict[str, Any] = {"parameters": sum(variable.values for variable in stored)}
    if hasattr(text, "vocab_size"):
        found = text_model(config, stored) | {"pad_token_id": getattr(text, "pad_token_id", None)}
    if module.head.labelled:
        labels = {str(number): label for number, label in (config.id2label or {}).items()}
        found |= {"id2label": labels, "problem_type": getattr(config, "problem_type", None)}
    elif isinstance(getattr(text, "hidden_size", None), int):
        found["hidden_size"] = text.hidden_size
    if module.pooling is not None:
        found["pooling"] = module.pooling.recorded()
    return found | {"inputs": {each.name: each.values.value for each in module.reading.inputs}}


__all__ = ["HeadTask", "described_model", "described_tensors"]
