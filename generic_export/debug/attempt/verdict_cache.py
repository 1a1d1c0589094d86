"""Verdicts kept between runs: what passed, and has not changed since, is not tried again.

In: a folder. Out: `verdicts.jsonl` in it, a line per verdict, written as each is reached; a torn last line is skipped.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from generic_export.debug.record.pieces import Case, class_sources
from generic_export.debug.records import Outcome, Verdict, built, plain
from generic_export.documents import producer_version, torch_version
from generic_export.errors import ArchiveError
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.journal import append_item, read_items

FILE = "verdicts.jsonl"


class VerdictCache:
    """The verdicts of earlier runs, and of this one.

    Args:
        folder: where the file is; None keeps nothing.
        resume: read what is there; False starts a new file.

    Raises:
        ArchiveError: the folder cannot be written.
    """

    def __init__(self, folder: Path | None, *, resume: bool) -> None:
        self._path = None if folder is None else folder / FILE
        self._known: dict[str, Verdict] = {}
        if folder is None or self._path is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume:
                self._read(self._path)
            else:
                self._path.write_bytes(b"")
        except OSError as error:
            raise ArchiveError(f"{folder} cannot be written: {error.strerror or error}.") from error

    def passed(self, fingerprint: str) -> Verdict | None:
        """Return the verdict of an earlier run when it was a good one."""
        verdict = self._known.get(fingerprint)
        return replace(verdict, cached=True) if verdict is not None and verdict.outcome is Outcome.OK else None

    def add(self, fingerprint: str, verdict: Verdict) -> None:
        """Keep a verdict."""
        self._known[fingerprint] = verdict
        if self._path is not None:
            with self._path.open("ab") as file:
                append_item(file.fileno(), {"fingerprint": fingerprint, "verdict": plain(verdict)})

    def _read(self, path: Path) -> None:
        """Take over what an earlier run wrote, up to the first line that is none of this version's."""
        length = 0
        try:
            for entry, end in zip(*read_items(path), strict=True):
                self._known[str(entry["fingerprint"])] = built(Verdict, entry["verdict"])
                length = end
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        with path.open("ab") as file:
            file.truncate(length)


def fingerprint(case: Case, target: TractNNEF, *further: object, isolated: bool) -> str:
    """Return text that changes when a verdict may: the piece, its code, weights, sizes, the target, the versions."""
    sizes = [[leaf.sizes for leaf in recorded.call.inputs] for recorded in case.calls]
    parts = (
        case.piece.key,
        case.piece.path,
        class_sources(case.module),
        _weights_mark(case.module),
        sizes,
        target,
        torch_version(),
        producer_version(),
        isolated,
        *further,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _weights_mark(module: nn.Module) -> str:
    """Return a hash of a few numbers of each parameter: another one for other weights."""
    digest = hashlib.sha256()
    for _, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 64)][:64]
            digest.update(sample.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()[:12]


__all__ = ["FILE", "VerdictCache", "fingerprint"]
