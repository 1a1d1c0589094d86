"""Quantize the linear layers of a model during an export (`TractConfig.compress`).

In: a model. Out: a `with` block in which its linear layers hold `QTensor`s. The archive stores their blocks, and the check compares
tract with the quantized model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch import nn

from generic_export.compat import parameters_of
from generic_export.errors import OptionError
from quant import QTensor
from quant.stream import row_length

COMPRESSIONS = ("q4_0",)


@contextmanager
def quantized_linears(model: nn.Module, compress: str | None) -> Iterator[None]:
    """Quantize the weights of linear layers to Q4_0 with the data-free search, and restore the original weights afterwards.

    Weights tied to an embedding are not quantized, nor are weights whose rows are not a multiple of 32.

    Args:
        model: its parameters are replaced inside of the block.
        compress: "q4_0"; None changes nothing.

    Raises:
        OptionError: no layer can be quantized.
    """
    if compress is None:
        yield
        return
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in tables and row_length(tuple(module.weight.shape))
    ]
    if not layers:
        raise OptionError(
            f"compress={compress!r}: {type(model).__name__} has no linear layer with a multiple of 32 inputs.",
            "Omit compress.",
        )
    with ExitStack() as stack:
        made: dict[int, nn.Parameter] = {}  # tied layers share their blocks
        for module in layers:
            weight = module.weight
            if id(weight) not in made:
                made[id(weight)] = nn.Parameter(QTensor.from_float(weight), requires_grad=False)
            stack.enter_context(mock.patch.dict(parameters_of(module), weight=made[id(weight)]))
        yield


__all__ = ["COMPRESSIONS", "quantized_linears"]
