"""The documents' tract tools, as they are written there: names, signatures, and each use of them run in the engine."""

from __future__ import annotations

import inspect
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generic_export.utils import SemanticVersion
from torch import nn

import generic_export
from generic_export import KhronosNNEF, export_model_to_nnef
from generic_export.errors import CaptureError, EngineMissingError, MismatchError, MissingExtraError, OptionError
from generic_export.inference_target import InferenceTarget, tract
from generic_export.inference_target.tract import (
    TractBinaryDownloader,
    TractCheckTolerance,
    TractCli,
    TractFeatureFlag,
    TractNNEF,
    assert_io,
    assert_io_and_debug_bundle,
    debug_dumper_pytorch_to_onnx_to_nnef,
)
from generic_export.inference_target.tract.engines.npz_bundle import write_bundle
from generic_export.inference_target.tract.releases.install import RELEASE_TARGETS, find_tract_cli
from generic_export.inference_target.tract.releases.wheels import wheel_packages
from generic_export.nnef.graph import NnefGraph
from generic_export.read.reading import read_graph_text
from tests.engine_check import Function

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return export_model_to_nnef(Doubled(), X, tmp_path / "m", TractNNEF(), ["x"], ["y"])


@pytest.fixture
def cli() -> TractCli:
    try:
        return TractCli()
    except EngineMissingError as error:
        pytest.skip(str(error))


def exported(model: Any, args: Any, folder: Path, target: InferenceTarget, *names: list[str]) -> str:
    module = model if isinstance(model, nn.Module) else Function(model)
    return read_graph_text(export_model_to_nnef(module, args, folder / "m", target, *names))


# --- signatures ---------------------------------------------------------------------------------------

# What is written in the document, without annotations; `...` stands for a default that is ours on purpose.
SIGNATURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "TractNNEF": (
        TractNNEF,
        {
            "version": ...,
            "feature_flags": None,
            "check_io": True,
            "dynamic_axes": None,
            "specific_tract_binary_path": None,
            "check_io_tolerance": TractCheckTolerance.APPROXIMATE,
            "specific_properties": None,
            "dump_identity_properties": ...,
            "force_attention_inner_in_f32": False,
            "force_linear_accumulation_in_f32": False,
            "force_norm_in_f32": False,
            "reify_sdpa_operator": ...,
            "upsample_with_debox": False,
        },
    ),
    "pre_trace": (TractNNEF.pre_trace, {"self": ..., "model": ..., "input_names": ..., "output_names": ...}),
    "post_trace": (TractNNEF.post_trace, {"self": ..., "nnef_graph": ..., "active_custom_extensions": ...}),
    "post_export": (
        TractNNEF.post_export,
        {
            "self": ...,
            "model": ...,
            "nnef_graph": ...,
            "args": ...,
            "exported_filepath": ...,
            "debug_bundle_path": None,
        },
    ),
    "specific_fragments": (TractNNEF.specific_fragments, {"self": ..., "model": ...}),
    "assert_io": (
        assert_io,
        {
            "model": ...,
            "test_input": ...,
            "nnef_file_path": ...,
            "tract_cli": ...,
            "io_npz_path": None,
            "input_names": None,
            "output_names": None,
            "check_tolerance": ...,
        },
    ),
    "assert_io_and_debug_bundle": (
        assert_io_and_debug_bundle,
        {
            "model": ...,
            "test_input": ...,
            "nnef_file_path": ...,
            "tract_cli": ...,
            "io_npz_path": None,
            "debug_bundle_path": None,
            "input_names": None,
            "output_names": None,
            "check_tolerance": ...,
        },
    ),
    "debug_dumper": (
        debug_dumper_pytorch_to_onnx_to_nnef,
        {"model": ..., "test_input": ..., "target_folder": ..., "tract_cli": ..., "raise_export_error": True},
    ),
    "TractCli": (TractCli, {"tract_path": ...}),
    "assert_io_cmd_str": (
        TractCli.assert_io_cmd_str,
        {"self": ..., "nnef_path": ..., "io_npz_path": ..., "check_tolerance": TractCheckTolerance.EXACT},
    ),
    "download": (TractCli.download, {"version": ...}),
    "TractBinaryDownloader": (TractBinaryDownloader, {"version": ..., "auto_download": True}),
    "dl_tract": (TractBinaryDownloader.dl_tract, {"self": ...}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function, written = SIGNATURES[name]
    found = list(inspect.signature(function).parameters.values())[: len(written)]
    assert [parameter.name for parameter in found] == list(written)
    for parameter in found:
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if written[parameter.name] is not ...:
            assert parameter.default == written[parameter.name], parameter.name


def test_names_are_where_the_document_has_them() -> None:
    for name in set(tract.__all__) & set(generic_export.__all__):
        assert getattr(tract, name) is getattr(generic_export, name)
    for name in ("TractCli", "TractFeatureFlag", "TractBinaryDownloader", "assert_io", "SemanticVersion"):
        assert getattr(generic_export, name) is getattr(tract, name)
    assert isinstance(inspect.getattr_static(TractBinaryDownloader, "arch"), property)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tract.nothing


# --- TractNNEF ----------------------------------------------------------------------------------------


def test_version_in_each_form() -> None:
    parsed = SemanticVersion.from_str("0.23.0")
    for target in (TractNNEF("0.23.0"), TractNNEF(parsed), TractNNEF(version="0.23.0")):
        assert target.release == parsed == SemanticVersion(0, 23, 0)
    with pytest.raises(OptionError, match="not a version"):
        SemanticVersion.from_str("newest")
    with pytest.raises(OptionError, match=r"0\.21\.12 is older than .*: 0\.21\.13"):
        TractNNEF("0.21.12")


def test_none_is_the_default_of_what_may_be_none(tmp_path: Path) -> None:
    target = TractNNEF("0.23.9", None, True, None, None, TractCheckTolerance.APPROXIMATE, None)
    assert target == TractNNEF() and target.dynamic_axes == {} and target.specific_properties == {}
    assert "y = mul(x, 2.0)" in exported(Doubled(), X, tmp_path, target, ["x"], ["y"])
    assert KhronosNNEF(dynamic_axes=None).dynamic_axes == {}
    with pytest.raises(OptionError, match="specific_properties"):
        TractNNEF(specific_properties=3)  # type: ignore[arg-type]


def test_a_tolerance_is_its_name(tmp_path: Path) -> None:
    assert issubclass(TractCheckTolerance, str) and TractCheckTolerance("close") == "close"
    target = TractNNEF(check_io_tolerance="exact")
    assert target.check_io_tolerance is TractCheckTolerance.EXACT
    exported(Doubled(), X, tmp_path, target)


@pytest.mark.parametrize("flags", [None, {TractFeatureFlag.COMPLEX}, {"complex", "extra"}])
def test_complex_numbers_go_in_and_come_out_as_pairs(flags: Any, tmp_path: Path) -> None:
    def turned(z: torch.Tensor) -> torch.Tensor:
        return z.conj() * (0.5 + 2j)

    args = (torch.randn(2, 3, dtype=torch.complex64),)
    target = TractNNEF(feature_flags=flags, dynamic_axes={"z": {0: "N"}})
    assert 'tract_core_external(shape=[N, 3, 2], datum_type="f32")' in exported(turned, args, tmp_path, target, ["z"])
    other = torch.randn(5, 3, dtype=torch.complex64)
    (comparison,) = assert_io(Function(turned), other, tmp_path / "m.tar", target)
    assert comparison.elements == 30
    with pytest.raises(MismatchError):
        assert_io(Function(lambda z: z * (0.5 + 2j)), other, tmp_path / "m.tar", target)


# --- dynamic axes -------------------------------------------------------------------------------------


def test_a_list_of_axes_gives_each_a_symbol_of_its_own(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": [0, 2]})
    assert target.dynamic_axes == {"x": {0: "X_0", 2: "X_2"}}
    text = exported(Doubled(), torch.randn(2, 3, 4), tmp_path, target, ["x"])
    assert "extension tract_symbol X_0;" in text and "shape=[X_0, 3, X_2]" in text
    assert_io(Doubled(), torch.randn(5, 3, 7), tmp_path / "m.tar", target)


@pytest.mark.filterwarnings("error")
def test_outputs_may_be_named_too(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "N"}, "y": {0: "N"}, "z": {0: "M"}})
    exported(lambda x: (x + 1.0, torch.cat([x, x])), X, tmp_path, target, ["x"], ["y", "z"])


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"y": [1]}, "axis 1 of output 'y' is declared dynamic, but it is always 3"),
        ({"z": {0: "N"}}, r"axis 0 of output 'z' is declared as N, but it is 2\*N"),
    ],
)
def test_an_output_that_is_otherwise_than_declared_is_told(axes: Any, told: str, tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "N"}, **axes})
    with pytest.warns(UserWarning, match=told):
        exported(lambda x: (x + 1.0, torch.cat([x, x])), X, tmp_path, target, ["x"], ["y", "z"])


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ({"x": [2]}, r"axis 2 of 'x' is declared dynamic, but its shape is \[2, 3\]"),
        ({"x": {7: "N"}}, "axis 7 of 'x'"),
        ({"x": [-1]}, "-1 is no axis of 'x'"),
        ({"x": {-1: "N"}}, "counted from 0"),
        ({"y": [9]}, "axis 9 of 'y'"),
        ({"q": [0]}, "'q', which is no input or output. Inputs: x. Outputs: y."),
        ({"x": 0}, "dynamic axes of 'x' are 0"),
        ({"x": {0: 3}}, "dynamic size 3 has no name"),
        (["x"], "dynamic_axes is a list"),
    ],
)
def test_bad_axes_are_refused(axes: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=why):
        exported(Doubled(), X, tmp_path, TractNNEF(dynamic_axes=axes), ["x"], ["y"])


def test_a_name_that_only_the_result_has_is_found_after_the_capture(tmp_path: Path) -> None:
    exported(Doubled(), X, tmp_path, TractNNEF(dynamic_axes={"x": [0], "output": [0]}))
    with pytest.raises(OptionError, match=r"'outputs', which is no input or output\. Inputs: x\. Outputs: output"):
        exported(Doubled(), X, tmp_path, TractNNEF(dynamic_axes={"x": [0], "outputs": [0]}))


# --- hooks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Custom(TractNNEF):
    """A user's target, whose hooks are written as the document has them."""

    def pre_trace(self, model: nn.Module, input_names: Any, output_names: Any) -> None:
        assert (type(model), input_names, output_names) == (Doubled, ["x"], ["y"])

    def post_trace(self, nnef_graph: Any, active_custom_extensions: Any) -> None:  # type: ignore[override]
        assert isinstance(nnef_graph, NnefGraph) and "tract_symbol N" in active_custom_extensions
        active_custom_extensions.append("tract_assert N <= 4096")

    def specific_fragments(self, model: nn.Module) -> dict[str, str]:
        return {"mul": "fragment mul(x: tensor<scalar>, y: tensor<scalar>) -> (z: tensor<scalar>) { z = add(x, x); }"}

    def post_export(
        self, model: Any, nnef_graph: Any, args: Any, exported_filepath: Path, debug_bundle_path: Path | None = None
    ) -> None:
        assert exported_filepath.exists() and nnef_graph.outputs == ("y",) and len(args) == 1
        super().post_export(model, nnef_graph, args, exported_filepath, debug_bundle_path)


def test_a_target_of_the_user_s_own_is_called_as_written(tmp_path: Path) -> None:
    text = exported(Doubled(), X, tmp_path, Custom(dynamic_axes={"x": {0: "N"}}), ["x"], ["y"])
    assert "extension tract_assert N <= 4096;" in text and "fragment mul(" in text


def test_what_a_hook_adds_is_read_at_once(tmp_path: Path) -> None:
    class Wrong(TractNNEF):
        def post_trace(self, nnef_graph: Any, active_custom_extensions: Any) -> None:  # type: ignore[override]
            active_custom_extensions.append("tract_nonsense 3")

        def specific_fragments(self, model: nn.Module) -> dict[str, str]:
            return {"twice": "fragment other() { }"}

    with pytest.raises(OptionError, match="'tract_nonsense 3' is not an extension"):
        exported(Doubled(), X, tmp_path, Wrong())

    class Misnamed(Wrong):
        post_trace = TractNNEF.post_trace  # type: ignore[assignment]

    with pytest.raises(OptionError, match="fragment 'twice' is not defined by its text"):
        exported(Doubled(), X, tmp_path, Misnamed())


def test_hooks_called_by_hand(archive: Path, tmp_path: Path) -> None:
    target = TractNNEF()
    target.pre_trace(Doubled(), None, None)
    assert target.specific_fragments(Doubled()) == {}
    graph = NnefGraph("g", (), (), ())
    assert target.post_trace(graph, []) is graph
    target.post_export(Doubled(), graph, [X], archive)
    bundle = tmp_path / "case.tgz"
    with pytest.raises(MismatchError, match=r"case\.tgz"):
        target.post_export(Function(lambda x: x * 3.0), graph, [X], archive, bundle)
    assert bundle.exists()
    with pytest.raises(OptionError, match="'q', which is no input"):
        TractNNEF(dynamic_axes={"q": [0]}).pre_trace(Doubled(), ["x"], ["y"])


def test_a_target_without_a_dialect_may_be_anything(tmp_path: Path) -> None:
    class Plain(InferenceTarget):
        check_io = False

        def specific_fragments(self, model: nn.Module) -> dict[str, str]:
            return {}

    assert "mul(x, 2.0)" in exported(Doubled(), X, tmp_path, Plain(), ["x"])


# --- checks by hand -----------------------------------------------------------------------------------


class Pair(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + 1.0, b * 3.0


def test_assert_io_by_names_and_with_an_npz(tmp_path: Path) -> None:
    class Swapped(nn.Module):
        def forward(self, b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return b * 3.0, a + 1.0

    a, b = torch.randn(2), torch.randn(2)
    archive = export_model_to_nnef(Pair(), (a, b), tmp_path / "m", TractNNEF(), ["a", "b"], ["p", "q"])
    npz = tmp_path / "io.npz"
    assert_io(Swapped(), (b, a), archive, TractNNEF(), npz, ["b", "a"], ["q", "p"], TractCheckTolerance.EXACT)
    entries = np.load(npz)
    assert sorted(entries) == ["a", "b", "p", "q"] and np.array_equal(entries["q"], (b * 3.0).numpy())
    with pytest.raises(MismatchError):
        assert_io(Swapped(), (b, a), archive)
    with pytest.raises(OptionError, match=r"called x, y; the archive has 2\. Its inputs are a, b"):
        assert_io(Pair(), (a, b), archive, input_names=["x", "y"])
    with pytest.raises(OptionError, match="3 output tensors; the archive has 2"):
        assert_io(Function(lambda a, b: (a, b, a)), (a, b), archive)
    with pytest.raises(OptionError, match="the example input is a dict"):
        assert_io(Pair(), {"a": a}, archive)  # type: ignore[arg-type]


def test_a_check_within_another_tolerance(archive: Path) -> None:
    near = Function(lambda x: x * 2.0 + 1e-2)
    assert assert_io(near, X, archive, check_tolerance="very")[0].passed
    with pytest.raises(MismatchError, match="tolerance 'exact'"):
        assert_io(near, X, archive, check_tolerance=TractCheckTolerance.EXACT)
    with pytest.raises(OptionError, match="str cannot run an archive"):
        assert_io(near, X, archive, "tract")  # type: ignore[arg-type]


def test_a_debug_bundle_only_where_it_is_asked_for(archive: Path, tmp_path: Path) -> None:
    wrong, bundle = Function(lambda x: x * 3.0), tmp_path / "case.tgz"
    with pytest.raises(MismatchError):
        assert_io_and_debug_bundle(wrong, X, archive, TractNNEF(), second_opinion=False)
    assert not bundle.exists()
    for arguments in ((TractNNEF(), None, bundle), (bundle, TractNNEF()), (str(bundle),)):
        with pytest.raises(MismatchError, match=r"case\.tgz"):
            assert_io_and_debug_bundle(wrong, X, archive, *arguments, second_opinion=False)
        bundle.unlink()


# --- the command --------------------------------------------------------------------------------------


def test_the_command_checks_too(cli: TractCli, archive: Path, tmp_path: Path) -> None:
    npz = tmp_path / "io.npz"
    assert assert_io(Doubled(), X, archive, cli, npz)[0].passed
    line = cli.assert_io_cmd_str(archive, npz)
    assert "--approx exact" in line and "--llm" not in line
    assert "--approx close" in cli.assert_io_cmd_str(archive, npz, TractCheckTolerance.CLOSE)
    with pytest.raises(MismatchError, match="'exact'"):
        assert_io(Function(lambda x: x * 2.0 + 1e-6), X, archive, cli)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_shell_line_of_a_check_runs(cli: TractCli, dtype: torch.dtype, tmp_path: Path) -> None:
    archive = export_model_to_nnef(Doubled(), X.to(dtype), tmp_path / "m", TractNNEF(), ["x"], ["y"])
    npz = tmp_path / "io.npz"
    for factor, code in ((2.0, 0), (3.0, 1)):
        write_bundle(npz, [{"x": X.to(dtype).numpy()}], {"y": (X.to(dtype) * factor).numpy()})
        run = subprocess.run(shlex.split(cli.assert_io_cmd_str(archive, npz)), capture_output=True, text=True)
        assert run.returncode == code, run.stderr


def test_a_command_is_downloaded_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.1.2", SemanticVersion(0, 1, 2)):
        downloader = TractBinaryDownloader(version, auto_download=False)
        assert downloader.arch in RELEASE_TARGETS.values()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        for attempt in (downloader.binary, downloader.dl_tract, lambda given=version: TractCli.download(given)):
            with pytest.raises(
                EngineMissingError, match=r"command 0\.1\.2 is not installed.*command --version 0\.1\.2"
            ):
                attempt()


# --- through ONNX -------------------------------------------------------------------------------------


def test_a_second_export_through_onnx_is_a_yes_or_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sorts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.t2n_test_000.nowhere(x)

    if find_spec("onnx") is not None and find_spec("onnxscript") is not None:
        assert debug_dumper_pytorch_to_onnx_to_nnef(Doubled(), X, tmp_path, None) is True
        if find_tract_cli() is not None:
            assert debug_dumper_pytorch_to_onnx_to_nnef(Doubled(), X, tmp_path / "command", TractCli()) is True
        assert (tmp_path / "model.onnx").exists() and (tmp_path / "model_from_onnx.nnef.tgz").exists()
        with pytest.raises(CaptureError, match="cannot write it as ONNX"):
            debug_dumper_pytorch_to_onnx_to_nnef(Sorts(), X, tmp_path / "no")
        assert debug_dumper_pytorch_to_onnx_to_nnef(Sorts(), X, tmp_path / "no", raise_export_error=False) is False
        return
    with pytest.raises(MissingExtraError, match=r"t2n-llm\[debug\]"):
        debug_dumper_pytorch_to_onnx_to_nnef(Doubled(), X, tmp_path)
    assert debug_dumper_pytorch_to_onnx_to_nnef(Doubled(), X, tmp_path, raise_export_error=False) is False


# --- what is chosen by version ------------------------------------------------------------------------


class Residual(nn.Module):
    """MobileNetV2's block, and the head behind it, in the small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.block = nn.Sequential(
            *(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()),
            *(nn.Conv2d(24, 24, 3, 1, 1, groups=24, bias=False), nn.BatchNorm2d(24), nn.ReLU6()),
            *(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8)),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


IMAGE = {0: "N", 2: "H", 3: "W"}
BY_VERSION: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], dict[int, str]]] = {
    "mobilenet": (Residual, (2, 3, 16, 16), (1, 3, 16, 16), {0: "N"}),
    "encoder": (encoder, (2, 3, 8), (1, 6, 8), {0: "N", 1: "T"}),
    "nearest": (lambda: nn.Upsample(scale_factor=2), (1, 2, 3, 4), (2, 2, 5, 3), IMAGE),
    "nearest, odd": (lambda: nn.Upsample(scale_factor=2.5), (1, 2, 4, 4), (2, 2, 6, 2), IMAGE),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 3, 4), (2, 2, 5, 3), IMAGE),
    "aligned": (
        lambda: nn.Upsample(scale_factor=3, mode="bilinear", align_corners=True),
        *((1, 2, 3, 4), (2, 2, 5, 3), IMAGE),
    ),
    "to a size": (lambda: nn.Upsample(size=(5, 7), mode="bilinear"), (1, 2, 3, 4), (2, 2, 5, 3), IMAGE),
}


@pytest.mark.parametrize("name", BY_VERSION)
@pytest.mark.parametrize("version", ["0.21.13", "0.21.14", "0.22.4", "0.23.0"])
def test_one_call_exports_and_checks_for_an_older_release(version: str, name: str, tmp_path: Path) -> None:
    try:
        wheel_packages(version)
    except EngineMissingError as error:
        pytest.skip(str(error))
    make, size, other, axes = BY_VERSION[name]
    torch.manual_seed(0)
    model = make().eval()
    export_model_to_nnef(model, torch.randn(size), tmp_path / "static", TractNNEF(version))
    target = TractNNEF(version, dynamic_axes={"x": axes})
    archive = export_model_to_nnef(model, torch.randn(size), tmp_path / "m", target, ["x"])
    assert_io(model, torch.randn(other), archive, target)
