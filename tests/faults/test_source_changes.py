"""A source that somebody writes to while it is exported: never a whole export of two halves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from generic_export.errors import SourceChangedError
from generic_export.weights.checkpoint import open_checkpoint
from generic_export.weights.pinned_file import PinnedFile, refuse_changed
from generic_export.weights.values import read_tensor
from generic_export.write.archive import WriteProgress
from t2n_llm.export.pipeline import export_llm
from t2n_llm.export.verify import verify_export
from t2n_llm.reporter import LogReporter
from tests.load_script import load_script
from tests.t2n_llm.command_line import unchanged

faults = load_script("faults")
WEIGHTS = faults.WEIGHTS


def lost_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


DAMAGES: dict[Callable[[Path], None], tuple[str, str]] = {
    **faults.DAMAGES,
    lost_tokenizer: ("tokenizer.json", "deleted"),
}


class Meddler(LogReporter):
    """Damages the source once, when some of the tensors are written or a stage begins."""

    def __init__(self, damage: Callable[[Path], None], folder: Path, moment: str = "") -> None:
        self.damage: Callable[[Path], None] | None = damage
        self.folder, self.moment = folder, moment

    def _act(self) -> None:
        if self.damage is not None:
            damage, self.damage = self.damage, None
            damage(self.folder)

    def progress(self, progress: WriteProgress) -> None:
        if not self.moment and progress.done_entries > 2:
            self._act()

    def stage(self, title: str) -> None:
        if self.moment and title.startswith(self.moment):
            self._act()


@pytest.fixture
def whole_model(model: Path) -> Path:
    """With files that a tokenizer would have; nobody reads them as one."""
    (model / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize("archive", ["tgz", "dir"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_source_that_changes_is_never_exported(
    damage: Callable[[Path], None], archive: str, whole_model: Path, parent: Path
) -> None:
    name, what = DAMAGES[damage]
    with unchanged(parent), pytest.raises(SourceChangedError, match=what) as caught:
        export_llm(
            *(str(whole_model), parent / "x"),
            check=False,
            require_tokenizer=False,
            archive=archive,
            reporter=Meddler(damage, whole_model),
        )
    assert name in caught.value.message and "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("moment", ["Capturing", "Running PyTorch", "Recording"])
@pytest.mark.parametrize(
    "damage", [faults.replaced, faults.overwritten, faults.lost_config], ids=lambda damage: damage.__name__
)
def test_at_whatever_moment(damage: Callable[[Path], None], moment: str, whole_model: Path, parent: Path) -> None:
    with unchanged(parent), pytest.raises(SourceChangedError):
        export_llm(
            *(str(whole_model), parent / "x"),
            require_tokenizer=False,
            decode_steps=2,
            reporter=Meddler(damage, whole_model, moment),
        )


def test_what_was_opened_is_what_is_read(model: Path) -> None:
    """A replaced file does not mix: every tensor comes from the one that was there first."""
    expected = load_file(model / WEIGHTS)
    checkpoint = open_checkpoint(model)
    faults.replaced(model)
    for name, source in checkpoint.tensors.items():
        assert torch.equal(read_tensor(source), expected[name]), name


def test_every_shard_and_its_index_count(model: Path, parent: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    for number, held in enumerate(halves):
        save_file(held, model / f"model-{number}.safetensors", metadata={"format": "pt"})
    index = {name: f"model-{number}.safetensors" for number, held in enumerate(halves) for name in held}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("model-1.safetensors", "model.safetensors.index.json"):
        with pytest.raises(SourceChangedError, match=name):
            export_llm(
                *(str(model), parent / "x"),
                check=False,
                require_tokenizer=False,
                reporter=Meddler(lambda folder, name=name: os.utime(folder / name, ns=(0, 0)), model),  # type: ignore[misc]
            )
    assert list(parent.iterdir()) == []


def test_the_manifest_says_what_was_read_and_not_where(model: Path, parent: Path) -> None:
    result = export_llm(str(model), parent / "x", check=False, require_tokenizer=False)
    files = result.manifest["source_files"]
    assert set(files) == {"config.json", "generation_config.json", WEIGHTS}
    status = (model / WEIGHTS).stat()
    assert files[WEIGHTS] == {
        "device": status.st_dev,
        "inode": status.st_ino,
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    assert str(model) not in (parent / "x" / "export.json").read_text()
    assert verify_export(parent / "x").passed


def test_a_held_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    file = PinnedFile(path)
    refuse_changed([file])
    assert file.read() == b"0123456789" and file.read(8, 5) == b"89"
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)  # equal in all but the inode
    with pytest.raises(SourceChangedError, match="replaced"):
        refuse_changed([file])
    path.unlink()
    with pytest.raises(SourceChangedError, match="deleted"):
        refuse_changed([file])
    assert file.read() == b"0123456789"
