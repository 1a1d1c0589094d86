"""The one output sink of the command line: for people, as JSON, or quiet. Progress goes to stderr, results to stdout."""

from __future__ import annotations

import enum
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from generic_export.errors import T2NError
from t2n_llm.folder import json_text

if TYPE_CHECKING:
    from t2n_llm.export import ExportResult
    from t2n_llm.validate import ValidationReport


class OutputMode(enum.Enum):
    """How a command speaks."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Sink:
    """Speaks for one command; also the `Reporter` of an export. Use it as a context manager around the work."""

    def __init__(self, mode: OutputMode = OutputMode.HUMAN) -> None:
        self.mode = mode
        self._out = Console(soft_wrap=True, highlight=False, emoji=False)
        self._err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
        self._started = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._warnings: list[str] = []

    def __enter__(self) -> Sink:
        if self.mode is OutputMode.HUMAN and self._err.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=self._err,
                transient=True,
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    # --- Reporter -----------------------------------------------------------------------------------

    def stage(self, title: str) -> None:
        """Say which stage begins."""
        if self.mode is not OutputMode.HUMAN:
            return
        self._drop_task()
        self._err.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/dim]  {escape(title)}")

    def progress(self, label: str, done: int, total: int) -> None:
        """Move the progress bar; it is drawn on terminals only."""
        if self._progress is None:
            return
        if self._task is None:
            self._task = self._progress.add_task(label, total=total)
        self._progress.update(self._task, description=label[-48:], completed=done)
        if done >= total:
            self._drop_task()

    def warn(self, message: str) -> None:
        """Print a warning, in every mode: it goes to stderr."""
        self._warnings.append(message)
        self._err.print(f"[yellow]warning:[/yellow] {_line(message)}")

    def _drop_task(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
        self._task = None

    # --- results --------------------------------------------------------------------------------------

    def error(self, error: T2NError, report: ValidationReport | None = None) -> None:
        """Print what went wrong on one line, and what to do on the next; before them the checks, when they failed."""
        if self.mode is OutputMode.JSON:
            record = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
            self._json(record | ({"validation": report.asdict()} if report is not None else {}))
            return
        if report is not None:
            self.validated(report)
        self._err.print(f"[bold red]error:[/bold red] {_line(error.message)}")
        if error.hint:
            self._err.print(f" [bold]hint:[/bold] {_line(error.hint)}")

    def exported(self, result: ExportResult) -> None:
        """Print the outcome of an export."""
        if self.mode is OutputMode.JSON:
            self._json({**result.manifest, "output_dir": str(result.output_dir), "archive": str(result.archive)})
            return
        if self.mode is OutputMode.QUIET:
            return
        if result.validation is not None:
            self._checks(result.validation)
        model, graph = result.manifest["model"], result.manifest["graph"]
        size = sum(entry["bytes"] for name, entry in result.manifest["files"].items() if name.startswith("model.nnef"))
        self._out.print(
            f"[green]exported[/green] {escape(result.manifest['source']['name'])}: {model['parameters'] / 1e6:.1f} M parameters, "
            f"{graph['dtype']}, {size / 1e6:.1f} MB, {time.monotonic() - self._started:.1f} s"
        )
        if result.validation is None:
            self._out.print("[yellow]not checked[/yellow] (--no-check): run t2n-llm validate before you trust it")
        self._out.print(f"archive   {escape(str(result.archive))}")
        if "tokenizer.json" in result.manifest["companions"]:
            folder = escape(shlex.quote(str(result.output_dir)))
            self._out.print(f'try it    t2n-llm generate {folder} "Once upon a time"')

    def validated(self, report: ValidationReport) -> None:
        """Print the outcome of a validation."""
        if self.mode is OutputMode.JSON:
            self._json(report.asdict())
        elif self.mode is OutputMode.HUMAN:
            self._checks(report)

    def _checks(self, report: ValidationReport) -> None:
        table = Table(
            title=f"PyTorch f32 against tract {report.engine_version} ({report.engine}), {report.dtype} archive"
        )
        for heading, justify in (
            ("check", "left"),
            ("steps", "right"),
            ("max abs error", "right"),
            ("max KL", "right"),
        ):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        table.add_column("same token", justify="right")
        table.add_column("")
        for check in report.checks:
            table.add_row(
                check.name,
                str(len(check.steps)),
                f"{check.max_abs_error:.2e}",
                f"{check.max_kl_divergence:.2e}",
                f"{check.same_top1}/{len(check.steps)}",
                "[green]agrees[/green]" if check.passed else "[bold red]DIFFERS[/bold red]",
            )
        self._out.print(table)
        for check in report.checks:
            if check.note:
                self._out.print(f"{check.name}: {escape(check.note)}")

    def text(self, piece: str) -> None:
        """Print generated text as it comes, without a line end."""
        self._out.file.write(piece)
        self._out.file.flush()

    def generated(self, record: Mapping[str, Any]) -> None:
        """End a generation."""
        if self.mode is OutputMode.JSON:
            self._json(record)
        else:
            self._out.file.write("\n")

    def show(self, *parts: Any) -> None:
        """Print tables and lines for people; their text is markup."""
        if self.mode is OutputMode.HUMAN:
            for part in parts:
                self._out.print(part)

    def record(self, record: Mapping[str, Any]) -> None:
        """Print a result as JSON, when that is asked for."""
        if self.mode is OutputMode.JSON:
            self._json(record)

    def _json(self, record: Mapping[str, Any]) -> None:
        self._out.file.write(json_text(record) + "\n")


def _line(text: str) -> str:
    """Return a text as one line in which rich sees no markup."""
    return escape(" ".join(line.strip() for line in text.splitlines()))
