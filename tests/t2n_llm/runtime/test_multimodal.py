"""Text about images and sound from an export folder, token for token what transformers' own generate() says."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from t2n_llm import export_llm
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.recorded import graph_options_of
from t2n_llm.graph.interface import recorded_states
from t2n_llm.runtime.answering import HeldTokens
from t2n_llm.runtime.multimodal import MultimodalModel
from t2n_llm.runtime.sampling.options import Sampling
from t2n_llm.tasks.media.encoder_input import read_image
from t2n_llm.tasks.media.sound import read_waveform
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.processed import items_of
from t2n_llm.tasks.multimodal.processor import row_counts
from t2n_llm.tasks.multimodal.running import open_pipeline
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model
from tests.shared_folders import SharedFolders
from tests.t2n_llm.command_line import call, strict_json
from tests.t2n_llm.runtime.multimodal_models import (
    ENDS,
    export_gemma,
    export_mllama,
    export_omniasr,
    export_paligemma,
    export_qwen2_audio,
    word_tokenizer,
    write_recording,
)

_NEW = 8


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of different sizes."""
    random = np.random.default_rng(0)
    for name, shape in (("first.png", (70, 90, 3)), ("second.png", (64, 64, 3))):
        Image.fromarray(random.integers(0, 255, shape, np.uint8)).save(tmp_path / name)
    return tmp_path / "first.png", tmp_path / "second.png"


def _said_by_transformers(folder: Path, text: str, files: Sequence[Path]) -> str:
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    source = folder.parent / "source"
    processor = AutoProcessor.from_pretrained(source)
    content = [*({"type": "image", "image": str(file)} for file in files), {"type": "text", "text": text}]
    made = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32).eval()
    token = model.config.image_token_id
    said = model.generate(**made, max_new_tokens=_NEW, do_sample=False, suppress_tokens=[token])
    return str(processor.decode(said[0, made["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_images_are_described_as_by_transformers(count: int, llava: Path, pictures: tuple[Path, Path]) -> None:
    files = pictures[:count]
    options = [word for file in files for word in ("--image", file)]
    outcome = call("generate", llava, "w20 w21", *options, "--max-new-tokens", _NEW, "--greedy", "--json")
    assert outcome.code == 0, outcome.err
    record = strict_json(outcome.out.splitlines()[-1])
    assert record["text"].split() == _said_by_transformers(llava, "w20 w21", files).split()
    assert record["prompt_tokens"] == 4 + 64 * count


def test_an_image_that_is_read_in_both_directions_is_not_cut(
    shared_folders: SharedFolders, pictures: tuple[Path, Path]
) -> None:
    folder = shared_folders("sensing-gemma3", export_gemma) / "export"
    options = ("--image", pictures[0], "--image", pictures[1], "--prefill-chunk", 5)
    outcome = call("generate", folder, "w20 w21", *options, "--max-new-tokens", _NEW, "--greedy", "--json")
    assert outcome.code == 0, outcome.err
    record = strict_json(outcome.out.splitlines()[-1])
    assert record["text"].split() == _said_by_transformers(folder, "w20 w21", pictures).split()


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_is_read_in_both_directions_is_not_cut(
    count: int, shared_folders: SharedFolders, pictures: tuple[Path, Path]
) -> None:
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    folder = shared_folders("sensing-paligemma", export_paligemma)
    files = pictures[:count]
    options = [word for file in files for word in ("--image", file)]
    options += ["--prefill-chunk", 5, "--max-new-tokens", _NEW, "--greedy", "--json"]
    outcome = call("generate", folder / "export", "w20 w21 w22", *options)
    assert outcome.code == 0, outcome.err
    record = strict_json(outcome.out.splitlines()[-1])
    processor = AutoProcessor.from_pretrained(folder / "source")
    images = [Image.open(file) for file in files]
    made = processor(text="<image>" * count + "w20 w21 w22", images=images, return_tensors="pt")
    made.pop("labels", None)
    model = AutoModelForMultimodalLM.from_pretrained(folder / "source", dtype=torch.float32).eval()
    token = model.config.image_token_id
    said = model.generate(**made, max_new_tokens=_NEW, do_sample=False, suppress_tokens=[token])
    prompt = made["input_ids"].shape[1]
    assert record["prompt_tokens"] == prompt
    assert record["text"].split() == processor.decode(said[0, prompt:], skip_special_tokens=True).split()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_images_are_read_by_cross_attention(
    count: int, shared_folders: SharedFolders, pictures: tuple[Path, Path]
) -> None:
    folder = shared_folders("sensing-mllama", export_mllama) / "export"
    files = pictures[:count]
    options = [word for file in files for word in ("--image", file)]
    options += ["--prefill-chunk", 3, "--max-new-tokens", _NEW, "--greedy", "--json"]
    outcome = call("generate", folder, "w20 w21", *options)
    assert outcome.code == 0, outcome.err
    record = strict_json(outcome.out.splitlines()[-1])
    assert record["text"].split() == _said_by_transformers(folder, "w20 w21", files).split()
    assert record["prompt_tokens"] == 5 + count  # one token for each image


def _qwen(folder: Path) -> None:
    """A tiny Qwen2-VL for images of any size, exported without a processor."""
    save_tiny_model(build_tiny_model("qwen2_vl", task=IMAGE_TEXT_TO_TEXT), folder / "source", IMAGE_TEXT_TO_TEXT)
    options = ExportOptions.of(dtype="f32", check=False, task=IMAGE_TEXT_TO_TEXT, require_tokenizer=False)
    export_llm(folder / "source", folder / "export", options=options)


def test_images_of_two_sizes_are_read_by_one_archive(
    shared_folders: SharedFolders, pictures: tuple[Path, Path]
) -> None:
    """Qwen2-VL's own processor needs torchvision: its parts are put together here."""
    from transformers import AutoConfig, AutoModelForMultimodalLM, Qwen2VLImageProcessor

    folder = shared_folders("sensing-qwen2-vl", _qwen)
    manifest = read_manifest(folder / "export")
    config = AutoConfig.from_pretrained(folder / "export")
    family = family_of(config, graph_options_of(manifest).image_size)
    seen = Qwen2VLImageProcessor(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096)
    arrays = [Image.fromarray(read_image(file, None)) for file in pictures]
    made = seen(arrays, return_tensors="pt")
    images = items_of(made, family)
    assert [image.shape for image in images] == [(3, 4, 4, 384), (4, 4, 4, 384)] and family.image_side() is None
    assert manifest["multimodal"]["pixel_values"]["shape"] == ["H", "W", 4, 384]
    assert manifest["multimodal"]["rows_per_image"] == "H*W"
    first, second = ([config.image_token_id] * count for count in row_counts(family, images))
    ids = [20, *first, 21, *second, 22, 23]
    model = AutoModelForMultimodalLM.from_pretrained(folder / "source", dtype=torch.float32).eval()
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64)}
    types = torch.tensor([ids]) == config.image_token_id
    said = model.generate(
        **given,
        **made,
        mm_token_type_ids=types.int(),
        max_new_tokens=_NEW,
        do_sample=False,
        suppress_tokens=[config.image_token_id],
    )
    archives = {role: folder / "export" / part["archive"] for role, part in manifest["archives"].items()}
    tokens: list[int] = []
    with open_pipeline(archives, family, recorded_states(manifest)) as pipeline:
        held = HeldTokens(lambda: pipeline.begin(ids, images), [(0, 7)])
        logits = held.read(ids)
        while logits is not None and len(tokens) < _NEW:
            logits[config.image_token_id] = -np.inf
            tokens.append(int(logits.argmax()))
            logits = held.read(tokens[-1:])
    assert tokens == said[0, len(ids) :].tolist()[: len(tokens)]


@pytest.fixture(scope="session")
def hearing(shared_folders: SharedFolders) -> Path:
    """An export of a tiny Qwen2-Audio."""
    return shared_folders("sensing-qwen2-audio", export_qwen2_audio) / "export"


def test_sound_is_heard_as_by_transformers(hearing: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    file = write_recording(tmp_path / "sound.wav", 9_000)
    words = ("--raw", "--max-new-tokens", _NEW, "--greedy", "--json")
    outcome = call("generate", hearing, "w20 w21", "--audio", file, *words)
    assert outcome.code == 0, outcome.err
    source = hearing.parent / "source"
    processor = AutoProcessor.from_pretrained(source)
    heard = read_waveform(file, 12_800)
    made = processor(text="<audio>w20 w21", audio=[heard], sampling_rate=12_800, return_tensors="pt")
    model = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32).eval()
    said = model.generate(**made, max_new_tokens=_NEW, do_sample=False, suppress_tokens=[151])
    expected = processor.tokenizer.decode(said[0, made["input_ids"].shape[1] :], skip_special_tokens=True)
    assert strict_json(outcome.out.splitlines()[-1])["text"].split() == expected.split()
    outcome = call("generate", hearing, "w20", "--audio", write_recording(tmp_path / "long.wav", 24_320))
    assert outcome.code == 2 and "1.9 s long" in outcome.line("error")
    outcome = call("generate", hearing, "w20", "--image", tmp_path / "x.png")
    assert outcome.code == 2 and "--audio FILE.wav" in outcome.line("hint")


@pytest.mark.parametrize("samples", [4_000, 23_456])
def test_recordings_of_any_length_are_heard(samples: int, shared_folders: SharedFolders, tmp_path: Path) -> None:
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    folder = shared_folders("sensing-omniasr", export_omniasr)
    file = write_recording(tmp_path / "sound.wav", samples)
    words = ("--raw", "--max-new-tokens", _NEW, "--greedy", "--json")
    outcome = call("generate", folder / "export", "<audio> w20 w21", "--audio", file, *words)
    assert outcome.code == 0, outcome.err
    processor = AutoProcessor.from_pretrained(folder / "source")
    made = processor(text="<audio> w20 w21", audio=read_waveform(file, 16_000), return_tensors="pt")
    model = AutoModelForMultimodalLM.from_pretrained(folder / "source", dtype=torch.float32).eval()
    said = model.generate(**made, max_new_tokens=_NEW, do_sample=False, suppress_tokens=[151])
    expected = processor.tokenizer.decode(said[0, made["input_ids"].shape[1] :], skip_special_tokens=True)
    assert strict_json(outcome.out.splitlines()[-1])["text"].split() == expected.split()
    assert read_manifest(folder / "export")["multimodal"]["input_values"]["shape"] == [1, 1, "T"]


def test_the_first_mistakes_are_explained(
    llava: Path, tiny_export: Path, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    def refused(*words: object) -> tuple[str, str]:
        outcome = call("generate", *words)
        assert outcome.code == 2, outcome
        return outcome.line("error"), outcome.line("hint")

    picture = pictures[0]
    assert "there is no prompt" in refused(llava, "--image", picture)[0]
    assert "No such file" in refused(llava, "w20", "--image", tmp_path / "none.png")[0]
    assert "prompt and --image FILE" in refused(llava, "w20", "--audio", picture)[1]
    assert "Omit --prompt-lookup" in refused(llava, "w20", "--image", picture, "--prompt-lookup")[1]
    text_model = tmp_path / "text"
    shutil.copytree(tiny_export, text_model)
    word_tokenizer(ENDS).save_pretrained(text_model)
    assert "It takes a prompt only" in refused(text_model, "w20", "--image", picture)[1]
    error, hint = refused(llava, "w20 <image> w21 <image>", "--raw", "--image", picture)
    assert "refuses the prompt" in error or "2 x" in error or "image tokens" in error
    assert "one image token" in hint
    bare = tmp_path / "bare"
    shutil.copytree(llava, bare)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (bare / name).unlink(missing_ok=True)
    error, hint = refused(bare, "w20", "--image", picture)
    assert "processor" in error and "preprocessor_config.json" in hint


def test_a_processor_of_another_size_is_refused(llava: Path, pictures: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(llava, other)
    file = other / "processor_config.json"
    file.write_text(file.read_text().replace("64", "48"))
    outcome = call("generate", other, "w20", "--image", pictures[0])
    assert outcome.code == 2 and "[1, 3, 48, 48], and the archive takes [1, 3, 64, 64]" in outcome.line("error")


def test_a_program_asks_about_images(llava: Path, pictures: tuple[Path, Path]) -> None:
    model = MultimodalModel.open(llava)
    prompt = model.prompt("w20", images=pictures, system="w30")
    assert [image.shape for image in prompt.images] == [(1, 3, 64, 64)] * 2 and prompt.ids.count(150) == 128
    assert prompt.ids[:2] == (12, 30)
    with model.opened(prompt) as held:
        choice = Sampling(greedy=True).choice(model.language.settings)
        answer = model.language.answer(held, prompt.ids, choice, max_new_tokens=2)
        assert "".join(answer)
    assert answer.account.read_tokens == len(prompt.ids)
