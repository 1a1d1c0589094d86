"""Sub-graphs to archives with the boundaries that a plan says.

In: `Subgraph`s and a `RemodelPlan`. Out: one archive each, checked in the engine, with the plan among its properties.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from generic_export.errors import OptionError
from generic_export.export import export_model_to_nnef
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.read.contents import read_contents
from generic_export.read.outline import read_outline
from generic_export.remodel.boundary import Boundary
from generic_export.remodel.plan import RemodelPlan, SubgraphPlan
from generic_export.remodel.plan_file import parse_plan, plan_dict
from generic_export.remodel.resolve import require_known, resolve
from generic_export.remodel.stages import BoundaryStages
from generic_export.remodel.subgraph import Subgraph
from generic_export.torch_graph.methods import SharedState, inner_of
from generic_export.torch_graph.nested import named_outputs
from generic_export.torch_graph.request import AxisSymbol, DynamicAxes, DynamicSize

PLAN_PROPERTY = "remodel_plan"
MODULE_PROPERTY = "remodelled_module"

_BOUNDARY = "_t2n_boundary"


@dataclass(frozen=True)
class Remodelled:
    """A sub-graph with its new boundary: the arguments of an export.

    Attributes:
        name: of the sub-graph.
        module: what to export; it takes `args`.
        args: example inputs, in order.
        input_names, output_names: of the archive.
        dynamic_axes: the axes that stay symbolic.
        assertions: relations that tract may rely on, beside the ranges in `dynamic_axes`.
        stages: the boundary before and after.
        boundary: everything that was decided.
        properties: what the archive says of its making: the plan, and the class of the inner module.
    """

    name: str
    module: BoundaryAdapter
    args: tuple[torch.Tensor, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    dynamic_axes: DynamicAxes
    assertions: tuple[str, ...]
    stages: BoundaryStages
    boundary: Boundary
    properties: dict[str, str | float]


def remodel(subgraph: Subgraph, plan: RemodelPlan) -> Remodelled:
    """Give a sub-graph the boundary that a plan says; its module is not modified.

    Args:
        subgraph: the module, with example arguments.
        plan: what becomes of it; a plan that does not name it leaves its boundary alone.

    Raises:
        OptionError: the plan does not fit the module; the message names the line.
        CaptureError: the module returns something else than tensors.
    """
    boundary = resolve(subgraph, plan)
    own = {name: one for name, one in plan.subgraphs.items() if name == subgraph.name}
    return Remodelled(
        name=subgraph.name,
        module=BoundaryAdapter(subgraph.module, boundary),
        args=boundary.example,
        input_names=tuple(one.outer_name for one in boundary.side.outer),
        output_names=tuple(one.outer_name for one in boundary.outer_outputs),
        dynamic_axes=_dynamic_axes(boundary),
        assertions=boundary.relations.assertions,
        stages=BoundaryStages.of(boundary),
        boundary=boundary,
        properties=_properties(subgraph, own),
    )


def export_remodelled(
    subgraphs: Sequence[Subgraph],
    plan: RemodelPlan,
    folder: str | os.PathLike[str],
    target: TractNNEF | None = None,
    *,
    compression_level: int | None = 0,
    overwrite: bool = True,
) -> dict[str, Path]:
    """Export sub-graphs to one archive each, `FOLDER/<name>.nnef` with the suffix of its form.

    The whole plan is held against all of them before the first is written.

    Args:
        subgraphs: the modules.
        plan: what becomes of their boundaries.
        folder: where to write; it is made if need be.
        target: the tract release, the check and its tolerance; its dynamic axes are replaced by the plan's.
        compression_level: None for directories, 0 for `.tar`, 1-9 for `.tgz`.
        overwrite: replace archives that are there already.

    Returns:
        The archives by name.

    Raises:
        OptionError: the plan does not fit a module; the message names the line.
        T2NError: see `export_model_to_nnef`.
    """
    require_known(subgraphs, plan)
    _require_file_names(subgraphs)
    remodelled = [remodel(subgraph, plan) for subgraph in subgraphs]
    Path(folder).mkdir(parents=True, exist_ok=True)
    return {
        one.name: export_one(one, Path(folder), target or TractNNEF(), compression_level, overwrite)
        for one in remodelled
    }


def export_one(
    remodelled: Remodelled, folder: Path, target: TractNNEF, compression_level: int | None = 0, overwrite: bool = True
) -> Path:
    """Export one sub-graph; see `export_remodelled`."""
    axes = remodelled.dynamic_axes if target.refuses_sizes else _dynamic_axes(remodelled.boundary, multiples=False)
    return export_model_to_nnef(
        remodelled.module,
        remodelled.args,
        folder / f"{remodelled.name}.nnef",
        replace(
            target,
            dynamic_axes=axes,
            specific_properties={**target.specific_properties, **remodelled.properties},
        ),
        input_names=remodelled.input_names,
        output_names=remodelled.output_names,
        compression_level=compression_level,
        custom_extensions=remodelled.assertions,
        overwrite=overwrite,
    )


def plan_of_archive(path: str | os.PathLike[str]) -> RemodelPlan | None:
    """Return the plan that an archive was made with, or None where it has none.

    Raises:
        ArchiveError: it is no archive.
        OptionError: its property holds no plan.
    """
    properties = dict(read_outline(read_contents(path).graph_text).properties)
    text = properties.get(PLAN_PROPERTY)
    return None if text is None else parse_plan(str(text), f"{path}, {PLAN_PROPERTY}")


def _properties(subgraph: Subgraph, own: Mapping[str, SubgraphPlan]) -> dict[str, str | float]:
    said = {PLAN_PROPERTY: json.dumps(plan_dict(RemodelPlan(own)))} if own else {}
    return {MODULE_PROPERTY: type(subgraph.module).__name__, **said}


def _dynamic_axes(boundary: Boundary, *, multiples: bool = True) -> DynamicAxes:
    """Return the axes that stay symbolic; `multiples` are said where the engine can be held to them."""
    relations = boundary.relations
    dims: dict[str, AxisSymbol] = {}
    axes: dict[str, dict[int, AxisSymbol]] = {}
    for one in boundary.side.outer:
        for axis, dim in enumerate(boundary.side.outer_dims(one)):
            if isinstance(dim, str):
                low, high = relations.bounds.get(dim, (None, None))
                ranged = {key: value for key, value in (("min", low), ("max", high)) if value is not None}
                symbol: AxisSymbol = Dim(dim, **ranged) if ranged else dim
                if multiples and dim in relations.multiples:
                    symbol = DynamicSize(dim, relations.multiples[dim], low or None, high)
                axes.setdefault(one.outer_name, {})[axis] = dims.setdefault(dim, symbol)
    return axes


def _require_file_names(subgraphs: Sequence[Subgraph]) -> None:
    names = [subgraph.name for subgraph in subgraphs]
    for name in names:
        if not name or name != Path(name).name or name.startswith("."):
            raise OptionError(f"sub-graph name {name!r} is no file name.", "Use letters, digits, -, _ and dots.")
        if names.count(name) > 1:
            raise OptionError(f"two sub-graphs are called {name!r}.", "Give each its own name.")


# `BoundaryAdapter`: a module that takes and gives what a plan says, around one that stays as it is.
# In: a module and its `Boundary`. Out: a module to export; parameters bear the names that they have in the inner one.
class BoundaryAdapter(SharedState):
    """A module with another boundary.

    Args:
        inner: the module; it is called as it is, hooks included, and not modified.
        boundary: what its inputs and outputs become.

    Raises:
        OptionError: it is a ScriptModule, which keeps its state out of reach.
    """

    def __init__(self, inner: nn.Module, boundary: Boundary) -> None:
        if isinstance(inner, torch.jit.ScriptModule):
            raise OptionError(
                f"sub-graph {boundary.name!r} is a ScriptModule, whose boundary cannot be changed from outside.",
                "Wrap it in an nn.Module that calls it.",
            )
        super().__init__(inner)
        object.__setattr__(self, _BOUNDARY, boundary)  # past nn.Module; under a name that no child has

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the inner module.

        Args:
            inputs: the archive's inputs, in order.
        Returns:
            The archive's outputs, in order.
        """
        boundary: Boundary = self.__dict__[_BOUNDARY]
        args, kwargs = full_arguments(boundary, *inputs)
        outputs = named_outputs(inner_of(self)(*args, **kwargs))[1]
        axes = [boundary.outputs[position].collapsed for position in boundary.kept]
        kept = [outputs[position] for position in boundary.kept]
        return tuple(tensor.squeeze(gone) if gone else tensor for tensor, gone in zip(kept, axes, strict=True))


def full_arguments(boundary: Boundary, *inputs: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that the inner module is called with for these inputs of the archive."""
    return boundary.side.call.arguments(boundary.side.inner(inputs))
