"""`TractModelRunner`: runs an exported program in tract, in a process of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.exporters import ExportMetadata
from transformers.exporters.runners import ModelRunner

from generic_export.devices import CPU
from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.torch_graph.naming import identifier
from t2n_llm.exporters.leaves import tensors_of
from t2n_llm.exporters.program import TractProgram
from t2n_llm.exporters.untrusted import check_metadata

_DEVICES = {"cpu": CPU, "cuda": "cuda", "mps": "metal"}
_DTYPES = {"f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


class TractModelRunner(ModelRunner):
    """Runs one program: `runner(**kwargs)` returns what the model's forward does."""

    def __init__(self, metadata: ExportMetadata, model: WheelModel, device: str = CPU) -> None:
        check_metadata(metadata)
        super().__init__(metadata)
        self.model = model
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
        model = TractWheel(device=_DEVICES[kind]).load(program.archive)
        return cls(metadata, model, _DEVICES[kind])

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
        tensors = {identifier(name): tensor for name, tensor in tensors_of(kwargs).items()}
        missing = [fact.name for fact in self.model.inputs if fact.name not in tensors]
        if missing:
            raise OptionError(
                f"the program takes {', '.join(missing)}, which the arguments ({', '.join(kwargs)}) do not hold."
            )
        arrays = [_array(tensors[fact.name], fact.datum_type) for fact in self.model.inputs]
        outputs = [torch.from_numpy(np.array(array)) for array in self.model.run(arrays)]
        return self.unflatten(outputs)

    def _check_constants(self, kwargs: dict[str, Any]) -> None:
        for name, value in self.metadata.in_constants.items():
            given = kwargs.get(name, value)
            if given is not None and given != value:
                raise OptionError(
                    f"{name} is {given!r}; the program was exported for {value!r}.",
                    "Export another one for that value.",
                )


def _array(tensor: torch.Tensor, datum_type: str) -> np.ndarray:
    plain = tensor.detach().cpu()
    if plain.is_floating_point():
        plain = plain.to(_DTYPES.get(datum_type, plain.dtype))
    return np.asarray(plain.contiguous().numpy())


__all__ = ["TractModelRunner"]
