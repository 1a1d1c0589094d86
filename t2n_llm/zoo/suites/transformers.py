"""transformers: encoders with sparse or blocked attention, towers, speech encoders and audio codecs, tiny; every size is dynamic.

The tasks of one pass have whole models with a head; these are the parts that users export by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from t2n_llm.zoo.suites.case import Given, ModuleCase, Sizes, below

_VOCABULARY = 99
_CODES = 16
_WIDTH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "vocab_size": _VOCABULARY,
}
_SEQUENCE: dict[str, Any] = {"d_model": 32, "vocab_size": _VOCABULARY}
_T5: dict[str, Any] = {**_SEQUENCE, "d_kv": 8, "d_ff": 37, "num_heads": 4, "num_layers": 2}
_BART: dict[str, Any] = {
    **_SEQUENCE,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
}
_SPEECH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": _VOCABULARY,
}


class _Called(nn.Module):
    """A part of a model as a module: what is called, and what of its result is returned."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._call(self.model, *inputs)


def _model(name: str, config: str, call: Callable[..., Any] | None = None, **fields: Any) -> Callable[[], nn.Module]:
    """Return what builds a model of transformers from the fields of its config.

    Args:
        name: of the model's class; `config` of its config's.
        call: is given the model and its inputs; the first output where there is none.
    """

    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**fields))
        return _Called(made, call or _first)

    return build


def _first(model: Any, *inputs: torch.Tensor) -> Any:
    return model(*inputs)[0]


def _encoded(model: Any, *inputs: torch.Tensor) -> Any:
    return model.encoder(*inputs)[0]


def _ones(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a mask whose last row ends early."""
    del generator
    mask = torch.ones(shape, dtype=torch.int64)
    mask[-1, shape[1] - 2 :] = 0
    return mask


def _lengths(*lengths: int) -> tuple[Sizes, ...]:
    return tuple({"B": 2 + number % 2, "S": length} for number, length in enumerate(lengths))


def _texts(build: Callable[[], nn.Module], *lengths: int, masked: bool = True, multiple: int = 1) -> ModuleCase:
    """Return a case that reads token ids [B, S], and a mask of them."""
    example, other, *more = _lengths(*lengths)
    mask = {"attention_mask": Given(("B", "S"), _ones)} if masked else {}
    given = {"input_ids": Given(("B", "S"), below(_VOCABULARY)), **mask}
    return ModuleCase(build, given, example, other, {"S": multiple}, tuple(more))


def _sounds(build: Callable[[], nn.Module], *lengths: int, channels: int | None = None) -> ModuleCase:
    """Return a case that reads samples [B, S], or [B, channels, S]."""
    example, other, *more = _lengths(*lengths)
    shape = ("B", "S") if channels is None else ("B", channels, "S")
    return ModuleCase(build, {"x": Given(shape)}, example, other, more=tuple(more))


def _codes(build: Callable[[], nn.Module], books: int, *lengths: int) -> ModuleCase:
    """Return a case that reads codes [B, books, S]."""
    example, other, *more = _lengths(*lengths)
    return ModuleCase(build, {"codes": Given(("B", books, "S"), below(_CODES))}, example, other, more=tuple(more))


def _images(build: Callable[[], nn.Module], *sides: tuple[int, int], multiple: int) -> ModuleCase:
    """Return a case that reads pictures [B, 3, H, W] of these heights and widths, which are multiples of a number."""
    example, other, *more = ({"B": 2 + number % 2, "H": high, "W": wide} for number, (high, wide) in enumerate(sides))
    given = {"pixel_values": Given(("B", 3, "H", "W"))}
    return ModuleCase(build, given, example, other, {"H": multiple, "W": multiple}, tuple(more))


# --- text ---------------------------------------------------------------------------------------------

_LONG_T5: dict[str, Any] = {**_T5, "local_radius": 3, "global_block_size": 4}
_PEGASUS_X: dict[str, Any] = {**_BART, "num_global_tokens": 3, "block_size": 4}
_SPARSE: dict[str, Any] = {**_WIDTH, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
_FUNNEL: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
    "d_model": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 37,
}
_DEBERTA: dict[str, Any] = {**_WIDTH, "relative_attention": True, "position_biased_input": False}
_DEBERTA_V2: dict[str, Any] = {**_DEBERTA, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}

_VITS: dict[str, Any] = {
    **_WIDTH,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "flow_size": 16,
    "spectrogram_bins": 9,
    "window_size": 3,
    "upsample_initial_channel": 32,
}


def _encoded_speech_text(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> Any:
    return model.text_encoder(input_ids, mask.unsqueeze(-1).float(), attention_mask=mask).to_tuple()


_TEXT: Mapping[str, ModuleCase] = {
    "BigBird": _texts(_model("BigBirdModel", "BigBirdConfig", **_SPARSE), 48, 64, 52, 56, multiple=4),
    "CANINE": _texts(
        _model("CanineModel", "CanineConfig", **_WIDTH, local_transformer_stride=8, num_hash_buckets=50), 24, 17, 40
    ),
    "DeBERTa": _texts(
        _model("DebertaModel", "DebertaConfig", **_DEBERTA, pos_att_type=["p2c", "c2p"]),
        11, 5, 23, 40,
    ),
    "DeBERTa-v2": _texts(_model("DebertaV2Model", "DebertaV2Config", **_DEBERTA_V2), 11, 5, 23, 40),
    "Funnel": _texts(_model("FunnelModel", "FunnelConfig", **_FUNNEL), 12, 7, 23, 40),
    "Funnel's base": _texts(_model("FunnelBaseModel", "FunnelConfig", **_FUNNEL), 12, 7, 23, 40),
    "LED's encoder": _texts(
        _model("LEDModel", "LEDConfig", _encoded, **_BART, attention_window=4, max_encoder_position_embeddings=64),
        12, 7, 23, 40,
    ),
    "Longformer": _texts(_model("LongformerModel", "LongformerConfig", **_WIDTH, attention_window=4), 12, 7, 23, 40),
    "LongT5's local encoder": _texts(_model("LongT5EncoderModel", "LongT5Config", **_LONG_T5), 12, 7, 23, 40),
    "LongT5's transient-global encoder": _texts(
        _model("LongT5EncoderModel", "LongT5Config", **_LONG_T5, encoder_attention_type="transient-global"),
        12, 7, 23, 40,
    ),
    "Pegasus-X's encoder": _texts(
        _model("PegasusXModel", "PegasusXConfig", _encoded, **_PEGASUS_X), 12, 8, 24, 40, multiple=4
    ),
    "VITS text encoder": _texts(
        _model("VitsModel", "VitsConfig", _encoded_speech_text, **_VITS), 11, 5, 23, 40
    ),
    "X-MOD": _texts(
        _model("XmodModel", "XmodConfig", **_WIDTH, languages=["en_XX", "de_DE"], default_language="en_XX"), 11, 5, 23
    ),
}  # fmt: skip

# --- pictures -----------------------------------------------------------------------------------------

_SWIN: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}


def _of_one_picture(model: Any, pixel_values: torch.Tensor) -> Any:
    return model(pixel_values, image_sizes=[pixel_values.shape[-2:]] * pixel_values.shape[0])[0]


_PICTURES: Mapping[str, ModuleCase] = {
    "Pixtral's tower": ModuleCase(
        _model(
            "PixtralVisionModel", "PixtralVisionConfig", _of_one_picture, hidden_size=32, intermediate_size=37,
            num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8,
        ),
        {"pixel_values": Given((1, 3, "H", "W"))},
        {"H": 32, "W": 48},
        {"H": 64, "W": 24},
        {"H": 8, "W": 8},
        ({"H": 16, "W": 64},),
    ),
    "Swin": _images(_model("SwinModel", "SwinConfig", **_SWIN), (64, 64), (96, 64), (128, 96), multiple=32),
    "Swin v2": _images(_model("Swinv2Model", "Swinv2Config", **_SWIN), (64, 64), (96, 64), (128, 96), multiple=32),
}  # fmt: skip

# --- sound --------------------------------------------------------------------------------------------

_ENCODEC: dict[str, Any] = {
    "num_filters": 4,
    "hidden_size": 16,
    "codebook_dim": 16,
    "codebook_size": _CODES,
    "upsampling_ratios": [4, 2],
    "num_lstm_layers": 1,
    "target_bandwidths": [48.0],
}
_MIMI: dict[str, Any] = {
    "num_filters": 4,
    "hidden_size": 16,
    "codebook_dim": 8,
    "codebook_size": _CODES,
    "upsampling_ratios": [4, 2],
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_quantizers": 4,
    "vector_quantization_hidden_dimension": 8,
    "upsample_groups": 16,
    "frame_rate": 1500,
}
_DAC: dict[str, Any] = {
    "encoder_hidden_size": 8,
    "downsampling_ratios": [2, 4],
    "decoder_hidden_size": 32,
    "upsampling_ratios": [4, 2],
    "n_codebooks": 3,
    "codebook_size": _CODES,
    "codebook_dim": 4,
}


def _encoded_sound(model: Any, x: torch.Tensor) -> Any:
    return model.encode(x).audio_codes


_CODECS: Mapping[str, ModuleCase] = {
    "DAC": _sounds(_model("DacModel", "DacConfig", lambda m, x: m(x).audio_values, **_DAC), 64, 72, 200, channels=1),
    "DAC encode": _sounds(_model("DacModel", "DacConfig", _encoded_sound, **_DAC), 64, 72, 201, channels=1),
    "DAC decode": _codes(
        _model("DacModel", "DacConfig", lambda m, codes: m.decode(audio_codes=codes).audio_values, **_DAC), 3, 9, 5, 30
    ),
    "EnCodec": _sounds(
        _model("EncodecModel", "EncodecConfig", lambda m, x: m(x).audio_values, **_ENCODEC), 64, 71, 200, channels=1
    ),
    "EnCodec encode": _sounds(_model("EncodecModel", "EncodecConfig", _encoded_sound, **_ENCODEC), 64, 71, 200, channels=1),
    "EnCodec decode": _codes(
        _model("EncodecModel", "EncodecConfig", lambda m, c: m.decode(c[None], [None]).audio_values, **_ENCODEC), 4, 9, 8, 30,
    ),
    "Mimi": _sounds(_model("MimiModel", "MimiConfig", lambda m, x: m(x).audio_values, **_MIMI), 64, 71, 200, channels=1),
    "Mimi encode": _sounds(_model("MimiModel", "MimiConfig", _encoded_sound, **_MIMI), 64, 71, 200, channels=1),
    "Mimi decode": _codes(
        _model("MimiModel", "MimiConfig", lambda m, codes: m.decode(codes).audio_values, **_MIMI), 4, 9, 5, 30
    ),
}  # fmt: skip

_SEW_D: dict[str, Any] = {**_SPEECH, "squeeze_factor": 2, "position_buckets": 8, "max_position_embeddings": 64}

_SPOKEN: Mapping[str, ModuleCase] = {
    "HuBERT": _sounds(_model("HubertModel", "HubertConfig", **_SPEECH), 1600, 801, 2411),
    "SEW": _sounds(_model("SEWModel", "SEWConfig", **_SPEECH, squeeze_factor=2), 1600, 801, 2411),
    "SEW-D": _sounds(_model("SEWDModel", "SEWDConfig", **_SEW_D), 1600, 801, 2411),
    "wav2vec 2.0": _sounds(_model("Wav2Vec2Model", "Wav2Vec2Config", **_SPEECH), 1600, 801, 2411),
    "WavLM": _sounds(_model("WavLMModel", "WavLMConfig", **_SPEECH), 1600, 801, 2411),
}

CASES: Mapping[str, ModuleCase] = {**_TEXT, **_PICTURES, **_CODECS, **_SPOKEN}

__all__ = ["CASES"]
