"""Where a channel scaling can hide in a layer: what produces the channels, and everything that reads them.

In: a layer with its values. Out: the folds its modules' names and shapes suggest. Whether one is exact is not
believed but checked, by running the layer: `apply_fold` undoes what changes the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_EXACT = 2e-4  # of the largest output: float32 rounding in a different place, and nothing more

# Names that Hugging Face decoder layers give: producer -> readers of its output, in order of preference.
_ATTENTION_READERS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",))
_MLP_READERS = (("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",), ("fc1",), ("dense_h_to_4h",))
_ATTENTION_NORMS = ("input_layernorm",)
_MLP_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm")
_ATTENTION_NAMES = ("self_attn", "attention", "attn")
_MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")

# The same of encoder-decoders, by place in the layer: norm, readers (BART and its like, Whisper among them; T5 and its like).
_QKV, _T5_QKV = ("q_proj", "k_proj", "v_proj"), ("q", "k", "v")
_PLACED_NORMS = (
    ("self_attn_layer_norm", tuple(f"self_attn.{name}" for name in _QKV)),
    ("encoder_attn_layer_norm", ("encoder_attn.q_proj",)),
    ("final_layer_norm", ("fc1",)),
    ("layer.0.layer_norm", tuple(f"layer.0.SelfAttention.{name}" for name in _T5_QKV)),
    ("layer.1.layer_norm", ("layer.1.EncDecAttention.q",)),
    *(
        (f"layer.{place}.layer_norm", tuple(f"layer.{place}.DenseReluDense.{name}" for name in names))
        for place in (1, 2)
        for names in (("wi_0", "wi_1"), ("wi",))
    ),
)
# A linear, and one that reads its channels: through an attention, a gate, or a ReLU (others do not let a factor through).
_PLACED_LINEARS = (
    *((f"{place}.v_proj", f"{place}.out_proj") for place in ("self_attn", "encoder_attn")),
    *((f"layer.{place}.v", f"layer.{place}.o") for place in ("0.SelfAttention", "1.EncDecAttention")),
    *(
        (f"layer.{place}.DenseReluDense.{name}", f"layer.{place}.DenseReluDense.wo")
        for place in (1, 2)
        for name in ("wi_1", "wi")
    ),
    ("fc1", "fc2"),
)


@dataclass(frozen=True)
class Fold:
    """A place where factors of channels cancel.

    Attributes:
        producer: module inside the layer whose output has the channels: a norm, or a linear.
        rows: which rows of a linear producer they are; None for a norm.
        readers: parameters inside the layer with these channels as their last axis; all are multiplied.
        quantized: the linears among the readers whose rounding error decides on the factors.
        sources: int64 [K], which producer row each of the readers' channels comes from; None when they are the same.
    """

    producer: str
    rows: slice | None
    readers: tuple[str, ...]
    quantized: tuple[str, ...]
    sources: torch.Tensor | None = None


def find_folds(layer: nn.Module) -> list[Fold]:
    """Return the folds that a layer's names and shapes suggest, norms first."""
    attention = _child(layer, _ATTENTION_NAMES)
    mlp = _child(layer, _MLP_NAMES)
    folds: list[Fold | None] = []
    if attention:
        folds.append(_norm_fold(layer, _ATTENTION_NORMS, attention, _ATTENTION_READERS))
    if mlp:
        folds.append(_norm_fold(layer, _MLP_NORMS, mlp, _MLP_READERS))
        folds.append(_up_to_down(layer, mlp))
    if attention:
        folds.append(_value_to_output(layer, attention))
    return [fold for fold in folds if fold is not None] + _placed_folds(layer)


def _placed_folds(layer: nn.Module) -> list[Fold]:
    """Return the folds of an encoder-decoder's layer."""
    modules = dict(layer.named_modules())
    folds = []
    for norm, readers in _PLACED_NORMS:
        if norm in modules and all(isinstance(modules.get(name), nn.Linear) for name in readers):
            folds.append(Fold(norm, None, tuple(f"{name}.weight" for name in readers), readers))
    for producer, reader in _PLACED_LINEARS:
        before, after = modules.get(producer), modules.get(reader)
        if isinstance(before, nn.Linear) and isinstance(after, nn.Linear) and before.out_features == after.in_features:
            folds.append(Fold(producer, slice(0, before.out_features), (f"{reader}.weight",), (reader,)))
    return folds


def apply_fold(
    layer: nn.Module, fold: Fold, factors: torch.Tensor, run: Callable[[], torch.Tensor], expected: torch.Tensor
) -> bool:
    """Divide the producer by `factors` and multiply the readers, in place; undo it unless the outputs stay the same.

    Args:
        layer: a decoder layer with float32 values.
        fold: where.
        factors: float32, one for each producer channel.
        run: gives some outputs of the layer.
        expected: what it gives before anything is folded.

    Returns:
        Whether the fold was exact and is kept.
    """
    touched = [*_parameters_of(layer.get_submodule(fold.producer)), *(layer.get_parameter(n) for n in fold.readers)]
    before = [parameter.detach().clone() for parameter in touched]
    for divide in _DIVISIONS:
        with torch.no_grad():
            if divide(layer.get_submodule(fold.producer), fold.rows, factors):
                wide = factors if fold.sources is None else factors[fold.sources]
                for name in fold.readers:
                    layer.get_parameter(name).mul_(wide)
                if _same(run(), expected):
                    return True
            for parameter, values in zip(touched, before, strict=True):
                parameter.copy_(values)
    return False


def producer_parameters(layer: nn.Module, fold: Fold) -> list[str]:
    """Return the names, inside the layer, of the producer's own parameters."""
    return [f"{fold.producer}.{name}" for name, _ in layer.get_submodule(fold.producer).named_parameters(recurse=False)]


def _same(outputs: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((outputs - expected).abs().max() <= _EXACT * expected.abs().max())


def _divide_linear(producer: nn.Module, rows: slice | None, factors: torch.Tensor) -> bool:
    if rows is None or not isinstance(producer, nn.Linear):
        return False
    producer.weight[rows].div_(factors.unsqueeze(1))
    if producer.bias is not None:
        producer.bias[rows].div_(factors)
    return True


def _divide_norm(producer: nn.Module, rows: slice | None, factors: torch.Tensor) -> bool:
    if rows is not None:
        return False
    for parameter in _parameters_of(producer):
        parameter.div_(factors)
    return True


def _divide_norm_around_one(producer: nn.Module, rows: slice | None, factors: torch.Tensor) -> bool:
    """Gemma's norms multiply by 1 + weight."""
    if rows is not None:
        return False
    for parameter in _parameters_of(producer):
        parameter.add_(1.0).div_(factors).sub_(1.0)
    return True


_DIVISIONS: tuple[Callable[[nn.Module, slice | None, torch.Tensor], bool], ...] = (
    _divide_linear,
    _divide_norm,
    _divide_norm_around_one,
)


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _child(layer: nn.Module, names: Sequence[str]) -> str | None:
    children = dict(layer.named_children())
    return next((name for name in names if name in children), None)


def _linears(layer: nn.Module, parent: str, names: Sequence[str]) -> tuple[str, ...] | None:
    children = dict(layer.get_submodule(parent).named_children())
    if not all(isinstance(children.get(name), nn.Linear) for name in names):
        return None
    return tuple(f"{parent}.{name}" for name in names)


def _norm_fold(layer: nn.Module, norms: Sequence[str], parent: str, choices: Sequence[tuple[str, ...]]) -> Fold | None:
    norm = _child(layer, norms)
    linears = next((found for names in choices if (found := _linears(layer, parent, names))), None)
    if norm is None or linears is None:
        return None
    sizes = {parameter.shape for parameter in _parameters_of(layer.get_submodule(norm))}
    width = layer.get_parameter(linears[0] + ".weight").shape[1]
    if sizes != {torch.Size((width,))}:
        return None
    return Fold(norm, None, tuple(name + ".weight" for name in linears), linears)


def _up_to_down(layer: nn.Module, mlp: str) -> Fold | None:
    down = _linears(layer, mlp, ("down_proj",))
    if down is None:
        return None
    width = layer.get_parameter(down[0] + ".weight").shape[1]
    gated = _linears(layer, mlp, ("gate_proj", "up_proj"))
    fused = _linears(layer, mlp, ("gate_up_proj",))
    if gated is not None and layer.get_parameter(gated[1] + ".weight").shape[0] == width:
        return Fold(gated[1], slice(0, width), (down[0] + ".weight",), down)
    if fused is not None and layer.get_parameter(fused[0] + ".weight").shape[0] == 2 * width:
        return Fold(fused[0], slice(width, 2 * width), (down[0] + ".weight",), down)
    return None


def _value_to_output(layer: nn.Module, attention: str) -> Fold | None:
    output = _linears(layer, attention, ("o_proj",))
    head_dim = getattr(layer.get_submodule(attention), "head_dim", None)
    if output is None or not isinstance(head_dim, int):
        return None
    width = layer.get_parameter(output[0] + ".weight").shape[1]
    separate = _linears(layer, attention, ("v_proj",))
    fused = _linears(layer, attention, ("qkv_proj",))
    if separate is not None:
        rows = slice(0, layer.get_parameter(separate[0] + ".weight").shape[0])
    elif fused is not None:
        total = layer.get_parameter(fused[0] + ".weight").shape[0]
        values = (total - width) // 2  # q is as wide as the output; k and v share the rest
        rows = slice(total - values, total)
    else:
        return None
    count = rows.stop - rows.start
    if count % head_dim or width % count:
        return None
    producer = (separate or fused or ("",))[0]
    return Fold(producer, rows, (output[0] + ".weight",), output, _value_sources(count, width, head_dim))


def _value_sources(values: int, width: int, head_dim: int) -> torch.Tensor:
    """Return which value row each channel of the attention output is: query heads share value heads in runs."""
    heads, value_heads = width // head_dim, values // head_dim
    head = torch.arange(heads) // (heads // value_heads)
    return (head.unsqueeze(1) * head_dim + torch.arange(head_dim)).flatten()
