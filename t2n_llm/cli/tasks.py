"""What `t2n-llm export` and `validate` do for tasks other than text generation. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from generic_export.errors import OptionError
from t2n_llm.tasks.names import MULTIMODAL_TASKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from t2n_llm.check.causal_lm import ValidationReport
    from t2n_llm.cli.console import Sink
    from t2n_llm.export.options import ExportOptions
    from t2n_llm.export.revalidate import ValidateOptions
    from t2n_llm.tasks.heads.check import HeadReport


def export_task(
    sink: Sink,
    source: str,
    output: Path | None,
    adapter: str | None,
    dry_run: bool,
    options: ExportOptions,
    origin: dict[str, Any],
) -> None:
    """Export a model for `options.task`, or plan that.

    Args:
        sink: told what happens.
        source, output: what is exported where.
        adapter: refused; None is what it should be.
        dry_run: write nothing.
        options: every choice.
        origin: further arguments of `export_head`.
    """
    from t2n_llm.tasks.heads import export_head, plan_head_export
    from t2n_llm.tasks.multimodal import export_multimodal

    if adapter is not None:
        raise OptionError(
            f"--task {options.task} does not merge adapters.", "Merge it with peft first, and export the merged model."
        )
    if options.task in MULTIMODAL_TASKS:
        if dry_run:
            raise OptionError(f"--task {options.task} has no --dry-run.", "Leave --dry-run out.")
        sink.exported(export_multimodal(source, output, options=options, **origin))
    elif dry_run:
        sink.planned(plan_head_export(source, output, options=options, **origin))
    else:
        sink.exported(export_head(source, output, options=options, **origin))


def validate_task(sink: Sink, task: str, folder: Path, reference: str | None, options: ValidateOptions) -> bool:
    """Compare an export for another task than text generation with PyTorch once more, and say whether they agree."""
    from t2n_llm.tasks.heads import validate_head_folder
    from t2n_llm.tasks.multimodal import validate_multimodal_folder

    if options.adapter is not None:
        raise OptionError(
            f"--adapter {options.adapter}: this export was made without an adapter.", "Leave --adapter out."
        )
    validate: Callable[..., ValidationReport | HeadReport] = (
        validate_multimodal_folder if task in MULTIMODAL_TASKS else validate_head_folder
    )
    report = validate(folder, reference, options=options, reporter=sink)
    sink.validated(report)
    return report.passed
