"""`t2n-llm quantize-report`: what compression did to each tensor of an export, and what that does to its predictions.

In: an export folder, and the original model or another export of it. Out: a `QuantizeReport`: errors by tensor, read from
the archive itself, and divergence over a text, measured through the engine.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from generic_export.errors import OptionError
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.runner import Turn, open_runner
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.text import evaluation_text
from t2n_llm.export.folder import MANIFEST_NAME, archive_in, read_manifest
from t2n_llm.export.recorded import open_original
from t2n_llm.graph.interface import recorded_states
from t2n_llm.inspect.gguf_quality import BlockScheme, GgufQuality, gguf_named, gguf_quality
from t2n_llm.inspect.quality import (
    ArchiveReading,
    Predict,
    Quality,
    compare_windows,
    engine_predict,
    torch_predict,
    windows_of_text,
)
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import ModelSource, load_tokenizer
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.names import require_language_model
from t2n_llm.weights.archive_weights import stored_values, whole_records
from t2n_llm.weights.f32_model import reference_model
from t2n_llm.weights.placement import Placement, plan_residency

DEFAULT_TOKENS = 2048
DEFAULT_WINDOW = 256
_PLAIN = ("f16", "f32")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class TensorQuality:
    """How far one stored tensor is from the original.

    Attributes:
        label: its name in the archive.
        layer: number of its decoder layer, or None.
        kind: its name without the layer, such as `mlp.down_proj`.
        scheme: element type or block format.
        algorithm: what chose its values, or "".
        values: how many there are.
        bits: of one value.
        relative_error: squared error over energy; None when the values were scaled on purpose (awq, best, tuned), so that they
            cannot be compared one by one.
        output_error: the same of the layer's outputs on the calibration text; None without calibration.
    """

    label: str
    layer: int | None
    kind: str
    scheme: str
    algorithm: str
    values: int
    bits: float
    relative_error: float | None
    output_error: float | None

    @property
    def snr_db(self) -> float | None:
        """Signal to noise in decibels; None when unknown, infinite when exact."""
        if self.relative_error is None:
            return None
        return -10 * math.log10(self.relative_error) if self.relative_error > 0 else math.inf

    @property
    def drawn_error(self) -> float | None:
        """What charts show: the error of the weights, or of the outputs where the weights were scaled on purpose."""
        return self.relative_error if self.relative_error is not None else self.output_error

    @property
    def quantized(self) -> bool:
        """Whether it is stored in blocks."""
        return self.scheme not in _PLAIN


@dataclass(frozen=True)
class QuantizeReport:
    """What compression costs.

    Attributes:
        folder: name of the export.
        recipe: name of its recipe, or its element type.
        reference: what it is compared with.
        bytes: of all its weights.
        bits_per_weight: of all its weights.
        tensors: matrices and kernels, in the archive's order.
        quality: end effect on the text.
        text: which text.
        reading: how logits were got from the archive.
        seconds: that the engine took for the text.
        engine: name and version.
        rivals: GGUF files of the same model, on the same text.
    """

    folder: str
    recipe: str
    reference: str
    bytes: int
    bits_per_weight: float
    tensors: tuple[TensorQuality, ...]
    quality: Quality
    text: str
    reading: str
    seconds: float
    engine: str
    rivals: tuple[GgufQuality, ...] = ()

    def asdict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self) | {"tensors": [asdict(tensor) | {"snr_db": tensor.snr_db} for tensor in self.tensors]}


def quantize_report(
    folder: Path,
    reference: str | SourceRef | None = None,
    *,
    text: Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    window: int = DEFAULT_WINDOW,
    placement: Placement | None = None,
    engine: EngineOptions | None = None,
    against: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> QuantizeReport:
    """Measure an export against the model it was made from.

    Args:
        folder: made by `export_llm`, compressed or not.
        reference: hub id or folder of the original, run by PyTorch in f32; or the folder of another export of it, run by
            the engine. None, or no name, takes the hub id that was exported.
        text: UTF-8; None takes the text that comes with the package.
        tokens: about how many to score.
        window: tokens that are read at once, without what came before them.
        placement: where the original's weights may stay.
        engine: which one; None takes the pip-installed one.
        against: `llama.cpp:FILE.gguf`, a GGUF file of the same model; `llama.cpp`, the export's blocks as ggml rounds them.
        reporter: told what happens; None logs.

    Raises:
        ArchiveError: a folder is no export.
        MissingTokenizerError: the export carries no tokenizer.
        OptionError: the text is too short, the reference or a GGUF file is another model, or rivals are to be compared with
            an export.
        NotEnoughMemoryError: a rival does not fit beside the original.
        SourceError: the original cannot be found.
        EngineError: the engine refused the archive, or died.
    """
    reporter = reporter or LogReporter()
    files = [gguf_named(rival) for rival in against]
    exported = _Exported.open(folder)
    windows = exported.windows(text, tokens, window)
    ref = SourceRef.of(reference or "")
    if ref.name and (Path(ref.name) / MANIFEST_NAME).is_file():
        if files:
            raise OptionError("--against needs the reference model, not another export.", "Name it with --reference.")
        opened = _other_export(exported, Path(ref.name), engine)
    else:
        opened = _original(exported, ref, placement or Placement())
    reporter.stage("Opening the reference")
    with opened as original, exported.asked(engine) as asked:
        reporter.stage("Comparing tensors")
        tensors = tuple(_tensor_qualities(exported, original.tensors))
        reading = exported.reading.describe(window)
        reporter.stage(f"Running {len(windows)} windows in tract, {reading}")
        timed = _Timed(asked.predict)
        quality = compare_windows(windows, original.predict, timed.predict)
        rivals = tuple(_beside(exported, original, files, windows, reporter))
    size, bits = exported.weights(tensors)
    return QuantizeReport(
        folder=folder.resolve().name,
        recipe=exported.recipe,
        reference=original.name,
        bytes=size,
        bits_per_weight=bits,
        tensors=tensors,
        quality=quality,
        text=text.name if text is not None else "builtin",
        reading=reading,
        seconds=timed.seconds,
        engine=asked.name,
        rivals=rivals,
    )


def _beside(
    exported: _Exported, original: _Asked, files: Sequence[Path | None], windows: Sequence[Turn], reporter: Reporter
) -> Iterator[GgufQuality]:
    """Measure GGUF files of a model, or what ggml makes of it, against the original."""
    if original.source is None:
        return
    for file in files:
        reporter.stage(f"Running the same windows with the weights of {file.name if file is not None else 'ggml'}")
        yield gguf_quality(file, original.source, exported.blocks(), windows, original.predict)


# --- the two models ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """A model that predicts: under which name, its tensors by parameter, as the model has them, and where it comes from."""

    name: str
    predict: Predict
    tensors: Iterable[tuple[str, torch.Tensor]] = ()
    source: ModelSource | None = None


@dataclass
class _Timed:
    """Predictions, and the seconds they took."""

    inner: Predict
    seconds: float = 0.0

    def predict(self, window: Turn) -> torch.Tensor:
        started = time.monotonic()
        logits = self.inner(window)
        self.seconds += time.monotonic() - started
        return logits


@dataclass(frozen=True)
class _Exported:
    """An export folder."""

    folder: Path
    manifest: Mapping[str, Any]
    archive: Path

    @staticmethod
    def open(folder: Path) -> _Exported:
        manifest = read_manifest(folder)
        require_language_model(folder, manifest, "quantize-report")
        return _Exported(folder, manifest, archive_in(folder, manifest))

    @property
    def recipe(self) -> str:
        compression = self.manifest.get("compression")
        return str(compression["recipe"]["name"] if compression else self.manifest["graph"]["dtype"])

    @property
    def reading(self) -> ArchiveReading:
        return ArchiveReading(int(self.manifest.get("options", {}).get("num_logits_to_keep", 1)))

    def windows(self, text: Path | None, tokens: int, window: int) -> list[list[int]]:
        content = evaluation_text(text)
        limit = self.manifest["model"]["max_position_embeddings"]
        window = min(window, limit) if limit else window
        return windows_of_text(load_tokenizer(self.folder), content, max(1, round(tokens / max(1, window - 1))), window)

    def weights(self, tensors: Sequence[TensorQuality]) -> tuple[int, float]:
        """Return bytes and bits per weight: as recorded, or of the tensors read."""
        recorded = self.manifest.get("compression")
        if recorded:
            return int(recorded["bytes"]), float(recorded["bits_per_weight"])
        bits = sum(tensor.values * tensor.bits for tensor in tensors)
        return round(bits / 8), bits / max(1, sum(tensor.values for tensor in tensors))

    def records(self) -> dict[str, Mapping[str, Any]]:
        """Return what the manifest says of each weight, by label; nothing without compression."""
        tensors = (self.manifest.get("compression") or {}).get("tensors", ())
        return {record["label"]: record for record in whole_records(tensors)}

    def sums(self) -> dict[str, str]:
        """Return the label of each remainder, and of the tensor that it is added to, both ways."""
        tensors = (self.manifest.get("compression") or {}).get("tensors", ())
        pairs = {record["label"]: record["residual_of"] for record in tensors if record.get("residual_of")}
        return pairs | {label: rest for rest, label in pairs.items()}

    def blocks(self) -> dict[str, BlockScheme]:
        """Return how each parameter that is stored in blocks is stored."""
        return {
            name: BlockScheme(record["scheme"], tuple(record["axes"]) if record["axes"] is not None else None)
            for record in self.records().values()
            if record["scheme"] not in _PLAIN
            for name in record["parameters"]
        }

    def stored(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield label, the parameter's name, and the values as the model has them."""
        records, other, half = self.records(), self.sums(), dict[str, torch.Tensor]()
        for label, values in stored_values(self.archive):
            if label in other:
                if other[label] not in half:
                    half[label] = values
                    continue
                values = values + half.pop(other[label])
                label = label if label in records else other[label]
            record = records.get(label)
            axes = record["axes"] if record is not None else None
            name = record["parameters"][0] if record is not None else label
            yield label, name, values if axes is None else values.permute(*map(axes.index, range(len(axes))))

    @contextmanager
    def asked(self, engine: EngineOptions | None) -> Iterator[_Asked]:
        """Run the archive for the length of a `with` block."""
        states = recorded_states(self.manifest)
        dtype = self.manifest["graph"]["dtype"]
        with open_runner(self.archive, states, dtype, engine) as runner:
            yield _Asked(f"{runner.engine_name} {runner.engine_version}", engine_predict(runner, self.reading))


@contextmanager
def _other_export(exported: _Exported, folder: Path, engine: EngineOptions | None) -> Iterator[_Asked]:
    """Yield another export of the same model, as the reference."""
    other = _Exported.open(folder)
    for key, what in (("model_type", "a model of type"), ("architecture", "a")):
        mine, theirs = exported.manifest["source"].get(key), other.manifest["source"].get(key)
        if mine != theirs:
            raise OptionError(
                f"{exported.folder} is {what} {mine}, {folder} {what} {theirs}.",
                "Pass an export of the same model with --reference.",
            )
    if exported.manifest["model"]["vocab_size"] != other.manifest["model"]["vocab_size"]:
        raise OptionError(
            f"{exported.folder} and {folder} have different vocabularies.",
            "Pass an export of the same model with --reference.",
        )
    with other.asked(engine) as asked:
        tensors = ((name, values) for _, name, values in other.stored())
        yield _Asked(f"{folder.resolve().name} ({other.recipe}, {asked.name})", asked.predict, tensors)


@contextmanager
def _original(exported: _Exported, ref: SourceRef, placement: Placement) -> Iterator[_Asked]:
    """Yield the model that was exported, in PyTorch."""
    source = open_original(exported.folder, exported.manifest, ref)
    trust_remote_code = source.trust_remote_code
    residency = plan_residency(meta_model(source.config, trust_remote_code=trust_remote_code), placement)
    with reference_model(source.weights, residency, trust_remote_code=trust_remote_code) as model:
        named = () if residency.offloaded else model.named_parameters(remove_duplicate=False)
        tensors = ((name, parameter.detach().cpu()) for name, parameter in named)
        yield _Asked(f"{source.public_name} (PyTorch, f32)", torch_predict(model.eval()), tensors, source)


# --- tensor by tensor -------------------------------------------------------------------------------


def _tensor_qualities(exported: _Exported, original: Iterable[tuple[str, torch.Tensor]]) -> Iterator[TensorQuality]:
    """Yield the matrices and kernels of an export, compared with the original's."""
    records = exported.records()
    # A scaling is folded into neighbours: no weight near it can be compared with its original.
    folding = {name for name, algorithm in CALIBRATED.items() if algorithm.folds}
    scaled = any(record["algorithm"] in folding for record in records.values())
    stored = ((name, (label, values)) for label, name, values in exported.stored() if values.ndim >= 2)
    for (label, values), theirs in _paired(stored, original):
        record = records.get(label, {})
        layer = _LAYER.search(label)
        bits = float(record["bits_per_weight"]) if record else 8.0 * values.element_size()
        yield TensorQuality(
            label=label,
            layer=int(layer.group(1)) if layer else None,
            kind=(label[layer.end() :] if layer else label).removesuffix(".weight"),
            scheme=str(record.get("scheme") or {2: "f16", 4: "f32"}[values.element_size()]),
            algorithm=str(record.get("algorithm", "")),
            values=values.numel(),
            bits=bits,
            relative_error=None
            if theirs is None or (scaled and record.get("replaced"))
            else _relative_error(values, theirs),
            output_error=record.get("output_error"),
        )


_Stored = tuple[str, torch.Tensor]


def _paired(
    mine: Iterator[tuple[str, _Stored]], theirs: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[_Stored, torch.Tensor | None]]:
    """Bring together what bears the same name in two streams; both come in nearly the same order, so little is held."""
    left: dict[str, _Stored] = {}
    right: dict[str, torch.Tensor] = {}
    for ours, other in zip_longest(mine, theirs):
        left.update([ours] if ours is not None else [])
        right.update([other] if other is not None else [])
        for name in {pair[0] for pair in (ours, other) if pair is not None}:
            if name in left and name in right:
                yield left.pop(name), right.pop(name)
    yield from ((stored, None) for stored in left.values())


def _relative_error(values: torch.Tensor, original: torch.Tensor) -> float | None:
    if values.shape != original.shape:
        return None
    expected = original.float()
    energy = float(expected.square().sum(dtype=torch.float64))
    error = float((values.float() - expected).square().sum(dtype=torch.float64))
    return error / energy if energy else 0.0
