"""transformers' caches, each class taken apart, copied and filled, and seen by a recording of `generate()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generic_export.debug.record.leaves import call_layout
from generic_export.debug.record.state import adapter_of
from generic_export.diagnose import Outcome, observe, state_adapters
from kvcache import Slot, state_form
from kvcache.compat import cache_keyword
from kvcache.recurrent import LastRead
from kvcache.states.state_adapters import cache_adapters
from tests.families import FAMILIES

SLOTS = [("shift_state", 0), ("shift_state", 1), *(("recurrent_state", number) for number in range(3))]


@pytest.fixture(autouse=True)
def adapters() -> Iterator[None]:
    with state_adapters(*cache_adapters()):
        yield


def filled(cache: Any, layers: int = 2) -> Any:
    for layer in range(layers):
        key = torch.full((1, 2, 3, 4), float(layer + 1))
        cache.update(key, -key, layer, {"cache_position": torch.arange(3)})
    return cache


def dynamic() -> Any:
    from transformers import DynamicCache

    return filled(DynamicCache())


def sliding() -> Any:
    from transformers import DynamicCache

    config = FAMILIES["mistral"]()
    config.num_hidden_layers = 2
    return filled(DynamicCache(config=config))


def hybrid() -> Any:
    from transformers import DynamicCache

    return filled(DynamicCache(config=FAMILIES["gemma3_text"]()))


def static() -> Any:
    from transformers import StaticCache

    config = FAMILIES["llama"]()
    config.num_hidden_layers = 2
    return filled(StaticCache(config=config, max_cache_len=8))


def encoder_decoder() -> Any:
    from transformers import EncoderDecoderCache

    return EncoderDecoderCache(dynamic(), dynamic())


def minimax() -> Any:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    cache = filled(MiniMaxCache())
    cache.set_linear_cache(3, torch.ones(1, 2, 4, 4))
    return cache


CACHES = [dynamic, sliding, hybrid, static, encoder_decoder, minimax]


@pytest.mark.parametrize("make", CACHES)
def test_a_cache_comes_apart_and_together_again(make: Callable[[], Any]) -> None:
    cache = make()
    adapter = adapter_of(cache)
    assert adapter is not None
    tensors = dict(adapter.flatten(cache))
    assert len([name for name in tensors if "key" in name]) >= 2
    twin = adapter.copy(cache)
    adapter.assign(twin, {name: tensor + 1 for name, tensor in tensors.items()})
    assert type(twin) is type(cache)
    for name, tensor in adapter.flatten(cache).items():
        assert tensor is tensors[name]
    for name, tensor in adapter.flatten(twin).items():
        assert torch.equal(tensor, tensors[name] + 1)


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm"])
def test_what_stands_for_states_comes_apart_and_together_again(model_type: str) -> None:
    states = {Slot(kind, layer, i): torch.full((1, 4), 10.0 * layer + i) for layer in (0, 1) for kind, i in SLOTS}
    config = SimpleNamespace(model_type=model_type, num_hidden_layers=2)
    model: Any = SimpleNamespace(config=config, forward=lambda input_ids, cache=None: None)
    form = state_form(model)
    keywords = form.keywords(model, states, LastRead(), input_ids=torch.zeros(1, 3))
    layout = call_layout(lambda **given: given, (), keywords)
    (_, again) = layout.rebuilt(lambda name: layout.tensors[name] + 1)
    before, after = form.states(keywords), form.states(again)
    assert before and before.keys() == after.keys()
    assert all(torch.equal(tensor, states[slot]) for slot, tensor in before.items())
    assert all(torch.equal(tensor, states[slot] + 1) for slot, tensor in after.items())


def test_an_empty_cache_has_slots_of_length_zero() -> None:
    from transformers import DynamicCache

    adapter, *_ = cache_adapters()
    empty = DynamicCache()
    assert not adapter.flatten(empty)
    blank = adapter.blank("key_1", torch.zeros(2, 3, 5, 4))
    assert blank is not None
    assert blank.shape == (2, 3, 0, 4)
    adapter.assign(empty, {"key_1": blank, "value_1": blank})
    assert len(empty.layers) == 2
    assert adapter.blank("conv_1", torch.zeros(2, 3, 5)) is None


def test_states_of_linear_layers_are_found_by_number() -> None:
    from transformers.cache_utils import DynamicCache, LinearAttentionLayer

    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer(number_of_states=2)]
    cache.layers[0].update_conv_state(torch.randn(1, 4, 3), state_idx=0, conv_kernel_size=3)
    cache.layers[0].update_conv_state(torch.randn(1, 4, 3), state_idx=1, conv_kernel_size=3)
    adapter, *_ = cache_adapters()
    tensors = dict(adapter.flatten(cache))
    assert set(tensors) == {"conv_0", "conv.1_0"}
    twin = adapter.copy(cache)
    adapter.assign(twin, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in adapter.flatten(cache).items())
    assert not any(bool(tensor.any()) for tensor in adapter.flatten(twin).values())


def test_generate_is_observed_with_the_cache_as_output() -> None:
    from transformers import AutoModelForCausalLM

    config = FAMILIES["llama"]()
    config.num_hidden_layers = 2
    model = AutoModelForCausalLM.from_config(config).eval()
    with observe(model) as recording:
        model.generate(input_ids=torch.randint(3, 160, (1, 5)), max_new_tokens=6, min_new_tokens=6)
    roots = recording.roots()
    assert len(roots) == 3
    key = f"{cache_keyword(model.forward)}.key_1"
    for root, past in zip(roots, (0, 5, 6), strict=True):
        leaves = {leaf.name: leaf for leaf in root.call.inputs}
        assert leaves[key].sizes == (1, 2, past, 16)
        assert leaves[key].written
        new = 5 if past == 0 else 1
        assert root.after[key].shape == (1, 2, past + new, 16)
    assert not recording.warnings
    assert Outcome.NOT_EXERCISED not in recording.unexercised()
