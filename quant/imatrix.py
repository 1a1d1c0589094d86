"""How strong each input channel of a linear layer is: collected, kept in files, and used to weigh the scale search.

In: activations, or a file: our `*.imatrix.safetensors`, or llama.cpp's imatrix in its GGUF or its older binary form.
Out: `InputStatistics` by module name, and the quantiser that uses them.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from generic_export.errors import WeightError, first_line
from generic_export.files import partial_beside
from quant.blocks import Q4Blocks
from quant.protocol import InputStatistics, PackedRows
from quant.symmetric import add_products, mirrored
from quant.weighted_search import search_rows, weighted_scale_search

IMATRIX_SUFFIX = ".imatrix.safetensors"
_FORMAT = "t2n-imatrix-1"
_GGUF_MAGIC = b"GGUF"
_SUMS, _COUNTS = ".in_sum2", ".counts"
_LARGEST_DAT_COUNT = 1 << 24  # entries, name lengths and channels beyond this are not a file of this kind


@dataclass(frozen=True)
class ImatrixQuantizer:
    """The scale search weighted by E[x^2] of the input channels; by the weights' own magnitude when there is none.

    Scales of both signs are tried; grids that the weight lies on are kept.
    """

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None = None) -> Q4Blocks:
        """Choose levels and scales; see `Quantizer`.

        Raises:
            WeightError: the statistics have another number of channels, or values are not finite.
        """
        return weighted_scale_search(weight, _importance(weight, statistics), keep_grids=True)

    def quantize_rows(self, rows: torch.Tensor, statistics: InputStatistics | None = None) -> PackedRows:
        """Choose levels and scales of rows as they are stored; see `RowQuantizer`.

        Raises:
            WeightError: as `quantize`.
        """
        return search_rows(rows, _importance(rows, statistics))


def _importance(weight: torch.Tensor, statistics: InputStatistics | None) -> torch.Tensor | None:
    if statistics is None:
        return None
    if statistics.mean_square.shape[-1] != weight.shape[-1]:
        raise WeightError(
            f"statistics of {statistics.mean_square.shape[-1]} channels do not fit a weight with "
            f"{weight.shape[-1]} input channels.",
            "Collect the statistics with this model.",
        )
    return statistics.mean_square


@dataclass
class StatisticsAccumulator:
    """Adds up what a layer's inputs were, batch by batch.

    Args:
        channels: K.
        with_hessian: also accumulate E[x x^T].
    """

    channels: int
    with_hessian: bool = False
    tokens: int = 0
    _squares: torch.Tensor = field(init=False)
    _products: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._squares = torch.zeros(self.channels, dtype=torch.float64)
        if self.with_hessian:
            self._products = torch.zeros(self.channels, self.channels)

    def add(self, inputs: torch.Tensor) -> None:
        """Add a batch of inputs, any float dtype, [..., K]."""
        rows = inputs.detach().reshape(-1, self.channels).to(torch.float32)
        self.tokens += len(rows)
        self._squares += rows.square().sum(dim=0, dtype=torch.float64)
        if self._products is not None:
            add_products(self._products, rows)

    def statistics(self) -> InputStatistics:
        """Return the means so far; zeros when nothing was added."""
        count = max(1, self.tokens)
        hessian = None if self._products is None else mirrored(self._products / count)
        return InputStatistics((self._squares / count).to(torch.float32), self.tokens, hessian)


@dataclass(frozen=True)
class Imatrix:
    """Statistics of a whole model.

    Attributes:
        statistics: mean squares (no Hessians) by parameter name, such as `model.layers.0.mlp.up_proj.weight`. Those of
            stacked experts are [E, 1, K].
        model: which model they belong to (its revision or a hash of its files); "" when unknown.
        tokenizer: hash of the tokenizer that made the ids; "" when unknown.
    """

    statistics: Mapping[str, InputStatistics]
    model: str = ""
    tokenizer: str = ""


def save_imatrix(imatrix: Imatrix, path: Path, readers: int = 0o044) -> None:
    """Write `*.imatrix.safetensors`: one float32 tensor of mean squares per parameter; token counts in the metadata.

    Args:
        imatrix: what was measured.
        path: the file; one that is there is replaced.
        readers: permission bits of group and others, from which the umask takes.

    Raises:
        OSError: the file cannot be written; then nothing is left.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Copies: tensors that read the same inputs share their statistics, and the format knows no sharing.
    tensors = {name: entry.mean_square.clone().contiguous() for name, entry in imatrix.statistics.items()}
    tokens = {name: entry.tokens for name, entry in imatrix.statistics.items()}
    metadata = {
        "format": _FORMAT,
        "model": imatrix.model,
        "tokenizer": imatrix.tokenizer,
        "tokens": json.dumps(tokens),
    }
    partial = partial_beside(path)
    try:
        mode = _mode_of_new(partial, 0o600 | readers)
        save_file(tensors, partial, metadata)  # puts a file of its own there, for its owner alone
        partial.chmod(mode)
        partial.replace(path)
    except SafetensorError as error:  # how it reports a failure of the disk
        raise OSError(None, str(error)) from error
    finally:
        partial.unlink(missing_ok=True)


def _mode_of_new(path: Path, mode: int) -> int:
    """Make an empty file, and return the permissions that the umask leaves of those asked for."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, mode)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def load_imatrix(path: Path, architecture: str | None = None, layers: int | None = None) -> Imatrix:
    """Read statistics of any of the three forms, recognised by content.

    Args:
        path: the file.
        architecture: GGUF's name of the model's architecture (`llama`, `qwen3`, ...), to translate llama.cpp's tensor names.
        layers: how many decoder layers the model has; needed with `architecture`.

    Raises:
        WeightError: the file is missing, damaged, of another kind, or needs `architecture`.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise WeightError(f"imatrix {path}: cannot be read: {error.strerror}.") from error
    if path.name.endswith(".safetensors"):
        return _load_own(path)
    entries = _read_gguf(path) if magic == _GGUF_MAGIC else _read_dat(path)
    if architecture is None or layers is None:
        raise WeightError(f"imatrix {path}: its tensors have llama.cpp's names.", "Pass the model to which it belongs.")
    return Imatrix(dict(_translated(entries, architecture, layers)))


def _load_own(path: Path) -> Imatrix:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tokens = json.loads(metadata.get("tokens", "{}"))
            statistics = {name: _entry(file.get_tensor(name), int(tokens.get(name, 0))) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise WeightError(f"imatrix {path}: damaged: {error}.", "Collect the statistics again.") from error
    if metadata.get("format") != _FORMAT:
        raise WeightError(f"imatrix {path}: not an imatrix of t2n-llm.", f"Expected format {_FORMAT}.")
    return Imatrix(statistics, metadata.get("model", ""), metadata.get("tokenizer", ""))


def _entry(mean_square: torch.Tensor, tokens: int) -> InputStatistics:
    return InputStatistics(mean_square.to(torch.float32), tokens)


def _read_gguf(path: Path) -> dict[str, InputStatistics]:
    """llama.cpp's newer form: `NAME.in_sum2` [K] or [E, K] sums of squares, and `NAME.counts` of tokens."""
    from quant.prequantized.gguf_reader import gguf_reader

    try:
        tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf_reader()(path).tensors}
    except Exception as error:  # the reader raises what numpy raises
        raise WeightError(f"imatrix {path}: not a readable GGUF file: {error}.") from error
    entries = {}
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        base = name.removesuffix(_SUMS)
        if base + _COUNTS not in tensors:
            raise WeightError(f"imatrix {path}: {base} has sums but no counts.", "Make the file again.")
        try:
            entries[base] = _from_sums(sums.to(torch.float64), tensors[base + _COUNTS].to(torch.float64))
        except (RuntimeError, ValueError, OverflowError) as error:
            raise WeightError(
                f"imatrix {path}: the sums of {base} do not match its counts: {first_line(error)}.",
                "Make the file again.",
            ) from error
    if not entries:
        raise WeightError(f"imatrix {path}: a GGUF file without imatrix entries.", "Use a file of llama-imatrix.")
    return entries


def _from_sums(sums: torch.Tensor, counts: torch.Tensor) -> InputStatistics:
    matrices = max(1, counts.numel())
    means = sums.reshape(matrices, -1) / counts.reshape(matrices, 1).clamp(min=1)
    return _entry(_per_expert(means), int(counts.sum()))


def _per_expert(means: torch.Tensor) -> torch.Tensor:
    """[1, K] to [K]; [E, K] to [E, 1, K], which broadcasts over stacked weights [E, N, K]."""
    return means[0] if len(means) == 1 else means.unsqueeze(1)


def _read_dat(path: Path) -> dict[str, InputStatistics]:
    """llama.cpp's older form: int32 entries, then for each: name length, name, calls, value count, float32 values.

    The values are sums of squares over tokens, divided by the tokens of a call and multiplied by the number of calls
    (tools/imatrix/imatrix.cpp, `save_imatrix_legacy`); so values / calls is the mean square.
    """
    entries = {}
    try:
        with path.open("rb") as file:
            for _ in range(_read_int(file)):
                name = _read_exactly(file, _read_int(file)).decode()
                calls, count = _read_int(file), _read_int(file)
                values = torch.frombuffer(bytearray(_read_exactly(file, 4 * count)), dtype=torch.float32)
                entries[name] = _entry(values / max(1, calls), calls)
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise WeightError(
            f"imatrix {path}: neither a GGUF nor an imatrix.dat file: {error}.", "Use a file of llama-imatrix."
        ) from error
    if not entries:
        raise WeightError(f"imatrix {path}: it has no entries.", "Use a file of llama-imatrix.")
    return entries


def _read_int(file: BinaryIO) -> int:
    (value,) = struct.unpack("<i", _read_exactly(file, 4))
    if not 0 <= value <= _LARGEST_DAT_COUNT:
        raise ValueError(f"a count of {value}")
    return int(value)


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise ValueError(f"{count - len(data)} bytes are missing at its end")
    return data


def _translated(
    entries: Mapping[str, InputStatistics], architecture: str, layers: int
) -> Iterable[tuple[str, InputStatistics]]:
    """Yield the entries under Hugging Face parameter names; a llama.cpp tensor can be several of them."""
    names = _hugging_face_names(architecture, layers)
    for name, entry in entries.items():
        for module in names.get(name.removesuffix(".weight"), ()):
            yield module + ".weight", entry


def _hugging_face_names(architecture: str, layers: int) -> dict[str, list[str]]:
    """Return llama.cpp tensor name -> the module names that gguf's table gives for it."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise WeightError(f"imatrix: GGUF has no architecture {architecture!r}.", "Use --calibration instead.")
    table: dict[str, list[str]] = {}
    mapping: Mapping[str, Any] = get_tensor_name_map(known[architecture], layers).mapping
    for module, (_, name) in mapping.items():
        table.setdefault(name, []).append(module)
    return table


def matching_statistics(imatrix: Imatrix, parameter: str, shape: tuple[int, ...]) -> InputStatistics | None:
    """Return what is known of one parameter's inputs, or None: not there, of another size, or never active.

    Args:
        imatrix: the statistics of a model.
        parameter: its name.
        shape: its shape [..., K].
    """
    entry = imatrix.statistics.get(parameter)
    if entry is None or not math.isfinite(float(entry.mean_square.sum())) or not bool((entry.mean_square > 0).any()):
        return None
    fits = entry.mean_square.ndim <= len(shape) and entry.mean_square.shape[-1] == shape[-1]
    return entry if fits else None
