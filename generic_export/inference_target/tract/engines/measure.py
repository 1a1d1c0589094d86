"""What an engine tells of an archive beside its answers: nodes, costs and times; and the devices it computes on.

In: the JSON of `profile_json` (wheel) and of `dump --json` (command), which have one form. Out: frozen records.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from generic_export.errors import DeviceMissingError, EngineRunError, OptionError
from generic_export.inference_target.tract.engines.engine import DATUM_TYPES, EngineNode, IoFact, Profile

_NUMPY_TYPES = {short: name for name, short in DATUM_TYPES.items()}


@dataclass(frozen=True)
class LlmBench:
    """What the command's `llm-bench` measures.

    Attributes:
        prefill, decode: tokens a second: 512 tokens at once; 128 one by one from an empty cache.
        load: seconds until the model was read and transformed.
        optimise: seconds of code generation after that.
        peak_rss_bytes: largest resident size seen.
    """

    prefill: float
    decode: float
    load: float
    optimise: float
    peak_rss_bytes: int


def read_nodes(text: str) -> tuple[EngineNode, ...]:
    """Read the nodes of a dump.

    Raises:
        EngineRunError: the text is not the JSON that tract 0.23 writes.
    """
    try:
        return tuple(_node(record) for record in _parsed(text)["nodes"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise EngineRunError("the engine's list of nodes is malformed.") from None


def read_profile(text: str) -> Profile:
    """Read a dump with times; nodes that took none are left out.

    Raises:
        EngineRunError: the text is not the JSON that tract 0.23 writes, or holds no times.
    """
    summary = _parsed(text).get("profiling_info")
    if not isinstance(summary, dict):
        raise EngineRunError("the engine's profile has no times.")
    nodes = tuple(node for node in read_nodes(text) if node.seconds is not None)
    return Profile(nodes, float(summary["secs_per_iter"]), int(summary["iterations"]))


def read_llm_bench(metrics: str, readings: str) -> LlmBench:
    """Read what `llm-bench --readings --emit-jsonl` leaves.

    Args:
        metrics: its output, one `{"metric":"pp512","value":998.8}` a line.
        readings: `readings.out`: a table of time, resident size and event.
    Raises:
        EngineRunError: a figure is missing.
    """
    try:
        values = {record["metric"]: float(record["value"]) for record in map(json.loads, metrics.splitlines())}
        rows = [row.split() for row in readings.splitlines() if not row.startswith("#")]
        columns = rows[0]
        sizes = [int(row[columns.index("rsz")]) for row in rows[1:]]
        loaded, ready = values["time_to_before_optimize"], values["time_to_model_ready"]
        return LlmBench(values["pp512"], values["tg128"], loaded, ready - loaded, max(sizes))
    except (ValueError, KeyError, TypeError, IndexError):
        raise EngineRunError(f"llm-bench's figures cannot be parsed: {metrics[:80]!r}.") from None


def _parsed(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("nodes"), list):
        raise EngineRunError(f"the engine's list of nodes cannot be parsed: it starts with {text[:40]!r}.")
    return parsed


def _node(record: Mapping[str, Any]) -> EngineNode:
    outer, _ = record["qualified_id"]
    return EngineNode(
        record["op_name"],
        record["node_name"],
        "/".join(name for _, name in outer),
        tuple(sorted(record.get("cost", {}).items())),
        record.get("secs_per_iter"),
    )


# --- devices ----------------------------------------------------------------------------------


def device_missing(engine: str, device: str, reason: str) -> DeviceMissingError:
    """Return the error to raise when an engine cannot compute on a device."""
    hint = {
        "cuda": (
            "It needs an NVIDIA GPU, its driver, the CUDA 13 libraries and a tract built with CUDA. Otherwise use "
            "--device cpu."
        ),
        "metal": "It needs macOS or iOS, with a tract built there. Otherwise use --device cpu.",
    }.get(device)
    return DeviceMissingError(f"{engine} cannot compute on {device} here: {_sentence(reason)}", hint)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


# --- inputs -----------------------------------------------------------------------------------

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def example_inputs(facts: Sequence[IoFact], sizes: Mapping[str, int]) -> list[np.ndarray]:
    """Make inputs of zeros, which is enough to measure time: zero is a token id that every vocabulary has.

    Args:
        facts: the model's inputs.
        sizes: value of each symbol of their dimensions.
    Raises:
        OptionError: a symbol has no value, or an element type has no array.
    """
    return [np.zeros([evaluate(dim, sizes) for dim in fact.shape], _numpy_type(fact)) for fact in facts]


def _numpy_type(fact: IoFact) -> str:
    if fact.datum_type not in _NUMPY_TYPES:
        raise OptionError(f"input {fact}: NumPy has no dtype for {fact.datum_type}.")
    return _NUMPY_TYPES[fact.datum_type]


def evaluate(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a dimension such as `2*S+P`.

    Raises:
        OptionError: a symbol has no value, or the dimension is no sum, product or quotient of symbols and numbers.
    """
    try:
        return _value(ast.parse(dim, mode="eval").body, sizes)
    except KeyError as error:
        given = ", ".join(sorted(sizes)) or "none"
        raise OptionError(f"dimension {dim}: no value for symbol {error.args[0]}.", f"Values given: {given}.") from None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        raise OptionError(f"dimension {dim}: cannot be evaluated.") from None


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    raise ValueError(ast.dump(node))
