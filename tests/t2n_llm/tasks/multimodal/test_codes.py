"""Images that become codes: their tokens come from a table, and a decoder that never writes them excludes a range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from t2n_llm.tasks.multimodal.codes import codes_left_out
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("chameleon", task=IMAGE_TEXT_TO_TEXT)


def test_tokens_of_codes_come_from_a_table(model: Any) -> None:
    encoder = family_of(model.config, 64).encoder(model)
    assert encoder.buffers["code_tokens"].tolist() == list(range(64, 96))
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        (found,) = encoder.encode(pixels, encoder.buffers)
        wanted = model.get_image_features(pixels, return_dict=True)
    torch.testing.assert_close(found, wanted.pooler_output)
    assert len(wanted.image_tokens.unique()) > 1


def test_rows_of_codes_end_with_a_token_of_their_own() -> None:
    model = build_tiny_model("emu3", task=IMAGE_TEXT_TO_TEXT)
    family = family_of(model.config, 64)
    assert family.rows_per_image == 8 * (8 + 1)
    encoder, pixels = family.encoder(model), torch.randn(family.pixel_shape)
    with torch.no_grad():
        (found,) = encoder.encode(pixels, encoder.buffers)
        (wanted,) = model.model.get_image_features(pixels, torch.tensor([[64, 64]]), return_dict=True).pooler_output
        end = model.get_input_embeddings()(torch.tensor(6))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found[8::9], end.expand(8, -1))


def test_tokens_that_are_never_written_are_one_range(model: Any) -> None:
    mapping, ids = model.model.vocabulary_mapping, torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        wanted = model(ids).logits
        with codes_left_out(model):
            assert mapping.image_tokens == slice(64, 96)
            torch.testing.assert_close(model(ids).logits, wanted)
    assert mapping.image_tokens == list(range(64, 96))
    mapping.image_tokens = [64, 66]
    with codes_left_out(model):
        assert mapping.image_tokens == [64, 66]
