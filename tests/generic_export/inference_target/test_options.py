"""Every option of `TractNNEF`, shown by what changes in the graph or in the engine's answer; the hooks, in their order."""

from __future__ import annotations

import getpass
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from generic_export import (
    InferenceTarget,
    SemanticVersion,
    ToleranceLimits,
    TractCheckTolerance,
    TractFeature,
    TractNNEF,
    assert_io,
    export_model_to_nnef,
)
from generic_export.errors import DialectError, EngineMissingError, MismatchError, OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.releases.wheels import wheel_packages
from generic_export.nnef.graph import NnefGraph
from generic_export.read.reading import read_graph_text
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.translate.registry import translates
from tests.engine_check import Function


def graph(model: Any, args: Any, folder: Path, **options: Any) -> str:
    """Export, check in the engine, and return the text of the graph."""
    module = model if isinstance(model, nn.Module) else Function(model)
    names = [f"input_{index}" for index in range(len(args))]
    target = TractNNEF(**options)
    return read_graph_text(export_model_to_nnef(module, args, folder / "m.nnef", target, input_names=names))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def heads(size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, size, 8, dtype=dtype) for _ in range(3))


SEQUENCES = {f"input_{index}": {2: "S"} for index in range(3)}


def _require(version: str) -> None:
    try:
        wheel_packages(version)
    except EngineMissingError as error:
        pytest.skip(str(error))


# --- version ------------------------------------------------------------------------------------------


def test_version_as_text_or_parsed_and_latest(tmp_path: Path) -> None:
    assert (
        TractNNEF(version=SemanticVersion(0, 23, 9)).release == TractNNEF.latest().release == SemanticVersion(0, 23, 9)
    )
    assert '("tract_target_version", "0.23.9")' in graph(nn.ReLU(), (torch.randn(2),), tmp_path)


def test_an_older_version_gets_other_text_and_its_own_engine(tmp_path: Path) -> None:
    _require("0.22.4")
    x = (torch.randn(2, 3),)
    assert "fragment tract_core_silu" not in graph(nn.SiLU(), x, tmp_path)
    assert "fragment tract_core_silu" in graph(nn.SiLU(), x, tmp_path, version="0.22.4")


def test_a_release_that_is_not_installed_is_missed_before_any_work(tmp_path: Path) -> None:
    class Untraceable(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("captured although the engine is missing")

    target = TractNNEF(version="0.23.999")
    with pytest.raises(EngineMissingError, match=r"tract 0\.23\.999 is not installed"):
        export_model_to_nnef(Untraceable(), torch.randn(2), tmp_path / "m", target)


# --- check_io, tolerance, binary -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Off(TractNNEF):
    """Remembers the answers it was asked for, and moves them by a little."""

    asked: list[Path] = field(default_factory=list)

    def ask(self, archive: Path, inputs: Any) -> list[np.ndarray]:
        self.asked.append(archive)
        return [answer + np.float32(0.01) for answer in super().ask(archive, inputs)]


def test_check_io_and_its_tolerance(tmp_path: Path) -> None:
    def checked(**options: Any) -> int:
        target = Off(**options)
        export_model_to_nnef(nn.ReLU(), torch.zeros(3), tmp_path / "m", target)
        return len(target.asked)

    assert checked(check_io=False) == 0
    assert checked(check_io_tolerance=TractCheckTolerance.VERY) == checked(check_io_tolerance="very") == 1
    assert checked(check_io_tolerance=ToleranceLimits(absolute=0.011)) == 1
    for tight in (TractCheckTolerance.APPROXIMATE, ToleranceLimits(absolute=0.009)):
        with pytest.raises(MismatchError, match=r"max abs error 0\.01"):
            checked(check_io_tolerance=tight)
    for wrong in ("near", None):
        with pytest.raises(OptionError, match=r"is not a tolerance.*exact, close"):
            TractNNEF(check_io_tolerance=wrong)  # type: ignore[arg-type]


def test_specific_binary_checks_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        binary = TractCli().binary
    except EngineMissingError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(TractWheel, "load", None)  # the wheel must not be asked
    for dtype in (torch.float32, torch.float16, torch.int64):
        x = torch.ones(2, 3).to(dtype)
        graph(lambda x: (x + x, x > 0), (x,), tmp_path, specific_tract_binary_path=binary)
    with pytest.raises(OptionError, match=r"is tract .*, but the archive is for 0\.22\.4"):
        graph(nn.ReLU(), (torch.ones(2),), tmp_path, specific_tract_binary_path=str(binary), version="0.22.4")
    with pytest.raises(EngineMissingError, match="is not an executable tract"):
        graph(nn.ReLU(), (torch.ones(2),), tmp_path, specific_tract_binary_path="/bin/true")


def test_dynamic_axes(tmp_path: Path) -> None:
    assert "tract_symbol" not in graph(nn.ReLU(), (torch.randn(2, 3),), tmp_path)
    text = graph(nn.ReLU(), (torch.randn(2, 3),), tmp_path, dynamic_axes={"input_0": {0: "N"}})
    assert "extension tract_symbol N;" in text
    assert_io(nn.ReLU(), torch.randn(5, 3), tmp_path / "m.nnef.tar")


# --- properties -----------------------------------------------------------------------------------------


def test_properties_and_identity(tmp_path: Path) -> None:
    plain = graph(nn.ReLU(), (torch.randn(2),), tmp_path)
    assert not any(f'("{key}"' in plain for key in ("user", "host", "os"))
    told = graph(
        nn.ReLU(), (torch.randn(2),), tmp_path, dump_identity_properties=True, specific_properties={"depth": 2.0}
    )
    for key, value in (("user", getpass.getuser()), ("host", platform.node()), ("os", platform.platform())):
        assert f'("{key}", "{value}")' in told
    assert '("depth", 2.0)' in told


# --- feature_flags --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _local_response() -> None:
    """An operator of our own that only the ONNX registry of the engine has."""

    @torch.library.custom_op("t2n_test::multinomial_like", mutates_args=())
    def lookup(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.local_response_norm(x, 3, alpha=0.0003, beta=0.75, k=1.0)

    @lookup.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @translates(torch.ops.t2n_test.multinomial_like.default)
    def translated(b: Any, x: Any) -> Any:
        attributes = {"alpha": 0.0003, "beta": 0.75, "bias": 1.0, "size": 3}
        return b.emit("tract_onnx_lrn", [x], shape=x.shape, dtype=x.dtype, attributes=attributes)


def test_an_operator_of_another_registry_needs_its_flag(tmp_path: Path) -> None:
    x = (torch.randn(1, 5, 4),)
    operator = torch.ops.t2n_test.multinomial_like
    with pytest.raises(DialectError, match=r"tract_onnx_lrn at \(root\) needs the registry tract_onnx"):
        graph(operator, x, tmp_path)
    for flags in ({TractFeature.ONNX}, ["tract_onnx"], ["onnx", "extra"]):
        assert "extension tract_registry tract_onnx;" in graph(operator, x, tmp_path, feature_flags=flags)


def test_without_transformers_attention_is_spelled_out(tmp_path: Path) -> None:
    text = graph(causal, heads(5), tmp_path, feature_flags=(), dynamic_axes=SEQUENCES)
    assert "tract_transformers" not in text and "softmax" in text
    assert_io(Function(causal), heads(9), tmp_path / "m.nnef.tar", TractNNEF(feature_flags=()))


def test_older_forms_need_their_registry_too(tmp_path: Path) -> None:
    with pytest.raises(DialectError, match="needs the registry tract_transformers"):
        graph(nn.SiLU(), (torch.randn(3),), tmp_path, version="0.22.4", check_io=False, feature_flags=())


def test_unknown_feature() -> None:
    with pytest.raises(OptionError, match=r"no feature 'tract_cuda'.*tract_extra, tract_onnx"):
        TractNNEF(feature_flags=["tract_cuda"])
    with pytest.raises(OptionError, match="feature_flags is 'onnx'"):
        TractNNEF(feature_flags="onnx")


# --- f32 switches ---------------------------------------------------------------------------------------


def _mean_error(model: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> float:
    """Mean error of the engine on an f16 module against the same module in f64."""
    target = TractNNEF(check_io=False, **options)
    archive = export_model_to_nnef(model.half(), x, folder / "m.nnef", target)
    (answer,) = target.ask(archive, [x.numpy()])
    with torch.no_grad():
        exact = model.double()(x.double()).numpy()
    return float(np.abs(answer.astype(np.float64) - exact).mean())


def test_linear_accumulation_in_f32(tmp_path: Path) -> None:
    linear, x = nn.Linear(64, 4, bias=False).half(), (torch.rand(2, 64).half(),)
    assert 'acc="f16"' in graph(linear, x, tmp_path)
    wide = graph(linear, x, tmp_path, force_linear_accumulation_in_f32=True)
    assert 'acc="f32"' in wide and 'acc="f16"' not in wide and wide.count('to="f16"') == 1


def test_norm_in_f32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(64), torch.randn(200, 64).half()
    norm.weight.data.normal_()
    norm.bias.data.normal_()
    plain, wide = (_mean_error(norm, x, tmp_path, force_norm_in_f32=force) for force in (False, True))
    assert wide < 0.8 * plain, "rounding once is no better than rounding at every step"


def test_attention_in_f32(tmp_path: Path) -> None:
    wide = graph(causal, heads(5, torch.float16), tmp_path, force_attention_inner_in_f32=True)
    narrow = graph(causal, heads(5, torch.float16), tmp_path)
    assert 'datum_type="f32", acc_datum_type="f32"' in wide and wide.count('to="f32"') == 3
    assert 'datum_type="f16", acc_datum_type="f32"' in narrow and 'to="f32"' not in narrow


# --- reify_sdpa_operator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reify, operator", [(None, True), (True, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_reify_sdpa_operator(reify: bool | None, operator: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    text = graph(causal, heads(5, dtype), tmp_path, reify_sdpa_operator=reify, dynamic_axes=SEQUENCES)
    assert ("tract_transformers_sdpa" in text, "softmax" in text) == (operator, not operator)
    target = TractNNEF(reify_sdpa_operator=reify, check_io_tolerance=TractCheckTolerance.APPROXIMATE)
    assert_io(Function(causal), heads(40, dtype), tmp_path / "m.nnef.tar", target)


def test_spelled_out_attention_with_a_mask_and_grouped_heads(tmp_path: Path) -> None:
    def masked(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)

    args = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8), torch.rand(6, 7) > 0.4
    text = graph(masked, args, tmp_path, reify_sdpa_operator=False)
    assert "tract_transformers_sdpa" not in text


def test_reify_sdpa_operator_where_the_engine_has_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"reify_sdpa_operator .* tract 0\.21\.14 does not have.*0\.22\.0 or later"):
        TractNNEF(version="0.21.14", reify_sdpa_operator=True)
    with pytest.raises(OptionError, match="feature_flags does not include"):
        TractNNEF(feature_flags=["tract_extra"], reify_sdpa_operator=True)
    _require("0.21.14")
    text = graph(causal, heads(5), tmp_path, version="0.21.14", dynamic_axes=SEQUENCES)
    assert "tract_transformers_sdpa" not in text and "softmax" in text


# --- upsample_with_debox -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2, 3, (2, 3)])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_upsample_with_debox(factor: Any, mode: str, tmp_path: Path) -> None:
    model, x = nn.Upsample(scale_factor=factor, mode=mode), (torch.randn(2, 3, 4, 5),)
    axes = {"input_0": {0: "N", 2: "H", 3: "W"}}
    text = graph(model, x, tmp_path, upsample_with_debox=True, dynamic_axes=axes)
    assert "debox(" in text and "tract_core_resize" not in text
    tight = TractNNEF(check_io_tolerance=TractCheckTolerance.EXACT)
    assert_io(model, torch.randn(1, 3, 7, 2), tmp_path / "m.nnef.tar", tight)
    assert "debox(" not in graph(model, x, tmp_path, dynamic_axes=axes)


@pytest.mark.parametrize("options", [{"scale_factor": 2.5}, {"size": (5, 7)}, {"scale_factor": 2, "mode": "bilinear"}])
def test_debox_serves_whole_factors_of_nearest_only(options: dict[str, Any], tmp_path: Path) -> None:
    assert "debox(" not in graph(nn.Upsample(**options), (torch.randn(1, 2, 4, 4),), tmp_path, upsample_with_debox=True)


def test_debox_in_one_axis_and_in_releases_without_resize(tmp_path: Path) -> None:
    model, x = nn.Upsample(scale_factor=2), (torch.randn(1, 2, 5),)
    assert "debox(" in graph(model, x, tmp_path, upsample_with_debox=True)
    with pytest.raises(OptionError, match=r"upsample_with_debox writes debox, which tract 0\.22\.4 does not have"):
        TractNNEF(version="0.22.4", upsample_with_debox=True)
    _require("0.23.0")
    text = graph(model, x, tmp_path, version="0.23.0")
    assert "tract_core_resize" not in text and "debox" not in text
    assert "debox(" in graph(model, x, tmp_path, version="0.23.0", upsample_with_debox=True)


# --- hooks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watching(TractNNEF):
    """Writes down which hook was called, and adds a fragment of its own."""

    calls: list[str] = field(default_factory=list)

    def pre_trace(self, model: nn.Module, input_names: Any, output_names: Any) -> None:
        self.calls.append(f"pre_trace {type(model).__name__} {input_names} {output_names}")
        super().pre_trace(model, input_names, output_names)

    def post_capture(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        self.calls.append(f"post_capture {len(graph.ops)}")
        return super().post_capture(graph)

    def post_trace(self, nnef_graph: NnefGraph, active_custom_extensions: list[str]) -> NnefGraph | None:
        self.calls.append(f"post_trace {active_custom_extensions}")
        return super().post_trace(nnef_graph, active_custom_extensions)

    def specific_fragments(self, model: nn.Module) -> dict[str, str]:
        self.calls.append(f"specific_fragments {type(model).__name__}")
        text = "fragment relu(x: tensor<scalar>) -> (y: tensor<scalar>)\n{\n  y = max(x, 0.5);\n}"
        return {**super().specific_fragments(model), "relu": text}

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        self.calls.append(f"post_translate {[fragment.name for fragment in graph.fragments]}")
        return super().post_translate(graph)

    def post_export(self, model: Any, nnef_graph: Any, args: Any, exported_filepath: Any, *rest: Any) -> None:
        self.calls.append(f"post_export {exported_filepath.name} {len(args)}")
        super().post_export(model, nnef_graph, args, exported_filepath, *rest)


def test_hooks_are_called_in_order_and_a_fragment_takes_an_operator_s_place(tmp_path: Path) -> None:
    target = Watching()
    with pytest.raises(MismatchError, match=r"\(0\.5, expected 0\)"):
        export_model_to_nnef(nn.ReLU(), -torch.ones(3), tmp_path / "m", target, ["x"])
    assert target.calls == [
        "pre_trace ReLU ['x'] None",
        "post_capture 1",
        "post_trace ['tract_registry tract_core']",
        "specific_fragments ReLU",
        "post_translate ['relu']",
        "post_export m.failed.tar 1",
    ]


def test_the_base_target_needs_no_engine(tmp_path: Path) -> None:
    archive = export_model_to_nnef(nn.ReLU(), torch.ones(3), tmp_path / "m", InferenceTarget())
    assert "relu(" in read_graph_text(archive)
