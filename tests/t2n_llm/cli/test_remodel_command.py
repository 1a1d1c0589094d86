"""`t2n-llm remodel` as a user meets it: plans written, boundaries shown, archives made, bad input answered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.remodel import load_plan, plan_of_archive
from tests.shared_folders import content
from tests.t2n_llm.command_line import call, refused, run, strict_json

FACTORY = """
import torch
from torch import nn

from generic_export.remodel import Subgraph


class Scale(nn.Module):
    def forward(self, x, n):
        return x * n, x.sum(-1)


def pair():
    return Scale(), (torch.randn(1, 5), torch.tensor(3.0))


def several():
    return {"left": pair(), "right": (nn.ReLU(), torch.randn(3))}


def described():
    return Subgraph("scale", *pair(), dynamic_axes={"x": {0: "B", 1: "T"}}, output_names=["y", "total"])


def broken():
    raise ValueError("no [weights]")


def number():
    return 3
"""

PLAN = """
scale:
  inputs:
    x: {collapse: [B]}
    n: {bind: x.T}
  outputs:
    y: {collapse: [B], rename: scaled}
    total: {collapse: [0]}
  outputs_keep: [total, scaled]
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, made the current one, with a factory and a plan."""
    (tmp_path / "my_models.py").write_text(FACTORY)
    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_a_template_to_archives(models: Path) -> None:
    done = call("remodel", "my_models.py:described", "--dump-config", "first.yaml")
    assert done.code == 0 and "first.yaml: 1 sub-graphs" in done.out
    assert load_plan(models / "first.yaml").subgraphs["scale"].inputs["x"].shape == ("B", "T")
    refused(call("remodel", "my_models.py:described", "--dump-config", "first.yaml"), "first.yaml exists already")
    assert call("remodel", "my_models.py:described", "--dump-config", "first.yaml", "--force").code == 0

    before = content(models)
    shown = call("remodel", "my_models.py:described", "--config", "plan.yaml", "--dry-run")
    assert shown.code == 0 and "n = x.T" in shown.out and "scaled  f32[T]" in shown.out
    assert "exported" not in shown.out
    assert {name for name in content(models) if "__pycache__" not in name} == {
        name for name in before if "__pycache__" not in name
    }

    done = call("remodel", "my_models.py:described", "--config", "plan.yaml", "-o", "out", "--archive", "tgz", "--json")
    record = strict_json(done.out)
    assert record["archives"] == {"scale": "out/scale.nnef.tgz"}
    assert record["subgraphs"][0]["stages"]["final"]["inputs"] == [{"name": "x", "dtype": "f32", "shape": ["T"]}]
    archive = models / "out" / "scale.nnef.tgz"
    assert plan_of_archive(archive) == load_plan(models / "plan.yaml")
    with TractWheel().load(archive) as engine:
        x = np.arange(7, dtype=np.float32)
        total, scaled = engine.run([x])
    assert total == x.sum() and np.array_equal(scaled, x * 7)
    refused(
        call("remodel", "my_models.py:described", "--config", "plan.yaml", "-o", "out", "--archive", "tgz"), "exists"
    )


def test_a_module_of_the_current_folder_in_a_process_of_its_own(models: Path) -> None:
    done = run("remodel", "my_models:several", "--dump-config", "-", "--json")
    assert done.code == 0, done.err
    assert strict_json(done.out) == {
        "left": {"inputs": {"x": {"shape": [1, 5]}, "n": {"shape": []}}, "outputs_keep": ["output_0", "output_1"]},
        "right": {"inputs": {"input": {"shape": [3]}}, "outputs_keep": ["output"]},
    }


def test_what_changes_as_lines_and_a_template_as_text(models: Path) -> None:
    shown = call("remodel", "my_models.py:described", "--config", "plan.yaml", "--dry-run", "--diff")
    assert "- input   n  f32[]" in shown.out.splitlines() and "+ bound   n = x.T" in shown.out.splitlines()
    text = call("remodel", "my_models.py:pair", "--dump-config", "-").out
    (models / "printed.yaml").write_text(text)
    assert load_plan(models / "printed.yaml").subgraphs["model"].inputs["x"].shape == (1, 5)


def test_json_plans(models: Path) -> None:
    call("remodel", "my_models.py:described", "--dump-config", "plan.json")
    assert json.loads((models / "plan.json").read_text())["scale"]["outputs_keep"] == ["y", "total"]
    assert call("remodel", "my_models.py:described", "--config", "plan.json", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["my_models.py:described"], ["--config or --dump-config"]),
        (["my_models.py:described", "--config", "plan.yaml", "--dump-config", "-"], ["--config or --dump-config"]),
        (["my_models.py:described", "--config", "missing.yaml"], ["missing.yaml"]),
        (["my_models.py", "--config", "plan.yaml"], ["does not name a factory"]),
        (["my_models.py:nothing", "--config", "plan.yaml"], ["nothing"]),
        (["missing.py:build", "--config", "plan.yaml"], ["missing.py"]),
        (["my_models.py:broken", "--config", "plan.yaml"], ["ValueError: no [weights]"]),
        (["my_models.py:number", "--config", "plan.yaml"], ["returned a int"]),
        (["my_models.py:pair", "--config", "plan.yaml"], ["plan.yaml:2: scale: sub-graph 'scale' is unknown"]),
        (["my_models.py:described", "--config", "wrong.yaml"], ["wrong.yaml:4: scale.inputs.x.colapse"]),
        (["my_models.py:described", "--config", "plan.yaml", "--archive", "zip"], ["'zip'"]),
    ],
)
def test_bad_input(models: Path, arguments: list[str], words: list[str]) -> None:
    (models / "wrong.yaml").write_text("scale:\n  inputs:\n    x:\n      colapse: [B]\n")
    refused(call("remodel", *arguments), *words)
    assert not list(models.glob("*.nnef*"))
