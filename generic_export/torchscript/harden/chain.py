"""`harden_jit_for_export`: the stages in order, on a copy that takes the place of the caller's module when it is whole.

In: a ScriptModule and example inputs. Out: a ScriptModule of one graph, specialised for them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial

import torch

from generic_export.compat import become, wrapped_script
from generic_export.errors import OptionError, first_line
from generic_export.torchscript.harden.edits import Arguments, nodes_of
from generic_export.torchscript.harden.passes import (
    CALLS,
    fold_constant_ifs,
    fold_constant_scalar_arithmetic,
    fold_data_dependent_ifs,
    fold_tuple_index_through_tuple_construct,
    fold_tuple_unpack_through_tuple_construct,
    inline_unresolvable_submodules,
    replace_size_calls_with_constants,
    strip_assertion_ifs,
    strip_prim_data,
)

Diagnostics = MutableMapping[str, int | bool]
"""Count of changes per pass; `froze`: whether freezing worked."""

_Pass = Callable[[torch.jit.ScriptModule, Arguments], int]


def harden_jit_for_export(
    model: torch.jit.ScriptModule,
    args: Arguments,
    *,
    freeze: bool = True,
    diagnostics: Diagnostics | None = None,
) -> torch.jit.ScriptModule:
    """Specialise the graph of a ScriptModule for example inputs, in place.

    Args:
        model: the module, in eval mode if it is to be frozen (`torch.jit.freeze` refuses others; a warning says so, and
            its calls are inlined instead).
        args: example inputs of its forward; a lone tensor stands for a tuple of one.
        freeze: freeze the module first: parameters become constants of the graph.
        diagnostics: filled with the count of changes per pass, with `froze`, and with `inline_unresolvable_submodules`
            when that ran.

    Returns:
        The same module.

    Raises:
        OptionError: `model` is no ScriptModule, or its forward does not take these arguments.
        CaptureError: the model raises on the example inputs, or does what only TorchScript can.
    """
    hardened = hardened_copy(model, args, freeze=freeze, diagnostics=diagnostics)
    become(model, hardened)
    return model


def hardened_copy(
    model: torch.jit.ScriptModule,
    args: Arguments,
    *,
    freeze: bool = True,
    diagnostics: Diagnostics | None = None,
    keep_sizes: bool = False,
) -> torch.jit.ScriptModule:
    """Return a specialised copy of a ScriptModule; see `harden_jit_for_export`.

    Args:
        model, args, freeze, diagnostics: see there.
        keep_sizes: decide nothing by the size of an axis: sizes may differ from the example's.
    """
    found = diagnostics if diagnostics is not None else {}
    for stage in stages(model, args, freeze=freeze, keep_sizes=keep_sizes):
        found[stage.name] = stage.changes
    return stage.script


@dataclass(frozen=True)
class HardeningStage:
    """What one stage did.

    Attributes:
        name: of the pass, or `froze`.
        changes: how many it made; for `froze`, whether freezing worked.
        script: the script behind it; later stages edit the same one.
    """

    name: str
    changes: int | bool
    script: torch.jit.ScriptModule


def stages(
    model: torch.jit.ScriptModule, args: Arguments, *, freeze: bool = True, keep_sizes: bool = False
) -> Iterator[HardeningStage]:
    """Run the stages on a copy of a script, yielding each when it is done; see `hardened_copy`."""
    if not isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            f"model is a {type(model).__name__}, not a ScriptModule.",
            "Load one with torch.jit.load, or script the module.",
        )
    frozen = _frozen(model) if freeze else None
    copy = frozen if frozen is not None else _copied(model)
    yield HardeningStage("froze", frozen is not None, copy)
    if frozen is None and nodes_of(copy.graph, *CALLS, "prim::GetAttr"):
        yield HardeningStage("inline_unresolvable_submodules", inline_unresolvable_submodules(copy), copy)
    for name, run in stage_two(keep_sizes=keep_sizes).items():
        yield HardeningStage(name, run(copy, args), copy)


def stage_two(*, keep_sizes: bool = False) -> dict[str, _Pass]:
    """Return the passes behind freezing, in the order that they run in."""
    return {
        "replace_size_calls_with_constants": partial(replace_size_calls_with_constants, ranks_only=keep_sizes),
        "fold_constant_scalar_arithmetic": fold_constant_scalar_arithmetic,
        "fold_constant_ifs": fold_constant_ifs,
        "fold_tuple_index_through_tuple_construct": fold_tuple_index_through_tuple_construct,
        "fold_tuple_unpack_through_tuple_construct": fold_tuple_unpack_through_tuple_construct,
        "strip_prim_data": strip_prim_data,
        "strip_assertion_ifs": strip_assertion_ifs,
        "fold_data_dependent_ifs": partial(fold_data_dependent_ifs, keep_sizes=keep_sizes),
    }


def _frozen(model: torch.jit.ScriptModule) -> torch.jit.ScriptModule | None:
    """Return the module frozen; None, after a warning, when PyTorch cannot."""
    if not hasattr(model, "training"):
        return _copied(model)  # freezing took its mode away: it is frozen already
    try:
        # Numerics as they are: folding a convolution into a batch norm would give other names and other roundings.
        frozen = torch.jit.freeze(model, optimize_numerics=False)
    except RuntimeError as error:
        warnings.warn(
            f"{model.original_name} cannot be frozen ({first_line(error)}); its submodules are inlined instead.",
            stacklevel=4,
        )
        return None
    # freeze's own wrapper does not know the submodules that are left: those whose attributes are written to.
    return wrapped_script(frozen)


def _copied(model: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Return a copy with graphs of its own, which may be edited."""
    copy: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(model.save_to_buffer()))
    return copy


__all__ = ["Diagnostics", "HardeningStage", "harden_jit_for_export", "hardened_copy", "stage_two", "stages"]
