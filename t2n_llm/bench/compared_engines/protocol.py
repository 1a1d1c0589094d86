"""What takes part in a comparison: something that is loaded once, is fed tokens, and tells how long each turn took.

In: nothing. Out: `Contender`, `Running`, and `SharedModel`: the model that all contenders run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from generic_export.devices import CPU
from generic_export.errors import OptionError, SourceError
from t2n_llm.export.archive_lookup import LocatedArchive
from t2n_llm.export.folder import MANIFEST_NAME, read_manifest
from t2n_llm.graph.prefill import LARGEST_CHUNK, Chunks
from t2n_llm.source.hub import ModelSource, open_source
from t2n_llm.source.reference import SourceRef
from t2n_llm.weights.archive_weights import whole_records

_NAME_IT = "Pass the model that was exported: --reference FOLDER_OR_HUB_ID."

Turns = Sequence[Sequence[int]]

BATCHES: Chunks = ((0, LARGEST_CHUNK),)
"""How rivals are fed: llama.cpp computes as many at once by itself, and what others hold of a long prompt stays in bounds."""


class Running(Protocol):
    """A model that is loaded, with one cache."""

    @property
    def load_seconds(self) -> float:
        """Seconds from the first byte read until it could run; programs and libraries were there already."""
        ...

    @property
    def version(self) -> str:
        """Version of the program."""
        ...

    def time_turns(self, turns: Turns, *, fresh: bool) -> list[float]:
        """Feed token ids, turn by turn, and compute the logits after the last token of each.

        Args:
            turns: ids of one sequence; a prompt is one turn of many, or several; a decoding step is a turn of one.
            fresh: forget everything that was fed before.

        Returns:
            Seconds of each turn, taken where it is computed.

        Raises:
            EngineError: the program refused, died or took too long.
        """
        ...

    def peak_rss_bytes(self) -> int:
        """Largest resident size of its process so far, in bytes."""
        ...

    def close(self) -> None:
        """End its process."""
        ...


class Contender(Protocol):
    """Something that can be measured.

    Attributes:
        name: what it is called beside the others.
        prefill: how many tokens of a prompt it is fed at once.
    """

    name: str
    prefill: Chunks

    def check(self) -> None:
        """Refuse early, before minutes of measuring.

        Raises:
            MissingExtraError, EngineMissingError: it is not installed; the message says what to install.
            OptionError: it cannot run this model.
        """
        ...

    def prepare(self, scratch: Path) -> None:
        """Write the files that it loads, where it needs some of its own.

        Args:
            scratch: an empty folder of its own, deleted after the comparison.
        """
        ...

    def start(self, threads: int, positions: int) -> Running:
        """Load it in a process of its own.

        Args:
            threads: as many it may compute with.
            positions: tokens that its cache must hold.
        """
        ...


@dataclass(frozen=True)
class SharedModel:
    """The model of a comparison: an archive, and the checkpoint that it was exported from.

    Attributes:
        archive: of which the rivals run the weights.
        checkpoint: folder, hub id or GGUF file, where the user named it.
        timeout_seconds: for one load, or one request.
        device: what all of them compute on.
    """

    archive: LocatedArchive
    checkpoint: SourceRef | None = None
    timeout_seconds: float = 600.0
    device: str = CPU

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """What `export.json` beside the archive says; empty where there is none."""
        path = self.archive.path
        folder = path if (path / MANIFEST_NAME).is_file() else path.resolve().parent
        return read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else {}

    @cached_property
    def source(self) -> ModelSource:
        """The checkpoint.

        Raises:
            OptionError: nobody says which it is.
            SourceError: it cannot be read.
        """
        return open_source(self.checkpoint or self._recorded(), require_tokenizer=False)

    @cached_property
    def schemes(self) -> Mapping[str, str]:
        """Name of a parameter -> how the archive stores it (`f16`, `q4_0`, `q4_0x2`); empty for one that is not compressed."""
        tensors = (self.manifest.get("compression") or {}).get("tensors", ())
        return {name: tensor["scheme"] for tensor in whole_records(tensors) for name in tensor["parameters"]}

    @property
    def is_four_bit(self) -> bool:
        """Whether the archive holds matrices in four bits."""
        return "q4_0" in self.schemes.values()

    def _recorded(self) -> SourceRef:
        """Return the source that the manifest names; of a folder it has the last part of its path only."""
        origin = self.manifest.get("source", {})
        name, revision = str(origin.get("name", "")), origin.get("revision")
        if not name:
            raise OptionError(f"{self.archive.path}: no {MANIFEST_NAME} records the model that was exported.", _NAME_IT)
        if revision is None and not Path(name).exists():
            raise OptionError(
                f"{self.archive.name} was exported from a local {name}, whose path is not recorded.", _NAME_IT
            )
        return SourceRef(name, revision=revision)


def local_folder(source: ModelSource) -> Path:
    """Return the folder of a checkpoint that other programs can read by themselves.

    Raises:
        SourceError: it is a GGUF file, or quantised in a way that is decoded here only.
    """
    if source.is_quantized:
        raise SourceError(
            f"{source.name}: other engines cannot read this checkpoint.", "Pass an unquantized one with --reference."
        )
    return source.folder


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["BATCHES", "Contender", "Running", "SharedModel", "Turns", "local_folder", "processors"]
