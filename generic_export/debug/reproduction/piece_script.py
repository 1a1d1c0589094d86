"""Try one piece of a model again: `python repro.py` in this folder. Needs this package, and the package the piece comes from.

In: `piece.pt` (structure), `weights.json` and `kept.npz` (numbers), `inputs.npz`. Out: the verdict; exit code 1 when it fails.
`piece.pt` is a pickle: open it only when you trust who gave it to you.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from generic_export.debug.record.leaves import call_layout
from generic_export.diagnose import diagnose, diagnosis_text, register_state_adapter

HERE = Path(__file__).resolve().parent


def load_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Fill a module of meta tensors."""
    values = {name: torch.from_numpy(array) for name, array in np.load(HERE / "kept.npz").items()}
    for record in json.loads((HERE / "weights.json").read_text()):
        normal = np.random.default_rng(record["seed"]).standard_normal(record["shape"], np.float32)
        values[record["label"]] = torch.from_numpy(normal * np.float32(record["scale"]) + np.float32(record["shift"]))
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(values[name].reshape(tensor.shape))
    return module


def load_calls(module: torch.nn.Module, calls: list) -> list:
    """Fill the arguments of each call."""
    arrays = np.load(HERE / "inputs.npz")
    filled = []
    for number, (args, kwargs) in enumerate(calls):
        layout = call_layout(module.forward, args, kwargs)
        given = {
            name: torch.from_numpy(arrays[f"{number}/{name}"]).to(tensor.dtype)
            for name, tensor in layout.tensors.items()
        }
        filled.append(layout.rebuilt(given.__getitem__))
    return filled


def main() -> int:
    """Try the piece and print what comes of it."""
    content = torch.load(HERE / "piece.pt", weights_only=False, map_location="meta")
    for adapter in content["adapters"]:
        register_state_adapter(adapter)
    module = load_weights(content["module"])
    calls = load_calls(module, content["calls"])
    with (content["context"] or nullcontext)(module):
        diagnosis = diagnose(
            module,
            content["target"],
            calls,
            strategy="whole",
            fusions=content["fusions"],
            torchscript=content["torchscript"],
            axes=content["axes"],
        )
    print(diagnosis_text(diagnosis))
    return int(not diagnosis.ok)


if __name__ == "__main__":
    sys.exit(main())
