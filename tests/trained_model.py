"""The trained language model of the repository, and copies of it with fewer layers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

# Six layers.
REAL_MODEL = Path(__file__).resolve().parents[1] / "examples" / "models" / "tiny-llama-real"


def save_first_layers(folder: Path, layers: int) -> None:
    """Save the trained model without the layers behind the first ones: cheap to capture, with weights of trained statistics."""
    shutil.copytree(REAL_MODEL, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(REAL_MODEL / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < layers}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def _layer(name: str) -> int:
    """Return the number of the layer that a tensor belongs to, -1 for those of no layer."""
    number = re.match(r"model\.layers\.(\d+)\.", name)
    return int(number[1]) if number else -1
