"""Few layers that stand for all: which layers of a decoder are of one kind, and its config cut down to one of each.

In: a transformers config. Out: a `LayerCut`: the config of a shallow model, and which original layers it keeps.
Read by `t2n-llm coverage` (what holds of one layer holds of its kind) and by the tiny twin of `t2n-llm diagnose`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from generic_export.compat import parameters_of
from generic_export.errors import CaptureError
from t2n_llm.source.empty_model import meta_model

# Each names a count of layers at the start, below which a layer is of another kind.
_PREFIX_COUNTS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
# The same at the end: the last layers share their keys and values.
_SUFFIX_COUNTS = ("num_kv_shared_layers",)
# Lists of the numbers of layers.
_INDEX_LISTS = ("mlp_only_layers", "cross_attention_layers", "hybrid_layer_ids", "full_attn_idxs", "ple_layer_ids")
_DEPTH_NAMES = ("num_hidden_layers", "num_blocks", "num_layers", "n_layers")
_POSITION_WORDS = ("idx", "index", "layer_id", "layer_number")
_ORIGIN = ("_name_or_path", "_commit_hash", "auto_map")  # where a config, and the code that comes with it, is from
_FEWEST = 2  # a model of one layer hides what happens between layers


@dataclass(frozen=True)
class LayerCut:
    """A config with few layers, and what they stand for.

    Attributes:
        config: of the shallow model.
        picks: numbers of the original layers that were kept, ascending.
        counts: for each kept layer, how many original layers it stands for; their sum is the depth of the original.
    """

    config: Any
    picks: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Layers of the original model."""
        return sum(self.counts)

    def weight(self, layer: int | None) -> int:
        """Return how many original layers a layer of the shallow model stands for; 1 for what is in no layer."""
        return 1 if layer is None or layer >= len(self.counts) else self.counts[layer]


def cut_layers(config: Any, *, trust_remote_code: bool = False) -> LayerCut:
    """Return the config with one layer of each kind (two at least), where that changes no kind.

    Layers are of one kind when they are built of the same classes with the same switches; sizes do not matter. A cut
    whose layers turn out to be of other kinds is not used: then the shortest start of the model with every kind is,
    and if that differs too the whole model.

    Raises:
        CaptureError: the model of the config cannot be built.
    """
    listed = per_layer_lists(config)
    kinds = _kinds(config, listed, trust_remote_code)
    if len(kinds) <= _FEWEST:
        return LayerCut(config, tuple(range(len(kinds))), (1,) * len(kinds))
    first = {kind: kinds.index(kind) for kind in kinds}
    picks = sorted(first.values())
    if len(picks) < _FEWEST:
        picks = [0, 1]
    for chosen in (picks, list(range(max(picks[-1] + 1, _FEWEST)))):
        candidate = _with_layers(config, chosen, listed, len(kinds))
        if candidate is None:
            continue
        if _kinds_or_none(candidate, listed, trust_remote_code) == [kinds[pick] for pick in chosen]:
            return LayerCut(candidate, tuple(chosen), _counts(kinds, chosen))
    return LayerCut(config, tuple(range(len(kinds))), (1,) * len(kinds))


def _counts(kinds: Sequence[Hashable], picks: Sequence[int]) -> tuple[int, ...]:
    """Share the layers of each kind out among the kept layers of that kind; the first takes the remainder."""
    kept = [kinds[pick] for pick in picks]
    counts = []
    for position, kind in enumerate(kept):
        total, sharers = list(kinds).count(kind), kept.count(kind)
        counts.append(1 if kind in kept[:position] else total - sharers + 1)
    return tuple(counts)


def _kinds_or_none(config: Any, listed: Sequence[str], trust_remote_code: bool) -> list[Hashable] | None:
    try:
        return _kinds(config, listed, trust_remote_code)
    except CaptureError:
        return None


def _kinds(config: Any, listed: Sequence[str], trust_remote_code: bool) -> list[Hashable]:
    return layer_kinds(meta_model(config, trust_remote_code=trust_remote_code), config, listed)


# --- what a layer is ------------------------------------------------------------------------------


def layer_kinds(model: nn.Module, config: Any, listed: Sequence[str] = ()) -> list[Hashable]:
    """Return, for each decoder layer, a value that two layers share when they are of one kind.

    Args:
        model: of the config.
        config: transformers config.
        listed: names of its values that are lists with an entry per layer.
    """
    text = config.get_text_config(decoder=True)
    return [
        (tuple(_structure(layer)), tuple(_switch(getattr(text, name)[number]) for name in listed))
        for number, layer in enumerate(decoder_layers(model, config))
    ]


def decoder_layers(model: nn.Module, config: Any) -> nn.ModuleList | tuple[()]:
    """Return the list of a model's layers: the outermost `ModuleList` as long as the config says; () if there is none."""
    text = config.get_text_config(decoder=True)
    depth = value_of(text, "num_hidden_layers")
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [(name.count("."), name, module) for name, module in lists if len(module) == depth]
    inside = [entry for entry in fitting if not any(word in entry[1] for word in ("vision", "audio", "encoder"))]
    found = sorted(inside or fitting, key=lambda entry: entry[:2])
    return found[0][2] if found else ()


def layers_path(model: nn.Module, config: Any) -> str:
    """Return the path of that list in the model, "" if there is none."""
    layers = decoder_layers(model, config)
    return next((name for name, module in model.named_modules() if module is layers), "")


def _structure(layer: nn.Module) -> Iterator[Hashable]:
    seen: set[Hashable] = set()
    for name, module in layer.named_modules():
        parameters = tuple(key for key, value in parameters_of(module).items() if value is not None)
        # Of a list's items it matters which there are: not how many, nor at which places.
        place = ".".join("*" if part.isdigit() else part for part in name.split("."))
        entry = (place, f"{type(module).__module__}.{type(module).__qualname__}", parameters, tuple(_switches(module)))
        if entry not in seen:
            seen.add(entry)
            yield entry


def _switches(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Yield what in a module's own attributes may choose another path through its code."""
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "training" or any(word in name for word in _POSITION_WORDS):
            continue
        if value is None or isinstance(value, (bool, str, int, float)):
            yield name, _switch(value)


def _switch(value: object) -> Hashable:
    """Return a word, a truth value or None as it is, of a number only whether it is zero."""
    return value if value is None or isinstance(value, (bool, str)) else (type(value).__name__, bool(value))


# --- a config with other layers -------------------------------------------------------------------


def per_layer_lists(config: Any) -> tuple[str, ...]:
    """Return the names of a config's values that are lists with an entry per layer."""
    text = config.get_text_config(decoder=True)
    depth = value_of(text, "num_hidden_layers")
    lists = {name: value for name, value in vars(text).items() if isinstance(value, (list, tuple))}
    return tuple(sorted(name for name, value in lists.items() if len(value) == depth and name not in _INDEX_LISTS))


def _with_layers(config: Any, picks: Sequence[int], listed: Sequence[str], depth: int) -> Any | None:
    """Return a copy of a config that describes those layers only; None where its class does not accept that."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config(decoder=True)
    changes: dict[str, Any] = {name: [getattr(text, name)[pick] for pick in picks] for name in listed}
    changes |= {name: len(picks) for name in _DEPTH_NAMES if value_of(text, name) == depth}
    consecutive = list(picks) == list(range(len(picks)))
    for name in _PREFIX_COUNTS:
        value = value_of(text, name)
        if isinstance(value, int) and not consecutive:
            changes[name] = sum(pick < value for pick in picks)
    for name in _SUFFIX_COUNTS:
        value = value_of(text, name)
        if isinstance(value, int) and value:
            changes[name] = sum(pick >= depth - value for pick in picks)
    for name in _INDEX_LISTS:
        value = value_of(text, name)
        if isinstance(value, (list, tuple)) and len(value) != depth:
            changes[name] = [position for position, pick in enumerate(picks) if pick in value]
    try:
        return rebuilt(cut, text, changes)
    except Exception:  # the classes check their fields as they like: a list of another form, say
        return None


def value_of(part: Any, name: str) -> Any:
    """Return a value of a config; None where it has none, or none that holds for all layers."""
    try:
        return getattr(part, name, None)
    except Exception:  # transformers has a class for "differs from layer to layer" that is no AttributeError
        return None


def rebuilt(config: Any, part: Any, changes: dict[str, Any]) -> Any:
    """Return a config in which a part (itself, or a nested config) is made anew with changed values.

    Made anew by its class, since classes compute some values from others; what they compute is not carried over.
    """
    alias = part.attribute_map  # the name that a value goes by -> the name that it is kept under
    declared = set(inspect.signature(type(part).__init__).parameters) - {"self", "args", "kwargs"}
    kept = {alias.get(name, name): name for name in declared}
    fields = {kept[name]: value for name, value in vars(part).items() if name in kept}
    fields |= {kept[stored]: value for name, value in changes.items() if (stored := alias.get(name, name)) in kept}
    fresh = type(part)(**copy.deepcopy(fields))
    for name, value in vars(part).items():
        if name in _ORIGIN or (value_of(fresh, name) is None and value is not None):
            setattr(fresh, name, value)
    for name, value in changes.items():
        if alias.get(name, name) not in kept and name in vars(part):
            setattr(fresh, name, value)
    if part is config:
        return fresh
    for name, value in vars(config).items():
        if value is part:
            setattr(config, name, fresh)
    return config
