"""A plan that does not fit its module: the line, the thing, and the name that was meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from generic_export.errors import OptionError
from generic_export.remodel import Subgraph, parse_plan, remodel
from generic_export.remodel.resolve import require_known


class Model(nn.Module):
    def forward(
        self, audio: torch.Tensor, length: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return audio * 2 + states[0].sum(), length, audio.sum(2)


def subgraph(batch: int = 1, time: int = 6) -> Subgraph:
    return Subgraph(
        "encoder",
        Model(),
        (torch.randn(batch, 4, time), torch.full((batch,), time), (torch.randn(batch, 2), torch.randn(batch, 2))),
        output_names=["frames", "count", "total"],
        dynamic_axes={"audio": {0: "B", 2: "TIME"}, "length": {0: "B"}, "states.0": {0: "B"}},
    )


def refusal(body: str, given: Subgraph | None = None) -> OptionError:
    """Return how a plan for `encoder` is refused; the body begins on line 2."""
    text = "encoder:\n" + body
    with pytest.raises(OptionError) as caught:
        remodel(given or subgraph(), parse_plan(text, "plan.yaml"))
    return caught.value


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("  inputs:\n    audoi: {}", 3, ["input 'audoi' is unknown", "Did you mean 'audio'"]),
        ("  inputs:\n    states_2: {}", 3, ["'states_2'", "states.0"]),
        ("  inputs:\n    states.0: {}\n    states_0: {}", 4, ["'states.0' is planned twice"]),
        ("  outputs:\n    frame: {}", 3, ["output 'frame' is unknown", "Did you mean 'frames'"]),
        ("  outputs_keep:\n  - total\n  - conut", 4, ["output 'conut' is unknown", "Did you mean 'count'"]),
        ("  outputs_keep: [total, total]", 2, ["listed twice"]),
        ("  outputs_keep: []", 2, ["no output is listed"]),
        (
            "  inputs:\n    audio:\n      collapse: [TIMES]",
            4,
            ["symbol of input 'audio' 'TIMES'", "Did you mean 'TIME'"],
        ),
        ("  inputs:\n    states.1: {collapse: [B]}", 3, ["'B' is unknown", "There is none"]),
        ("  inputs:\n    audio: {collapse: [B]}", None, ["'length' keeps B", "Collapse it here too, or pin B to 1"]),
        ("  inputs:\n    length: {bind: audoi.TIME}", 3, ["source 'audoi' is unknown", "'audio'"]),
        ("  inputs:\n    length: {bind: audio.TIMES}", 3, ["'TIMES' is unknown", "Did you mean 'TIME'"]),
        ("  inputs:\n    length: {bind: audio.7}", 3, ["3 axes and no axis 7"]),
        ("  inputs:\n    length: {bind: length.B}", 3, ["bound to itself"]),
        (
            "  inputs:\n    states.0: {bind: {same_as: states.1}}\n    states.1: {shape: [B, 2], bind: {same_as: states.0}}",
            3,
            ["in a circle"],
        ),
        ("  inputs:\n    states.0: {bind: {same_as: audio}}", 3, ["[B, 4, TIME] does not fit"]),
        ("  inputs:\n    length: {bind: {constant: 1.5}}", 3, ["out of range for torch.int64"]),
        ("  inputs:\n    length: {bind: {constant: [1, [2]]}}", 3, ["this constant is not a tensor"]),
        ("  inputs:\n    states.1: {bind: {constant: [1, 2, 3]}}", 3, ["[3] does not fit into 'states.1' [1, 2]"]),
        ("  inputs:\n    length: {bind: audio.TIME, rename: n}", 3, ["a bound input has no name"]),
        (
            "  inputs:\n    length: {shape: [L], bind: audio.TIME}",
            3,
            ["no input of the archive has L", "alias"],
        ),
        ("  inputs:\n    audio: {shape: [B, 4]}", 3, ["2 axes are declared, but input 'audio' has 3"]),
        ("  inputs:\n    audio:\n      shape:\n      - B\n      - 5\n      - TIME", 6, ["declared 5", "has 4"]),
        ("  inputs:\n    audio: {axes: {1: C}}", 3, ["axis 1 of 'audio' is not dynamic"]),
        ("  inputs:\n    audio: {axes: {2: true_time}}", 3, ["be parsed by tract"]),
        ("  inputs:\n    audio: {rename: length}", None, ["both get the name 'length'"]),
        ("  outputs:\n    frames: {rename: audio}", 3, ["input 'audio' and output 'frames' both get the name"]),
        ("  outputs:\n    frames: {collapse: [1]}", 3, ["axis 1 of output 'frames' has size 4"]),
        ("  outputs:\n    frames: {collapse: [9]}", 3, ["3 axes and no axis 9"]),
        ("  outputs:\n    frames: {collapse: [0]}", 3, ["depends on B: it is not always 1"]),
        ("  outputs:\n    frames: {collapse: [Q]}", 3, ["none of the axes of output 'frames' [B, 4, TIME] is Q"]),
        ("  aliases:\n    N: [BATCH]", 3, ["symbol 'BATCH' is unknown", "Known: B, TIME"]),
        ("  aliases:\n    N: [B]\n    M: [B]", 4, ["is also renamed to 'N'"]),
        ("  aliases:\n    N: [TIME]\n    TIME: [B]", 4, ["is itself renamed to 'N'"]),
        ("  aliases:\n    information: [B]", 3, ["be parsed by tract"]),
        ("  aliases:\n    TIME: [B]", None, ["and both are TIME"]),
        ("  pins:\n    TIEM: 3", 3, ["symbol 'TIEM' is unknown", "Did you mean 'TIME'"]),
        ("  pins:\n    TIME: 0", 3, ["Pin it to 1 or more"]),
        ("  inputs:\n    audio: {collapse: [TIME]}\n  pins: {TIME: 3}", 3, ["only an axis of size 1 can disappear"]),
        ("  constraints:\n    TIMES: {max: 3}", 3, ["symbol 'TIMES' is unknown"]),
        ("  constraints:\n    TIME: {min: 9, max: 3}", 3, ["min 9 is above max 3"]),
        ("  constraints:\n    TIME:\n      multiple_of: 0", 4, ["multiple_of is 0"]),
        ("  constraints:\n    TIME:\n      multiple_of: 4", 4, ["does not hold at TIME = 6"]),
        ("  constraints:\n    TIME:\n      max: 5", 3, ["'TIME <= 5' does not hold at TIME = 6"]),
        ("  constraints:\n    TIME:\n      equals: 2*B", 4, ["'TIME == 2 * B' does not hold at TIME = 6, B = 1"]),
        ("  assertions:\n  - TIME >= 1\n  - TIME << 3", 4, ["not a relation"]),
        ("  assertions:\n  - TIME == 3*(TIME/3)", 3, ["both divided and whole", "multiple_of"]),
        ("  assertions:\n  - TIEM >= 1", 3, ["symbol 'TIEM' is unknown"]),
        ("  pins: {TIME: 8}\n  assertions: [TIME <= 7]", 3, ["does not hold at TIME = 8"]),
    ],
)
def test_the_line_and_the_thing(body: str, line: int | None, words: list[str]) -> None:
    error = refusal(body)
    assert error.message.startswith(f"plan.yaml:{line}: " if line else "plan.yaml:"), error
    for word in words:
        assert word in str(error), error


def test_an_input_that_is_left_over_is_needed() -> None:
    body = """  inputs:
    audio: {bind: {constant: 1}, collapse: [B, TIME]}
    length: {bind: {constant: 1}}
    states.0: {bind: {constant: 1}}
    states.1: {bind: {constant: 1}}
"""
    assert "no input" in str(refusal(body))


def test_an_output_that_is_one_in_the_example_only() -> None:
    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, ::4]

    given = Subgraph("encoder", First(), (torch.randn(2, 3),), dynamic_axes={"x": {0: "B", 1: "T"}})
    error = refusal("  outputs:\n    output: {collapse: [1]}", given)
    assert error.message.startswith("plan.yaml:3: ") and "depends on T" in error.message


def test_plans_for_other_subgraphs_and_plans_made_in_python() -> None:
    with pytest.raises(OptionError, match=r"plan.yaml:1: encodr: sub-graph 'encodr' is unknown.*'encoder'"):
        require_known([subgraph()], parse_plan("encodr: {}", "plan.yaml"))
    from generic_export.remodel import InputPlan, RemodelPlan, SubgraphPlan

    plan = RemodelPlan({"encoder": SubgraphPlan(inputs={"audio": InputPlan(collapse=("X",))})})
    with pytest.raises(OptionError, match=r"^encoder.inputs.audio.collapse\[0\]: symbol of input 'audio' 'X'"):
        remodel(subgraph(), plan)


def test_a_script_module_is_refused_by_name() -> None:
    scripted = torch.jit.script(nn.ReLU())
    given = Subgraph("relu", scripted, (torch.randn(2),), input_names=["x"])
    with pytest.raises(OptionError, match="ScriptModule"):
        remodel(given, parse_plan("relu: {}"))
