"""A tree of modules as text: how their exports went, and what they were called with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from generic_export.debug.piece_by_piece.status import StatusExport
from generic_export.debug.record.leaves import take_apart
from generic_export.errors import CaptureError


class Node(Protocol):
    """What is read of a node."""

    level: int
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]
    outputs: list[tuple[Any, ...]]
    statuses: dict[str, StatusExport]

    @property
    def true_model_name(self) -> str: ...
    @property
    def full_name(self) -> str: ...
    @property
    def dot_name(self) -> str: ...
    def guess_dynamic_shapes(self) -> tuple[tuple[Any, ...], dict[str, Any]]: ...


@dataclass(frozen=True)
class Looks:
    """What is told of a tensor beside its element type."""

    shape: bool = True
    min_max: bool = True
    device: bool = True


def export_report(nodes: Iterable[Node], *, exported_program: bool, fx: bool) -> str:
    """Return a line per module: name, class and status, with graphs when asked for."""
    nodes = list(nodes)
    width = max(len(node.dot_name) for node in nodes) + 2
    kind_width = max(len(node.true_model_name) for node in nodes) + 2
    lines = []
    for node in nodes:
        lines.append(f"{node.dot_name.ljust(width)}{node.true_model_name.ljust(kind_width)}{_status(node)}")
        program = getattr(node, "fx", None)
        if isinstance(program, torch.export.ExportedProgram):
            lines += [str(program)] * exported_program + [str(program.graph)] * fx
    return "\n".join(lines)


def _status(node: Node) -> str:
    if not node.statuses:
        return f"not needed ({len(node.inputs)} calls)" if node.inputs else "not called"
    texts = []
    for exporter, status in node.statuses.items():
        reason = f" -- {status.step}: {status.short_reason}" if not status.is_ok() else ""
        texts.append(f"{exporter}: {status.status}{reason}")
    return "; ".join(texts)


def recorded_text(nodes: Iterable[Node], looks: Looks, *, dynamic: bool, inputs: bool) -> str:
    """Return the tree with what each module was called with."""
    return "\n".join(f"{'  ' * node.level}{line}" for node in nodes for line in _recorded(node, looks, dynamic, inputs))


def _recorded(node: Node, looks: Looks, dynamic: bool, inputs: bool) -> Iterator[str]:
    yield f">>> {node.full_name}"
    if dynamic and node.inputs:
        try:
            yield f"  dynamic: {node.guess_dynamic_shapes()}"
        except CaptureError as error:
            yield f"  dynamic: {error.message}"
    for given, result in zip(node.inputs, node.outputs, strict=False) if inputs else ():
        yield f"  < {_described(given, looks)}"
        yield f"  > {_described(result, looks)}"
    for given in node.inputs[len(node.outputs) :] if inputs else ():  # added by hand, not run yet
        yield f"  < {_described(given, looks)}"


def _described(value: Any, looks: Looks) -> str:
    """Return one line about a nest of values."""
    if isinstance(value, torch.Tensor):
        text = str(value.dtype).removeprefix("torch.")
        text += f"[{', '.join(map(str, value.shape))}]" if looks.shape else ""
        text += f"@{value.device.type}" if looks.device else ""
        if looks.min_max and value.numel() and not value.is_meta and not value.is_complex():
            text += f" in {value.min().item():.3g}..{value.max().item():.3g}"
        return text
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_described(item, looks)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_described(item, looks) for item in value)})"
    _, layout = take_apart([("", value)], keep_states=False)
    if layout.tensors:
        return f"{type(value).__name__}({', '.join(_described(t, looks) for t in layout.tensors.values())})"
    return repr(value)


__all__ = ["Looks", "export_report", "recorded_text"]
