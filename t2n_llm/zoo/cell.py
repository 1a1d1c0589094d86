"""One cell: make the checkpoint, run it in transformers, export, check. Runs in a process that may be killed.

In: a `Cell` and an empty folder. Out: a `CellVerdict`; exceptions become one.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generic_export.errors import T2NError
from generic_export.inference_target.tract.engines.wheel_process import reuse_workers
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT, MULTIMODAL, TEXT_GENERATION
from t2n_llm.zoo.configs import TinyConfigError
from t2n_llm.zoo.verdict import FAILED, FULL_SIZE, NOT_RUNNABLE, RIGHT, SUITE_COLUMNS, WRONG, Cell, CellVerdict, Check

if TYPE_CHECKING:
    from generic_export.write.archive import WriteProgress
    from t2n_llm.check.agreement import ValidationReport

_PACKAGES = ("t2n-llm", "torch", "transformers", "tract")
_LONGEST_MESSAGE = 600

# Rounding to f16 may turn a near tie of a router, or of an index, the other way, which is no fault of an export. It does
# so for some random weights and not for others: a cell in half precision is wrong when it is wrong with each of these.
_HALF_SEEDS = 3

_EXACT = 1e-4  # of a logit; an f32 cell that is further off than this is held against PyTorch in float64

# what `export_llm` says it begins -> our word for it
_STAGES = {
    "Capturing": "capture",
    "Writing": "write",
    "Running PyTorch": "reference",
    "Checking in tract: ": "check ",
    "Recording": "record",
}


def preload() -> None:
    """Import what every cell needs, so that forked processes have it already."""
    import transformers.generation
    import transformers.models.auto.modeling_auto  # noqa: F401

    import t2n_llm.export.pipeline
    import t2n_llm.tasks.text_generation
    import t2n_llm.zoo.tiny_model  # noqa: F401


def run_cell(cell: Cell, folder: Path, on_stage: Callable[[str], None]) -> CellVerdict:
    """Take one architecture through everything.

    Args:
        cell: what to try.
        folder: empty; removed by the caller.
        on_stage: told each stage before it begins.

    Returns:
        The verdict, without what only the caller can measure (seconds, memory).
    """
    with reuse_workers():
        return _trial(cell, folder, on_stage)


def _trial(cell: Cell, folder: Path, on_stage: Callable[[str], None]) -> CellVerdict:
    if cell.dtype == FULL_SIZE:
        return _FullSizeTrial(cell, folder, on_stage).run()
    if cell.dtype in SUITE_COLUMNS:
        return _SuiteTrial(cell, folder, on_stage).run()
    seeds = range(cell.seed, cell.seed + _HALF_SEEDS) if cell.model is None and cell.dtype != "f32" else [cell.seed]
    verdicts = []
    for number, seed in enumerate(seeds):
        own = folder / f"seed-{number}"
        own.mkdir()
        verdicts.append(_Trial(replace(cell, seed=seed), own, on_stage).run())
        if verdicts[-1].outcome != WRONG:
            return verdicts[-1]
    return verdicts[0]


class _Trial:
    """A cell on its way; the stages in order."""

    def __init__(self, cell: Cell, folder: Path, on_stage: Callable[[str], None]) -> None:
        self.cell = cell
        self.folder = folder
        self.on_stage = on_stage
        self.stage = ""
        self.class_name = ""
        self.states = ""
        self.vocoder: str | None = None

    def run(self) -> CellVerdict:
        _quiet()
        try:
            source = self.cell.model or self._tiny_checkpoint()
        except TinyConfigError as error:  # our own making
            return self._ended(FAILED, error)
        except Exception as error:  # whatever the model's own code raises
            return self._ended(NOT_RUNNABLE if self.stage in ("config", "transformers") else FAILED, error)
        return self._export(source)

    def _begin(self, stage: str) -> None:
        self.stage = stage
        self.on_stage(stage)

    def _tiny_checkpoint(self) -> str:
        from t2n_llm.zoo.tiny_model import (
            build_tiny_model,
            run_in_transformers,
            save_tiny_model,
            save_tiny_vocoder,
        )

        self._begin("config")
        task = self.cell.task
        model = build_tiny_model(self.cell.architecture, self.cell.seed, task)
        self.class_name = type(model).__name__
        self._begin("transformers")
        self.states = run_in_transformers(model, task, self.cell.decode_steps)
        self._begin("save")
        save_tiny_model(model, self.folder / "model", task, self.cell.architecture)
        if save_tiny_vocoder(model, self.folder / "vocoder", task, self.cell.seed):
            self.vocoder = str(self.folder / "vocoder")
        return str(self.folder / "model")

    def _export(self, source: str) -> CellVerdict:
        from t2n_llm.check.agreement import FailedValidationError
        from t2n_llm.export.pipeline import export_llm

        self._begin("open")
        try:
            result = export_llm(
                source,
                self.folder / "export",
                task=self.cell.task,
                archive="dir",
                decode_steps=self.cell.decode_steps,
                require_tokenizer=_has_tokenizer(self.cell),
                revision=self.cell.revision,
                vocoder=self.vocoder,
                reporter=_StageReporter(self._begin),
                **_element_type(self.cell.dtype),
                **self._image_size(source),
            )
        except FailedValidationError as error:
            second = self._second_opinion(error.report, self.folder / "export.failed")
            return self._ended(WRONG, error, error.report) if second is None else self._right(second, "f64")
        except Exception as error:  # whatever a capture or an engine may raise
            return self._ended(FAILED, error)
        self.class_name = result.manifest["source"]["architecture"]
        second = self._second_opinion(result.validation, self.folder / "export")
        return self._right(result.validation, "f32") if second is None else self._right(second, "f64")

    def _image_size(self, source: str) -> dict[str, Any]:
        if self.cell.task != IMAGE_TEXT_TO_TEXT or self.cell.model is not None:
            return {}
        from transformers import AutoConfig

        from t2n_llm.zoo.tiny_inputs import tiny_image_size

        return {"image_size": tiny_image_size(AutoConfig.from_pretrained(source))}

    def _second_opinion(self, first: ValidationReport | None, export: Path) -> ValidationReport | None:
        """Return what float64 says of an f32 cell that f32 is not sure of; None when it is of no help."""
        tiny = self.cell.model is None
        if not tiny or self.cell.dtype != "f32" or first is None or _worst(first) <= _EXACT:
            return None
        from t2n_llm.tasks.heads.table import HEADS
        from t2n_llm.zoo.float64 import float64_report, head_float64_report
        from t2n_llm.zoo.float64_prompts import prompts_float64_report

        try:
            if self.cell.task in HEADS:
                second = head_float64_report(self.folder / "model", export, self.cell.task)
            elif self.cell.task == TEXT_GENERATION:
                second = float64_report(self.folder / "model", export, self.cell.decode_steps)
            elif self.cell.task in MULTIMODAL:
                second = prompts_float64_report(self.folder / "model", export, self.cell.task)
            else:
                return None
        except Exception:  # whatever PyTorch cannot do in float64
            return None
        helps = not first.passed or _worst(second) < _worst(first)
        return second if second.passed and helps else None

    def _right(self, report: ValidationReport | None, reference: str) -> CellVerdict:
        self.stage = "done"
        return replace(self._ended(RIGHT, None, report), reference=reference)

    def _ended(self, outcome: str, error: BaseException | None, report: ValidationReport | None = None) -> CellVerdict:
        checks = _figures(report)
        stage = self.stage
        if outcome == WRONG:
            stage = next((name for name, check in checks.items() if not check.passed), stage)
        return self.cell.ended(
            outcome,
            stage,
            class_name=self.class_name,
            seed=self.cell.seed,
            error=type(error).__name__ if error is not None else "",
            message=_message(error, self.folder),
            checks=checks,
            states=self.states,
            versions={name: _version(name) for name in _PACKAGES},
        )


class _FullSizeTrial(_Trial):
    """A default config on its way to a document; nothing is written or run."""

    def run(self) -> CellVerdict:
        from t2n_llm.zoo.configs import default_config
        from t2n_llm.zoo.full_size import captured

        _quiet()
        self._begin("config")
        try:
            config = default_config(self.cell.architecture)
        except Exception as error:  # whatever the config class raises
            return self._ended(NOT_RUNNABLE, error)
        self._begin("capture")
        try:
            found = captured(config)
        except Exception as error:  # whatever a capture may raise
            return self._ended(FAILED, error)
        self.class_name = found.class_name
        self.stage = "done"
        verdict = self._ended(RIGHT, None)
        return replace(
            verdict,
            layers=found.layers,
            processor_seconds=found.processor_seconds,
            peak_rss_bytes=found.peak_bytes,
        )


class _SuiteTrial(_Trial):
    """A case of a suite: a module, exported and compared at two sizes."""

    def run(self) -> CellVerdict:
        from t2n_llm.zoo.suites.registry import cases_of
        from t2n_llm.zoo.suites.trial import tried

        _quiet()
        cell = self.cell
        try:
            case = cases_of(cell.task)[cell.architecture]
            found = tried(case, cell.dtype, cell.seed, self.folder, self._begin)
        except Exception as error:  # whatever the module, the export or the engine raises
            return self._ended(NOT_RUNNABLE if self.stage in ("build", "pytorch") else FAILED, error)
        wrong = next((name for name, check in found.checks.items() if not check.passed), None)
        self.class_name, self.stage = found.class_name, wrong or "done"
        verdict = self._ended(RIGHT if wrong is None else WRONG, None)
        return replace(
            verdict,
            checks=found.checks,
            reference=found.reference,
            processor_seconds=found.export_seconds,
            versions={**verdict.versions, cell.task: _version(cell.task)},
        )


class _StageReporter:
    """Turns what `export_llm` says into stages."""

    def __init__(self, begin: Callable[[str], None]) -> None:
        self._begin = begin

    def stage(self, title: str) -> None:
        for start, name in _STAGES.items():
            if title.startswith(start):
                self._begin(name + title[len(start) :] if name.endswith(" ") else name)

    def steps(self, done: int, total: int) -> None:
        del done, total

    def progress(self, progress: WriteProgress) -> None:
        del progress

    def warn(self, message: str) -> None:
        del message


def _has_tokenizer(cell: Cell) -> bool:
    """Say whether the checks take text: a real checkpoint's own tokenizer, unless it is a folder without one."""
    if cell.model is None:
        return False
    folder = Path(cell.model)
    return not folder.is_dir() or any(folder.glob("tokenizer*"))


def _element_type(dtype: str) -> dict[str, Any]:
    return {"dtype": "f16", "compress": "q4_0"} if dtype == "q4_0" else {"dtype": dtype}


def _worst(report: ValidationReport) -> float:
    return max(check.max_abs_error for check in report.checks)


def _figures(report: ValidationReport | None) -> dict[str, Check]:
    if report is None:
        return {}
    return {
        check.name: Check(
            max_abs_error=check.max_abs_error,
            scale=max((step.scale for step in check.steps), default=1.0),
            same_tokens=check.same_top1_count,
            tokens=len(check.steps),
            passed=check.passed,
        )
        for check in report.checks
    }


def _message(error: BaseException | None, folder: Path) -> str:
    if error is None:
        return ""
    text = error.message if isinstance(error, T2NError) else str(error)
    text = " ".join(text.replace(f"{folder}/", "").split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " ..."


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _quiet() -> None:
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


__all__ = ["preload", "run_cell"]
