"""Arguments of calls, in the forms in which users write them, and a model recorded on them.

In: a model and input sets. Out: a `Recording`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from generic_export.diagnose.record.recording import Recording, observe
from generic_export.errors import OptionError
from generic_export.export import evaluation_mode

InputSet = Mapping[str, Any] | tuple[Any, ...]
"""Keywords, or positionals, or `(positionals, keywords)`."""


def record(
    model: nn.Module, input_sets: Sequence[InputSet] | None, *, functions: bool = False, budget: str | int = "2GiB"
) -> Recording:
    """Run a model in eval mode on input sets and record it.

    Raises:
        OptionError: there are no input sets.
        UnknownStateError, ObservationError: the model cannot be recorded.
    """
    if not input_sets:
        raise OptionError("no input sets were given.", "Give two or more calls of different sizes, or a recording.")
    with (
        observe(model, max_calls=len(input_sets), budget=budget, functions=functions) as recording,
        evaluation_mode(model),
        torch.no_grad(),
    ):
        for given in input_sets:
            args, kwargs = as_call(given)
            model(*args, **kwargs)
    return recording


def as_call(given: InputSet) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an input set as positional and keyword arguments."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return given[0], dict(given[1])
    if isinstance(given, tuple):
        return given, {}
    raise OptionError(
        f"an input set is a {type(given).__name__}.",
        "Give a dict of keywords, a tuple, or a pair of a tuple and a dict.",
    )


__all__ = ["InputSet", "as_call", "record"]
