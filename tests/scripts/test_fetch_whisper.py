"""Whisper out of a wheel: tensors in CTranslate2's layout (tiny ones here) become transformers' parameters."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tests.load_script import load_script

fetcher = load_script("fetch_whisper")
_SIZES = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "vocab_size": 20}
_FURTHER = {
    "pad_token_id": 0,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_mel_bins": 4,
}


def _packed(tensors: dict[str, np.ndarray], version: int = 6) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    content = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(tensors))
    numbers = {"float16": 4, "int8": 1}
    for name, tensor in tensors.items():
        sizes = struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        content += text(name) + sizes + struct.pack("<BI", numbers[str(tensor.dtype)], tensor.nbytes) + tensor.tobytes()
    return content + struct.pack("<I", 0)


def _as_in_the_wheel(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return a model's parameters with the names and joined rows of the wheel."""
    values = {name: tensor.half().numpy() for name, tensor in state.items()}

    def bias(prefix: str, part: str) -> np.ndarray:
        return values.get(f"{prefix}.{part}.bias", np.zeros(8, np.float16))

    stored = {"decoder/num_heads": np.array(2, np.int8)}
    for half, layers in (("encoder", 1), ("decoder", 2)):
        start = f"model.{half}"
        for one, other in (("layer_norm", "layer_norm"), ("conv1", "conv1"), ("conv2", "conv2")):
            for leaf, stored_leaf in (("weight", "gamma"), ("bias", "beta")):
                if f"{start}.{one}.{leaf}" in values:
                    stored[f"{half}/{other}/{stored_leaf if 'norm' in one else leaf}"] = values[f"{start}.{one}.{leaf}"]
        stored[f"{half}/position_encodings/encodings"] = values[f"{start}.embed_positions.weight"]
        for layer in range(layers):
            inner, outer = f"{start}.layers.{layer}", f"{half}/layer_{layer}"
            for source, target, parts in (
                ("self_attn", "self_attention", (("q_proj", "k_proj", "v_proj"), ("out_proj",))),
                ("encoder_attn", "attention", (("q_proj",), ("k_proj", "v_proj"), ("out_proj",))),
            ):
                if f"{inner}.{source}.q_proj.weight" not in values:
                    continue
                for number, names in enumerate(parts):
                    linear = f"{outer}/{target}/linear_{number}"
                    stored[f"{linear}/weight"] = np.concatenate(
                        [values[f"{inner}.{source}.{name}.weight"] for name in names]
                    )
                    stored[f"{linear}/bias"] = np.concatenate([bias(f"{inner}.{source}", name) for name in names])
                stored[f"{outer}/{target}/layer_norm/gamma"] = values[f"{inner}.{source}_layer_norm.weight"]
                stored[f"{outer}/{target}/layer_norm/beta"] = values[f"{inner}.{source}_layer_norm.bias"]
            for one, other in (
                ("final_layer_norm", "ffn/layer_norm"),
                ("fc1", "ffn/linear_0"),
                ("fc2", "ffn/linear_1"),
            ):
                norm = "norm" in one
                stored[f"{outer}/{other}/{'gamma' if norm else 'weight'}"] = values[f"{inner}.{one}.weight"]
                stored[f"{outer}/{other}/{'beta' if norm else 'bias'}"] = values[f"{inner}.{one}.bias"]
    stored["decoder/embeddings/weight"] = values["model.decoder.embed_tokens.weight"]
    return stored


def test_every_parameter_comes_back() -> None:
    model = WhisperForConditionalGeneration(WhisperConfig(**_SIZES, **_FURTHER)).half()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    state = model.state_dict()
    read = fetcher.transformers_tensors(fetcher.read_tensors(_packed(_as_in_the_wheel(state))))
    assert set(state) - set(read) == {"proj_out.weight"}  # tied
    for name, tensor in read.items():
        assert np.array_equal(tensor, state[name].numpy()), name


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read"),
        (_packed({}, version=5), "version 5"),
        (_packed({"encoder/conv1/weight": np.zeros((2, 3), np.float16)})[:-10], "cannot be read"),
    ],
)
def test_something_else_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(fetcher.FetchError, match=says):
        fetcher.read_tensors(content)


def test_a_tensor_without_a_place_is_refused() -> None:
    with pytest.raises(fetcher.FetchError, match="encoder/layer_0/gate/weight"):
        fetcher.transformers_tensors({"encoder/layer_0/gate/weight": np.zeros((2, 2))})
