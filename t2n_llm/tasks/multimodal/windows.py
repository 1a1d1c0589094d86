"""Image encoders whose layers attend within windows of an image (Qwen2.5-VL): windows that reach beyond its edge are filled up.

transformers sorts the patches into windows and splits them into pieces of different sizes, which depend on the image. Here the
patches stay in order, and a layer's queries, keys and values are cut into windows of one size with a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import pad

_INTERFACES = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class _Windows:
    """How the patches of one image are cut into windows.

    Attributes:
        height: of the image, in rows of embeddings; may be symbolic.
        width: the same.
        joined: patches that become one row of embeddings, next to each other in the encoder.
        side: of a window, in rows of embeddings.
    """

    height: Any
    width: Any
    joined: int
    side: int

    def cut(self, states: torch.Tensor) -> torch.Tensor:
        """Cut [1, heads, patches, D] into [windows, heads, patches of a window, D], with zeros beyond the edges."""
        _, heads, _, size = states.shape
        rows, columns = self._counts
        filled = pad(
            states.reshape(heads, self.height, self.width, self.joined * size),
            (0, 0, 0, columns * self.side - self.width, 0, rows * self.side - self.height),
        )
        parts = filled.reshape(heads, rows, self.side, columns, self.side, self.joined * size)
        return parts.permute(1, 3, 0, 2, 4, 5).reshape(rows * columns, heads, -1, size)

    def joined_again(self, windows: torch.Tensor) -> torch.Tensor:
        """Put [windows, patches of a window, heads, D] together: [1, patches, heads, D]."""
        *_, heads, size = windows.shape
        rows, columns = self._counts
        parts = windows.reshape(rows, columns, self.side, self.side, self.joined * heads * size)
        filled = parts.permute(0, 2, 1, 3, 4).reshape(rows * self.side, columns * self.side, -1)
        return filled[: self.height, : self.width].reshape(1, -1, heads, size)

    def mask(self, states: torch.Tensor) -> torch.Tensor:
        """Return what is added to the scores of each window, [windows, 1, 1, patches of a window]."""
        real = self.cut(states.new_ones(1, 1, self.height * self.width * self.joined, 1))
        hidden = torch.zeros_like(real).masked_fill(real == 0, torch.finfo(states.dtype).min)
        return hidden.squeeze(-1)[:, :, None]

    @property
    def _counts(self) -> tuple[Any, Any]:
        return (self.height + self.side - 1) // self.side, (self.width + self.side - 1) // self.side


@dataclass(frozen=True)
class _Interfaces:
    """Stands in for transformers' `ALL_ATTENTION_FUNCTIONS` in the code of an encoder.

    Attributes:
        own: transformers'.
        windows: of the image.
        within: modules that attend within them.
    """

    own: Any
    windows: _Windows
    within: Collection[Any]

    def get_interface(self, name: str, default: Any) -> Any:
        """Return an attention function by its name."""
        return partial(self._attention, self.own.get_interface(name, default))

    def _attention(
        self,
        own: Any,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **further: Any,
    ) -> tuple[torch.Tensor, Any]:
        if module not in self.within:
            return own(module, query, key, value, attention_mask, **further)
        cut = map(self.windows.cut, (query, key, value))
        answer, weights = own(module, *cut, self.windows.mask(query), **further)
        return self.windows.joined_again(answer), weights


@contextmanager
def windows_filled_up(network: Any, height: Any, width: Any) -> Iterator[Mapping[str, torch.Tensor]]:
    """Let the layers of an image encoder attend within windows of one size, for the length of the block.

    Args:
        network: transformers' model.
        height: of the one image that is read, in rows of embeddings; may be symbolic.
        width: the same.

    Yields:
        Further arguments of `get_image_features`; none for an encoder without windows.
    """
    encoder = next((each for each in network.modules() if hasattr(each, "fullatt_block_indexes")), None)
    if encoder is None:
        yield {}
        return
    merge = encoder.spatial_merge_size
    windows = _Windows(height, width, merge**2, encoder.window_size // merge // encoder.patch_size)
    within = {block.attn for at, block in enumerate(encoder.blocks) if at not in encoder.fullatt_block_indexes}
    code = sys.modules[type(encoder).__module__]
    interfaces = _Interfaces(getattr(code, _INTERFACES), windows, within)
    rows = height * width
    with mock.patch.object(code, _INTERFACES, interfaces):
        yield {
            "window_index": torch.arange(rows),
            "cu_window_seqlens": torch.tensor([0, rows * windows.joined], dtype=torch.int32),
        }


__all__ = ["windows_filled_up"]
