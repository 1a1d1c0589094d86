"""Every single-pass task: one class, whose rows are `table.HEADS`; no state is kept from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from generic_export.errors import MissingTensorError, OptionError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.answers import open_answerer
from t2n_llm.check.options import CheckingOptions
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.interface import interface
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import RangeRequest
from t2n_llm.source.empty_model import instantiate
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.frontends.frontend import frontend_graphs
from t2n_llm.tasks.heads.cases import plan_cases
from t2n_llm.tasks.heads.check import check_head, run_head_reference, write_head_bundles
from t2n_llm.tasks.heads.described import described_model, described_tensors
from t2n_llm.tasks.heads.image_size import image_size_of
from t2n_llm.tasks.heads.inputs import BATCH, Reading, reading_of
from t2n_llm.tasks.heads.kinds import kind_of
from t2n_llm.tasks.heads.model import HeadSkeleton, build_head_graph
from t2n_llm.tasks.heads.pooling import Pooling, pooling_of
from t2n_llm.tasks.heads.table import Head, Reads
from t2n_llm.tasks.heads.towers import SCORES, cut_into_towers, open_towers
from t2n_llm.tasks.protocol import CheckSubject, Task, TaskGraph

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
        if adapter is not None:
            raise OptionError(
                f"--task {self.name} does not merge adapters.",
                "Merge it with peft first, then export the merged model.",
            )
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

    def graphs(
        self, source: ModelSource, options: GraphOptions, ranges: RangeRequest | None = None
    ) -> tuple[TaskGraph, ...]:
        """See `Task.graphs`."""
        skeleton, graph = build_head_graph(
            source.config,
            replace(self.head, kind=kind_of(self.head, source.config)),
            options,
            image_size=image_size_of(source.config, source.folder, options.image_size),
            pooling=self._pooling(source),
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            ranges=ranges,
            source=source,
        )
        sensed = () if self.head.reads in _TEXTS_ALONE else (name for name in graph.inputs if name in _SENSED)
        fronts = (each for name in sensed for each in frontend_graphs(source, options, name))
        if not options.towers:
            return (*fronts, TaskGraph(skeleton, graph, ranges=skeleton.ranges))
        towers = cut_into_towers(graph, skeleton.outputs, options.computes_in)
        return (*fronts, *(TaskGraph(skeleton, part, role, ranges=skeleton.ranges) for role, part in towers.items()))

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        kind = kind_of(self.head, source.config)
        network: nn.Module = instantiate(kind, source.config, torch.float32, "eager", "eager", source.trust_remote_code)
        return network

    def explained(self, error: MissingTensorError, graph: TaskGraph) -> MissingTensorError:
        """Say of a missing weight that it is the head's."""
        base = getattr(graph.skeleton.network, "base_model_prefix", "")
        inside = error.message.partition("'")[2].startswith(f"{base}.")
        if self.head.kind.auto_class == "AutoModel" or inside:
            return error
        what = "classification head" if self.head.labelled else f"head of a {self.head.kind.description}"
        return MissingTensorError(
            f"{error.message[:-1]}, a weight of the {what}.",
            f"Use a checkpoint that was trained for {self.name}, or --task feature-extraction.",
        )

    def check(self, subject: CheckSubject) -> ValidationReport:
        """Compare a few questions; see `heads.cases`."""
        source = subject.source
        reading = self._reading(source, subject.network, subject.options, batched=BATCH in subject.symbols)
        cases = plan_cases(self.head, reading, source.config, subject.tokenizer if self.reads_text else None)
        subject.reporter.stage("Running PyTorch in f32 for reference")
        expected = run_head_reference(
            source,
            kind_of(self.head, source.config),
            subject.network,
            subject.needed(),
            cases,
            pooling=self._pooling(source),
            placement=subject.checking.placement,
            overrides=subject.overrides,
        )
        outputs = self.head.read_of(expected[0])
        if subject.bundles is not None:
            subject.bundles.mkdir()
            write_head_bundles(subject.bundles, cases, outputs, expected)
        towers = SCORES in subject.archives
        opened = (
            open_towers(subject.archives, reading.names, outputs, subject.checking)
            if towers
            else open_answerer(subject.archive, subject.checking)
        )
        with opened as answerer:
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

    def interface(self, source: ModelSource, graphs: Sequence[TaskGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        skeleton = _skeleton(graphs[-1])
        stored = [variable for part in graphs for variable in part.graph.variables]
        return {
            "graph": interface(graphs[-1].graph, (), options.dtype)
            | {"interface": described_tensors(skeleton.reading, skeleton.outputs, options.computes_in)},
            "model": described_model(self.head, skeleton, stored),
        }

    def bundle_bytes(self, graphs: Sequence[TaskGraph], options: GraphOptions, checking: CheckingOptions) -> int:
        """See `Task.bundle_bytes`."""
        skeleton = _skeleton(graphs[-1])
        reading = skeleton.reading
        cases = plan_cases(self.head, reading, skeleton.config, None)
        traced = sum(prod(each.shape(reading.traced)) for each in reading.inputs)
        answered = sum(
            prod(reading.traced[axis] if isinstance(axis, str) else axis or 1 for axis in axes)
            for axes in skeleton.outputs.values()
        )
        return sum(8 * case.values + 4 * (answered * case.values // traced + 1) for case in cases)

    def _pooling(self, source: ModelSource) -> Pooling | None:
        return pooling_of(source.folder) if self.head.pooled else None

    def _reading(self, source: ModelSource, network: nn.Module, options: GraphOptions, *, batched: bool) -> Reading:
        size = image_size_of(source.config, source.folder, options.image_size)
        found = reading_of(self.head, network, size)
        return Reading(found.inputs, found.lengths, reads_batches=batched)


def _skeleton(part: TaskGraph) -> HeadSkeleton:
    skeleton = part.skeleton
    if not isinstance(skeleton, HeadSkeleton):
        raise TypeError(f"{type(skeleton).__name__} has no head")
    return skeleton


__all__ = ["HeadTask"]
