"""Whether a captured program says what its module says.

In: a program, and its module with inputs. Out: yes or no, by running both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter, Node

from generic_export.compat import OpOverload, pytree, schema_of
from generic_export.torch_graph.sizes.guards import SQUEEZES

Run = Callable[[Sequence[torch.Tensor]], Any]

_ALIKE = 1e-3


def agrees(program: ExportedProgram, module: Run, tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether a program says what its module says; False where they have no values."""
    if any(each.is_meta for each in (*tensors, *program.state_dict.values())):
        return False
    expected, answered = _result(module, tensors), _result(lambda given: _interpreted(program, given), tensors)
    return expected is not None and answered is not None and _alike(expected, answered)


def _result(run: Run, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    try:
        with torch.no_grad():
            found = pytree.tree_leaves(run([tensor.clone() for tensor in tensors]))
    except Exception:  # whatever a module says to sizes that it does not take
        return None
    return [each for each in found if isinstance(each, torch.Tensor)]


def _interpreted(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> Any:
    given = iter(tensors)
    kept = {**program.constants, **program.state_dict}
    values = [
        next(given) if spec.kind is InputKind.USER_INPUT else kept[spec.target or ""]
        for spec in program.graph_signature.input_specs
    ]
    outputs = _AsCaptured(program.graph_module).run(*values)
    own = {spec.arg.name for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"}
    specs = program.graph_signature.output_specs
    return [value for value, spec in zip(outputs, specs, strict=True) if spec.arg.name in own]


class _AsCaptured(Interpreter):
    """Runs a graph; `squeeze` drops the axes whose size was fixed at 1 in the capture, and no dynamic one."""

    def run_node(self, n: Node) -> Any:
        # A part of a split that is not there at every size; placeholders without users take their arguments all the same.
        if n.op not in ("output", "placeholder") and not n.users and not _writes(n):
            return None
        if n.target not in SQUEEZES:
            return super().run_node(n)
        (given, *_), _ = self.fetch_args_kwargs_from_env(n)
        source: Any = n.args[0]
        axes = _dropped(n, [size == 1 and not isinstance(size, torch.SymInt) for size in source.meta["val"].shape])
        return given.squeeze(axes)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _dropped(node: Node, fixed: Sequence[bool]) -> tuple[int, ...]:
    chosen: Any = node.args[1] if len(node.args) > 1 else range(len(fixed))
    axes = [chosen] if isinstance(chosen, int) else chosen
    return tuple(axis for axis in axes if fixed[axis])


def _alike(expected: Sequence[torch.Tensor], answered: Sequence[torch.Tensor]) -> bool:
    return len(expected) == len(answered) and all(map(_near, expected, answered))


def _near(expected: torch.Tensor, answered: torch.Tensor) -> bool:
    if expected.shape != answered.shape or expected.dtype is not answered.dtype:
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        return bool(torch.equal(expected, answered))
    scale = max(1.0, float(expected.abs().nan_to_num().max())) if expected.numel() else 1.0
    return torch.allclose(expected, answered, rtol=0.0, atol=_ALIKE * scale, equal_nan=True)


__all__ = ["agrees"]
