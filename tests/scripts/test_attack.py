"""scripts/attack.py, fuzz.py and soak.py: one case of attacks from its seed, the tables, what counts as growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load_script import load_script

attack = load_script("attack")
arena = load_script("attack_arena")
fuzz = load_script("fuzz")
fuzz_readers = load_script("fuzz_readers")
soak = load_script("soak")


@pytest.mark.nightly
def test_one_case_of_readers_and_its_table(tmp_path: Path) -> None:
    class Folders:
        """As an arena without a model."""

        def case(self) -> Path:
            (tmp_path / "case").mkdir(exist_ok=True)
            return tmp_path / "case"

    counts = attack.attack(Folders(), ["readers"], 3, 0.0, 1)
    assert not counts["readers"].failures
    (row,) = [line for line in attack.table(counts).splitlines() if line.startswith("| readers")]
    assert row.endswith("| 200 | 200 |")


def test_what_is_not_survived() -> None:
    good = arena.End(2, "  1.0 s  Reading\nerror: no\n hint: do\n")
    arena.refuse_bad_end(good)
    arena.refuse_bad_end(arena.End(-9, ""), 9)
    for end in (
        arena.End(3, good.said),
        arena.End(-9, ""),
        arena.End(2, ""),
        arena.End(2, "error: one\nerror: two\n"),
        arena.End(2, "error: one\nand more\n"),
        arena.End(0, "Exception ignored in: x"),
    ):
        with pytest.raises(arena.NotSurvivedError):
            arena.refuse_bad_end(end)


def test_what_may_lie_there(tmp_path: Path) -> None:
    target = tmp_path / "x"
    assert arena.refuse_bad_place(target, None, partials=False) == "none"
    with pytest.raises(arena.NotSurvivedError, match="lost"):
        arena.refuse_bad_place(target, "mark", partials=True)
    (tmp_path / ".x.partial-1").mkdir()
    assert arena.refuse_bad_place(target, None, partials=True) == "none"
    with pytest.raises(arena.NotSurvivedError, match="left behind"):
        arena.refuse_bad_place(target, None, partials=False)


def test_a_process_that_is_left_is_found(tmp_path: Path) -> None:
    """The command line itself, in a fork: a refused option, and what it said."""
    end = arena.Run(["verify", tmp_path / "nothing"], tmp_path / "log").wait()
    assert end.code == 2 and "error:" in end.said
    arena.refuse_bad_end(end)


def test_findings_are_kept_once_a_place(tmp_path: Path) -> None:
    reader = fuzz_readers.READERS["dat"]
    finding = fuzz_readers.Finding("KeyError", "dat.py:5", "x")
    assert fuzz.save_finding(reader, finding, b"a", tmp_path)
    assert not fuzz.save_finding(reader, finding, b"b", tmp_path)
    assert (tmp_path / "dat-KeyError-dat.py-5.bin").read_bytes() == b"a"
    outcome = fuzz.replay(reader, tmp_path, tmp_path)
    assert outcome.inputs >= 3 and outcome.findings == ()


def test_checksums_are_made_good() -> None:
    tar = (fuzz_readers.CORPORA / "tar" / "ustar").read_bytes()
    assert fuzz_readers.whole_tar(tar) == tar
    damaged = bytes([tar[0] ^ 1]) + tar[1:]
    assert fuzz_readers.whole_tar(damaged)[148:156] != damaged[148:156]


def test_growth_is_of_the_last_quarter() -> None:
    def record(resident: int, descriptors: int) -> dict[str, object]:
        usage = {"resident": resident, "descriptors": descriptors, "processes": 2}
        return {"serve": usage, "generate": usage}

    steady = [record(5 << 30, 90)] * 10 + [record(1 << 30, 12)] * 20
    assert not soak.growth(steady)[1]
    assert soak.growth(steady[:-5] + [record(1 << 30, 13)] * 5)[1]
    assert not soak.growth(steady[:-5] + [record((1 << 30) + (64 << 20), 12)] * 5)[1]  # 6 %
    assert soak.growth(steady[:-5] + [record(2 << 30, 12)] * 5)[1]
