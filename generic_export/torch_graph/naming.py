"""Names: what each captured value is called, and how a name is written in `graph.nnef`.

Values are named after the module that makes them, as a person would: the result of `model.layers.0.mlp.up_proj`
bears that very path, an inner step of a module bears the path and the operator (`...self_attn.transpose_1`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.fx import Node

from generic_export.compat import schema_of
from generic_export.errors import OptionError
from generic_export.torch_graph.ir import Argument, FixedTensorList, TensorVariable, TorchModuleIRGraph

# docs/contributing/engine-facts.md#identifiers-and-literals: such identifiers break tract's expression parser.
_RESERVED_PREFIXES = ("true", "false", "inf")
_RESERVED_WORDS = frozenset(
    """
    graph fragment version extension external variable if else for in yield lengthof shape_of range_of
    tensor integer scalar logical string
    """.split()  # noqa: SIM905
)


def module_frame(node: Node, strip_prefix: str = "") -> tuple[str, str]:
    """Return the dotted path and the class name of the module whose forward made an FX node."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    kind_name = kind if isinstance(kind, str) else kind.__name__
    if path + "." == strip_prefix:
        return "", kind_name.rsplit(".", 1)[-1]
    return path.removeprefix(strip_prefix), kind_name.rsplit(".", 1)[-1]


def name_results(graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
    """Return the graph with each result named after the module that makes it.

    The one result of a leaf module that others read bears the module's path; others bear path and operator name.
    """
    names = _result_names(graph)

    def renamed(argument: Argument) -> Argument:
        if isinstance(argument, TensorVariable):
            return replace(argument, name=names.get(argument.name, argument.name))
        if isinstance(argument, FixedTensorList):
            return FixedTensorList(tuple(renamed(element) for element in argument))
        return tuple(renamed(element) for element in argument) if isinstance(argument, tuple) else argument

    ops = tuple(
        replace(
            op,
            args=renamed(op.args),
            kwargs={name: renamed(argument) for name, argument in op.kwargs.items()},
            outputs=renamed(op.outputs),
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, outputs=renamed(graph.outputs))


def _result_names(graph: TorchModuleIRGraph) -> dict[str, str]:
    module_results = _results_of_leaf_modules(graph)
    taken: set[str] = set()
    names: dict[str, str] = {}
    for op in graph.ops:
        outputs = [output for output in op.outputs if output is not None]
        short = schema_of(op.target).name.split("::")[-1].strip("_")
        for index, output in enumerate(outputs):
            suffix = f".{index}" if len(outputs) > 1 else ""
            is_module_result = module_results.get(op.module_path) == output.name
            base = op.module_path if is_module_result else f"{op.module_path or 'root'}.{short}{suffix}"
            names[output.name] = _unique(base, taken)
    return names


def _results_of_leaf_modules(graph: TorchModuleIRGraph) -> dict[str, str]:
    """Return, for each leaf module, the name of its result, when just one is read outside of it."""
    maker = {output.name: op.module_path for op in graph.ops for output in op.outputs if output is not None}
    leaves = set(maker.values()) - {path[:index] for path in maker.values() for index, c in enumerate(path) if c == "."}
    read_outside: dict[str, set[str]] = {}
    for op in graph.ops:
        for tensor in op.tensor_inputs():
            path = maker.get(tensor.name)
            if path and path != op.module_path:
                read_outside.setdefault(path, set()).add(tensor.name)
    for tensor in graph.outputs:
        if maker.get(tensor.name):
            read_outside.setdefault(maker[tensor.name], set()).add(tensor.name)
    return {path: next(iter(names)) for path, names in read_outside.items() if len(names) == 1 and path in leaves}


def _unique(name: str, taken: set[str]) -> str:
    candidate, suffix = name, 1
    while candidate in taken:
        candidate, suffix = f"{name}_{suffix}", suffix + 1
    taken.add(candidate)
    return candidate


def identifier(name: str) -> str:
    """Return `name` as an identifier that tract's parser accepts (docs/contributing/engine-facts.md#identifiers-and-literals)."""
    text = re.sub(r"[^A-Za-z0-9_]", "_", name)
    if not text or text[0].isdigit() or text in _RESERVED_WORDS or text.startswith(_RESERVED_PREFIXES):
        return f"v_{text}"
    return text


def _camel(dotted: str) -> str:
    words = [word for word in re.split(r"[^A-Za-z0-9]+", dotted) if word]
    return "".join(word if index == 0 else word[:1].upper() + word[1:] for index, word in enumerate(words))


class VariableNamingScheme(enum.StrEnum):
    """How the values of a graph are named. A member equals its text."""

    RAW = "raw"
    NATURAL_VERBOSE = "natural_verbose"
    NATURAL_VERBOSE_CAMEL = "natural_verbose_camel"
    NUMERIC = "numeric"


DEFAULT_VARNAME_SCHEME = VariableNamingScheme.NATURAL_VERBOSE

_SCHEMES: dict[str, Callable[[str, int], str]] = {
    VariableNamingScheme.NATURAL_VERBOSE: lambda dotted, _: identifier(dotted),
    VariableNamingScheme.NATURAL_VERBOSE_CAMEL: lambda dotted, _: identifier(_camel(dotted)),
    VariableNamingScheme.RAW: lambda dotted, _: identifier(dotted.rsplit(".", 1)[-1]),
    VariableNamingScheme.NUMERIC: lambda _, index: f"v{index}",
}

NAMING_SCHEMES: Sequence[str] = tuple(scheme.value for scheme in VariableNamingScheme)


class IdentifierAllocator:
    """Turns dotted names into unique NNEF identifiers, by one of the naming schemes.

    Args:
        scheme: `natural_verbose` (path and operator), `natural_verbose_camel` (the same in camel case), `raw` (operator
            only) or `numeric` (`v0`, `v1`, ...).
        reserved: identifiers already taken (inputs, outputs, symbols).

    Raises:
        OptionError: the scheme is unknown.
    """

    def __init__(self, scheme: str, reserved: Sequence[str]) -> None:
        if scheme not in _SCHEMES:
            raise OptionError(f"unknown naming scheme {scheme!r}.", f"Use one of {', '.join(NAMING_SCHEMES)}.")
        self._scheme = _SCHEMES[scheme]
        self._taken = set(reserved)
        self._next = 0

    def allocate(self, dotted: str) -> str:
        """Return a new identifier for the value with this dotted name."""
        base = self._scheme(dotted, self._next)
        self._next += 1
        return _unique(base, self._taken)
