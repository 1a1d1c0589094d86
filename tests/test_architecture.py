"""The house rules that a reader should be able to rely on: which room may import which, no circle, one name for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.load_script import load_script

graphs = load_script("import_graph")

# package -> what it may not import
FORBIDDEN = {
    "generic_export": {"quant", "kvcache", "t2n_llm", "transformers", "typer", "rich", "accelerate", "huggingface_hub"},
    "quant": {"kvcache", "t2n_llm", "transformers", "typer", "rich"},
    "kvcache": {"quant", "t2n_llm", "typer", "rich"},
}

# package -> its rooms, top floor first: an arrow between two rooms may only point down, to a lower line. A room is a folder or a
# module (`.` is the package's own `__init__`); a module belongs to the longest name that fits it.
ORDER = {
    "generic_export": """
        .
        debug/reproduction/piece_script
        diagnose
        diagnose/piece_by_piece
        debug/piece_by_piece
        debug
        debug/report debug/reproduction
        debug/attempt
        debug/record
        debug/diagnosis
        debug/records
        detection
        remodel
        export
        export_attempts
        checked_archive
        assertions opened_archive
        debug/coverage
        inference_target
        inference_target/tract
        debug/archive
        debug/privacy debug/reproduction/archive_script
        capture compare/other_sizes documents module_forms half_weights tested_versions
        inference_target/tract/engine_target
        inference_target/tract/engines
        inference_target/tract/releases
        inference_target/base
        inference_target/example inference_target/version
        ops
        translate
        translate/fragments
        torchscript
        torchscript/harden
        torchscript/module
        torchscript/interpreter
        torchscript/scalars
        torchscript/schema
        torch_graph read
        write
        nnef
        weights
        pages
        child_pipes
        allocator garbage_collection devices journal files interrupts logs processes sizes
        compare
        compat earlier_paths errors
    """,
    "quant": """
        .
        awq recipe tensor
        gptq factors budget
        algorithms
        imatrix
        prequantized
        stream weighted_search
        column_kernel
        block_kernel
        lanes packing protocol symmetric
        blocks compiled
    """,
    "kvcache": """
        .
        operators states/state_adapters
        forms attention/operator experts/engine
        states experts/families
        attention recurrent states/windows
        attention/compressed experts
        attention/blocks attention/global_tokens rotary
        states/state_views states/tensors
        compat
    """,
    "t2n_llm": """
        .
        cli
        zoo
        debug runtime/serve exporters
        inspect
        bench
        inspect/inspection runtime/chat
        diffusion runtime share
        export
        tasks
        check
        graph
        compress
        model_graph
        weights
        source
        runtime/chat/template
        runtime/chat/template_process
        runtime/chat/template_worker
        reporter runtime/sampling
        compat option
    """,
}

# module -> why it imports what no text in it names; a text that names a module of ours is an arrow like any other
NAMED_ELSEWHERE = {
    "generic_export": "its table, texts above",
    "generic_export.earlier_paths": "what a package's `__init__` gives it, texts there",
    "t2n_llm.exporters.untrusted": "classes of transformers that treespecs name, none of ours",
    "generic_export.ops": "its own modules, each of which registers its translations",
    "kvcache.compat": "modules of transformers",
    "quant.algorithms": "a module of the user's own",
    "t2n_llm.diffusion.pipeline": "diffusers or transformers, as its table has them",
    "t2n_llm.source.factory": "a module of the user's own",
    "t2n_llm.tasks.registry": "its table, texts above",
    "t2n_llm.zoo.host": "what who starts it says, a text there",
}


@cache
def graph() -> Any:
    return graphs.import_graph()


def floors_of(package: str) -> dict[str, int]:
    """Return the line that each room of a package stands in."""
    lines = ORDER[package].strip().splitlines()
    return {room: number for number, line in enumerate(lines) for room in line.split()}


def room_of(module: str, rooms: Iterable[str]) -> str | None:
    """Return the longest name of a room that fits a module; None for a module without one."""
    inside = "/".join(module.split(".")[1:]) or "."
    return max((room for room in rooms if f"{inside}/".startswith(f"{room}/")), key=len, default=None)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_one_way(package: str) -> None:
    files = sorted((graphs.ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        wrong = imported_packages(file) & FORBIDDEN[package]
        assert not wrong, f"{file.relative_to(graphs.ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", ORDER)
def test_every_module_has_a_room_and_every_room_a_module(package: str) -> None:
    floors = floors_of(package)
    rooms = {module: room_of(module, floors) for module in graph().files if graphs.in_package(module, package)}
    assert [module for module, room in rooms.items() if room is None] == []
    assert set(floors) - set(rooms.values()) == set()


@pytest.mark.parametrize("package", ORDER)
def test_arrows_point_down(package: str) -> None:
    floors = floors_of(package)
    upwards = []
    for arrow in graph().arrows:
        start, end = (room_of(module, floors) if graphs.in_package(module, package) else None for module in arrow)
        if start and end and start != end and floors[start] >= floors[end]:
            upwards.append(f"{' -> '.join(arrow)}: {end} is not below {start}")
    assert upwards == []


def test_there_is_no_circle() -> None:
    assert graph().circles == ()


def test_any_module_can_be_imported_first() -> None:
    assert graph().entangled == ()


def test_no_import_hides_its_arrow() -> None:
    found = set()
    for module, file in graph().files.items():
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"\b(import_module|__import__)\(", text) else ():
            if isinstance(node, ast.Call) and not (node.args and isinstance(node.args[0], ast.Constant)):
                called = ast.unparse(node.func).rpartition(".")[2]
                found |= {module} if called in ("import_module", "__import__") else set()
    assert found == set(NAMED_ELSEWHERE)


def test_a_text_that_names_a_module_is_an_arrow(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "one.py": "HOMES = {'x': 'house.two'}",
        "two.py": "def later():\n    import_module('house.room.three:name')",
        "room/__init__.py": "from house.one import HOMES",
        "room/three.py": "from house import one",
        "four.py": "import house.room.five",
        "room/five.py": "'house'",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    made = graphs.import_graph(["house"], tmp_path)
    assert made.circles == (("house.one", "house.room.three", "house.two"),)
    assert ("house.room.five", "house") not in made.arrows and made.entangled == ()
    (package / "one.py").write_text("from house.room import five")
    assert graphs.import_graph(["house"], tmp_path).entangled == (("house.one", "house.room.five"),)


def test_public_classes_have_names_of_their_own() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module, file in graph().files.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_the_nnef_document_knows_nothing_of_torch_fx_or_aten() -> None:
    for name in ("graph.py", "order.py", "text.py"):
        assert "torch" not in imported_packages(graphs.ROOT / "generic_export" / "nnef" / name)


def imported_packages(file: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found
