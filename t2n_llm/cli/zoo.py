"""`t2n-llm zoo`: every architecture of the installed transformers through the export, with expectations and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t2n_llm.cli.console import Sink
from t2n_llm.cli.parameters import JsonOption, QuietOption
from t2n_llm.cli.session import open_sink

if TYPE_CHECKING:
    from t2n_llm.zoo.expectations import Expected, Surprise
    from t2n_llm.zoo.history import Run
    from t2n_llm.zoo.verdict import CellVerdict

_EXIT_SURPRISE = 1

zoo = typer.Typer(
    help="Export and validate tiny models of every architecture.",
    no_args_is_help=True,
)

_ResultsArgument = Annotated[list[Path], typer.Argument(help="Files of `zoo run --results`, one or several shards.")]
_ExpectedOption = Annotated[
    Path | None, typer.Option("--expected", metavar="FILE", help="Expected failures; default: those of the package.")
]
_HistoryOption = Annotated[
    Path | None, typer.Option("--history", metavar="DIR", help="Folder of earlier runs; this run is added.")
]
_HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the page.")]
_UpdateOption = Annotated[bool, typer.Option("--update", help="Rewrite the expected failures of this run.")]
_MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables into a Markdown file.")
]


_TaskOption = Annotated[
    list[str] | None, typer.Option("--task", metavar="NAMES", help="Tasks, separated by commas, or all.")
]


_SuiteOption = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        metavar="NAMES",
        help="timm, torchvision, torchaudio (t2n-llm[zoo]), nemo, diffusers, transformers, encoders.",
    ),
]


@zoo.command(name="run")
def run_command(
    task: _TaskOption = None,
    suite: _SuiteOption = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAMES", help="Model types or patterns, separated by commas.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", metavar="TYPES", help="f32, f16, q4_0; commas.")] = None,
    full_size: Annotated[bool, typer.Option("--full-size", help="Capture default configs in their real size.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of architectures, best known first.")
    ] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="The I-th of N parts, counted from 1.")] = "1/1",
    models: Annotated[
        Path | None,
        typer.Option("--models", metavar="FILE", help="Real checkpoints, one per line."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="FILE", help="Write results as JSON lines.")
    ] = None,
    history: _HistoryOption = None,
    html: _HtmlOption = None,
    markdown: _MarkdownOption = None,
    expected: _ExpectedOption = None,
    expect: Annotated[bool, typer.Option("--expect/--no-expect", help="Compare with the expected failures.")] = True,
    update: _UpdateOption = False,
    engine: Annotated[str, typer.Option("--runner", help="local, or ray: a Ray cluster (t2n-llm[ray]).")] = "local",
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="Address of the cluster, such as auto.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Parallel cases; default: one per core.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of one case.")] = 300.0,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of one case.")] = "4GB",
    decode_steps: Annotated[int, typer.Option(min=1, help="Tokens decoded by the checks.")] = 16,
    seed: Annotated[int, typer.Option(help="Random seed of the weights.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="New interpreter for each case; slower.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run cells (task x architecture x element type), each in a process of its own with limits.

    Exit code 0: everything is as expected. 1: something is not: a pass that was not expected counts, and with
    --no-expect, or for real checkpoints without --expected, whatever is not right. 2: bad input.
    """
    with open_sink(as_json, quiet) as sink:
        from generic_export.sizes import parse_size
        from t2n_llm.zoo.run import RunOptions, local_hosts, parse_shard, read_models, run_zoo
        from t2n_llm.zoo.verdict import NOT_RUNNABLE, RIGHT

        tasks, suites = _chosen(_words(task), _words(suite))
        options = RunOptions(
            only=_words(only),
            tasks=tasks,
            suites=suites,
            dtypes=_columns(_words(dtype), full_size=full_size),
            models=read_models(models) if models is not None else (),
            limit=limit,
            shard=parse_shard(shard),
            engine=engine,
            ray_address=ray_address,
            timeout_seconds=timeout,
            max_rss_bytes=parse_size(max_memory, positive=True),
            decode_steps=decode_steps,
            seed=seed,
            hosts=local_hosts(fresh),
            **({"jobs": jobs} if jobs is not None else {}),
        )
        rows = _expected_rows(expected) if expect and (models is None or expected is not None) else None
        verdicts = run_zoo(options, results, lambda verdict: sink.show(_line(verdict)))
        if update and rows is not None:
            rows = _update(verdicts, rows, expected)
        found = _judged(verdicts, rows)
        run = _kept(verdicts, history)
        _write_reports(run, history, html, markdown, rows or {})
    _tell(sink, run, found)
    if found or (found is None and any(verdict.outcome not in (RIGHT, NOT_RUNNABLE) for verdict in verdicts)):
        raise typer.Exit(_EXIT_SURPRISE)


@zoo.command(name="report")
def report_command(
    results: _ResultsArgument,
    history: _HistoryOption = None,
    html: _HtmlOption = None,
    markdown: _MarkdownOption = None,
    expected: _ExpectedOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Put the shards of a run together, and write its page and tables.

    Exit code 0: written. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.zoo.history import read_results

        verdicts = read_results(results)
        run = _kept(verdicts, history)
        _write_reports(run, history, html, markdown, _expected_rows(expected))
    _tell(sink, run)


@zoo.command(name="diff")
def diff_command(
    before: Annotated[Path, typer.Argument(help="Results of a run.")],
    after: Annotated[Path, typer.Argument(help="Results of a later one.")],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the cells that ended differently.

    Exit code 0: none is worse. 1: one that was right is not any more. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.zoo.history import compare_runs, read_results

        changes = compare_runs(read_results([before]), read_results([after]))
    sink.record({"changes": [asdict(change) for change in changes]})
    for change in changes:
        sink.show(_plain(f"{change.kind:<7} {change.key:<32} {change.before} -> {change.after} {change.message}"))
    if not changes:
        sink.show("Nothing changed.")
    if any(change.kind == "broken" for change in changes):
        raise typer.Exit(_EXIT_SURPRISE)


@zoo.command(name="expect")
def expect_command(
    results: _ResultsArgument,
    update: _UpdateOption = False,
    expected: _ExpectedOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare results with the expected failures, or make them the expected ones.

    Exit code 0: as expected, or updated. 1: not as expected. 2: bad input.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.zoo.expectations import surprises
        from t2n_llm.zoo.history import read_results
        from t2n_llm.zoo.suites.registry import rows_of_all

        verdicts = read_results(results)
        rows = _expected_rows(expected)
        if update:
            new = _update(verdicts, rows, expected)
            sink.show(f"{len(new)} rows, before {len(rows)}.")
            sink.record({"rows": len(new), "before": len(rows)})
            return
        found = surprises(verdicts, rows, rows_of_all())
    sink.record({"surprises": [asdict(surprise) for surprise in found]})
    _show_surprises(sink, found)
    if found:
        raise typer.Exit(_EXIT_SURPRISE)


@zoo.command(name="list")
def list_command(
    task: _TaskOption = None, suite: _SuiteOption = None, as_json: JsonOption = False, quiet: QuietOption = False
) -> None:
    """List the architectures of the installed transformers, and their classes; or the cases of suites.

    Exit code 0: listed. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.zoo.suites.registry import cases_of
        from t2n_llm.zoo.tasks import architectures
        from t2n_llm.zoo.verdict import row_of

        tasks, suites = _chosen(_words(task), _words(suite))
        names = {row_of(name, kind): class_name for name in tasks for kind, class_name in architectures(name).items()}
        names |= {row_of(name, case): found.told for name in suites for case, found in cases_of(name).items()}
    sink.record({"architectures": names})
    for name, class_name in names.items():
        sink.show(_plain(f"{name:<32} {class_name}"))


# --- shared ---------------------------------------------------------------------------------------


def _words(values: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for value in values or () for word in value.split(",") if word.strip())


def _chosen(tasks: tuple[str, ...], suites: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tasks and the libraries that are meant; a suite alone has no task beside it, and encoders are tasks."""
    from t2n_llm.zoo.suites.registry import ENCODERS, chosen_suites, encoder_tasks
    from t2n_llm.zoo.tasks import chosen_tasks

    named = chosen_suites(suites)
    meant = chosen_tasks(tasks) if tasks or not named else ()
    if ENCODERS in named:
        meant = tuple(dict.fromkeys((*meant, *encoder_tasks())))
    return meant, tuple(name for name in named if name != ENCODERS)


def _columns(dtypes: tuple[str, ...], *, full_size: bool) -> tuple[str, ...]:
    from t2n_llm.zoo.verdict import FULL_SIZE

    return (*dtypes, FULL_SIZE) if full_size else dtypes or ("f32",)


def _expected_rows(path: Path | None) -> dict[str, Expected]:
    from t2n_llm.zoo.expectations import EXPECTED_FILE, read_expected

    return read_expected(path or EXPECTED_FILE)


def _update(verdicts: Sequence[CellVerdict], rows: Mapping[str, Expected], path: Path | None) -> dict[str, Expected]:
    """Rewrite the rows of cells that were run; those of architectures that are gone go."""
    from t2n_llm.zoo.expectations import EXPECTED_FILE, updated, write_expected
    from t2n_llm.zoo.suites.registry import rows_of_all

    known = rows_of_all() | {verdict.row for verdict in verdicts}
    new = {key: row for key, row in updated(verdicts, rows).items() if key.rpartition(":")[0] in known}
    write_expected(new, path or EXPECTED_FILE)
    return new


def _judged(verdicts: Sequence[CellVerdict], rows: Mapping[str, Expected] | None) -> list[Surprise] | None:
    from t2n_llm.zoo.expectations import surprises

    return surprises(verdicts, rows) if rows is not None else None


def _kept(verdicts: Sequence[CellVerdict], history: Path | None) -> Run:
    from t2n_llm.zoo.history import Run, keep_run

    return keep_run(history, verdicts) if history is not None else Run("this run", tuple(verdicts))


def _write_reports(
    run: Run, history: Path | None, html: Path | None, markdown: Path | None, rows: Mapping[str, Expected]
) -> None:
    from t2n_llm.zoo.history import read_history
    from t2n_llm.zoo.page import page
    from t2n_llm.zoo.tables import FULL_SIZE_TABLE, full_size_markdown, replace_table, table_name
    from t2n_llm.zoo.tables import markdown as tables

    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(read_history(history) if history is not None else [run], rows), encoding="utf-8")
    if markdown is not None:
        text = markdown.read_text(encoding="utf-8") if markdown.exists() else ""
        written = [(table_name(task), tables(run.of_task(task), rows)) for task in run.tasks]
        for name, table in (*written, (FULL_SIZE_TABLE, full_size_markdown(run, rows))):
            text = replace_table(text, table, name) if table else text
        markdown.write_text(text, encoding="utf-8")


def _tell(sink: Sink, run: Run, found: list[Surprise] | None = None) -> None:
    """Say how a run went."""
    from t2n_llm.zoo.tables import summary

    record: dict[str, Any] = {"run": run.name, "cells": [verdict.asdict() for verdict in run.verdicts]}
    sink.record(record | ({"surprises": [asdict(surprise) for surprise in found]} if found is not None else {}))
    sink.show("")
    for line in summary(run):
        sink.show(_plain(line))
    if found is not None:
        _show_surprises(sink, found)


def _show_surprises(sink: Sink, found: Sequence[Surprise]) -> None:
    for surprise in found:
        sink.show(_plain(f"{surprise.kind}: {surprise.key}: {surprise.text}"))
    if found:
        sink.show(_plain(f"{len(found)} cells are not as expected; t2n-llm zoo expect RESULTS --update makes them so."))
    else:
        sink.show("Everything is as expected.")


def _line(verdict: CellVerdict) -> Any:
    error = verdict.max_abs_error
    figure = f" max abs err {error:.2g}" if error is not None else ""
    if verdict.layers:
        figure = f" {verdict.layers} layers, {verdict.processor_seconds:.1f} s of processor, {verdict.peak_rss_bytes / 1e9:.2f} GB,"
    reason = f" {verdict.error}: {verdict.message}" if verdict.message else ""
    return _plain(f"{verdict.key:<30} {verdict.outcome} [{verdict.stage}]{figure} {verdict.seconds:.1f} s{reason}")


def _plain(text: str) -> Any:
    """Return text that the console prints as it is: messages may hold brackets."""
    from rich.text import Text

    return Text(text)
