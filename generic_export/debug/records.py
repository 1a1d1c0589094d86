"""What is known of pieces and of what came of them: plain frozen records.

In: nothing; the rest of this folder fills them. Out: what `diagnosis.py` holds together.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from generic_export.compare.comparison import Comparison


class Outcome(enum.Enum):
    """How it went with a piece."""

    OK = "ok"
    FAILED = "failed"
    COVERED = "covered"  # not tried: part of something that passed
    NOT_EXERCISED = "not exercised"  # no input set reaches it
    NOT_TRIED = "not tried"  # left out by depth, `only`, or an interruption

    def __str__(self) -> str:
        return self.value


class Stage(enum.Enum):
    """The room in which an attempt ended, in their order."""

    CAPTURE = "capture"
    TRANSLATE = "translate"
    WRITE = "write"
    LOAD = "load"
    RUN = "run"
    COMPARE = "compare"

    def __str__(self) -> str:
        return self.value


class LeafKind(enum.Enum):
    """What one value of a call is."""

    TENSOR = "tensor"
    CONSTANT = "constant"  # int, float, bool, str, dtype: part of the signature
    NONE = "none"
    OPAQUE = "opaque"  # an object that is handed on as it is

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Leaf:
    """One value that goes into a call or comes out of it.

    Attributes:
        name: dotted path: `hidden_states`, `position_embeddings.0`, `past_key_values.key_3`.
        kind: what it is.
        dtype: element type of a tensor, such as `float32`; "" otherwise.
        sizes: of a tensor, in this call.
        axes: the same sizes as text in named symbols (`B`, `S+P`, `64`); empty until axes are inferred.
        value: a constant as text.
        written: the call writes to it (an input tensor changed in place, a state that grew).
        alias_of: for an output that is an input handed back unchanged, the name of that input.
    """

    name: str
    kind: LeafKind
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    value: str = ""
    written: bool = False
    alias_of: str = ""

    def __str__(self) -> str:
        if self.kind is LeafKind.TENSOR:
            sizes = ", ".join(self.axes or map(str, self.sizes))
            return f"{self.name}: {self.dtype}[{sizes}]"
        return f"{self.name}={self.value or 'None'}"


@dataclass(frozen=True)
class Piece:
    """All calls that look alike: same class, configuration, parameter shapes, inputs and outputs.

    Attributes:
        key: identifies it in this recording and in later ones of the same model.
        class_name: class of the module, or name of the function.
        qualified_name: with its Python module.
        path: the member that stands for all, "" for the root.
        paths: all members, in execution order; the same module under further names included.
        depth: 0 for the root.
        source: `file.py:line` where the forward is defined.
        inputs, outputs: values of the call that stands for all, with named axes.
        attributes: configuration that tells it from other pieces of its class.
        parameters: name, element type and shape of each parameter, `weight: float32[64, 64]`.
        tied: groups of parameter names that are one tensor.
        parameter_count: numbers in its parameters and buffers.
        sets: the input sets that reach the member that stands for all.
        calls: calls of all members.
        parents, children: keys of pieces.
        order: place in the execution order.
        notes: what was noticed while recording (train mode, in-place writes, random results).
    """

    key: str
    class_name: str
    qualified_name: str
    path: str
    paths: tuple[str, ...]
    depth: int
    source: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    attributes: tuple[tuple[str, str], ...] = ()
    parameters: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    parameter_count: int = 0
    sets: tuple[int, ...] = ()
    calls: int = 1
    parents: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    order: int = 0
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """`32 x LlamaAttention`, or the class alone when there is one."""
        return f"{len(self.paths)} x {self.class_name}" if len(self.paths) > 1 else self.class_name


@dataclass(frozen=True)
class ErrorRecord:
    """Why an attempt failed.

    Attributes:
        kind: class of the exception.
        message: one line.
        hint: what to do next, or "".
        detail: the whole account (traceback without machine paths), for whoever wants it.
    """

    kind: str
    message: str
    hint: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Verdict:
    """What came of one piece.

    Attributes:
        key: the piece.
        path: the member that was tried.
        outcome: how it went.
        stage: where it failed; the last stage reached when it did not; None when it was not tried.
        isolated: its children were replaced by what they returned when recorded: only its own code was tried.
        error: why it failed.
        operator: the guilty operator (`aten.foo.default`), or "".
        module_path: the module whose forward calls it, relative to the root.
        source: `file.py:line` of the guilty line in the model's code, or "".
        unsupported: every operator of the piece that has no translation, with its source line.
        metrics: a record per output and input set, once the comparison is reached.
        seconds: of the attempt.
        peak_rss: bytes that the attempt's processes held at most, beyond what the caller held already.
        stage_seconds: seconds per stage, by the stage's name.
        engine_nodes: nodes of the engine's optimised graph, or None.
        suggestions: options that make it pass, or hints.
        notes: what else was noticed.
        repro_path: folder of the stand-alone reproduction, or "".
        cached: taken over from an earlier run.
    """

    key: str
    path: str
    outcome: Outcome
    stage: Stage | None = None
    isolated: bool = False
    error: ErrorRecord | None = None
    operator: str = ""
    module_path: str = ""
    source: str = ""
    unsupported: tuple[str, ...] = ()
    metrics: tuple[Comparison, ...] = ()
    seconds: float = 0.0
    peak_rss: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    engine_nodes: int | None = None
    suggestions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    repro_path: str = ""
    cached: bool = False

    @property
    def failed(self) -> bool:
        """Whether it was tried and failed."""
        return self.outcome is Outcome.FAILED

    @property
    def worst(self) -> Comparison | None:
        """The comparison furthest beyond (or nearest to) what is allowed."""
        return max(self.metrics, key=lambda each: each.share_of_allowed, default=None)


def reached(start: Iterable[str], beyond: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield some keys and all that can be reached from them, each once."""
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            yield key
            waiting.extend(beyond(key))


@dataclass(frozen=True)
class Axis:
    """One dynamic axis.

    Attributes:
        leaf: input of the root, such as `input_ids`.
        axis: its number.
        size: as text in named symbols: `S`, `S+P`.
        sizes: what it was in each input set.
    """

    leaf: str
    axis: int
    size: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class AxisReport:
    """The symbolic sizes of a recording.

    Attributes:
        symbols: each symbol and its size in each input set (None where the set does not tell).
        axes: every dynamic axis of the root's inputs.
        warnings: axes that are 0 or 1 everywhere, matches by accident, sets of equal shapes.
    """

    symbols: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
    axes: tuple[Axis, ...] = ()
    warnings: tuple[str, ...] = ()


# Frozen dataclasses as plain data for JSON, and back by their annotations.
# In: dataclasses of enums, tuples, mappings, numbers and text. Out: what `json` writes; infinities are text.
def plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


def built(kind: Any, plain: Any) -> Any:
    """Return plain data as a value of a type annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if plain is None else built(inner, plain)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: built(hints[name], item) for name, item in plain.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(plain)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(built(arguments[0], item) for item in plain)
        return tuple(built(argument, item) for argument, item in zip(arguments, plain, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {key: built(arguments[1], item) for key, item in plain.items()}
    return float(plain) if kind is float else plain


__all__ = [
    "Axis",
    "AxisReport",
    "ErrorRecord",
    "Leaf",
    "LeafKind",
    "Outcome",
    "Piece",
    "Stage",
    "Verdict",
    "built",
    "plain",
    "reached",
]
