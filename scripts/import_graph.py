"""Who imports whom in the four packages: modules per folder, floors, arrows, circles, lines.

    python scripts/import_graph.py             the figures
    python scripts/import_graph.py --arrows    and every arrow between rooms, with the modules that make it

An import anywhere in a file counts: at the top, inside a function, for typing only, or as a text that names a module
(`import_module`, tables of what is imported when first used). A folder's `__init__` counts where it is named; that Python runs
it on the way to a module below it is no arrow, and an error only where it closes a circle (`entangled`).
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("generic_export", "quant", "kvcache", "t2n_llm")

Arrow = tuple[str, str]
"""The importing module, the imported one."""


@dataclass(frozen=True)
class ImportGraph:
    """The modules of some packages and what each imports of them.

    Attributes:
        files: dotted name -> file, `a.b` for `a/b/__init__.py`.
        imports: dotted name -> the dotted names it imports, none outside `files`.
        at_start: those of them that it imports while it is imported itself.
    """

    files: Mapping[str, Path]
    imports: Mapping[str, frozenset[str]]
    at_start: Mapping[str, frozenset[str]]

    @cached_property
    def arrows(self) -> tuple[Arrow, ...]:
        """Every import, in the order of names."""
        return tuple((one, other) for one in sorted(self.imports) for other in sorted(self.imports[one]))

    @cached_property
    def circles(self) -> tuple[tuple[str, ...], ...]:
        """Groups of modules of which each reaches every other, and modules that import themselves."""
        found = (tuple(sorted(group)) for group in strong_components(self.imports))
        return tuple(sorted(group for group in found if len(group) > 1 or group[0] in self.imports[group[0]]))

    @cached_property
    def entangled(self) -> tuple[Arrow, ...]:
        """Arrows into a folder from a module outside that the folder's `__init__` needs: it cannot be imported first."""
        started = {name: self._started_by(name) for name, file in self.files.items() if file.name == "__init__.py"}
        return tuple(
            (one, other)
            for one in sorted(self.at_start)
            for other in sorted(self.at_start[one])
            for folder in parents(other)
            if one in started.get(folder, ()) and not in_package(one, folder) and not in_package(folder, one)
        )

    def _started_by(self, folder: str) -> set[str]:
        """Return what is imported when a folder is, `__init__`s on the way included, but not those it stands in."""
        found = set(parents(folder))
        waiting = [folder]
        while waiting:
            for other in self.at_start[waiting.pop()]:
                new = {name for name in parents(other) if name in self.files} - found
                found |= new
                waiting += new
        return found

    def floors(self, package: str) -> int:
        """Return how many modules of one package the longest way through its imports passes, a circle counting once."""
        inside = {name: {other for other in more if in_package(other, package)} for name, more in self.imports.items()}
        height: dict[str, int] = {}
        for group in strong_components({name: inside[name] for name in self.files if in_package(name, package)}):
            below = (height[other] for name in group for other in inside[name] if other not in group)
            height.update(dict.fromkeys(group, 1 + max(below, default=0)))
        return max(height.values(), default=0)


def import_graph(packages: Iterable[str] = PACKAGES, root: Path = ROOT) -> ImportGraph:
    """Return what the modules of some packages import of each other, read from their files without running them."""
    files = {dotted(file, root): file for package in packages for file in sorted((root / package).rglob("*.py"))}
    trees = {name: ast.parse(file.read_text()) for name, file in files.items()}
    imports, at_start = (
        {name: frozenset(imported(name, file, files, nodes(trees[name]))) for name, file in files.items()}
        for nodes in (ast.walk, executed)
    )
    return ImportGraph(files, imports, at_start)


def dotted(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def parents(module: str) -> list[str]:
    """Return a module and the packages that it is in."""
    parts = module.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported: no function's body, nothing for typing only."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue
        typing_only = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not (typing_only or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield node
            yield from executed(node)


def imported(module: str, file: Path, known: Mapping[str, Path], nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the known modules that some nodes of a file import: `from a import b` is `a.b` where that is a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            source = imported_from(node, module, file)
            for alias in node.names:
                below = f"{source}.{alias.name}"
                if below in known:
                    yield below
                elif source in known:
                    yield source
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from named(node.value, known)


def named(text: str, known: Mapping[str, Path]) -> list[str]:
    """Return the module that a text names, as `a.b`, `a.b:name` or `a.b.name`; a word without a dot is no module."""
    module = text.partition(":")[0]
    return [name for name in (module, module.rpartition(".")[0]) if "." in name and name in known][:1]


def imported_from(node: ast.ImportFrom, module: str, file: Path) -> str:
    """Return the dotted name that stands after `from`, its leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def strong_components(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return Tarjan's strongly connected components, what is imported before what imports it."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        open_.append(name)
        for other in imports[name]:
            if other not in imports:
                continue
            if other not in index:
                visit(other)
            if other in open_:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            found.append([])
            while not found[-1] or found[-1][-1] != name:
                found[-1].append(open_.pop())

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def room(module: str, file: Path) -> str:
    """Return the folder of a module: `t2n_llm/check`, or `t2n_llm` for a file beside the folders."""
    parts = module.split(".")
    return "/".join(parts if file.name == "__init__.py" else parts[:-1])


def lines(package: str, root: Path = ROOT) -> int:
    return sum(len(file.read_text().splitlines()) for file in (root / package).rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arrows", action="store_true", help="every arrow between rooms, with the modules that make it"
    )
    options = parser.parse_args()
    graph = import_graph()
    between: dict[Arrow, list[Arrow]] = defaultdict(list)
    rooms = {name: room(name, file) for name, file in graph.files.items()}
    for one, other in graph.arrows:
        if rooms[one] != rooms[other]:
            between[rooms[one], rooms[other]].append((one, other))

    for package in PACKAGES:
        inside = [arrow for arrow in graph.arrows if all(in_package(name, package) for name in arrow)]
        folders = Counter(rooms[name] for name in graph.files if in_package(name, package))
        of_rooms = sum(all(name.split("/")[0] == package for name in arrow) for arrow in between)
        print(f"{package}: {sum(folders.values())} modules, {lines(package):,} lines, {graph.floors(package)} floors,")
        print(f"  {len(inside)} arrows between modules, {of_rooms} between {len(folders)} folders")
        for folder, modules in sorted(folders.items()):
            print(f"  {modules:4} {folder}")
    print(f"scripts: {lines('scripts'):,} lines")
    for what, found in (("circles", graph.circles), ("entangled", graph.entangled)):
        print(f"{what}: {len(found)}")
        for names in found:
            print("  " + ", ".join(names))
    if options.arrows:
        for (above, below), made in sorted(between.items()):
            print(f"{above} -> {below}: {len(made)}")
            for one, other in made:
                print(f"  {one} -> {other}")


if __name__ == "__main__":
    main()
