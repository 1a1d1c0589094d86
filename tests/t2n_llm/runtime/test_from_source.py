"""Pictures and sound become the text that transformers' own `generate()` makes of them, from the file on."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    Pix2StructImageProcessorPil,
    ViTImageProcessorPil,
    Wav2Vec2FeatureExtractor,
)

from generic_export.errors import OptionError
from t2n_llm import export_llm
from t2n_llm.export.output import ExportResult
from t2n_llm.runtime.from_source import GenerationOptions, SourceModel
from t2n_llm.tasks.media.sound import read_waveform
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.shallow_models import shallow_model
from tests.word_tokenizers import save_word_tokenizer

_TOKENS = 8


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture of another size than any model reads."""
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    down, right = np.mgrid[:90, :130]
    Image.fromarray(np.stack([2 * down, right, (down * right) % 256], axis=-1).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seconds of a tone that rises."""
    path = tmp_path_factory.mktemp("recording") / "recording.wav"
    seconds = np.arange(32_000) / 16_000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((9_000 * np.sin(900 * seconds**2)).astype(np.int16).tobytes())
    return path


def _saved(folder: Path, model: Any, processor: Any) -> None:
    save_tiny_model(model, folder)
    processor.save_pretrained(folder)
    save_word_tokenizer(folder, model.config.get_text_config(decoder=True).vocab_size)


def _exported(source: Path, target: Path, task: str, frontend: bool = True) -> ExportResult:
    """Export without a check: the tests compare whole texts."""
    return export_llm(str(source), target, task=task, dtype="f32", frontend=frontend, check=False)


def _own(folder: Path, said: torch.Tensor) -> str:
    return str(AutoTokenizer.from_pretrained(folder).decode(said[0, 1:], skip_special_tokens=True))


@pytest.fixture(scope="module")
def describer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of pictures of one size."""
    source, built = (
        tmp_path_factory.mktemp("describer") / "model",
        shallow_model("vision-encoder-decoder", task="image-to-text"),
    )
    side = built.config.encoder.image_size
    _saved(source, built, ViTImageProcessorPil(size={"height": side, "width": side}))
    return source


@pytest.mark.parametrize("frontend", [True, False])
def test_a_picture_is_resized_as_its_front_end_says(
    frontend: bool, describer: Path, picture: Path, tmp_path: Path
) -> None:
    exported = _exported(describer, tmp_path / "out", "image-to-text", frontend)
    assert ("frontend" in exported.archives) is frontend
    model = AutoModelForImageTextToText.from_pretrained(describer).eval()
    pixels = AutoImageProcessor.from_pretrained(describer)(Image.open(picture), return_tensors="pt").pixel_values
    said = model.generate(pixel_values=pixels, max_new_tokens=_TOKENS, do_sample=False)
    made = SourceModel.open(exported.output_dir).text_of(GenerationOptions(max_new_tokens=_TOKENS), image=picture)
    assert "".join(made) == _own(describer, said) != ""


def test_rows_that_are_padding_are_not_read(picture: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    config = tiny_config("pix2struct", "image-to-text")
    config.vision_config.patch_embed_hidden_size = 4 * 4 * 3
    config.vision_config.num_hidden_layers = config.text_config.num_layers = 1
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    _saved(source, model, Pix2StructImageProcessorPil(patch_size={"height": 4, "width": 4}, max_patches=20))
    exported = _exported(source, tmp_path / "out", "image-to-text")
    given = AutoImageProcessor.from_pretrained(source)(Image.open(picture), return_tensors="pt")
    assert int(given["attention_mask"].sum()) < 20
    said = model.generate(**given, max_new_tokens=_TOKENS, do_sample=False)
    made = SourceModel.open(exported.output_dir).text_of(GenerationOptions(max_new_tokens=_TOKENS), image=picture)
    assert "".join(made) == _own(source, said) != ""


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sound of any length."""
    source = tmp_path_factory.mktemp("listener") / "model"
    built = shallow_model("moonshine", task="automatic-speech-recognition")
    _saved(source, built, Wav2Vec2FeatureExtractor(do_normalize=False))
    return source


@pytest.mark.parametrize("frontend", [True, False])
def test_sound_of_any_length(frontend: bool, listener: Path, recording: Path, tmp_path: Path) -> None:
    exported = _exported(listener, tmp_path / "out", "automatic-speech-recognition", frontend)
    waveform = torch.from_numpy(read_waveform(recording, 16_000))[None]
    model = AutoModelForSpeechSeq2Seq.from_pretrained(listener).eval()
    said = model.generate(input_values=waveform, max_new_tokens=_TOKENS, do_sample=False)
    opened = SourceModel.open(exported.output_dir)
    assert (
        "".join(opened.text_of(GenerationOptions(max_new_tokens=_TOKENS), audio=recording))
        == _own(listener, said)
        != ""
    )
    with pytest.raises(OptionError, match="does not support the language 'en'"):
        list(opened.text_of(GenerationOptions(language="en"), audio=recording))
