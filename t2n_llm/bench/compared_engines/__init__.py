"""Other programs that run the same model, measured beside its archives: llama.cpp, ONNX Runtime, PyTorch.

In: what an archive was made from. Out: contenders, each in a child process of its own, that take token ids and tell seconds.
One file a rival; `protocol` says what each must do, `bench.comparison` lets them take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from generic_export.devices import CPU
from generic_export.errors import OptionError
from t2n_llm.bench.compared_engines.llama_cpp import LlamaCpp
from t2n_llm.bench.compared_engines.onnxruntime import OnnxRuntime
from t2n_llm.bench.compared_engines.protocol import Contender, SharedModel
from t2n_llm.bench.compared_engines.torch_eager import TorchEager

# The rivals by the names that `--against` has for them. In: `llama.cpp:FILE.gguf`. Out: a contender.
COMPARED_ENGINES: Mapping[str, Callable[[SharedModel, str], Contender]] = {
    "llama.cpp": LlamaCpp,
    "onnxruntime": OnnxRuntime,
    "torch": TorchEager,
}


def compared_engine(text: str, subject: SharedModel) -> Contender:
    """Return a rival for a name, with what stands after its colon: a file, a folder or a dtype.

    Raises:
        OptionError: there is no such rival, or it has no such variant.
    """
    name, _, variant = text.partition(":")
    if name not in COMPARED_ENGINES:
        raise OptionError(f"--against {text}: unknown engine.", f"Use one of {', '.join(COMPARED_ENGINES)}.")
    if subject.device != CPU and name != "torch":
        raise OptionError(f"--against {text}: it runs on the CPU only.", "Use --against torch, or --device cpu.")
    return COMPARED_ENGINES[name](subject, variant)
