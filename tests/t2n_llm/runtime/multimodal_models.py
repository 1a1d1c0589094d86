"""Tiny models that see or hear, with their processors: what the tests of text about images and sound export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from t2n_llm import export_llm
from t2n_llm.tasks.media.sound import write_waveform
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model

_WORDS = 160

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}{{ '<' + part.type + '>' }} {% endif %}{% endfor %}{% endif %}"
    " {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def word_tokenizer(specials: dict[int, str], **named: str) -> PreTrainedTokenizerFast:
    words = {specials.get(index, f"w{index}"): index for index in range(_WORDS)}
    words = {{10: "user", 11: "assistant", 12: "system"}.get(index, word): index for word, index in words.items()}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w9"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(specials.values()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=_TEMPLATE,
        extra_special_tokens=named,
    )


ENDS = {2: "</s>", 7: "<pad>"}


def export_llava(folder: Path) -> None:
    """A tiny LLaVA with a processor for images of 64 pixels, exported."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    source = folder / "source"
    save_tiny_model(build_tiny_model("llava", task=IMAGE_TEXT_TO_TEXT), source, IMAGE_TEXT_TO_TEXT)
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
        word_tokenizer({**ENDS, 150: "<image>"}),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(source)
    export_llm(source, folder / "export", dtype="f32", check=False, task=IMAGE_TEXT_TO_TEXT)


def export_gemma(folder: Path) -> None:
    """A tiny Gemma 3, whose images are read in both directions, exported."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    source = folder / "source"
    model = build_tiny_model("gemma3", task=IMAGE_TEXT_TO_TEXT)
    save_tiny_model(model, source, IMAGE_TEXT_TO_TEXT)
    config = model.config
    side = config.vision_config.image_size
    specials = {**ENDS, config.image_token_id: "<soft>", 155: "<image>", 156: "<end>"}
    Gemma3Processor(
        Gemma3ImageProcessor(size={"height": side, "width": side}),
        word_tokenizer(specials, image_token="<soft>", boi_token="<image>", eoi_token="<end>"),
        image_seq_length=config.mm_tokens_per_image,
        chat_template=_TEMPLATE,
    ).save_pretrained(source)
    export_llm(source, folder / "export", dtype="f32", check=False, task=IMAGE_TEXT_TO_TEXT)


def export_paligemma(folder: Path) -> None:
    """A tiny PaliGemma, whose prompts are read in both directions, exported."""
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    source = folder / "source"
    model = build_tiny_model("paligemma", task=IMAGE_TEXT_TO_TEXT)
    save_tiny_model(model, source, IMAGE_TEXT_TO_TEXT)
    vision = model.config.vision_config
    images = SiglipImageProcessor(size={"height": vision.image_size, "width": vision.image_size})
    images.image_seq_length = (vision.image_size // vision.patch_size) ** 2
    tokenizer = word_tokenizer({**ENDS, 8: "<bos>", model.config.image_token_id: "<image>"}, image_token="<image>")
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = None
    PaliGemmaProcessor(images, tokenizer).save_pretrained(source)
    export_llm(source, folder / "export", dtype="f32", check=False, task=IMAGE_TEXT_TO_TEXT)


def export_mllama(folder: Path) -> None:
    """A tiny Llama 3.2 Vision, whose text reads tiles of images by cross-attention, exported."""
    from transformers import MllamaImageProcessor, MllamaProcessor

    source = folder / "source"
    model = build_tiny_model("mllama", task=IMAGE_TEXT_TO_TEXT)
    save_tiny_model(model, source, IMAGE_TEXT_TO_TEXT)
    side = model.config.vision_config.image_size
    tokenizer = word_tokenizer({**ENDS, 8: "<bos>"}, image_token="<image>")
    tokenizer.bos_token = "<bos>"
    images = MllamaImageProcessor(size={"height": side, "width": side}, max_image_tiles=4)
    MllamaProcessor(images, tokenizer, chat_template=_TEMPLATE).save_pretrained(source)
    export_llm(source, folder / "export", dtype="f32", check=False, task=IMAGE_TEXT_TO_TEXT)


def export_qwen2_audio(folder: Path) -> None:
    """A tiny Qwen2-Audio that hears up to a second, exported."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    source = folder / "source"
    save_tiny_model(build_tiny_model("qwen2_audio", task=AUDIO_TEXT_TO_TEXT), source, AUDIO_TEXT_TO_TEXT)
    extractor = WhisperFeatureExtractor(feature_size=16, sampling_rate=12_800, hop_length=100, chunk_length=1)
    tokenizer = word_tokenizer({**ENDS, 151: "<audio>", 152: "<begin>", 153: "<end>"})
    Qwen2AudioProcessor(
        extractor,
        tokenizer,
        chat_template=_TEMPLATE,
        audio_token="<audio>",
        audio_bos_token="<begin>",
        audio_eos_token="<end>",
    ).save_pretrained(source)
    export_llm(source, folder / "export", dtype="f32", check=False, task=AUDIO_TEXT_TO_TEXT)


def export_omniasr(folder: Path) -> None:
    """A tiny OmniASR, which hears samples of any length, exported."""
    from transformers import OmniASRFeatureExtractor, OmniASRProcessor

    source = folder / "source"
    save_tiny_model(build_tiny_model("omniasr", task=AUDIO_TEXT_TO_TEXT), source, AUDIO_TEXT_TO_TEXT)
    tokenizer = word_tokenizer({**ENDS, 151: "<audio>"})
    OmniASRProcessor(OmniASRFeatureExtractor(), tokenizer, audio_token="<audio>").save_pretrained(source)
    export_llm(source, folder / "export", dtype="f32", check=False, task=AUDIO_TEXT_TO_TEXT)


def write_recording(path: Path, samples: int) -> Path:
    write_waveform(path, 0.3 * np.sin(np.arange(samples) / 9).astype(np.float32), 12_800)
    return path
