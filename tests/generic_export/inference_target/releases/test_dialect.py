"""Older tract releases: what is written for them, what is refused, and the smoke set on the wheels that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import DialectError, EngineMissingError, OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.releases.dialect import (
    OLDER_FORMS,
    RELEASES,
    SINCE,
    older_fragments,
    refuse_younger,
)
from generic_export.inference_target.tract.releases.wheels import wheel_packages
from generic_export.inference_target.version import SemanticVersion
from generic_export.nnef.graph import NnefGraph, NnefOperation
from generic_export.nnef.registries import with_fragments
from tests.load_script import load_script

smoke = load_script("dialect_smoke")

# What a release has no form for; everything else in the smoke set must pass there.
REFUSED = {
    "0.21.13": {"scatter_add", "grid_sample"},
    "0.21.14": {"scatter_add", "grid_sample"},
    "0.22.4": {"scatter_add", "grid_sample"},
    "0.23.0": {"grid_sample"},
    "0.23.5": set(),
    "0.23.9": set(),
}


def _packages_of(version: str) -> Path | None:
    try:
        return wheel_packages(version)
    except EngineMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", smoke.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("version", RELEASES)
def test_smoke_set(version: str, case: object) -> None:
    outcome = smoke.judge(case, version, TractWheel(timeout_seconds=30, packages=_packages_of(version)))
    expected = "refused" if outcome.case in REFUSED[version] else "passed"
    assert outcome.status == expected, outcome.reason


@pytest.mark.parametrize("version", RELEASES[:-1])
def test_windows_are_what_the_wheel_knows(version: str, tmp_path: Path) -> None:
    """An operator is unknown to a release exactly when its window says so."""
    packages = _packages_of(version)
    registries = "".join(f"extension tract_registry {name};\n" for name in ("tract_core", "tract_transformers"))
    for operator in ("copy", "tract_core_silu", "tract_transformers_sdpa", "tract_core_resize", "tract_core_cumsum"):
        since = SINCE[operator]
        text = f"version 1.0;\n{registries}graph g(x) -> (y) {{ x = external(shape=[2]); y = {operator}(undefined_name); }}\n"
        (tmp_path / "graph.nnef").write_text(text)
        with pytest.raises(Exception) as refusal:
            TractWheel(timeout_seconds=20, packages=packages).load(tmp_path).close()
        unknown = "No definition for operator" in str(refusal.value)
        assert unknown is (SemanticVersion.parse(version) < SemanticVersion.parse(since)), (
            f"{operator}: {refusal.value}"
        )


def test_an_older_form_calls_nothing_that_is_unknown_to_the_oldest_release() -> None:
    for name, fragment in OLDER_FORMS.items():
        young = {call for call in fragment.calls if SINCE.get(call, RELEASES[0]) > RELEASES[0]}
        assert young <= OLDER_FORMS.keys(), name


def test_a_young_operator_without_an_older_form_is_refused_with_module_and_release(tmp_path: Path) -> None:
    class Sampled(nn.Module):
        def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return nn.functional.grid_sample(x, grid, align_corners=False)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sampled()

        def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return self.inner(x, grid)

    target = TractNNEF(version="0.23.0", check_io=False)
    args = torch.randn(1, 2, 3, 4), torch.rand(1, 2, 2, 2)
    with pytest.raises(
        DialectError, match=r"tract_core_grid_sample at inner: tract 0\.23\.0 does not have it; 0\.23\.3 does"
    ):
        export_model_to_nnef(Outer(), args, tmp_path / "m.nnef", target)


def test_a_reduction_that_older_releases_ignore_is_refused(tmp_path: Path) -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.scatter_add(1, x.argsort(1), x)

    target = TractNNEF(version="0.22.4", check_io=False)
    with pytest.raises(DialectError, match="ignores reduction='add'"):
        export_model_to_nnef(Add(), torch.randn(2, 3), tmp_path / "m.nnef", target)


def test_the_newest_release_reads_the_document_as_it_is() -> None:
    operation = NnefOperation("tract_core_silu", (), (), ("y",))
    graph = NnefGraph("g", (), ("y",), (operation,), registries=("tract_core",))
    newest = SemanticVersion.parse(RELEASES[-1])
    refuse_younger(graph, newest)
    assert older_fragments(graph, newest) == ()


def test_an_older_release_gets_the_fragment_and_its_registry() -> None:
    operation = NnefOperation("tract_core_silu", (), (), ("y",))
    young = NnefGraph("g", (), ("y",), (operation,), registries=("tract_core",))
    graph = with_fragments(young, older_fragments(young, SemanticVersion.parse("0.22.4")))
    assert [fragment.name for fragment in graph.fragments] == ["tract_core_silu"]
    assert graph.registries == ("tract_core", "tract_transformers")


@pytest.mark.parametrize("version", ["0.21.12", "0.20.0", "newest"])
def test_versions_before_the_first_dialect_are_refused(version: str) -> None:
    with pytest.raises(OptionError):
        TractNNEF(version=version)


def test_the_check_asks_the_release_that_the_archive_is_for(tmp_path: Path) -> None:
    _packages_of("0.22.4")
    target = TractNNEF(version="0.22.4", dynamic_axes={"x": {0: "N"}})
    archive = export_model_to_nnef(nn.SiLU(), torch.randn(2, 3), tmp_path / "m.nnef", target, input_names=["x"])
    assert archive.exists()
