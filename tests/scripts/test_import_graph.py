"""The import graph: which imports count, what a circle is, how floors are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.load_script import load_script

graphs = load_script("import_graph")


def graph_of(root: Path, files: dict[str, str]) -> Any:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return graphs.import_graph(["house"], root)


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import house.cellar.wine", {"house.cellar.wine"}),
        ("from house.cellar import wine", {"house.cellar.wine"}),
        ("from house.cellar.wine import bottle", {"house.cellar.wine"}),
        ("from house.cellar import key", {"house.cellar"}),
        ("from . import cellar", {"house.cellar"}),
        ("from .cellar.wine import bottle", {"house.cellar.wine"}),
        ("def later():\n    from house.cellar import wine", {"house.cellar.wine"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.cellar.wine", {"house.cellar.wine"}),
        ("import os\nfrom pathlib import Path", set()),
    ],
)
def test_an_import_anywhere_counts(text: str, imported: set[str], tmp_path: Path) -> None:
    rest = {"house/__init__.py": "", "house/cellar/__init__.py": "key = 1", "house/cellar/wine.py": "bottle = 1"}
    assert graph_of(tmp_path, {"house/attic.py": text} | rest).imports["house.attic"] == imported


def test_a_relative_import_in_a_folder_starts_at_the_folder(tmp_path: Path) -> None:
    files = {"house/__init__.py": "", "house/cellar/__init__.py": "from . import wine", "house/cellar/wine.py": ""}
    assert graph_of(tmp_path, files).arrows == (("house.cellar", "house.cellar.wine"),)


def test_circles_are_named_whole_and_count_as_one_floor(tmp_path: Path) -> None:
    files = {
        "house/attic.py": "import house.stairs",
        "house/stairs.py": "import house.landing",
        "house/landing.py": "def down():\n    import house.stairs\nimport house.ground",
        "house/ground.py": "",
        "house/mirror.py": "import house.mirror",
    }
    graph = graph_of(tmp_path, files)
    assert graph.circles == (("house.landing", "house.stairs"), ("house.mirror",))
    assert graph.floors("house") == 3


def test_the_report_names_every_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["import_graph.py", "--arrows"])
    graphs.main()
    printed = capsys.readouterr().out
    assert all(f"\n{package}: " in f"\n{printed}" for package in graphs.PACKAGES)
    assert "floors" in printed and "circles: " in printed
    assert "quant/prequantized -> quant: " in printed
