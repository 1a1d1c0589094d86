"""Buffers that a forward writes to (a counter, a running mean): as they were once a block is left.

In: a module. Out: nothing; whoever runs the module again sees what the first run saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from generic_export.compat import buffers_of


@contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Let a block run a module; buffers that it wrote to or replaced are as before when it is left."""
    kept = [
        (inner, name, buffer, buffer.clone())
        for inner in model.modules()
        for name, buffer in buffers_of(inner).items()
        if buffer is not None and not buffer.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for inner, name, buffer, values in kept:
                if not torch.equal(buffer, values):  # not by its version: a norm's kernel writes without counting
                    buffer.copy_(values)
                if not isinstance(inner, torch.jit.ScriptModule) and buffers_of(inner).get(name) is not buffer:
                    buffers_of(inner)[name] = buffer


__all__ = ["buffers_put_back"]
