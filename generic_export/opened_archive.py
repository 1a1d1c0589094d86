"""An archive in an engine process, called as its module was: nested arguments in, nested results out.

In: an archive. Out: `OpenedArchive`. Names of nested tensors (`batch.ids.0`) are properties of the archive, since identifiers in a
graph have no dots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from generic_export.devices import CPU
from generic_export.errors import ArchiveError, OptionError
from generic_export.inference_target.example import as_array
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.contents import read_contents
from generic_export.read.outline import read_outline
from generic_export.torch_graph.naming import identifier
from generic_export.torch_graph.nested import named_leaves

INPUT_NAMES, OUTPUT_NAMES = "input_names", "output_names"
_FLOATS = {"f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


def name_properties(inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str | float]:
    """Return the properties that keep names which are no identifiers; none where all are."""
    if all(identifier(name) == name for name in (*inputs, *outputs)):
        return {}
    return {INPUT_NAMES: json.dumps(list(inputs)), OUTPUT_NAMES: json.dumps(list(outputs))}


class OpenedArchive:
    """An archive that runs in a process of its own. A context manager that ends it.

    Attributes:
        input_names, output_names: dotted names of the tensors, in the archive's order.
    """

    def __init__(
        self, archive: str | Path, *, device: str = CPU, registries: Sequence[str] = DEFAULT_REGISTRIES
    ) -> None:
        """Load an archive.

        Args:
            archive: folder, `.tar` or `.tgz`.
            device: "cpu", "cuda" or "metal".
            registries: see `TractWheel.load`.

        Raises:
            ArchiveError: it is none, or its names are not those of its inputs and outputs.
            EngineError: tract does not load it.
        """
        path = Path(archive)
        outline = read_outline(read_contents(path).graph_text)
        properties = dict(outline.properties)
        inputs = [external.name for external in outline.externals]
        self.input_names = _names(path, properties.get(INPUT_NAMES), inputs)
        self.output_names = _names(path, properties.get(OUTPUT_NAMES), outline.outputs)
        self.model = TractWheel(device=device).load(path, registries=registries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the archive on the module's arguments, which may be nested.

        Returns:
            A tensor, or a tuple, dict or list of them, as the names of the outputs say.

        Raises:
            OptionError: an argument is missing, or too much.
            EngineError: tract does not run it on these.
        """
        parameters = list(dict.fromkeys(name.split(".")[0] for name in self.input_names))
        if len(args) > len(parameters):
            raise OptionError(
                f"the archive takes {len(parameters)} arguments, got {len(args)}.", f"It takes {', '.join(parameters)}."
            )
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        tensors = {name: leaf for name, leaf in named_leaves(given) if leaf is not None}
        unknown = [name for name in tensors if name not in self.input_names]
        if unknown:
            raise OptionError(
                f"the archive takes no {unknown[0]!r}.", f"It takes {', '.join(self.input_names) or 'nothing'}."
            )
        return _nested(dict(zip(self.output_names, self.run(tensors), strict=True)))

    def run(self, tensors: Mapping[str, Any]) -> list[torch.Tensor]:
        """Run the archive on tensors by name, and return its outputs in order; further names are ignored.

        Raises:
            OptionError: an input is missing.
            EngineError: tract does not run it on these.
        """
        return [torch.from_numpy(np.array(array)) for array in self.model.run(self.arrays(tensors))]

    def arrays(self, tensors: Mapping[str, Any]) -> list[np.ndarray]:
        """Return tensors by name as the archive takes them, in order.

        Raises:
            OptionError: an input is missing.
        """
        missing = [name for name in self.input_names if name not in tensors]
        if missing:
            raise OptionError(
                f"the archive takes {', '.join(missing)}, which is not given.",
                f"Given: {', '.join(tensors) or 'nothing'}.",
            )
        facts = zip(self.input_names, self.model.inputs, strict=True)
        return [_array(tensors[name], fact.datum_type) for name, fact in facts]

    def close(self) -> None:
        """End the process. Closing twice is harmless."""
        self.model.close()

    def __enter__(self) -> OpenedArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_archive(
    archive: str | Path, *, device: str = CPU, registries: Sequence[str] = DEFAULT_REGISTRIES
) -> OpenedArchive:
    """Load an archive in tract, in a separate process, and return an object that runs it.

    Args:
        archive: folder, `.tar` or `.tgz`.
        device: "cpu", "cuda" or "metal".
        registries: operator registries to enable besides tract's core.

    Raises:
        EngineError: the engine is missing, or refused the archive.
    """
    return OpenedArchive(archive, device=device, registries=registries)


def _names(path: Path, said: object, identifiers: Sequence[str]) -> tuple[str, ...]:
    """Return the names of tensors: those that the archive's property has, or their identifiers.

    Raises:
        ArchiveError: the property is of other tensors.
    """
    if said is None:
        return tuple(identifiers)
    try:
        names = json.loads(str(said))
    except (ValueError, RecursionError):
        names = None
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(names) == len(identifiers)
    if not fits or any(identifier(name) != known for name, known in zip(names, identifiers, strict=True)):
        raise ArchiveError(f"{path}: its names are not those of its tensors.", "Export the model again.")
    return tuple(names)


def _array(tensor: Any, datum_type: str) -> np.ndarray:
    """Return a tensor as the archive takes it; floats in its element type."""
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    plain = tensor.detach().cpu()
    return as_array(plain.to(_FLOATS[datum_type]) if plain.is_floating_point() and datum_type in _FLOATS else plain)


def _nested(outputs: Mapping[str, torch.Tensor]) -> Any:
    if list(outputs) == ["output"]:
        return outputs["output"]
    if list(outputs) == [f"output_{index}" for index in range(len(outputs))]:
        return tuple(outputs.values())
    tree: dict[str, Any] = {}
    for name, tensor in outputs.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = tensor
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    """Return tables whose keys are 0, 1, ... as lists."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    return list(values.values()) if list(values) == [str(index) for index in range(len(values))] else values


__all__ = ["OpenedArchive", "name_properties", "open_archive"]
