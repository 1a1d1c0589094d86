"""The house rules that a reader should be able to rely on: imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# package -> what it may not import
FORBIDDEN = {
    "generic_export": {"quant", "kvcache", "t2n_llm", "transformers", "typer", "rich", "accelerate", "huggingface_hub"},
    "quant": {"kvcache", "t2n_llm", "transformers", "typer", "rich"},
    "kvcache": {"quant", "t2n_llm", "typer", "rich"},
}


def imported_packages(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        wrong = imported_packages(file) & FORBIDDEN[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


def test_the_nnef_document_knows_nothing_of_torch_fx_or_aten() -> None:
    for name in ("graph.py", "layout.py", "text.py"):
        assert "torch" not in imported_packages(ROOT / "generic_export" / "nnef" / name)
