"""The same for prompts with images or sound: where PyTorch's f32 and ours disagree, PyTorch's float64 decides.

In: a checkpoint that the zoo made, and its export. Out: the checks of the export against float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from t2n_llm.check.agreement import ValidationReport
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.recorded import graph_options_of
from t2n_llm.graph.interface import recorded_states
from t2n_llm.source.empty_model import MULTIMODAL_MODEL
from t2n_llm.source.hub import open_source
from t2n_llm.tasks.multimodal.check import Answer, check_multimodal, plan_prompts, run_multimodal_reference
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.weights.f32_model import eager_model
from t2n_llm.zoo.float64 import Doubled, no_stricter_than


def prompts_float64_report(checkpoint: Path, export: Path, task: str) -> ValidationReport:
    """Run the checks of an f32 export that sees or hears against PyTorch in float64.

    The tolerance is that of `head_float64_report`.

    Args:
        checkpoint: folder of config and safetensors, small enough for memory.
        export: folder that `export_llm` made of it in f32, or kept because its validation failed.
        task: `image-text-to-text` or `audio-text-to-text`.

    Raises:
        Exception: whatever PyTorch raises, for instance for an operator that float64 does not have.
    """
    manifest, source = read_manifest(export), open_source(str(checkpoint), require_tokenizer=False)
    family = family_of(source.config, graph_options_of(manifest).image_size, task, folder=checkpoint)
    prompts = plan_prompts(family)
    model, _ = eager_model(MULTIMODAL_MODEL, checkpoint, trust_remote_code=False)
    single = run_multimodal_reference(model, family, prompts)
    doubled = [replace(prompt, images=tuple(image.astype(np.float64) for image in prompt.images)) for prompt in prompts]
    model.double()
    with Doubled():
        exact = run_multimodal_reference(model, family, doubled)
    archives = {role: export / part["archive"] for role, part in manifest["archives"].items()}
    tolerance = no_stricter_than(max(_distances(single, exact)))
    return check_multimodal(archives, family, recorded_states(manifest), "f32", prompts, exact, tolerance=tolerance)


def _distances(single: Sequence[Answer], exact: Sequence[Answer]) -> Iterator[float]:
    """Yield how far PyTorch's f32 is off in each step that follows the same tokens, relative to the largest logit."""
    for ours, theirs in zip(single, exact, strict=True):
        for step, (row, wanted) in enumerate(zip(ours.rows, theirs.rows, strict=True)):
            if ours.ids[:step] == theirs.ids[:step]:
                yield float(np.abs(row - wanted).max() / max(1.0, np.abs(wanted).max()))


__all__ = ["prompts_float64_report"]
