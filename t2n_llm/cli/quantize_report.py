"""`t2n-llm quantize-report`: what compression costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t2n_llm.check.options import EngineOptions, PlacementOptions
from t2n_llm.cli.parameters import ExportFolderArgument, JsonOption, QuietOption, takes_options
from t2n_llm.cli.session import EXIT_DISAGREES, open_sink, quiet_libraries
from t2n_llm.source.reference import SourceRef


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
