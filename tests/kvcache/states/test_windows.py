"""Sliding layers that keep their window: which layers, what their states are called, and what they hold after each call."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from generic_export.errors import CaptureError
from kvcache.states.explicit_cache import ExplicitCache
from kvcache.states.tensors import PAST_LENGTH, Slot, StateTensor, is_window_symbol, window_symbol
from kvcache.states.windows import cut_to_windows, sliding_windows
from tests.families import FAMILIES, WINDOW


def grown(layer: int, kind: str = "cache_key") -> StateTensor:
    return StateTensor(f"in_{kind}_{layer}", f"out_{kind}_{layer}", kind, layer, ("B", 2, "P", 4), 2, "f32")


@pytest.mark.parametrize(
    ("family", "windows"),
    [("mistral", {0: WINDOW, 1: WINDOW}), ("qwen2", {1: WINDOW}), ("llama", {}), ("gpt2", {})],
)
def test_windows_of_layers(family: str, windows: dict[int, int]) -> None:
    assert sliding_windows(FAMILIES[family]()) == windows


def test_only_keys_and_values_of_sliding_layers_are_cut() -> None:
    states = (grown(0), grown(0, "indexer_key"), grown(1))
    cut = cut_to_windows(states, {0: 5}, "Model")
    assert [state.shape[2] for state in cut] == ["W5", "P", "P"]
    assert [(state.window, state.grows) for state in cut] == [(5, False), (None, True), (None, True)]
    assert [cut[0].kept(length) for length in (0, 3, 4, 5, 90)] == [0, 3, 4, 4, 4]
    assert cut[0].sizes(2, 90) == (2, 2, 4, 4) and cut[1].sizes(2, 90) == (2, 2, 90, 4)
    assert cut[0].dynamic_axes(batched=False) == {2: "W5"}
    assert cut[0].dynamic_axes(batched=True) == {0: "B", 2: "W5"}
    assert cut[0].at_start(1).shape == (1, 2, 0, 4)
    for state in cut:
        assert StateTensor.from_record(json.loads(json.dumps(asdict(state)))) == state


def test_the_length_of_the_past_is_a_state_where_no_layer_keeps_it() -> None:
    *_, length = cut_to_windows((grown(0), grown(1)), {0: 5, 1: 9}, "Model")
    assert (length.input_name, length.output_name) == ("in_past_length_0", "out_past_length_0")
    assert (length.slot, length.shape, length.grows) == (PAST_LENGTH, (1,), False)
    assert length.at_start(3).tolist() == [0]


def test_a_model_without_windows_is_refused() -> None:
    with pytest.raises(CaptureError, match="Model has no sliding layer"):
        cut_to_windows((grown(0),), {}, "Model")


def test_symbols() -> None:
    assert window_symbol(4096) == "W4096"
    assert [is_window_symbol(symbol) for symbol in ("W8", "W", "P", "S8", "Wide", "W8a")] == [True] + [False] * 5


@pytest.mark.parametrize("steps", [1, WINDOW - 2, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_a_layer_returns_everything_and_keeps_the_last(steps: int) -> None:
    config: Any = FAMILIES["gemma2"]()  # layers 0 and 2 slide
    numbers = torch.arange(0, 100, dtype=torch.float32)[None, None, :, None]
    before = 4
    past = {Slot(kind, layer): numbers[:, :, :before] for layer in range(3) for kind in ("cache_key", "cache_value")}
    cache = ExplicitCache(config, past, windows=sliding_windows(config))
    new = numbers[:, :, before : before + steps]
    assert cache.get_mask_sizes(steps, 0) == (before + steps, 0)
    keys, values = cache.update(new, new, 0)
    assert keys.flatten().tolist() == values.flatten().tolist() == list(range(before + steps))
    kept = cache.states()[Slot("cache_key", 0)].flatten().tolist()
    assert kept == list(range(before + steps))[-(WINDOW - 1) :]
    assert past[Slot("cache_key", 0)].shape[2] == before, "nothing is written in place"


def test_positions_are_counted_on_where_all_layers_forget() -> None:
    config: Any = FAMILIES["mistral"]()
    held = torch.zeros(1, 2, WINDOW - 1, 24)
    past = {Slot(kind, layer): held for layer in range(3) for kind in ("cache_key", "cache_value")}
    cache = ExplicitCache(config, past | {PAST_LENGTH: torch.tensor([40])}, windows=sliding_windows(config))
    assert int(cache.get_seq_length()) == 40
    length, offset = cache.get_mask_sizes(3, 0)
    assert (length, int(offset)) == (WINDOW - 1 + 3, 40 - (WINDOW - 1))
    for layer in range(3):
        cache.update(torch.zeros(1, 2, 3, 24), torch.zeros(1, 2, 3, 24), layer)
    assert cache.states()[PAST_LENGTH].tolist() == [43]
