"""Images that become codes, for each of which the vocabulary has a token (Chameleon): a table in the graph says which one.

transformers makes that table while it reads an image, and looks tokens up on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import pad

CODE_TOKENS = "code_tokens"
"""What an encoder needs beside pixels: the token of each code, int64 [codes]."""


def code_tokens(network: Any) -> dict[str, torch.Tensor]:
    """Return `CODE_TOKENS` of a model; nothing for one whose images do not become codes.

    Args:
        network: transformers' model.
    """
    mapping = getattr(network.base_model, "vocabulary_mapping", None)
    return {} if mapping is None else {CODE_TOKENS: mapping.img2bpe_mapping_tensor.long()}


@contextmanager
def codes_looked_up(network: Any, known: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a model take the tokens of codes from a table, for the length of the block.

    Args:
        network: transformers' model.
        known: with `CODE_TOKENS`, where the model's images become codes.
    """
    if CODE_TOKENS not in known:
        yield
        return
    mapping, table = network.base_model.vocabulary_mapping, known[CODE_TOKENS]
    end_of_row = getattr(mapping, "eol_token_id", None)

    def tokens_of(codes: torch.Tensor) -> torch.Tensor:
        return table[codes] if end_of_row is None else pad(table[codes], (0, 1), value=end_of_row)

    with mock.patch.object(mapping, "convert_img2bpe", tokens_of):
        yield


@contextmanager
def codes_left_out(network: Any) -> Iterator[None]:
    """Let a model that never writes tokens of codes name them by a range, for the length of the block: a graph has no lists.

    Args:
        network: transformers' model.
    """
    mapping = getattr(network.base_model, "vocabulary_mapping", None)
    tokens = [] if mapping is None else mapping.image_tokens
    if not tokens or tokens != list(range(tokens[0], tokens[-1] + 1)):
        yield
        return
    with mock.patch.dict(vars(mapping), image_tokens=slice(tokens[0], tokens[-1] + 1)):
        yield


__all__ = ["CODE_TOKENS", "code_tokens", "codes_left_out", "codes_looked_up"]
