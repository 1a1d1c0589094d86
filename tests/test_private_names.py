"""Private names of other libraries stand in `compat.py`, each in one: what a release may take away is found in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("generic_export", "quant", "kvcache", "t2n_llm")
LIBRARIES = frozenset(
    {"torch", "transformers", "accelerate", "typer", "huggingface_hub", "peft", "safetensors", "tokenizers"}
)
_DOTTED = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*")
# What Python itself names with an underscore although it is for everyone.
_PUBLIC = frozenset({"_fields", "_replace", "_asdict", "_make"})
_BY_STRING = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def is_private(path: str) -> bool:
    """Say whether a name, or a part of a dotted one, begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def dotted(node: ast.expr) -> list[str]:
    """Return the parts of `a.b.c`; [""] and the rest where it begins with something else than a name."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


@dataclass
class File:
    """One source file: what its names stand for, and the private attributes that its own classes have."""

    tree: ast.Module
    imported: dict[str, str] = field(default_factory=dict)
    operators: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self.imported |= {each.asname or each.name.split(".")[0]: each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Assign) and dotted(node.value)[:2] == ["torch", "ops"]:
                # Operators are named in schemas, `aten::_to_copy`; that is no private name of Python's.
                self.operators |= {each.id for each in node.targets if isinstance(each, ast.Name)}
            elif isinstance(node, ast.ClassDef):
                self.own |= set(_declared(node))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node)[0] == "self":
                self.own.add(node.attr)

    def private_names(self) -> Iterator[tuple[int, str]]:
        """Yield (line, name) of each private name that is not the file's own: whole from a library, else the attribute alone."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (
                    (node.lineno, each.name) for each in node.names if _of_library(each.name) and is_private(each.name)
                )
            elif isinstance(node, ast.ImportFrom) and node.module and _of_library(node.module):
                paths = (f"{node.module}.{each.name}" for each in node.names)
                yield from ((node.lineno, path) for path in paths if is_private(path))
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                yield from self._attribute(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_STRING:
                name = node.args[1]
                if (
                    isinstance(name, ast.Constant)
                    and is_private(str(name.value))
                    and name.value not in self.own | _PUBLIC
                ):
                    yield node.lineno, str(name.value)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
                yield node.lineno, node.value

    def _attribute(self, node: ast.Attribute) -> Iterator[tuple[int, str]]:
        first, *rest = dotted(node)
        whole = ".".join([self.imported.get(first, first), *rest])
        if first in self.operators or whole.startswith("torch.ops."):
            return
        if first in self.imported and _of_library(whole):
            yield node.lineno, whole
        elif node.attr not in self.own | _PUBLIC and first not in self.imported:
            yield node.lineno, node.attr


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))


def _of_library(path: str) -> bool:
    return path.split(".")[0] in LIBRARIES


@pytest.fixture(scope="module")
def files() -> dict[str, File]:
    """Every source file of the four packages, by its path."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): File(ast.parse(path.read_text())) for path in paths}


def private_outside_compat(files: dict[str, File]) -> list[str]:
    """Return `file:line: name` of each private name of a library outside of a compat.py."""
    compat = {
        name.split(".")[-1] for path, each in files.items() if _is_compat(path) for _, name in each.private_names()
    }
    project = {name for path, each in files.items() if not _is_compat(path) for name in each.own}
    return [
        f"{path}:{line}: {name}"
        for path, each in files.items()
        if not _is_compat(path)
        for line, name in each.private_names()
        if "." in name or name in compat or name not in project
    ]


def _is_compat(path: str) -> bool:
    return Path(path).name == "compat.py" and len(Path(path).parts) == 2


def test_private_names_of_libraries_are_in_compat_alone(files: dict[str, File]) -> None:
    found = private_outside_compat(files)
    assert not found, (
        "take these from a compat.py, which says what they are for and which releases have them:\n" + "\n".join(found)
    )


def test_each_private_name_is_in_one_compat(files: dict[str, File]) -> None:
    places: dict[str, set[str]] = {}
    for path, each in files.items():
        if _is_compat(path):
            for _, name in each.private_names():
                places.setdefault(name, set()).add(path)
    assert not {name: sorted(each) for name, each in places.items() if len(each) > 1}


@pytest.mark.parametrize(
    "line",
    [
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "import torch.ao.quantization.fx._decomposed",
        "import torch\ngraph = torch._C.Graph()",
        "def f(operator): return operator._schema",
        "def f(config): return getattr(config, '_attn_implementation', None)",
        "from unittest import mock\npatch = mock.patch('torch.nn.modules.transformer._detect_is_causal_mask')",
        "from transformers.modeling_utils import ALL as table\nfunctions = type(table)._global_mapping",
    ],
)
def test_a_private_name_is_seen(line: str) -> None:
    assert private_outside_compat({"quant/some.py": File(ast.parse(line))})


@pytest.mark.parametrize(
    "line",
    [
        "import torch\nvalue = torch.ops.aten._to_copy.default",
        "import torch\naten = torch.ops.aten\nvalue = aten._to_copy.default",
        "import os\nos._exit(1)",
        "class A:\n    def __init__(self): self._own = 1\ndef f(a: A): return a._own",
        "def f(point): return point._fields, point.__dict__",
        "from generic_export.compat import pytree",
    ],
)
def test_other_names_are_not(line: str) -> None:
    assert not private_outside_compat({"quant/some.py": File(ast.parse(line))})
