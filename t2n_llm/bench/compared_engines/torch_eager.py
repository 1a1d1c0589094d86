"""PyTorch: the transformers model of the checkpoint, on the CPU or on a GPU. In: a checkpoint. Out: a contender."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from generic_export.devices import CPU
from generic_export.errors import OptionError
from t2n_llm.bench.compared_engines.child import RunningChild
from t2n_llm.bench.compared_engines.protocol import BATCHES, SharedModel, local_folder

DRIVER = Path(__file__).with_name("python_driver.py")
# float32 is what PyTorch is fast with on most CPUs; the others where there is AMX or ARM's bf16, and on GPUs.
_DTYPES = ("float32", "bfloat16", "float16")


class TorchEager:
    """transformers in PyTorch, eager, with `scaled_dot_product_attention` where the model has it, and the model's own cache.

    Args:
        subject: the model.
        dtype: of weights and activations; "" is float32, and float16 on a GPU.

    Raises:
        OptionError: there is no such dtype.
    """

    prefill = BATCHES

    def __init__(self, subject: SharedModel, dtype: str = "") -> None:
        self._subject, self._dtype = subject, dtype or ("float32" if subject.device == CPU else "float16")
        self.name = f"torch {self._dtype}"
        if self._dtype not in _DTYPES:
            raise OptionError(f"torch:{dtype}: no such dtype.", f"Use one of {', '.join(_DTYPES)}.")

    def check(self) -> None:
        """See `Contender.check`."""
        local_folder(self._subject.source)

    def prepare(self, scratch: Path) -> None:
        """Nothing is written: it reads the checkpoint."""

    def start(self, threads: int, positions: int) -> RunningChild:
        """See `Contender.start`; its cache grows, whatever the positions are."""
        load = {
            "folder": str(local_folder(self._subject.source)),
            "dtype": self._dtype,
            "threads": threads,
            "device": {"metal": "mps"}.get(self._subject.device, self._subject.device),
        }
        return start_python(self.name, "torch", load, threads, self._subject.timeout_seconds)


def start_python(name: str, kind: str, load: dict[str, object], threads: int, timeout_seconds: float) -> RunningChild:
    """Start the driver of the rivals that are Python packages."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONSAFEPATH": "1",  # the driver's own folder must not shadow modules
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",  # the checkpoint is here
    }
    command = [sys.executable, "-u", str(DRIVER), kind, str(os.getpid())]
    return RunningChild(name, command, load, timeout_seconds=timeout_seconds, environment=environment)


__all__ = ["TorchEager", "start_python"]
