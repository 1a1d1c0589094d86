"""The boundary before and after: text, plain data and the lines that differ."""

from __future__ import annotations

import json

import torch
from torch import nn

from generic_export.remodel import Subgraph, parse_plan, plan_text, remodel, template_plan


class Encoder(nn.Module):
    def forward(self, audio: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return audio[:, :, ::2].half(), length


SUBGRAPH = Subgraph(
    "encoder",
    Encoder(),
    (torch.randn(2, 4, 6), torch.tensor([6, 5])),
    output_names=["enc", "count"],
    dynamic_axes={"audio": {0: "X", 2: "T"}, "length": {0: "Y"}},
    assertions=("T >= 1",),
)
PLAN = parse_plan(
    """
    encoder:
      inputs:
        audio: {collapse: [B], rename: features}
        length: {bind: audio.T}
      outputs:
        enc: {collapse: [B]}
      outputs_keep: [count, enc]
      aliases: {B: [X, Y]}
      constraints: {T: {max: 99, multiple_of: 2}}
    """
)


def test_the_four_stages() -> None:
    stages = remodel(SUBGRAPH, PLAN).stages
    assert (
        stages.text()
        == """\
encoder, raw
  input   audio  f32[X, 4, T]
  input   length  i64[Y]
  output  enc  f16[X, 4, f(T)]
  output  count  i64[Y]
  assert  T >= 1

encoder, collapsed
  input   audio  f32[4, T]
  input   length  i64[Y]
  output  enc  f16[4, f(T)]
  output  count  i64[Y]
  assert  T >= 1

encoder, bound
  input   audio  f32[4, T]
  output  enc  f16[4, f(T)]
  output  count  i64[Y]
  assert  T >= 1
  bound   length = audio.T

encoder, final
  input   features  f32[4, T]
  output  count  i64[1]
  output  enc  f16[4, f(T)]
  assert  T >= 2
  assert  T <= 99
  assert  T is a multiple of 2
  assert  T >= 1
  bound   length = audio.T
""".replace("count  i64[Y]", "count  i64[X]")
    )  # the first of the symbols that are one in the archive


def test_the_difference_of_two_stages() -> None:
    stages = remodel(SUBGRAPH, PLAN).stages
    lines = stages.diff("collapsed", "bound").splitlines()
    assert "- input   length  i64[Y]" in lines and "+ bound   length = audio.T" in lines
    assert [line for line in lines if line.startswith("  ")] == [
        "  input   audio  f32[4, T]",
        "  output  enc  f16[4, f(T)]",
        "  output  count  i64[X]",
        "  assert  T >= 1",
    ]
    assert stages.diff("raw", "raw") == "".join(f"  {line}\n" for line in stages.interfaces["raw"].lines())


def test_plain_data_and_rows() -> None:
    stages = remodel(SUBGRAPH, PLAN).stages
    data = json.loads(json.dumps(stages.asdict()))
    assert data["subgraph"] == "encoder"
    assert data["stages"]["final"]["inputs"] == [{"name": "features", "dtype": "f32", "shape": [4, "T"]}]
    assert [output["name"] for output in data["stages"]["final"]["outputs"]] == ["count", "enc"]
    assert stages.rows() == [
        ("input", "audio", "f32[X, 4, T]", "f32[4, T]", "f32[4, T]", "features  f32[4, T]"),
        ("input", "length", "i64[Y]", "i64[Y]", "", ""),
        ("output", "enc", "f16[X, 4, f(T)]", "f16[4, f(T)]", "f16[4, f(T)]", "enc  f16[4, f(T)]"),
        ("output", "count", "i64[X]", "i64[X]", "i64[X]", "count  i64[1]"),
    ]


def test_a_template_changes_nothing() -> None:
    template = template_plan([SUBGRAPH])
    assert parse_plan(plan_text(template)) == template
    assert template.subgraphs["encoder"].inputs["audio"].shape == ("X", 4, "T")
    stages = remodel(SUBGRAPH, template).stages
    assert stages.interfaces["raw"].ports == stages.interfaces["final"].ports


def test_a_module_that_runs_at_one_size_only() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(3, 2)

    stages = remodel(Subgraph("fixed", Fixed(), (torch.randn(6),), dynamic_axes={"x": {0: "T"}}), parse_plan("")).stages
    assert str(stages.interfaces["raw"].ports[1]) == "output  output  f32[3?, 2?]"
