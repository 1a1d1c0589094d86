"""ONNX Runtime: the model as onnxruntime-genai builds it. In: a checkpoint, or what was built of it. Out: a contender."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from generic_export.errors import EngineLoadError, EngineTimeoutError, MissingExtraError, OptionError
from t2n_llm.bench.compared_engines.child import RunningChild
from t2n_llm.bench.compared_engines.protocol import BATCHES, SharedModel, local_folder
from t2n_llm.bench.compared_engines.torch_eager import start_python

_INSTALL = "Install it: pip install onnxruntime-genai"
_BUILD_ALSO = "pip install onnx onnx_ir"
_BUILDER = "onnxruntime_genai.models.builder"
_CONFIG = "genai_config.json"
# What the builder is told (onnxruntime-genai 0.18, its description of --extra_options). Logits of a prompt's last token only, as
# all compute here; for 4 bits, blocks of 32 as Q4_0 has them, activations rounded to int8, the output table left as it is.
_ALWAYS = ("hf_remote=false", "prune_lm_head=true")
_FOUR_BIT = ("block_size=32", "accuracy_level=4", "nodes_to_exclude=/lm_head/MatMul")


class OnnxRuntime:
    """onnxruntime-genai on the CPU: float32 weights (its CPU kernels have no f16), 4-bit ones for an archive in Q4_0.

    Args:
        subject: the model.
        folder: what the builder made, with `genai_config.json`; "" builds it from the checkpoint.
    """

    prefill = BATCHES

    def __init__(self, subject: SharedModel, folder: str = "") -> None:
        self._subject = subject
        self._folder = Path(folder).expanduser() if folder else None
        self._precision = "int4" if subject.is_four_bit else "fp32"
        self.name = "onnxruntime" if folder else f"onnxruntime {self._precision}"

    def check(self) -> None:
        """See `Contender.check`."""
        if find_spec("onnxruntime_genai") is None:
            raise MissingExtraError("onnxruntime is run through onnxruntime-genai, which is not installed.", _INSTALL)
        if self._folder is None:
            missing = [name for name in ("onnx", "onnx_ir") if find_spec(name) is None]
            if missing:
                raise MissingExtraError(
                    f"onnxruntime-genai builds models with {missing[0]}, which is not installed.", _BUILD_ALSO
                )
            local_folder(self._subject.source)
        elif not (self._folder / _CONFIG).is_file():
            raise OptionError(
                f"{self._folder}: no {_CONFIG} in it.", "Name a folder that onnxruntime-genai's builder made."
            )

    def prepare(self, scratch: Path) -> None:
        """See `Contender.prepare`."""
        if self._folder is None:
            self._build(scratch / "onnx", scratch / "cache")
            self._folder = scratch / "onnx"

    def start(self, threads: int, positions: int) -> RunningChild:
        """See `Contender.start`."""
        load = {"folder": str(self._folder), "threads": threads, "positions": positions}
        return start_python(self.name, "onnxruntime", load, threads, self._subject.timeout_seconds)

    def _build(self, folder: Path, cache: Path) -> None:
        checkpoint = local_folder(self._subject.source)
        command = [sys.executable, "-m", _BUILDER, "-i", str(checkpoint), "-o", str(folder)]
        command += ["-p", self._precision, "-e", "cpu", "-c", str(cache)]
        command += ["--extra_options", *_ALWAYS, *(_FOUR_BIT if self._precision == "int4" else ())]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=self._subject.timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            raise EngineTimeoutError(f"{self.name}: its builder was stopped.", "Raise --timeout.") from None
        if done.returncode or not (folder / _CONFIG).is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise EngineLoadError(f"{self.name}: its builder failed: {lines[-1] if lines else 'no message'}.")


__all__ = ["OnnxRuntime"]
