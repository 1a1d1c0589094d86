"""Last hidden states for embeddings, and logits of classes: texts in, one answer each or one a token, no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from generic_export.errors import MissingTensorError, OptionError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.answers import open_answerer
from t2n_llm.check.options import CheckingOptions
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.interface import interface, text_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import RangeRequest
from t2n_llm.source.empty_model import instantiate
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.heads.check import bundles_size, check_head, plan_cases, run_head_reference, write_head_bundles
from t2n_llm.tasks.heads.model import BATCH, HEADS, INPUT_NAMES, STEPS, Head, build_head_graph
from t2n_llm.tasks.names import FEATURE_EXTRACTION, SEQUENCE_CLASSIFICATION
from t2n_llm.tasks.protocol import CheckSubject, Task, TaskGraph


class HeadTask(Task):
    """`(input_ids [B, S], attention_mask [B, S]) -> last_hidden_state [B, S, D] | logits [B, classes]`.

    Options of decoding (`num_logits_to_keep`, `batch`, `decode_steps`, `low_memory`) have no meaning here.
    """

    def __init__(self, head: Head) -> None:
        """Make the task of a head."""
        self.head = head
        self.name = head.name

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """See `Task.refuse`."""
        del options
        if adapter is not None:
            raise OptionError(
                f"--task {self.name} does not merge adapters.", "Merge it with peft first, and export the merged model."
            )
        if source.gguf is not None:
            raise OptionError(
                f"{source.name}: a GGUF file can be exported for text generation only.",
                "Give the original checkpoint, a folder or a hub id.",
            )
        if compression.calibrates():
            raise OptionError(
                f"calibrated algorithms run the language model; --task {self.name} has another head.",
                "Use an algorithm without calibration, such as --compress q4_0.",
            )

    def graphs(
        self, source: ModelSource, options: GraphOptions, ranges: RangeRequest | None = None
    ) -> tuple[TaskGraph, ...]:
        """See `Task.graphs`."""
        skeleton, graph = build_head_graph(
            source.config,
            self.head,
            options,
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            ranges=ranges,
        )
        return (TaskGraph(skeleton, graph, ranges=skeleton.ranges),)

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        network: nn.Module = instantiate(
            self.head.kind, source.config, torch.float32, "eager", "eager", source.trust_remote_code
        )
        return network

    def explained(self, error: MissingTensorError, graph: TaskGraph) -> MissingTensorError:
        """Say of a missing weight that it is the head's."""
        base = getattr(graph.skeleton.network, "base_model_prefix", "")
        inside = error.message.partition("'")[2].startswith(f"{base}.")
        if self.head.per_token or inside:
            return error
        return MissingTensorError(
            f"{error.message[:-1]}, a weight of the classification head.",
            "Give a checkpoint that was trained for classification, or use --task feature-extraction.",
        )

    def check(self, subject: CheckSubject) -> ValidationReport:
        """Compare a few batches of texts; see `heads.check`."""
        cases = plan_cases(self.head, subject.source.config, subject.tokenizer, batched=BATCH in subject.symbols)
        subject.reporter.stage("Running PyTorch in f32 for reference")
        expected = run_head_reference(
            subject.source,
            self.head,
            subject.network,
            subject.needed(),
            cases,
            placement=subject.checking.placement,
            overrides=subject.overrides,
        )
        if subject.bundles is not None:
            subject.bundles.mkdir()
            write_head_bundles(subject.bundles, self.head, cases, expected)
        with open_answerer(subject.archive, subject.checking) as answerer:
            return check_head(
                answerer,
                self.head,
                subject.options.dtype,
                cases,
                expected,
                tolerance=subject.tolerance,
                on_case=subject.announce,
            )

    def interface(self, source: ModelSource, graphs: Sequence[TaskGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        (part,) = graphs
        batch = BATCH if BATCH in part.graph.symbols else 1
        rows = [batch, STEPS] if self.head.per_token else [batch]
        inputs = {name: {"shape": [batch, STEPS], "dtype": "i64"} for name in INPUT_NAMES}
        outputs = {self.head.output: {"shape": [*rows, self._width(source.config)], "dtype": options.computes_in}}
        return {
            "graph": interface(part.graph, (), options.dtype) | {"tensors": inputs | outputs},
            "model": text_model(source.config, part.graph.variables) | self._model(source.config),
        }

    def bundle_bytes(self, graphs: Sequence[TaskGraph], options: GraphOptions, checking: CheckingOptions) -> int:
        """See `Task.bundle_bytes`."""
        (part,) = graphs
        config = part.skeleton.network.config
        cases = plan_cases(self.head, config, None, batched=BATCH in part.graph.symbols)
        return bundles_size(self.head, cases, self._width(config))

    def _model(self, config: Any) -> dict[str, Any]:
        padding = {"pad_token_id": getattr(config.get_text_config(decoder=True), "pad_token_id", None)}
        if self.head.per_token:
            return padding | {"hidden_size": self._width(config)}
        labels = {str(number): label for number, label in (config.id2label or {}).items()}
        return padding | {"id2label": labels, "problem_type": getattr(config, "problem_type", None)}

    def _width(self, config: Any) -> int:
        """Return the length of the output's last axis."""
        if self.head.per_token:
            return int(config.get_text_config(decoder=True).hidden_size)
        return int(config.num_labels)


class FeatureExtraction(HeadTask):
    """The last hidden states of a model."""

    def __init__(self) -> None:
        super().__init__(HEADS[FEATURE_EXTRACTION])


class SequenceClassification(HeadTask):
    """The logits of a classifier."""

    def __init__(self) -> None:
        super().__init__(HEADS[SEQUENCE_CLASSIFICATION])
