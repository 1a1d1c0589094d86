"""What is patched for the length of a capture is gone after it, also from what PyTorch remembers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from generic_export import TractNNEF
from generic_export.capture import capture
from generic_export.torch_graph.patches import capture_patches

_FIRST_USE_INSIDE = """
import torch
from generic_export.torch_graph.patches import capture_patches
with capture_patches(), torch.device("meta"):
    torch.empty(1)
with torch.device("meta"):
    print(torch.tensor([1.0]).device, torch.linspace(0, 1, 3).device)
"""


def test_device_contexts_know_the_functions_that_were_put_back() -> None:
    """PyTorch lists what a device context acts on at its first use: a fresh process, in which that is inside a capture."""
    answer = subprocess.run([sys.executable, "-c", _FIRST_USE_INSIDE], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["meta", "meta"]


def test_functions_are_put_back() -> None:
    before = torch.tensor, torch.linspace, torch.Tensor.__getitem__
    with capture_patches():
        assert torch.tensor is not before[0]
    assert (torch.tensor, torch.linspace, torch.Tensor.__getitem__) == before
    assert torch.tensor([torch.tensor(1)]).tolist() == [1]


@pytest.mark.parametrize("numbers", [True, [1, 2], [[4, 3], [2, 1]]])
def test_numbers_of_any_depth_keep_their_values(numbers: Any) -> None:
    class Written(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor(numbers, dtype=torch.float32, device=x.device)

    graph = capture(Written(), (torch.ones(2, 2, device="meta"),), TractNNEF())
    assert not graph.constants
