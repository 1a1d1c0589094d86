"""Folders of tiny pipelines as diffusers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from t2n_llm.zoo.suites.diffusers import MODELS

NAMES = {
    "unet": "unet",
    "vae": "vae",
    "sd3": "transformer",
    "flux": "transformer",
    "clip": "text_encoder",
    "t5": "text_encoder_3",
}


def tiny(kind: str) -> Any:
    """Return a component with the weights that `save_pipeline` writes."""
    torch.manual_seed(0)
    return MODELS[kind]().eval()


def save_pipeline(folder: Path, *kinds: str) -> Path:
    """Write a pipeline of these components, with a scheduler beside them."""
    index: dict[str, Any] = {"_class_name": "TinyPipeline", "_diffusers_version": "0.42.1"}
    for kind in kinds:
        model = tiny(kind)
        model.save_pretrained(folder / NAMES[kind], safe_serialization=True)
        index[NAMES[kind]] = [type(model).__module__.partition(".")[0], type(model).__name__]
    (folder / "scheduler").mkdir(parents=True)
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    index |= {"scheduler": ["diffusers", "DDIMScheduler"], "safety_checker": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
