"""`t2n-llm coverage` and `t2n-llm diagnose`: what keeps a model from exporting, before and without its weights."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from generic_export.errors import InterruptError, OptionError
from generic_export.files import write_whole
from t2n_llm.cli.console import OutputMode, Sink
from t2n_llm.cli.parameters import JsonOption, QuietOption, require_source, takes_options
from t2n_llm.cli.session import open_sink, quiet_libraries
from t2n_llm.cli.tables import table_of
from t2n_llm.source.reference import SourceRef

if TYPE_CHECKING:
    from rich.table import Table

    from generic_export.diagnose import Diagnosis, Progress
    from t2n_llm.debug.coverage import CoverageReport

_EXIT_FAILED = 1

_SourceArgument = Annotated[
    str,
    typer.Argument(help="Hub id, local folder, config.json or .gguf file.", callback=require_source),
]
_JsonFileOption = Annotated[
    Path | None, typer.Option("--json-file", metavar="FILE", help="Write the report to a JSON file.")
]


@takes_options
def coverage(
    model: _SourceArgument,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="Capture all layers instead of one of each kind (slower).")
    ] = False,
    json_file: _JsonFileOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    origin: SourceRef = SourceRef(),
) -> None:
    """List the operators of a model: supported, decomposed or missing. Needs no weights.

    Exit code 0: all supported. 1: something is missing, or cannot be captured. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        quiet_libraries(sink)
        _require_writable(json_file)
        from t2n_llm.debug.coverage import cover_model

        report = cover_model(
            origin.named(model),
            every_layer=every_layer,
            reporter=sink,
        )
    sink.record(report.asdict())
    if json_file is not None:
        write_text(json_file, _json_text(report.asdict()))
    sink.show(*_coverage_parts(report))
    if not report.complete:
        raise typer.Exit(_EXIT_FAILED)


@takes_options
def diagnose(
    model: Annotated[
        str, typer.Argument(help="Hub id, local folder, config.json or .gguf file.", callback=require_source)
    ],
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Use a small random-weight model, one layer of each kind.")
    ] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Read the weights; the default uses random ones.")] = False,
    dtype: Annotated[str, typer.Option(help="f32 or f16: weights, activations and caches.")] = "f32",
    strategy: Annotated[
        str,
        typer.Option(help="Search: failing, whole, leaves, isolate or numerics (ranks errors)."),
    ] = "failing",
    depth: Annotated[
        int | None, typer.Option("--max-depth", min=0, help="Depth of modules; 0 is the whole model.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PATH", help="Start at this module, such as model.layers.0.self_attn.")
    ] = None,
    atol: Annotated[float | None, typer.Option(min=0.0, help="Absolute tolerance, instead of a measured one.")] = None,
    rtol: Annotated[float | None, typer.Option(min=0.0, help="Tolerance relative to the output.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Parallel attempts.")] = 1,
    timeout: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of one attempt.")] = 300.0,
    memory: Annotated[str, typer.Option("--max-memory", metavar="SIZE", help="Memory limit of one attempt.")] = "8GiB",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as an HTML file.")] = None,
    json_file: _JsonFileOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for reports and a reproduction of each fault."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Reuse what passed in an earlier run (--output).")] = False,
    origin: SourceRef = SourceRef(),
) -> None:
    """Find the module, operator and line that make an export fail. Needs no weights.

    Ctrl-C ends the search and prints what was found.
    Exit code 0: everything passes. 1: something fails, or was interrupted. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        quiet_libraries(sink)
        if tiny and weights:
            raise OptionError("--tiny and --weights exclude each other.", "A tiny twin has random weights.")
        for path in (html, json_file):
            _require_writable(path)
        from generic_export.diagnose import Limits
        from t2n_llm.debug.diagnosis import DiagnosisOptions, Subject, diagnose_model

        options = DiagnosisOptions(
            subject=Subject.TINY if tiny else Subject.WEIGHTS if weights else Subject.SKELETON,
            dtype=dtype,
            strategy=strategy,
            depth=depth,
            only=only,
            atol=atol,
            rtol=rtol,
            jobs=jobs,
            out=out,
            resume=resume,
            limits=Limits(seconds=timeout, memory=memory),
        )
        with _interrupts_reach_the_search(), _ProgressView(sink) as view:
            diagnosis = diagnose_model(origin.named(model), options, reporter=sink, progress=view.show)
    if as_json:
        typer.echo(diagnosis.to_json(), nl=False)
    if json_file is not None:
        write_text(json_file, diagnosis.to_json())
    _tell(sink, diagnosis, html, out)
    if not diagnosis.ok:
        raise typer.Exit(_EXIT_FAILED)


def _tell(sink: Sink, diagnosis: Diagnosis, html: Path | None, out: Path | None) -> None:
    """Write the reports that were asked for, and speak."""
    from rich.text import Text

    from generic_export.debug.report.report_html import diagnosis_html
    from generic_export.diagnose import diagnosis_text

    pages = [path for path in (html, out / "report.html" if out is not None else None) if path is not None]
    for path in pages:
        write_text(path, diagnosis_html(diagnosis))
    text = Text(diagnosis_text(diagnosis))
    text.highlight_regex(r"\bfailed: \w+", "bold red")
    text.highlight_regex(r"(?m)(?<=  )ok\b", "green")
    sink.show(text)
    for path in pages:
        sink.show(Text(f"report    {path}"))
    if diagnosis.interrupted:
        sink.warn("interrupted: pieces without a verdict were not tried.")


@contextmanager
def _interrupts_reach_the_search() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the search rather than the command, unless they are ignored.

    Raises:
        InterruptError: one came before the search began, or after it.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}
    heard = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as interruption:
        raise InterruptError("interrupted before anything was tried.", "Nothing was left behind.") from interruption
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


class _ProgressView:
    """Shows how far a search is: a bar on a terminal, else a line for each attempt. Use it as a context manager.

    It draws only when told something: attempts are forks of this process, which must have no other thread then.
    """

    def __init__(self, sink: Sink) -> None:
        from rich.console import Console

        self._err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
        self._sink = sink
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _ProgressView:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Show one event of the search."""
        if self._sink.mode is not OutputMode.HUMAN:
            return
        if self._err.is_terminal:
            self._draw(progress)
        elif progress.verdict is not None:
            self._line(progress)

    def _draw(self, progress: Progress) -> None:
        from rich import progress as bars

        if self._bar is None:
            self._sink.end_stage()
            columns = (
                bars.BarColumn(),
                bars.MofNCompleteColumn(),
                bars.TimeElapsedColumn(),
                bars.TimeRemainingColumn(),
            )
            text = bars.TextColumn("{task.description}", markup=False)
            self._bar = bars.Progress(*columns, text, console=self._err, transient=True, auto_refresh=False)
            self._bar.start()
            self._task = self._bar.add_task("")
        if progress.verdict is not None and progress.verdict.failed:
            self._bar.print(self._told(progress))
        self._bar.update(
            self._task, completed=progress.done, total=progress.known, description=_where(progress), refresh=True
        )

    def _line(self, progress: Progress) -> None:
        self._err.print(
            f"[dim]{self._sink.seconds:6.1f} s[/dim]  {progress.done}/{progress.known}",
            self._told(progress),
        )

    def _told(self, progress: Progress) -> Any:
        from rich.text import Text

        verdict = progress.verdict
        if verdict is None:
            return Text(_where(progress))
        outcome = f"failed: {verdict.stage}" if verdict.failed else str(verdict.outcome)
        text = Text(f"{outcome}  ", style="bold red" if verdict.failed else "green")
        return text.append(f"{_where(progress)}, {verdict.seconds:.1f} s", style="default not bold")


def _where(progress: Progress) -> str:
    alone = ", its own code" if progress.isolated else ""
    return f"{progress.piece.label} ({progress.piece.path or 'the whole'}{alone})"


# --- shared by both -------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OptionError: it cannot be written there.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written: {error.strerror}.", "Name a file in a folder of yours."
        ) from error


def _require_writable(path: Path | None) -> None:
    """Refuse a file in a folder that is not there, before minutes of work."""
    if path is not None and not path.absolute().parent.is_dir():
        raise OptionError(f"{path}: there is no such folder.", "Name a file in a folder of yours.")


def _json_text(record: dict[str, Any]) -> str:
    from t2n_llm.export.folder import json_text

    return json_text(record, indent=2) + "\n"


# --- coverage, for people -------------------------------------------------------------------------


def _coverage_parts(report: CoverageReport) -> Iterator[Any]:
    from rich.markup import escape

    from generic_export.debug.coverage import Support

    yield _operators(report)
    for row in report.of(Support.MISSING):
        place = f"{row.module_path or '(root)'} ({row.source})" if row.source else row.module_path
        reason = row.reason.rpartition("): ")[2]
        told = f"{row.operator}, {row.refused} of {row.count} calls, first at {place}: {reason}"
        yield f"[bold red]missing:[/bold red] {escape(told)}"
    for module in report.uncaptured:
        times = f"{module.count} x " if module.count > 1 else ""
        yield (
            f"[bold red]not captured:[/bold red] {times}{escape(module.class_name)} "
            f"({escape(module.path or 'the whole')}): {escape(module.message)}"
        )
    for problem in report.problems:
        yield f"[yellow]the whole model:[/yellow] {escape(problem)}"
    counts = ", ".join(f"{len(report.of(support))} {support}" for support in Support)
    verdict = "[green]all can be written[/green]" if report.complete else "[bold red]not all can be written[/bold red]"
    yield (
        f"{verdict}  {escape(report.architecture)} ({escape(report.model_type)}): {counts}; captured as "
        f"{report.how}, {_layers_text(report)}, {report.seconds:.1f} s, no weights"
    )


def _layers_text(report: CoverageReport) -> str:
    if len(report.layers) == report.depth:
        return f"all {report.depth} layers"
    return f"layers {', '.join(map(str, report.layers))} for all {report.depth}"


def _operators(report: CoverageReport) -> Table:
    """What is missing first; then what is decomposed, then the rest, each by how often it is called."""
    from rich.markup import escape

    from generic_export.debug.coverage import Support

    colours = {Support.MISSING: "bold red", Support.DECOMPOSED: "cyan", Support.SUPPORTED: "green"}
    table = table_of("operator", "", ">calls", "first use", "line", "written as")
    for column in table.columns:
        column.overflow = "fold"  # on a narrow screen nothing is cut off
    for support in (Support.MISSING, Support.DECOMPOSED, Support.SUPPORTED):
        for row in sorted(report.of(support), key=lambda row: -row.count):
            cells = (row.operator, row.module_path or "(root)", row.source, ", ".join(row.becomes))
            operator, path, line, becomes = (escape(cell) for cell in cells)
            table.add_row(operator, f"[{colours[support]}]{support}[/]", str(row.count), path, line, becomes)
    return table
