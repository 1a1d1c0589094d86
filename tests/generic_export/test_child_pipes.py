"""Messages to a child process: whole in both directions, and never waited for longer than was asked."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from generic_export.child_pipes import ChildPipes, OverdueError
from generic_export.errors import EngineError
from generic_export.processes import Child

LARGE = 3 << 20  # more than a pipe holds


@contextmanager
def started(code: str) -> Iterator[tuple[Child, ChildPipes]]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    child = Child(process, None, process.stdin, process.stdout)
    yield child, ChildPipes(child, process.stdin, process.stdout)
    child.close()


def test_messages_larger_than_a_pipe_are_whole() -> None:
    code = f"import sys; data = sys.stdin.buffer.read({LARGE}); sys.stdout.buffer.write(data[::-1])"
    data, reply = bytes(range(256)) * (LARGE // 256), bytearray(LARGE)
    with started(code) as (_, pipes), pipes.within(60):
        pipes.write(memoryview(data))
        pipes.fill(memoryview(reply))
    assert reply == data[::-1]


def test_lines_are_told_apart() -> None:
    with started("print('one\\ntwo', end=''); print(' and more')") as (_, pipes), pipes.within(60):
        assert [pipes.read_line().rstrip(b"\r"), pipes.read_line().rstrip(b"\r")] == [b"one", b"two and more"]
        with pytest.raises(EOFError):
            pipes.read_line()


@pytest.mark.parametrize("deaf", [False, True], ids=["it says nothing", "it does not read"])
def test_one_that_takes_too_long_is_killed(deaf: bool) -> None:
    with started("import time; print('up'); time.sleep(600)") as (child, pipes):
        with pipes.within(60):
            assert pipes.read_line().rstrip(b"\r") == b"up"
        begin = time.monotonic()
        with pytest.raises(OverdueError), pipes.within(0.3):
            if deaf:
                pipes.write(memoryview(bytes(LARGE)))
            pipes.fill(memoryview(bytearray(1)))
        assert time.monotonic() - begin < 30
        while not child.has_ended():
            assert time.monotonic() - begin < 30


def test_one_that_is_gone_is_no_timeout() -> None:
    with started("pass") as (child, pipes), pipes.within(60):
        with pytest.raises(EOFError):
            pipes.fill(memoryview(bytearray(1)))
        while not child.has_ended():
            time.sleep(0.01)
        with pytest.raises(EOFError):
            pipes.write(memoryview(bytes(LARGE)))


def test_a_block_that_ends_in_time_leaves_the_child_alone() -> None:
    with started("import sys; [print(line, end='') for line in sys.stdin]") as (child, pipes):
        for number in range(3):
            with pipes.within(0.5):
                pipes.write(memoryview(b"%d\n" % number))
                assert pipes.read_line().strip() == b"%d" % number
            time.sleep(0.7 if number == 1 else 0)
        assert not child.has_ended()


def test_pipes_are_required() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    with pytest.raises(EngineError, match="the child process has no pipe"):
        ChildPipes(Child(process, None), None, None)
    process.wait()
