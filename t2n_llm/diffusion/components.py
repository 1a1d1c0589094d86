"""The components of diffusers' pipelines as modules with named tensors in and out: one function for each class.

In: a component, loaded. Out: `Component`s, the archives that are made of it: an autoencoder has two. Classes are known by their
names, so that diffusers is not needed to list them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from generic_export import DynamicSize
from generic_export.torch_graph.request import AxisSymbol

Values: TypeAlias = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]
Sizes: TypeAlias = Mapping[str, int]

_STEPS = 1000  # of the noise schedules that models are trained with
_CLIP_POSITIONS = 77


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _timesteps(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(_STEPS, shape, generator=generator).float()


def _below(limit: int) -> Values:
    return lambda shape, generator: torch.randint(limit, shape, generator=generator)


@dataclass(frozen=True)
class ComponentInput:
    """One input tensor: its shape, in numbers and symbols, and what draws an example of it."""

    shape: tuple[int | str, ...]
    values: Values = _normal


class NamedCall(nn.Module):
    """A component that is called with tensors in order, and answers with tensors."""

    def __init__(self, component: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.component, self.call = component, call

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the component; a tensor, or a tuple of them."""
        return self.call(self.component, *tensors)


@dataclass(frozen=True)
class Component:
    """One archive of a pipeline.

    Attributes:
        name: of the archive, such as `unet` or `vae_decoder`.
        module: takes `inputs` in order.
        inputs: by name.
        outputs: names, in order.
        sizes: of the symbols, in the example.
        others: at which the archive is compared as well.
        multiples: what divides a symbol.
    """

    name: str
    module: nn.Module
    inputs: Mapping[str, ComponentInput]
    outputs: tuple[str, ...]
    sizes: Sizes
    others: tuple[Sizes, ...]
    multiples: Sizes = field(default_factory=dict)

    @property
    def dynamic_axes(self) -> dict[str, dict[int, AxisSymbol]]:
        """Every axis that is a symbol, with what is declared of it."""
        return {
            name: {axis: self._declared(size) for axis, size in enumerate(each.shape) if isinstance(size, str)}
            for name, each in self.inputs.items()
        }

    def _declared(self, symbol: str) -> AxisSymbol:
        factor = self.multiples.get(symbol, 1)
        return symbol if factor == 1 else DynamicSize(symbol, factor)

    def example(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Draw the inputs."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            each.values(tuple(self.sizes[size] if isinstance(size, str) else size for size in each.shape), generator)
            for each in self.inputs.values()
        )


def _images(factor: int, least: int = 8) -> dict[str, Any]:
    """Sizes of batch, height and width that a factor divides, small enough for a check of a large model."""
    base = max(least // factor, 2)
    sizes = {"B": 2, "H": factor * base, "W": factor * (base + 1)}
    others = {"B": 1, "H": factor * (base + 1), "W": factor * base}, {"B": 3, "H": factor * base, "W": factor * base}
    return {"sizes": sizes, "others": others, "multiples": {"H": factor, "W": factor}}


def _with_text(images: dict[str, Any], symbol: str = "L") -> dict[str, Any]:
    lengths = (7, 77, 16)
    sizes = [
        {**each, symbol: length} for each, length in zip((images["sizes"], *images["others"]), lengths, strict=True)
    ]
    return {**images, "sizes": sizes[0], "others": tuple(sizes[1:])}


# --- noise predictors ---------------------------------------------------------------------------


def _conditional_unet(name: str, model: Any) -> list[Component]:
    config = model.config
    width = config.cross_attention_dim
    inputs = {
        "sample": ComponentInput(("B", config.in_channels, "H", "W")),
        "timestep": ComponentInput(("B",), _timesteps),
        "encoder_hidden_states": ComponentInput(("B", "L", width if isinstance(width, int) else width[0])),
    }
    if config.addition_embed_type == "text_time":  # SDXL
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs |= {"text_embeds": ComponentInput(("B", pooled)), "time_ids": ComponentInput(("B", 6), _timesteps)}

    def call(
        unet: Any, sample: torch.Tensor, timestep: torch.Tensor, hidden: torch.Tensor, *added: torch.Tensor
    ) -> torch.Tensor:
        more = dict(zip(("text_embeds", "time_ids"), added, strict=True)) if added else None
        answer: torch.Tensor = unet(sample, timestep, hidden, added_cond_kwargs=more, return_dict=False)[0]
        return answer

    sizes = _with_text(_images(2 ** (len(config.block_out_channels) - 1)))
    return [Component(name, NamedCall(model, call), inputs, ("noise",), **sizes)]


def _unet(name: str, model: Any) -> list[Component]:
    inputs = {
        "sample": ComponentInput(("B", model.config.in_channels, "H", "W")),
        "timestep": ComponentInput(("B",), _timesteps),
    }
    sizes = _images(2 ** (len(model.config.block_out_channels) - 1))
    return [Component(name, NamedCall(model, _first_of), inputs, ("noise",), **sizes)]


def _sd3(name: str, model: Any) -> list[Component]:
    config = model.config
    inputs = {
        "hidden_states": ComponentInput(("B", config.in_channels, "H", "W")),
        "encoder_hidden_states": ComponentInput(("B", "L", config.joint_attention_dim)),
        "pooled_projections": ComponentInput(("B", config.pooled_projection_dim)),
        "timestep": ComponentInput(("B",), _timesteps),
    }
    return [Component(name, NamedCall(model, _first_of), inputs, ("noise",), **_with_text(_images(config.patch_size)))]


def _flux(name: str, model: Any) -> list[Component]:
    config = model.config
    inputs = {
        "hidden_states": ComponentInput(("B", "S", config.in_channels)),
        "encoder_hidden_states": ComponentInput(("B", "L", config.joint_attention_dim)),
        "pooled_projections": ComponentInput(("B", config.pooled_projection_dim)),
        "timestep": ComponentInput(("B",), lambda shape, generator: torch.rand(shape, generator=generator)),
        "img_ids": ComponentInput(
            ("S", 3), lambda shape, generator: torch.randint(9, shape, generator=generator).float()
        ),
        "txt_ids": ComponentInput(("L", 3), lambda shape, generator: torch.zeros(shape)),
    }
    if config.guidance_embeds:
        inputs["guidance"] = ComponentInput(("B",), lambda shape, generator: torch.rand(shape, generator=generator) * 5)
    sizes = {"B": 2, "S": 16, "L": 7}
    others = {"B": 1, "S": 24, "L": 12}, {"B": 3, "S": 9, "L": 16}
    return [Component(name, NamedCall(model, _first_of), inputs, ("noise",), sizes, others)]


def _first_of(model: Any, *tensors: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = model(*tensors, return_dict=False)[0]
    return answer


# --- autoencoders ----------------------------------------------------------------------------------


def _autoencoder(name: str, model: Any) -> list[Component]:
    config = model.config
    factor = 2 ** (len(config.block_out_channels) - 1)
    return [
        Component(
            f"{name}_encoder",
            NamedCall(model, _encoded),
            {"sample": ComponentInput(("B", config.in_channels, "H", "W"))},
            ("mean", "std"),
            **_images(factor, 16),
        ),
        Component(
            f"{name}_decoder",
            NamedCall(model, _decoded),
            {"latent": ComponentInput(("B", config.latent_channels, "H", "W"))},
            ("sample",),
            **_images(1, 4),
        ),
    ]


def _encoded(model: Any, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = model.encode(sample).latent_dist
    return found.mean, found.std


def _decoded(model: Any, latent: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = model.decode(latent, return_dict=False)[0]
    return answer


# --- text encoders -------------------------------------------------------------------------------------


def _clip(name: str, model: Any) -> list[Component]:
    config = model.config
    longest = min(_CLIP_POSITIONS, int(config.max_position_embeddings))
    return [_text(name, model, _clip_states, ("last_hidden_state", "penultimate_hidden_state", "pooled"), longest)]


def _clip_states(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What SD, SDXL and SD3 read: the last states, those before the last layer, and the text's one vector."""
    said = model(input_ids=ids, output_hidden_states=True)
    pooled = said.text_embeds if "text_embeds" in said else said.pooler_output
    return said.last_hidden_state, said.hidden_states[-2], pooled


def _t5(name: str, model: Any) -> list[Component]:
    return [_text(name, model, lambda t5, ids: t5(input_ids=ids).last_hidden_state, ("last_hidden_state",), 32)]


def _text(name: str, model: Any, call: Callable[..., Any], outputs: tuple[str, ...], longest: int) -> Component:
    inputs = {"input_ids": ComponentInput(("B", "S"), _below(model.config.vocab_size))}
    sizes = {"B": 2, "S": 7}
    others = {"B": 1, "S": longest}, {"B": 3, "S": 5}
    return Component(name, NamedCall(model, call), inputs, outputs, sizes, others)


COMPONENTS: Mapping[str, Callable[[str, Any], list[Component]]] = {
    "UNet2DConditionModel": _conditional_unet,
    "UNet2DModel": _unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "AutoencoderKL": _autoencoder,
    "CLIPTextModel": _clip,
    "CLIPTextModelWithProjection": _clip,
    "T5EncoderModel": _t5,
}
"""Class -> what makes its archives of the component's name and the component."""

__all__ = ["COMPONENTS", "Component", "ComponentInput", "NamedCall", "Sizes"]
