"""`t2n-llm inspect` and `env`: the content of an archive as tables, colored text or JSON; the environment for a bug report."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from generic_export.sizes import size_text
from t2n_llm.cli.parameters import ArchiveArgument, JsonOption, QuietOption
from t2n_llm.cli.session import open_sink
from t2n_llm.cli.tables import filled_table

if TYPE_CHECKING:
    from rich.table import Table

    from t2n_llm.inspect.inspection import Inspection


_EXIT_REFUSED = 1


def inspect(
    archive: ArchiveArgument,
    graph: Annotated[bool, typer.Option("--graph", help="Print graph.nnef instead.")] = False,
    tensors: Annotated[
        int, typer.Option("--tensors", min=0, metavar="N", help="Number of largest tensors to list; 0: all.")
    ] = 10,
    engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Load the archive in tract to list its operators.")
    ] = True,
    device: Annotated[str, typer.Option(help="Device to optimize for: cpu, cuda or metal.")] = "cpu",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show inputs, outputs, tensors, cache and operators of an archive.

    Exit code 0: read. 1: tract refuses the archive. 2: it is damaged, or bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.export.archive_lookup import locate_archive
        from t2n_llm.inspect.inspection import ask_engine, inspect_archive

        inspection = inspect_archive(locate_archive(archive))
        if graph:
            _print_graph(inspection.contents.graph_text, as_json)
            return
        if engine:
            from generic_export.inference_target.tract.engines.wheel import TractWheel

            inspection = ask_engine(inspection, TractWheel(device=device))
    sink.record(inspection.asdict())
    sink.show(*_human(inspection, tensors))
    if inspection.engine is not None and inspection.engine.refusal is not None:
        raise typer.Exit(_EXIT_REFUSED)


def _print_graph(text: str, as_json: bool) -> None:
    """Print the text of the graph: coloured on a terminal, as it is in a pipe."""
    from rich.console import Console
    from rich.syntax import Syntax

    from t2n_llm.cli.nnef_lexer import NnefLexer
    from t2n_llm.export.folder import json_text

    console = Console(soft_wrap=True, highlight=False, emoji=False)
    if as_json:
        console.file.write(json_text({"graph": text}) + "\n")
    elif console.is_terminal:
        console.print(Syntax(text, NnefLexer(), theme="ansi_dark").highlight(text), end="")
    else:
        console.file.write(text)


# --- for people -----------------------------------------------------------------------------------


def _human(inspection: Inspection, tensors: int) -> Iterator[Any]:
    from rich.markup import escape

    from generic_export.inference_target.tract.engines.device_forms import notes_of

    contents, outline = inspection.contents, inspection.outline
    values = sum(share.values for share in inspection.shares)
    yield (
        f"[bold]{escape(str(contents.path))}[/bold]: graph {escape(outline.name)}, {contents.format.value}, "
        f"{size_text(contents.stored_bytes)}, {values:,} values with {inspection.bits_per_weight:.2f} bits"
    )
    yield _interface(inspection)
    yield f"symbols     {escape(', '.join(outline.symbols) or 'none')}"
    yield f"assertions  {escape(', '.join(outline.assertions) or 'none')}"
    yield f"registries  {escape(', '.join(outline.registries) or 'none')}"
    for key, value in outline.properties:
        yield f"[dim]{escape(key)} = {escape(str(value))}[/dim]"
    for note in notes_of(outline):
        yield f"device      {escape(str(note))}"
    yield _dtypes(inspection)
    yield _largest(inspection, tensors)
    yield f"cache       {_cache_text(inspection)}"
    yield _operators(inspection)
    yield from _engine_lines(inspection)
    for problem in inspection.problems:
        yield f"[yellow]problem:[/yellow] {escape(problem)}"
    for part in outline.unknown:
        yield f"[yellow]not parsed:[/yellow] line {part.line}: {escape(part.text)}"


def _interface(inspection: Inspection) -> Table:
    """Inputs and outputs; long runs of caches are told in one line."""
    outline = inspection.outline
    rows: list[tuple[str, ...]]
    rows = [("input", entry.name, entry.datum_type, f"[{', '.join(entry.shape)}]") for entry in outline.externals]
    rows += [("output", name, "", "") for name in outline.outputs]
    return filled_table(("", "name", "type", "shape"), _shortened(rows))


def _shortened(rows: list[tuple[str, ...]], longest: int = 4) -> Iterator[tuple[str, ...]]:
    """Yield the rows of each kind, of a long kind only its first and its last."""
    for kind in ("input", "output"):
        found = [row for row in rows if row[0] == kind]
        if len(found) <= longest:
            yield from found
            continue
        yield from found[: longest - 1]
        yield (kind, f"... {len(found) - longest} more ...", "", "")
        yield found[-1]


def _dtypes(inspection: Inspection) -> Table:
    rows = [
        (share.dtype, f"{share.tensors}", f"{share.values:,}", size_text(share.bytes), f"{share.bits_per_value:.2f}")
        for share in inspection.shares
    ]
    return filled_table(("type", ">tensors", ">values", ">bytes", ">bits a value"), rows)


def _largest(inspection: Inspection, count: int) -> Table:
    tensors = sorted(inspection.contents.tensors, key=lambda tensor: tensor.data_bytes, reverse=True)
    shown = tensors[:count] if count else tensors
    title = "largest tensors" if len(shown) < len(tensors) else "tensors"
    rows = [(tensor.label, tensor.dtype, str(list(tensor.shape)), size_text(tensor.data_bytes)) for tensor in shown]
    return filled_table((title, "type", "shape", ">bytes"), rows)


def _cache_text(inspection: Inspection) -> str:
    cache = inspection.cache
    if cache is None:
        return "none"
    text = f"{cache.tensors} tensors, {size_text(cache.bytes_per_token)} per token"
    if cache.peak_bytes is not None:
        text += f", {size_text(cache.peak_bytes)} at the model's {cache.max_positions:,} positions"
    return text


def _operators(inspection: Inspection) -> Table:
    """Operators as written beside operators as run: two lists, since their names are not the same."""
    written = inspection.outline.operators
    run = inspection.engine.operators if inspection.engine is not None else ()
    rows = [(*one, *other) for one, other in zip_longest(written, run, fillvalue=("", ""))]
    return filled_table(("operators in graph.nnef", ">", "operators of the optimized graph", ">"), rows)


def _engine_lines(inspection: Inspection) -> Iterator[str]:
    from rich.markup import escape

    view = inspection.engine
    if view is None:
        return
    if view.refusal is not None:
        yield f"[bold red]tract {view.version} refuses the archive:[/bold red] {escape(view.refusal)}"
        return
    state = (
        "no growing caches"
        if inspection.cache is None
        else "caches as engine state"
        if view.stateful
        else "keeps caches"
    )
    yield f"tract {view.version}: {state}, {size_text(view.peak_rss_bytes)} of memory to load and optimize"
    yield f"  inputs    {escape('; '.join(map(str, view.inputs)))}"
    yield f"  outputs   {escape('; '.join(map(str, view.outputs)))}"


# --- environment -------------------------------------------------------------------------------------


def env(as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Show versions, processor, memory, disk and variables for a bug report.

    Exit code 0: shown. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.inspect.environment import read_environment

        found = read_environment()
    sink.record(found.asdict())
    sink.show(filled_table(("t2n-llm env", ""), found.rows()))
