"""Pipelines of diffusers: each component exported by the command, and compared in the engine at further sizes."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.reading import read_graph_text
from t2n_llm.diffusion.components import COMPONENTS, Component
from tests.t2n_llm.command_line import call, refused, strict_json
from tests.t2n_llm.diffusion.tiny_pipelines import NAMES, save_pipeline, tiny

needs_diffusers = pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed")


def index_of(folder: Path, **components: list[str]) -> Path:
    """Write an index alone."""
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "P", **components}))
    return folder


def agrees_elsewhere(archive: Path, component: Component, sizes: dict[str, int]) -> None:
    """Run an archive at other sizes and hold it against PyTorch."""
    from dataclasses import replace

    tensors = replace(component, sizes={**component.sizes, **sizes}).example(seed=7)
    with torch.no_grad():
        expected = component.module(*tensors)
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        found = engine.run([tensor.numpy() for tensor in tensors])
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs.numpy()).max() < 1e-4 * max(1.0, float(theirs.abs().max()))


@needs_diffusers
@pytest.mark.parametrize(
    "kind",
    [
        "clip",
        pytest.param("t5", marks=pytest.mark.nightly),
        pytest.param("vae", marks=pytest.mark.nightly),
        pytest.param("unet", marks=pytest.mark.nightly),
        pytest.param("sd3", marks=pytest.mark.nightly),
        pytest.param("flux", marks=pytest.mark.nightly),
    ],
)
def test_a_pipeline_is_exported_component_by_component(kind: str, tmp_path: Path) -> None:
    folder = save_pipeline(tmp_path / "pipeline", kind)
    outcome = call("export", folder, "-o", tmp_path / "out", "--dtype", "f32", "--json")
    assert outcome.code == 0, outcome
    record = strict_json(outcome.out)
    assert record == json.loads((tmp_path / "out" / "pipeline.json").read_text()) | {
        "output_dir": str(tmp_path / "out")
    }
    assert (tmp_path / "out" / "scheduler" / "scheduler_config.json").is_file()
    name, model = NAMES[kind], tiny(kind)
    assert (tmp_path / "out" / name / "config.json").is_file()
    for component in COMPONENTS[type(model).__name__](name, model):
        entry = record["components"][component.name]
        assert len(entry["compared_at"]) == 3 and entry["parameters"] == sum(p.numel() for p in model.parameters())
        other = {symbol: 2 * component.multiples.get(symbol, 1) * 3 for symbol in component.sizes} | {"B": 1}
        agrees_elsewhere(tmp_path / "out" / entry["archive"], component, other)
    refused(call("export", folder, "-o", tmp_path / "out"), "exists already")


@needs_diffusers
def test_matrices_in_half_precision_and_force(tmp_path: Path) -> None:
    folder = save_pipeline(tmp_path / "pipeline", "clip")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pipeline.json").write_text("{}")
    outcome = call("export", folder, "-o", tmp_path / "out", "--force")
    assert outcome.code == 0, outcome
    assert "agrees at 3 sizes" in outcome.out
    assert "= variable" in (text := read_graph_text(tmp_path / "out" / "text_encoder.nnef.tar")) and "f16" in text


def test_what_cannot_be_part_of_a_pipeline_is_named(tmp_path: Path) -> None:
    folder = index_of(tmp_path / "pipeline", prior=["diffusers", "PriorTransformer"])
    outcome = call("export", folder, "-o", tmp_path / "out")
    refused(outcome, "'prior' is a PriorTransformer of diffusers")
    assert "export_model_to_nnef" in outcome.line("hint") and not (tmp_path / "out").exists()
    refused(call("export", folder, "--compress", "q4_0"), "not applicable to a pipeline")
    refused(call("export", folder, "--dry-run"), "do not apply to a pipeline")
    folder = index_of(tmp_path / "half", unet=["diffusers", "UNet2DConditionModel"])
    refused(call("export", folder), "no config.json")
    (folder / "model_index.json").write_text("{")
    refused(call("export", folder), "model_index.json: cannot be read")
    outside = index_of(tmp_path / "outside", **{"../half/unet": ["diffusers", "UNet2DConditionModel"]})
    refused(call("export", outside), "'../half/unet' is not a valid component name")


def test_without_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index_of(tmp_path / "pipeline", unet=["diffusers", "UNet2DConditionModel"])
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    outcome = call("export", folder, "-o", tmp_path / "out")
    refused(outcome, "UNet2DConditionModel needs diffusers")
    assert "pip install diffusers" in outcome.line("hint")
