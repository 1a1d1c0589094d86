"""What is in an archive, model code unseen: interface, tensors, cache, operators as written and as the engine runs them.

In: an archive's path. Out: `Inspection`. Nothing is unpacked; the engine, where it is asked, loads the archive as a
runtime would.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from generic_export.errors import EngineError, EngineMissingError, OptionError, WrongOnDeviceError
from generic_export.inference_target.tract.engines.device_forms import notes_of
from generic_export.inference_target.tract.engines.engine import IoFact
from generic_export.inference_target.tract.engines.measure import evaluate
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.graph import ArrayLiteral, Reference
from generic_export.read.contents import ArchiveContents, StoredTensor, read_contents
from generic_export.read.outline import External, GraphOutline, read_outline, shape_of
from t2n_llm.check.runner import BIND_BATCH, STATEFUL_TRANSFORM
from t2n_llm.export.archive_lookup import LocatedArchive

_BYTES = {"bool": 1, **{f"{kind}{bits}": bits // 8 for kind in "fiu" for bits in (8, 16, 32, 64)}}
_LABEL = re.compile(r'\blabel\s*=\s*"([^"\n]*)"')
_CACHE_OPERATORS = frozenset({"tract_transformers_dyn_kv_cache", "tract_transformers_quantized_dyn_kv_cache"})


@dataclass(frozen=True)
class DtypeShare:
    """All tensors of one element type: how many, their values, their bytes, and bits a value."""

    dtype: str
    tensors: int
    values: int
    bytes: int

    @property
    def bits_per_value(self) -> float:
        """Bits a value, scales of quantised blocks included."""
        return self.bytes * 8 / self.values if self.values else 0.0


@dataclass(frozen=True)
class CacheState:
    """The state that grows with the text.

    Attributes:
        tensors: how many caches there are.
        bytes_per_token: what one more position takes in all of them, for one sequence.
        max_positions: the model's limit, where the export says.
    """

    tensors: int
    bytes_per_token: int
    max_positions: int | None

    @property
    def peak_bytes(self) -> int | None:
        """What the state takes at the model's limit."""
        return None if self.max_positions is None else self.bytes_per_token * self.max_positions


@dataclass(frozen=True)
class EngineView:
    """What the engine makes of the archive.

    Attributes:
        version: of the wheel.
        stateful: caches were turned into the engine's own state.
        operators: nodes of the optimised graph by operator, the most frequent first.
        inputs, outputs: what is left of the interface.
        peak_rss_bytes: largest resident size of the engine's process so far: reading and optimising.
        refusal: why the engine does not take the archive; everything above is empty then.
    """

    version: str
    stateful: bool = False
    operators: tuple[tuple[str, int], ...] = ()
    inputs: tuple[IoFact, ...] = ()
    outputs: tuple[IoFact, ...] = ()
    peak_rss_bytes: int = 0
    refusal: str | None = None


@dataclass(frozen=True)
class Inspection:
    """Everything `t2n-llm inspect` prints."""

    contents: ArchiveContents
    outline: GraphOutline
    shares: tuple[DtypeShare, ...]
    cache: CacheState | None
    problems: tuple[str, ...]
    engine: EngineView | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits that a stored value takes on average."""
        values = sum(share.values for share in self.shares)
        return sum(share.bytes for share in self.shares) * 8 / values if values else 0.0

    def asdict(self) -> dict[str, Any]:
        """Return the inspection as plain data."""
        contents, outline = self.contents, self.outline
        return {
            "archive": str(contents.path),
            "format": contents.format.value,
            "stored_bytes": contents.stored_bytes,
            "graph": {
                "name": outline.name,
                "nnef_version": outline.version,
                "registries": outline.registries,
                "fragments": outline.fragments,
                "extensions": outline.extensions,
            },
            "properties": dict(outline.properties),
            "devices": [note.asdict() for note in notes_of(outline)],
            "symbols": outline.symbols,
            "assertions": outline.assertions,
            "inputs": [asdict(external) for external in outline.externals],
            "outputs": list(outline.outputs),
            "operators": dict(outline.operators),
            "tensors": [_tensor_record(tensor) for tensor in contents.tensors],
            "dtypes": [asdict(share) | {"bits_per_value": share.bits_per_value} for share in self.shares],
            "bits_per_weight": self.bits_per_weight,
            "cache": None if self.cache is None else asdict(self.cache) | {"peak_bytes": self.cache.peak_bytes},
            "engine": None if self.engine is None else asdict(self.engine) | {"operators": dict(self.engine.operators)},
            "other_files": dict(contents.other_files),
            "problems": self.problems,
            "unknown": [asdict(text) for text in outline.unknown],
        }


def inspect_archive(archive: LocatedArchive) -> Inspection:
    """Read an archive from outside; no engine is needed.

    Raises:
        ArchiveError, TensorFormatError: it is damaged, or no archive.
    """
    contents = read_contents(archive.path)
    outline = read_outline(contents.graph_text)
    return Inspection(
        contents=contents,
        outline=outline,
        shares=dtype_shares(contents.tensors),
        cache=cache_state(outline, archive.max_positions),
        problems=tuple(_problems(contents, outline)),
    )


def ask_engine(inspection: Inspection, engine: TractWheel) -> Inspection:
    """Add what the engine makes of it: loaded, caches turned into state where there are any, optimised; never run.

    Raises:
        EngineMissingError: the engine, or the device it is to use, is not there.
    """
    transforms = stateful_transforms(inspection.outline)
    version = engine.version
    try:
        with engine.load(inspection.contents.path, transforms=transforms) as model:
            view = EngineView(
                version=version,
                stateful=bool(transforms),
                operators=tuple(model.operators().most_common()),
                inputs=model.inputs,
                outputs=model.outputs,
                peak_rss_bytes=model.peak_rss_bytes(),
            )
    except EngineMissingError:
        raise
    except EngineError as error:
        view = EngineView(version, refusal=str(error) if isinstance(error, WrongOnDeviceError) else error.message)
    return replace(inspection, engine=view)


def stateful_transforms(outline: GraphOutline) -> list[str]:
    """Return the transforms that turn an archive's caches into engine state; none when it has no caches."""
    if next(_cache_inputs(outline), None) is None:
        return []
    return [*([BIND_BATCH] if "B" in outline.symbols else []), STATEFUL_TRANSFORM]


def dtype_shares(tensors: Sequence[StoredTensor]) -> tuple[DtypeShare, ...]:
    """Sum tensors up by element type, the largest share first."""
    count: Counter[str] = Counter()
    values: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for tensor in tensors:
        count[tensor.dtype] += 1
        values[tensor.dtype] += tensor.elements
        size[tensor.dtype] += tensor.data_bytes
    return tuple(DtypeShare(dtype, count[dtype], values[dtype], total) for dtype, total in size.most_common())


# --- caches -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cache:
    name: str
    datum_type: str
    shape: tuple[str, ...]
    axis: int
    bits: int | None = None  # of a value, when the engine keeps them quantised; scales come on top


def cache_state(outline: GraphOutline, max_positions: int | None = None) -> CacheState | None:
    """Return the size of the state that a graph keeps, or None when it keeps none."""
    caches = [*_cache_inputs(outline), *_cache_operators(outline)]
    if not caches:
        return None
    try:
        return CacheState(len(caches), sum(map(_bytes_per_token, caches)), max_positions)
    except OptionError:  # a dimension beside batch and time is open
        return None


def _cache_inputs(outline: GraphOutline) -> Iterator[_Cache]:
    """Yield the inputs that tract would take for caches (docs/contributing/engine-facts.md#cache-detection)."""
    externals: Mapping[str, External] = {external.name: external for external in outline.externals}
    for call in outline.invocations:
        parts, axis = call.argument("0"), call.argument("axis")
        grows = call.operator == "concat" and set(call.outputs) & set(outline.outputs)
        if not (grows and isinstance(parts, ArrayLiteral) and len(parts.elements) == 2 and isinstance(axis, int)):
            continue
        first = parts.elements[0]
        external = externals.get(first.name) if isinstance(first, Reference) else None
        if external is not None and 0 <= axis < len(external.shape):
            yield _Cache(external.name, external.datum_type, external.shape, axis)


def _cache_operators(outline: GraphOutline) -> Iterator[_Cache]:
    """Yield the caches of a graph that was written after they had become state."""
    for call in outline.invocations:
        axis, datum_type = call.argument("axis"), call.argument("datum_type")
        shape = shape_of(call.argument("past_sequence_shape"))
        if call.operator in _CACHE_OPERATORS and isinstance(axis, int) and 0 <= axis < len(shape):
            bits = call.argument("bits")
            yield _Cache(call.outputs[0], str(datum_type).lower(), shape, axis, bits if isinstance(bits, int) else None)


def _bytes_per_token(cache: _Cache) -> int:
    size = 8 * _BYTES.get(cache.datum_type, 0) if cache.bits is None else cache.bits
    for axis, dim in enumerate(cache.shape):
        if axis != cache.axis:
            size *= evaluate(dim, {"B": 1})
    return size // 8


# --- what does not fit together -----------------------------------------------------------------


def _problems(contents: ArchiveContents, outline: GraphOutline) -> Iterator[str]:
    stored = {tensor.label: tensor for tensor in contents.tensors}
    read = {variable.label.removeprefix("/"): variable for variable in outline.variables}
    for label, variable in read.items():
        tensor = stored.get(label)
        if tensor is None:
            yield f"{label}.dat is missing, but the graph reads it."
        elif tuple(map(str, tensor.shape)) != variable.shape:
            declared = f"[{', '.join(variable.shape)}]"
            yield f"{label}: stored with shape {list(tensor.shape)}, but the graph declares {declared}."
    # Also what fragments and loop bodies read.
    used = read.keys() | {label.removeprefix("/") for label in _LABEL.findall(contents.graph_text)}
    for label in sorted(stored.keys() - used):
        yield f"{label}.dat is not read by the graph, but is loaded into memory."
    if not outline.name:
        yield "graph.nnef contains no graph."


def _tensor_record(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "label": tensor.label,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "bytes": tensor.data_bytes,
        "bits_per_value": tensor.bits_per_value,
    }
