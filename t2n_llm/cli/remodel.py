"""`t2n-llm remodel`: modules to archives with the boundaries that a plan says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t2n_llm.cli.console import Sink
from t2n_llm.cli.parameters import JsonOption, QuietOption
from t2n_llm.cli.session import open_sink
from t2n_llm.cli.tables import table_of

if TYPE_CHECKING:
    from generic_export.remodel import BoundaryStages, Remodelled, RemodelPlan, Subgraph

_ARCHIVES: Mapping[str, int | None] = {"tar": 0, "tgz": 6, "dir": None}


def remodel(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="Function that returns modules and example inputs: package.module:factory or file.py:factory.",
        ),
    ],
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan in YAML or JSON.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Output folder; default: the current one.")
    ] = None,
    dump_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a template of a plan; -: print it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show inputs and outputs; write nothing.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show changes as lines.")] = False,
    archive: Annotated[str, typer.Option(help="Form of the archive: tar, tgz or dir.")] = "tar",
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare tract with PyTorch.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Export modules with different inputs and outputs, described by a plan.

    Exit code 0: exported (and checked). 2: bad input, or tract disagrees. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from generic_export.errors import OptionError
        from generic_export.remodel import load_plan
        from t2n_llm.source.factory import subgraphs_of

        if archive not in _ARCHIVES:
            raise OptionError(f"--archive is {archive!r}.", f"Choose one of {', '.join(_ARCHIVES)}.")
        if (config is None) == (dump_config is None):
            raise OptionError("use either --config or --dump-config.", "--dump-config writes a plan to start from.")
        if dump_config is not None:
            _dump(subgraphs_of(factory), dump_config, force, sink)
            return
        plan = load_plan(config or Path())
        subgraphs = subgraphs_of(factory)
        remodelled = _remodelled(subgraphs, plan)
        archives: Mapping[str, Path] = {}
        if not dry_run:
            sink.stage(f"exporting {', '.join(one.name for one in remodelled)}")
            archives = _export(subgraphs, plan, output or Path(), archive, check, force)
    sink.record(
        {
            "subgraphs": [one.stages.asdict() for one in remodelled],
            "archives": {name: str(path) for name, path in archives.items()},
        }
    )
    for one in remodelled:
        sink.show(*(_diff(one.stages) if diff else _table(one.stages)))
    for path in archives.values():
        sink.show(_written(path, check))


def _remodelled(subgraphs: Sequence[Subgraph], plan: RemodelPlan) -> list[Remodelled]:
    from generic_export.remodel import remodel as remodel_one
    from generic_export.remodel.resolve import require_known

    require_known(subgraphs, plan)
    return [remodel_one(subgraph, plan) for subgraph in subgraphs]


def _export(
    subgraphs: Sequence[Subgraph], plan: RemodelPlan, folder: Path, archive: str, check: bool, force: bool
) -> dict[str, Path]:
    from generic_export import TractNNEF
    from generic_export.remodel import export_remodelled

    return export_remodelled(
        subgraphs,
        plan,
        folder,
        TractNNEF(check_io=check),
        compression_level=_ARCHIVES[archive],
        overwrite=force,
    )


def _dump(subgraphs: Sequence[Subgraph], target: Path, force: bool, sink: Sink) -> None:
    """Write the plan that changes nothing."""
    from rich.markup import escape

    from generic_export.errors import OutputExistsError
    from generic_export.remodel import plan_text, save_plan, template_plan
    from generic_export.remodel.plan_file import plan_dict

    plan = template_plan(subgraphs)
    if str(target) == "-":
        sink.record(plan_dict(plan))
        sink.show(escape(plan_text(plan).rstrip()))
        return
    if target.exists() and not force:
        raise OutputExistsError(f"{target} exists already.", "Use another name, or pass --force to replace it.")
    save_plan(plan, target)
    sink.record({"plan": str(target)})
    sink.show(f"[green]written[/green] {escape(str(target))}: {len(plan.subgraphs)} sub-graphs")


# --- for people -----------------------------------------------------------------------------------


def _table(stages: BoundaryStages) -> Iterator[Any]:
    from rich.markup import escape

    table = table_of(stages.name, "", "raw", "collapsed", "bound", "final")
    for kind, name, *cells in stages.rows():
        gone = [cell or "[dim]-[/dim]" for cell in map(escape, cells)]
        table.add_row(escape(name), kind, *gone)
    yield table
    final = stages.interfaces["final"]
    for relation in final.relations:
        yield f"asserted    {escape(relation)}"
    for note in final.notes:
        yield f"bound       {escape(note)}"
    outputs = [port.name for port in final.ports if port.kind == "output"]
    yield f"outputs     {escape(', '.join(outputs))}"


def _diff(stages: BoundaryStages) -> Iterator[str]:
    from rich.markup import escape

    colours = {"-": "red", "+": "green"}
    yield f"[bold]{escape(stages.name)}[/bold]"
    for line in stages.diff().splitlines():
        colour = colours.get(line[0])
        yield f"[{colour}]{escape(line)}[/{colour}]" if colour else escape(line)


def _written(path: Path, checked: bool) -> str:
    from rich.markup import escape

    outcome = "[green]exported[/green]" if checked else "[yellow]not checked[/yellow]"
    return f"{outcome}  {escape(str(path))}"
