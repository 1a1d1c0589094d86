"""`TractModelRunner`: runs an exported program in tract, in a process of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.exporters import ExportMetadata
from transformers.exporters.runners import ModelRunner
from transformers.modeling_outputs import CausalLMOutputWithPast

from generic_export.devices import CPU
from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import WheelSession
from generic_export.opened_archive import OpenedArchive, open_archive
from generic_export.torch_graph.naming import identifier
from t2n_llm.check.decode_program import is_cache
from t2n_llm.exporters.leaves import tensors_of
from t2n_llm.exporters.program import TractProgram
from t2n_llm.exporters.untrusted import check_metadata

_CACHE_FIELDS = ("cache", "past_key_values")
_DEVICES = {"cpu": CPU, "cuda": "cuda", "mps": "metal"}


class TractModelRunner(ModelRunner):
    """Runs one program: `runner(**kwargs)` returns what the model's forward does."""

    def __init__(
        self, metadata: ExportMetadata, archive: OpenedArchive, device: str = CPU, engine_cache: bool = False
    ) -> None:
        check_metadata(metadata)
        super().__init__(metadata)
        self.archive = archive
        self._device = device
        self._engine_cache = engine_cache
        self._session: WheelSession | None = None

    @property
    def device(self) -> torch.device:
        """Where tract computes; results are on the CPU."""
        return torch.device("mps" if self._device == "metal" else self._device)

    @classmethod
    def from_program(
        cls,
        program: TractProgram,
        metadata: ExportMetadata,
        device: str | torch.device | None = None,
        engine_cache: bool = False,
    ) -> TractModelRunner:
        """Load a program in a new process.

        Args:
            program: as exported, or as loaded.
            metadata: that belongs to it.
            device: "cpu" (None), "cuda" or "mps" (Metal).
            engine_cache: keep the cache in the engine's process between calls: it is given with the first one, and in no result.

        Raises:
            OptionError: another device, or a program whose cache is not the last of its inputs and outputs.
            ArchiveError: metadata that no export writes.
            EngineError: tract does not load the archive.
        """
        check_metadata(metadata)
        kind = torch.device(device or CPU).type
        if kind not in _DEVICES:
            raise OptionError(f"tract does not support the device {kind!r}.", f"Use one of {', '.join(_DEVICES)}.")
        archive = open_archive(program.archive, device=_DEVICES[kind])
        return cls(metadata, archive, _DEVICES[kind], engine_cache)

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
        if is_language_model(self.archive):
            return run_language_model(self.archive, kwargs)
        if self._engine_cache:
            return self._continued(tensors_of(kwargs))
        return self.unflatten(self.archive.run(tensors_of(kwargs)))

    def _continued(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Run on the cache that the engine has: that of the arguments, or what the last call left.

        Raises:
            OptionError: the first call has no cache, or the program has none.
        """
        names = self.archive.input_names
        caches = [name for name in names if is_cache(identifier(name))]
        if not caches or list(names[-len(caches) :]) != caches or len(self.archive.output_names) <= len(caches):
            raise OptionError("the last inputs and outputs of the program are not a cache.", "Omit engine_cache.")
        arrays = self.archive.arrays({**dict.fromkeys(caches, torch.empty(0)), **tensors})
        if all(name in tensors for name in caches):
            self._session = self.archive.model.spawn_state()
            self._session.feed_back(arrays[-len(caches) :])
        if self._session is None:
            raise OptionError("the first call has no cache, but the engine keeps it.", "Pass the cache of the prefill.")
        outputs = [torch.from_numpy(np.array(each)) for each in self._session.run(arrays[: -len(caches)])]
        result = self.unflatten([*outputs, *(torch.empty(0) for _ in caches)])
        for name in _CACHE_FIELDS:
            if getattr(result, name, None) is not None:
                setattr(result, name, None)
        return result

    def _check_constants(self, kwargs: dict[str, Any]) -> None:
        for name, value in self.metadata.in_constants.items():
            given = kwargs.get(name, value)
            if given is not None and given != value:
                raise OptionError(
                    f"{name} is {given!r}; the program was exported for {value!r}.",
                    "Export it again for that value.",
                )


# --- language models ---------------------------------------------------------------------------------


_IDS, _KEY, _VALUE = "input_ids", "in_cache_key_", "in_cache_value_"


def is_language_model(archive: OpenedArchive) -> bool:
    """Say whether an archive is one of `t2n-llm export --task text-generation`, by its inputs."""
    caches = [name for name in archive.input_names if name != _IDS]
    return _IDS in archive.input_names and bool(caches) and all(name.startswith((_KEY, _VALUE)) for name in caches)


def run_language_model(archive: OpenedArchive, kwargs: Mapping[str, Any]) -> CausalLMOutputWithPast:
    """Run new tokens after those of a cache.

    Args:
        archive: of a language model.
        kwargs: `input_ids`, and what else a forward takes: `cache` (`past_key_values`), `attention_mask`, `position_ids`.

    Raises:
        OptionError: `input_ids` are missing, or tokens are hidden or moved.
        EngineError: tract does not run it.
    """
    if _IDS not in kwargs:
        raise OptionError("the program needs input_ids.", "The program computes the embeddings itself.")
    ids, cache = kwargs[_IDS], next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    past = 0 if cache is None else int(cache.get_seq_length())
    _check_mask(kwargs.get("attention_mask"))
    _check_positions(kwargs.get("position_ids"), past, ids.shape[-1])
    facts = {fact.name: fact for fact in archive.model.inputs}
    given = {_IDS: ids}
    for name in archive.input_names:
        if name != _IDS:
            given[name] = _state(cache, past, name, facts[name].shape, ids.shape[0])
    logits, *states = archive.run(given)
    layers = [int(name.removeprefix(_KEY)) for name in archive.input_names if name.startswith(_KEY)]
    found = DynamicCache()
    for place, layer in enumerate(layers):
        found.update(states[2 * place], states[2 * place + 1], layer)
    return CausalLMOutputWithPast(logits=logits, **{_cache_field(): found})


_CACHES = ("cache", "past_key_values")  # transformers 5.24 has the first name, and takes the second


def _cache_field() -> str:
    fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
    return next(name for name in _CACHES if name in fields)


def _state(cache: Any, past: int, name: str, shape: tuple[str, ...], batch: int) -> torch.Tensor:
    """Return keys or values of a layer, [B, heads, P, head_dim]; those of no past are empty."""
    if past == 0:
        return torch.empty(batch, int(shape[1]), 0, int(shape[3]))
    layer = cache.layers[int(name.rpartition("_")[2])]
    tensor: torch.Tensor = layer.keys if name.startswith(_KEY) else layer.values
    return tensor[..., -past:, :]


def _check_mask(mask: Any) -> None:
    if mask is not None and (mask.dim() != 2 or not bool(mask.bool().all())):
        raise OptionError(
            "attention_mask hides tokens, which this program does not support.",
            "Run texts without padding, one at a time, or export with TractExporter and a mask in the example.",
        )


def _check_positions(positions: Any, past: int, new: int) -> None:
    if positions is not None and not bool((positions == torch.arange(past, past + new)).all()):
        raise OptionError(
            f"position_ids must be {past} to {past + new - 1}, which follow from the cache.",
            "Omit them, or export with TractExporter and position_ids in the example.",
        )


__all__ = ["TractModelRunner", "is_language_model", "run_language_model"]
