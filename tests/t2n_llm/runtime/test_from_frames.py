"""Letters of frames: the text is what transformers' own processor decodes."""

from __future__ import annotations

import json
import re
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Wav2Vec2Config, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

from generic_export.errors import OptionError
from t2n_llm import export_llm
from t2n_llm.runtime.from_source import spoken, text_of_frames
from t2n_llm.tasks.media.sound import read_waveform

_LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJ"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny wav2vec 2.0 with letters."""
    folder = tmp_path_factory.mktemp("wav2vec2") / "model"
    torch.manual_seed(3)
    config = Wav2Vec2Config(
        vocab_size=len(_LETTERS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
    )
    model = Wav2Vec2ForCTC(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.save_pretrained(folder)
    Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    (folder / "letters.json").write_text(json.dumps({letter: number for number, letter in enumerate(_LETTERS)}))
    Wav2Vec2CTCTokenizer(str(folder / "letters.json")).save_pretrained(folder)
    return folder


def test_text_of_a_recording(source: Path, tmp_path: Path) -> None:
    folder = export_llm(str(source), tmp_path / "out", dtype="f32").output_dir
    samples = np.random.default_rng(0).standard_normal(9_000) * np.sin(np.arange(9_000) / 700)
    with wave.open(str(tmp_path / "noise.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((4_000 * samples).astype(np.int16).tobytes())
    waveform = read_waveform(tmp_path / "noise.wav", 16_000)
    given = Wav2Vec2FeatureExtractor.from_pretrained(source)(waveform, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        best = Wav2Vec2ForCTC.from_pretrained(source)(given.input_values).logits[0].argmax(-1)
    own = re.sub("<.*?>", "", Wav2Vec2CTCTokenizer.from_pretrained(source).decode(best))
    assert len(set(own)) > 2
    assert text_of_frames(folder, tmp_path / "noise.wav") == own


def test_blanks_part_letters(source: Path) -> None:
    tokenizer = Wav2Vec2CTCTokenizer.from_pretrained(source)
    assert spoken([0, 5, 5, 0, 5, 4, 4, 6, 0], tokenizer) == "AA B"


def test_a_folder_must_say_what_it_hears(source: Path, tmp_path: Path) -> None:
    folder = export_llm(str(source), tmp_path / "out", task="ctc", dtype="f32", check=False, frontend=False).output_dir
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(OptionError, match="does not say what sound"):
        text_of_frames(folder, tmp_path / "noise.wav")
