"""The rivals by the names that `--against` has for them. In: `llama.cpp:FILE.gguf`. Out: a contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from generic_export.devices import CPU
from generic_export.errors import OptionError
from t2n_llm.measure.rivals.llama_cpp import LlamaCpp
from t2n_llm.measure.rivals.onnxruntime import OnnxRuntime
from t2n_llm.measure.rivals.protocol import Contender, SharedModel
from t2n_llm.measure.rivals.torch_eager import TorchEager

RIVALS: Mapping[str, Callable[[SharedModel, str], Contender]] = {
    "llama.cpp": LlamaCpp,
    "onnxruntime": OnnxRuntime,
    "torch": TorchEager,
}


def rival_named(text: str, subject: SharedModel) -> Contender:
    """Return a rival for a name, with what stands after its colon: a file, a folder or a dtype.

    Raises:
        OptionError: there is no such rival, or it has no such variant.
    """
    name, _, variant = text.partition(":")
    if name not in RIVALS:
        raise OptionError(f"--against {text}: unknown engine.", f"Use one of {', '.join(RIVALS)}.")
    if subject.device != CPU and name != "torch":
        raise OptionError(f"--against {text}: it runs on the CPU only.", "Use --against torch, or --device cpu.")
    return RIVALS[name](subject, variant)


__all__ = ["RIVALS", "rival_named"]
