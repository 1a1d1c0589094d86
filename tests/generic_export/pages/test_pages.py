"""What all pages share: text stays text, colours can be told apart from what they stand on, charts place what they show."""

from __future__ import annotations

import math
import re
from importlib.resources import files

import pytest
from jinja2 import TemplateError

from generic_export.pages import render
from generic_export.pages.chart import Line, line_chart

_STYLE = files("generic_export.pages").joinpath("templates/style.css").read_text(encoding="utf-8")
_PAIRS = re.compile(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)")
_TEXT, _DRAWN = 4.5, 3.0  # WCAG 2.2, level AA: text, and what is drawn


def _luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_drawings_stand_out(theme: int) -> None:
    rules = {name: dict(_pairs(body, theme)) for name, body in re.findall(r"([\w.:]+) \{([^}]*)\}", _STYLE)}
    root = rules[":root"]
    for back in ("bg", "card", "code"):
        for ink in ("ink", "soft", "link"):
            assert _contrast(root[ink], root[back]) >= _TEXT, (ink, back)
    looks = {name: rule for name, rule in rules.items() if "look" in rule}
    assert len(looks) == 14
    for name, rule in looks.items():
        for back in ("bg", "card", "code"):
            wanted = _TEXT if "look-bg" in rule else _DRAWN
            assert _contrast(rule["look"], root[back]) >= wanted, (name, back)
        if "look-bg" in rule:
            assert _contrast(rule["look"], rule["look-bg"]) >= _TEXT, name
            assert _contrast(root["soft"], rule["look-bg"]) >= _TEXT, name


def _pairs(body: str, theme: int) -> list[tuple[str, str]]:
    return [(found[0], found[1 + theme]) for found in _PAIRS.findall(body)]


def test_text_stays_text_in_every_place() -> None:
    odd = "<script>alert('1')</script>\" onclick=\"x"
    page = render("tests.generic_export.pages", "odd.html.j2", title=odd, odd=odd)
    assert page.count("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&#34; onclick=&#34;x") == 15
    assert "<script>alert" not in page and 'onclick="x' not in page


def test_a_name_that_the_content_does_not_have_is_an_error() -> None:
    with pytest.raises(TemplateError, match="title"):
        render("tests.generic_export.pages", "odd.html.j2", odd="")


def test_a_chart_places_lines_between_its_grid() -> None:
    line = Line("up", ((0, 1e-4, "low"), (1, 1e-3, "middle"), (2, 1e-2, "high")))
    chart = line_chart("errors", [line], [(1e-4, "1e-4"), (1e-2, "1e-2")], [(0, "0"), (2, "2")], scale=math.log10)
    (low, middle, high) = chart.lines[0].points
    assert (low[0], high[0]) == (chart.left, chart.right) and middle[0] == (chart.left + chart.right) / 2
    assert (low[1], high[1]) == tuple(height for height, _ in chart.grid)
    assert middle[1] == pytest.approx((low[1] + high[1]) / 2)
    assert [place for place, _ in chart.marks] == [chart.left, chart.right]


def test_a_chart_of_one_point_or_none_is_drawn() -> None:
    grid = [(0, "0"), (1, "1")]
    assert line_chart("one", [Line("a", ((0, 1, "x"),))], grid, []).lines[0].points[0][1] == 12
    assert line_chart("none", [], grid, []).lines == ()
