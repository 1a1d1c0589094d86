"""Document 001, the slides: what they show of the exporter, done with models of our own and run in the engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef, open_stream
from generic_export.errors import MismatchError, OptionError
from generic_export.inference_target.tract.engines.streaming import Streaming
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.graph import NnefFragment
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.modules import translates_module
from generic_export.translate.registry import translates

RELEASE = str(TractNNEF.latest().release)


def graph_of(archive: Path) -> tuple[str, list[str]]:
    """Return the text of an archive's graph, and the names of its other files."""
    with tarfile.open(archive) as tar:
        names = [name for name in tar.getnames() if name.endswith(".dat")]
        return tar.extractfile("graph.nnef").read().decode(), names  # type: ignore[union-attr]


# --- the graph: text, made of fragments ---------------------------------------------------------------


@torch.library.custom_op("slides::quick_gelu", mutates_args=())
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU with a polynomial inside of a tanh."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@quick_gelu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


QUICK_GELU = NnefFragment(
    "quick_gelu",
    """
fragment quick_gelu(x: tensor<scalar>) -> (y: tensor<scalar>)
{
  y = 0.5 * x * (1.0 + tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)));
}
""",
)


@translates(torch.ops.slides.quick_gelu.default)
def translate_quick_gelu(b: NnefBuilder, x: Value) -> Value:
    """slides::quick_gelu(Tensor x) -> Tensor"""
    return b.fragment(QUICK_GELU, [x], shape=x.shape, dtype=x.dtype)


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.ops.slides.quick_gelu(self.layer(x))
        return x


def test_a_fragment_is_written_once_and_called_twice_and_so_is_a_weight(tmp_path: Path) -> None:
    archive = export_model_to_nnef(Twice(), (torch.randn(1, 2),), tmp_path / "twice", TractNNEF(), ["input_0"])
    text, tensors = graph_of(archive)
    assert text.count("fragment quick_gelu(") == 1
    assert text.count("= quick_gelu(") == 2
    assert sorted(tensors) == ["layer.bias.dat", "layer.weight.dat"]
    assert text.count('variable<scalar>(label="layer.weight", shape=[2, 2])') == 1
    assert 'input_0 = tract_core_external(shape=[1, 2], datum_type="f32");' in text


def test_a_graph_written_by_hand_runs_beside_ours(tmp_path: Path) -> None:
    """The language of the slides: fragments, labels, ranks made equal with unsqueeze; one layer named twice."""
    model, x = Twice(), torch.randn(1, 2)
    archive = export_model_to_nnef(model, (x,), tmp_path / "twice", TractNNEF(), compression_level=None)
    (archive / "graph.nnef").write_text(
        f"""
version 1.0;
extension tract_registry tract_core;
{QUICK_GELU.text}
graph network(input_0) -> (output_0)
{{
  input_0 = tract_core_external(shape=[1, 2], datum_type="f32");
  weight = variable<scalar>(label="layer.weight", shape=[2, 2]);
  bias = variable<scalar>(label="layer.bias", shape=[2]);
  bias_row = unsqueeze(bias, axes=[0]);
  first = linear(input_0, weight, bias_row);
  gelu_1 = quick_gelu(first);
  second = linear(gelu_1, weight, bias_row);
  output_0 = quick_gelu(second);
}}
"""
    )
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        (answer,) = engine.run([x.numpy()])
    with torch.no_grad():
        np.testing.assert_allclose(answer, model(x).numpy(), rtol=1e-5, atol=1e-6)


# --- the call -----------------------------------------------------------------------------------------


class SmallViT(nn.Module):
    """A vision transformer: patches, a class token, one encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def test_the_whole_call_with_its_keywords(tmp_path: Path) -> None:
    bundle = tmp_path / "debug.tgz"
    archive = export_model_to_nnef(
        model=SmallViT(),
        args=(torch.randn(1, 3, 8, 8),),
        file_path_export=tmp_path / "small_vit.nnef.tgz",
        inference_target=TractNNEF(version=RELEASE, check_io=True),
        input_names=["input"],
        output_names=["output"],
        debug_bundle_path=bundle,
    )
    assert archive == tmp_path / "small_vit.nnef.tgz"
    assert not bundle.exists()  # nothing went wrong
    text, _ = graph_of(archive)
    assert "graph network(input) -> (output)\n" in text
    assert f'("tract_target_version", "{RELEASE}")' in text


@torch.library.custom_op("slides::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    """Three times x."""
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@translates(torch.ops.slides.triple.default)
def translate_triple_wrongly(b: NnefBuilder, x: Value) -> Value:
    """slides::triple(Tensor x) -> Tensor"""
    return b.binary("add", x, x)


class Faulty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.slides.triple(x.exp())


def test_a_wrong_archive_is_caught_and_bundled(tmp_path: Path) -> None:
    bundle, x = tmp_path / "debug.tgz", torch.randn(3)
    with pytest.raises(MismatchError, match=r"debug\.tgz"):
        export_model_to_nnef(Faulty(), (x,), tmp_path / "faulty", TractNNEF(), debug_bundle_path=bundle)
    with tarfile.open(bundle) as tar:
        report = next(tar.extractfile(name).read().decode() for name in tar.getnames() if name.endswith("README.md"))  # type: ignore[union-attr]
    assert "slides" in report and "triple" in report


# --- one kind of module, written our own way ----------------------------------------------------------


class Gate(nn.Module):
    """Half of the features open or close the other half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return left * (1 / (1 + torch.exp(-right * self.slope)))


@translates_module(Gate)
def translate_gate(b: NnefBuilder, module: Gate, inputs: Sequence[Value], state: Mapping[str, Value]) -> Value:
    """The engine's own sigmoid."""
    (x,) = inputs
    half = state["slope"].shape[0]
    left, right = b.slice(x, x.rank - 1, 0, half), b.slice(x, x.rank - 1, half, 2 * half)
    return b.binary("mul", left, b.unary("sigmoid", b.binary("mul", right, state["slope"])))


def test_a_class_of_modules_is_written_as_one_wants(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), Gate(4), nn.Linear(4, 4), Gate(2))
    target = TractNNEF(dynamic_axes={"x": {0: "B"}})
    text, tensors = graph_of(export_model_to_nnef(model, (torch.randn(3, 4),), tmp_path / "m", target, ["x"]))
    assert text.count("= sigmoid(") == 2
    assert "exp(" not in text
    assert {"1.slope.dat", "3.slope.dat"} <= set(tensors)


# --- what is known of sizes ---------------------------------------------------------------------------


def test_sizes_are_symbols_and_relations_between_them_are_written(tmp_path: Path) -> None:
    class Join(nn.Module):
        def forward(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.cat([past, new], dim=1).cumsum(1)

    target = TractNNEF(dynamic_axes={"past": {0: "B", 1: "P"}, "new": {0: "B", 1: "S"}})
    archive = export_model_to_nnef(
        Join(), (torch.randn(2, 3), torch.randn(2, 4)), tmp_path / "join", target, custom_extensions=["P <= 512"]
    )
    text, _ = graph_of(archive)
    assert [f"extension tract_symbol {symbol};" in text for symbol in "BPS"] == [True] * 3
    assert "extension tract_assert P <= 512;" in text
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        assert engine.outputs[0].shape in (("B", "P+S"), ("B", "S+P"))
        past, new = np.ones((1, 0), np.float32), np.ones((1, 7), np.float32)
        np.testing.assert_array_equal(engine.run([past, new])[0], [np.arange(1, 8)])


def test_a_bounded_size_is_one_of_torch_exports() -> None:
    batch = torch.export.Dim("B", min=1, max=8)
    assert TractNNEF(dynamic_axes={"x": {0: batch}}).dynamic_axes["x"][0] is batch
    with pytest.raises(OptionError):
        TractNNEF(version="0.1.0")


# --- signals ------------------------------------------------------------------------------------------

RATE, WINDOW, HOP, MELS, COEFFICIENTS = 8_000, 200, 80, 20, 12


class Mfcc(nn.Module):
    """Cepstral coefficients: a spectrogram, mel filters, a logarithm, a cosine transform."""

    window: torch.Tensor
    filters: torch.Tensor
    cosines: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        edges = torch.linspace(0, WINDOW // 2, MELS + 2)
        bins = torch.arange(WINDOW // 2 + 1)
        rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
        order, band = torch.arange(COEFFICIENTS)[:, None], torch.arange(MELS)
        self.register_buffer("window", torch.hamming_window(WINDOW))
        self.register_buffer("filters", torch.minimum(rising, falling).clamp(min=0))
        self.register_buffer("cosines", torch.cos(torch.pi / MELS * order * (band + 0.5)) * (2 / MELS) ** 0.5)

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(waveform, WINDOW, HOP, window=self.window, center=False, return_complex=True)
        return self.cosines @ torch.log(self.filters @ spectrum.abs().square() + 1e-6)


def test_cepstral_coefficients_at_any_length_and_piece_by_piece(tmp_path: Path) -> None:
    streaming = Streaming("T", HOP)
    target = TractNNEF(dynamic_axes={"waveform": {1: "T"}}, streaming=streaming)
    model, waveform = Mfcc(), torch.randn(1, 1600)
    archive = export_model_to_nnef(model, (waveform,), tmp_path / "mfcc", target)
    other = torch.randn(1, 2345)
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        (answer,) = engine.run([other.numpy()])
    np.testing.assert_allclose(answer, model(other).numpy(), rtol=0, atol=1e-4)
    with open_stream(archive, streaming) as stream:
        (streamed,) = stream.run([other.numpy()])
    known = streamed.values.shape[2]
    assert known == (2345 // HOP) - streamed.delay
    np.testing.assert_allclose(streamed.values, model(other).numpy()[:, :, :known], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["MFCC", "MelSpectrogram"])
def test_torchaudios_own_transforms(name: str, tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchaudio.transforms", reason="torchaudio is not installed")
    mel = {"n_fft": WINDOW, "hop_length": HOP, "n_mels": MELS}
    model = (
        transforms.MFCC(RATE, COEFFICIENTS, melkwargs=mel) if name == "MFCC" else transforms.MelSpectrogram(RATE, **mel)
    )
    target = TractNNEF(dynamic_axes={"waveform": {1: "T"}})
    export_model_to_nnef(model, (torch.randn(1, 1600),), tmp_path / name, target)


# --- WebAssembly --------------------------------------------------------------------------------------

WASM = Path(__file__).parents[2] / "examples" / "wasm"
PROGRAM = Path(os.environ.get("CARGO_TARGET_DIR", WASM / "target")) / "wasm32-wasip1" / "release" / "run-archive.wasm"


@pytest.mark.skipif(
    not PROGRAM.exists() or shutil.which("node") is None, reason="examples/wasm is not built, or no node"
)
def test_an_archive_runs_in_webassembly(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(128, 4))
    target = TractNNEF(dynamic_axes={"image": {0: "B"}})
    archive = export_model_to_nnef(
        model, (torch.randn(1, 3, 4, 4),), tmp_path / "m", target, ["image"], compression_level=1
    )
    for batch in (1, 3):
        image = torch.randn(batch, 3, 4, 4)
        command = ["node", "--no-warnings", WASM / "run.mjs", PROGRAM, archive, f"{batch},3,4,4"]
        answer = subprocess.run(command, input=image.numpy().tobytes(), capture_output=True, check=True).stdout
        with torch.no_grad():
            expected = model.eval()(image).numpy()
        np.testing.assert_allclose(np.frombuffer(answer, np.float32).reshape(batch, 4), expected, rtol=1e-4, atol=1e-5)


# --- looking into what the engine made of it ----------------------------------------------------------


def test_the_engine_lists_the_operators_that_it_runs_with_their_cost(tmp_path: Path) -> None:
    archive = export_model_to_nnef(SmallViT(), (torch.randn(1, 3, 8, 8),), tmp_path / "vit", TractNNEF())
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        nodes = engine.dump()
    assert any(node.operator == "OptMatMul" and node.costs for node in nodes)
