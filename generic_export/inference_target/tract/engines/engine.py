"""What an inference engine offers, whichever way it is reached, and how its messages are read.

In: an archive (folder, `.tar`, `.nnef.tgz`) and numpy arrays. Out: numpy arrays, facts, operator counts.
Implemented by `wheel.py`; `cli.py` answers whole questions (`Examiner`) and shares the message readers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from generic_export.errors import EngineRunError

Array = np.ndarray[Any, np.dtype[Any]]

# numpy dtype name -> tract datum type. tract has no bf16 and its public API no complex
# (docs/contributing/engine-facts.md#element-types-of-tensor-files).
DATUM_TYPES = {
    "bool": "bool",
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
}


@dataclass(frozen=True)
class IoFact:
    """One input or output as the engine declares it.

    Attributes:
        name: the engine's node name. Inputs keep their NNEF name; an output may be reported under the name of
            another node after simplification, so match outputs by position.
        datum_type: "f32", "f16", "i64", "bool", ...
        shape: each dimension as tract prints it: "1", "S", "S+P".
    """

    name: str
    datum_type: str
    shape: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: [{', '.join(self.shape)}] {self.datum_type}"


@dataclass(frozen=True)
class EngineNode:
    """One node of the graph that the engine runs.

    Attributes:
        operator: tract's name of it, "OptMatMul".
        name: the node's; it starts with the identifier in graph.nnef that it comes from.
        body: the loop or submodel it stands in, "" for the graph itself.
        costs: what tract counts of it, such as ("FMA(F32)", "65536*S").
        seconds: time of one run, None where it was not measured.
    """

    operator: str
    name: str
    body: str = ""
    costs: tuple[tuple[str, str], ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Profile:
    """Time by node.

    Attributes:
        nodes: every node that ran.
        seconds: of one whole run.
        iterations: how many runs the times are the means of.
    """

    nodes: tuple[EngineNode, ...]
    seconds: float
    iterations: int


@dataclass(frozen=True)
class LoadTimes:
    """Seconds until a model is ready: reading and simplifying, the transforms asked for, code generation."""

    load: float
    transform: float
    optimise: float


class EngineSession(Protocol):
    """A running conversation with a model: caches and recurrent states persist between two `run`s."""

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run one turn. After an `EngineRunError` the session is dead: the engine invalidates its state."""
        ...

    def close(self) -> None:
        """Free the state. Closing twice is harmless."""
        ...


class LoadedModel(Protocol):
    """An archive loaded, transformed and optimised, ready to run. A context manager that closes itself."""

    @property
    def inputs(self) -> tuple[IoFact, ...]:
        """Inputs in the order `run` takes them (order of the `external` lines in graph.nnef)."""
        ...

    @property
    def outputs(self) -> tuple[IoFact, ...]:
        """Outputs in the order `run` returns them (order of the graph's result list)."""
        ...

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run once on a fresh state."""
        ...

    def spawn_state(self) -> EngineSession:
        """Open a session whose state persists between runs."""
        ...

    def operators(self) -> Counter[str]:
        """Count operators of the optimised graph by the engine's own names."""
        ...

    def dump(self) -> tuple[EngineNode, ...]:
        """List the nodes of the optimised graph, with what the engine says they cost; nothing is run."""
        ...

    def profile(self, inputs: Sequence[Array]) -> Profile:
        """Time every node over some seconds of runs, each on a fresh state."""
        ...

    def peak_rss_bytes(self) -> int:
        """Return the largest resident size the engine reached so far, in bytes."""
        ...

    def close(self) -> None:
        """Free the model. Closing twice is harmless."""
        ...

    def __enter__(self) -> LoadedModel: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Examiner(Protocol):
    """Something that looks into an archive, in one process a question. Both engines are."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def dump(self, archive: Path, *, transforms: Sequence[str] = ()) -> tuple[EngineNode, ...]:
        """List the nodes of the optimised graph after the transforms.

        Raises:
            EngineLoadError: the archive or a transform is refused.
        """
        ...

    def profile(self, archive: Path, sizes: Mapping[str, int], *, transforms: Sequence[str] = ()) -> Profile:
        """Time every node over some seconds of runs on made-up inputs, each run on a fresh state.

        Args:
            archive: folder or file.
            sizes: value of each symbol in the inputs' dimensions.
            transforms: applied first, in the engine's form.
        Raises:
            EngineLoadError, EngineRunError: the archive is refused, or does not run at these sizes.
            OptionError: a symbol has no value.
        """
        ...


class Engine(Examiner, Protocol):
    """Something that loads NNEF archives and runs them."""

    def load(self, archive: Path, *, transforms: Sequence[str] = ()) -> LoadedModel: ...


# --- inputs -----------------------------------------------------------------------------------


def conform_inputs(facts: Sequence[IoFact], arrays: Sequence[Array]) -> list[Array]:
    """Check arrays against the declared inputs and lay them out as the engine reads them.

    tract does not protect itself: too few inputs is a segmentation fault
    (docs/contributing/engine-facts.md#failures-of-the-wheel).

    Args:
        facts: the model's declared inputs.
        arrays: one array per input, in order.
    Returns:
        The arrays, C-contiguous and in native byte order; copied only where they were not.
    Raises:
        EngineRunError: wrong count, dtype, rank or static dimension; the message names the input.
    """
    if len(arrays) != len(facts):
        wanted = "; ".join(map(str, facts)) or "none"
        raise EngineRunError(f"the model takes {len(facts)} inputs, but got {len(arrays)}.", f"Expected {wanted}.")
    return [_conform(fact, np.asarray(array)) for fact, array in zip(facts, arrays, strict=True)]


def _conform(fact: IoFact, array: Array) -> Array:
    got = DATUM_TYPES.get(array.dtype.name, array.dtype.name)
    if got != fact.datum_type:
        raise EngineRunError(f"input {fact}: got dtype {got}.", "Inputs are never cast; convert the array first.")
    if array.ndim != len(fact.shape):
        raise EngineRunError(f"input {fact}: got rank {array.ndim}, shape {list(array.shape)}.")
    for axis, (declared, size) in enumerate(zip(fact.shape, array.shape, strict=True)):
        if declared.isdecimal() and int(declared) != size:
            raise EngineRunError(f"input {fact}: axis {axis} is {declared}, got {size} (shape {list(array.shape)}).")
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


# --- messages ---------------------------------------------------------------------------------

_CAUSE = re.compile(r"^\s*(?:\d+:\s+)?(.*\S)\s*$")
_PANIC = re.compile(r"panicked at (\S+?):?\n(.*)")
_CRATE_FOLDER = re.compile(r"^.*/registry/src/[^/]+/")
_LAST_WORDS = (
    "memory allocation of",
    "has overflowed its stack",
    "Fatal Python error",
    "Error: ",
    "ModuleNotFoundError",
    "ImportError",
)


def condense_error(text: str, *, context: int = 3) -> str:
    """Turn tract's "A / Caused by: B, C, D" chain into one line, the root cause first.

    Args:
        text: the engine's error text.
        context: how many of the enclosing steps to keep, innermost first.
    """
    head, _, chain = text.strip().partition("Caused by:")
    causes = [match[1] for line in (head + "\n" + chain).splitlines() if (match := _CAUSE.match(line))]
    if not causes:
        return "no message from the engine"
    around = " < ".join(reversed(causes[-1 - context : -1]))
    return f"{causes[-1]} (in: {around})" if around else causes[-1]


def last_words(stderr: str) -> str | None:
    """Find why a process died in what it wrote: the panic message, or the line that says it.

    A panic that crosses the C boundary panics again ("panic in a function that cannot unwind"); the first
    one carries the reason.
    """
    panics = [
        f"{_CRATE_FOLDER.sub('', place)}: {reason}"
        for place, reason in _PANIC.findall(stderr)
        if "cannot unwind" not in reason
    ]
    if panics:
        return panics[-1]
    lines = [line.strip() for line in stderr.splitlines()]
    return next((line for line in reversed(lines) if any(word in line for word in _LAST_WORDS)), None)
