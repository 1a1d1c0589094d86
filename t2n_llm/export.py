"""`export_llm`: a Hugging Face causal LM in, a folder with a checked tract archive out.

source -> graph (no weights) -> weights streamed into the archive -> validated in the engine -> renamed into place.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from generic_export.errors import ArchiveError, OptionError, ValidationError
from generic_export.export import producer_version
from generic_export.nnef.archive import DEFAULT_TGZ_LEVEL, check_free_space
from generic_export.nnef.document import write_document
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.source import TensorSource
from quant.half import CastReport
from quant.recipe import RECIPE_FILE, recipe_text
from t2n_llm.bundles import make_bundles
from t2n_llm.checkpoint import graph_sources
from t2n_llm.compression import Compression
from t2n_llm.compression_options import DEFAULT_CALIBRATION, CompressionOptions, compressed
from t2n_llm.folder import (
    MANIFEST_FORMAT,
    TESTS_FOLDER,
    check_free,
    file_digests,
    keep_beside,
    put_in_place,
    staging_folder,
    write_manifest,
)
from t2n_llm.graph import GraphOptions, build_graph
from t2n_llm.model import Skeleton
from t2n_llm.reference import DEFAULT_DECODE_STEPS, check_memory, plan_check, run_reference, run_reference_apart
from t2n_llm.runner import ENGINES, open_runner
from t2n_llm.source import ModelSource, open_source
from t2n_llm.validate import ValidationReport, validate_archive

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16}

# archive form -> (file name, compression level)
ARCHIVES: Mapping[str, tuple[str, int | None]] = {
    "dir": ("model.nnef", None),
    "tar": ("model.nnef.tar", 0),
    "tgz": ("model.nnef.tgz", DEFAULT_TGZ_LEVEL),
}

_MANIFEST_ALLOWANCE = 1 << 20  # export.json, graph.nnef, headers


class Reporter(Protocol):
    """What an export tells while it works; the command line draws it, a library caller may ignore it."""

    def stage(self, title: str) -> None:
        """A new stage begins."""

    def progress(self, label: str, done: int, total: int) -> None:
        """`done` of `total` bytes are written; `label` is the tensor that comes next."""

    def warn(self, message: str) -> None:
        """Something the user should know, though the export goes on."""


class LogReporter:
    """Reports through `logging`: the default of the Python interface."""

    def stage(self, title: str) -> None:
        """Log the stage."""
        logger.info("%s", title)

    def progress(self, label: str, done: int, total: int) -> None:
        """Log the tensor at debug level."""
        logger.debug("%s (%d of %d bytes)", label, done, total)

    def warn(self, message: str) -> None:
        """Log a warning."""
        logger.warning("%s", message)


@dataclass(frozen=True)
class ExportOptions:
    """Every choice of an export, parsed; see `export_llm` for their meaning."""

    dtype: str = "f16"
    archive: str = "tar"
    check: bool = True
    force: bool = False
    num_logits_to_keep: int = 1
    batch: bool = False
    f32_linear_accumulation: bool = False
    f32_attention: bool = False
    f32_norm: bool = False
    keep_f32: tuple[str, ...] = ()
    low_memory: bool = False
    decode_steps: int = DEFAULT_DECODE_STEPS
    require_tokenizer: bool = True
    engine: str = "wheel"
    tract_binary: Path | None = None
    compression: CompressionOptions = field(default_factory=CompressionOptions)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(
                f"element type {self.dtype!r} is not supported: tract runs {' and '.join(DTYPES)} models.",
                f"Use --dtype {' or --dtype '.join(DTYPES)}.",
            )
        if self.archive not in ARCHIVES:
            raise OptionError(f"archive form {self.archive!r} is unknown.", f"Use one of {', '.join(ARCHIVES)}.")
        if self.engine not in ENGINES:
            raise OptionError(f"engine {self.engine!r} is unknown.", f"Use one of {', '.join(ENGINES)}.")
        if self.num_logits_to_keep < 0:
            raise OptionError(
                f"num_logits_to_keep is {self.num_logits_to_keep}.", "Use 1 (last token), 0 (all), or more."
            )
        if self.decode_steps < 1:
            raise OptionError(f"decode_steps is {self.decode_steps}.", "Decode at least one token, or skip the check.")

    def recorded(self) -> dict[str, Any]:
        """Return the options as plain data; where a binary lies on this machine is nobody else's business."""
        binary = self.tract_binary.name if self.tract_binary else None
        return asdict(self) | {"tract_binary": binary, "compression": self.compression.recorded()}

    def graph_options(self, trust_remote_code: bool) -> GraphOptions:
        """Return the part that decides the graph."""
        return GraphOptions(
            dtype=DTYPES[self.dtype],
            num_logits_to_keep=self.num_logits_to_keep,
            batched=self.batch,
            f32_linear_accumulation=self.f32_linear_accumulation,
            f32_attention=self.f32_attention,
            f32_norm=self.f32_norm,
            keep_f32=self.keep_f32,
            trust_remote_code=trust_remote_code,
        )


@dataclass(frozen=True)
class ExportResult:
    """What an export made.

    Attributes:
        output_dir: the folder.
        archive: the NNEF archive in it.
        manifest: content of `export.json`.
        validation: the four checks, or None when they were skipped.
    """

    output_dir: Path
    archive: Path
    manifest: Mapping[str, Any]
    validation: ValidationReport | None = field(default=None)


def export_llm(
    source: str,
    output_dir: str | Path | None = None,
    *,
    dtype: str = "f16",
    compress: str | None = None,
    recipe: str | Path | None = None,
    target_size: str | int | None = None,
    quantizers: str | None = None,
    calibration: str = DEFAULT_CALIBRATION,
    check: bool = True,
    archive: str = "tar",
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    num_logits_to_keep: int = 1,
    batch: bool = False,
    f32_linear_accumulation: bool = False,
    f32_attention: bool = False,
    f32_norm: bool = False,
    keep_f32: Sequence[str] = (),
    low_memory: bool = False,
    decode_steps: int = DEFAULT_DECODE_STEPS,
    require_tokenizer: bool = True,
    engine: str = "wheel",
    tract_binary: str | Path | None = None,
    reporter: Reporter | None = None,
) -> ExportResult:
    """Export a Hugging Face causal language model for tract, and prove it token by token.

    Args:
        source: hub id (`meta-llama/Llama-3.1-8B`) or local folder with config and safetensors.
        output_dir: folder to make; None takes the model's name, in the current folder.
        dtype: `f16` or `f32`: weights, activations and caches.
        compress: a recipe by name, `NAME` or `NAME:ALGORITHM`, such as `q4_0` or `q4_0+embeddings:gptq`; see
            docs/quantization.md.
        recipe: a recipe file (YAML), instead of a name.
        target_size: bytes that the weights may take (`900MB`), for recipes that fill a size.
        quantizers: `module:attribute` of a dict of further algorithms.
        calibration: text for the calibrated algorithms; see `CompressionOptions`.
        check: validate in the pip-installed engine, and write test bundles.
        archive: `tar`, `tgz` or `dir`.
        force: replace an earlier export of that name.
        revision, token, trust_remote_code: see `open_source`.
        num_logits_to_keep: positions whose logits are given, from the end; 0 for all (speculative decoding).
        batch: make the batch a symbol `B`.
        f32_linear_accumulation, f32_attention, f32_norm: f32 islands in an f16 graph, see `TractNNEF`.
        keep_f32: shell patterns of parameters that stay in f32, for values that f16 cannot hold.
        low_memory: run the PyTorch reference in a process that ends before the engine starts.
        decode_steps: tokens decoded by the check.
        require_tokenizer: refuse a source without tokenizer.
        engine: what checks: `wheel` (pip-installed tract) or `cli` (the `tract` command).
        tract_binary: the command to check with; implies `cli`.
        reporter: told what happens; None logs.

    Returns:
        The archive, the manifest and the validation report.

    Raises:
        T2NError: see `generic_export.errors`; nothing is left behind, except that an archive which fails its
            validation is kept beside the target as `<output_dir>.failed`, with its report.
    """
    compression = CompressionOptions(compress, Path(recipe) if recipe else None, target_size, quantizers, calibration)
    options = ExportOptions(
        dtype=compression.dtype() or dtype,
        compression=compression,
        archive=archive,
        check=check,
        force=force,
        num_logits_to_keep=num_logits_to_keep,
        batch=batch,
        f32_linear_accumulation=f32_linear_accumulation,
        f32_attention=f32_attention,
        f32_norm=f32_norm,
        keep_f32=tuple(keep_f32),
        low_memory=low_memory,
        decode_steps=decode_steps,
        require_tokenizer=require_tokenizer,
        engine=engine,
        tract_binary=Path(tract_binary) if tract_binary is not None else None,
    )
    reporter = reporter or LogReporter()
    if output_dir is not None:
        check_free(Path(output_dir), force)
    if check:
        _require_engine(options)
    reporter.stage(f"Reading {source}")
    model = open_source(
        source,
        revision=revision,
        token=token,
        trust_remote_code=trust_remote_code,
        require_tokenizer=require_tokenizer,
    )
    target = Path(output_dir) if output_dir is not None else Path(model.short_name)
    check_free(target, force)
    return _Export(model, target, options, reporter).run()


def _require_engine(options: ExportOptions) -> None:
    """Ask the engine for its version, so that a missing one is known before the work and not after it."""
    with open_runner(Path(), (), options.dtype, engine=options.engine, tract_binary=options.tract_binary) as runner:
        logger.info("%s %s will check", runner.engine_name, runner.engine_version)


class _Export:
    """One export, stage by stage; each stage reads what the one before made."""

    def __init__(self, source: ModelSource, target: Path, options: ExportOptions, reporter: Reporter) -> None:
        self.source = source
        self.target = target
        self.options = options
        self.reporter = reporter
        self.casts = CastReport()
        self.compression: Compression | None = None

    def run(self) -> ExportResult:
        checkpoint = self.source.checkpoint()
        self.reporter.stage("Capturing the graph")
        skeleton, graph = build_graph(
            self.source.config,
            self.options.graph_options(self.source.trust_remote_code),
            name=self.source.public_name,
            revision=self.source.revision,
        )
        sources: Mapping[str, TensorSource] = graph_sources(graph, skeleton, checkpoint, self.casts)
        with compressed(self.options.compression, self.source, skeleton, graph, sources, self.reporter) as compression:
            self.compression = compression
            if compression is not None:
                graph, sources = compression.graph, compression.sources
            return self._make(skeleton, graph, sources)

    def _make(self, skeleton: Skeleton, graph: NnefGraph, sources: Mapping[str, TensorSource]) -> ExportResult:
        """Write, check and put in place."""
        self._check_disk(sources, skeleton)
        if self.options.check:
            check_memory(sum(_volume(variable.shape) for variable in graph.variables))
        with staging_folder(self.target) as staging:
            archive = self._write_archive(staging, graph, sources)
            self._report_overflows()
            copied = self._copy_companions(staging)
            if self.compression is not None:
                (staging / RECIPE_FILE).write_text(recipe_text(self.compression.recipe), encoding="utf-8")
            validation = self._validate(staging, archive, skeleton) if self.options.check else None
            self.reporter.stage("Recording checksums")
            manifest = self._manifest(staging, archive, skeleton, graph, copied, validation)
            write_manifest(staging, manifest)
            if validation is not None and not validation.passed:
                self._keep_failed(staging, validation)
            put_in_place(staging, self.target, self.options.force)
        return ExportResult(self.target, self.target / archive.name, manifest, validation)

    def _check_disk(self, sources: Mapping[str, TensorSource], skeleton: Skeleton) -> None:
        # How far a .tgz shrinks is not known before it is written.
        weights = 0 if self.options.archive == "tgz" else sum(source.nbytes for source in sources.values())
        beside = sum(file.stat().st_size for file in self._companions())
        if self.options.check:
            plan = plan_check(skeleton.config, None, self.options.decode_steps)
            beside += _bundles_size(skeleton, len(plan.text_ids), self.options.num_logits_to_keep)
        check_free_space(self.target, weights + beside + _MANIFEST_ALLOWANCE)

    def _write_archive(self, staging: Path, graph: NnefGraph, sources: Mapping[str, TensorSource]) -> Path:
        name, level = ARCHIVES[self.options.archive]
        self.reporter.stage(f"Writing {name}")
        return write_document(staging / name, graph, sources, compression_level=level, progress=self.reporter.progress)

    def _report_overflows(self) -> None:
        for name, overflow in self.casts.overflows.items():
            self.reporter.warn(
                f"{name}: {overflow.count} values up to {overflow.max_abs:.3g} do not fit f16 and were set to its "
                f"largest, 65504. Keep that tensor in f32: --keep-f32 {name}"
            )

    def _companions(self) -> list[Path]:
        """Return what a runtime needs beside the archive; configs, tokenizer, chat template."""
        configs = [self.source.folder / name for name in ("config.json", "generation_config.json")]
        return [file for file in (*configs, *self.source.tokenizer_files()) if file.is_file()]

    def _copy_companions(self, staging: Path) -> list[str]:
        companions = self._companions()
        for file in companions:
            shutil.copyfile(file, staging / file.name)
        return [file.name for file in companions]

    def _validate(self, staging: Path, archive: Path, skeleton: Skeleton) -> ValidationReport:
        self.reporter.stage("Running PyTorch in f32 for reference")
        tokenizer = self.source.tokenizer() if self.options.require_tokenizer else None
        plan = plan_check(skeleton.config, tokenizer, self.options.decode_steps)
        run = run_reference_apart if self.options.low_memory else run_reference
        overrides = self.compression.weights_in(archive) if self.compression is not None else None
        reference = run(self.source.folder, plan, trust_remote_code=self.source.trust_remote_code, overrides=overrides)
        tests = staging / TESTS_FOLDER
        tests.mkdir()
        caches = {cache.input_name: cache.output_name for cache in skeleton.caches}
        for bundle in make_bundles(reference, skeleton.caches, self.options.num_logits_to_keep):
            bundle.write(tests, caches)
        options = self.options
        with open_runner(
            archive, skeleton.caches, options.dtype, engine=options.engine, tract_binary=options.tract_binary
        ) as runner:
            return validate_archive(
                runner,
                reference,
                options.dtype,
                on_check=lambda name: self.reporter.stage(f"Checking in tract: {name}"),
            )

    def _keep_failed(self, staging: Path, validation: ValidationReport) -> None:
        failed = keep_beside(staging, self.target, "failed")
        raise FailedValidationError(
            self.source.name,
            f"The archive and its report are kept in {failed}; for f16 try --f32-attention, --f32-norm or --dtype f32.",
            validation,
        )

    def _manifest(
        self,
        staging: Path,
        archive: Path,
        skeleton: Skeleton,
        graph: NnefGraph,
        copied: Sequence[str],
        validation: ValidationReport | None,
    ) -> dict[str, Any]:
        text_config = skeleton.config.get_text_config(decoder=True)
        return {
            "format": MANIFEST_FORMAT,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "source": {
                "name": self.source.public_name,
                "revision": self.source.revision,
                "architecture": type(skeleton.module.causal_lm).__name__,
                "model_type": skeleton.config.model_type,
            },
            "versions": {
                "t2n-llm": producer_version(),
                **{name: version(name) for name in ("torch", "transformers", "safetensors", "tract")},
            },
            "options": self.options.recorded(),
            "archive": archive.name,
            "graph": {
                "inputs": list(graph.inputs),
                "outputs": list(graph.outputs),
                "symbols": list(graph.symbols),
                "caches": [asdict(cache) for cache in skeleton.caches],
                "dtype": self.options.dtype,
            },
            "model": {
                "vocab_size": text_config.vocab_size,
                "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
                "sliding_window": getattr(text_config, "sliding_window", None),
                "parameters": sum(_volume(variable.shape) for variable in graph.variables),
            },
            "f16_overflows": {name: asdict(overflow) for name, overflow in self.casts.overflows.items()},
            "companions": list(copied),
            "compression": self.compression.summary() if self.compression is not None else None,
            "validation": validation.asdict() if validation is not None else None,
            "files": file_digests(staging),
        }


class FailedValidationError(ValidationError):
    """A `ValidationError` that carries its report."""

    def __init__(self, subject: str, hint: str, report: ValidationReport) -> None:
        bad = next(check for check in report.checks if not check.passed)
        detail = f" ({bad.note})" if bad.note else ""
        super().__init__(
            f"{subject}: tract disagrees with PyTorch in the {bad.name} check: max abs error "
            f"{bad.max_abs_error:.3g}, KL {bad.max_kl_divergence:.3g}, same token in {bad.same_top1} of {len(bad.steps)}"
            f"{detail}.",
            hint,
        )
        self.report = report


def _bundles_size(skeleton: Skeleton, length: int, num_logits_to_keep: int) -> int:
    """Return about how many bytes `make_bundles` writes for a text of `length` tokens."""
    caches = sum(_volume(cache.shape(1, length)) for cache in skeleton.caches)
    kept = length if num_logits_to_keep == 0 else min(num_logits_to_keep, length)
    logits = kept * skeleton.config.get_text_config(decoder=True).vocab_size
    # Caches: as output and as `_concat` in two bundles, as input in one. Logits: in all four.
    return 4 * (5 * caches + 4 * logits)


def _volume(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def archive_in(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the archive that an export folder's manifest names.

    Raises:
        ArchiveError: it is not there.
    """
    archive = folder / str(manifest.get("archive"))
    if not archive.exists():
        raise ArchiveError(f"{folder}: the archive {archive.name} is missing.", "Export the model again.")
    return archive
