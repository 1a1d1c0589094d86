"""Statistics of a calibration, kept between exports: which model they belong to, and whether they fit the one at hand.

In: a file and a model. Out: `InputStatistics` by parameter name, with warnings; or a file that a later export can read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, OptionError
from generic_export.files import is_disk_full, sha256
from generic_export.weights.pinned_file import readers_of
from quant.imatrix import IMATRIX_SUFFIX, Imatrix, load_imatrix, matching_statistics, save_imatrix
from quant.protocol import InputStatistics
from t2n_llm.source.hub import ModelSource

_SAMPLE_BYTES = 1 << 16
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
# GGUF's name of an architecture, where it is not transformers' `model_type` without underscores and hyphens.
_ARCHITECTURES: Mapping[str, str] = {
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "mistral": "llama",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "cohere": "command-r",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "olmo2": "olmo2",
}


@dataclass(frozen=True)
class FittingStatistics:
    """What a file says of a model's tensors.

    Attributes:
        statistics: by parameter name; only those whose size fits.
        warnings: in what the file does not belong to the model.
    """

    statistics: Mapping[str, InputStatistics]
    warnings: tuple[str, ...]


def model_key(source: ModelSource) -> str:
    """Return what tells a model's weights from others: the commit of a hub model, else a hash of samples of its files."""
    if source.revision is not None:
        return source.revision
    digest = hashlib.sha256()
    for path in sorted(source.checkpoint().files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for position in (0, size // 3, 2 * size // 3):  # headers alone do not change with training
                file.seek(position)
                digest.update(file.read(_SAMPLE_BYTES))
    return f"files-{digest.hexdigest()[:32]}"


def tokenizer_key(source: ModelSource) -> str:
    """Return a hash of the files that decide how a text becomes tokens; "" when there are none."""
    found = [source.folder / name for name in _TOKENIZERS if (source.folder / name).is_file()]
    return hashlib.sha256("".join(map(sha256, found)).encode()).hexdigest()[:32] if found else ""


def read_statistics(path: Path, source: ModelSource, shapes: Mapping[str, tuple[int, ...]]) -> FittingStatistics:
    """Read a file and find what it says of some tensors.

    Args:
        path: `*.imatrix.safetensors`, or what llama-imatrix writes (GGUF, or the older .dat).
        source: the model.
        shapes: parameter name -> its shape [..., K], for the tensors that want statistics.

    Raises:
        OptionError: nothing in it fits the model.
        WeightError: the file cannot be read.
    """
    imatrix = load_imatrix(path, gguf_architecture(source.config), _layers(source.config))
    found = {}
    for name, shape in shapes.items():
        entry = matching_statistics(imatrix, name, shape)
        if entry is not None and entry.mean_square.ndim == 1:
            found[name] = entry
    if shapes and not found:
        some, wanted = next(iter(imatrix.statistics), "nothing"), next(iter(shapes))
        raise OptionError(
            f"imatrix {path}: no entry matches {source.name}: it contains {some}, the model has {wanted} "
            f"{list(shapes[wanted])}.",
            "Use the file that was made with this model.",
        )
    return FittingStatistics(found, tuple(_differences(path, imatrix, source)))


def write_statistics(path: Path, source: ModelSource, statistics: Mapping[str, InputStatistics]) -> None:
    """Keep the statistics of a calibration.

    Raises:
        OptionError: the name does not end in `.imatrix.safetensors`.
        ArchiveError: the file cannot be written.
    """
    check_name(path)
    try:
        readers = readers_of((*source.checkpoint().held, *source.held))
        save_imatrix(Imatrix(statistics, model_key(source), tokenizer_key(source)), path, readers)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise ArchiveError(f"{path}: cannot be written: {error.strerror}.", "Choose another file.") from error


def check_name(path: Path) -> None:
    """Refuse a name that would not be recognised when the file is read.

    Raises:
        OptionError: it ends otherwise, or its folder is not there.
    """
    if not path.name.endswith(IMATRIX_SUFFIX):
        raise OptionError(f"--save-imatrix {path}: the name must end in {IMATRIX_SUFFIX}.")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"--save-imatrix {path}: no such folder.", "Make it first.")


def recorded_file(path: Path) -> dict[str, str]:
    """Return what `export.json` says of a file: its name and content, not its place on this machine.

    Raises:
        OptionError: it cannot be read.
    """
    try:
        return {"name": path.name, "sha256": sha256(path)}
    except OSError as error:
        raise OptionError(f"imatrix {path}: cannot be read: {error.strerror}.") from error


def gguf_architecture(config: Any) -> str:
    """Return GGUF's name of a transformers model's architecture."""
    model_type = str(config.model_type)
    return _ARCHITECTURES.get(model_type, model_type.replace("_", "").replace("-", ""))


def _layers(config: Any) -> int:
    return int(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0))


def _differences(path: Path, imatrix: Imatrix, source: ModelSource) -> list[str]:
    """Return what is odd about using these statistics for this model."""
    found = []
    if imatrix.model and imatrix.model != model_key(source):
        found.append(f"imatrix {path.name} was collected with other weights than those of {source.public_name}.")
    if imatrix.tokenizer and imatrix.tokenizer != tokenizer_key(source):
        found.append(f"imatrix {path.name} was collected with another tokenizer than that of {source.public_name}.")
    return found
