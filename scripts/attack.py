#!/usr/bin/env python3
"""Attack exports and readers for some minutes, at random places, and count what survived.

usage: scripts/attack.py [--minutes N] [--seed S] [--only KIND[,KIND]] [--case NUMBER] [--table FILE] [--work DIR]

Each attack takes its turn until the time (default 10 minutes) is over. Random choices come from seed, attack and number of the
case alone: `--seed S --only KIND --case NUMBER` does one case again. What survived means for each attack stands in ATTACKS.
At the end a table in Markdown: attack, cases, survived; every case that did not is named with its reproduction. Exit code 1
when there is one. Linux; everything is made in DIR (default: the temporary folder) and deleted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from attack_arena import (
    FORMS,
    Arena,
    End,
    NotSurvivedError,
    Run,
    adopt_orphans,
    refuse_bad_end,
    refuse_bad_place,
    tensors_of,
)
from attack_strangers import folders, manifests, requests, templates
from fuzz_readers import CORPORA, READERS, judge, make_importable

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)
_STEPS = 160  # steps that an export does to the disk; the longest has a few less
_READ_INPUTS = 200


# --- exports that are killed ------------------------------------------------------------------


def kill(arena: Arena, dice: random.Random) -> int:
    """SIGKILL at a random time."""
    target, form, checked, resume, earlier = _chosen(arena, dice)
    moment = dice.uniform(0, 1.1 * arena.seconds(form, checked=checked))
    run = Run(_words(arena, target, form, checked, resume, earlier), target.parent.parent / "log")
    time.sleep(moment)
    run.signal(signal.SIGKILL)
    refuse_bad_end(run.wait(), signal.SIGKILL)
    return _next_is_whole(arena, target, form, resume, earlier)


def crash_point(arena: Arena, dice: random.Random) -> int:
    """SIGKILL before a random one of the steps that it does to the disk."""
    import faults

    target, form, checked, resume, earlier = _chosen(arena, dice)
    step = dice.randrange(_STEPS)
    words = _words(arena, target, form, checked, resume, earlier)
    refuse_bad_end(Run(words, target.parent.parent / "log", lambda: faults.kill_at(step)).wait(), signal.SIGKILL)
    return _next_is_whole(arena, target, form, resume, earlier)


def _chosen(arena: Arena, dice: random.Random) -> tuple[Path, str, bool, bool, str | None]:
    target = arena.case() / "exports" / "x"
    form, checked, resume = dice.choice(FORMS), dice.random() < 0.3, dice.random() < 0.5
    earlier = arena.earlier_export(target) if dice.random() < 0.5 else None
    return target, form, checked, resume, earlier


def _words(arena: Arena, target: Path, form: str, checked: bool, resume: bool, earlier: str | None) -> list[object]:
    return arena.export_words(target, form, checked=checked, resume=resume, force=earlier is not None)


def _next_is_whole(arena: Arena, target: Path, form: str, resume: bool, earlier: str | None) -> int:
    """Hold the place against the promise, and export once more: that one is whole and leaves nothing."""
    refuse_bad_place(target, earlier, partials=True)
    words = arena.export_words(target, form, force=True, resume=resume)
    end = Run(words, target.parent.parent / "log").wait()
    if end.code or refuse_bad_place(target, earlier, partials=False) != "new" or tensors_of(target) != arena.tensors:
        raise NotSurvivedError(f"the next export: {end}")
    return 1


# --- disks that fail --------------------------------------------------------------------------


def write_fault(arena: Arena, dice: random.Random) -> int:
    """An error of the system at a random step in the folder of exports, once or from there on."""
    import faults

    target, form, checked, resume, earlier = _chosen(arena, dice)
    step, number, lasting = dice.randrange(_STEPS // 2), dice.choice(_ERRORS), dice.random() < 0.5

    def fault() -> None:
        faults.fail_at(step, number, target.parent, lasting=lasting)

    end = Run(_words(arena, target, form, checked, resume, earlier), target.parent.parent / "log", fault).wait()
    refuse_bad_end(end)
    # What cannot be removed stays, hidden; a resumable export keeps its partial when it is told to.
    place = refuse_bad_place(target, earlier, partials=True)
    if (place == "new") != (end.code == 0):
        raise NotSurvivedError(f"exit code {end.code}, and there is {place}")
    return _next_is_whole(arena, target, form, resume, earlier if place == "old" else None)


def full_disk(arena: Arena, dice: random.Random) -> int:
    """A disk that is too small by a random amount."""
    folder = arena.case()
    size = dice.randrange(64 << 10, 40 << 20)
    with small_disk(folder / "disk", size) as disk:
        if disk is None:
            return 0
        target, form = disk / "x", dice.choice(FORMS)
        end = Run(arena.export_words(target, form, checked=dice.random() < 0.2), folder / "log").wait()
        refuse_bad_end(end)
        place = refuse_bad_place(target, None, partials=False)
        if (place == "new") != (end.code == 0):
            raise NotSurvivedError(f"exit code {end.code}, and there is {place}")
    return 1


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path | None]:
    """Yield a file system of that many bytes, None where nobody may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# --- sources ----------------------------------------------------------------------------------


def changed_source(arena: Arena, dice: random.Random) -> int:
    """A file of the source replaced, written to, cut or deleted at a random time."""
    import faults

    target, form, checked, _, earlier = _chosen(arena, dice)
    model = Path(shutil.copytree(arena.model, target.parent.parent / "model"))
    words = arena.export_words(target, form, checked=checked, force=earlier is not None, model=model)
    moment = dice.uniform(0, arena.seconds(form, checked=checked))
    run = Run(words, target.parent.parent / "log")
    time.sleep(moment)
    damage = dice.choice(list(faults.DAMAGES))
    damage(model)
    end = run.wait()
    refuse_bad_end(end)
    place = refuse_bad_place(target, earlier, partials=False)
    if (place == "new") != (end.code == 0):
        raise NotSurvivedError(f"{damage.__name__}: exit code {end.code}, and there is {place}")
    # An overwrite before the first byte was read is another model, whole: that is no mixture.
    if place == "new" and tensors_of(target) != arena.tensors and tensors_of(target) != _tensors_now(arena, model):
        raise NotSurvivedError(f"{damage.__name__}: a mixture was exported")
    return 1


def _tensors_now(arena: Arena, model: Path) -> object:
    target = model.parent / "again" / "x"
    end = Run(arena.export_words(target, model=model), model.parent / "log").wait()
    return tensors_of(target) if end.code == 0 else None


def not_finite(arena: Arena, dice: random.Random) -> int:
    """NaN or infinity at a random place of a random tensor: refused by name, or allowed and recorded."""
    from safetensors.torch import load_file, save_file

    folder = arena.case()
    model, target = Path(shutil.copytree(arena.model, folder / "model")), folder / "exports" / "x"
    tensors = load_file(model / "model.safetensors")
    name = dice.choice(sorted(tensors))
    tensor = tensors[name].clone()
    tensor.view(-1)[dice.randrange(tensor.numel())] = dice.choice([float("nan"), float("inf"), float("-inf")])
    save_file(tensors | {name: tensor}, model / "model.safetensors", metadata={"format": "pt"})
    allowed = dice.random() < 0.3
    words = arena.export_words(target, dice.choice(FORMS), model=model) + ["--allow-nonfinite"] * allowed
    end = Run(words, folder / "log").wait()
    refuse_bad_end(end)
    place = refuse_bad_place(target, None, partials=False)
    if allowed and not (place == "new" and name in json.loads((target / "export.json").read_text())["nonfinite"]):
        raise NotSurvivedError(f"{name} is not recorded: {end}")
    if not allowed and not (end.code == 2 and name in end.said and place == "none"):
        raise NotSurvivedError(f"{name} was not refused: {end}")
    return 1


def contradicting_ties(arena: Arena, dice: random.Random) -> int:
    """A config that ties two tensors and a checkpoint where they differ: exported as transformers loads it, and told."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = arena.case()
    model, target = Path(shutil.copytree(arena.model, folder / "model")), folder / "exports" / "x"
    tensors = load_file(model / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    rows = dice.randrange(1, len(head))
    head[:rows] = torch.roll(head[:rows], 1, dims=1)
    save_file(tensors | {"lm_head.weight": head}, model / "model.safetensors", metadata={"format": "pt"})
    end = Run(arena.export_words(target, dice.choice(FORMS), model=model), folder / "log").wait()
    refuse_bad_end(end)
    if end.code or "lm_head.weight" not in tensors_of(target) or "ties" not in end.said:
        raise NotSurvivedError(f"{rows} rows differ: {end}")
    return 1


# --- bad files --------------------------------------------------------------------------------


def readers(arena: Arena, dice: random.Random) -> int:
    """Damaged inputs of a random reader: it returns, or raises an error of ours, within seconds."""
    reader = READERS[dice.choice(list(READERS))]
    seeds = [path.read_bytes() for path in sorted((CORPORA / reader.name).iterdir())]
    folder = arena.case()
    for _ in range(_READ_INPUTS):
        data = _damaged(dice.choice(seeds), dice)
        finding = judge(reader, data, folder)
        if finding is not None:
            raise NotSurvivedError(f"{reader.name}: {finding}: {data[:200]!r}")
    return _READ_INPUTS


def _damaged(data: bytes, dice: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        start = dice.randrange(len(made) + 1)
        stop = min(len(made), start + dice.choice((1, 2, 4, 8, 64)))
        change = dice.randrange(5)
        if change == 0 and start < len(made):
            made[start] ^= 1 << dice.randrange(8)
        elif change == 1:
            made[start:stop] = dice.randbytes(stop - start)
        elif change == 2:
            del made[start:stop]
        elif change == 3:
            made[start:start] = made[start:stop]
        else:
            made[start:stop] = dice.choice((b"\xff" * 8, bytes(8), b"9" * 40, b"[" * 2000, b'"', b"-1", b"1e999"))
    return bytes(made)


def bad_files(arena: Arena, dice: random.Random) -> int:
    """A damaged file of a model, a recipe or an export, given to a command: 0, 1 or 2 and one line."""
    folder = arena.case()
    target = folder / "exports" / "x"
    kind = dice.choice(("config.json", "generation_config.json", "model.safetensors", "recipe", "manifest", "archive"))
    if kind in ("manifest", "archive"):
        export = Path(shutil.copytree(arena.reference(dice.choice(FORMS)), folder / "made"))
        file = export / "export.json"
        if kind == "archive":
            name = json.loads(file.read_text())["archive"]
            file = export / name / "graph.nnef" if (export / name).is_dir() else export / name
        words: list[object] = [dice.choice(("verify", "inspect", "validate")), export]
        words += [arena.model] * (words[0] == "validate")
    else:
        model = Path(shutil.copytree(arena.model, folder / "model"))
        file = model / kind if kind != "recipe" else folder / "recipe.yaml"
        words = arena.export_words(target, dice.choice(FORMS), model=model)
        if kind == "recipe":
            file.write_bytes((CORPORA / "recipe" / "rules").read_bytes())
            words += ["--recipe", file]
    data = file.read_bytes()
    head = _damaged(data[:4096], dice)
    file.write_bytes(head + data[4096:])
    end = Run(words, folder / "log").wait()
    refuse_bad_end(end)
    refuse_bad_place(target, None, partials=False)
    return 1


# --- engines and keys -------------------------------------------------------------------------


def dead_engine(arena: Arena, dice: random.Random) -> int:
    """The engine's process killed at a random time of the check."""
    target = arena.case() / "exports" / "x"
    wait = dice.uniform(0, arena.seconds("tar", checked=True))
    run = Run(arena.export_words(target, dice.choice(FORMS), checked=True), target.parent.parent / "log")
    moment = time.monotonic() + wait
    number = dice.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT))
    while not run.ended():
        engine = run.engine()
        if engine is not None and time.monotonic() > moment:
            engine.send_signal(number)
            break
        time.sleep(0.005)
    end = run.wait()
    refuse_bad_end(end)
    place = refuse_bad_place(target, None, partials=False) if not _kept_beside(target) else "kept"
    if (place == "new") != (end.code == 0):
        raise NotSurvivedError(f"exit code {end.code}, and there is {place}")
    return 1


def _kept_beside(target: Path) -> bool:
    """Whether an export that did not agree lies beside the name, under the name that the message says."""
    return not target.exists() and any(not name.startswith(".") for name in os.listdir(target.parent))


def ctrl_c(arena: Arena, dice: random.Random) -> int:
    """Ctrl-C or SIGTERM at a random time, once or twice."""
    target, form, checked, resume, earlier = _chosen(arena, dice)
    moment = dice.uniform(0, arena.seconds(form, checked=checked))
    run = Run(_words(arena, target, form, checked, resume, earlier), target.parent.parent / "log")
    time.sleep(moment)
    number, twice = dice.choice((signal.SIGINT, signal.SIGTERM)), dice.random() < 0.3
    run.signal(number, group=True)
    if twice:
        time.sleep(dice.uniform(0, 1))
        run.signal(number, group=True)
    end = run.wait()
    # SIGTERM before the command hears it, and a second press, end it at once.
    refuse_bad_end(_without_late_press(end), number)
    place = refuse_bad_place(target, earlier, partials=resume or end.code < 0)
    if end.code == 2 and place == "new":
        raise NotSurvivedError(f"interrupted, and there is an export: {end}")
    return _next_is_whole(arena, target, form, resume, earlier)


def _without_late_press(end: End) -> End:
    return End(2, "error: interrupted") if end.code == 2 and not end.said.strip() else end


# --- the whole --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """One kind of attack: does one case, returns how many inputs survived (0: it cannot be made here)."""

    make: Callable[[Arena, random.Random], int]
    survived: str
    weight: int = 1


_PLACE = "nothing or a whole export under the name, hidden partials beside it at most; the next export is whole and leaves nothing"
_ENDS = "exit code 0, 1 or 2, one line of error, nothing left behind"
ATTACKS = {
    "kill": Attack(kill, _PLACE, 3),
    "crash-point": Attack(crash_point, _PLACE, 3),
    "write-fault": Attack(write_fault, f"{_ENDS} but what could not be removed; the next export is whole", 2),
    "full-disk": Attack(full_disk, f"{_ENDS}; an export only with exit code 0"),
    "changed-source": Attack(changed_source, f"{_ENDS}; never two halves", 2),
    "not-finite": Attack(not_finite, "refused by the tensor's name, or allowed and recorded"),
    "contradicting-ties": Attack(contradicting_ties, "exported as transformers loads it, with a warning"),
    "readers": Attack(readers, "the reader returns or raises an error of ours, within 5 s", 2),
    "bad-files": Attack(bad_files, _ENDS, 2),
    "dead-engine": Attack(dead_engine, f"{_ENDS}, no process left", 2),
    "ctrl-c": Attack(ctrl_c, f"{_ENDS} (partials with --resume, or where it is pressed twice), no process left", 2),
    "templates": Attack(templates, "a text, or an error of one line that names the template, within a minute", 2),
    "requests": Attack(requests, "an answer, 400, 401 or 404, never 500; Ctrl-C ends it with exit code 0"),
    "folders": Attack(
        folders, "`verify` names what is a link or extra; exit code 1 for links, and for files in an archive"
    ),
    "manifests": Attack(manifests, "exit code 0, 1 or 2, one line of error", 2),
}


@dataclass
class Count:
    """What became of one kind of attack."""

    cases: int = 0
    survived: int = 0
    failures: list[str] = field(default_factory=list)


def attack(arena: Arena, kinds: Sequence[str], seed: int, minutes: float, case: int | None) -> dict[str, Count]:
    """Make attacks in turns until the time is over, or the one case."""
    counts = {kind: Count() for kind in kinds}
    turns = [kind for kind in kinds for _ in range(ATTACKS[kind].weight)]
    end = time.monotonic() + 60 * minutes
    numbers = dict.fromkeys(kinds, case or 0)
    while True:
        for kind in turns:
            if case is None and time.monotonic() > end:
                return counts
            _one(arena, kind, seed, numbers[kind], counts[kind])
            numbers[kind] += 1
            if case is not None:
                return counts


def _one(arena: Arena, kind: str, seed: int, number: int, count: Count) -> None:
    try:
        inputs = ATTACKS[kind].make(arena, random.Random(f"{seed}/{kind}/{number}"))
        count.cases += inputs
        count.survived += inputs
    except Exception as error:  # an error of this script is a failure that somebody has to look at
        count.cases += 1
        reason = str(error) if isinstance(error, NotSurvivedError) else repr(error)
        count.failures.append(f"--seed {seed} --only {kind} --case {number}: {reason}")
        print(f"not survived: {count.failures[-1]}", file=sys.stderr, flush=True)


def table(counts: dict[str, Count]) -> str:
    """Return the table in Markdown."""
    rows = [
        f"| {kind} | {ATTACKS[kind].make.__doc__} | {ATTACKS[kind].survived} | {count.cases:,} | {count.survived:,} |"
        for kind, count in counts.items()
    ]
    head = ["| attack | what | survived means | cases | survived |", "|---|---|---|---|---|"]
    return "\n".join(head + rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(ATTACKS), metavar="KIND[,KIND]", help="of: %(default)s")
    parser.add_argument("--case", type=int)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    unknown = [kind for kind in kinds if kind not in ATTACKS]
    if unknown:
        parser.error(f"no attack {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    make_importable()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="t2n-attack-", dir=options.work) as work:
        counts = attack(Arena(Path(work)), kinds, options.seed, options.minutes, options.case)
    print(table(counts), flush=True)
    if options.table is not None:
        options.table.write_text(table(counts) + "\n", encoding="utf-8")
    return int(any(count.failures for count in counts.values()))


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())
