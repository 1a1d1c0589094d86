"""ScriptModules, and modules that hold some, captured like any other: same graph and names, nothing frozen in silence."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.capture import capture
from generic_export.errors import CaptureError, NotCapturableError, SpecializedAxisError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torchscript.module import interpreted

Arguments = tuple[torch.Tensor, ...]


def exported(folder: Path, model: nn.Module, args: Arguments, axes: Any = None, **options: Any) -> Path:
    target = TractNNEF(dynamic_axes=axes or {})
    return export_model_to_nnef(model, args, folder / "m", target, compression_level=None, **options)


def check(folder: Path, model: nn.Module, *calls: Arguments, axes: Any = None, **options: Any) -> Path:
    """Export a module with its first call's arguments and compare the engine with PyTorch on all calls'."""
    archive = exported(folder, model, calls[0], axes, **options)
    with TractWheel(timeout_seconds=60).load(archive) as engine, torch.no_grad():
        for args in calls:
            expected = model(*args)
            for answer, reference in zip(
                engine.run([tensor.numpy() for tensor in args]),
                [expected] if isinstance(expected, torch.Tensor) else expected,
                strict=True,
            ):
                np.testing.assert_allclose(answer, reference.numpy(), rtol=1e-5, atol=1e-5)
    return archive


def saved_and_loaded(script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    loaded: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(script.save_to_buffer()))
    return loaded


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(4))
        self.blocks = nn.ModuleList([Block(4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.offset
        for block in self.blocks:
            x = block(x)
        return x.reshape(x.shape[0], -1)


def signature(graph: TorchModuleIRGraph) -> list[tuple[str, str, str, tuple[str, ...]]]:
    return [
        (str(op.target), op.module_path, op.module_type, tuple(out.name for out in op.outputs if out is not None))
        for op in graph.ops
    ]


def captured(model: nn.Module) -> TorchModuleIRGraph:
    return capture(model, (torch.randn(2, 3, 4),), TractNNEF(dynamic_axes={"x": {0: "B"}}))


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 3, 4))], ids=["script", "trace"]
)
def test_the_graph_is_the_one_that_torch_export_gives(make: Callable[[nn.Module], torch.jit.ScriptModule]) -> None:
    model = Stack().eval()
    plain, script = captured(model), captured(interpreted(saved_and_loaded(make(model))))
    assert signature(script) == signature(plain)
    assert [p.name for p in script.parameters] == [p.name for p in plain.parameters]
    assert script.symbols == plain.symbols and script.constants.keys() == plain.constants.keys()
    assert [op.module_type for op in script.ops if op.module_path == "blocks.1.up"] == ["Linear"]


def test_operators_know_the_scripts_own_lines() -> None:
    graph = captured(interpreted(torch.jit.script(Stack().eval())))
    (add,) = [op for op in graph.ops if op.module_path == "" and op.target is torch.ops.aten.add.Tensor]
    assert add.source.startswith("test_tracer.py:")


class Twins(nn.Module):
    """Two lists whose members have the same names and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(4) for _ in range(2)])
        self.decoder = nn.ModuleList([Block(4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            x = block(x)
        return x


@pytest.mark.parametrize("freeze", [True, False])
def test_members_of_lists_are_told_apart(freeze: bool) -> None:
    model = Twins().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # equal constants are one in a frozen graph
    script = torch.jit.script(model)
    frozen = torch.jit.freeze(script, optimize_numerics=False) if freeze else script
    assert signature(captured(interpreted(frozen, named_like=script))) == signature(captured(model))


class ListLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: list[torch.Tensor] = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            states.append(x)
        total = torch.zeros_like(x)
        for index, state in enumerate(states):
            if index != 1:
                total = total + state * float(index + 1)
        while len(states) > 1:
            total = total + states.pop()
        return total


def test_loops_over_a_list(tmp_path: Path) -> None:
    calls = [(torch.randn(batch, 4),) for batch in (2, 5)]
    check(tmp_path, torch.jit.script(ListLoop()), *calls, axes={"x": {0: "B"}})


class OnShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            x = x.flatten(0, 1)
        if x.shape[1] == 4:
            y = self.wide(x)
        else:
            y = x[:, :2]
        return y.view(x.shape[0], 2, -1)


@pytest.mark.parametrize("harden", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (3, 6), (2, 3, 4)])
def test_an_if_on_a_shape(tmp_path: Path, shape: tuple[int, ...], harden: bool) -> None:
    calls = [(torch.randn(batch, *shape[1:]),) for batch in (shape[0], 7)]
    check(tmp_path, torch.jit.script(OnShape()), *calls, axes={"x": {0: "B"}}, auto_harden_jit=harden)


class OnBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x - 1


def test_an_if_on_a_dynamic_size_is_told_and_asserted(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"the `if` at test_tracer\.py:\d+ depends on a dynamic size: its false branch"
    ):
        archive = exported(tmp_path, torch.jit.script(OnBatch()), (torch.randn(3, 4),), {"x": {0: "B"}})
    assert "tract_assert B <= 4" in (archive / "graph.nnef").read_text()


def test_an_if_on_a_static_size_is_decided(tmp_path: Path) -> None:
    text = (exported(tmp_path, torch.jit.script(OnBatch()), (torch.randn(5, 4),)) / "graph.nnef").read_text()
    assert "mul(" in text and "sub(" not in text


class OnData(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 1.0
        if bool(x.sum() > 0):
            y = x * 2
            scale = 3.0
        else:
            y = x - 1
        return y, y * scale


def test_an_if_on_data_is_decided_by_the_example_and_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"OnData: an `if` on data is fixed to the outcome of the example inputs"):
        check(tmp_path, torch.jit.script(OnData()), (torch.ones(3),), (torch.ones(3) * 2,))


def test_an_if_on_data_selects_when_the_script_is_not_hardened(tmp_path: Path) -> None:
    calls = [(torch.ones(3),), (-torch.ones(5),)]
    check(tmp_path, torch.jit.script(OnData()), *calls, axes={"x": {0: "N"}}, auto_harden_jit=False)


def test_branches_on_data_of_different_shapes_are_refused_with_the_line(tmp_path: Path) -> None:
    class Shapes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0) if bool(x.sum() > 0) else x

    with pytest.raises(CaptureError, match=r"branches of the `if` on data at test_tracer\.py:\d+ return values"):
        exported(tmp_path, torch.jit.script(Shapes()), (torch.ones(3, 2),), auto_harden_jit=False)


def test_a_branch_on_data_that_writes_elsewhere_is_refused(tmp_path: Path) -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            if bool(x.sum() > 0):
                y.add_(1)
            return y

    with pytest.raises(CaptureError, match=r"aten::add_ at test_tracer\.py:\d+ modifies a value from outside"):
        exported(tmp_path, torch.jit.script(Writes()), (torch.ones(3, 2),), auto_harden_jit=False)


class LoopOverAxis(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x[0]
        for index in range(x.shape[0]):
            total = total + x[index]
        return total


def test_a_loop_as_long_as_an_axis(tmp_path: Path) -> None:
    script = torch.jit.script(LoopOverAxis())
    check(tmp_path, script, (torch.randn(3, 4),))
    with pytest.raises(SpecializedAxisError, match=r"iterations of the loop at test_tracer\.py:\d+ is a dynamic size"):
        exported(tmp_path, script, (torch.randn(3, 4),), {"x": {0: "B"}})


def test_a_loop_until_a_condition_on_data_is_refused(tmp_path: Path) -> None:
    class Until(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while bool(x.sum() < 10):
                x = x * 2
            return x

    with pytest.raises(CaptureError, match=r"the loop at test_tracer\.py:\d+ runs until a condition on data"):
        exported(tmp_path, torch.jit.script(Until()), (torch.ones(3),))


def test_numbers_and_dicts_go_in_and_out(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor, width: int, flag: bool = False) -> dict[str, torch.Tensor]:
            mean = float(x.mean())
            ones = torch.full_like(x, 1.0) * mean
            if flag:
                ones = ones + 1
            return {"scaled": ones, "zeros": torch.zeros(x.shape[0], width, dtype=x.dtype).to(torch.int64)}

    script = torch.jit.script(Mixed())
    archive = exported(tmp_path, script, (torch.randn(3, 4), 2), {"x": {0: "B"}}, kwargs={"flag": True})  # type: ignore[arg-type]
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        scaled, zeros = engine.run([np.ones((5, 4), np.float32)])
    assert "-> (scaled, zeros)" in (archive / "graph.nnef").read_text()
    np.testing.assert_allclose(scaled, 2 * np.ones((5, 4)))
    assert zeros.shape == (5, 2) and zeros.dtype == np.int64


SCRIPT_OF_A_CLASS_THAT_IS_GONE = """
import sys, torch
from torch import nn

class OnlyHere(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.table = torch.arange(3.0)[:, None]

    def forward(self, x):
        return torch.relu(self.conv(x)) * self.table

torch.jit.script(OnlyHere().eval()).save(sys.argv[1])
"""


def test_a_script_whose_class_does_not_exist_here(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text(SCRIPT_OF_A_CLASS_THAT_IS_GONE)
    subprocess.run([sys.executable, str(tmp_path / "gone.py"), str(tmp_path / "script.pt")], check=True)
    (tmp_path / "gone.py").unlink()
    script = torch.jit.load(tmp_path / "script.pt")
    calls = [(torch.randn(2, 2, 9),), (torch.randn(1, 2, 20),)]
    archive = check(tmp_path, script, *calls, axes={"x": {0: "B", 2: "T"}})
    text = (archive / "graph.nnef").read_text()
    assert '("source_model", "OnlyHere")' in text and 'label="conv.weight"' in text and 'label="table"' in text


class Convolutions(nn.Module):
    """Shaped like torchvision's: features, pooling to a fixed size, flatten, classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(8, 16, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)]
        layers += [nn.ConvTranspose2d(16, 16, 3, 2, 1, output_padding=1)]
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(64, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(x) * 2 + x.size(0)


@pytest.mark.parametrize("form", ["trace", "frozen trace", "script"])
def test_a_convolutional_network_saved_and_loaded(tmp_path: Path, form: str) -> None:
    model = Convolutions().eval()
    script = torch.jit.script(model) if form == "script" else torch.jit.trace(model, torch.randn(2, 3, 32, 32))
    script = torch.jit.freeze(script) if form == "frozen trace" else script
    calls = [(torch.randn(batch, 3, 32, 32),) for batch in (2, 5)]
    archive = check(tmp_path, saved_and_loaded(script), *calls, axes={"x": {0: "B"}})
    if form != "frozen trace":  # freezing leaves no names
        assert (archive / "features.0.weight.dat").is_file()


def test_recurrent_and_attention_layers(tmp_path: Path) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 6, bidirectional=True, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, (hidden, _) = self.lstm(x)
            return self.encoder(y), hidden

    calls = [(torch.randn(batch, 5, 4),) for batch in (2, 3)]
    check(tmp_path, torch.jit.script(Layers().eval()), *calls, axes={"x": {0: "B"}})


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.outer = inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.outer(x)) * self.inner.factor  # type: ignore[operator]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 3
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.size(1) == 4
        return self.linear(x)


def test_a_script_inside_of_a_plain_module(tmp_path: Path) -> None:
    script = saved_and_loaded(torch.jit.script(Inner()))
    model = Around(script)
    archive = check(tmp_path, model, *[(torch.randn(batch, 4),) for batch in (2, 5)], axes={"x": {0: "B"}})
    assert model.inner is script and script.training
    assert {path.name for path in archive.glob("*.weight.dat")} == {"inner.linear.weight.dat", "outer.weight.dat"}


def test_the_caller_keeps_his_script(tmp_path: Path) -> None:
    script = torch.jit.script(ListLoop().train())
    graph, names = str(script.graph), [name for name, _ in script.named_parameters()]
    exported(tmp_path, script, (torch.randn(2, 4),))
    assert str(script.graph) == graph and [name for name, _ in script.named_parameters()] == names
    assert script.training and script.layers.training


class NumpyInside(nn.Module):
    """Leaves PyTorch for a moment: torch.export and torch.jit.script refuse that, torch.jit.trace does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = x.detach().numpy().ndim
        return self.linear(x) * rank


def test_what_only_tracing_takes_is_traced_and_told(tmp_path: Path) -> None:
    calls = [(torch.randn(batch, 4),) for batch in (2, 5)]
    with pytest.warns(
        UserWarning, match=r"NumPy computes with a tensor.* It was captured with torch\.jit\.trace\. .*py:\d+"
    ):
        archive = check(tmp_path, NumpyInside(), *calls, axes={"x": {0: "B"}})
    assert (archive / "linear.weight.dat").is_file()


class FilledUp(nn.Module):
    """Rows are filled up to a multiple of four; NumPy leaves it to be traced (Longformer)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        missing = (4 - x.shape[1] % 4) % 4
        return F.pad(x, (0, missing), value=float(x.detach().numpy().ndim))


def test_a_number_minus_a_size_is_traced(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="captured with"):
        check(tmp_path, FilledUp(), (torch.randn(2, 6),))


def test_what_scripting_takes_is_scripted_and_keeps_both_branches(tmp_path: Path) -> None:
    calls = [(torch.ones(3),), (-torch.ones(5),)]
    with pytest.warns(UserWarning, match=r"OnData at test_tracer\.py:\d+: .* It was captured with torch\.jit\.script"):
        check(tmp_path, OnData(), *calls, axes={"x": {0: "N"}})


class NumpySize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0) / x.detach().numpy().shape[0]


def test_a_trace_that_freezes_a_dynamic_axis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecializedAxisError, match=r"torch\.jit\.trace: specializes B: the trace differs"):
        exported(tmp_path, NumpySize(), (torch.randn(2, 4),), {"x": {0: "B"}})
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="captured with"):
        check(tmp_path, NumpySize(), (torch.randn(2, 4),))


def test_a_module_that_runs_at_one_size_only_is_not_traced(tmp_path: Path) -> None:
    class OneSize(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.detach().numpy().reshape(2, 4)) + x

    with pytest.raises(SpecializedAxisError, match="the module does not run at any other size"):
        exported(tmp_path, OneSize(), (torch.randn(2, 4),), {"x": {0: "B"}})


def test_what_nothing_captures_tells_torch_exports_reason(tmp_path: Path) -> None:
    class Unlucky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.jit.is_tracing():
                raise RuntimeError("not like that")
            return x + float(x.detach().numpy().sum())

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(NotCapturableError, match=r"Unlucky.*NumPy computes with a tensor"):
            exported(tmp_path, Unlucky(), (torch.randn(2, 4),))
