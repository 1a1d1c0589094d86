"""The table of algorithms that choose Q4_0 values without data, and how a user's own ones join it.

In: an algorithm's name. Out: a `Quantizer`. Calibrated algorithms work on whole models and live above this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

from generic_export.errors import OptionError
from quant.blocks import GROUP, ZERO_POINT, Q4Blocks
from quant.imatrix import ImatrixQuantizer
from quant.protocol import InputStatistics, Quantizer

ENTRY_POINT_GROUP = "t2n_llm.quantizers"
DEFAULT_ALGORITHM = "search"

_LARGEST_SCALE = torch.finfo(torch.float16).max
_SMALLEST_INVERTIBLE = 1e-38


@dataclass(frozen=True)
class MinMax:
    """Signed maximum over -8: ggml's reference (`quantize_row_q4_0_ref`), bit for bit."""

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None = None) -> Q4Blocks:
        """See `Quantizer.quantize`; statistics are not looked at."""
        del statistics
        groups = weight.detach().to(torch.float32).unflatten(-1, (-1, GROUP))
        position = groups.abs().argmax(dim=-1, keepdim=True)
        exact = (groups.gather(-1, position) / -ZERO_POINT).clamp(-_LARGEST_SCALE, _LARGEST_SCALE)
        # ggml divides by the scale before that is rounded to float16. Scales whose inverse overflows are zero in float16.
        inverse = torch.where(exact.abs() > _SMALLEST_INVERTIBLE, 1.0 / exact, 0.0)
        q = (groups * inverse).add_(ZERO_POINT + 0.5).trunc_().clamp_(0, 15).to(torch.uint8)
        return Q4Blocks(q, exact.squeeze(-1).to(torch.float16))


BUILT_IN: Mapping[str, Quantizer] = {"min_max": MinMax(), "search": ImatrixQuantizer()}


def load_algorithms(table: str | None = None) -> dict[str, Quantizer]:
    """Return every algorithm by name: the built-in ones, those of installed packages, those of a table.

    Args:
        table: `module:attribute` of a dict from names to quantizers, or None. Packages declare theirs in the entry-point
            group `t2n_llm.quantizers`.

    Raises:
        OptionError: the table cannot be imported, something in it is no quantizer, or a name is taken.
    """
    algorithms = dict(BUILT_IN)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            found = point.load()
        except Exception as error:  # whatever the other package raises when it is imported
            raise OptionError(
                f"quantizer {point.name!r} of the entry point {point.value!r} cannot be loaded: {error}",
                "Repair or uninstall the package that declares it.",
            ) from error
        _add(algorithms, point.name, found, point.value)
    if table is not None:
        for name, quantizer in _load_table(table).items():
            _add(algorithms, name, quantizer, table)
    return algorithms


def find_algorithm(name: str, algorithms: Mapping[str, Quantizer]) -> Quantizer:
    """Return an algorithm of a table.

    Raises:
        OptionError: there is none of that name; the nearest is named.
    """
    if name not in algorithms:
        raise unknown_name("algorithm", name, algorithms)
    return algorithms[name]


def unknown_name(what: str, name: str, known: Mapping[str, Any] | tuple[str, ...]) -> OptionError:
    """Return the error for a name that is not in a table, with the nearest one as advice."""
    near = get_close_matches(name, list(known), n=1)
    listed = ", ".join(known)
    return OptionError(
        f"{what} {name!r} is unknown.", f"Did you mean {near[0]!r}? Known: {listed}." if near else f"Known: {listed}."
    )


def _load_table(table: str) -> Mapping[str, Any]:
    module_name, _, attribute = table.partition(":")
    if not module_name or not attribute:
        raise OptionError(f"{table!r} does not name a table of quantizers.", "Write it as module:attribute.")
    try:
        found = getattr(import_module(module_name), attribute)
    except Exception as error:  # importing runs the user's own code
        raise OptionError(
            f"the table of quantizers {table!r} cannot be loaded: {type(error).__name__}: {error}",
            "The module must be importable: install it, or set PYTHONPATH.",
        ) from error
    if not isinstance(found, Mapping):
        raise OptionError(f"{table}: a {type(found).__name__}, not a dict from names to quantizers.")
    return found


def _add(algorithms: dict[str, Quantizer], name: str, found: Any, origin: str) -> None:
    quantizer = found() if isinstance(found, type) else found
    if not isinstance(quantizer, Quantizer):
        raise OptionError(
            f"{origin}: {name!r} is a {type(quantizer).__name__} without a method quantize(weight, statistics).",
            "See quant.protocol.Quantizer.",
        )
    if name in algorithms:
        raise OptionError(f"{origin}: another quantizer already has the name {name!r}.", "Use another name.")
    algorithms[name] = quantizer
