"""Every choice of an export, parsed; and what an export tells while it works."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from generic_export.errors import OptionError
from generic_export.write.archive import DEFAULT_TGZ_LEVEL, WriteProgress
from t2n_llm.check.reference import DEFAULT_DECODE_STEPS
from t2n_llm.check.runner import ENGINES
from t2n_llm.compress.options import DEFAULT_CALIBRATION, CompressionOptions
from t2n_llm.graph.document import GraphOptions
from t2n_llm.tasks.names import TASKS, TEXT_GENERATION
from t2n_llm.weights.placement import Placement

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16}

# archive form -> (file name, compression level)
ARCHIVES: Mapping[str, tuple[str, int | None]] = {
    "dir": ("model.nnef", None),
    "tar": ("model.nnef.tar", 0),
    "tgz": ("model.nnef.tgz", DEFAULT_TGZ_LEVEL),
}

# Options that decide what happens around the archive, and nothing in it.
_OUTSIDE_THE_ARCHIVE = (
    *("check", "force", "resume", "low_memory", "decode_steps", "require_tokenizer", "engine", "tract_binary"),
    "placement",
)


class Reporter(Protocol):
    """What an export tells while it works; the command line draws it, a library caller may ignore it."""

    def stage(self, title: str) -> None:
        """A new stage begins."""

    def progress(self, progress: WriteProgress) -> None:
        """So much of the archive is written; told several times a second, the last time when everything is."""

    def warn(self, message: str) -> None:
        """Something the user should know, though the export goes on."""


class LogReporter:
    """Reports through `logging`: the default of the Python interface."""

    def stage(self, title: str) -> None:
        """Log the stage."""
        logger.info("%s", title)

    def progress(self, progress: WriteProgress) -> None:
        """Log at debug level."""
        logger.debug("%s (%d of %d bytes)", progress.label, progress.done_bytes, progress.total_bytes)

    def warn(self, message: str) -> None:
        """Log a warning."""
        logger.warning("%s", message)


KV_CACHES = {"int8": 8, "int4": 4}
"""Bits of a quantised cache, by the name of the option."""


@dataclass(frozen=True)
class ExportOptions:
    """Every choice of an export, parsed; see `export_llm` for their meaning."""

    task: str = TEXT_GENERATION
    dtype: str = "f16"
    archive: str = "tar"
    check: bool = True
    force: bool = False
    resume: bool = False
    num_logits_to_keep: int = 1
    batch: bool = False
    f32_linear_accumulation: bool = False
    f32_attention: bool = False
    f32_norm: bool = False
    stateful: bool = False
    kv_cache: str | None = None
    window_cache: bool = False
    keep_f32: tuple[str, ...] = ()
    low_memory: bool = False
    decode_steps: int = DEFAULT_DECODE_STEPS
    image_size: int | None = None
    require_tokenizer: bool = True
    engine: str = "wheel"
    tract_binary: Path | None = None
    placement: Placement = field(default_factory=Placement)
    compression: CompressionOptions = field(default_factory=CompressionOptions)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise OptionError(f"task {self.task!r} is unknown.", f"Use one of {', '.join(TASKS)}.")
        if self.dtype not in DTYPES:
            raise OptionError(
                f"element type {self.dtype!r} is not supported: tract runs {' and '.join(DTYPES)} models.",
                f"Use --dtype {' or --dtype '.join(DTYPES)}.",
            )
        if self.archive not in ARCHIVES:
            raise OptionError(f"archive form {self.archive!r} is unknown.", f"Use one of {', '.join(ARCHIVES)}.")
        if self.engine not in ENGINES:
            raise OptionError(f"engine {self.engine!r} is unknown.", f"Use one of {', '.join(ENGINES)}.")
        if self.kv_cache is not None and self.kv_cache not in KV_CACHES:
            raise OptionError(f"cache type {self.kv_cache!r} is unknown.", f"Use one of {', '.join(KV_CACHES)}.")
        if self.task != TEXT_GENERATION and (self.stateful or self.kv_cache or self.window_cache):
            raise OptionError(
                f"--stateful, --kv-cache and --window-cache belong to the task {TEXT_GENERATION!r}, not to {self.task!r}.",
                "Leave them out.",
            )
        if self.window_cache and (self.stateful or self.kv_cache):
            raise OptionError(
                "the engine cannot cut a cache that it keeps itself: its only state that lasts from turn to turn grows.",
                "Leave --window-cache out, or --stateful and --kv-cache.",
            )
        if self.batch and (self.stateful or self.kv_cache):
            raise OptionError(
                "an engine that keeps the cache itself needs to know the batch, which is a symbol with --batch.",
                "Leave --batch out, or --stateful and --kv-cache.",
            )
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

    def identity(self) -> dict[str, Any]:
        """Return those that may change a byte of the archive."""
        return {name: value for name, value in self.recorded().items() if name not in _OUTSIDE_THE_ARCHIVE}

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
            stateful=self.stateful,
            kv_bits=KV_CACHES[self.kv_cache] if self.kv_cache else None,
            window_cache=self.window_cache,
            trust_remote_code=trust_remote_code,
        )


def parse_options(
    *,
    dtype: str = "f16",
    compress: str | None = None,
    recipe: str | Path | None = None,
    target_size: str | int | None = None,
    quantizers: str | None = None,
    calibration: str = DEFAULT_CALIBRATION,
    imatrix: str | Path | None = None,
    save_imatrix: str | Path | None = None,
    keep_f32: Sequence[str] = (),
    tract_binary: str | Path | None = None,
    device_map: str = "auto",
    max_memory: str | None = None,
    **others: Any,
) -> ExportOptions:
    """Return the choices that `export_llm` takes as keywords, checked.

    Raises:
        OptionError: one of them has no meaning, or contradicts another.
    """
    compression = CompressionOptions(
        compress,
        Path(recipe) if recipe else None,
        target_size,
        quantizers,
        calibration,
        Path(imatrix) if imatrix else None,
        Path(save_imatrix) if save_imatrix else None,
    )
    return ExportOptions(
        dtype=compression.dtype() or dtype,
        compression=compression,
        keep_f32=tuple(keep_f32),
        tract_binary=Path(tract_binary) if tract_binary is not None else None,
        placement=Placement.parse(device_map, max_memory),
        **others,
    )
