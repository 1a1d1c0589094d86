"""X-MOD: an adapter for each language, chosen by ids; a decoder that takes nothing but tokens uses the default language's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
from torch import nn

from kvcache.forms.cache import CacheForm
from kvcache.recurrent import LastRead


class XmodForm(CacheForm):
    """One adapter for all rows, not picked by value; see `kvcache.forms.StateForm`."""

    @contextmanager
    def replacements(self, module: nn.Module, last_read: LastRead) -> Iterator[None]:
        """See `StateForm.replacements`; the language is that of the nearest config."""
        with super().replacements(module, last_read), one_language(module):
            yield


@contextmanager
def one_language(module: nn.Module) -> Iterator[None]:
    """Let the rows of an X-MOD be of its default language, that of the nearest config, for the length of the block."""
    languages = (getattr(getattr(part, "config", None), "default_language", None) for part in module.modules())
    language = next((str(found) for found in languages if found is not None), None)
    if language is None:
        yield
        return
    from transformers.models.xmod.modeling_xmod import XmodOutput

    with mock.patch.object(XmodOutput, "lang_adapter", partialmethod(_adapted, language)):
        yield


def _adapted(self: Any, language: str, _: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """`XmodOutput.lang_adapter` where every row is of one language."""
    residual = hidden_states
    if self.adapter_layer_norm is not None:
        hidden_states = self.adapter_layer_norm(hidden_states)
    elif self.adapter_reuse_layer_norm:
        hidden_states = self.LayerNorm(hidden_states)
    if self.ln_before_adapter:
        residual = hidden_states
    adapted: torch.Tensor = self.adapter_modules[language](hidden_states) + residual
    return adapted
