"""Text about images and sound from an export folder, token for token what transformers' own generate() says."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from t2n_llm import export_llm
from t2n_llm.runtime.sensing import SensingModel
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model
from tests.shared_folders import SharedFolders
from tests.t2n_llm.command_line import call, strict_json

_WORDS = 160
_NEW = 8
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}{{ '<' + part.type + '>' }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant{% endif %}"
)


def _tokenizer(specials: dict[int, str], **named: str) -> PreTrainedTokenizerFast:
    words = {specials.get(index, f"w{index}"): index for index in range(_WORDS)}
    words = {{10: "user", 11: "assistant", 12: "system"}.get(index, word): index for word, index in words.items()}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w9"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(specials.values()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", chat_template=_TEMPLATE, extra_special_tokens=named
    )


_ENDS = {2: "</s>", 7: "<pad>"}


def _llava(folder: Path) -> None:
    """A tiny LLaVA with a processor for images of 64 pixels, exported."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    source = folder / "source"
    save_tiny_model(build_tiny_model("llava", task=IMAGE_TEXT_TO_TEXT), source, IMAGE_TEXT_TO_TEXT)
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
        _tokenizer({**_ENDS, 150: "<image>"}),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(source)
    export_llm(source, folder / "export", dtype="f32", check=False, task=IMAGE_TEXT_TO_TEXT)


@pytest.fixture(scope="session")
def llava(shared_folders: SharedFolders) -> Path:
    """An export of a tiny LLaVA."""
    return shared_folders("sensing-llava", _llava) / "export"


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
