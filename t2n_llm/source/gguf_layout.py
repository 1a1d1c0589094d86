"""The tensors of a GGUF file as transformers' parameters: their names, and what llama.cpp's converter did to their layout undone.

In: an opened file and its config. Out: sources under the names of parameters. Names and changes of layout are those of
transformers' own GGUF tables; a change that only moves rows moves whole blocks. Gates and ups of experts become one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export.errors import CorruptCheckpointError, UnknownArchitectureError, WeightError
from generic_export.weights.source import TensorSource
from quant.prequantized import DecodedTensor, GgufFile, GgufTensor, joined
from quant.prequantized.gguf_reader import gguf_reader
from t2n_llm.compat import gguf_read_with
from t2n_llm.source.empty_model import meta_model

_STACKED = re.compile(r"(?P<block>blk\.\d+)\.ffn_(?P<what>gate|up|down|gate_up)_exps\.weight")
_SINGLE = re.compile(r"(?P<block>blk\.\d+)\.ffn_(?P<what>gate|up|down)\.(?P<expert>\d+)\.weight")  # before April 2024


def parameter_sources(file: GgufFile, config: Any) -> dict[str, TensorSource]:
    """Return the tensors of a file as parameters; what is no parameter keeps its name.

    Raises:
        UnknownArchitectureError: no names are known for the architecture.
        WeightError: a tensor is laid out in a way that cannot be undone while streaming.
        CorruptCheckpointError: a layer lacks experts.
    """
    names, processor = _parameter_names(file, config)
    shapes = dict(_parameter_shapes(meta_model(config)))
    experts, rest = _apart(file)
    sources: dict[str, TensorSource] = {}
    for block, projections in experts.items():
        for source in _expert_sources(file, block, projections, names, shapes):
            sources[source.name] = source
    for tensor in rest:
        name = names.get(tensor.name)
        if name is None or name not in shapes:
            sources[tensor.name] = tensor.source(tensor.name)
        else:
            sources[name] = _parameter(tensor, name, shapes[name], processor)
    return sources


def _parameter_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of what can be read from a file: not of experts that transformers keeps input-first."""
    transposed = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "is_transposed", False))
    for name, value in model.state_dict().items():
        if not name.startswith(transposed):
            yield name, tuple(value.shape)


def _parameter_names(file: GgufFile, config: Any) -> tuple[Mapping[str, str], Any]:
    """Return transformers' table GGUF name -> parameter, and what undoes llama.cpp's changes of layout."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
    try:
        # Mixtral is a `llama` there: llama.cpp's converter names and changes its tensors so.
        name = None if config.model_type != "mixtral" else file.architecture
        with gguf_read_with(gguf_reader()):
            return get_gguf_hf_weights_map(meta_model(config), processor, model_type=name), processor
    except NotImplementedError as error:
        raise UnknownArchitectureError(
            f"{file.paths[0]}: the installed gguf package has no tensor names for {config.model_type!r}.",
            "Update it: pip install --upgrade gguf.",
        ) from error


# --- experts ------------------------------------------------------------------------------------

_Projections = dict[str, dict[int, GgufTensor]]  # gate, up, down or gate_up -> expert -> its matrix


def _apart(file: GgufFile) -> tuple[dict[str, _Projections], list[GgufTensor]]:
    """Return the experts of each layer, and the other tensors."""
    experts: dict[str, _Projections] = {}
    rest = []
    for tensor in file.tensors.values():
        stacked, single = _STACKED.fullmatch(tensor.name), _SINGLE.fullmatch(tensor.name)
        found = stacked or single
        if found is None:
            rest.append(tensor)
            continue
        projection = experts.setdefault(found["block"], {}).setdefault(found["what"], {})
        if single is not None:
            projection[int(single["expert"])] = tensor
        else:
            height = tensor.shape[-2]
            projection |= {each: tensor.rows(each * height, (each + 1) * height) for each in range(tensor.shape[0])}
    return experts, rest


def _expert_sources(
    file: GgufFile,
    block: str,
    projections: _Projections,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[TensorSource]:
    """Yield what the experts of a layer are in transformers: `down_proj`, and gates above ups in `gate_up_proj`."""
    down = names.get(f"{block}.ffn_down_exps", "")
    both = down.removesuffix("down_proj") + "gate_up_proj"
    if down not in shapes or both not in shapes:
        raise WeightError(
            f"{file.paths[0]}: {block} has experts, whose layout for {file.architecture!r} is not supported.",
            "Export the original checkpoint.",
        )
    above = ("gate_up",) if "gate_up" in projections else ("gate", "up")
    for name, parts in ((down, ("down",)), (both, above)):
        pieces = [_expert(file, block, projections, part, each) for each in range(shapes[name][0]) for part in parts]
        yield _stacked(name, shapes[name], pieces)


def _expert(file: GgufFile, block: str, projections: _Projections, part: str, expert: int) -> GgufTensor:
    tensor = projections.get(part, {}).get(expert)
    if tensor is None:
        raise CorruptCheckpointError(
            f"{file.paths[0]}: {block} has no {part} projection of expert {expert}.", "Download the file again."
        )
    return tensor


def _stacked(name: str, shape: tuple[int, ...], pieces: Sequence[GgufTensor]) -> TensorSource:
    rows = sum(piece.shape[0] for piece in pieces)
    if rows != math.prod(shape[:-1]) or {piece.shape[1] for piece in pieces} != {shape[-1]}:
        raise WeightError(
            f"tensor {pieces[0].name}: {len(pieces)} matrices of {list(pieces[0].shape)} do not form {name} of "
            f"shape {list(shape)}.",
            "Export the original checkpoint.",
        )
    return joined(name, shape, pieces)


# --- other layouts ------------------------------------------------------------------------------


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
                f"tensor {tensor.name}: its shape {list(tensor.shape)} does not fit {name} of shape {list(shape)}.",
                "Export the original checkpoint.",
            )
        yield torch.from_numpy(np.ascontiguousarray(made, dtype=np.float32)).reshape(shape)

    return DecodedTensor(name, shape, pieces, was_quantized=not tensor.is_plain)
