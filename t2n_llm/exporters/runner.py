"""`TractModelRunner`: runs an exported program in tract, in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.exporters import ExportMetadata
from transformers.exporters.runners import ModelRunner

from generic_export.devices import CPU
from generic_export.errors import OptionError
from generic_export.opened_archive import OpenedArchive, open_archive
from t2n_llm.exporters.leaves import tensors_of
from t2n_llm.exporters.program import TractProgram
from t2n_llm.exporters.untrusted import check_metadata

_DEVICES = {"cpu": CPU, "cuda": "cuda", "mps": "metal"}


class TractModelRunner(ModelRunner):
    """Runs one program: `runner(**kwargs)` returns what the model's forward does."""

    def __init__(self, metadata: ExportMetadata, archive: OpenedArchive, device: str = CPU) -> None:
        check_metadata(metadata)
        super().__init__(metadata)
        self.archive = archive
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where tract computes; results are on the CPU."""
        return torch.device("mps" if self._device == "metal" else self._device)

    @classmethod
    def from_program(
        cls, program: TractProgram, metadata: ExportMetadata, device: str | torch.device | None = None
    ) -> TractModelRunner:
        """Load a program in a new process.

        Args:
            program: as exported, or as loaded.
            metadata: that belongs to it.
            device: "cpu" (None), "cuda" or "mps" (Metal).

        Raises:
            OptionError: another device.
            ArchiveError: metadata that no export writes.
            EngineError: tract does not load the archive.
        """
        check_metadata(metadata)
        kind = torch.device(device or CPU).type
        if kind not in _DEVICES:
            raise OptionError(f"tract does not run on {kind!r}.", f"Give one of {', '.join(_DEVICES)}.")
        return cls(metadata, open_archive(program.archive, device=_DEVICES[kind]), _DEVICES[kind])

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Any:
        """Run the program on the forward's keyword arguments.

        Args:
            share_inputs, share_outputs: ignored; arrays cross to another process, so none is shared.
            kwargs: as the example had them, of any size that the archive allows.

        Raises:
            OptionError: an argument is missing, or a constant is not the example's.
            EngineError: tract does not run it.
        """
        self._check_constants(kwargs)
        return self.unflatten(self.archive.run(tensors_of(kwargs)))

    def _check_constants(self, kwargs: dict[str, Any]) -> None:
        for name, value in self.metadata.in_constants.items():
            given = kwargs.get(name, value)
            if given is not None and given != value:
                raise OptionError(
                    f"{name} is {given!r}; the program was exported for {value!r}.",
                    "Export another one for that value.",
                )


__all__ = ["TractModelRunner"]
