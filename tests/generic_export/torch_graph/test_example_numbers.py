"""Numbers that a forward reads from tensors: a dynamic size, or the example's number, and told; in the engine at other sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, assert_io, export_model_to_nnef
from generic_export.errors import SpecializedAxisError

X, K, LENGTHS = torch.rand(2, 6), torch.tensor(4), torch.tensor([6, 4])


class Reading(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.function(x, k)


def masked(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mask what lies behind each length, as speech models do."""
    longest = int(torch.max(lengths).item())
    return x * (torch.arange(longest) < lengths.unsqueeze(1))


FORMS = {
    "mask": (lambda x, k: x * (torch.arange(int(k.max())) < k.unsqueeze(1)), LENGTHS),
    "slice by the longest": (lambda x, k: x[:, : int(k.max())], LENGTHS),
    "slice by a tensor": (lambda x, k: x[:, : k.max()], LENGTHS),
    "slice from a tensor": (lambda x, k: torch.cat([x[:, k:], x[:, : k - 1]], 1), K),
    "slice by an item": (lambda x, k: x[:, : k.item()], K),
    "range": (lambda x, k: x.sum() + torch.arange(int(k)), K),
    "repeat": (lambda x, k: x.repeat(int(k), 1), K),
    "padding": (lambda x, k: torch.cat([x, torch.zeros(x.shape[0], int(k))], 1), K),
    "row": (lambda x, k: x[:, int(k)], K),
    "loop": (lambda x, k: sum((x * i for i in range(int(k))), torch.zeros(())), K),
    "factor": (lambda x, k: x * int(k), K),
    "float": (lambda x, k: x * float(k), K),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_exported_and_told(form: str, dynamic: bool, tmp_path: Path) -> None:
    function, k = FORMS[form]
    axes = {"x": {0: "B", 1: "T"} if k is LENGTHS else {0: "B"}, "k": {0: "B"} if k is LENGTHS else {}}
    target = TractNNEF(dynamic_axes=axes if dynamic else {})
    model = Reading(function)
    with pytest.warns(UserWarning, match=r"test_example_numbers\.py:\d+"):
        archive = export_model_to_nnef(model, (X, k), tmp_path / "m", target)
    if dynamic:
        batch = torch.rand(5, 6), LENGTHS[[0, 1, 1, 0, 1]] if k is LENGTHS else k
        assert_io(model, batch, archive, target)


def test_a_number_that_is_a_dynamic_size_stays_dynamic(tmp_path: Path) -> None:
    model, target = Reading(masked), TractNNEF(dynamic_axes={"x": {0: "B", 1: "T"}, "k": {0: "B"}})
    with pytest.warns(
        UserWarning, match="a number that is read from a tensor is assumed to be T, the size of a dynamic axis"
    ):
        archive = export_model_to_nnef(model, (X, LENGTHS), tmp_path / "m", target)
    for frames, lengths in ((9, [4, 9, 1]), (3, [3]), (40, [17, 40])):
        assert_io(model, (torch.rand(len(lengths), frames), torch.tensor(lengths)), archive, target)


def test_a_number_that_may_be_either_of_two_sizes(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "B", 1: "T"}, "k": {0: "B"}})
    with warnings.catch_warnings(), pytest.raises(SpecializedAxisError, match="B and T: several sizes are equal"):
        warnings.simplefilter("ignore")
        export_model_to_nnef(
            Reading(lambda x, k: masked(x, k) + torch.zeros(int(k.max()), 1)),
            (torch.rand(4, 4), torch.tensor([4, 1, 2, 3])),
            tmp_path / "m",
            target,
        )
    assert not list(tmp_path.iterdir())


def test_a_number_that_changes_with_a_size_and_is_not_it(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "B"}})
    with warnings.catch_warnings(), pytest.raises(SpecializedAxisError):
        warnings.simplefilter("ignore")
        export_model_to_nnef(Reading(lambda x, k: torch.zeros(int((x >= 0).sum())) + k), (X, K), tmp_path / "m", target)


def test_the_files_of_the_model_are_as_they_were(tmp_path: Path) -> None:
    before = dict(globals())
    test_a_number_that_is_a_dynamic_size_stays_dynamic(tmp_path)
    assert "int" not in globals()
    assert before.keys() == globals().keys()


def test_the_conformer_of_torchaudio(tmp_path: Path) -> None:
    models = pytest.importorskip("torchaudio.models", reason="torchaudio is not installed", exc_type=ImportError)
    model = models.Conformer(input_dim=8, num_heads=2, ffn_dim=16, num_layers=1, depthwise_conv_kernel_size=3).eval()
    target = TractNNEF(dynamic_axes={"input": {0: "B", 1: "T"}, "lengths": {0: "B"}})
    with pytest.warns(UserWarning, match="assumed to be T"):
        archive = export_model_to_nnef(model, (torch.randn(2, 12, 8), torch.tensor([12, 9])), tmp_path / "m", target)
    for lengths in ([7, 20, 13], [9]):
        assert_io(model, (torch.randn(len(lengths), max(lengths), 8), torch.tensor(lengths)), archive, target)
