"""What the card of an export says, as data: read from its `export.json` and the inputs that its graphs declare.

In: an export folder. Out: a `ModelCard`; `card_page` makes it a page. Nothing in it depends on when or where the export was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import T2NError
from generic_export.inference_target.tract.engines.device_forms import DeviceNote
from generic_export.read.outline import read_outline
from generic_export.read.reading import read_graph_text
from t2n_llm.export.folder import SOURCE_CARD_FILE
from t2n_llm.export.recorded import graph_options_of
from t2n_llm.graph.interface import recorded_states
from t2n_llm.model_graph import MODEL_ROLE
from t2n_llm.source.source_card import SourceCard
from t2n_llm.source.source_files import TOKENIZER_MODELS
from t2n_llm.tasks.frontends.frontend import FRONTEND
from t2n_llm.tasks.names import (
    AUDIO_FRAME_CLASSIFICATION,
    AUDIO_XVECTOR,
    CTC,
    FEATURE_EXTRACTION,
    SEQUENCE_CLASSIFICATION,
    SPEECH_RECOGNITION,
    TEXT_CLASSIFICATION,
    TEXT_GENERATION,
    TEXT_TO_AUDIO,
    TEXT_TO_TEXT,
    TIME_SERIES,
    UNIVERSAL_SEGMENTATION,
    WITH_SOURCES,
    recorded_task,
)

HUB = "https://huggingface.co"
_TAGS = ("tract", "nnef", "t2n-llm")
# Our names for tasks -> the hub's, where they differ.
_PIPELINE_TAGS: Mapping[str, str] = {
    SEQUENCE_CLASSIFICATION: TEXT_CLASSIFICATION,
    CTC: SPEECH_RECOGNITION,
    UNIVERSAL_SEGMENTATION: "image-segmentation",
    AUDIO_FRAME_CLASSIFICATION: "audio-classification",
    AUDIO_XVECTOR: FEATURE_EXTRACTION,
    TIME_SERIES: "time-series-forecasting",
}
_LANGUAGE_MODEL, _ENCODER_DECODER, _SINGLE_PASS, _SEVERAL = "decoder", "encoder_decoder", "single_pass", "several"
_TOKENIZED = frozenset({"input_ids", "attention_mask", "token_type_ids"})
_MOST_TENSORS = 12  # of inputs, and of outputs
_SYMBOLS: Mapping[str, str] = {
    "B": "batch size",
    "F": "frames",
    "S": "new tokens, at least 1",
    "P": "past tokens, 0 in the first call",
}
_FILES: Mapping[str, str] = {
    "config.json": "config of the source",
    "generation_config.json": "generation settings of the source",
    "preprocessor_config.json": "preprocessing settings",
    "processor_config.json": "preprocessing settings",
    "video_preprocessor_config.json": "preprocessing settings",
    "tokenizer.json": "tokenizer",
    "chat_template.jinja": "chat template",
    "recipe.yaml": "compression recipe",
    SOURCE_CARD_FILE: "model card of the source",
}


@dataclass(frozen=True)
class CardTensor:
    """An input or an output of an archive.

    Attributes:
        name: in the graph.
        dtype: such as `f16`; empty where nobody recorded it.
        shape: sizes and symbols; None where nobody recorded it.
        back: the input of the next call that it is fed to, or nothing.
    """

    name: str
    dtype: str = ""
    shape: tuple[str, ...] | None = None
    back: str | None = None

    def example(self) -> tuple[int, ...] | None:
        """Return sizes that may be given for an input; None where they follow from others."""
        sizes = [_example(size, self, axis) for axis, size in enumerate(self.shape or ())]
        return None if self.shape is None or None in sizes else tuple(size for size in sizes if size is not None)


@dataclass(frozen=True)
class CardArchive:
    """One archive of the folder.

    Attributes:
        role: `model`, `encoder`, ...
        file: its name.
        inputs, outputs: in order.
        symbols: sizes that a caller chooses.
    """

    role: str
    file: str
    inputs: tuple[CardTensor, ...]
    outputs: tuple[CardTensor, ...]
    symbols: tuple[str, ...]

    @staticmethod
    def shown(tensors: Sequence[CardTensor]) -> tuple[CardTensor, ...]:
        """Return tensors, of many only the first and the last and between them one without a name."""
        if len(tensors) <= _MOST_TENSORS:
            return tuple(tensors)
        return (*tensors[: _MOST_TENSORS - 3], CardTensor(""), *tensors[-2:])

    @property
    def meanings(self) -> tuple[tuple[str, str], ...]:
        """Symbols, and what each is."""
        alone = "P" not in self.symbols
        return tuple(
            (name, "tokens of a text" if alone and name == "S" else _SYMBOLS.get(name, "")) for name in self.symbols
        )


@dataclass(frozen=True)
class CardFile:
    """A file beside the card."""

    name: str
    bytes: int
    what: str


@dataclass(frozen=True)
class CardCheck:
    """A check of the export, figures as they are shown."""

    name: str
    steps: int
    max_abs_error: float
    max_kl_divergence: float | None
    same_token: str
    passed: bool


@dataclass(frozen=True)
class CardSource:
    """What an export was made from.

    Attributes:
        name: hub id, or the name of a local folder or file.
        revision: commit of a hub repository; None for what was local.
        architecture, model_type: transformers' names.
        adapter: what was merged, or None.
        said: by its own card.
    """

    name: str
    revision: str | None
    architecture: str
    model_type: str
    adapter: str | None
    said: SourceCard

    @property
    def url(self) -> str | None:
        """Its page on the hub."""
        return f"{HUB}/{self.name}/tree/{self.revision}" if self.revision is not None else None

    @property
    def license_link(self) -> str | None:
        """Where its licence can be read, wherever the card lies."""
        link = self.said.license_link
        if link is None or link.startswith(("https://", "http://")):
            return link
        return f"{HUB}/{self.name}/blob/{self.revision}/{link}" if self.revision is not None else None


@dataclass(frozen=True)
class ModelCard:
    """Everything that the card of an export says.

    Attributes:
        source: what it was made from.
        task: its name here.
        parameters: how many there are.
        dtype, computes_in: element types of weights and of what is between them.
        compression: the record of `export.json`, or None.
        versions: of what made it, by name.
        archives: in the order in which they run.
        files: everything in the folder but the card and `export.json`.
        checked: whether there was a check.
        checks: its results.
        engine: what ran it, with its version.
        original: agreement of a compressed model with the original, in the check's text; or None.
        quality: what `quantize-report` measured; or None.
        batched: `B` is a symbol.
        keeps_states: some states are not the engine's, and are fed back.
        start_token: what a decoder with an encoder starts with.
        devices: those beside the CPU that the export is for, how the graph is written for them and why, and whether there was a
            check there.
    """

    source: CardSource
    task: str
    parameters: int | None
    dtype: str
    computes_in: str
    compression: Mapping[str, Any] | None
    versions: Mapping[str, str]
    archives: tuple[CardArchive, ...]
    files: tuple[CardFile, ...]
    checked: bool
    checks: tuple[CardCheck, ...]
    engine: str
    original: Mapping[str, Any] | None
    quality: Mapping[str, Any] | None
    batched: bool
    keeps_states: bool
    start_token: int | None
    devices: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there was a check, and every part of it passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def form(self) -> str:
        """Which way of running it the card shows."""
        if self.task == TEXT_GENERATION:
            return _LANGUAGE_MODEL
        if self.task in WITH_SOURCES:
            return _ENCODER_DECODER
        if self.task == TEXT_TO_AUDIO:
            return _SEVERAL
        runs = all(each.example() is not None for each in self.given)
        return _SINGLE_PASS if not self.main.outputs[0].back and runs and not self.keeps_caches else _SEVERAL

    @property
    def keeps_caches(self) -> bool:
        """Whether some output is fed to the next call."""
        return any(output.back for output in self.main.outputs)

    @property
    def main(self) -> CardArchive:
        """The archive that answers."""
        return self.archives[-1]

    @property
    def given(self) -> tuple[CardTensor, ...]:
        """Inputs that no archive before makes."""
        made: set[str] = set()
        found: dict[str, CardTensor] = {}
        for archive in self.archives:
            found |= {each.name: each for each in archive.inputs if each.name not in made}
            made |= {each.name for each in archive.outputs}
        return tuple(found.values())

    @property
    def bundle(self) -> str | None:
        """A file of inputs with PyTorch's answers."""
        tests = [file.name for file in self.files if file.name.startswith("tests/") and file.name.endswith(".npz")]
        return next((name for name in tests if name.endswith("decode_step.npz")), next(iter(tests), None))

    @property
    def tokenizer(self) -> bool:
        """Whether there is a tokenizer that the tokenizers library reads."""
        return any(file.name == "tokenizer.json" for file in self.files)

    @property
    def makes_tokens(self) -> bool:
        """Whether there is a tokenizer, of any kind."""
        return any(file.name in TOKENIZER_MODELS for file in self.files)

    @property
    def reads_texts(self) -> bool:
        """Whether its inputs are what a tokenizer gives."""
        return self.tokenizer and {each.name for each in self.given} <= _TOKENIZED

    def front_matter(self) -> dict[str, Any]:
        """Return what the hub reads, by its names."""
        source, said = self.source, self.source.said
        bases = [source.name, *filter(None, [source.adapter])] if source.revision is not None else said.base_model
        bases = [name for name in bases if name.count("/") == 1]
        tag = _PIPELINE_TAGS.get(self.task, self.task)
        table = {
            "license": _one_or_all(said.license),
            "license_name": said.license_name,
            "license_link": source.license_link,
            "language": list(said.language),
            "base_model": _one_or_all(bases),
            "base_model_relation": "quantized" if source.revision is not None and source.adapter is None else None,
            "library_name": _TAGS[0],
            "pipeline_tag": said.pipeline_tag or tag if self.task == TEXT_TO_TEXT else tag,
            "tags": [*_TAGS, source.model_type],
        }
        return {name: value for name, value in table.items() if value}


def read_card(folder: Path, manifest: Mapping[str, Any]) -> ModelCard:
    """Return what the card of an export says.

    Args:
        folder: with the archives that the manifest names.
        manifest: of the export, as `read_manifest` gives it.

    Raises:
        ArchiveError: an archive cannot be read, or the manifest lacks what a card needs.
    """
    options = graph_options_of(manifest)
    validation = manifest.get("validation") or {}
    connection = manifest.get("encoder_decoder") or {}
    states = recorded_states(manifest)
    return ModelCard(
        source=_source(manifest),
        task=recorded_task(manifest),
        parameters=manifest["model"].get("parameters"),
        dtype=str(manifest["graph"]["dtype"]),
        computes_in=options.computes_in,
        compression=manifest.get("compression"),
        versions={name: str(version) for name, version in (manifest.get("versions") or {}).items()},
        archives=_archives(folder, manifest),
        files=tuple(_files(manifest)),
        checked=bool(validation),
        checks=tuple(map(_check, validation.get("checks", ()))),
        engine=f"tract {validation.get('engine_version', '')} ({validation.get('engine', '')})",
        original=validation.get("compressed_vs_original"),
        quality=manifest.get("quality"),
        batched=options.batch,
        keeps_states=any(not state.grows for state in states),
        start_token=connection.get("decoder_start_token_id"),
        devices=tuple(_devices(manifest)),
    )


def _devices(manifest: Mapping[str, Any]) -> Iterator[str]:
    names = [str(check.get("name", "")) for check in (manifest.get("validation") or {}).get("checks", ())]
    for record in manifest.get("devices") or ():
        device = str(record["device"])
        note = DeviceNote(device, record.get("forms") or {}, tuple(record.get("reasons") or ()))
        there = any(name.startswith(f"{device}: ") for name in names)
        yield f"{note}; {'checked there' if there else 'not checked there'}"


def _source(manifest: Mapping[str, Any]) -> CardSource:
    record, adapter = manifest["source"], manifest.get("adapter")
    return CardSource(
        name=str(record.get("name", "")),
        revision=record.get("revision"),
        architecture=str(record.get("architecture", "")),
        model_type=str(record.get("model_type", "")),
        adapter=str(adapter["name"]) if adapter else None,
        said=SourceCard.of_record(manifest.get("source_card") or {}),
    )


def _check(record: Mapping[str, Any]) -> CardCheck:
    steps = record.get("steps", ())
    tokens = any(step.get("same_top1") is not None for step in steps)
    return CardCheck(
        name=str(record["name"]),
        steps=len(steps),
        max_abs_error=_number(record.get("max_abs_error")),
        max_kl_divergence=_number(record.get("max_kl_divergence")) if tokens else None,
        same_token=f"{record.get('same_top1_count')}/{len(steps)}" if tokens else "",
        passed=bool(record["passed"]),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("inf")  # what is not finite is null in JSON


# --- archives and files ---------------------------------------------------------------------------


def _archives(folder: Path, manifest: Mapping[str, Any]) -> tuple[CardArchive, ...]:
    parts = manifest.get("archives") or {MODEL_ROLE: manifest}
    declared = {role: _declared(folder / str(part["archive"])) for role, part in parts.items()}
    known = {each.name: each for inputs in declared.values() for each in inputs} | _recorded(manifest)
    return tuple(
        CardArchive(
            role=role,
            file=str(part["archive"]),
            inputs=declared[role],
            outputs=tuple(
                known.get(name, CardTensor(name)) for name in (part.get("graph") or manifest["graph"])["outputs"]
            ),
            symbols=tuple((part.get("graph") or manifest["graph"])["symbols"]),
        )
        for role, part in parts.items()
    )


def _declared(archive: Path) -> tuple[CardTensor, ...]:
    """Return the inputs of a graph as its text declares them; none where the archive cannot be read."""
    try:
        externals = read_outline(read_graph_text(archive)).externals
    except T2NError:
        return ()
    return tuple(CardTensor(each.name, each.datum_type, each.shape) for each in externals)


def _recorded(manifest: Mapping[str, Any]) -> dict[str, CardTensor]:
    """Return what is known of outputs: those of single passes, states that are fed back, logits."""
    graph = manifest["graph"]
    tensors = graph.get("interface") or {}
    found = {
        name: CardTensor(name, str(entry["dtype"]), tuple("" if size is None else str(size) for size in entry["shape"]))
        for name, entry in tensors.items()
    }
    options = graph_options_of(manifest)
    batch = "B" if options.batch else "1"
    for state in recorded_states(manifest):
        grown = f"S+{state.shape[state.axis]}" if state.axis is not None and state.window is None else None
        shape = tuple(
            batch if size == "B" else grown if grown and axis == state.axis else str(size)
            for axis, size in enumerate(state.shape)
        )
        found[state.output_name] = CardTensor(state.output_name, state.dtype, shape, state.input_name)
    vocabulary = manifest["model"].get("vocab_size")
    makes_logits = recorded_task(manifest) != TEXT_TO_AUDIO
    if not tensors and makes_logits and vocabulary is not None and graph["outputs"]:
        logits = graph["outputs"][0]
        kept = str(options.num_logits_to_keep or "S")
        found.setdefault(logits, CardTensor(logits, options.computes_in, (batch, kept, str(vocabulary))))
    return found


def _files(manifest: Mapping[str, Any]) -> Iterator[CardFile]:
    archives = {part["archive"]: role for role, part in (manifest.get("archives") or {MODEL_ROLE: manifest}).items()}
    files = manifest.get("files") or {}
    for name, entry in sorted(files.items(), key=lambda item: (item[0] not in archives, item[0])):
        if name in archives:
            role = archives[name]
            what = "archive for tract" if role == MODEL_ROLE else f"archive for tract: {role}"
        elif name.startswith("tests/"):
            what = "inputs, and outputs of PyTorch"
        else:
            what = _FILES.get(name, "tokenizer" if name.startswith(("token", "vocab", "merges", "special")) else "")
        yield CardFile(name, int(entry["bytes"]), what)


def _example(size: str, tensor: CardTensor, axis: int) -> int | None:
    """Return a size for an axis of an example input."""
    if size.isdigit():
        return int(size)
    if not size.isidentifier():
        return None
    shape, floats = tensor.shape or (), tensor.dtype.startswith("f")
    if size == "B":
        return 1
    if not floats:
        return 8
    return 224 if len(shape) == 4 else 16_000 if len(shape) == 2 else 100


def _one_or_all(values: Sequence[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else list(values)


__all__ = ["FRONTEND", "CardArchive", "CardTensor", "ModelCard", "read_card"]
