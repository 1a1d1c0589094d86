"""Recorded tensors: one copy of each, within a memory budget; beyond it only a checksum.

In: tensors that a running model handles. Out: `Held`, the copy or what is left of it.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass

import torch

from generic_export.compat import writes_to


@dataclass(frozen=True)
class Held:
    """A tensor as it was at one moment.

    Attributes:
        tensor: a copy in CPU memory (on the meta device for a meta tensor); None when the budget was used up.
        checksum: SHA-256 of its bytes when there is no copy, else "".
        nbytes: its size.
        shape: its sizes.
    """

    tensor: torch.Tensor | None
    checksum: str
    nbytes: int
    shape: tuple[int, ...]


class TensorStore:
    """Keeps copies of tensors; the same tensor, unchanged, is kept once.

    Args:
        budget: bytes that copies may take; essential ones are kept beyond it.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Held]] = {}

    @property
    def full(self) -> bool:
        """Whether the budget is used up."""
        return self.bytes >= self.budget

    def hold(self, tensor: torch.Tensor, *, essential: bool) -> Held:
        """Return what is kept of a tensor as it is now."""
        version = version_of(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version and version >= 0:
            held = known[2]
            if held.tensor is not None or not essential:
                return held
        held = self._copied(tensor, essential=essential)
        self._known[id(tensor)] = (weakref.ref(tensor), version, held)
        return held

    def _copied(self, tensor: torch.Tensor, *, essential: bool) -> Held:
        nbytes = tensor.numel() * tensor.element_size()
        if not essential and self.bytes + nbytes > self.budget:
            return Held(None, checksum(tensor), nbytes, tuple(tensor.shape))
        self.bytes += 0 if tensor.device.type == "meta" else nbytes
        return Held(snapshot(tensor), "", nbytes, tuple(tensor.shape))


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that nothing writes to: in CPU memory, contiguous, a plain tensor."""
    plain = tensor.detach()
    if plain.device.type == "meta":
        return torch.empty(plain.shape, dtype=plain.dtype, device="meta")
    plain = plain.dequantize() if plain.is_quantized else plain
    return plain.to("cpu", copy=True).clone(memory_format=torch.contiguous_format)


def checksum(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's numbers."""
    if tensor.device.type == "meta":
        return ""
    plain = snapshot(tensor)
    return hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"").hexdigest()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; -1 for one that does not count (made in inference mode)."""
    return -1 if tensor.is_inference() else writes_to(tensor)


__all__ = ["Held", "TensorStore", "checksum", "snapshot", "version_of"]
