"""Tokenizers of words for models with random weights: `w3`, `w4`, ... and an end that the encoder expects."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def save_word_tokenizer(folder: Path, size: int) -> None:
    """Give a model with `size` tokens a tokenizer: `<s>` is 0, `<pad>` 1, `</s>` 2, and every other number a word."""
    words = {"<s>": 0, "<pad>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
