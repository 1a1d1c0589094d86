"""How a model takes its states and gives them back: transformers' `Cache` for most, a file here where a family differs.

In: a model. Out: a `StateForm`, which a captured model runs with explicit tensors, and the PyTorch reference with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature

from torch import nn

from kvcache.forms.cache import CacheForm
from kvcache.forms.deepseek_v4 import DeepseekV4Form
from kvcache.forms.form import Conversation, StateForm
from kvcache.forms.minimax import MiniMaxForm
from kvcache.forms.qwen4_exp import Qwen4ExpForm
from kvcache.forms.recurrent_gemma import RecurrentGemmaForm
from kvcache.forms.rwkv import RwkvForm
from kvcache.forms.xlstm import XlstmForm
from kvcache.forms.xmod import XmodForm

_FORMS: Mapping[str, Callable[[], StateForm]] = {
    "deepseek_v4": DeepseekV4Form,
    "minimax": MiniMaxForm,
    "qwen4_exp": Qwen4ExpForm,
    "qwen4_exp_text": Qwen4ExpForm,
    "recurrent_gemma": RecurrentGemmaForm,
    "rwkv": RwkvForm,
    "xlstm": XlstmForm,
    "xmod": XmodForm,
}
"""Families that do not keep their states in a `Cache` of standard layers, by `model_type`."""


def state_form(model: nn.Module) -> StateForm:
    """Return how the family of a model stores its states.

    Args:
        model: a transformers model.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    return _FORMS.get(model_type, CacheForm)()


def accepts(model: nn.Module, argument: str) -> bool:
    """Say whether a model's forward has an argument of that name."""
    return argument in signature(model.forward).parameters


__all__ = ["Conversation", "StateForm", "accepts", "state_form"]
