"""A GGUF file as the source of a model: config and tokenizer through transformers, weights from the mapped file.

In: the path of a `.gguf` file. Out: its metadata as a folder, and a checkpoint under transformers' parameter names. Names and
changes of layout are those of transformers' own GGUF tables; a change that only moves rows moves whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from generic_export.errors import MissingTokenizerError, SourceError, UnknownArchitectureError, WeightError, first_line
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.source import TensorSource
from quant.prequantized import DecodedTensor, GgufFile, GgufTensor, open_gguf
from quant.prequantized.gguf_reader import gguf_reader
from t2n_llm.compat import gguf_read_with
from t2n_llm.source.empty_model import meta_model

_EXACT_KINDS = ("Q4_0", "F16", "BF16", "F32")
# llama.cpp computes the frequencies of Llama 3.1's long context itself; transformers' GGUF support reads no rope scaling.
_LONG_ROPE = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufMetadata:
    """What a GGUF file says besides its weights.

    Attributes:
        config: transformers config.
        folder: config.json and tokenizer files; removed with this object.
    """

    config: Any
    folder: TemporaryDirectory[str]


def read_gguf_metadata(path: Path, *, require_tokenizer: bool) -> GgufMetadata:
    """Read config and tokenizer of a GGUF file.

    Args:
        path: the file.
        require_tokenizer: refuse a file whose tokenizer transformers cannot build; else go without.

    Raises:
        UnknownArchitectureError: transformers reads no GGUF files of this architecture.
        SourceError: the metadata have no meaning.
        MissingTokenizerError: a tokenizer is required.
        WeightError, CorruptCheckpointError: as `open_gguf`.
    """
    from transformers import AutoConfig, AutoTokenizer

    architecture = open_gguf(path).architecture  # says what is wrong with a damaged file
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    folder = TemporaryDirectory(prefix="t2n-llm-gguf-")
    with gguf_read_with(gguf_reader()):
        try:
            config = AutoConfig.from_pretrained(**where)
            config.save_pretrained(folder.name)
        except Exception as error:
            raise _metadata_error(path, architecture, error) from error
        try:
            AutoTokenizer.from_pretrained(**where).save_pretrained(folder.name)
        except Exception as error:  # tokenizers itself raises plain Exception
            if require_tokenizer:
                raise MissingTokenizerError(
                    f"{path}: transformers cannot build its tokenizer: {first_line(error)}",
                    "`t2n-llm export --no-tokenizer` goes without.",
                ) from error
    return GgufMetadata(config, folder)


def gguf_checkpoint(path: Path, config: Any) -> Checkpoint:
    """Open the weights of a GGUF file under the names of transformers' parameters; none is read.

    Args:
        path: the file.
        config: transformers config, as `read_gguf_metadata` gives it.

    Raises:
        UnknownArchitectureError: no names are known for the architecture.
        WeightError: a tensor is laid out in a way that cannot be undone while streaming.
    """
    file = open_gguf(path)
    names, processor = _parameter_names(path, file, config)
    shapes = {name: tuple(value.shape) for name, value in meta_model(config).state_dict().items()}
    tensors: dict[str, TensorSource] = {}
    for tensor in file.tensors.values():
        name = names.get(tensor.name)
        if name is None or name not in shapes:
            _refuse_merged(path, tensor)
            tensors[tensor.name] = tensor.source(tensor.name)
        else:
            tensors[name] = _parameter(tensor, name, shapes[name], processor)
    total = sum(tensor.data.nbytes for tensor in file.tensors.values())
    return Checkpoint(tensors, (path,), total, tuple(_notes(file)))


def load_gguf_model(path: Path) -> Any:
    """Return the model of a GGUF file in f32, dequantised by transformers: the judge of an export from it.

    Raises:
        SourceError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with gguf_read_with(gguf_reader()):
            model = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
            )
    except Exception as error:
        raise SourceError(
            f"{path}: transformers cannot load it: {type(error).__name__}: {error}", "Pass --no-check to do without."
        ) from error
    return model.eval()


def _metadata_error(path: Path, architecture: str, error: Exception) -> SourceError:
    if "not supported" in str(error):
        return UnknownArchitectureError(
            f"{path}: transformers reads no GGUF files of architecture {architecture!r}.",
            "Give the original checkpoint.",
        )
    return SourceError(f"{path}: its metadata make no config: {error}", "Give the original checkpoint.")


def _notes(file: GgufFile) -> Iterator[str]:
    kinds: dict[str, int] = {}
    for tensor in file.tensors.values():
        if tensor.kind not in _EXACT_KINDS:
            kinds[tensor.kind] = kinds.get(tensor.kind, 0) + 1
    for kind, count in sorted(kinds.items()):
        yield (
            f"gguf: {count} tensor{'s' * (count > 1)} of type {kind} {'are' if count > 1 else 'is'} dequantised: tract "
            "runs Q4_0 only."
        )
    if _LONG_ROPE in file.tensors:
        yield (
            "gguf: the file scales rotary positions (rope_freqs), which transformers does not read from GGUF: texts "
            "longer than the original context will differ; export the original checkpoint for those."
        )


# --- names and layouts --------------------------------------------------------------------------


def _parameter_names(path: Path, file: GgufFile, config: Any) -> tuple[Mapping[str, str], Any]:
    """Return transformers' table GGUF name -> parameter, and what undoes llama.cpp's changes of layout."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
    try:
        return get_gguf_hf_weights_map(meta_model(config), processor), processor
    except NotImplementedError as error:
        raise UnknownArchitectureError(
            f"{path}: the installed gguf package has no tensor names for {config.model_type!r}.",
            "Install a newer one: pip install --upgrade gguf.",
        ) from error


def _refuse_merged(path: Path, tensor: GgufTensor) -> None:
    if tensor.name.endswith("_exps.weight"):
        raise WeightError(
            f"{path}: tensor {tensor.name} holds the experts of a layer, which are not read from GGUF files.",
            "Export the original checkpoint.",
        )


def _parameter(tensor: GgufTensor, name: str, shape: tuple[int, ...], processor: Any) -> TensorSource:
    """Return a tensor in the layout of its parameter."""
    order = _row_order(tensor, processor) if tensor.shape == shape else None
    if order is None:
        return _processed(tensor, name, shape, processor)
    same = bool((order == np.arange(len(order))).all())
    return tensor.source(name, None if same else order)


def _row_order(tensor: GgufTensor, processor: Any) -> np.ndarray | None:
    """Return in which order a parameter has the rows of a tensor, or None when more than their order changes.

    Rows are numbered, and transformers' own change of layout is made to the numbers.
    """
    if len(tensor.shape) > 2:
        return None
    numbers = np.arange(tensor.shape[0])
    if len(tensor.shape) == 2:
        numbers = numbers[:, None]
    try:
        moved = _process(processor, tensor.name, numbers)
    except Exception:  # it needs the real columns
        return None
    if moved is None or moved.shape != numbers.shape:
        return None
    if len(tensor.shape) == 1:
        return np.zeros(1, dtype=np.int64) if bool((moved == numbers).all()) else None
    rows = moved.reshape(-1).astype(np.int64)
    return rows if bool((np.sort(rows) == np.arange(len(rows))).all()) else None


def _process(processor: Any, name: str, values: np.ndarray) -> np.ndarray | None:
    parsed: dict[str, Any] = {"tensors": {}}
    result = processor.process(weights=values, name=name, tensor_key_mapping={name: name}, parsed_parameters=parsed)
    return None if result.name is None or parsed["tensors"] else np.asarray(result.weights)


def _processed(tensor: GgufTensor, name: str, shape: tuple[int, ...], processor: Any) -> DecodedTensor:
    """Return a tensor that transformers changes as a whole: norms stored plus one, transposed weights."""

    def pieces() -> Iterator[torch.Tensor]:
        made = _process(processor, tensor.name, tensor.values())
        if made is None or math.prod(made.shape) != math.prod(shape):
            raise WeightError(
                f"tensor {tensor.name}: of shape {list(tensor.shape)} it does not make {name} of shape {list(shape)}.",
                "Export the original checkpoint.",
            )
        yield torch.from_numpy(np.ascontiguousarray(made, dtype=np.float32)).reshape(shape)

    return DecodedTensor(name, shape, pieces, was_quantized=not tensor.is_plain)
