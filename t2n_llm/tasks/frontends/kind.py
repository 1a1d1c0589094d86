"""What a kind of front end says about itself: which graph, manifest and check share.

In: a processor of transformers' with its settings. Out: a module without weights, and questions with that processor's answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from generic_export.torch_graph.request import DynamicAxes


@dataclass(frozen=True)
class FrontEndCase:
    """Something heard or seen, and what the model's own processor makes of it.

    Attributes:
        name: what is special about it.
        inputs: of the graph, in order.
        expected: its outputs, in order.
    """

    name: str
    inputs: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, ...]


class FrontEnd(ABC):
    """One way from what a microphone or a camera gives to what a model takes."""

    kind: ClassVar[str]
    """What `export.json` calls it."""

    @property
    @abstractmethod
    def output_names(self) -> tuple[str, ...]:
        """The model's inputs that it makes."""

    @property
    @abstractmethod
    def dynamic_axes(self) -> DynamicAxes:
        """Of the inputs."""

    @abstractmethod
    def module(self) -> nn.Module:
        """Return the computation, in f32, its constants as buffers."""

    @abstractmethod
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """Return example inputs on the meta device, by name; dynamic sizes are only hints."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return what a runtime must know to give the inputs, as plain data."""

    @abstractmethod
    def cases(self, generator: np.random.Generator) -> tuple[FrontEndCase, ...]:
        """Return questions of several sizes with the answers of the model's own processor."""


__all__ = ["FrontEnd", "FrontEndCase"]
