"""What is said without looking at values is what transformers says with them."""

from __future__ import annotations

import torch
from transformers import BertConfig, T5Config

from t2n_llm.tasks.heads.shapes_alone import LastMarked, PlacesOfMasks
from t2n_llm.tasks.heads.table import HEADS, kind_of


def test_the_last_end_token_is_picked_by_its_place() -> None:
    states = torch.randn(3, 7, 4)
    marked = torch.zeros(3, 7, dtype=torch.bool)
    marked[torch.arange(3), torch.tensor([1, 6, 4])] = True
    marked[:, 0] = True  # two a text, of which the last counts

    def picked() -> torch.Tensor:
        return states[marked, :].view(3, -1, 4)[:, -1, :]

    expected = picked()
    with LastMarked():
        assert torch.equal(picked(), expected)


def test_numbers_are_written_wherever_a_mask_is_set() -> None:
    hidden = torch.rand(4, 5, 6) > 0.3
    hidden[1, 2] = True

    def seen() -> torch.Tensor:
        mask = hidden.clone()
        mask[torch.where(mask.sum(-1) == mask.shape[-1])] = False
        return mask

    def places() -> torch.Tensor:
        first, second = torch.where(hidden[0])
        return torch.stack([first, second, *torch.where(hidden[:, 0])[:1][0].sum().expand(1, len(second))])

    expected, listed = seen(), places()
    with PlacesOfMasks():
        assert torch.equal(seen(), expected)
        assert torch.equal(places(), listed)
    meta = hidden.to("meta")
    with PlacesOfMasks():
        meta[torch.where(meta.sum(-1) == 6)] = False


def test_features_of_an_encoder_decoder_are_its_encoders() -> None:
    head = HEADS["feature-extraction"]
    assert kind_of(head, T5Config()).auto_class == "AutoModelForTextEncoding"
    assert kind_of(head, BertConfig()).auto_class == "AutoModel"
