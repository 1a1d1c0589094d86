"""Calibrated algorithms on encoder-decoders: what they see, what they store, and what they are given."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from generic_export.errors import OptionError
from generic_export.weights.values import read_tensor
from quant.algorithms import BUILT_IN
from t2n_llm import export_llm
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.passes import Pass, calibrate_passes, pass_statistics
from t2n_llm.compress.result import CalibrationResult
from t2n_llm.export.pipeline import ExportResult
from t2n_llm.source.hub import open_source
from t2n_llm.tasks.names import IMAGE_TO_TEXT, SPEECH_RECOGNITION, TEXT_TO_TEXT
from t2n_llm.tasks.registry import task_of
from t2n_llm.tasks.seq2seq.calibration import Example, TaughtPass, examples
from t2n_llm.weights.archive_weights import stored_values
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.t2n_llm.compress.stored_values import mean_divergence, with_stored_values
from tests.word_tokenizers import save_word_tokenizer

_RATE, _HOP, _FRAMES, _MELS = 1600, 40, 40, 8
_WORDS = 96
_WIDE = {"init_std": 0.12, "initializer_range": 0.12, "initializer_factor": 1.0}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_LAYERS = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": _WORDS,
}
_BART = _LAYERS | {
    "max_position_embeddings": 256,
    "forced_eos_token_id": None,
}
_T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": _WORDS,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": True,
}
_WHISPER = _LAYERS | {
    "num_mel_bins": _MELS,
    "max_source_positions": _FRAMES // 2,
    "max_target_positions": 48,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_SIZES: dict[str, dict[str, Any]] = {"bart": _BART, "t5": _T5, "whisper": _WHISPER}


def _model(family: str, layers: int = 2) -> Any:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    torch.manual_seed(0)
    auto = AutoModelForSpeechSeq2Seq if family == "whisper" else AutoModelForSeq2SeqLM
    sizes = _SIZES[family] | {name: layers for name in _SIZES[family] if name.endswith("layers")}
    config = AutoConfig.for_model(family, **(sizes | _WIDE | _IDS))
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms away from their neutral start: channels of unlike size
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif family == "t5" and "shared" in name:
                parameter.mul_(0.3)
    return model.requires_grad_(False)


def _passes(family: str, seed: int, count: int = 8) -> list[Pass]:
    generator = torch.Generator().manual_seed(seed)
    made: list[Pass] = []
    for number in range(count):
        ids = torch.randint(3, _WORDS, (1, 20 + number), generator=generator)
        tokens = torch.randint(3, _WORDS, (1, 12 + number), generator=generator)
        features = torch.randn(1, _MELS, _FRAMES, generator=generator)
        made.append(TaughtPass({"input_features": features} if family == "whisper" else {"input_ids": ids}, tokens))
    return made


def _linears(model: nn.Module, head: str) -> set[str]:
    return {f"{n}.weight" for n, module in model.named_modules() if isinstance(module, nn.Linear) and n != head}


def _calibrated(
    family: str, algorithm: str, passes: Sequence[Pass], folder: Path
) -> tuple[Any, set[str], CalibrationResult]:
    model = _model(family)
    chosen = _linears(model, "proj_out" if family == "whisper" else "lm_head")
    work = folder / algorithm
    work.mkdir(parents=True)
    result = calibrate_passes(model, lambda n: CALIBRATED[algorithm] if n in chosen else None, passes, work_dir=work)
    return model, chosen, result


def _with_values(family: str, result: CalibrationResult) -> Any:
    return with_stored_values(_model(family), result)


@torch.no_grad()
def _divergence(model: Any, reference: Any, passes: Sequence[Pass]) -> float:
    return float(np.mean([mean_divergence(each(model), each(reference)) for each in passes]))


# --- what is seen and stored ------------------------------------------------------------------------


# T5 and Whisper are calibrated in exports below, at every commit.
@pytest.mark.parametrize(
    "family", ["bart", *(pytest.param(family, marks=pytest.mark.nightly) for family in ("t5", "whisper"))]
)
def test_every_linear_is_quantised_and_compensation_pays(family: str, tmp_path: Path) -> None:
    passes, reference = _passes(family, 1), _model(family)
    loss = {}
    for algorithm in ("imatrix", "gptq", "best", "tuned"):
        _, chosen, result = _calibrated(family, algorithm, passes, tmp_path)
        assert set(result.packed) == set(result.errors) == chosen
        assert result.left == {}
        assert bool(result.changed) == (algorithm in ("best", "tuned"))
        loss[algorithm] = _divergence(_with_values(family, result), reference, passes)
    plain = _model(family)
    for name in chosen:
        plain.state_dict()[name].copy_(BUILT_IN["search"].quantize(plain.state_dict()[name]).dequantize())
    search = _divergence(plain, reference, passes)
    assert 0 < loss["gptq"] < min(loss["imatrix"], search)
    assert 0 < max(loss["best"], loss["tuned"]) < min(loss["imatrix"], search)


@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
def test_weighing_alone_sees_the_original_and_leaves_it(family: str, tmp_path: Path) -> None:
    passes = _passes(family, 2)
    model, chosen, result = _calibrated(family, "imatrix", passes, tmp_path)
    for name, values in _model(family).state_dict().items():
        assert torch.equal(model.state_dict()[name], values)
    expected = pass_statistics(model, passes)
    for name in chosen:
        torch.testing.assert_close(result.statistics[name].mean_square, expected[name].mean_square)
        assert result.statistics[name].tokens == expected[name].tokens
    encoder = next(name for name in sorted(chosen) if "encoder" in name and "decoder" not in name)
    assert expected[encoder].tokens == sum(_FRAMES // 2 if family == "whisper" else 20 + n for n in range(8))


def test_compensation_in_the_decoder_sees_what_the_quantised_encoder_says(tmp_path: Path) -> None:
    passes, cross = _passes("bart", 3), "model.decoder.layers.1.encoder_attn.k_proj.weight"
    model, _, result = _calibrated("bart", "gptq", passes, tmp_path)
    original = pass_statistics(_model("bart"), passes)[cross].mean_square
    seen = result.statistics[cross].mean_square
    assert not torch.allclose(seen, original, rtol=1e-4)
    torch.testing.assert_close(seen, pass_statistics(model, passes)[cross].mean_square)


def test_a_tied_head_gets_the_same_blocks_under_each_name(tmp_path: Path) -> None:
    names = ("lm_head.weight", "model.shared.weight")
    result = calibrate_passes(
        _model("bart"),
        lambda name: CALIBRATED["gptq"] if name in names else None,
        _passes("bart", 4),
        work_dir=tmp_path,
    )
    assert set(result.packed) == set(names)
    first, second = (read_tensor(result.packed[name]) for name in names)
    assert torch.equal(first, second)


# --- exports ----------------------------------------------------------------------------------------


def _texts(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    lines = [" ".join(f"w{n}" for n in generator.integers(3, _WORDS, 20)) for _ in range(6)]
    lines[1:] = [f"{line}\t{' '.join(reversed(line.split()))}" for line in lines[1:]]
    path = folder / "texts.tsv"
    path.write_text("\n".join([*lines, "", ""]))
    return path


def _text_model(family: str, folder: Path) -> Path:
    """T5 has two layers: the second takes the positions of the first."""
    save_tiny_model(_model(family, 2 if family == "t5" else 1), folder / "model")
    save_word_tokenizer(folder / "model", _WORDS)
    return folder / "model"


def _blocks(result: ExportResult, role: str) -> dict[str, torch.Tensor]:
    return dict(stored_values(result.output_dir / f"{role}.nnef.tar"))


@pytest.mark.parametrize(
    ("family", "compress"), [("bart", "q4_0:imatrix"), ("bart", "q4_0+embeddings:best"), ("t5", "q4_0:best")]
)
def test_a_calibrated_export_is_checked_and_is_not_the_plain_one(family: str, compress: str, tmp_path: Path) -> None:
    model, told = _text_model(family, tmp_path), str(_texts(tmp_path))
    options = {"task": TEXT_TO_TEXT, "decode_steps": 4}
    plain = export_llm(
        str(model), tmp_path / "plain", compress=compress.partition(":")[0], check=False, task=TEXT_TO_TEXT
    )
    result = export_llm(str(model), tmp_path / "out", compress=compress, calibration=told, **options)
    assert result.validation is not None
    assert result.validation.passed
    for role in ("encoder", "decoder"):
        records = result.manifest["archives"][role]["compression"]["tensors"]
        calibrated = [each for each in records if each["output_error"] is not None]
        assert calibrated
        assert {each["algorithm"] for each in calibrated} == {compress.partition(":")[2]}
        ours, theirs = _blocks(result, role), _blocks(plain, role)
        assert any(not torch.equal(ours[each["label"]], theirs[each["label"]]) for each in calibrated)
        assert {name: values.shape for name, values in ours.items()} == {name: v.shape for name, v in theirs.items()}


def test_statistics_that_were_kept_are_as_good_as_a_calibration(tmp_path: Path) -> None:
    model, kept = str(_text_model("bart", tmp_path)), tmp_path / "it.imatrix.safetensors"
    options = {"task": TEXT_TO_TEXT, "compress": "q4_0:imatrix", "check": False}
    told = str(_texts(tmp_path))
    result = export_llm(model, tmp_path / "out", calibration=told, save_imatrix=kept, **options)
    again = export_llm(model, tmp_path / "again", imatrix=kept, **options)
    for role in ("encoder", "decoder"):
        ours, theirs = _blocks(again, role), _blocks(result, role)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _record(path: Path, seconds: float, seed: int) -> None:
    sound = np.random.default_rng(seed).standard_normal(int(seconds * _RATE)) * 3000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(sound.astype("<i2").tobytes())


def test_recordings_calibrate_speech_recognition(tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor

    save_tiny_model(_model("whisper", 1), tmp_path / "model")
    extractor = WhisperFeatureExtractor(_MELS, _RATE, hop_length=_HOP, chunk_length=_FRAMES * _HOP // _RATE, n_fft=64)
    extractor.save_pretrained(tmp_path / "model")
    (tmp_path / "sound" / "more").mkdir(parents=True)
    _record(tmp_path / "sound" / "long.wav", 2.5, 0)  # three windows
    _record(tmp_path / "sound" / "more" / "short.WAV", 0.6, 1)
    result = export_llm(
        str(tmp_path / "model"),
        tmp_path / "out",
        compress="q4_0:best",
        calibration=str(tmp_path / "sound"),
        require_tokenizer=False,
        decode_steps=4,
    )
    assert result.validation is not None
    assert result.validation.passed
    assert result.manifest["options"]["compression"]["calibration"] == "sound"
    records = result.manifest["archives"]["encoder"]["compression"]["tensors"]
    assert [each["output_error"] is None for each in records if each["algorithm"] == "best"].count(True) == 0


def test_pictures_calibrate_captioning(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import AutoConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTImageProcessor

    encoder = {"image_size": 16, "patch_size": 4, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    decoder = {
        "vocab_size": _WORDS,
        "d_model": 64,
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
    }
    further = {"is_decoder": True, "add_cross_attention": True, "cross_attention_hidden_size": 64, **_WIDE}
    torch.manual_seed(0)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        AutoConfig.for_model("vit", num_attention_heads=4, **encoder, **_WIDE),
        AutoConfig.for_model("trocr", max_position_embeddings=64, **decoder, **further),
    )
    config.decoder_start_token_id, config.pad_token_id = 3, 1
    save_tiny_model(VisionEncoderDecoderModel(config).eval(), tmp_path / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "model")
    generator = np.random.default_rng(0)
    for name in ("one.png", "two.png"):
        Image.fromarray(generator.integers(0, 255, (30, 40, 3), dtype=np.uint8)).save(tmp_path / name)
    (tmp_path / "list.txt").write_text("one.png\ntwo.png\n")
    result = export_llm(
        str(tmp_path / "model"),
        tmp_path / "out",
        task=IMAGE_TO_TEXT,
        compress="q4_0:gptq",
        calibration=str(tmp_path / "list.txt"),
        require_tokenizer=False,
        decode_steps=4,
    )
    assert result.validation is not None
    assert result.validation.passed
    records = json.loads((result.output_dir / "export.json").read_text())["compression"]["tensors"]
    calibrated = {each["label"] for each in records if each["output_error"] is not None}
    assert len(calibrated) >= 16  # six matrices of the encoder's layer, ten of the decoder's
    assert {label.split(".")[0] for label in calibrated} == {"encoder", "decoder"}


# --- data -------------------------------------------------------------------------------------------


def test_lists_of_texts_and_files(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a source\ta text\n\nanother\n  \nthird\t \n")
    assert examples(TEXT_TO_TEXT, str(tmp_path / "texts")) == [
        Example("a source", "a text"),
        Example("another"),
        Example("third"),
    ]
    (tmp_path / "it.wav").touch()
    (tmp_path / "list").write_text("it.wav\twhat is said\n")
    sound = str(tmp_path / "it.wav")
    assert examples(SPEECH_RECOGNITION, str(tmp_path / "list")) == [Example(sound, "what is said")]
    assert examples(SPEECH_RECOGNITION, str(tmp_path)) == examples(SPEECH_RECOGNITION, sound) == [Example(sound)]
    assert len(examples(TEXT_TO_TEXT, "builtin")) > 20


@pytest.mark.parametrize(
    ("task", "data", "told"),
    [
        (TEXT_TO_TEXT, "auto", "a language model writes"),
        (TEXT_TO_TEXT, "{}", "it is a folder"),
        (TEXT_TO_TEXT, "{}/absent.txt", "there is no such file"),
        (TEXT_TO_TEXT, "{}/empty.txt", "there are no texts in it"),
        (TEXT_TO_TEXT, "{}/binary", "not UTF-8"),
        (SPEECH_RECOGNITION, "builtin", "is calibrated on recordings, and none come with"),
        (SPEECH_RECOGNITION, "{}", "there are no recordings in it"),
        (SPEECH_RECOGNITION, "{}/list.txt", "there is no file 'absent.wav'"),
        (IMAGE_TO_TEXT, "builtin", "is calibrated on pictures"),
        (IMAGE_TO_TEXT, "{}", "there are no pictures in it"),
    ],
)
def test_wrong_data_is_named(task: str, data: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "list.txt").write_text("absent.wav\n")
    with pytest.raises(OptionError, match=told):
        examples(task, data.format(tmp_path))


def test_wrong_data_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    model = _text_model("bart", tmp_path)
    with pytest.raises(OptionError, match="no such file"):
        export_llm(str(model), tmp_path / "out", task=TEXT_TO_TEXT, compress="q4_0:gptq", calibration="absent")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_no_recording_is_named(tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor

    save_tiny_model(_model("whisper"), tmp_path / "model")
    (tmp_path / "it.wav").write_bytes(b"not sound")
    source = open_source(str(tmp_path / "model"), require_tokenizer=False)
    calibration = task_of(SPEECH_RECOGNITION).calibration(source, str(tmp_path / "it.wav"))
    with pytest.raises(OptionError, match="does not say what sound its model hears"):
        calibration.statistics()
    WhisperFeatureExtractor(_MELS, _RATE, hop_length=_HOP, chunk_length=1, n_fft=64).save_pretrained(tmp_path / "model")
    with pytest.raises(OptionError, match="not a WAV file"):
        calibration.statistics()
