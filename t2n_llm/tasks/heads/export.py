"""`export_head`: a Hugging Face model in, a folder with a checked archive of its hidden states or class logits out.

source -> graph (no weights) -> weights streamed into the archive -> compared in the engine -> renamed into place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from generic_export.errors import MissingTensorError, OptionError
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.checkpoint import Checkpoint
from t2n_llm.check.answers import open_answerer
from t2n_llm.compress.stored_form import StoredForm, stored_form
from t2n_llm.export.folder import TESTS_FOLDER
from t2n_llm.export.manifest import Manifest, interface, origin, text_model
from t2n_llm.export.options import ExportOptions, Reporter
from t2n_llm.export.pipeline import ExportResult, Stages, open_stages
from t2n_llm.export.plan import ExportPlan
from t2n_llm.tasks.heads.check import (
    HeadReport,
    bundles_size,
    check_head,
    plan_cases,
    run_head_reference,
    write_head_bundles,
)
from t2n_llm.tasks.heads.model import BATCH, HEAD_TASKS, INPUT_NAMES, STEPS, HeadSkeleton, HeadTask, build_head_graph
from t2n_llm.tasks.names import FEATURE_EXTRACTION
from t2n_llm.weights.names import graph_sources

HeadResult: TypeAlias = ExportResult[HeadReport]


def export_head(
    source: str,
    output_dir: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> HeadResult:
    """Export the last hidden states of a model, or a classifier, and compare it with PyTorch.

    The archive takes `input_ids` int64 [B, S] and `attention_mask` int64 [B, S] (1 for a token, 0 for padding), and gives
    `last_hidden_state` [B, S, D] or `logits` [B, classes].

    Args:
        source: hub id or local folder.
        output_dir: folder to make; None takes the model's name, in the current folder.
        options: every choice; `task` is one of `HEAD_TASKS`. None takes the defaults, for `feature-extraction`. Those of
            decoding (`num_logits_to_keep`, `batch`, `decode_steps`, `low_memory`) have no meaning here.
        revision, token, trust_remote_code: see `open_source`.
        reporter: told what happens; None logs.

    Raises:
        T2NError: see `generic_export.errors`; nothing is left behind, except that an archive which fails its comparison is
            kept beside the target as `<output_dir>.failed`, with its report.
    """
    options = options or ExportOptions(task=FEATURE_EXTRACTION)
    stages = open_stages(
        source, output_dir, options, reporter, revision=revision, token=token, trust_remote_code=trust_remote_code
    )
    return _HeadExport(stages).run()


def plan_head_export(
    source: str,
    output_dir: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> ExportPlan:
    """Say what `export_head` would write; the graph is captured, no weight is read and no file is made."""
    stages = open_stages(
        source,
        output_dir,
        options or ExportOptions(task=FEATURE_EXTRACTION),
        reporter,
        revision=revision,
        token=token,
        trust_remote_code=trust_remote_code,
        dry=True,
    )
    return _HeadExport(stages).plan()


@dataclass(frozen=True)
class _Prepared:
    """Everything that is known of an export before a weight is read."""

    checkpoint: Checkpoint
    skeleton: HeadSkeleton
    stored: StoredForm
    unused: tuple[str, ...]


class _HeadExport:
    """One export, stage by stage."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.source = stages.source
        self.options = stages.options
        self.task = _head_task(self.options, stages)

    @contextmanager
    def prepared(self, *, dry: bool = False) -> Iterator[_Prepared]:
        """Capture the graph and find its weights; no weight is read."""
        checkpoint = self.source.checkpoint()
        if not dry:
            self.options.compression.prepare(self.stages.reporter)
        self.stages.reporter.stage("Capturing the graph")
        skeleton, graph = build_head_graph(
            self.source.config,
            self.task,
            self.options.graph_options(self.source.trust_remote_code),
            name=self.source.public_name,
            revision=self.source.revision,
        )
        sources = self._sources(graph, skeleton, checkpoint)
        with stored_form(
            self.options.compression, self.source, checkpoint, skeleton, graph, sources, self.stages.reporter, dry=dry
        ) as stored:
            yield _Prepared(checkpoint, skeleton, stored, sources.unused)

    def _sources(self, graph: NnefGraph, skeleton: HeadSkeleton, checkpoint: Checkpoint) -> Any:
        try:
            return graph_sources(graph, skeleton, checkpoint, self.stages.casts)
        except MissingTensorError as error:
            base = getattr(skeleton.network, "base_model_prefix", "")
            inside = error.message.partition("'")[2].startswith(f"{base}.")
            if self.task.per_token or inside:
                raise
            raise MissingTensorError(
                f"{error.message[:-1]}, a weight of the classification head.",
                "Give a checkpoint that was trained for classification, or use --task feature-extraction.",
            ) from error

    def plan(self) -> ExportPlan:
        """Say what `run` would do."""
        with self.prepared(dry=True) as ready:
            parameters = sum(prod(variable.shape) for variable in ready.stored.graph.variables)
            return self.stages.plan(ready.stored.plan, 4 * parameters + ready.stored.plan.total_bytes)

    def run(self) -> HeadResult:
        """Export."""
        with self.prepared() as ready:
            return self.stages.make(
                ready.stored,
                ready.unused,
                self.stages.identity(ready.checkpoint),
                bundle_bytes=lambda: self._bundle_bytes(ready),
                validate=lambda staging, archive: self._validate(staging, archive, ready),
                describe=lambda: self._described(ready),
            )

    def _bundle_bytes(self, ready: _Prepared) -> int:
        cases = plan_cases(self.task, ready.skeleton.config, None, batched=ready.skeleton.batched)
        return bundles_size(self.task, cases, _width(ready.skeleton))

    def _validate(self, staging: Path, archive: Path, ready: _Prepared) -> HeadReport:
        options, reporter = self.options, self.stages.reporter
        tokenizer = self.source.tokenizer() if options.require_tokenizer else None
        cases = plan_cases(self.task, ready.skeleton.config, tokenizer, batched=ready.skeleton.batched)
        reporter.stage("Running PyTorch in f32 for reference")
        expected = run_head_reference(
            self.source,
            self.task,
            ready.skeleton.network,
            ready.stored.needed,
            cases,
            placement=options.placement,
            overrides=ready.stored.overrides(archive),
        )
        tests = staging / TESTS_FOLDER
        tests.mkdir()
        write_head_bundles(tests, self.task, cases, expected)
        with open_answerer(archive, engine=options.engine, tract_binary=options.tract_binary) as answerer:
            return check_head(
                answerer,
                self.task,
                options.dtype,
                cases,
                expected,
                on_case=lambda name: reporter.stage(f"Checking in tract: {name}"),
            )

    def _described(self, ready: _Prepared) -> Manifest:
        return {
            **origin(self.source, self.options, ready.skeleton.network),
            "graph": _interface(ready, self.options.dtype),
            "model": _model(ready),
        }


def _head_task(options: ExportOptions, stages: Stages) -> HeadTask:
    """Return the task, with everything refused that it cannot be combined with."""
    if options.task not in HEAD_TASKS:
        raise OptionError(f"{options.task!r} is no task of a head.", f"Use one of {', '.join(HEAD_TASKS)}.")
    if stages.source.gguf is not None:
        raise OptionError(
            f"{stages.source.name}: a GGUF file can be exported for text generation only.",
            "Give the original checkpoint, a folder or a hub id.",
        )
    if options.compression.calibrates():
        raise OptionError(
            f"calibrated algorithms run the language model; --task {options.task} has another head.",
            "Use an algorithm without calibration, such as --compress q4_0.",
        )
    return HEAD_TASKS[options.task]


def _interface(ready: _Prepared, dtype: str) -> dict[str, Any]:
    batch = BATCH if ready.skeleton.batched else 1
    task = ready.skeleton.task
    rows = [batch, STEPS] if task.per_token else [batch]
    inputs = {name: {"shape": [batch, STEPS], "dtype": "i64"} for name in INPUT_NAMES}
    outputs = {task.output: {"shape": [*rows, _width(ready.skeleton)], "dtype": dtype}}
    return interface(ready.stored.graph, (), dtype) | {"tensors": inputs | outputs}


def _model(ready: _Prepared) -> dict[str, Any]:
    config = ready.skeleton.config
    record = text_model(config, ready.stored.graph.variables)
    record["pad_token_id"] = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    if ready.skeleton.task.per_token:
        return record | {"hidden_size": _width(ready.skeleton)}
    labels = {str(number): label for number, label in (config.id2label or {}).items()}
    return record | {"id2label": labels, "problem_type": getattr(config, "problem_type", None)}


def _width(skeleton: HeadSkeleton) -> int:
    """Return the length of the output's last axis."""
    if skeleton.task.per_token:
        return int(skeleton.config.get_text_config(decoder=True).hidden_size)
    return int(skeleton.config.num_labels)
