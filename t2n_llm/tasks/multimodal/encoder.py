"""The encoder of images or sound as a module: what an `Encoder` describes, with the values that a capture may decide by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from generic_export.torch_graph.capture.known_buffers import decided_by
from t2n_llm.tasks.multimodal.family import FRAME_MASK, Encoder


class EncoderModule(nn.Module):
    """`pixel_values -> (image_embeds, *deepstack_embeds)`, or `input_features -> (audio_embeds,)`."""

    def __init__(self, network: Any, encoder: Encoder) -> None:
        """Wrap a network; its buffers are on the meta device."""
        super().__init__()
        self.network = network
        self.encode = encoder.encode
        self.known = dict(encoder.buffers)
        for name, value in self.known.items():
            self.register_buffer(name, value.to("meta"))

    def forward(self, pixel_values: torch.Tensor, frame_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return [N, rows, D] for images [N, C, H, W], [rows, D] for the patches of one; then those of `deepstack_layers`."""
        further = {} if frame_mask is None else {FRAME_MASK: frame_mask}
        with decided_by(self, self.known):
            return self.encode(pixel_values, further | {name: getattr(self, name) for name in self.known})


__all__ = ["EncoderModule"]
