"""X-MOD: an adapter for each language, chosen by ids; a decoder that takes nothing but tokens uses the default language's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
        from transformers.models.xmod.modeling_xmod import XmodOutput

        configs = [getattr(part, "config", None) for part in module.modules()]
        language = next((str(config.default_language) for config in configs if config is not None), None)
        with ExitStack() as stack:
            stack.enter_context(super().replacements(module, last_read))
            if language is not None:
                adapter = partialmethod(_adapted, language)
                stack.enter_context(mock.patch.object(XmodOutput, "lang_adapter", adapter))
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
