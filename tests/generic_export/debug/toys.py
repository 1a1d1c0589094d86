"""Small modules, one per thing that a model may do to whoever records it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Doubled(nn.Module):
    """One layer between two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * 2.0


class SharedTwice(nn.Module):
    """Calls one module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.again = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.relu(self.block(torch.relu(self.block(x)))))


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class SomeUnused(nn.Module):
    """Has a module that it never calls, and one that it calls for long inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if x.shape[0] > 4 else x


class Containers(nn.Module):
    """Layers in a list, in a dict, in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 2)})
        self.blocks = nn.ModuleList([nn.ModuleList([nn.LayerNorm(4)])])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        x = self.blocks[0][0](x)
        return self.heads["a"](x), self.heads["b"](x)


@dataclass
class Answer:
    """A result with a name for everything, one of them absent."""

    hidden: torch.Tensor
    extra: tuple[torch.Tensor | None, torch.Tensor]
    count: int = 3
    label: str = "label"


class Structured(nn.Module):
    """Returns a dataclass of nested tuples, None and constants."""

    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(x + 1.0, (None, x * 2.0))


class SaysItsLength(nn.Module):
    """Returns a number that depends on the size of its input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1.0, x.shape[0]


class KeywordsAndRest(nn.Module):
    """Has every kind of parameter."""

    def forward(
        self, x: torch.Tensor, *rest: torch.Tensor, scale: float = 2.0, shift: torch.Tensor | None = None, **more: Any
    ) -> torch.Tensor:
        for other in rest:
            x = x + other
        x = x * scale
        if shift is not None:
            x = x + shift
        return x - more["less"] if "less" in more else x


class Growing:
    """A cache of a class that nobody knows."""

    def __init__(self, past: torch.Tensor | None = None) -> None:
        self.past = past


class UsesCache(nn.Module):
    """Appends to the cache that it is given, or to a new one that it returns."""

    def forward(self, x: torch.Tensor, cache: Growing | None = None) -> Any:
        made = cache if cache is not None else Growing()
        made.past = x if made.past is None else torch.cat([made.past, x], dim=0)
        total = made.past.sum(0, keepdim=True) + x
        return total if cache is not None else (total, made)


class HandsBack(nn.Module):
    """Returns its input as it is."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x + 1.0


class WritesToInput(nn.Module):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return x * 2.0


class CallsWriter(nn.Module):
    """Has a child that changes what it is given, and relies on it."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = WritesToInput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = x.clone()
        return self.writer(work) + work


class Noise(nn.Module):
    """Adds random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class WithDropout(nn.Module):
    """Random in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


class Raises(nn.Module):
    """Fails inside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = RaisesInside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class RaisesInside(nn.Module):
    """Fails for long inputs; the message is meant to mislead whoever looks for words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            raise ValueError("please stop: too long")
        return x + 1.0


class RankMatters(nn.Module):
    """Calls its child with tensors of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x)[0])


def halved(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x / by


class CallsFunction(nn.Module):
    """Calls a function of its own file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halved(x, by=4.0) + 1.0


class Mask(nn.Module):
    """Is given a mask whose width is the sum of two other sizes."""

    def forward(self, x: torch.Tensor, past: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([past, x], dim=0)
        return (x @ whole.transpose(0, 1) + mask) @ whole


class FailsAloneOnly(nn.Module):
    """Its own code has a fault, its child has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + torch.linalg.ldl_factor_ex(y.transpose(0, 1) @ y)[0].sum()  # own code


class Dies(nn.Module):
    """Ends the process that captures it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return x + 1.0


class Hangs(nn.Module):
    """Never ends when it is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            import time

            time.sleep(600)
        return x + 1.0


class EatsMemory(nn.Module):
    """Takes a lot of memory when it is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            import time

            kept = bytearray(b"x" * (1 << 29))
            time.sleep(5)
            del kept
        return x + 1.0
