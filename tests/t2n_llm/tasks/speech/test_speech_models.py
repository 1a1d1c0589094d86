"""Speech models: the waveform of the archives is that of transformers' own model for the same random numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from generic_export.errors import OptionError, SourceError, UnknownArchitectureError
from generic_export.inference_target.tract.releases.install import find_tract_cli
from generic_export.read.outline import read_outline
from generic_export.read.reading import read_graph_text
from t2n_llm import export_llm
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.runtime.sampling.settings import generation_settings
from t2n_llm.runtime.speech import SpeakingModel
from t2n_llm.source.hub import open_vocoder
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.media.sound import read_waveform, write_waveform
from t2n_llm.tasks.names import TEXT_TO_AUDIO
from t2n_llm.tasks.speech.arrays import Draws, frames_of_tokens, typical_speaker
from t2n_llm.tasks.speech.families import family_of
from t2n_llm.tasks.speech.frames_of_codes import CodeMaker
from t2n_llm.tasks.speech.plan import Codes, Durations, SpeechPlan, Steps
from t2n_llm.tasks.speech.running import open_speech
from t2n_llm.tasks.speech.step_archive import StepArchive
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model, save_tiny_vocoder
from tests.shared_folders import SharedFolders

_VITS, _FAST, _WITH_VOCODER, _SPEECHT5 = (
    *("vits", "fastspeech2_conformer", "fastspeech2_conformer_with_hifigan", "speecht5"),
)
_POCKET, _PHONON, _CSM = "pocket_tts", "gradium_phonon_tts", "csm"
_FRAMES = 6
_TOKENS = 12  # neither of the two lengths of the check, nor the traced one
_FIRST_ID = 9  # those before are padding and the like
_SAMPLES_PER_FRAME = 1920


@dataclass(frozen=True)
class Exported:
    """A tiny model and its export in f32."""

    model: Path
    vocoder: Path | None
    folder: Path


@pytest.fixture(scope="session")
def exported(shared_folders: SharedFolders) -> Callable[[str], Exported]:
    """Returns the export of a model type, checked."""

    def make(kind: str) -> Exported:
        models = shared_folders(f"tiny-{kind}-speech", lambda folder: _save(kind, folder))
        vocoder = models / "vocoder" if (models / "vocoder").is_dir() else None
        options = {"dtype": "f32", "require_tokenizer": False, "vocoder": str(vocoder) if vocoder else None}
        folder = shared_folders(
            f"exported-{kind}-speech", lambda target: export_llm(models / "model", target, **options)
        )
        return Exported(models / "model", vocoder, folder)

    return make


def _save(kind: str, folder: Path) -> None:
    model = build_tiny_model(kind, task=TEXT_TO_AUDIO)
    if kind == _SPEECHT5:  # random weights say stop at once
        with torch.no_grad():
            model.speech_decoder_postnet.prob_out.bias.fill_(-4.0)
    if kind == _CSM:
        model.generation_config.max_new_tokens = _FRAMES
    save_tiny_model(model, folder / "model", TEXT_TO_AUDIO, kind)
    save_tiny_vocoder(model, folder / "vocoder", TEXT_TO_AUDIO)


@pytest.mark.parametrize("kind", [_VITS, _WITH_VOCODER, _SPEECHT5, _POCKET, _PHONON, _CSM])
def test_the_waveform_is_that_of_transformers(kind: str, exported: Callable[[str], Exported]) -> None:
    made = exported(kind)
    manifest = read_manifest(made.folder)
    plan = SpeechPlan.of_record(manifest["speech"])  # type: ignore[arg-type]
    vocoder = open_vocoder(SourceRef(str(made.vocoder))) if made.vocoder is not None else None
    model = build_tiny_model(kind, task=TEXT_TO_AUDIO)
    model = type(model).from_pretrained(made.model, attn_implementation="eager").eval()
    family = family_of(model.config, vocoder, generation_settings(made.model))
    assert family.plan == plan
    tokens = family.text_tokens
    ids = np.random.default_rng(5).integers(max(tokens.start, _FIRST_ID), tokens.stop, size=(1, _TOKENS))
    speaker = typical_speaker(plan)
    voice = torch.from_numpy(speaker) if speaker is not None else None
    with torch.no_grad():
        wanted = family.spoken(model, torch.from_numpy(ids), voice, Draws(7)).made["waveform"]
    archives = {role: made.folder / part["archive"] for role, part in manifest["archives"].items()}
    with open_speech(archives, plan) as speech:
        got = speech.spoken(ids, speaker, Draws(7))
        other = speech.spoken(ids, speaker, Draws(8))
    assert wanted.std() > 0.01
    assert got["waveform"].shape == wanted.shape
    np.testing.assert_allclose(got["waveform"], wanted, atol=2e-4)
    assert bool(plan.noise) == (not np.array_equal(got["waveform"], other["waveform"]))


@pytest.mark.parametrize("kind", [_VITS, _WITH_VOCODER, _SPEECHT5, _POCKET, _CSM])
def test_every_export_is_checked_at_two_lengths(kind: str, exported: Callable[[str], Exported]) -> None:
    validation = read_manifest(exported(kind).folder)["validation"]
    assert validation is not None and validation["passed"]
    names = [check["name"] for check in validation["checks"]]
    assert [name for name in names if name.startswith("waveform")] == ["waveform of 7 tokens", "waveform of 21 tokens"]


def test_a_vocoder_beside_the_model(exported: Callable[[str], Exported]) -> None:
    made = exported(_SPEECHT5)
    manifest = read_manifest(made.folder)
    assert list(manifest["archives"]) == ["text", "step", "spectrogram", "waveform"]
    assert manifest["source"]["model_type"] == "speecht5"
    assert manifest["vocoder"] == {"name": "vocoder", "revision": None, "architecture": "SpeechT5HifiGan"}
    with pytest.raises(SourceError, match="local vocoder"):
        validate_folder(made.folder, str(made.model))
    assert validate_folder(made.folder, str(made.model), options=ValidateOptions.of(vocoder=str(made.vocoder))).passed


def test_the_command_line_engine_agrees_too(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    if find_tract_cli() is None:
        pytest.skip("the tract command is not installed")
    made = exported(_SPEECHT5)
    options = {"require_tokenizer": False, "vocoder": str(made.vocoder), "check": False}
    folder = export_llm(made.model, tmp_path / "out", **options).output_dir  # caches in f16, which no npz file holds
    with_command = ValidateOptions.of(vocoder=str(made.vocoder), engine="cli")
    assert validate_folder(folder, str(made.model), options=with_command).passed


def test_a_model_of_spectrograms_needs_a_vocoder(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    made = exported(_SPEECHT5)
    with pytest.raises(OptionError, match="no vocoder was given") as caught:
        export_llm(made.model, tmp_path / "out", require_tokenizer=False)
    assert "--vocoder microsoft/speecht5_hifigan" in str(caught.value.hint)


def test_a_model_of_waveforms_has_no_vocoder(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    vocoder, made = str(exported(_SPEECHT5).vocoder), exported(_VITS)
    with pytest.raises(OptionError, match="makes waveforms itself"):
        export_llm(made.model, tmp_path / "out", require_tokenizer=False, vocoder=vocoder)
    with pytest.raises(OptionError, match="--vocoder applies to the task 'text-to-audio'"):
        export_llm(made.model, tmp_path / "out", task="fill-mask", vocoder=vocoder)
    with pytest.raises(UnknownArchitectureError, match="VitsModel is no vocoder"):
        export_llm(made.model, tmp_path / "out", require_tokenizer=False, vocoder=str(made.model))


def test_options_without_a_meaning_are_refused(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    model = exported(_VITS).model
    for options, message in (
        ({"batch": True}, "one text at a time"),
        ({"dtype": "f16", "activations": "f16"}, "computes in f32"),
        ({"compress": "q4_0:gptq"}, "calibration"),
        ({"adapter": "somewhere"}, "adapters"),
    ):
        with pytest.raises(OptionError, match=message):
            export_llm(model, tmp_path / "out", require_tokenizer=False, **options)


def test_a_model_of_several_speakers_and_plain_durations(tmp_path: Path) -> None:
    model = build_tiny_model(_VITS, task=TEXT_TO_AUDIO)
    config = model.config
    config.num_speakers, config.speaker_embedding_size, config.use_stochastic_duration_prediction = 3, 8, False
    torch.manual_seed(0)
    type(model)(config).save_pretrained(tmp_path / "model")
    result = export_llm(tmp_path / "model", tmp_path / "out", require_tokenizer=False, dtype="f32")
    assert result.validation is not None and result.validation.passed
    speech = json.loads((tmp_path / "out" / "export.json").read_text())["speech"]
    assert speech["speaker"] == {"input": "speaker_id", "count": 3, "width": None, "rows": False, "frame": None}
    assert list(speech["noise"]) == ["noise"]


def test_each_model_needs_a_vocoder_of_its_kind(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    gan, codec = exported(_SPEECHT5), exported(_POCKET)
    for model, vocoder, message in (
        (gan, codec, "PocketTTSAudioTokenizerModel makes no sound of spectrograms"),
        (codec, gan, "SpeechT5HifiGan makes no sound of latents"),
    ):
        with pytest.raises(OptionError, match=message):
            export_llm(model.model, tmp_path / "out", require_tokenizer=False, vocoder=str(vocoder.vocoder))
    with pytest.raises(OptionError, match="makes latents of a codec, and no vocoder was given"):
        export_llm(codec.model, tmp_path / "out", require_tokenizer=False)


def test_caches_that_the_text_makes_are_kept_in_half(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    made = exported(_POCKET)
    result = export_llm(made.model, tmp_path / "out", require_tokenizer=False, vocoder=str(made.vocoder), dtype="f16")
    assert result.validation is not None and result.validation.passed
    graphs = {
        role: read_graph_text(tmp_path / "out" / part["archive"]) for role, part in result.manifest["archives"].items()
    }
    assert read_outline(graphs["step"]).externals[-1].datum_type == "f16"


def test_a_voice_and_a_text_are_spoken(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported(_POCKET).folder, folder)
    _save_tokenizer(folder)
    voice = np.random.default_rng(3).standard_normal((4, 32)).astype(np.float32)
    np.save(tmp_path / "voice.npy", voice)
    model = SpeakingModel.open(folder)
    said = model.spoken("one two three", speaker=str(tmp_path / "voice.npy"))
    plan = model.plan
    assert plan.steps is not None
    # Random weights end speech as soon as they may: after the first frames, and those that follow the end of a short text.
    assert said.shape == ((plan.steps.least + 1 + plan.steps.after_short) * _SAMPLES_PER_FRAME,)
    longer = model.spoken("one two three four five six", speaker=str(tmp_path / "voice.npy"))
    assert longer.shape == ((plan.steps.least + 1 + plan.steps.after) * _SAMPLES_PER_FRAME,)
    for wrong, message in ((None, "none was given"), ("narrow.npy", "does not hold rows of 32 floats")):
        np.save(tmp_path / "narrow.npy", voice[:, :5])
        with pytest.raises(OptionError, match=message):
            model.spoken("one", speaker=None if wrong is None else str(tmp_path / wrong))


def test_codes_are_drawn_with_the_models_settings_and_a_seed(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported(_CSM).folder, folder)
    _save_tokenizer(folder, "[{{ messages[0]['role'] }}]{{ messages[0]['content'][0]['text'] }}")
    manifest = json.loads((folder / "export.json").read_text())
    assert manifest["speech"]["codes"]["first"] == {}  # the likeliest codes
    drawn = {"do_sample": True, "temperature": 2.0}
    manifest["speech"]["codes"] |= {"first": drawn, "others": drawn}
    (folder / "export.json").write_text(json.dumps(manifest))
    model = SpeakingModel.open(folder)
    said = model.spoken("one two", seed=1)
    assert said.shape == (_FRAMES * _SAMPLES_PER_FRAME,)
    np.testing.assert_array_equal(said, model.spoken("one two", seed=1))
    assert not np.array_equal(said, model.spoken("one two", seed=2))
    assert not np.array_equal(said, model.spoken("one two", seed=1, speaker="2"))  # another number before the text
    with pytest.raises(OptionError, match="speakers of this model are numbers"):
        model.spoken("one", speaker="voice.npy")


def test_speech_of_codes_ends_with_a_frame_of_ends() -> None:
    rule = Codes(count=3, end=0, most_steps=9)
    for given, heard in (
        ([[5, 6, 7], [0, 0, 0]], [[5, 6, 7]]),
        ([[5, 6, 7], [0, 0, 4]], [[5, 6, 7], [0, 0, 4]]),
        ([[5, 0, 0], [0, 1, 0], [2, 2, 2]], [[5, 0, 0], [0, 1, 0], [2, 2, 2]]),
        ([[0, 0, 0]], []),
    ):
        counter = StepArchive(_counting, ("codes",), ("logits",), ())
        maker = CodeMaker(rule, counter, StepArchive(_counting, ("code",), ("logits",), ()))
        told = {"logits": np.zeros((1, 8), np.float32)}
        made = maker.made(told, lambda frame, place, _, given=given: given[frame][place], len(given))
        assert made["codes"].tolist() == [heard]
        assert made["logits"].shape == (3 * len(heard), 8)


def _counting(_held: object, _states: object) -> Callable[[object], list[np.ndarray]]:
    """Begin turns that answer with logits of nothing."""
    return lambda _: [np.zeros((1, 8), np.float32)]


_WITH_SOUND = "{{ messages[0]['content'][0]['text'] }}<sound>"


def test_a_recording_is_a_voice(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    from transformers import PocketTTSAudioTokenizerModel, PocketTTSFeatureExtractor

    made = exported(_POCKET)
    folder = tmp_path / "out"
    shutil.copytree(made.folder, folder)
    _save_tokenizer(folder)
    rate, recording = 24_000, tmp_path / "voice.wav"
    write_waveform(recording, 0.3 * np.sin(np.arange(9_000) / 9).astype(np.float32), rate)
    heard = PocketTTSFeatureExtractor()(read_waveform(recording, rate), sampling_rate=rate)["input_values"]
    codec = PocketTTSAudioTokenizerModel.from_pretrained(made.vocoder)
    with torch.no_grad():
        np.save(tmp_path / "voice.npy", codec.encode(heard).latents.numpy())
    model = SpeakingModel.open(folder)
    said, wanted = (model.spoken("one two", speaker=str(tmp_path / name)) for name in ("voice.wav", "voice.npy"))
    np.testing.assert_allclose(said, wanted, atol=2e-4)
    assert not np.array_equal(said, model.spoken("one two", speaker=str(_louder(recording, tmp_path))))


def _louder(recording: Path, folder: Path) -> Path:
    write_waveform(folder / "louder.wav", 2 * read_waveform(recording, 24_000), 24_000)
    return folder / "louder.wav"


def _save_tokenizer(folder: Path, template: str = _WITH_SOUND) -> None:
    """Write a tokenizer of words whose chat template adds a token that stands for sound, as that of Pocket TTS does."""
    vocabulary = {
        "[": 30,
        "]": 31,
        "0": 32,
        "2": 33,
        "<pad>": 0,
        "<unk>": 1,
        "one": 20,
        "two": 21,
        "three": 22,
        "four": 23,
        "five": 24,
        "six": 25,
        "<sound>": 158,
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<sound>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def test_a_text_ends_some_steps_after_the_one_that_ends_it() -> None:
    steps = Steps(8, 0.5, 2.0, 40, most_beyond=3, least=2, after=1, after_short=3, short_words=2)
    assert steps.most(4) == 11 and steps.most(100) == 40
    assert steps.count([0.9, 0.9, 0.1, 0.6], 10) == 5  # the first two end nothing
    assert steps.count([0.9, 0.9, 0.1, 0.6], 10, words=2) == 7
    assert steps.count([0.1] * 4, 10) == 23
    assert steps.count([0.1] * 11, 4) == 11


def test_other_speech_models_are_refused() -> None:
    from transformers import BarkConfig

    with pytest.raises(UnknownArchitectureError, match="'bark'") as caught:
        family_of(BarkConfig())
    assert "vits" in str(caught.value.hint)


def test_durations_become_frames() -> None:
    up = Durations("up", 0.5)
    assert frames_of_tokens(up, np.array([0.1, 2.0, 4.2], np.float32)).tolist() == [1, 1, 3]
    nearest = Durations("nearest", 1.5)
    assert frames_of_tokens(nearest, np.array([-0.7, 0.5, 1.5, 2.6], np.float32)).tolist() == [0, 0, 3, 4]
    assert frames_of_tokens(nearest, np.array([-0.7, 0.2], np.float32)).tolist() == [
        1,
        1,
    ]  # else there would be no frame
