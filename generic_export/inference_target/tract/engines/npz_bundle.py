"""The npz bundles of the `tract` command: inputs by turn and expected outputs, written as it reads them.

In: arrays by name. Out: one `.npz`, whole or not at all; and the turns of a bundle that is there, or why it is no good.
Facts found by running tract 0.23.9; `TractCli.check_bundle` tells what the command does with a bundle.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from generic_export.errors import OptionError, T2NError, described
from generic_export.inference_target.tract.engines.engine import Array

_NPZ_KINDS = "fiub"  # what tract reads from an npz, float16 excepted
_TURN_ENTRY = re.compile(r"turn_(\d+)/(\S+)")


def write_bundle(
    path: Path,
    turns: Sequence[Mapping[str, Array]],
    expected: Mapping[str, Array],
    *,
    caches: Mapping[str, str] | None = None,
) -> None:
    """Write an npz bundle in the one form that tract reads as meant (see `TractCli.check_bundle`).

    Args:
        path: the `.npz` to write; replaced only when whole.
        turns: the inputs of each turn, by input name. The first turn also holds the (empty or filled) caches;
            later turns get theirs from tract.
        expected: outputs of the last turn, by output name. float16 is stored as float32, exactly.
        caches: cache input name -> its output name in `expected`; makes the caches comparable when unfolded,
            by storing them under `<cache input>_concat` as well.
    Raises:
        OptionError: no turn, a name used twice, or a dtype that tract does not read from npz.
    """
    entries: dict[str, Array] = {}
    prefixed = len(turns) > 1
    # All turns of one name side by side: tract drops every turn that is not next to the one before.
    for name in dict.fromkeys(name for turn in turns for name in turn):
        for index, turn in enumerate(turns):
            if name in turn:
                entries[f"turn_{index}/{name}" if prefixed else name] = turn[name]
    unfolded = {f"{key}_concat": expected[output] for key, output in (caches or {}).items() if output in expected}
    outputs = {**expected, **unfolded}
    clash = {name for turn in turns for name in turn} & set(outputs)
    if not turns or clash:
        raise OptionError(f"{path}: {f'{sorted(clash)} are both inputs and outputs' if clash else 'no turn'}.")
    _write_npz(Path(path), {**entries, **outputs})


def _write_npz(path: Path, entries: Mapping[str, Array]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with ZipFile(partial, "w") as archive:
            for name, array in entries.items():
                dtype = np.dtype(np.float32) if array.dtype == np.float16 else array.dtype.newbyteorder("=")
                stored = np.asarray(array, dtype=dtype, order="C")
                if stored.dtype.kind not in _NPZ_KINDS:
                    raise OptionError(f"{path}: {name} has dtype {stored.dtype}, which tract does not read from npz.")
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, stored, allow_pickle=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_turns(bundle: Path) -> dict[str, int]:
    """Count the turns of every name of a bundle, refusing what tract would misread in silence."""
    turns: Counter[str] = Counter()
    previous = ""
    try:
        with ZipFile(bundle) as archive:
            for entry in archive.namelist():
                label = entry.removesuffix(".npy")
                match = _TURN_ENTRY.fullmatch(label)
                name = match[2] if match else label
                if turns[name] and name != previous:
                    problem = f"{bundle}: the turns of {name} are not adjacent; tract keeps only the first."
                    raise OptionError(problem, "Write the bundle with write_bundle.")
                turns[name] += 1
                previous = name
                _check_entry(bundle, archive, entry)
    except T2NError:
        raise
    except Exception as error:  # of a damaged one zipfile, zlib and NumPy's reading of a header raise what they like
        raise OptionError(f"{bundle}: not a readable npz file ({described(error)}).", "Write it again.") from error
    return dict(turns)


def _check_entry(bundle: Path, archive: ZipFile, entry: str) -> None:
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        dtype = read(stream)[2]
    if dtype == np.float16 or dtype.kind not in _NPZ_KINDS:
        raise OptionError(
            f"{bundle}: {entry} is {dtype}, which tract does not read from npz.",
            "Store float16 as float32 and pass allow_float_casts=True.",
        )
