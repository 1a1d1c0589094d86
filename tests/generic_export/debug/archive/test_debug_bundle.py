"""Planted faults: the bundle of a failing check names the first tensor that differs, and says nothing of the machine."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import (
    KhronosNNEF,
    TractNNEF,
    assert_io,
    assert_io_and_debug_bundle,
    assert_io_cmd_str,
    export_model_to_nnef,
)
from generic_export.debug.archive.through_onnx import opinion_through_onnx
from generic_export.debug.privacy import redacted, without_identity
from generic_export.errors import EngineCrashError, EngineMissingError, MismatchError, OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.nnef.dat import read_dat, write_dat
from generic_export.nnef.graph import NnefGraph, NnefOperation

AXES = {"x": {0: "B"}}


class Block(nn.Module):
    """Norm, attention under a mask of its own making, feed-forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Linear(width, width)
        self.last = nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.norm(x))
        positions = torch.arange(x.shape[1])
        visible = positions[None, :] <= positions[:, None]
        scores = (mixed @ x.transpose(1, 2)).masked_fill(~visible, float("-inf"))
        return self.last(x + self.feed(scores.softmax(-1) @ mixed))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True, kw_only=True)
class Faulty(TractNNEF):
    """Writes one operation of one module wrong.

    Attributes:
        module: path of the module.
        operator: the operation's operator.
        changes: attributes, or another operator under "operator".
    """

    module: str = ""
    operator: str = ""
    changes: tuple[tuple[str, Any], ...] = ()

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        graph = super().post_translate(graph)
        operations = tuple(self._wrong(operation) for operation in graph.operations)
        assert operations != graph.operations, "the fault was not planted"
        return replace(graph, operations=operations)

    def _wrong(self, operation: NnefOperation) -> NnefOperation:
        if operation.operator != self.operator or operation.block.path != self.module:
            return operation
        changes = dict(self.changes)
        name = changes.pop("operator", operation.operator)
        return replace(operation, operator=name, attributes=tuple((dict(operation.attributes) | changes).items()))


def opened(bundle: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Unpack a bundle; returns its folder and its report."""
    shutil.unpack_archive(bundle, folder, "gztar")  # as a user does: scripts stay executable
    (content,) = folder.iterdir()
    return content, json.loads((content / "report.json").read_text())


def transpose_weight(archive: Path, label: str) -> None:
    path = archive / f"{label}.dat"
    write_dat(path, read_dat(path).T.contiguous())


# --- the three faults ---------------------------------------------------------------------------------


def test_a_wrong_epsilon(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    module = "layers.2.last"
    target = Faulty(dynamic_axes=AXES, module=module, operator="tract_core_rms_norm", changes=(("eps", 0.01),))
    with pytest.raises(MismatchError, match=r"The case is in .*bundle\.tgz"):
        export_model_to_nnef(
            model, x, tmp_path / "m.nnef", target, input_names=["x"], debug_bundle_path=tmp_path / "bundle.tgz"
        )
    content, report = opened(tmp_path / "bundle.tgz", tmp_path / "open")
    found = report["first_divergence"]
    assert found["tensor"] == "layers_2_last" and found["captured"] == module
    assert (found["module_path"], found["module_type"]) == (module, "RMSNorm")
    assert found["source"].startswith("test_debug_bundle.py:")
    assert found["agreeing_inputs"]
    with np.load(content / "first_divergence.npz") as values:
        assert not np.allclose(values["tract"], values["pytorch"], rtol=5e-4, atol=1e-4)


def test_a_transposed_weight(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes=AXES)
    archive = export_model_to_nnef(model, x, tmp_path / "m", target, input_names=["x"], compression_level=None)
    transpose_weight(archive, "layers.1.feed.weight")
    with pytest.raises(MismatchError, match="The case is in"):
        assert_io_and_debug_bundle(model, x, archive, tmp_path / "bundle.tgz", target, second_opinion=False)
    _, report = opened(tmp_path / "bundle.tgz", tmp_path / "open")
    assert report["first_divergence"]["tensor"] == "layers_1_feed"
    assert report["first_divergence"]["module_path"] == "layers.1.feed"
    assert report["capture_differs_from_module"] == [] and report["second_opinion"] is None


def test_an_off_by_one_in_a_mask(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    target = Faulty(dynamic_axes=AXES, module="layers.0", operator="le", changes=(("operator", "lt"),))
    with pytest.raises(MismatchError):
        export_model_to_nnef(
            model, x, tmp_path / "m.nnef", target, input_names=["x"], debug_bundle_path=tmp_path / "bundle.tgz"
        )
    _, report = opened(tmp_path / "bundle.tgz", tmp_path / "open")
    found = report["first_divergence"]
    assert (found["module_path"], found["operator"]) == ("layers.0", "aten.le.Tensor")
    assert found["comparison"]["worst_values"] == [0.0, 1.0]


def test_two_faults_the_earlier_one_is_named(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    archive = export_model_to_nnef(model, x, tmp_path / "m", TractNNEF(), input_names=["x"], compression_level=None)
    transpose_weight(archive, "layers.2.mix.weight")
    transpose_weight(archive, "layers.0.feed.weight")
    with pytest.raises(MismatchError):
        assert_io_and_debug_bundle(model, x, archive, tmp_path / "b.tgz", second_opinion=False)
    assert opened(tmp_path / "b.tgz", tmp_path / "open")[1]["first_divergence"]["tensor"] == "layers_0_feed"


def test_with_the_command_as_engine(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes=AXES, specific_tract_binary_path=_cli().binary)
    archive = export_model_to_nnef(model, x, tmp_path / "m", target, input_names=["x"], compression_level=None)
    assert all(comparison.passed for comparison in assert_io(model, x, archive, target))
    transpose_weight(archive, "layers.1.mix.weight")
    with pytest.raises(MismatchError):
        assert_io_and_debug_bundle(model, x, archive, tmp_path / "b.tgz", target, second_opinion=False)
    assert opened(tmp_path / "b.tgz", tmp_path / "open")[1]["first_divergence"]["tensor"] == "layers_1_mix"


# --- repeating it ---------------------------------------------------------------------------------------


def _failing_bundle(model: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> Path:
    target = Faulty(dynamic_axes=AXES, module="layers.1.last", operator="tract_core_rms_norm", changes=(("eps", 0.5),))
    target = replace(target, dump_identity_properties=True, specific_properties={"note": "kept"})
    off = replace(target, check_io=False)
    archive = export_model_to_nnef(model, x, folder / "m.nnef", off, input_names=["x"], compression_level=6)
    with pytest.raises(MismatchError):
        assert_io_and_debug_bundle(model, x, archive, folder / "bundle.tgz", target, **options)
    return folder / "bundle.tgz"


def test_the_script_in_the_bundle_shows_it_again(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    content, _ = opened(_failing_bundle(model, x, tmp_path, second_opinion=False), tmp_path / "open")
    run = subprocess.run([sys.executable, "reproduce.py"], cwd=content, capture_output=True, text=True)
    assert run.returncode == 1 and "beyond the tolerance" in run.stdout, run.stderr
    with np.load(content / "tract_outputs.npz") as answers:
        np.savez(content / "outputs.npz", **answers)
    again = subprocess.run([sys.executable, "reproduce.py"], cwd=content, capture_output=True, text=True)
    assert again.returncode == 0 and "max abs error 0," in again.stdout


def test_the_shell_line_in_the_bundle_shows_it_again(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    folder = _cli().binary.parent
    content, _ = opened(_failing_bundle(model, x, tmp_path, second_opinion=False), tmp_path / "open")
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RUST_BACKTRACE": "0"}
    run = subprocess.run(["./reproduce.sh"], cwd=content, capture_output=True, text=True, env=environment)
    assert run.returncode != 0 and "Checking output" in run.stdout + run.stderr
    with np.load(content / "inputs.npz") as inputs, np.load(content / "tract_outputs.npz") as answers:
        np.savez(content / "io.npz", **inputs, **answers)
    good = subprocess.run(["./reproduce.sh"], cwd=content, capture_output=True, text=True, env=environment)
    assert good.returncode == 0, good.stderr


def test_the_shell_line_says_tolerance_registries_and_half() -> None:
    line = assert_io_cmd_str("a b.tgz", "io.npz", registries=["tract_onnx"], half=True)
    assert line == (
        "tract 'a b.tgz' --nnef-tract-onnx -O run --input-from-npz io.npz --allow-float-casts "
        "--assert-output-bundle io.npz --approx approximate"
    )


def test_weights_left_out_come_back_from_the_seed(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    bundle = _failing_bundle(model, x, tmp_path, weight_seed=7, second_opinion=find_spec("onnx") is not None)
    content, report = opened(bundle, tmp_path / "open")
    kept = [str(path.relative_to(content)) for path in content.rglob("*.dat")]
    assert kept == [] and report["weights_left_out"] == len(list(model.named_parameters()))
    assert not list(content.rglob("*.onnx")), "ONNX files hold the weights"
    assert report["first_divergence"]["tensor"] == "layers_1_last"
    run = subprocess.run([sys.executable, "reproduce.py"], cwd=content, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    with np.load(content / "tract_outputs.npz") as answers:
        np.savez(content / "outputs.npz", **answers)
    again = subprocess.run([sys.executable, "reproduce.py"], cwd=content, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    weight = read_dat(content / "model" / "head.weight.dat")
    original = dict(model.named_parameters())["head.weight"].detach()
    assert not torch.allclose(weight, original) and abs(float(weight.std() - original.std())) < 0.2


def test_a_fault_that_is_in_the_weights_left_out_is_said(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    archive = export_model_to_nnef(model, x, tmp_path / "m", TractNNEF(), input_names=["x"], compression_level=None)
    transpose_weight(archive, "layers.0.mix.weight")
    with pytest.raises(MismatchError):
        assert_io_and_debug_bundle(model, x, archive, tmp_path / "b.tgz", weight_seed=1, second_opinion=False)
    report = opened(tmp_path / "b.tgz", tmp_path / "open")[1]
    assert report["first_divergence"] is None and "the fault is in the weights left out" in report["note"]


# --- what it must not say -------------------------------------------------------------------------------


def test_nothing_of_the_machine_is_in_a_bundle(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret-value")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna_schmidt")
    monkeypatch.setattr(platform, "node", lambda: "vm-4711.corp.example")
    (tmp_path / "anna_schmidt").mkdir()
    bundle = _failing_bundle(model, x, tmp_path / "anna_schmidt")
    content, _ = opened(bundle, tmp_path / "open")
    secrets = [
        "hf_secretsecretsecret",
        "aws-secret-value",
        "anna_schmidt",
        "vm-4711",
        str(tmp_path),
        str(Path.home()) + "/",
    ]
    secrets += [
        value for key, value in os.environ.items() if re.search("TOKEN|SECRET|PASSWORD|KEY", key) and len(value) > 7
    ]
    for path in content.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for secret in secrets:
            assert secret.encode() not in data, f"{path.name} holds {secret}"
    assert '("note", "kept")' in (content / "model" / "graph.nnef").read_text()
    with tarfile.open(bundle) as tar:
        assert {(entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) for entry in tar} == {(0, 0, "", "", 0)}


def test_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    monkeypatch.setattr(platform, "node", lambda: "box.corp")
    assert redacted("at /home/anna/My Models/m.nnef: refused") == "at m.nnef: refused"
    assert redacted("by anna on box (box.corp), annan") == "by (redacted) on (redacted) ((redacted)), annan"
    assert redacted("S/2 and a/b.c stay, https://example.org/x too") == "S/2 and a/b.c stay, https://example.org/x too"


@pytest.mark.parametrize("order", [("user", "host", "note"), ("note", "user"), ("user", "note", "os")])
def test_identity_properties_leave_a_readable_graph(order: tuple[str, ...]) -> None:
    rows = ",\n".join(f'    ("{key}", "v")' for key in order)
    text = f"fragment p() -> (properties: (string, tensor<scalar>)[])\n{{\n  properties = [\n{rows}\n  ];\n}}\n"
    clean = without_identity(text)
    assert re.findall(r'\("(\w+)"', clean) == ["note"] and '"v")\n  ];' in clean


# --- around it ------------------------------------------------------------------------------------------


def test_no_bundle_when_all_is_well(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes=AXES)
    bundle = tmp_path / "bundle.tgz"
    archive = export_model_to_nnef(model, x, tmp_path / "m", target, input_names=["x"], debug_bundle_path=bundle)
    assert assert_io_and_debug_bundle(model, torch.randn(4, 5, 8), archive, bundle, target)[0].passed
    assert not bundle.exists()


def test_a_bundle_needs_a_check(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    for target in (KhronosNNEF(), TractNNEF(check_io=False)):
        with pytest.raises(OptionError, match="debug_bundle_path"):
            export_model_to_nnef(model, x, tmp_path / "m", target, debug_bundle_path=tmp_path / "b.tgz")


def test_an_engine_that_dies_gets_a_bundle_too(tmp_path: Path) -> None:
    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids % 4).relu() * 2

    @dataclass(frozen=True, kw_only=True)
    class OutOfRange(TractNNEF):
        def post_translate(self, graph: NnefGraph) -> NnefGraph:
            operations = super().post_translate(graph).operations
            gather = next(op for op in operations if op.operator == "tract_core_gather")
            wrong = replace(gather, inputs=(gather.inputs[0], type(gather.inputs[1])("ids")))
            return replace(graph, operations=tuple(wrong if op is gather else op for op in operations))

    ids = torch.tensor([[1, 90]])
    with pytest.raises(EngineCrashError, match="The case is in"):
        export_model_to_nnef(
            Look(), ids, tmp_path / "m", OutOfRange(), input_names=["ids"], debug_bundle_path=tmp_path / "b.tgz"
        )
    content, report = opened(tmp_path / "b.tgz", tmp_path / "open")
    assert "The engine gives no outputs" in report["note"] and report["first_divergence"] is None
    assert not (content / "tract_outputs.npz").exists()
    failure = report["first_failure"]
    assert (failure["tensor"], failure["module_path"]) == ("table", "table")
    assert "gather" in failure["reason"]
    assert "First tensor that tract cannot compute: 'table'" in (content / "README.md").read_text()


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="the package onnxscript is not installed")
def test_second_opinion(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    opinion = opinion_through_onnx(model, (x,), tmp_path / "onnx", inference_target=TractNNEF())
    assert opinion.agrees and opinion.comparisons[0].passed, opinion.reason
    assert (tmp_path / "onnx" / "model.onnx").exists()
    data = (tmp_path / "onnx" / "model.onnx").read_bytes()
    assert b"test_debug_bundle" not in data, "PyTorch's stack traces are in the file"


def test_second_opinion_without_the_packages(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generic_export.debug.archive.through_onnx.find_spec", lambda name: None)
    opinion = opinion_through_onnx(model, (x,), tmp_path / "onnx", inference_target=TractNNEF())
    assert opinion.agrees is None and "onnx is not installed" in str(opinion)


def _cli() -> TractCli:
    try:
        return TractCli()
    except EngineMissingError as error:
        pytest.skip(str(error))
