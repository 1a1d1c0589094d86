"""diffusers: the components of its pipelines, tiny, as `t2n-llm export` takes them apart; batch and sizes dynamic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from t2n_llm.diffusion.components import COMPONENTS
from t2n_llm.zoo.suites.case import Given, ModuleCase, below, between

_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    kinds = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, cross_attention_dim=32, attention_head_dim=8, **kinds, **_BLOCKS
    )


def _vae() -> Any:
    from diffusers import AutoencoderKL

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(in_channels=3, out_channels=3, latent_channels=4, **kinds, **_BLOCKS)


def _clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=120
    )
    return CLIPTextModel(config)


def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=48,
    )


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(d_model=32, d_kv=8, d_ff=37, num_heads=4, num_layers=2, vocab_size=120))


MODELS: Mapping[str, Callable[[], Any]] = {
    "unet": _unet,
    "vae": _vae,
    "sd3": _sd3,
    "flux": _flux,
    "clip": _clip,
    "t5": _t5,
}
"""Tiny components by name, with random weights."""


def _part(kind: str, number: int = 0) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = MODELS[kind]()
        return COMPONENTS[type(model).__name__](kind, model)[number].module

    return build


_TIMES = Given(("B",), between(0.0, 999.0))
_TEXTS = Given(("B", "L", 32))
_LENGTHS = {"B": 2, "L": 7}, {"B": 3, "L": 77}
_EVEN = {"H": 2, "W": 2}
_IDS = {"input_ids": Given(("B", "S"), below(120))}

CASES: Mapping[str, ModuleCase] = {
    "unet": ModuleCase(
        _part("unet"),
        {"sample": Given(("B", 4, "H", "W")), "timestep": _TIMES, "encoder_hidden_states": _TEXTS},
        {**_LENGTHS[0], "H": 16, "W": 18},
        {**_LENGTHS[1], "H": 20, "W": 16},
        _EVEN,
    ),
    "vae_encoder": ModuleCase(
        _part("vae"),
        {"sample": Given(("B", 3, "H", "W"))},
        {"B": 2, "H": 16, "W": 18},
        {"B": 3, "H": 20, "W": 16},
        _EVEN,
    ),
    "vae_decoder": ModuleCase(
        _part("vae", 1), {"latent": Given(("B", 4, "H", "W"))}, {"B": 2, "H": 4, "W": 5}, {"B": 3, "H": 6, "W": 4}
    ),
    "sd3": ModuleCase(
        _part("sd3"),
        {
            "hidden_states": Given(("B", 4, "H", "W")),
            "encoder_hidden_states": _TEXTS,
            "pooled_projections": Given(("B", 64)),
            "timestep": _TIMES,
        },
        {**_LENGTHS[0], "H": 8, "W": 10},
        {**_LENGTHS[1], "H": 10, "W": 12},
        _EVEN,
    ),
    "flux": ModuleCase(
        _part("flux"),
        {
            "hidden_states": Given(("B", "S", 4)),
            "encoder_hidden_states": _TEXTS,
            "pooled_projections": Given(("B", 32)),
            "timestep": Given(("B",), between(0.0, 1.0)),
            "img_ids": Given(("S", 3), between(0.0, 9.0)),
            "txt_ids": Given(("L", 3), between(0.0, 1.0)),
            "guidance": Given(("B",), between(1.0, 5.0)),
        },
        {**_LENGTHS[0], "S": 16},
        {**_LENGTHS[1], "S": 24},
    ),
    "clip": ModuleCase(_part("clip"), _IDS, {"B": 2, "S": 7}, {"B": 3, "S": 77}),
    "t5": ModuleCase(_part("t5"), _IDS, {"B": 2, "S": 7}, {"B": 3, "S": 32}),
}

__all__ = ["CASES", "MODELS"]
