"""What was observed of a running model: its calls, with their values.

In: nothing; `recorder.py` fills it. Out: `Recording`, read by whoever gathers pieces, fits axes or tries one again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from generic_export.debug.record.leaves import Layout
from generic_export.debug.record.store import Held, TensorStore
from generic_export.debug.records import Leaf
from generic_export.errors import CaptureError

logger = logging.getLogger(__name__)


class ObservationError(CaptureError):
    """A model cannot be recorded the way it is run."""


@dataclass(frozen=True)
class Call:
    """One execution of one module (or free function).

    Attributes:
        index: number of the call in the recording, in the order in which calls begin.
        set_index: which input set (which call of the root) it belongs to.
        path: as in `named_modules()`, "" for the root; `path:function` for a free function.
        class_name: class of the module, or name of the function.
        parent: `index` of the call that it happens in; None for a root.
        turn: how many calls of the same module the same set had before it.
        source: `file.py:line` where the forward is defined.
        inputs, outputs: its values.
        seconds: time PyTorch spent in it, its children included.
    """

    index: int
    set_index: int
    path: str
    class_name: str
    parent: int | None
    turn: int
    source: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    seconds: float = 0.0


@dataclass
class RecordedCall:
    """One call with its values.

    Attributes:
        call: the record of it.
        module: the module that was called; for a free function, a module that calls it.
        arguments, result: how its values are laid out.
        held: what is kept of each input tensor, by leaf name (states that were empty: tensors of length 0).
        results: the same of each output tensor.
        after: of each input that the call wrote to, as it was afterwards.
        extra: written inputs that are not outputs as well.
        constants: outputs that are no tensors, by leaf name.
    """

    call: Call
    module: nn.Module
    arguments: Layout
    result: Layout
    held: dict[str, Held]
    results: dict[str, Held]
    after: dict[str, Held]
    extra: tuple[str, ...]
    constants: dict[str, Any]

    @property
    def whole(self) -> bool:
        """Whether every tensor is there."""
        return all(held.tensor is not None for group in self.groups() for held in group.values())

    def groups(self) -> tuple[dict[str, Held], ...]:
        """Return the three groups of tensors."""
        return self.held, self.results, self.after

    def result_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and sizes of each tensor that a graph of this call gives back."""
        for leaf in self.call.outputs:
            if leaf.name in self.results:
                yield leaf.name, leaf.sizes
        for name in self.extra:
            yield f"out_{name}", self.after[name].shape

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a graph of this call gives back: outputs, then written inputs."""
        found = {name: held.tensor for name, held in self.results.items()}
        found |= {f"out_{name}": self.after[name].tensor for name in self.extra}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors that go in."""
        return {name: held.tensor for name, held in self.held.items() if held.tensor is not None}


@dataclass
class Recording:
    """All that was observed.

    Attributes:
        model: the model; it is as it was.
        calls: in the order in which they began; those of a set that failed are not among them.
        paths: first path of each module that could be called, and its further ones.
        warnings: what was noticed.
    """

    model: nn.Module
    store: TensorStore
    calls: list[RecordedCall] = field(default_factory=list)
    paths: dict[nn.Module, tuple[str, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def roots(self) -> list[RecordedCall]:
        """Return the outermost calls: one per input set."""
        return [recorded for recorded in self.calls if recorded.call.parent is None]

    def warn(self, message: str) -> None:
        """Note something once."""
        if message not in self.warnings:
            self.warnings.append(message)
            logger.warning("%s", message)

    def unexercised(self) -> tuple[str, ...]:
        """Return the paths of modules that no set reaches, without those inside one that is listed."""
        called = {id(recorded.module) for recorded in self.calls}
        found = [
            paths[0]
            for module, paths in self.paths.items()
            if id(module) not in called and _has_forward(module) and paths[0]
        ]
        return tuple(p for p in found if not any(p.startswith(f"{other}.") for other in found))


def all_paths(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    paths: dict[nn.Module, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module] = (*paths.get(module, ()), path)
    return paths


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


__all__ = ["Call", "ObservationError", "RecordedCall", "Recording", "all_paths"]
