"""The public function: formats, names, checks, and a caller's module that comes back as it was."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import generic_export
from generic_export import KhronosNNEF, TractNNEF, export_model_to_nnef
from generic_export.errors import MismatchError, OptionError, OutputExistsError, UnsupportedOperatorError
from generic_export.inference_target.tract import TractCheckTolerance, compare
from generic_export.inference_target.tract.engines.wheel import TractWheel


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


@pytest.mark.parametrize(("level", "name"), [(None, "m.nnef"), (0, "m.nnef.tar"), (1, "m.nnef.tgz"), (9, "m.nnef.tgz")])
def test_every_archive_form_is_checked_in_the_engine(tmp_path: Path, level: int | None, name: str) -> None:
    archive = export_model_to_nnef(
        small_model(), torch.randn(3, 4), tmp_path / "m.nnef", TractNNEF(), compression_level=level
    )
    assert archive == tmp_path / name
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_input_and_output_names_and_dynamic_axes(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"features": {0: "N"}})
    archive = export_model_to_nnef(
        small_model(), torch.randn(3, 4), tmp_path / "m", target, ["features"], ["scores"], custom_extensions=["N >= 1"]
    )
    with TractWheel().load(archive) as model:
        assert [(fact.name, fact.shape) for fact in model.inputs] == [("features", ("N", "4"))]
        assert model.run([np.zeros((7, 4), np.float32)])[0].shape == (7, 2)
    with tarfile.open(archive) as tar:
        text = tar.extractfile("graph.nnef").read().decode()  # type: ignore[union-attr]
    assert "extension tract_assert N >= 1;" in text
    assert '("producer", "t2n-llm")' in text


def test_the_module_comes_back_untouched(tmp_path: Path) -> None:
    model = small_model().train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    export_model_to_nnef(model, torch.randn(3, 4), tmp_path / "m", TractNNEF())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_constants_made_by_the_forward_travel_with_the_archive(tmp_path: Path) -> None:
    class WithConstant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.tensor([1.0, -2.0, 3.0])  # neither parameter nor buffer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table

    export_model_to_nnef(WithConstant(), torch.randn(2, 3), tmp_path / "m", TractNNEF())


def test_an_existing_archive_is_replaced_only_when_asked(tmp_path: Path) -> None:
    model, x = small_model(), torch.randn(3, 4)
    export_model_to_nnef(model, x, tmp_path / "m", TractNNEF())
    with pytest.raises(OutputExistsError):
        export_model_to_nnef(model, x, tmp_path / "m", TractNNEF(), overwrite=False)
    export_model_to_nnef(model, x, tmp_path / "m", TractNNEF(), overwrite=True)


def test_a_difference_beyond_the_tolerance_is_an_error_with_figures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = TractNNEF(check_io_tolerance=TractCheckTolerance.EXACT)
    deep = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    with pytest.raises(MismatchError, match=r"max abs error .* at \["):
        export_model_to_nnef(deep, torch.randn(5, 64), tmp_path / "m", target)


def test_identity_is_recorded_only_when_asked(tmp_path: Path) -> None:
    def text(target: TractNNEF) -> str:
        folder = export_model_to_nnef(small_model(), torch.randn(1, 4), tmp_path / "m", target, compression_level=None)
        return (folder / "graph.nnef").read_text()

    assert '"host"' not in text(TractNNEF(check_io=False))
    assert '"host"' in text(TractNNEF(check_io=False, dump_identity_properties=True))
    assert '("licence", "MIT")' in text(TractNNEF(check_io=False, specific_properties={"licence": "MIT"}))


@pytest.mark.parametrize("version", ["0.20.3", "0.21", "latest"])
def test_versions_without_our_operators_are_refused(version: str) -> None:
    with pytest.raises(OptionError):
        TractNNEF(version=version)


def test_khronos_archives_use_standard_operators_only(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Sigmoid())
    folder = export_model_to_nnef(
        model, torch.randn(3, 4), tmp_path / "m", KhronosNNEF(), ["x"], compression_level=None
    )
    nnef = pytest.importorskip("nnef", reason="the Khronos parser (pip install nnef) is not installed")
    graph = nnef.load_graph(str(folder), stdlib=None)
    assert [op.name for op in graph.operations if op.name.startswith("tract")] == []
    assert "extension" not in (folder / "graph.nnef").read_text()


def test_khronos_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperatorError, match="tract_core_gelu_approx at 1"):
        export_model_to_nnef(
            nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate="tanh")),
            torch.randn(3, 4),
            tmp_path / "m",
            KhronosNNEF(),
            ["x"],
        )
    with pytest.raises(OptionError, match="symbolic"):
        KhronosNNEF(dynamic_axes={"x": {0: "N"}})
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import generic_export, t2n_llm, sys; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(generic_export, name) for name in generic_export.__all__)


@pytest.mark.parametrize(
    ("candidate", "reference", "passed"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([1.0, float("inf")], [1.0, float("inf")], True),
        ([1.0, 2.0], [1.0, float("inf")], False),
        ([1.0, 2.0012], [1.0, 2.0], False),
        ([1.0, 2.0009], [1.0, 2.0], True),
    ],
)
def test_comparison(candidate: list[float], reference: list[float], passed: bool) -> None:
    limits = TractCheckTolerance.APPROXIMATE.limits(np.dtype(np.float32))
    result = compare("y", np.array(candidate, np.float32), np.array(reference, np.float32), limits)
    assert result.passed is passed, str(result)


def test_comparison_looks_at_shape_and_element_type() -> None:
    limits = TractCheckTolerance.ULTRA.limits(np.dtype(np.float32))
    assert not compare("y", np.zeros((2,), np.float32), np.zeros((1, 2), np.float32), limits).passed
    assert "dtype" in str(compare("y", np.zeros(2, np.float16), np.zeros(2, np.float32), limits))
    assert compare("y", np.zeros((0,), np.float32), np.zeros((0,), np.float32), limits).passed
