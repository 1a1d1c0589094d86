"""The sections of `export.json` as types, and the one parser that holds a file against them.

In: JSON. Out: an `ExportManifest`, or what is wrong, by its place. Sections that earlier releases did not write may be missing
(`require_said` refuses where a command needs one); unknown ones are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from generic_export.errors import ArchiveError
from t2n_llm.tasks.speech.plan import SpeechPlan

_LONGEST_NAME = 255  # bytes, of a file
_LARGEST = 1 << 63  # no number that an export writes is larger
_FILE = "a file in the folder or in a subfolder"

FileName = Annotated[str, _FILE]


class SourceRecord(TypedDict, total=False):
    """Where the model comes from, or its vocoder."""

    name: str
    revision: str | None
    architecture: str
    model_type: str


class SizedRecord(TypedDict):
    """An output of a single pass, or an input; null is a size that is not known."""

    shape: list[int | str | None]
    dtype: str


class InputRecord(TypedDict):
    """An input of an encoder."""

    shape: list[int | str]
    dtype: str


class StateRecord(TypedDict, total=False):
    """A state that is fed back, see `StateTensor`; early releases knew keys and values only, with heads."""

    input_name: str
    output_name: str
    kind: str
    layer: int
    shape: list[int | str]
    axis: int | None
    dtype: str
    index: int
    window: int | None
    num_key_value_heads: int
    head_dim: int


class GraphRecord(TypedDict, total=False):
    """Inputs, outputs and states of an archive."""

    inputs: list[str]
    outputs: list[str]
    symbols: list[str]
    size_constraints: list[str]
    states: list[StateRecord]
    engine_states: list[StateRecord]
    dtype: str
    prefill: list[dict[str, Any]]
    interface: dict[str, SizedRecord]


class ModelRecord(TypedDict, total=False):
    """What is known of a model."""

    vocab_size: int | None
    max_position_embeddings: int | None
    sliding_window: int | None
    parameters: int | None


class AdapterRecord(TypedDict, total=False):
    """The adapter that was merged."""

    name: str
    revision: str | None
    sha256: str


class RecipeRecord(TypedDict, total=False):
    """How weights were compressed."""

    name: str


class PartRecord(TypedDict):
    """Which part of a parameter a tensor is; see `TensorPart`."""

    parameter: str
    view: list[int]
    cuts: list[list[int]]
    order: list[int]
    shape: list[int]


class _StoredRecord(TypedDict):
    label: str
    parameters: list[str]
    scheme: str


class StoredRecord(_StoredRecord, total=False):
    """How a tensor of a compressed model is stored."""

    axes: list[int] | None
    replaced: bool
    algorithm: str | None
    part: PartRecord | None
    factor: float
    residual_of: str | None
    kept_reason: str
    bytes: int
    bits_per_weight: float


class CompressionRecord(TypedDict, total=False):
    """How a model was compressed."""

    recipe: RecipeRecord
    tensors: list[StoredRecord]
    bytes: int
    bits_per_weight: float


class DigestRecord(TypedDict, total=False):
    """Length and SHA-256 of a tensor or a file; archives have no digest of their own."""

    bytes: int
    sha256: str


class _ArchiveRecord(TypedDict):
    archive: FileName


class ArchiveRecord(_ArchiveRecord, total=False):
    """One archive of several."""

    graph: GraphRecord
    tensors: dict[str, DigestRecord]
    compression: CompressionRecord | None


class SourceCardRecord(TypedDict, total=False):
    """What the model's own card says."""

    license: list[str]
    license_name: str | None
    license_link: str | None
    language: list[str]
    base_model: list[str]
    pipeline_tag: str | None


class CardRecord(TypedDict, total=False):
    """The card that was written."""

    file: FileName
    sha256: str


class StepRecord(TypedDict, total=False):
    """One comparison."""

    same_top1: bool | None


class _CheckRecord(TypedDict):
    name: str
    passed: bool


class CheckRecord(_CheckRecord, total=False):
    """One part of a check; a number that is not finite is null."""

    steps: list[StepRecord]
    max_abs_error: float | None
    max_kl_divergence: float | None
    same_top1_count: int | None


class OriginalRecord(TypedDict, total=False):
    """A compressed model beside the one that it was made from."""

    positions: int
    mean_kl_divergence: float | None
    max_kl_divergence: float | None
    same_top1_count: int


class ValidationRecord(TypedDict, total=False):
    """What the check found."""

    passed: bool
    engine: str
    engine_version: str | None
    checks: list[CheckRecord]
    compressed_vs_original: OriginalRecord | None


class QualityRecord(TypedDict, total=False):
    """What `quantize-report` measured."""

    text: str
    positions: int
    mean_kl_divergence: float | None
    p99_kl_divergence: float | None
    max_kl_divergence: float | None
    same_top1_share: float | None
    perplexity: float | None
    reference_perplexity: float | None


class ConnectionRecord(TypedDict, total=False):
    """How a decoder reads what its encoder makes."""

    order: list[str]
    encoder_inputs: dict[str, InputRecord]
    cross_attention: str
    encoder_mask: str | None
    decoder_start_token_id: int


class FrontEndRecord(TypedDict, total=False):
    """The archive that makes the model's input."""

    kind: str
    outputs: list[str]
    sampling_rate: int | None
    samples: int | None


class DeviceRecord(TypedDict, total=False):
    """How an archive is written for a device, and why."""

    device: str
    role: str
    forms: dict[str, int]
    reasons: list[str]


class OptionsRecord(TypedDict, total=False):
    """How it was exported; `graph_options_of` reads those of the graph."""

    keep_f32: list[str]
    device: list[str]
    num_logits_to_keep: int
    check: bool
    require_tokenizer: bool
    compression: dict[str, Any] | None


class ComponentMetadata(TypedDict, total=False):
    """What transformers records of a component (`ExportMetadata`); of the exporters here also its tensors."""

    architecture: str | None
    packages: dict[str, str]
    export_config: dict[str, Any]
    export_dtype: str | None
    export_device: str | None
    kwargs: dict[str, Any]
    in_spec: str | None
    out_spec: str | None
    in_constants: dict[str, Any]
    out_constants: list[Any]
    tensors: dict[str, DigestRecord]


class ComponentRecord(TypedDict):
    """An archive as `transformers.exporters` loads it."""

    file: FileName
    metadata: ComponentMetadata


class TransformersManifest(TypedDict):
    """`export.json` as `transformers.exporters` writes it; exports of this package have these entries too."""

    schema_version: int
    export_format: str
    components: dict[str, ComponentRecord]


class _Manifest(TypedDict):
    format: int
    source: SourceRecord
    graph: GraphRecord
    model: ModelRecord
    archive: FileName


class ExportManifest(_Manifest, total=False):
    """`export.json`."""

    task: str
    versions: dict[str, str | None]
    options: OptionsRecord
    devices: list[DeviceRecord]
    adapter: AdapterRecord | None
    compression: CompressionRecord | None
    tensors: dict[str, DigestRecord]
    archives: dict[str, ArchiveRecord]
    copied_files: list[str]
    source_card: SourceCardRecord
    card: CardRecord
    quality: QualityRecord | None
    validation: ValidationRecord | None
    files: dict[FileName, DigestRecord]
    encoder_decoder: ConnectionRecord
    multimodal: dict[str, Any]
    frontend: FrontEndRecord
    speech: SpeechPlan
    vocoder: SourceRecord | None
    schema_version: int
    export_format: str
    components: dict[str, ComponentRecord]


# --- the parser ---------------------------------------------------------------------------------------


def parse_manifest(value: Any, path: Path) -> ExportManifest:
    """Return what an `export.json` says.

    Args:
        value: its JSON.
        path: where it lies, for the message.

    Raises:
        ArchiveError: a section is missing that every release wrote, or is of another type.
    """
    wrong = misfit(value, ExportManifest, "")
    if wrong is not None:
        raise ArchiveError(f"{path}: {wrong}.", "The file was changed or damaged: export the model again.")
    manifest: ExportManifest = value
    return manifest


def parse_transformers_manifest(value: Any, path: Path) -> TransformersManifest:
    """Return what an `export.json` of `transformers.exporters` says.

    Args:
        value: its JSON.
        path: where it lies, for the message.

    Raises:
        ArchiveError: it is of another backend, or not of that form.
    """
    kind = value.get("export_format")
    if kind != "tract":
        raise ArchiveError(
            f"{path}: an export of transformers for {str(kind)[:40]!r}, not for tract.",
            "Load it with transformers.exporters.ExportedModel.from_pretrained, or export the model with t2n-llm export.",
        )
    wrong = misfit(value, TransformersManifest, "")
    if wrong is not None:
        raise ArchiveError(f"{path}: {wrong}.", "The file was changed or damaged: export the model again.")
    manifest: TransformersManifest = value
    return manifest


def require_said(folder: Path, manifest: Mapping[str, Any], places: Iterable[str]) -> None:
    """Refuse a manifest that leaves out what a command relies on.

    Args:
        folder, manifest: of the export.
        places: such as `graph.dtype`.

    Raises:
        ArchiveError: names what is missing.
    """
    missing = [place for place in places if not _has(manifest, place.split("."))]
    if missing:
        raise ArchiveError(f"{folder}: its export.json lacks {', '.join(missing)}.", "Export the model again.")


def _has(record: Any, keys: list[str]) -> bool:
    return not keys or (isinstance(record, Mapping) and keys[0] in record and _has(record[keys[0]], keys[1:]))


def misfit(value: Any, form: Any, place: str) -> str | None:
    """Return what is wrong with a value of JSON, such as `graph.inputs is text, not a list`; None when nothing is.

    Args:
        value: to look at.
        form: its type: a TypedDict, a dataclass, or what annotations are made of.
        place: its name.
    """
    if form is Any:
        return None
    if form == FileName:
        return None if _is_name(value) else f"{place} is {_short(value)}, not the name of a file in the folder"
    if is_typeddict(form) or is_dataclass(form):
        return _record_misfit(value, form, place)
    origin, arguments = get_origin(form), get_args(form)
    if origin in (Union, UnionType):
        found = [misfit(value, each, place) for each in arguments]
        # Where one alternative is a table and so is the value, that one says what is wrong in it.
        inner = next((wrong for wrong in found if wrong is not None and not wrong.startswith(f"{place} is ")), None)
        return (
            None if None in found else inner or f"{place} is {_kind(value)}, not {' or '.join(map(_word, arguments))}"
        )
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):  # a tuple is what an export is about to write
            return f"{place} is {_kind(value)}, not a list"
        return _first(misfit(item, arguments[0], f"{place}[{number}]") for number, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            return f"{place} is {_kind(value)}, not a table"
        bad = next((key for key in value if arguments[0] == FileName and not _is_name(key)), None)
        if bad is not None:
            return f"{place} names {_short(bad)}, which is not a file name in the folder"
        return _first(misfit(item, arguments[1], f"{place}.{_short_key(key)}") for key, item in value.items())
    return _plain_misfit(value, form, place)


def _plain_misfit(value: Any, form: type, place: str) -> str | None:
    kinds = (float, int) if form is float else (form,)
    if type(value) not in kinds:
        return f"{place} is {_kind(value)}, not {_word(form)}"
    if isinstance(value, (int, float)) and abs(value) >= _LARGEST:
        return f"{place} is too large a number"
    return None


def _record_misfit(value: Any, form: Any, place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place or 'it'} is {_kind(value)}, not a table"
    hints = _hints(form)
    required: frozenset[str] = getattr(form, "__required_keys__", frozenset())
    missing = [key for key in hints if key in required and key not in value]
    if missing:
        return f"{place or 'it'} lacks {', '.join(missing)}"
    prefix = f"{place}." if place else ""
    return _first(misfit(item, hints[key], f"{prefix}{key}") for key, item in value.items() if key in hints)


@cache
def _hints(form: Any) -> dict[str, Any]:
    return get_type_hints(form, include_extras=True)


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


def _is_name(value: Any) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    path = PurePosixPath(value)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return inside and all(len(part.encode(errors="replace")) <= _LONGEST_NAME for part in path.parts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-12:]}"


def _short_key(key: str) -> str:
    return key if len(key) <= 60 else f"{key[:40]}...{key[-12:]}"


def _kind(value: Any) -> str:
    return _word(type(value))


def _word(kind: Any) -> str:
    words = {NoneType: "null", dict: "a table", list: "a list", str: "text", bool: "true or false"}
    words |= {int: "a whole number", float: "a number"}
    return words.get(get_origin(kind) or kind, "a table")


__all__ = [
    "ExportManifest",
    "TransformersManifest",
    "misfit",
    "parse_manifest",
    "parse_transformers_manifest",
    "require_said",
]
