"""No setting of malloc outlives its block."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from generic_export import allocator
from generic_export.allocator import Malloc, malloc_settings
from generic_export.write.worker_threads import WorkerThreads

_MIB = 1 << 20

# Whether malloc maps a block on its own shows in the count of such blocks (mallinfo2(3), hblks).
_PROBE = """
import ctypes
from generic_export.allocator import Malloc, malloc_settings

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def mapped(mib):
    before = libc.mallinfo2().hblks
    block = libc.malloc(mib << 20)
    found = libc.mallinfo2().hblks - before
    libc.free(block)
    return found

def seen():
    return [mapped(mib) for mib in (2, 24, 48)]

with malloc_settings({Malloc.MMAP_THRESHOLD: 1 << 20}):
    print(seen())
    with malloc_settings({Malloc.MMAP_THRESHOLD: 32 << 20}):
        print(seen())
    print(seen())
print(seen())
"""


def _probe(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), **environment},
    )
    return done.stdout.splitlines()


has_mallinfo = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33"
)


@has_mallinfo
def test_what_malloc_does_after_the_block() -> None:
    # The heap, too, is full above its top: only what is larger than the threshold is mapped on its own.
    assert _probe({}) == ["[1, 1, 1]", "[0, 0, 1]", "[1, 1, 1]", "[0, 0, 1]"]


@has_mallinfo
def test_what_the_environment_says_holds_after_the_block() -> None:
    assert _probe({"MALLOC_MMAP_THRESHOLD_": str(4 * _MIB)})[-1] == "[0, 1, 1]"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The last value that each parameter was set to."""
    last: dict[int, int] = {}

    class Library:
        def mallopt(self, parameter: int, value: int) -> int:
            last[int(parameter)] = value
            return 1

        def malloc_trim(self, _pad: object) -> int:
            return 1

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _name: Library())
    monkeypatch.setattr(allocator, "_set", {})
    for name in ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    return last


def _fail(_crew: WorkerThreads) -> None:
    raise RuntimeError("a task fails")


@pytest.mark.parametrize("task", [lambda crew: crew.check(), _fail])
def test_a_crew_leaves_malloc_and_torch_as_they_were(
    task: Callable[[WorkerThreads], None], calls: dict[int, int]
) -> None:
    threads = torch.get_num_threads()
    inside: list[dict[int, int]] = []
    try:
        WorkerThreads().run([lambda crew: inside.append(dict(calls)), task])
    except RuntimeError:
        assert task is _fail
    assert inside == [{Malloc.ARENA_MAX: 1, Malloc.MMAP_THRESHOLD: 32 * _MIB, Malloc.TRIM_THRESHOLD: 256 * _MIB}]
    assert calls == {Malloc.ARENA_MAX: 0, Malloc.MMAP_THRESHOLD: 32 * _MIB, Malloc.TRIM_THRESHOLD: 64 * _MIB}
    assert torch.get_num_threads() == threads


def test_the_environment_and_outer_blocks_come_back(calls: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    with malloc_settings({Malloc.ARENA_MAX: 2}):
        with malloc_settings({Malloc.ARENA_MAX: 1}):
            assert calls == {Malloc.ARENA_MAX: 1}
        assert calls == {Malloc.ARENA_MAX: 2}
    assert calls == {Malloc.ARENA_MAX: 4}


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _name: object())
    with malloc_settings({Malloc.ARENA_MAX: 1}):
        pass
