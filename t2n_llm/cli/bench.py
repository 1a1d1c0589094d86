"""`t2n-llm profile`, `bench` and `quantize-report`: the time of an archive, its speed beside others, the cost of compression."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t2n_llm.cli.parameters import ArchiveArgument, DeviceOption, JsonOption, QuietOption, require_archives
from t2n_llm.cli.session import open_sink
from t2n_llm.cli.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from generic_export.inference_target.tract.engines.cli import TractCli
    from generic_export.inference_target.tract.engines.wheel import TractWheel
    from t2n_llm.bench.machine_limits import MachineLimits
    from t2n_llm.bench.profiling import PhaseProfile, ProfileReport, TimeShare


from t2n_llm.check.options import EngineOptions, PlacementOptions
from t2n_llm.cli.parameters import ExportFolderArgument, takes_options
from t2n_llm.cli.session import EXIT_DISAGREES, quiet_libraries
from t2n_llm.source.reference import SourceRef

_EngineOption = Annotated[str, typer.Option(help="wheel: tract from pip. cli: the tract command.")]
_TractOption = Annotated[Path | None, typer.Option("--tract", help="Path of the tract command (implies --engine cli).")]
_TimeoutOption = Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of one load or run.")]


def profile(
    archive: ArchiveArgument,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    past: Annotated[
        int | None, typer.Option("--depth", min=0, help="Cached tokens before the decode step; default: the prompt.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of each table.")] = 15,
    engine: _EngineOption = "wheel",
    tract: _TractOption = None,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads of the tract command (--engine cli).")] = 1,
    device: DeviceOption = "cpu",
    timeout: _TimeoutOption = 600.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the time of each operator and module, in prefill and in decoding.

    Exit code 0: measured. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.bench.profiling import profile_archive
        from t2n_llm.export.archive_lookup import locate_archive

        report = profile_archive(
            locate_archive(archive),
            _engine(engine, tract, device, timeout, threads),
            prefill=prefill,
            past=prefill if past is None else past,
            progress=sink.stage,
        )
    sink.record(report.asdict())
    sink.show(*_profile_tables(report, rows))


def bench(
    archives: Annotated[
        list[Path],
        typer.Argument(help="Exports or archives; ratios are relative to the first.", callback=require_archives),
    ],
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE", help="Compare: llama.cpp[:FILE.gguf], onnxruntime[:FOLDER], torch[:DTYPE]; repeatable."
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--reference", help="Original of the first archive: hub id or folder; default: recorded."),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option("--prefill", "--pp", metavar="N,...", help="Prompt tokens: 512; with --against 64,512,2048."),
    ] = None,
    decode: Annotated[
        int | None, typer.Option("--decode", "--tg", min=1, help="Generated tokens: 128; with --against 16.")
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Cached tokens before decoding: 0; with --against 64,512,2048,8192,16384."),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N,...", help="Threads, one run each: 1; with --against 1,all.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Measured runs; the median is reported.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before measuring.")] = 1,
    engine: _EngineOption = "wheel",
    tract: _TractOption = None,
    device: DeviceOption = "cpu",
    timeout: _TimeoutOption = 600.0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw a chart (needs t2n-llm[plot]).")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure prefill and decode speed, load time and peak memory.

    Exit code 0: measured. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.bench.benchmark import bench_archives
        from t2n_llm.cli.comparison import Grid, check_plot, comparison_tables, plot_comparison
        from t2n_llm.export.archive_lookup import locate_archive

        if plot is not None:
            check_plot(plot)
        grid = Grid.parse(prefill, depth, threads)
        located = [locate_archive(archive) for archive in archives]
        command = engine == "cli" or tract is not None
        chosen = _engine(engine, tract, device, timeout, grid.only_threads if command else 1)
        plan = grid.plan(located, decode, repeat, warmup, against=bool(against))
        report = bench_archives(located, chosen, plan, sink.stage, against=against or (), checkpoint=checkpoint)
        if plot is not None:
            plot_comparison(report, plot)
    sink.record(report.asdict())
    sink.show(*comparison_tables(report))
    if plot is not None:
        sink.drew(plot)


def _engine(name: str, binary: Path | None, device: str, timeout: float, threads: int = 1) -> TractWheel | TractCli:
    """Return the engine that the options name; `threads` are the command's.

    Raises:
        OptionError: there is no such engine or device, or the engine takes no threads.
        EngineMissingError: it is not installed.
    """
    from generic_export.errors import OptionError
    from generic_export.inference_target.tract.engines.cli import TractCli
    from generic_export.inference_target.tract.engines.wheel import TractWheel
    from t2n_llm.check.options import ENGINES

    if name not in ENGINES:
        raise OptionError(f"engine {name!r} is unknown.", f"Use one of {', '.join(ENGINES)}.")
    if name == "cli" or binary is not None:
        return TractCli(binary, timeout_seconds=timeout, device=device, threads=threads)
    if threads > 1:
        raise OptionError(f"the wheel runs matmuls on one thread, but --threads is {threads}.", "Add --engine cli.")
    return TractWheel(timeout_seconds=timeout, device=device)


# --- for people -----------------------------------------------------------------------------------


def _profile_tables(report: ProfileReport, rows: int) -> Iterator[Any]:
    limits = report.limits
    for phase in report.phases:
        yield (
            f"[bold]{phase.name}[/bold]: {phase.new_tokens} new, {phase.past_tokens} past, "
            f"{phase.seconds * 1e3:.2f} ms ({'nodes: ' if phase.steps else ''}mean of {phase.iterations} runs), "
            f"tract {report.engine_version} ({report.engine}, {report.device})"
        )
        if phase.caches_as_inputs:
            yield (
                "[dim]Caches were inputs, which Concat copies; a runtime that keeps them as state avoids the "
                "copy.[/dim]"
            )
        if phase.steps:
            yield _growth(phase)
        yield _share_table("operator", phase.operators, rows, limits)
        if any(share.kind for share in phase.modules):  # an archive that we did not write names no modules
            yield _share_table("module", phase.modules, rows, limits)
    yield (
        f"[dim]One thread of this machine reads {limits.bytes_per_second / 1e9:.1f} GB/s and computes "
        f"{limits.flops_per_second / 1e9:.0f} GFLOP/s (f32). GB/s: weights and caches; limit: minimum "
        "time at that bandwidth or compute rate, as a share of the measured time.[/dim]"
    )


def _growth(phase: PhaseProfile) -> str:
    """Say how long whole steps took, by the number of past tokens."""
    steps = ", ".join(f"{step.seconds * 1e3:.2f} ms at {step.past}" for step in phase.steps)
    growth = phase.seconds_per_position
    each = f"; {growth * 1e9:.0f} ns per cached token" if growth is not None else ""
    return f"[dim]Steps with the caches as engine state: {steps}{each}.[/dim]"


def _share_table(heading: str, shares: tuple[TimeShare, ...], rows: int, limits: MachineLimits) -> Table:
    table = table_of(heading, ">nodes", ">ms", ">share", ">GB/s", ">limit")
    for share in shares[:rows]:
        _add_share(table, share, limits)
    if rest := shares[rows:]:
        seconds = sum(share.seconds for share in rest)
        whole = sum(share.share for share in rest)
        nodes = sum(share.nodes for share in rest)
        table.add_row(f"... {len(rest)} more", str(nodes), f"{seconds * 1e3:.3f}", f"{whole:.1%}", "", "")
    return table


def _add_share(table: Table, share: TimeShare, limits: MachineLimits) -> None:
    from rich.markup import escape

    speed = f"{share.bytes / share.seconds / 1e9:.1f}" if share.bytes >= 0.1e9 * share.seconds > 0 else ""
    near = share.share_of_limit(limits)
    limit = f"{near:.0%}" if near >= 0.005 else ""
    took = f"{share.seconds * 1e3:.3f}"
    table.add_row(escape(share.name), str(share.nodes), took, f"{share.share:.1%}", speed, limit)


# --- quantize-report ---------------------------------------------------------------------------------


@takes_options
def quantize_report(
    folder: ExportFolderArgument,
    reference: Annotated[
        str | None,
        typer.Option(help="Original (hub id or folder) or another export; default: recorded."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure on; default: a built-in text."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to score.")] = 2048,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 256,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="llama.cpp[:FILE.gguf]",
            help="Compare with a GGUF file, or with ggml's rounding; repeatable.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Chart of errors (.png, t2n-llm[plot]) or report (.html)."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with code 1 above this mean KL divergence.")
    ] = None,
    noted: Annotated[
        bool, typer.Option("--record", help="Record the quality in export.json and the model card.")
    ] = False,
    origin: SourceRef = SourceRef(),
    placement: PlacementOptions = PlacementOptions(),
    engine: EngineOptions = EngineOptions(),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure the quality of a compressed export: tensor errors, KL divergence, perplexity.

    Exit code 0: measured. 1: the divergence is above --max-kl. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        quiet_libraries(sink)
        from t2n_llm.cli.report_plot import plot_report, require_plotting
        from t2n_llm.inspect import quantize_report as measuring

        if plot is not None:
            require_plotting(plot)
        report = measuring.quantize_report(
            folder,
            origin.named(reference or ""),
            text=text,
            tokens=tokens,
            window=window,
            placement=placement.placement,
            engine=engine,
            against=against or (),
            reporter=sink,
        )
        if plot is not None:
            plot_report(report, plot)
        if noted:
            from dataclasses import asdict

            from t2n_llm.export.card_page import note

            if not note(folder, quality={**asdict(report.quality), "text": report.text, "engine": report.engine}):
                sink.warn(f"{folder / 'README.md'} was edited and is not changed.")
    sink.quality(report, max_kl)
    if plot is not None:
        sink.drew(plot)
    if max_kl is not None and not report.quality.mean_kl_divergence <= max_kl:
        raise typer.Exit(EXIT_DISAGREES)
