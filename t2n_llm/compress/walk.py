"""A causal LM walked layer by layer in f32, with only one layer's weights in memory.

In: a model folder and token ids. Out: what enters the first decoder layer, how each layer is called, and layers that can
be made resident one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from generic_export.compat import parameters_of
from generic_export.errors import CaptureError, MissingTensorError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor
from t2n_llm.compress.observe import Run, first_input
from t2n_llm.source.hub import ModelSource, open_source
from t2n_llm.source.reference import SourceRef
from t2n_llm.weights.f32_model import load_f32
from t2n_llm.weights.names import match_parameters
from t2n_llm.weights.placement import Placement, plan_residency


@dataclass(frozen=True)
class LayerCall:
    """How the model calls one decoder layer, besides its hidden states: the same for every batch of equal shape."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class WalkableModel:
    """A causal LM whose decoder layers can be visited one by one.

    Attributes:
        source: where it comes from.
        causal_lm: the module; parameters are on the meta device unless resident.
        layers_name: qualified name of the list of decoder layers.
        stored: parameter name -> values in the checkpoint; None when the whole model is in memory, because its
            checkpoint stacks tensors in ways that only transformers can load.
    """

    source: ModelSource
    causal_lm: Any
    layers_name: str
    stored: Mapping[str, TensorSource] | None

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return cast(nn.ModuleList, self.causal_lm.get_submodule(self.layers_name))

    @property
    def head(self) -> Any | None:
        """What makes logits, where the model says."""
        found = getattr(self.causal_lm, "get_output_embeddings", None)
        return found() if found is not None else None

    def layer_name(self, index: int) -> str:
        """Return the qualified name of a decoder layer."""
        return f"{self.layers_name}.{index}"

    @contextmanager
    def resident(self, index: int) -> Iterator[nn.Module]:
        """Give layer `index` its f32 values for the length of a `with` block."""
        layer = self.layers[index]
        with self._loaded({f"{self.layer_name(index)}.{name}": name for name in _parameter_names(layer)}, layer):
            yield layer

    @contextmanager
    def outside_resident(self) -> Iterator[nn.Module]:
        """Give everything but the decoder layers (embeddings, final norm, head) its f32 values for a `with` block."""
        prefix = self.layers_name + "."
        names = {name: name for name in _parameter_names(self.causal_lm) if not name.startswith(prefix)}
        with self._loaded(names, self.causal_lm):
            yield self.causal_lm

    @contextmanager
    def _loaded(self, names: Mapping[str, str], module: nn.Module) -> Iterator[None]:
        """`names`: checkpoint name -> name inside `module`."""
        if self.stored is None:
            yield
            return
        emptied = {local: _parameter(module, local) for local in names.values()}
        values: dict[int, nn.Parameter] = {}
        for name, local in names.items():
            tied = id(emptied[local])
            if tied not in values and name in self.stored:
                values[tied] = nn.Parameter(read_tensor(self.stored[name], torch.float32), requires_grad=False)
        for name, local in names.items():
            if id(emptied[local]) not in values:
                raise MissingTensorError(f"{self.source.name}: the checkpoint has no tensor {name!r}.")
            _set_parameter(module, local, values[id(emptied[local])])
        try:
            yield
        finally:
            for local, parameter in emptied.items():
                _set_parameter(module, local, parameter)


def open_walkable(folder: Path, *, trust_remote_code: bool = False) -> WalkableModel:
    """Prepare a model to be walked; no weight is read yet when its checkpoint allows that.

    Args:
        folder: config.json and safetensors.
        trust_remote_code: whether code beside the checkpoint may run.

    Raises:
        CaptureError: the model has no list of decoder layers.
        NotEnoughMemoryError: the whole model must be loaded, and does not fit.
        SourceError, CorruptCheckpointError: as `open_source`.
    """
    source = open_source(SourceRef(str(folder), trust_remote_code=trust_remote_code), require_tokenizer=False)
    model = _skeleton(source)
    tensors = match_parameters(model, source.checkpoint().tensors).tensors
    if _covers(tensors, model):
        return WalkableModel(source, model, _layers_name(model), tensors)
    plan_residency(model, Placement("cpu"))
    whole = load_f32(source.weights, source.trust_remote_code).requires_grad_(False)
    return WalkableModel(source, whole, _layers_name(whole), None)


def first_inputs(model: WalkableModel, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[LayerCall]]:
    """Run the model without its layers.

    Args:
        model: the model.
        ids: int64 [n, L].

    Returns:
        The hidden states that enter the first layer, [1, L, H] for each sequence, and the call of each layer.
    """
    with model.outside_resident():
        return inputs_of_layers(model, ids)


def inputs_of_layers(model: WalkableModel, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[LayerCall]]:
    """Do what `first_inputs` does, while everything outside of the layers is resident."""
    hidden = []
    with torch.no_grad(), _recorded(model) as recorders:
        for row in ids:
            model.causal_lm(input_ids=row.unsqueeze(0), use_cache=False, logits_to_keep=1)
            hidden.append(recorders[0].hidden)
    return hidden, [recorder.call for recorder in recorders]


def head_inputs(
    model: WalkableModel, head: nn.Module, ids: torch.Tensor, hidden: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield what the head reads, [1, L, H] for each sequence; to be called while everything outside is resident.

    Args:
        model: the model.
        head: the module that makes logits.
        ids: int64 [n, L]; only their length matters.
        hidden: what leaves the last layer.
    """
    for row, states in zip(ids, hidden, strict=True):
        with _recorded(model, states), torch.no_grad():
            run = partial(model.causal_lm, input_ids=row.unsqueeze(0), use_cache=False)
            read = first_input(head, run, f"the head of {type(model.causal_lm).__name__}")
        yield read


def logits_behind(model: WalkableModel, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits [L, vocab] that a model makes of given outputs of its last layer; gradients reach those.

    Args:
        model: everything outside of its layers is resident.
        ids: int64 [L]; only their number matters.
        hidden: [1, L, H].
    """
    with _recorded(model, hidden):
        logits: torch.Tensor = model.causal_lm(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return logits


def inner_width(config: Any) -> int:
    """Return how wide the widest layer of a language model is inside."""
    found = getattr(config, "intermediate_size", None) or 4 * config.hidden_size  # a list where layers differ
    return max(found) if isinstance(found, list | tuple) else int(found)


def run_layer(layer: nn.Module, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
    """Return the hidden states [1, L, H] that leave a layer."""
    with torch.no_grad():
        result = layer(hidden, *call.args, **call.kwargs)
    return result[0] if isinstance(result, tuple) else result


def layer_runs(layer: nn.Module, hidden: Sequence[torch.Tensor], call: LayerCall) -> list[Run]:
    """Return runs of a layer, one for each of the hidden states [1, L, H] that enter it."""
    return [partial(run_layer, layer, states, call) for states in hidden]


class _Recorder(nn.Module):
    """Stands in for a decoder layer: remembers how it was called and hands on the hidden states, or given ones."""

    def __init__(self, layer: nn.Module, given: torch.Tensor | None = None) -> None:
        super().__init__()
        self._layer = [layer]  # in a list: not a submodule
        self._given = given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.hidden = hidden
        self.call = LayerCall(args, kwargs)
        return hidden if self._given is None else self._given


@contextmanager
def _recorded(model: WalkableModel, given: torch.Tensor | None = None) -> Iterator[list[_Recorder]]:
    """Put recorders in the places of the layers for a `with` block; each hands on `given`, or what it is given itself."""
    layers = model.layers
    kept = list(layers)
    recorders = [_Recorder(layer, given) for layer in kept]
    try:
        for index, recorder in enumerate(recorders):
            layers[index] = recorder
        yield recorders
    finally:
        for index, layer in enumerate(kept):
            layers[index] = layer


def _skeleton(source: ModelSource) -> nn.Module:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(source.config),
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=source.trust_remote_code,
        )
    model.tie_weights()
    return model.eval()


def _covers(stored: Mapping[str, TensorSource], model: nn.Module) -> bool:
    by_parameter: dict[int, bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter[id(parameter)] = by_parameter.get(id(parameter), False) or name in stored
    persistent = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return all(by_parameter.values()) and not persistent


def _layers_name(model: Any) -> str:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and count
    ]
    if not names:
        raise CaptureError(
            f"{type(model).__name__}: no list of decoder layers was found, which calibration needs.",
            "Use an algorithm that needs no calibration, such as --compress q4_0.",
        )
    return min(names, key=lambda name: name.count("."))


def _parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    owner, _, attribute = name.rpartition(".")
    return cast(nn.Parameter, parameters_of(module.get_submodule(owner))[attribute])


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    parameters_of(module.get_submodule(owner))[attribute] = parameter
