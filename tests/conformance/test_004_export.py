"""The document on exports: `export_model_to_nnef`, the tensors' exports, the hardening of scripts; signatures and uses."""

from __future__ import annotations

import inspect
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generic_export.torch_graph.harden import harden_jit_for_export
from torch import nn

import generic_export
from generic_export import (
    DEFAULT_VARNAME_SCHEME,
    SemanticVersion,
    TractNNEF,
    VariableNamingScheme,
    export_model_to_nnef,
    export_tensors_from_disk_to_nnef,
    export_tensors_to_nnef,
    iter_torch_tensors_from_disk,
)
from generic_export.errors import MismatchError, OptionError

REQUIRED = inspect.Parameter.empty


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def documented(function: Callable[..., Any], *expected: tuple[str, Any]) -> None:
    """Check the parameters that the document names, in order, with their defaults; ours may follow as keywords."""
    parameters = list(inspect.signature(function).parameters.values())
    assert [(p.name, p.default) for p in parameters[: len(expected)]] == list(expected)
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[: len(expected)])
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not REQUIRED for p in parameters[len(expected) :])


# --- signatures -----------------------------------------------------------------------------------


def test_the_signature_of_export_model_to_nnef() -> None:
    documented(
        export_model_to_nnef,
        ("model", REQUIRED),
        ("args", REQUIRED),
        ("file_path_export", REQUIRED),
        ("inference_target", REQUIRED),
        ("input_names", None),
        ("output_names", None),
        ("compression_level", 0),
        ("log_level", logging.INFO),
        ("nnef_variable_naming_scheme", DEFAULT_VARNAME_SCHEME),
        ("check_io_names_qte_match", True),
        ("debug_bundle_path", None),
        ("custom_extensions", None),
        ("allow_same_io_names", False),
        ("auto_harden_jit", True),
    )


def test_the_signatures_of_the_tensors_exports() -> None:
    documented(
        export_tensors_from_disk_to_nnef,
        ("store_filepath", REQUIRED),
        ("output_dir", REQUIRED),
        ("filter_key", None),
        ("fn_check_found_tensors", None),
        ("map_location", "cpu"),
    )
    documented(export_tensors_to_nnef, ("name_to_torch_tensors", REQUIRED), ("output_dir", REQUIRED))
    documented(
        iter_torch_tensors_from_disk, ("store_filepath", REQUIRED), ("filter_key", None), ("map_location", "cpu")
    )


def test_the_signature_of_harden_jit_for_export() -> None:
    parameters = inspect.signature(harden_jit_for_export).parameters
    assert list(parameters) == ["model", "args", "freeze", "diagnostics"]
    assert (parameters["freeze"].default, parameters["diagnostics"].default) == (True, None)
    assert parameters["freeze"].kind is parameters["diagnostics"].kind is inspect.Parameter.KEYWORD_ONLY


def test_where_the_names_are() -> None:
    from generic_export import export
    from generic_export.inference_target import TractNNEF as Target

    assert export.export_model_to_nnef is export_model_to_nnef
    assert Target is TractNNEF
    assert set(generic_export.__all__) <= set(dir(generic_export)) | {
        name for name in generic_export.__all__ if hasattr(generic_export, name)
    }


# --- uses -----------------------------------------------------------------------------------------


def test_everything_by_position(tmp_path: Path) -> None:
    archive = export_model_to_nnef(
        Perceptron(),
        (torch.rand(3, 4),),
        tmp_path / "p.nnef",
        TractNNEF.latest(),
        ["features"],
        ["scores"],
        None,
        logging.WARNING,
        VariableNamingScheme.NUMERIC,
        True,
        tmp_path / "case.tgz",
        [],
        False,
        True,
    )
    text = (archive / "graph.nnef").read_text()
    assert archive == tmp_path / "p.nnef"
    assert "graph network(features) -> (scores)\n" in text
    assert "v1 = variable" in text
    assert not (tmp_path / "case.tgz").exists()


@pytest.mark.parametrize("scheme", [*VariableNamingScheme, "raw", "numeric"])
def test_naming_schemes_are_an_enum_of_texts(scheme: str, tmp_path: Path) -> None:
    assert export_model_to_nnef(
        Perceptron(),
        (torch.rand(1, 4),),
        tmp_path / "p",
        TractNNEF(check_io=False),
        nnef_variable_naming_scheme=scheme,
    ).exists()


@pytest.mark.parametrize(
    ("name", "level", "written"),
    [
        ("m.nnef", None, "m.nnef"),
        ("m.nnef", 0, "m.nnef.tar"),
        ("m.nnef", 1, "m.nnef.tgz"),
        ("m.nnef.tar", 0, "m.nnef.tar"),
        ("m.nnef.tgz", 0, "m.nnef.tgz"),
        ("m.nnef.tgz", None, "m.nnef.tgz"),
        ("m.nnef.tar.gz", 9, "m.nnef.tar.gz"),
    ],
)
def test_suffix_and_level(name: str, level: int | None, written: str, tmp_path: Path) -> None:
    archive = export_model_to_nnef(
        Perceptron(), (torch.rand(1, 4),), tmp_path / name, TractNNEF(), compression_level=level
    )
    assert archive == tmp_path / written
    assert sorted(path.name for path in tmp_path.iterdir()) == [written]
    if archive.is_file():
        with tarfile.open(archive) as tar:
            assert "graph.nnef" in tar.getnames()


def test_the_suffix_alone_is_enough(tmp_path: Path) -> None:
    archive = export_model_to_nnef(Perceptron(), torch.rand(1, 4), str(tmp_path / "m.nnef.tgz"), TractNNEF.latest())
    assert archive.read_bytes()[:2] == b"\x1f\x8b"


def test_a_level_that_contradicts_the_suffix(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="contradicts compression level 5"):
        export_model_to_nnef(Perceptron(), torch.rand(1, 4), tmp_path / "m.tar", TractNNEF(), compression_level=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", [SemanticVersion.from_str("0.23.9"), "0.23.9"], ids=["parsed", "text"])
def test_a_pinned_release(version: SemanticVersion | str, tmp_path: Path) -> None:
    assert export_model_to_nnef(Perceptron(), (torch.rand(1, 4),), tmp_path / "m", TractNNEF(version)).exists()


# --- custom_extensions ----------------------------------------------------------------------------


def with_extensions(folder: Path, extensions: Any) -> Path:
    target = TractNNEF(dynamic_axes={"x": {0: "S"}})
    return export_model_to_nnef(
        Perceptron(), (torch.rand(3, 4),), folder / "m", target, compression_level=None, custom_extensions=extensions
    )


@pytest.mark.parametrize(
    ("extensions", "line"),
    [
        (["extension tract_assert S >= 1"], "extension tract_assert S >= 1;"),
        (["extension tract_assert S<=512;"], "extension tract_assert S <= 512;"),
        (["2*S <= 64"], "extension tract_assert 2 * S <= 64;"),
        ("S >= 2", "extension tract_assert S >= 2;"),
        (["decode: S == 1", "prompt: S >= 2"], "extension tract_assert decode: S == 1;"),
        (None, "extension tract_symbol S;"),
        ([], "extension tract_symbol S;"),
    ],
    ids=str,
)
def test_extensions_that_hold(extensions: Any, line: str, tmp_path: Path) -> None:
    assert line in (with_extensions(tmp_path, extensions) / "graph.nnef").read_text().splitlines()


@pytest.mark.parametrize(
    ("extensions", "told"),
    [
        (["S <= 2"], r"'S <= 2' does not hold for the example, where S = 3"),
        (["T >= 1"], r"uses T, which is not the symbol of an input axis. The symbols are S"),
        (["decode: S == 1"], r"the example, where S = 3, is in none of the scenarios"),
        (["nonsense"], r"'nonsense' is not a relation between sizes"),
        (["S >= 1 && S <= 4"], "cannot be parsed"),
        (["extension tract_symbol T"], "symbols are declared with dynamic_axes"),
        (["2*(S/2) == S"], "both divided and whole"),
        ([3], "3 is not a relation"),
    ],
    ids=str,
)
def test_extensions_that_do_not_hold_are_refused_before_anything_is_written(
    extensions: Any, told: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=told):
        with_extensions(tmp_path, extensions)
    assert not list(tmp_path.iterdir())


# --- a check that fails ---------------------------------------------------------------------------


class Disagreeing(nn.Module):
    """Answers otherwise when it is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (1.0 if torch.compiler.is_exporting() else 2.0)


@pytest.mark.parametrize(
    ("name", "kept"), [("m.nnef.tgz", "m.nnef.failed.tgz"), ("m.nnef.tar", "m.nnef.failed.tar"), ("m", "m.failed")]
)
def test_an_archive_that_fails_its_check_never_has_the_final_name(name: str, kept: str, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(MismatchError, match=kept):
            export_model_to_nnef(Disagreeing(), (torch.rand(2),), tmp_path / name, TractNNEF(), compression_level=None)
        assert [path.name for path in tmp_path.iterdir()] == [kept]


def test_an_archive_that_is_right_outlives_a_later_failure(tmp_path: Path) -> None:
    archive = export_model_to_nnef(Perceptron(), (torch.rand(1, 4),), tmp_path / "m.tar", TractNNEF())
    before = archive.read_bytes()
    with pytest.raises(MismatchError):
        export_model_to_nnef(Disagreeing(), (torch.rand(2),), archive, TractNNEF())
    assert archive.read_bytes() == before


# --- tensors --------------------------------------------------------------------------------------


def test_tensors_from_disk(tmp_path: Path) -> None:
    model = Perceptron()
    torch.save(model.state_dict(), tmp_path / "model.pt")

    def check(tensors: dict[str, torch.Tensor]) -> None:
        assert all(name.startswith("a.") for name in tensors)
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())

    for _ in range(2):
        written = export_tensors_from_disk_to_nnef(
            tmp_path / "model.pt", tmp_path / "out", lambda name: name.startswith("a."), check
        )
    assert list(written) == ["a.weight", "a.bias"]
    assert type(written) is dict
    assert torch.equal(written["a.weight"], model.a.weight)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bias.dat", "a.weight.dat"]


def test_tensors_in_memory(tmp_path: Path) -> None:
    given = {name: tensor for name, tensor in Perceptron().named_parameters() if name.startswith("b.")}
    written = export_tensors_to_nnef(given, str(tmp_path / "out"))
    assert list(written) == ["b.weight", "b.bias"]
    assert all(written[name] is tensor for name, tensor in given.items())


def test_tensors_one_at_a_time(tmp_path: Path) -> None:
    torch.save(Perceptron().state_dict(), tmp_path / "model.pt")
    found = iter_torch_tensors_from_disk(tmp_path / "model.pt", lambda name: name.endswith("bias"), "cpu")
    assert iter(found) is found
    assert [name for name, _ in found] == ["a.bias", "b.bias"]


# --- scripts --------------------------------------------------------------------------------------


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2 and x.size(0) > 1:
            x = x * 2
        return x + 1


@pytest.mark.parametrize("freeze", [True, False])
def test_a_script_is_hardened_for_its_example(freeze: bool, tmp_path: Path) -> None:
    script, diagnostics = torch.jit.script(Branching()).eval(), {}
    hardened = harden_jit_for_export(script, torch.rand(3, 2), freeze=freeze, diagnostics=diagnostics)
    assert "prim::If" not in str(hardened.graph)
    assert diagnostics["froze"] is freeze
    assert sum(count for name, count in diagnostics.items() if name.startswith("fold_") and count) > 0
    export_model_to_nnef(hardened, (torch.rand(3, 2),), tmp_path / "hardened", TractNNEF())
