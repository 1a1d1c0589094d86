"""What the blocks of a GGUF file cost the model that an export was made from.

In: the original as a source, and a GGUF file of it, or how the export stores its tensors. Out: a `GgufQuality`, measured in PyTorch
on the values that the file has. llama.cpp's own kernels round activations to 8 bits besides: what that costs is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export.errors import OptionError, WeightError
from generic_export.weights.values import value_pieces
from t2n_llm.bench.compared_engines.gguf_file import FILE_TYPES
from t2n_llm.check.runner import Turn
from t2n_llm.inspect.quality import Predict, Quality, compare_windows, torch_predict
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.gguf import gguf_checkpoint
from t2n_llm.source.hub import ModelSource
from t2n_llm.weights.f32_model import reference_model
from t2n_llm.weights.placement import require_memory

RIVAL = "llama.cpp"


@dataclass(frozen=True)
class GgufQuality:
    """How far a model with the values of a GGUF file is from the original.

    Attributes:
        name: of the file, or what was rounded.
        bytes: of its tensors.
        bits_per_weight: of all of them.
        quality: over the same windows as the export.
    """

    name: str
    bytes: int
    bits_per_weight: float
    quality: Quality


@dataclass(frozen=True)
class BlockScheme:
    """How an export stores a parameter.

    Attributes:
        scheme: `q4_0` or `q8_1`.
        axes: the parameter's axes in the order in which the blocks lie; None is its own.
    """

    scheme: str
    axes: tuple[int, ...] | None = None


def gguf_named(text: str) -> Path | None:
    """Return the file of `llama.cpp:FILE.gguf`; None for `llama.cpp` alone.

    Raises:
        OptionError: it is neither, or there is no such file.
    """
    name, _, file = text.partition(":")
    if name != RIVAL:
        raise OptionError(f"--against {text}: no such rival.", f"Use {RIVAL}, or {RIVAL}:FILE.gguf.")
    if file and not Path(file).is_file():
        raise OptionError(f"--against {text}: {file}: no such file.", f"Name a GGUF file, or none: --against {RIVAL}.")
    return Path(file) if file else None


def gguf_quality(
    file: Path | None,
    source: ModelSource,
    schemes: Mapping[str, BlockScheme],
    windows: Sequence[Turn],
    reference: Predict,
) -> GgufQuality:
    """Measure what a GGUF file's values do to a model's predictions.

    Args:
        file: a GGUF file of the model; None rounds what `schemes` names as the gguf package does, with ggml's own algorithm.
        source: the original.
        schemes: name of a parameter -> how the export stores it; of those in blocks.
        windows: token ids.
        reference: the original's predictions.

    Raises:
        OptionError: the file is of another model, or the export has no blocks to compare with.
        NotEnoughMemoryError: a second model in f32 does not fit.
    """
    if file is None and not schemes:
        raise OptionError(
            "the export holds no blocks that ggml could round.", f"Give a file: --against {RIVAL}:FILE.gguf."
        )
    network = meta_model(source.config, trust_remote_code=source.trust_remote_code)
    require_memory(network, None, "--against needs a second model", "Leave it out, or use a larger machine.")
    with reference_model(source.weights, trust_remote_code=source.trust_remote_code) as model, torch.no_grad():
        size = _rounded(model, schemes) if file is None else _taken(model, file, source.config)
        values = sum(parameter.numel() for parameter in model.parameters())
        quality = compare_windows(windows, reference, torch_predict(model.eval()))
    name = f"{', '.join(sorted({each.scheme for each in schemes.values()}))} of ggml" if file is None else file.name
    return GgufQuality(name, size, 8 * size / values, quality)


def _rounded(model: nn.Module, schemes: Mapping[str, BlockScheme]) -> int:
    """Round the parameters of a model in place as ggml does; return the bytes that they take.

    Matrices without blocks count as f16, vectors as f32: that is how llama.cpp's converter writes them.
    """
    total = 0
    for name, parameter in model.named_parameters():
        scheme = schemes.get(name)
        if scheme is None:
            total += parameter.numel() * (2 if parameter.ndim > 1 else 4)
            continue
        axes = scheme.axes or tuple(range(parameter.ndim))
        lying = parameter.permute(*axes)
        size, values = _through_blocks(lying.contiguous().numpy(), FILE_TYPES[scheme.scheme])
        lying.copy_(torch.from_numpy(values))
        total += size
    return total


def _through_blocks(values: np.ndarray, kind: str) -> tuple[int, np.ndarray]:
    """Return the bytes that float32 values take as blocks, and what is read from these."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    blocks = quantize(values, GGMLQuantizationType[kind])
    return blocks.nbytes, dequantize(blocks, GGMLQuantizationType[kind]).reshape(values.shape)


def _taken(model: nn.Module, file: Path, config: Any) -> int:
    """Give a model the values of a GGUF file; return the bytes of the file's tensors.

    Raises:
        OptionError: one of the model's tensors is not in the file, or has another shape there.
    """
    # Tied parameters have several names, of which a file has one.
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    try:
        checkpoint = gguf_checkpoint(file, config)
        for parameter, known_as in names.items():
            found = next((name for name in known_as if name in checkpoint.tensors), None)
            if found is None:
                raise WeightError(f"there is no {known_as[0]} in it")
            pieces = [piece.to(torch.float32) for piece in value_pieces(checkpoint.tensors[found])]
            parameter.copy_(torch.cat(pieces).reshape(parameter.shape))
    except WeightError as error:
        raise OptionError(f"{file.name}: {error.message}", "Give a GGUF file of the same model.") from error
    return checkpoint.total_bytes


__all__ = ["RIVAL", "BlockScheme", "GgufQuality", "gguf_named", "gguf_quality"]
