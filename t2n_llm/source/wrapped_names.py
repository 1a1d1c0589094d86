"""Checkpoints of wrapped models: what torch.compile, DataParallel, FSDP and activation checkpointing insert in tensor names.

In: an opened checkpoint. Out: the same with the model's own names, and a note of what was taken off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from generic_export.errors import WeightError
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.source import TensorSource

_WRAPPERS: Mapping[str, str] = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
_OUTER_WRAPPER = "module."


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors bear the names that they have in the model itself.

    Raises:
        WeightError: two tensors have the same name then.
    """
    whole = _is_wrapped_whole(checkpoint.tensors)
    found = [f"{_OUTER_WRAPPER} (DataParallel)"] if whole else []
    parts = {part for name in checkpoint.tensors for part in name.split(".")}
    found += [f"{wrapper}. ({cause})" for wrapper, cause in _WRAPPERS.items() if wrapper in parts]
    if not found:
        return checkpoint
    tensors: dict[str, TensorSource] = {}
    names: dict[str, str] = {}
    for name, tensor in checkpoint.tensors.items():
        inner = _bare(name, whole)
        if inner in tensors:
            raise WeightError(
                f"tensor {inner}: the checkpoint contains it twice, as {names[inner]} and as {name}.",
                "Remove one of the two from the checkpoint.",
            )
        tensors[inner], names[inner] = tensor, name
    note = (
        f"the checkpoint was saved from a wrapped model: {', '.join(found)} is removed from the names of its tensors."
    )
    return replace(checkpoint, tensors=tensors, notes=(*checkpoint.notes, note))


def _is_wrapped_whole(names: Iterable[str]) -> bool:
    return all(_bare(name).startswith(_OUTER_WRAPPER) for name in names)


def _bare(name: str, whole: bool = False) -> str:
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return bare.removeprefix(_OUTER_WRAPPER) if whole else bare


__all__ = ["unwrapped"]
