"""Text of sound and of images: what people export most, in the engine, and families that are asked in their own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from t2n_llm.export.pipeline import ExportResult, export_llm
from t2n_llm.tasks.names import IMAGE_TO_TEXT, SPEECH_RECOGNITION
from t2n_llm.tasks.seq2seq.adapters import COMPOSER, read_source, run_decoder
from t2n_llm.tasks.seq2seq.sources import LENGTH, SourceForm, SourceInput, source_form
from t2n_llm.zoo.tiny_inputs import source_inputs
from t2n_llm.zoo.tiny_model import build_tiny_model

_WIDE = {"init_std": 0.12, "initializer_range": 0.12}
_SWIN = {
    "model_type": "donut-swin",
    "image_size": [32, 24],
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 3,
    **_WIDE,
}
_VIT = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    **_WIDE,
}
_DECODER = {
    "vocab_size": 90,
    "d_model": 32,
    "decoder_layers": 1,
    "encoder_layers": 2,  # Donut's config counts more encoder layers than decoder layers, although there are none
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "add_cross_attention": True,
    **_WIDE,
}
_MBART = {"model_type": "mbart", "add_final_layer_norm": True, "scale_embedding": True, **_DECODER}
_TROCR = {"model_type": "trocr", **_DECODER, "cross_attention_hidden_size": 32}
_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "donut and nougat": (_SWIN, _MBART),
    "trocr": ({"model_type": "vit", **_VIT}, _TROCR),
    "trocr of small size": ({"model_type": "deit", **_VIT}, _TROCR),
}
_WHISPER: dict[str, Any] = {
    "vocab_size": 90,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    **_WIDE,
}
_MOONSHINE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 1,
    "encoder_num_attention_heads": 2,
    "decoder_num_attention_heads": 2,
    "decoder_start_token_id": 3,
    **_WIDE,
}


def _saved(model: Any, folder: Path) -> str:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norm scales and biases away from their neutral start
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    return str(folder)


def _captioner(name: str, folder: Path) -> str:
    import transformers

    torch.manual_seed(0)
    encoder, decoder = (transformers.AutoConfig.for_model(**part) for part in _PAIRS[name])
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 3, 1
    return _saved(transformers.VisionEncoderDecoderModel(config), folder)


def _listener(family: str, folder: Path) -> str:
    import transformers

    torch.manual_seed(0)
    sizes = {"whisper": _WHISPER, "moonshine": _MOONSHINE}[family]
    config = transformers.AutoConfig.for_model(family, **sizes)
    return _saved(transformers.AutoModelForSpeechSeq2Seq.from_config(config, dtype=torch.float32), folder)


def _exported(source: str, target: Path, task: str, **options: Any) -> ExportResult:
    result = export_llm(source, target, task=task, require_tokenizer=False, **({"dtype": "f32"} | options))
    assert result.validation is not None
    assert result.validation.passed
    return result


def _sources(options: dict[str, Any]) -> set[str]:
    return {"source 1", "source 2"} | ({"several sources at once"} if options.get("batch") else set())


def _checked(result: ExportResult) -> set[str]:
    assert result.validation is not None
    return {check.name.rpartition(", ")[2] for check in result.validation.checks}


# --- in the engine ----------------------------------------------------------------------------------


def _nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("donut and nougat", {"batch": True}),
        ("trocr", {}),
        # Nothing of our code is theirs alone: sources in f16 are Whisper's below, and TrOCR's in test_calibration.py.
        _nightly("donut and nougat", {}),
        _nightly("donut and nougat", {"dtype": "f16"}),
        _nightly("trocr of small size", {}),
    ],
)
def test_images_become_text(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    result = _exported(_captioner(name, tmp_path / "model"), tmp_path / "out", IMAGE_TO_TEXT, **options)
    assert _checked(result) == _sources(options)


def test_an_encoder_may_make_one_position_of_a_short_source(tmp_path: Path) -> None:
    """Seamless M4T makes one of eight; our attention must not hold the source to more."""
    model = _saved(build_tiny_model("seamless_m4t", task=SPEECH_RECOGNITION), tmp_path / "model")
    assert _checked(_exported(model, tmp_path / "out", SPEECH_RECOGNITION))


def test_samples_of_any_length_become_text(tmp_path: Path) -> None:
    """The encoder's convolutions divide the length: what they ask of it holds for all that is long enough, and is said."""
    result = _exported(_listener("moonshine", tmp_path / "model"), tmp_path / "out", SPEECH_RECOGNITION)
    assert _checked(result) == {"a source of 1920", "a source of 6528"}


@pytest.mark.parametrize(
    "options", [{"dtype": "f16", "batch": True}, _nightly({"dtype": "f16"}), _nightly({"batch": True})]
)
def test_whisper_in_half_precision_and_in_batches(options: dict[str, Any], tmp_path: Path) -> None:
    result = _exported(_listener("whisper", tmp_path / "model"), tmp_path / "out", SPEECH_RECOGNITION, **options)
    assert _checked(result) == _sources(options)


# --- asked as transformers asks -----------------------------------------------------------------------

_TOKENS = torch.arange(3, 11)[None]


def _said(model: Any, given: dict[str, torch.Tensor], cached: bool) -> torch.Tensor:
    """Return the logits [1, S, vocab] of tokens read at once, or in two steps with caches."""
    from transformers import DynamicCache, EncoderDecoderCache

    with torch.no_grad():
        read = read_source(model, given)
        if not cached:
            logits: torch.Tensor = run_decoder(model, read, _TOKENS, use_cache=False).logits
            return logits
        caches = EncoderDecoderCache(DynamicCache(), DynamicCache())
        steps = (_TOKENS[:, :5], _TOKENS[:, 5:])
        rows = [run_decoder(model, read, each, cache=caches, use_cache=True).logits for each in steps]
        return torch.cat(rows, dim=1)


@pytest.mark.parametrize("cached", [False, True])
def test_git_reads_an_image_before_the_text(cached: bool) -> None:
    model = build_tiny_model("git", task=IMAGE_TO_TEXT)
    pixels = source_inputs(model)["pixel_values"]
    with torch.no_grad():
        wanted = model(input_ids=_TOKENS, pixel_values=pixels).logits[:, -_TOKENS.shape[1] :]
    torch.testing.assert_close(_said(model, {"pixel_values": pixels}, cached), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cached", [False, True])
def test_blip_tells_its_decoder_what_it_sees(cached: bool) -> None:
    model = build_tiny_model("blip", task=IMAGE_TO_TEXT)
    pixels = source_inputs(model)["pixel_values"]
    with torch.no_grad():
        wanted = model(input_ids=_TOKENS, pixel_values=pixels).logits
    torch.testing.assert_close(_said(model, {"pixel_values": pixels}, cached), wanted, atol=1e-5, rtol=0)


def test_florence_reads_an_image_and_a_prompt() -> None:
    """transformers replaces placeholders before the prompt: here the prompt alone is given."""
    model = build_tiny_model("florence2", task=IMAGE_TO_TEXT)
    given = source_inputs(model)
    with torch.no_grad():
        wanted = model(**given, decoder_input_ids=_TOKENS).logits
    prompt = given["input_ids"][given["input_ids"] != model.config.image_token_id][None]
    source = {"input_ids": prompt, "pixel_values": given["pixel_values"]}
    torch.testing.assert_close(_said(model, source, cached=True), wanted, atol=1e-5, rtol=0)


def test_pop2piano_begins_with_its_arranger() -> None:
    model = build_tiny_model("pop2piano", task=SPEECH_RECOGNITION)
    given = source_inputs(model)
    with torch.no_grad():
        answer = model.generate(
            **given,
            composer="composer4",
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        read = read_source(model, {"input_features": given["input_features"], COMPOSER: torch.tensor([3])})
        logits = run_decoder(model, read, answer.sequences[:, :-1], use_cache=False).logits
    torch.testing.assert_close(logits[0], torch.cat(answer.logits), atol=1e-5, rtol=0)


# --- sources ------------------------------------------------------------------------------------------


def test_lengths_stay_within_what_an_encoder_can_read() -> None:
    from transformers import MoonshineConfig, Speech2TextConfig

    moonshine = source_form(MoonshineConfig(), main_input="input_values")
    assert moonshine.least == 1279
    assert min(*moonshine.lengths, moonshine.hint) > moonshine.least
    table = Speech2TextConfig(max_source_positions=20, num_conv_layers=2, pad_token_id=1)
    frames = source_form(table, main_input="input_features")
    assert frames.most == 80
    assert max(*frames.lengths, frames.hint) <= 80
    assert len({*frames.lengths, frames.hint}) == 3


def test_the_length_of_a_source_is_declared_with_its_bounds() -> None:
    form = SourceForm((SourceInput("x", ("B", LENGTH, 4)),), unit=4, least=8, most=40)
    axes = form.axes(("B", LENGTH, 4), batched=True)
    assert axes[0] == "B"
    assert (axes[1].__name__, axes[1].min, axes[1].max) == (LENGTH, 8, 40)  # type: ignore[union-attr]
    assert SourceForm(form.inputs).axes((LENGTH,), batched=False) == {0: LENGTH}


def test_patches_say_where_they_are() -> None:
    patches = SourceInput("flattened_patches", ("B", LENGTH, 6), places=2).random(np.random.default_rng(0), 2, 10)
    assert patches.shape == (2, 10, 6)
    np.testing.assert_array_equal(patches[1, :, 0], [1, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    np.testing.assert_array_equal(patches[0, :, 1], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
