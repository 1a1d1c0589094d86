"""The one output sink of the command line: for people, as JSON, or quiet. Progress goes to stderr, results to stdout."""

from __future__ import annotations

import enum
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from generic_export.errors import T2NError
from generic_export.interrupts import raise_if_interrupted
from t2n_llm.check.loss import difference
from t2n_llm.cli.report_tables import quality_tables
from t2n_llm.cli.tables import filled_table, table_of
from t2n_llm.export.folder import json_text
from t2n_llm.tasks.names import TEXT_GENERATION, TRIED

if TYPE_CHECKING:
    from generic_export.write.archive import WriteProgress
    from t2n_llm.check.agreement import CheckResult, ValidationReport
    from t2n_llm.diffusion.pipeline import PipelineResult
    from t2n_llm.export.pipeline import ExportResult
    from t2n_llm.export.plan import ExportPlan
    from t2n_llm.export.verify import IntegrityReport
    from t2n_llm.inspect.quantize_report import QuantizeReport
    from t2n_llm.share.push import PushResult


_LINE_SECONDS = 5.0


_STATES = ("states", "engine_states")  # of a manifest's graph
_PLAIN = ("f16", "f32")
_NAMED = 3  # tensors that are named before the rest is counted


class OutputMode(enum.Enum):
    """How a command speaks."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


@dataclass
class _Line:
    """When progress was printed without a terminal: first, last, and how many bytes or steps were done at first."""

    first: float
    last: float
    first_done: int


_PIPE_COLUMNS = 200  # tables in a pipe or a file are not folded to the 80 columns of a terminal that is not there


# What is shown of a check: of logits of tokens, and of other values.
_TOKEN_COLUMNS: Mapping[str, Callable[[CheckResult], str]] = {
    "steps": lambda check: str(len(check.steps)),
    "max abs error": lambda check: f"{check.max_abs_error:.2e}",
    "max KL": lambda check: f"{check.max_kl_divergence:.2e}" if check.compares_tokens else "",
    "same token": lambda check: f"{check.same_top1_count}/{len(check.steps)}" if check.compares_tokens else "",
}
_VALUE_COLUMNS: Mapping[str, Callable[[CheckResult], str]] = {
    "texts x tokens": lambda check: " x ".join(map(str, check.shape or ())),
    "max abs error": lambda check: f"{check.max_abs_error:.2e}",
    "largest value": lambda check: f"{check.scale:.2e}",
}


class Sink:
    """Speaks for one command; also the `Reporter` of an export. Use it as a context manager around the work."""

    def __init__(self, mode: OutputMode = OutputMode.HUMAN) -> None:
        self.mode = mode
        self._out = Console(soft_wrap=True, highlight=False, emoji=False)
        self._err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
        self._started = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._line: _Line | None = None
        self._warnings: list[str] = []
        self._open = ExitStack()

    def __enter__(self) -> Sink:
        self._open.enter_context(warnings.catch_warnings())
        warnings.showwarning = self._show_warning  # type: ignore[assignment]
        if self.mode is OutputMode.HUMAN and self._err.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[amount]}", markup=False),
                TimeElapsedColumn(),
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
        self._open.close()

    @property
    def seconds(self) -> float:
        """Time since the command began, in seconds."""
        return time.monotonic() - self._started

    def drew(self, path: Path) -> None:
        """Name a picture that was drawn."""
        self.say(f"drawn     {path}")

    def _show_warning(self, message: Warning | str, *_: object) -> None:
        """Print a warning of Python's without the line of ours that gave it."""
        self.warn(str(message))

    # --- Reporter -----------------------------------------------------------------------------------

    def stage(self, title: str) -> None:
        """Say which stage begins."""
        raise_if_interrupted()
        if self.mode is not OutputMode.HUMAN:
            return
        self.end_stage()
        self._err.print(f"[dim]{self.seconds:6.1f} s[/dim]  {escape(title)}")
        self._line = None
        if self._progress is not None:
            self._task = self._progress.add_task(title, total=None, amount="")

    def waiting(self, title: str) -> None:
        """Say what takes seconds, on a terminal alone: the command's own output follows."""
        if self._err.is_terminal:
            self.stage(title)

    def steps(self, done: int, total: int) -> None:
        """Show how many steps of the stage are done; where there is no terminal, print a line every few seconds."""
        raise_if_interrupted()
        if self.mode is not OutputMode.HUMAN:
            return
        if self._progress is not None:
            if self._task is not None:
                self._progress.update(self._task, completed=done, total=total, amount=f"{done}/{total}")
            return
        if (rest := self._seconds_left(done, total)) is not None:
            self._err.print(f"[dim]{self.seconds:6.1f} s[/dim]  {done}/{total}, {rest:.0f} s left")

    def progress(self, progress: WriteProgress) -> None:
        """Move the progress bar; where there is no terminal, print a line every few seconds."""
        if self.mode is not OutputMode.HUMAN:
            return
        if self._progress is None:
            self._progress_line(progress)
            return
        if self._task is None:
            self._task = self._progress.add_task("", total=progress.total_bytes, amount="")
        self._progress.update(
            self._task,
            description=progress.label.removesuffix(".dat")[-40:],
            completed=progress.done_bytes,
            total=progress.total_bytes,
            amount=f"{progress.done_bytes / 1e9:.2f}/{progress.total_bytes / 1e9:.2f} GB, "
            f"{progress.done_entries}/{progress.total_entries} tensors",
        )
        if progress.done_entries == progress.total_entries:
            self.end_stage()

    def _progress_line(self, progress: WriteProgress) -> None:
        rest = self._seconds_left(progress.done_bytes, progress.total_bytes)
        if rest is not None:
            speed = (progress.total_bytes - progress.done_bytes) / rest if rest else 0.0
            self._err.print(
                f"[dim]{self.seconds:6.1f} s[/dim]  {progress.done_bytes / 1e9:.2f} of "
                f"{progress.total_bytes / 1e9:.2f} GB, {progress.done_entries} of "
                f"{progress.total_entries} tensors, {speed / 1e6:.0f} MB/s, {rest:.0f} s left"
            )

    def _seconds_left(self, done: int, total: int) -> float | None:
        """Return how long the rest takes, where a line about it is due."""
        now = time.monotonic()
        if done == 0 or self._line is None:
            self._line = _Line(now, now, done)
            return None
        if now - self._line.last < _LINE_SECONDS or done >= total:
            return None
        self._line.last = now
        speed = (done - self._line.first_done) / (now - self._line.first)
        return (total - done) / speed if speed else 0.0

    def warn(self, message: str) -> None:
        """Print a warning, in every mode: it goes to stderr."""
        self._warnings.append(message)
        self._err.print(f"[yellow]warning:[/yellow] {_line(message)}")

    def end_stage(self) -> None:
        """Stop to show the stage: something else is drawn now."""
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

    def exported(
        self,
        result: ExportResult,
        pushed: PushResult | None = None,
        *,
        source: str,
        adapter: str | None = None,
        vocoder: str | None = None,
    ) -> None:
        """Print the outcome of an export of a source, with or without an adapter and a vocoder, and of sending it to the hub."""
        manifest = result.manifest
        if self.mode is OutputMode.JSON:
            record = {**manifest, "output_dir": str(result.output_dir), "archive": str(result.archive)}
            self._json(record | ({"pushed": pushed.asdict()} if pushed is not None else {}))
            return
        if self.mode is OutputMode.QUIET:
            return
        if result.validation is not None:
            self.validated(result.validation)
        sizes = {role: manifest["files"][path.name]["bytes"] / 1e6 for role, path in result.archives.items()}
        task = f" for {manifest['task']}" if manifest["task"] != TEXT_GENERATION else ""
        self._out.print(
            f"[green]exported[/green] {escape(manifest['source']['name'])}{task}: "
            f"{manifest['model']['parameters'] / 1e6:.1f} M parameters, {manifest['graph']['dtype']}, "
            f"{sum(sizes.values()):.1f} MB, {time.monotonic() - self._started:.1f} s"
        )
        if manifest["compression"]:
            self._compression(manifest["compression"])
        if result.validation is None:
            half = any(state["dtype"] == "f16" for kind in _STATES for state in manifest["graph"].get(kind, ()))
            unseen = "; ranges of the KV cache were not measured" if half else ""
            self._out.print(f"[yellow]not validated[/yellow] (--no-check): run t2n-llm validate{unseen}")
        for role, path in result.archives.items():
            several = len(sizes) > 1
            title, size = (role, f" ({sizes[role]:.1f} MB)") if several else ("archive", "")
            self._out.print(f"{title:9s} {escape(str(path))}{size}")
        folder = escape(shlex.quote(str(result.output_dir)))
        # export.json names no folder of this machine.
        origins = (
            ("--reference", manifest["source"], source),
            ("--adapter", manifest["adapter"], adapter),
            ("--vocoder", manifest.get("vocoder", {}), vocoder),
        )
        places = [
            f"{flag} {shlex.quote(place)}" for flag, record, place in origins if place and record["revision"] is None
        ]
        if places:
            self._out.print(f"check it  t2n-llm validate {folder} {escape(' '.join(places))}")
        from t2n_llm.source.source_files import TOKENIZER_MODELS

        if manifest["task"] in TRIED and not TOKENIZER_MODELS.isdisjoint(manifest["copied_files"]):
            self._out.print(f"try it    t2n-llm generate {folder} {TRIED[manifest['task']]}")
        if pushed is not None:
            self.say(f"pushed    {pushed.url} ({'private' if pushed.private else 'public'}), commit {pushed.commit}")

    def exported_pipeline(self, result: PipelineResult) -> None:
        """Print the archives of a pipeline."""
        if self.mode is OutputMode.JSON:
            self._json({**result.record, "output_dir": str(result.output_dir)})
        if self.mode is not OutputMode.HUMAN:
            return
        record = result.record
        self._out.print(
            f"[green]exported[/green] {escape(record['pipeline'])}, {record['dtype']}, {self.seconds:.1f} s"
        )
        for name, each in record["components"].items():
            inputs = ", ".join(f"{key} \\[{', '.join(map(str, shape))}]" for key, shape in each["inputs"].items())
            told = (
                f"agrees at {len(each['compared_at'])} sizes" if each["compared_at"] else "[yellow]not checked[/yellow]"
            )
            self._out.print(
                f"archive   {escape(str(result.archives[name]))} ({each['bytes'] / 1e6:.1f} MB): {inputs}; {told}"
            )

    def _compression(self, record: Mapping[str, Any]) -> None:
        """Print the size, how much of it is quantised, and what is not and why."""
        tensors = record["tensors"]
        quantized = [tensor for tensor in tensors if tensor["scheme"] not in _PLAIN and not tensor.get("residual_of")]
        errors = [tensor["relative_error"] for tensor in quantized if tensor["relative_error"] is not None]
        detail = f", relative squared error {sum(errors) / len(errors):.2e} on average" if errors else ""
        self._out.print(
            f"recipe    {escape(record['recipe']['name'])}: weights {record['bytes'] / 1e6:.1f} MB, "
            f"{record['bits_per_weight']:.2f} bits per weight; {len(quantized)} tensors quantized{detail}"
        )
        reasons: dict[str, list[Mapping[str, Any]]] = {}
        for tensor in tensors:
            if tensor["kept_reason"]:
                reasons.setdefault(f"{tensor['scheme']}, {tensor['kept_reason']}", []).append(tensor)
        for reason, kept in reasons.items():
            size = sum(tensor["bytes"] for tensor in kept) / 1e6
            names = ", ".join(tensor["label"] for tensor in kept[:_NAMED])
            more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
            self._out.print(f"kept      {escape(names)}{more} ({size:.1f} MB): {escape(reason)}")

    def validated(self, report: ValidationReport) -> None:
        """Print the outcome of a validation."""
        if self.mode is OutputMode.JSON:
            self._json(report.asdict())
        elif self.mode is OutputMode.HUMAN:
            self._checks(report)

    def _checks(self, report: ValidationReport) -> None:
        weights = " with the compressed weights" if report.original is not None else ""
        title = f"PyTorch f32{weights} against tract {report.engine_version} ({report.engine}), {report.dtype} archive"
        columns = _TOKEN_COLUMNS if any(check.compares_tokens for check in report.checks) else _VALUE_COLUMNS
        table = table_of("check", *(f">{heading}" for heading in columns), "", title=title)
        for column in table.columns[1:]:
            column.no_wrap = True  # a figure is whole; in a narrow terminal names are folded
        table.columns[0].no_wrap = False
        for check in report.checks:
            outcome = "[green]agrees[/green]" if check.passed else "[bold red]DIFFERS[/bold red]"
            table.add_row(check.name, *(show(check) for show in columns.values()), outcome)
        self.show(table)
        for check in report.checks:
            if check.note:
                self._out.print(f"{check.name}: {escape(check.note)}")
        if report.original is not None:
            outcome = "agrees with" if report.passed else "differs from"
            self._out.print(f"engine       {outcome} the compressed model")
            self._out.print(f"compression  differs from the original model: {difference(report.original)}")

    def quality(self, report: QuantizeReport, max_kl: float | None) -> None:
        """Print what compression costs; a divergence above the limit is told in every mode."""
        measured = report.quality
        if max_kl is not None and not measured.mean_kl_divergence <= max_kl:
            self._err.print(
                f"[bold red]mean KL {measured.mean_kl_divergence:.4g} is above {max_kl:.4g}[/bold red] (--max-kl)"
            )
        if self.mode is OutputMode.JSON:
            self._json(report.asdict())
        elif self.mode is OutputMode.HUMAN:
            self.show(*quality_tables(report))
            self._out.print(
                f"{report.engine}, {report.seconds:.1f} s, {escape(report.reading)}; text {escape(report.text)}, "
                f"{measured.positions} tokens scored"
            )

    def planned(self, plan: ExportPlan) -> None:
        """Print what an export would do; asked for it, so in quiet mode too."""
        if self.mode is OutputMode.JSON:
            self._json(plan.asdict())
            return
        headings = "tensors", ">count", ">shape", ">type", ">MB"
        for archive in plan.archives:
            rows = [
                (
                    group.name,
                    str(group.count),
                    " x ".join(map(str, group.shape)) or "scalar",
                    group.dtype,
                    f"{group.bytes / 1e6:.2f}",
                )
                for group in archive.groups
            ]
            place = plan.output_dir if len(plan.archives) == 1 else plan.output_dir / archive.name
            table = filled_table(headings, rows, f"{place}: nothing is written")
            table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
            self._print(table)
        most = "" if plan.exact else " at most (uncompressed)"
        seconds = (
            "unknown (the disk speed could not be measured)" if plan.seconds is None else f"about {plan.seconds:.0f} s"
        )
        check = f", of which {plan.check_bytes / 1e9:.2f} GB to check" if plan.check_bytes else ""
        for archive in plan.archives if len(plan.archives) > 1 else ():
            self._out.print(f"archive   {archive.bytes} bytes{most}: {escape(archive.name)}")
        what = "archive " if len(plan.archives) == 1 else "together"
        self._out.print(f"{what}  {plan.archive_bytes} bytes{most}; free on that disk: {plan.free_bytes}")
        self._out.print(f"memory    about {plan.peak_bytes / 1e9:.2f} GB peak (estimate{check})")
        self._out.print(f"time      {seconds} to write the weights (estimated from a short disk test)")
        self._out.print(f"{escape(str(plan.output_dir))}/")
        for file in plan.files:
            self._out.print(f"  {escape(file)}")

    def verified(self, report: IntegrityReport) -> None:
        """Print the outcome of a verification; damage is told in every mode."""
        if self.mode is OutputMode.JSON:
            self._json(report.asdict())
            return
        compared = report.source
        for finding in (*report.findings, *(compared.findings if compared is not None else ())):
            detail = f": {finding.detail}" if finding.detail else ""
            self._err.print(f"[bold red]{finding.problem}:[/bold red] {_line(finding.name + detail)}")
        if report.others:
            self.warn(f"not part of the export: {', '.join(report.others)}.")
        if self.mode is OutputMode.QUIET:
            return
        self._out.print(
            f"{_outcome('as written', report.findings)}  {escape(str(report.path))}: {report.tensors} tensors, "
            f"{report.bytes / 1e6:.1f} MB verified"
        )
        if compared is not None:
            self._out.print(
                f"{_outcome('as the source', compared.findings)}  {escape(compared.source)}: {compared.tensors} "
                f"tensors, {compared.bytes / 1e6:.1f} MB identical"
            )
            if compared.left:
                self._out.print(f"not compared  {len(compared.left)} tensors with calibrated values")
            if compared.same_graph is False:
                self._out.print(
                    "other graph   graph.nnef would be written differently now (other releases, or another name)"
                )
        self._out.print(f"export.json   SHA-256 {report.manifest_sha256}")

    def text(self, piece: str) -> None:
        """Print generated text as it comes, without a line end; in JSON a line a piece."""
        self.end_stage()
        if self.mode is OutputMode.JSON:
            self._json({"piece": piece})
        else:
            self._out.file.write(piece)
        self._out.file.flush()

    @property
    def is_typed_into(self) -> bool:
        """Whether somebody types at a terminal and reads there."""
        return self.mode is OutputMode.HUMAN and sys.stdin.isatty() and sys.stdout.isatty()

    def aside(self, text: str) -> None:
        """Tell people something beside the text, on stderr."""
        self.end_stage()
        if self.mode is OutputMode.HUMAN:
            self._err.print(f"[dim]{escape(text)}[/dim]" if text else "")

    def generated(self, record: Mapping[str, Any]) -> None:
        """End a generation."""
        if self.mode is OutputMode.JSON:
            self._json(record)
        else:
            self._out.file.write("\n")
        self._out.file.flush()

    def say(self, line: str) -> None:
        """Print a line for people, as it is."""
        self.show(escape(line))

    def show(self, *parts: Any) -> None:
        """Print tables and lines for people; their text is markup."""
        if self.mode is OutputMode.HUMAN:
            for part in parts:
                self._print(part)

    def _print(self, part: Any) -> None:
        self.end_stage()
        self._out.print(part, width=None if self._out.is_terminal else _PIPE_COLUMNS)

    def record(self, record: Mapping[str, Any]) -> None:
        """Print a result as JSON, when that is asked for."""
        if self.mode is OutputMode.JSON:
            self._json(record)

    def _json(self, record: Mapping[str, Any]) -> None:
        self._out.file.write(json_text(record) + "\n")


def _outcome(good: str, findings: Collection[object]) -> str:
    if not findings:
        return f"[green]{good}[/green]"
    return f"[bold red]{len(findings)} finding{'s' if len(findings) > 1 else ''}[/bold red]"


def _line(text: str) -> str:
    """Return a text as one line in which rich sees no markup."""
    return escape(" ".join(line.strip() for line in text.splitlines()))
