"""What is known of a model's states: names, shapes and symbols, from two runs on shapes; and read back from a manifest."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from generic_export.errors import ArchiveError, CaptureError
from kvcache.states.tensors import Probe, Slot, StateTensor, describe_states

KEY, CONV, SECOND_CONV = Slot("cache_key", 1), Slot("conv_state", 0, 0), Slot("conv_state", 0, 1)


def probe(batch: int, steps: int, **shapes: tuple[int, ...]) -> Probe:
    slots = {"key": KEY, "conv": CONV, "second": SECOND_CONV}
    return Probe(batch, steps, {slots[name]: torch.empty(shape) for name, shape in shapes.items()})


def described(*shapes: dict[str, tuple[int, ...]]) -> tuple[StateTensor, ...]:
    return describe_states(probe(1, 2, **shapes[0]), probe(2, 3, **shapes[1]), "Model")


def test_batch_and_growing_axes_are_found_among_sizes_that_look_alike() -> None:
    key, conv = described(
        {"key": (1, 2, 2, 3), "conv": (1, 2, 3)},
        {"key": (2, 2, 3, 3), "conv": (2, 2, 3)},
    )
    assert (key.input_name, key.output_name) == ("in_cache_key_1", "out_cache_key_1")
    assert (key.shape, key.axis, key.dtype, key.grows) == (("B", 2, "P", 3), 2, "f32", True)
    assert (conv.shape, conv.axis, conv.grows) == (("B", 2, 3), None, False)
    assert key.sizes(4, 9) == (4, 2, 9, 3)
    assert conv.at_start(1).shape == (1, 2, 3) and not conv.at_start(1).any()
    assert key.dynamic_axes(batched=False) == {2: "P"}
    assert key.dynamic_axes(batched=True) == {0: "B", 2: "P"}
    assert conv.dynamic_axes(batched=False) == {}


def test_several_states_of_a_kind_are_numbered() -> None:
    shapes = {"conv": (1, 4), "second": (1, 5)}, {"conv": (2, 4), "second": (2, 5)}
    assert [state.input_name for state in described(*shapes)] == ["in_conv_state_0_0", "in_conv_state_0_1"]


def test_a_size_that_is_neither_fixed_nor_one_per_token_is_refused() -> None:
    with pytest.raises(CaptureError, match="a size of 34 after 2 tokens and 35 after 3"):
        described({"key": (1, 2, 34, 8)}, {"key": (2, 2, 35, 8)})


def test_two_growing_axes_are_refused() -> None:
    with pytest.raises(CaptureError, match="grows along 2 axes"):
        described({"key": (1, 2, 2, 8)}, {"key": (2, 3, 3, 8)})


def test_a_manifest_record_is_read_back() -> None:
    states = described({"key": (1, 2, 2, 3), "conv": (1, 2, 3)}, {"key": (2, 2, 3, 3), "conv": (2, 2, 3)})
    for state in states:
        assert StateTensor.from_record(json.loads(json.dumps(asdict(state)))) == state


def test_records_of_older_exports_are_keys_and_values() -> None:
    record = {
        "input_name": "in_cache_value_3",
        "output_name": "out_cache_value_3",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "axis": 2,
    }
    state = StateTensor.from_record(record)
    assert (state.slot, state.shape, state.axis) == (Slot("cache_value", 3), ("B", 2, "P", 8), 2)


def test_an_incomplete_record_is_an_error_that_says_so() -> None:
    with pytest.raises(ArchiveError, match="not complete"):
        StateTensor.from_record({"input_name": "in_cache_key_0"})
