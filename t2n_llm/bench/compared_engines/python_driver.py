"""PyTorch or ONNX Runtime in a process of its own: loads a model once and answers requests, a line of JSON each.

usage: python python_driver.py torch|onnxruntime PARENT_PID     (started by `torch_eager.py` and `onnxruntime.py`)

In (stdin): {"do": "load", ...}, {"do": "time", "fresh", "turns"}, {"do": "top", "turns", "count"}. Out (stdout): {"ok": ...} or
{"error": text}. Started by path and importing nothing of this project: its memory is the rival's.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import threading
import time
from importlib.metadata import version
from typing import Any, Protocol


class Model(Protocol):
    """A loaded model with one cache."""

    version: str

    def forget(self) -> None:
        """Start a fresh sequence."""
        ...

    def feed(self, tokens: list[int]) -> None:
        """Compute the logits after the last of some tokens."""
        ...

    def logits(self) -> Any:
        """Return the last logits as a float array [vocab]."""
        ...


class TorchModel:
    """A transformers model in eager mode, on the CPU or a GPU: its own cache, scaled_dot_product_attention, last logits only."""

    def __init__(self, request: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(request["threads"])
        self._torch = torch
        transformers.utils.logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(request["folder"], local_files_only=True)
        for name in config.architectures or ():
            getattr(transformers, name, None)  # imports the model's code before the clock starts
        self.began = time.perf_counter()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            request["folder"], dtype=getattr(torch, request["dtype"]), local_files_only=True
        ).eval()
        self._device = request["device"]
        self._model.to(self._device)
        names = inspect.signature(self._model.forward).parameters
        self._keyword = next(name for name in ("cache", "past_key_values", "cache_params") if name in names)
        self.version = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self.forget()

    def forget(self) -> None:
        self._cache = None  # the model makes one of its own kind

    def feed(self, tokens: list[int]) -> None:
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens], device=self._device)
            answer = self._model(ids, **{self._keyword: self._cache, "use_cache": True, "logits_to_keep": 1})
            # On the CPU, where the engine leaves its logits too; a GPU has finished then.
            self._last, self._cache = answer.logits.cpu(), getattr(answer, self._keyword)

    def logits(self) -> Any:
        return self._last[0, -1].float().numpy()


class OnnxModel:
    """A folder of onnxruntime-genai on the CPU: its cache is allocated once for all positions, its logits are the last token's."""

    def __init__(self, request: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._library, self._positions = onnxruntime_genai, request["positions"]
        options = {"decoder": {"session_options": {"intra_op_num_threads": request["threads"]}}}
        self.began = time.perf_counter()
        config = onnxruntime_genai.Config(request["folder"])
        config.overlay(json.dumps({"model": options, "search": {"max_length": self._positions}}))
        self._model = onnxruntime_genai.Model(config)
        self.version = f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"
        self.forget()

    def forget(self) -> None:
        parameters = self._library.GeneratorParams(self._model)
        parameters.set_search_options(max_length=self._positions, do_sample=False)
        self._generator = self._library.Generator(self._model, parameters)

    def feed(self, tokens: list[int]) -> None:
        self._generator.append_tokens(tokens)  # runs the model; nothing is sampled

    def logits(self) -> Any:
        return self._generator.get_logits().reshape(-1, self._generator.get_logits().shape[-1])[-1]


MODELS = {"torch": TorchModel, "onnxruntime": OnnxModel}


class Server:
    """The requests: each method is one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._model: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load a model; libraries are imported before the clock starts."""
        self._model = MODELS[self._kind](request)
        return {"seconds": time.perf_counter() - self._model.began, "version": self._model.version}

    def time(self, request: dict[str, Any]) -> list[float]:
        """Feed turns, and return the seconds of each."""
        if request["fresh"]:
            self._model.forget()
        seconds = []
        for turn in request["turns"]:
            start = time.perf_counter()
            self._model.feed(turn)
            seconds.append(time.perf_counter() - start)
        return seconds

    def top(self, request: dict[str, Any]) -> list[tuple[int, float]]:
        """Feed turns to a fresh sequence, and return the largest logits."""
        self._model.forget()
        for turn in request["turns"]:
            self._model.feed(turn)
        logits = self._model.logits()
        best = logits.argsort()[::-1][: request["count"]]
        return [(int(token), float(logits[token])) for token in best]


def answer(server: Server, line: str) -> dict[str, Any]:
    """Serve one request."""
    try:
        request = json.loads(line)
        return {"ok": getattr(server, request["do"])(request)}
    except Exception as error:  # the boundary: whatever it is, the parent must hear it
        said = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {said[0] if said else 'no message'}"}


def leave_with_parent(parent: int) -> None:
    """End when whoever started this is gone, even in the middle of a long run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    """Serve requests until stdin closes."""
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(__doc__)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print must not enter the channel
    threading.Thread(target=leave_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    server = Server(sys.argv[1])
    for line in sys.stdin:
        replies.write(json.dumps(answer(server, line)) + "\n")
        replies.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
