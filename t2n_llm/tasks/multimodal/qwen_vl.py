"""Qwen's vision-language models: a grid of patches, which is fixed here, and positions with three coordinates.

In: transformers' model. Out: its image encoder with everything that depends on the grid computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from generic_export.errors import OptionError
from t2n_llm.tasks.multimodal.family import POSITIONS, Senses, Sight


@dataclass(frozen=True)
class _SquareGrid(Senses):
    """Images of one size, in patches.

    Attributes:
        image_size: height and width of the images in pixels.
    """

    image_size: int
    decoder_input: str | None = POSITIONS
    stacks_images: bool = False

    def rows_per_image(self, config: Any) -> int:
        """See `Family`."""
        return self._merged_side(config) ** 2

    def pixel_shape(self, config: Any) -> tuple[int, ...]:
        """See `Family`: patches in the order of the processor, each with its channels, frames and pixels."""
        vision = config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return (self._side(config) ** 2, width)

    def reference_inputs(self, config: Any, is_image: torch.Tensor, pixels: torch.Tensor) -> dict[str, Any]:
        """See `Family`."""
        if not len(pixels):
            return {}
        return {
            "pixel_values": pixels.flatten(0, 1),
            "image_grid_thw": self._grid(config, len(pixels)),
            "mm_token_type_ids": is_image.int(),
        }

    def positions(self, config: Any, is_image: np.ndarray) -> np.ndarray:
        """See `Family`: text counts on in all three; an image has one time, rows and columns, and takes its side."""
        side, rows = self._merged_side(config), self.rows_per_image(config)
        places = np.stack([np.zeros(rows, np.int64), *np.divmod(np.arange(rows), side)])
        columns, index, start = [], 0, 0
        while index < len(is_image):
            columns.append((places if is_image[index] else np.zeros((3, 1), np.int64)) + start)
            start += side if is_image[index] else 1
            index += columns[-1].shape[1]
        return np.concatenate(columns, axis=1)[:, None]

    def _side(self, config: Any) -> int:
        """Return how many patches an image has in each direction.

        Raises:
            OptionError: its size is no multiple of what the encoder joins.
        """
        vision = config.vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        if self.image_size < 1 or self.image_size % unit:
            raise OptionError(
                f"--image-size {self.image_size}: this model takes multiples of {unit} pixels.",
                f"Use --image-size {max(1, round(self.image_size / unit)) * unit}.",
            )
        return int(self.image_size // vision.patch_size)

    def _merged_side(self, config: Any) -> int:
        return self._side(config) // int(config.vision_config.spatial_merge_size)

    def _grid(self, config: Any, images: int) -> torch.Tensor:
        """Return time, height and width in patches, for each of some images."""
        return torch.tensor([[1, self._side(config), self._side(config)]] * images)


@dataclass(frozen=True)
class Qwen25VL(_SquareGrid):
    """Qwen2.5-VL: patches look at each other in windows."""

    def sight(self, network: Any) -> Sight:
        """See `Family`; what depends on the grid is handed to the encoder as it allows, lengths of windows as numbers."""
        from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

        config, visual = network.config, network.model.visual
        grid, merge = self._grid(config, 1), config.vision_config.spatial_merge_size
        window_index, window_ends = get_vision_window_index(
            grid, merge, config.vision_config.window_size, config.vision_config.patch_size
        )
        buffers = {"patch_positions": get_vision_position_ids(grid, merge), "window_index": window_index.long()}
        ends, whole = window_ends.numpy(), np.array([0, self._side(config) ** 2])

        def look(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            seen = visual(
                pixels,
                grid_thw=None,
                position_ids=buffers["patch_positions"],
                window_index=buffers["window_index"],
                cu_window_seqlens=ends,
                cu_seqlens=whole,
                return_dict=True,
            )
            return (seen.pooler_output,)

        return Sight(buffers, look)


@dataclass(frozen=True)
class Qwen3VL(_SquareGrid):
    """Qwen3-VL, dense or with experts: what some of the encoder's layers see enters the decoder's first layers."""

    def deepstack_layers(self, config: Any) -> int:
        """See `Family`."""
        return len(config.vision_config.deepstack_visual_indexes)

    def sight(self, network: Any) -> Sight:
        """See `Family`; the table of positions is resampled with weights that the grid decides."""
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

        config, visual = network.config, network.model.visual
        grid, merge = self._grid(config, 1), config.vision_config.spatial_merge_size
        corners, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        buffers = {
            "patch_positions": get_vision_position_ids(grid, merge),
            "table_corners": corners,
            "corner_weights": weights,
        }
        whole = np.array([0, self._side(config) ** 2])

        def look(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            seen = visual(
                pixels,
                grid_thw=None,
                position_ids=buffers["patch_positions"],
                interp_indices=buffers["table_corners"],
                interp_weights=buffers["corner_weights"],
                cu_seqlens=whole,
                return_dict=True,
            )
            return (seen.pooler_output, *seen.deepstack_features)

        return Sight(buffers, look)
