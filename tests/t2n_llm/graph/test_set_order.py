"""Sets in a model's code: the same order in every process, and nothing left behind."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from t2n_llm import export_llm
from t2n_llm.graph.capture import sorted_sets

ROOT = Path(__file__).resolve().parents[3]
UNSORTED = [8, 1]  # in a set of so few numbers, 8 comes first


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = set(UNSORTED)

    def forward(self) -> tuple[list[int], list[int]]:
        made = set(UNSORTED)
        assert isinstance({1}, set) and not isinstance([1], set)
        return list(made), list(self.kept)


def test_sets_are_sorted_inside_the_block_only() -> None:
    model = nn.Sequential(Tables())
    (part,) = model
    plain = list(set(UNSORTED))
    assert part() == (plain, plain)
    with sorted_sets(model):
        assert part() == (sorted(UNSORTED), sorted(UNSORTED))
        assert part.kept | {3} == {1, 3, 8}
    assert part() == (plain, plain) and type(part.kept) is set
    assert plain != sorted(UNSORTED)


def test_masks_of_several_kinds_are_made_in_sorted_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes them for the elements of a set (Gemma 4)."""
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "made", lambda: list(masking_utils.set(UNSORTED)), raising=False)
    with sorted_sets(nn.Linear(1, 1)):
        assert masking_utils.made() == sorted(UNSORTED)
    assert not hasattr(masking_utils, "set")


def test_elements_without_an_order_stay_as_they_are() -> None:
    part = Tables()
    part.kept = {1, "a", torch.float32}  # type: ignore[arg-type]
    with sorted_sets(part):
        assert set(part.kept) == {1, "a", torch.float32}


@pytest.mark.parametrize("options", [{}, {"compress": "q4_0"}], ids=["f16", "q4_0"])
def test_an_archive_has_no_time_and_no_path(tiny_llama: Path, tmp_path: Path, options: dict) -> None:
    digests = []
    for name in ("one", "another/place"):
        result = export_llm(
            str(tiny_llama), tmp_path / name, check=False, archive="tgz", require_tokenizer=False, **options
        )
        digests.append(hashlib.sha256(Path(result.archive).read_bytes()).hexdigest())
    assert digests[0] == digests[1]


@pytest.mark.nightly
def test_hash_seeds_change_no_byte() -> None:
    command = [sys.executable, "scripts/reproducible.py", "--only", "gemma3_text,llama"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "same: 2, different: 0, skipped: 0")
