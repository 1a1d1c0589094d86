"""TorchScript front end: modules that are ScriptModules, or hold some, as modules that `tracer.py` captures.

In: a module and example arguments. Out: the same module with every script interpreted; what is captured is the same IR, with
modules recursed, names kept and the script's own source lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.compat import children_of
from generic_export.torch_graph.nested import FlatCall, forward_signature
from generic_export.torchscript.harden.chain import hardened_copy
from generic_export.torchscript.module import InterpretedModule, interpreted

_Arguments = tuple[Any, ...]


@contextmanager
def plain_modules(
    model: nn.Module,
    args: _Arguments,
    kwargs: Mapping[str, Any],
    *,
    harden: bool = True,
    keep_sizes: bool = False,
) -> Iterator[nn.Module]:
    """Yield a module without ScriptModules: `model` itself, whose scripts are interpreted for the length of the block.

    Args:
        model: in eval mode; it comes back as it was.
        args, kwargs: example arguments.
        harden: specialise the scripts' graphs for the arguments, see `harden_jit_for_export`.
        keep_sizes: hardening decides nothing by the size of an axis.

    Raises:
        T2NError: a script cannot be specialised for these arguments.
    """
    if isinstance(model, torch.jit.ScriptModule):
        yield _plain(model, [_positional(model, args, kwargs)], harden=harden, keep_sizes=keep_sizes)
        return
    scripts = _outermost_scripts(model)
    if not scripts:
        yield model
        return
    calls = _recorded_calls(model, args, kwargs, scripts) if harden else {}
    plain = {
        id(script): _plain(script, calls.get(id(script), []), harden=harden, keep_sizes=keep_sizes)
        for script in scripts
    }
    with _scripts_replaced(model, plain):
        yield model


def _plain(
    script: torch.jit.ScriptModule, calls: list[_Arguments], *, harden: bool, keep_sizes: bool
) -> InterpretedModule:
    """Return a script interpreted; one that is called twice is not specialised: the calls may differ."""
    if not harden or len(calls) != 1:
        return interpreted(script)
    return interpreted(hardened_copy(script, calls[0], keep_sizes=keep_sizes), named_like=script)


def _positional(script: torch.jit.ScriptModule, args: _Arguments, kwargs: Mapping[str, Any]) -> _Arguments:
    if not kwargs:
        return args
    bound = forward_signature(script).bind(script, *args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())[1:]


def _outermost_scripts(module: nn.Module) -> list[torch.jit.ScriptModule]:
    """Return the ScriptModules below a plain module, each once, not those inside of other ScriptModules."""
    found: dict[int, torch.jit.ScriptModule] = {}
    for child in module.children():
        if isinstance(child, torch.jit.ScriptModule):
            found[id(child)] = child
        else:
            found |= {id(script): script for script in _outermost_scripts(child)}
    return list(found.values())


class _Recorded(nn.Module):
    """A script that notes what it is called with; it has the script's attributes."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.__dict__["script"] = script
        self.calls: list[_Arguments] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(_positional(self.script, args, kwargs))
        return self.script(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["script"], name)


def _recorded_calls(
    model: nn.Module, args: _Arguments, kwargs: Mapping[str, Any], scripts: list[torch.jit.ScriptModule]
) -> dict[int, list[_Arguments]]:
    """Run the model once and return what each of its scripts is called with."""
    recorded = {id(script): _Recorded(script) for script in scripts}
    call = FlatCall.of(model, args, kwargs)
    given, named = call.arguments([tensor.clone() for tensor in call.tensors])  # a forward may write to its inputs
    with _scripts_replaced(model, recorded), torch.no_grad():
        model(*given, **named)
    return {key: recorder.calls for key, recorder in recorded.items()}


@contextmanager
def _scripts_replaced(model: nn.Module, replacements: Mapping[int, nn.Module]) -> Iterator[None]:
    """Put other modules in the places of a module's scripts for the length of a block."""
    with ExitStack() as stack:
        for parent in list(model.modules()):
            if not isinstance(parent, torch.jit.ScriptModule):
                stack.enter_context(_children_replaced(parent, replacements))
        yield


def _children_replaced(parent: nn.Module, plain: Mapping[int, nn.Module]) -> Any:
    replaced = {
        name: plain[id(child)]
        for name, child in children_of(parent).items()
        if child is not None and id(child) in plain
    }
    return mock.patch.dict(children_of(parent), replaced)


__all__ = ["plain_modules"]
