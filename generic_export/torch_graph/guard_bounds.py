"""The sizes that torch.export asks for in its message, and those between which a guard holds that it refuses a model for.

`(2*s - 1) % s != 0` is false of one position alone, `400*b <= 2**29` of batches of millions. In: what torch.export says. Out: the
smallest and largest size of each symbol that it suggests, or at which its guards hold, where they fail beyond those only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

_REFUSED = re.compile(
    r"Not all values of (\w+) = (\S+) in the specified range .*?satisfy the generated guard (.+?)\.?$", re.M
)
_SUGGESTED = re.compile(r"(\w+) = Dim\('\w+'((?:, (?:min|max)=\d+)+)\)")
_LARGEST_MINIMUM, _LARGEST_TRIED, _LARGEST_SIZE = 64, 4096, 1 << 40
_FUNCTIONS = {
    "torch.sym_float": "",
    "torch.sym_min": "min",
    "torch.sym_max": "max",
}  # a size is equal to itself as a float
_ARITHMETIC = (
    ast.Expression, ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Constant, ast.Name, ast.Call,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip

_NAMES = ("size", "min", "max")

Bounds = Mapping[str, Mapping[str, int]]
"""Symbol -> `min`, `max` or both."""


def suggested_bounds(message: str) -> dict[str, dict[str, int]]:
    """Return what torch.export suggests by itself, and for other symbols where their guards hold."""
    own = {
        symbol: {key: int(value) for key, value in re.findall(r"(min|max)=(\d+)", bounds)}
        for symbol, bounds in _SUGGESTED.findall(message)
    }
    return joined_bounds(guard_bounds(message), own)


def joined_bounds(bounds: Bounds, later: Bounds) -> dict[str, dict[str, int]]:
    """Return bounds of both, the later ones where both say something."""
    return {symbol: {**bounds.get(symbol, {}), **later.get(symbol, {})} for symbol in (*bounds, *later)}


def guard_bounds(message: str) -> dict[str, dict[str, int]]:
    """Return `min` and `max` of symbols, as torch.export suggests others by itself.

    Args:
        message: of its error; guards that hold from no small size on, or up to no large one, are left alone.
    """
    found: dict[str, dict[str, int]] = {}
    for symbol, source, guard in _REFUSED.findall(message):
        for theirs, ours in _FUNCTIONS.items():
            guard = guard.replace(theirs, ours)
        holds = _read(guard.replace(source, "size"))
        if holds is None:
            continue
        bounds = found.setdefault(symbol, {})
        least, most = _holds_from(holds), _holds_up_to(holds)
        if least is not None:
            bounds["min"] = max(least, bounds.get("min", 0))
        if most is not None:
            bounds["max"] = min(most, bounds.get("max", most))
    return {symbol: bounds for symbol, bounds in found.items() if bounds}


def _read(guard: str) -> Callable[[int], bool] | None:
    """Return a guard as a function of a size; None of anything but arithmetic on it."""
    try:
        tree = ast.parse(guard, mode="eval")
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC) or (isinstance(node, ast.Name) and node.id not in _NAMES):
            return None
    code = compile(tree, "guard", "eval")

    def holds(size: int) -> bool:
        try:
            return bool(eval(code, {"__builtins__": {}}, {"size": size, "min": min, "max": max}))
        except ZeroDivisionError:
            return False

    return holds


def _holds_from(holds: Callable[[int], bool]) -> int | None:
    failing = [size for size in range(_LARGEST_TRIED) if not holds(size)]
    least = failing[-1] + 1 if failing else 0
    return least if 0 < least <= _LARGEST_MINIMUM else None


def _holds_up_to(holds: Callable[[int], bool]) -> int | None:
    most, beyond = _LARGEST_TRIED, _LARGEST_SIZE
    if not holds(most):
        return _holds_up_to_a_small_one(holds)
    if holds(beyond):
        return None
    while beyond - most > 1:
        between = (most + beyond) // 2
        most, beyond = (between, beyond) if holds(between) else (most, between)
    return most


def _holds_up_to_a_small_one(holds: Callable[[int], bool]) -> int | None:
    """Return the last of the smallest sizes, such as 64 for `size == min(64, size)`, if no larger one does again."""
    held = [size for size in range(1, _LARGEST_TRIED) if holds(size)]
    return held[-1] if held and held == list(range(1, held[-1] + 1)) else None


__all__ = ["Bounds", "guard_bounds", "joined_bounds", "suggested_bounds"]
