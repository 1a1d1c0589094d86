"""The same module by another way into the same engine: PyTorch -> ONNX -> tract, and from there to NNEF.

In: a module and its arguments. Out: files and a `SecondOpinion`, which tells a fault of this exporter from one of the engine.
Needs the packages `onnx` and `onnxscript`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.compare.comparison import Comparison
from generic_export.errors import CaptureError, EngineError, MissingExtraError, T2NError, first_line
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engine_target import EngineTarget
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.wheel import TractWheel, convert_with_wheel
from generic_export.logs import logging_at

ONNX_FILE = "model.onnx"
NNEF_FILE = "model_from_onnx.nnef.tgz"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SecondOpinion:
    """What tract makes of the module's ONNX form.

    Attributes:
        agrees: tract's outputs from ONNX are within the tolerance; None when there are none, see `reason`.
        comparisons: output by output.
        reason: why there is no opinion, or what could not be written.
    """

    agrees: bool | None
    comparisons: tuple[Comparison, ...] = ()
    reason: str = ""

    def asdict(self) -> dict[str, Any]:
        """Return the record as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.agrees is None:
            return f"no second opinion: {self.reason}"
        verdict = "agrees with" if self.agrees else "differs from"
        return f"through ONNX tract {verdict} PyTorch" + (f" ({self.reason})" if self.reason else "")


def debug_dumper_pytorch_to_onnx_to_nnef(
    model: nn.Module,
    test_input: torch.Tensor | Sequence[Any],
    target_folder: str | Path,
    tract_cli: TractCli | None = None,
    raise_export_error: bool = True,
) -> bool:
    """Export a module to ONNX and convert that to NNEF with tract, for comparison with the direct export.

    Args:
        model: the module, in eval mode.
        test_input: its arguments (a tensor stands for a tuple of one); their sizes become fixed.
        target_folder: folder for `model.onnx` and `model_from_onnx.nnef.tgz`.
        tract_cli: the command that converts; None for the wheel.
        raise_export_error: raise if PyTorch cannot export to ONNX; False returns False.

    Returns:
        Whether both files were written. Failures are logged.

    Raises:
        MissingExtraError: `onnx` or `onnxscript` is not installed.
        CaptureError: PyTorch cannot export the module to ONNX.
    """
    folder = Path(target_folder)
    args = (test_input,) if isinstance(test_input, torch.Tensor) else tuple(test_input)
    try:
        _export_onnx(model, args, {}, folder)
    except (MissingExtraError, CaptureError) as error:
        if raise_export_error:
            raise
        log.warning("%s", error)
        return False
    reason = _write_nnef(folder, (*DEFAULT_REGISTRIES, "tract_onnx"), tract_cli)
    if reason:
        log.warning("%s", reason)
    return not reason


def opinion_through_onnx(
    model: nn.Module,
    args: Sequence[Any],
    folder: Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    inference_target: EngineTarget,
) -> SecondOpinion:
    """Write a module as ONNX, let tract run that, compare with PyTorch, and let tract write it as NNEF.

    Args:
        model: the module, in eval mode.
        args, kwargs: its arguments.
        folder: where `model.onnx` and `model_from_onnx.nnef.tgz` go.
        inference_target: gives the tolerance; its dynamic axes are not used, sizes are those of the arguments.

    Returns:
        What came of it; that a step is impossible is an answer, not an error.
    """
    try:
        _export_onnx(model, tuple(args), dict(kwargs or {}), folder)
    except (MissingExtraError, CaptureError) as error:
        return SecondOpinion(None, reason=error.message.rstrip("."))
    example = ExampleRun.of(model, args, kwargs)
    try:
        with TractWheel().load(folder / ONNX_FILE) as engine:
            comparisons = tuple(inference_target.compared(example, engine.run(list(example.inputs))))
    except T2NError as error:
        return SecondOpinion(None, reason=f"tract cannot run its ONNX form: {error.message}")
    reason = _write_nnef(folder, (*inference_target.registries, "tract_onnx"))
    return SecondOpinion(all(comparison.passed for comparison in comparisons), comparisons, reason)


def _export_onnx(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path) -> None:
    """Write `model.onnx`.

    Raises:
        MissingExtraError: a package that PyTorch needs for it is not installed.
        CaptureError: PyTorch cannot.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"the package {missing[0]} is not installed.", "Install it: pip install t2n-llm[debug]")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _write_onnx(model, args, kwargs, folder / ONNX_FILE)
    except Exception as error:  # torch.onnx raises many unrelated classes, none of them documented
        reason = first_line(error.__cause__ or error)  # torch.onnx's own first line says which of its steps it was
        raise CaptureError(f"PyTorch cannot write it as ONNX: {reason}") from error


def _write_nnef(folder: Path, registries: Sequence[str], command: TractCli | None = None) -> str:
    """Let tract write the ONNX file as NNEF; returns why it cannot, or ""."""
    model, archive = folder / ONNX_FILE, folder / NNEF_FILE
    try:
        if command is None:
            convert_with_wheel(model, archive, registries=registries)
        else:
            command.convert(model, archive, registries=registries)
    except EngineError as error:
        return f"tract cannot write it as NNEF: {error.message}"
    return ""


def _write_onnx(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> None:
    import onnx

    silence = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with silence[0], silence[1], warnings.catch_warnings(), logging_at(logging.ERROR, "torch.onnx", "onnxscript"):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, args, path, kwargs=kwargs, dynamo=True, external_data=False, verbose=False)
    written = onnx.load(path)
    _forget_places(written)
    onnx.save(written, path)


def _forget_places(message: Any) -> None:
    """Clear what PyTorch records of the machine: stack traces with the user's folders, in every metadata field."""
    for holder in (message, message.graph, *message.functions):
        del holder.metadata_props[:]
        holder.doc_string = ""
        for node in (
            *getattr(holder, "node", ()),
            *getattr(holder, "value_info", ()),
            *getattr(holder, "initializer", ()),
        ):
            del node.metadata_props[:]
            node.doc_string = ""


__all__ = ["SecondOpinion", "debug_dumper_pytorch_to_onnx_to_nnef", "opinion_through_onnx"]
