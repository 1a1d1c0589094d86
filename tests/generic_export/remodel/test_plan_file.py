"""Plans as text: what is written is read back, what is wrong is told with its line."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from generic_export.errors import OptionError
from generic_export.remodel import (
    BindConstant,
    BindSize,
    BindValue,
    InputPlan,
    OutputPlan,
    RemodelPlan,
    SubgraphPlan,
    SymbolConstraint,
    load_plan,
    parse_plan,
    plan_text,
    save_plan,
)

# Shrinking a whole plan takes minutes, and the plan is told anyway.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

_TEXTS = st.text(
    st.sampled_from("aBT_.09é😀\x00\x1f\x7f\x85\u2028\ufeff\t\n '\":#-?|>{}[],&*!%@`~=\\"), min_size=1, max_size=8
)
# Words that YAML reads as something else than text, beside any text at all.
_NAMES = _TEXTS | st.sampled_from(
    ["NO", "true", "null", "~", "1", "-3", "1e5", "0x10", "1:30", "states.0", ".inf", "a: b", "<<"]
)
_SYMBOLS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
_SIZES = st.integers(-(2**62), 2**62)
_AXES = _SIZES | _SYMBOLS
_NUMBERS = _SIZES | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
_CONSTANTS = st.recursive(_NUMBERS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
_BINDS = st.builds(BindSize, _NAMES, _AXES) | st.builds(BindValue, _NAMES) | st.builds(BindConstant, _CONSTANTS)


def _maybe(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


def _tuples(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(values, max_size=3).map(tuple)


_SUBGRAPHS = st.builds(
    SubgraphPlan,
    inputs=st.dictionaries(
        _NAMES,
        st.builds(
            InputPlan,
            shape=_maybe(_tuples(_AXES)),
            axes=st.dictionaries(st.integers(-9, 9), _NAMES, max_size=2),
            collapse=_tuples(_NAMES),
            bind=_maybe(_BINDS),
            rename=_maybe(_NAMES),
        ),
        max_size=3,
    ),
    outputs=st.dictionaries(_NAMES, st.builds(OutputPlan, collapse=_tuples(_AXES), rename=_maybe(_NAMES)), max_size=2),
    outputs_keep=_maybe(_tuples(_NAMES)),
    aliases=st.dictionaries(_NAMES, _tuples(_NAMES), max_size=2),
    pins=st.dictionaries(_NAMES, _SIZES, max_size=2),
    constraints=st.dictionaries(
        _NAMES,
        st.builds(
            SymbolConstraint,
            min=_maybe(_SIZES),
            max=_maybe(_SIZES),
            multiple_of=_maybe(_SIZES),
            equals=_maybe(_NAMES),
        ),
        max_size=2,
    ),
    assertions=_tuples(_NAMES),
)
_PLANS = st.builds(RemodelPlan, st.dictionaries(_NAMES, _SUBGRAPHS, max_size=2))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None, phases=_PHASES)
@given(_PLANS, st.sampled_from(["yaml", "json"]))
def test_what_is_written_is_read_back(plan: RemodelPlan, form: str) -> None:
    assert parse_plan(plan_text(plan, form)) == plan  # type: ignore[arg-type]


FULL = SubgraphPlan(
    inputs={
        "audio": InputPlan(("B", 80, "T"), {-1: "FRAMES"}, ("B",), None, "features"),
        "length": InputPlan(bind=BindSize("audio", "T")),
        "states.0": InputPlan(bind=BindValue("length")),
        "mode": InputPlan(bind=BindConstant((1, (2, 3.5), True))),
    },
    outputs={"enc": OutputPlan((0, "B"), "encoded")},
    outputs_keep=("enc",),
    aliases={"B": ("X", "Y")},
    pins={"S": 4},
    constraints={"T": SymbolConstraint(1, 9, 3, "2*S")},
    assertions=("T <= 9",),
)


def test_every_field_of_every_plan_is_written() -> None:
    """A field that is added later and forgotten by the writer is caught here."""
    for one in (FULL, FULL.inputs["audio"], FULL.outputs["enc"], FULL.constraints["T"]):
        empty = type(one)()
        left = [
            field.name for field in dataclasses.fields(one) if getattr(one, field.name) == getattr(empty, field.name)
        ]
        assert left in ([], ["bind"])  # `bind` is set on the other inputs
    plan = RemodelPlan({"encoder": FULL})
    assert parse_plan(plan_text(plan)) == plan == parse_plan(plan_text(plan, "json"))


def test_files(tmp_path: Path) -> None:
    plan = RemodelPlan({"encoder": FULL})
    for name in ("plan.yaml", "plan.yml", "plan.json"):
        save_plan(plan, tmp_path / name)
        assert load_plan(tmp_path / name) == plan
    assert (tmp_path / "plan.json").read_text().startswith("{")


def test_short_forms_and_tabs() -> None:
    plan = parse_plan("a:\n  inputs:\n    x: [B, 80]\n    n: {bind: states.0.B}\n    m: {bind: x.-1}\n    y:\n")
    assert plan.subgraphs["a"].inputs == {
        "x": InputPlan(shape=("B", 80)),
        "n": InputPlan(bind=BindSize("states.0", "B")),
        "m": InputPlan(bind=BindSize("x", -1)),
        "y": InputPlan(),
    }
    assert parse_plan('{\n\t"a":\t{"pins":{"T":3}}}') == RemodelPlan({"a": SubgraphPlan(pins={"T": 3})})
    assert parse_plan('{"a": {"outputs_keep": ["\\ud83d\\ude00"]}}').subgraphs["a"].outputs_keep == ("😀",)
    assert parse_plan("") == RemodelPlan()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: {inputs: {x: [B}}", 1, ["neither YAML nor JSON"]),
        ("a:\n\n  imputs: {}", 3, ["a.imputs", "unknown", "Did you mean 'inputs'"]),
        (
            "a:\n  inputs:\n    x: {shape: [1],\n        colapse: [B]}",
            4,
            ["inputs.x.colapse", "Did you mean 'collapse'"],
        ),
        ("a:\n  inputs:\n    x: {collapse: B}", 3, ["a list is expected", "'B'"]),
        ("a:\n  pins:\n    S: 1\n    T: 1.5", 4, ["a.pins.T", "whole number", "'1.5'"]),
        ("a:\n  pins:\n    T: 1\n    T: 2", 4, ["a.pins.T", "repeated"]),
        ("a:\n  inputs:\n    x: {bind: {size_of: y}}", 3, ["size_of do not form a bind"]),
        ("a:\n  inputs:\n    x: {bind: y}", 3, ["'y' does not name an axis"]),
        ("a:\n  inputs:\n    x: {bind: {constant: three}}", 3, ["a number, true or false", "'three'"]),
        ("a:\n  inputs:\n    x: {axes: {T: S}}", 3, ["axis number", "'T'"]),
        ("a:\n  inputs:\n    x: {rename: }", 3, ["a name is expected", "nothing"]),
        ("a:\n  inputs:\n    x:\n      bind: {constant: &r [*r]}", 4, ["nested"]),
        ("a:\n  outputs_keep:\n  - x\n  - [y]", 4, ["outputs_keep[1]", "a list"]),
        ("a: {}\n---\nb: {}", 2, ["neither YAML nor JSON"]),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, line: int, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse_plan(text, "plan.yaml")
    assert caught.value.message.startswith(f"plan.yaml:{line}: ")
    for word in words:
        assert word in str(caught.value)


@given(_TEXTS | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_plan_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert isinstance(parse_plan(text), RemodelPlan)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"missing.yaml: .*No such file"):
        load_plan(tmp_path / "missing.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        load_plan(tmp_path / "bytes.yaml")
