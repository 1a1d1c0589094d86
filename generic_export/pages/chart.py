"""A chart of lines, as places in a drawing: `parts.html.j2` makes SVG of it.

In: lines of values. Out: a `Chart` in which everything is placed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 24, 12, 24


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        name: what it is.
        points: x, y and what the point says, by x.
    """

    name: str
    points: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class Chart:
    """A drawing.

    Attributes:
        label: what it shows, for those who do not see it.
        grid: heights with what they stand for.
        marks: places below with what they stand for.
        lines: the lines, from `left` to `right` of `width` x `height`.
    """

    label: str
    grid: tuple[tuple[float, str], ...]
    marks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT


def line_chart(
    label: str,
    lines: Sequence[Line],
    grid: Sequence[tuple[float, str]],
    marks: Sequence[tuple[float, str]],
    scale: Callable[[float], float] = float,
) -> Chart:
    """Place lines.

    Args:
        label: what the chart shows.
        lines: with values in any unit.
        grid: values of y with their text, the lowest first: the drawing reaches from the first to the last.
        marks: values of x with their text.
        scale: makes the values of y linear, such as `math.log10`.
    """
    xs = [x for line in lines for x, _, _ in line.points] or [0.0]
    first, width = min(xs), max(xs) - min(xs)
    low, high = scale(grid[0][0]), scale(grid[-1][0])

    def across(x: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * ((x - first) / width if width else 1.0), 1)

    def up(y: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (scale(y) - low) / (high - low), 1)

    return Chart(
        label,
        tuple((up(y), text) for y, text in grid),
        tuple((across(x), text) for x, text in marks),
        tuple(Line(line.name, tuple((across(x), up(y), text) for x, y, text in line.points)) for line in lines),
    )


__all__ = ["Chart", "Line", "line_chart"]
