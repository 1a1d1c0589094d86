"""A ScriptModule as a plain `nn.Module`: its graph interpreted, its parameters and submodules under their own names.

In: a ScriptModule, loaded or made here. Out: a module that torch.export captures like any other; tensors are shared, not copied.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

from generic_export.compat import JitBlock, JitGraph, JitNode, JitValue, buffers_of, children_of, parameters_of
from generic_export.torch_graph.nested import forward_signature
from generic_export.torch_graph.source_lines import SOURCE_KEY, NotesSources
from generic_export.torchscript.interpreter import Interpreter, ModuleRef
from generic_export.torchscript.schema import source_of, steps_of

_TensorKey = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
_Tensors = dict[_TensorKey, tuple[str, str]]

# Modules without a forward: no call has their names.
_CONTAINERS = frozenset({"ModuleList", "ModuleDict"})
_Steps = Sequence[tuple[str, str]]


class Scope(nn.Module):
    """Stands for one module of the script: holds its tensors and lends its name to what is called in it."""

    def forward(self, call: Callable[[], Any]) -> Any:
        """Call a function inside of this module."""
        return call()


class InterpretedModule(NotesSources, nn.Module):
    """A ScriptModule whose graph is run node by node; made by `interpreted`.

    Attributes:
        script: the ScriptModule.
        script_graph: its graph, with the calls of submodules inlined.
    """

    script: torch.jit.ScriptModule
    script_graph: JitGraph
    _origin: torch.jit.ScriptModule
    _constants: dict[int, tuple[Any, Any]]
    _paths: dict[int, str]

    def __getattr__(self, name: str) -> Any:
        """Return what the script has beside tensors and modules: its numbers, strings and lists."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_origin" not in self.__dict__:
                raise
            return getattr(self._origin, name)

    def run_script(self, arguments: tuple[Any, ...], watched: dict[int, list[Any]] | None = None) -> Any:
        """Run the graph; see `Interpreter`. What the forward writes into the module's attributes lasts as long as the run."""
        run = Interpreter(self, watched if watched is not None else {})
        result = run.run(self.script_graph, arguments)
        if run.written and torch.compiler.is_exporting():
            names = ", ".join(sorted(f"{path}.{name}" if path else name for path, name in run.written))
            warnings.warn(
                f"{type(self).__name__}: the forward writes into {names}, which the archive does not keep; export a module "
                "that takes and returns it, such as a wrapper around the script's own submodule.",
                stacklevel=2,
            )
        return result

    def attribute(self, path: str, name: str) -> Any:
        """Return an attribute of the module at a path; see `Home`."""
        owner = self.get_submodule(path)
        for tensors in (parameters_of(owner), buffers_of(owner)):
            if name in tensors:
                return tensors[name]
        if name in children_of(owner):
            return ModuleRef(f"{path}.{name}" if path else name)
        value = getattr(_submodule(self.script, path), name)
        return list(value) if isinstance(value, list) else value

    def constant(self, value: JitValue) -> tuple[Any, Any]:
        """Return a constant of the graph; see `Home`."""
        if value.unique() not in self._constants:
            return value.toIValue(), None
        standing, number = self._constants[value.unique()]
        if isinstance(standing, torch.Tensor):
            return standing, number
        path, name = standing
        return self.attribute(path, name), number

    def owner_of(self, value: JitValue) -> str | None:
        """Return the path of the module that a value is a tensor of; None for other values."""
        standing, _ = self._constants.get(value.unique(), (None, None))
        if isinstance(standing, tuple):
            return standing[0] or None
        names = []
        node = value.node()
        while node.kind() == "prim::GetAttr":
            names.append(node.s("name"))
            node = node.input().node()
        return ".".join(reversed(names[1:])) if names and node.kind() == "prim::Param" else None

    def placed(self, node: JitNode, call: Callable[[], Any]) -> Any:
        """Call a function in the scope of a module and with its source line noted; see `Home`."""
        scope = self.get_submodule(next((self._paths.get(value.unique(), "") for value in node.outputs()), ""))
        with fx_traceback.annotate({SOURCE_KEY: source_of(node)}):
            return scope(call) if isinstance(scope, Scope) else call()

    def method(self, path: str, name: str) -> Callable[..., Any]:
        """Return a method of the script's module at a path; see `Home`."""
        found: Callable[..., Any] = getattr(_submodule(self.script, path), name)
        return found


def interpreted(
    script: torch.jit.ScriptModule,
    *,
    named_like: torch.jit.ScriptModule | None = None,
    graph: JitGraph | None = None,
) -> InterpretedModule:
    """Return a ScriptModule as a plain module.

    Args:
        script: the module; it is not changed.
        named_like: the module that it was before it was frozen: gives tensors and submodules their names.
        graph: the graph to run, as it is; None for the forward's, with calls inlined.
    """
    origin = script if named_like is None else named_like
    signature = forward_signature(origin)

    def forward(self: InterpretedModule, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        return self.run_script(tuple(bound.arguments.values())[1:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    name = origin.original_name or type(origin).__name__
    module: InterpretedModule = type(name, (InterpretedModule,), {"forward": forward})()
    _fill(module, origin, {})
    module.__dict__["script"] = script
    module.__dict__["script_graph"] = script.inlined_graph if graph is None else graph
    module.__dict__["_origin"] = origin
    module.__dict__["_constants"] = _named_constants(module, module.script_graph)
    module.__dict__["_paths"] = scoped_paths(module, module.script_graph, module.owner_of)
    return module.eval()


def _submodule(script: torch.jit.ScriptModule, path: str) -> Any:
    for step in path.split(".") if path else ():
        script = getattr(script, step)
    return script


def _fill(scope: nn.Module, script: nn.Module, known: dict[_TensorKey, Any]) -> None:
    """Put the tensors and submodules of a script into a plain module; tensors that are tied there are tied here."""
    for name, parameter in parameters_of(script).items():
        if parameter is not None:
            parameters_of(scope)[name] = _once(
                known, parameter, lambda t: nn.Parameter(t.detach(), requires_grad=False)
            )
    for name, buffer in buffers_of(script).items():
        if buffer is not None:
            buffers_of(scope)[name] = _once(known, buffer, lambda t: t.detach())
    for name, child in script.named_children():
        kind = getattr(child, "original_name", "") or type(child).__name__
        inner = type(kind, (Scope,), {})()
        children_of(scope)[name] = inner
        _fill(inner, child, known)


def _once(known: dict[_TensorKey, Any], tensor: torch.Tensor, made: Callable[[torch.Tensor], Any]) -> Any:
    return known.setdefault(_key(tensor), made(tensor)) if tensor.device.type != "meta" else made(tensor)


def _key(tensor: torch.Tensor) -> _TensorKey:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _named_constants(module: InterpretedModule, graph: JitGraph) -> dict[int, tuple[Any, Any]]:
    """Find the constant tensors of a graph: those that are the module's, others become its buffers, numbers stay."""
    known: _Tensors = {}
    for path, scope in module.named_modules():
        for name, own in (*parameters_of(scope).items(), *buffers_of(scope).items()):
            if own is not None and own.numel():
                known.setdefault(_key(own), (path, name))
    found: dict[int, tuple[Any, Any]] = {}
    for value in _constant_tensors(graph):
        tensor: Any = value.toIValue()
        if _key(tensor) in known:
            found[value.unique()] = known[_key(tensor)], None
        elif tensor.ndim == 0:
            found[value.unique()] = tensor.detach(), tensor.item()
        else:
            name = _free_name(module, value.debugName())
            buffers_of(module)[name] = tensor.detach()
            found[value.unique()] = ("", name), None
    return found


def _free_name(module: nn.Module, debug_name: str) -> str:
    base = debug_name.removeprefix("self.").replace(".", "_")
    base = f"constant_{base}" if base.isdigit() else base
    taken = {*buffers_of(module), *parameters_of(module), *children_of(module)}
    return next(name for name in (base, *(f"{base}_{n}" for n in range(len(taken) + 1))) if name not in taken)


def _constant_tensors(owner: JitGraph | JitBlock) -> Iterator[JitValue]:
    for node in owner.nodes():
        if node.kind() == "prim::Constant" and isinstance(node.output().toIValue(), torch.Tensor):
            yield node.output()
        for block in node.blocks():
            yield from _constant_tensors(block)


# Which module each node of a TorchScript graph belongs to: inlining keeps the names of modules that were called, and
# no more.
# In: a tree of modules and a graph. Out: a dotted path per node. `layers.0.norm` is called `0.norm` there, since
# nobody calls a ModuleList: the tensors that a node reads, and the nodes before it, tell which `0` is meant.
def scoped_paths(root: nn.Module, graph: JitGraph, owner_of: Callable[[JitValue], str | None]) -> dict[int, str]:
    """Return the path of the module that made a value, for the values of a graph, by their numbers.

    Args:
        root: has a module per module of the script, classes named alike.
        graph: the graph, with calls inlined.
        owner_of: gives the path of the module that a value is a tensor of; None for other values.
    """
    found: dict[int, str] = {}
    known: dict[_Steps, list[str]] = {}
    before = ""
    for node in _every_node(graph):
        steps = steps_of(node)
        candidates = known.setdefault(steps, list(_candidates(root, "", steps)) or _shortened(root, steps))
        read = {owner for value in node.inputs() if (owner := owner_of(value)) is not None}
        before = _likeliest(candidates, read, before)
        found |= {value.unique(): before for value in node.outputs()}
    return found


def _every_node(owner: JitGraph | JitBlock) -> Iterator[JitNode]:
    """Yield the nodes that compute something, in order."""
    for node in owner.nodes():
        if node.kind() not in {"prim::Constant", "prim::GetAttr"}:
            yield node
        for block in node.blocks():
            yield from _every_node(block)


def _candidates(module: nn.Module, path: str, steps: _Steps) -> Iterator[str]:
    """Yield the paths that steps may mean: between two steps there may be containers."""
    if not steps:
        yield path
        return
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if (name, type(child).__name__) == steps[0]:
            yield from _candidates(child, inner, steps[1:])
        if type(child).__name__ in _CONTAINERS:
            yield from _candidates(child, inner, steps)


def _shortened(root: nn.Module, steps: _Steps) -> list[str]:
    """Return the candidates of the innermost call that can be found: freezing may leave steps of no module."""
    while steps:
        steps = steps[:-1]
        candidates = list(_candidates(root, "", steps))
        if candidates:
            return candidates
    return [""]


def _likeliest(candidates: Sequence[str], read: set[str], before: str) -> str:
    """Return the candidate whose tensors are read, else the one nearest to the module of the node before."""
    if len(candidates) == 1:
        return candidates[0]
    owning = [candidate for candidate in candidates if any(_is_within(owner, candidate) for owner in read)]
    near = owning or candidates
    return max(near, key=lambda candidate: _shared_steps(candidate, before))


def _shared_steps(left: str, right: str) -> int:
    pairs = zip(left.split("."), right.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


__all__ = ["InterpretedModule", "Scope", "interpreted"]
