"""Archives read back: the signature, further outputs, files side by side."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import ArchiveError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.reading import GraphSignature, read_graph_text, signature_of, unpack, with_outputs

TEXT = """version 1.0;
# graph comment(x) -> (y)
fragment f(a: tensor<scalar>) -> (b: tensor<scalar>) { b = a; }
graph my_net(
  first, second
) -> (
  one,
  two
)
{ one = first; two = second; }
"""


def test_signature_and_further_outputs() -> None:
    assert signature_of(TEXT) == GraphSignature("my_net", ("first", "second"), ("one", "two"))
    more = with_outputs(TEXT, ["one", "two", "inner"])
    assert signature_of(more).outputs == ("one", "two", "inner")
    assert more.replace("one, two, inner", "") == TEXT.replace("\n  one,\n  two\n", "")


def test_no_signature() -> None:
    with pytest.raises(ArchiveError, match="no line of the form"):
        signature_of("version 1.0;\n")


@pytest.mark.parametrize("level", [None, 0, 6])
def test_every_form_of_archive_and_what_the_engine_says_to_further_outputs(level: int | None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(2, 3)
    archive = export_model_to_nnef(model, x, tmp_path / "m", TractNNEF(check_io=False), compression_level=level)
    folder = unpack(archive, tmp_path / "open")
    text = read_graph_text(archive)
    assert (folder / "graph.nnef").read_text() == text
    hidden_name = next(line.split()[0] for line in text.splitlines() if "= relu(" in line)
    (folder / "graph.nnef").write_text(with_outputs(text, [*signature_of(text).outputs, hidden_name]))
    with TractWheel(timeout_seconds=60).load(folder) as engine:
        _, hidden = engine.run([x.numpy()])
    with torch.no_grad():
        np.testing.assert_allclose(hidden, model[:2](x).numpy(), rtol=1e-5, atol=1e-6)


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "noise.tar").write_bytes(b"no tar at all")
    (tmp_path / "empty").mkdir()
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("readme.txt"))
    for name in ("noise.tar", "empty", "other.tar", "missing.tar"):
        with pytest.raises(ArchiveError, match=name):
            read_graph_text(tmp_path / name)
    with pytest.raises(ArchiveError, match="cannot be unpacked"):
        unpack(tmp_path / "noise.tar", tmp_path / "open")


def test_nothing_is_unpacked_outside_the_folder(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        entry = tarfile.TarInfo("../escaped.txt")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"evil"))
    with pytest.raises(ArchiveError):
        unpack(tmp_path / "evil.tar", tmp_path / "deep" / "open")
    assert not list(tmp_path.rglob("escaped.txt"))
