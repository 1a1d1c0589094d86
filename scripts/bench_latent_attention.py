#!/usr/bin/env python3
"""Measure latent attention (DeepSeek) beside itself: absorbed, over the cached latents, and expanded at each call.

usage: scripts/bench_latent_attention.py [--compress RECIPE] [--past 64,512,2048,8192] [--steps 1,64,512] [--layers N] [--json]

The model has random weights and layers in the shape of DeepSeek-V2-Lite, without experts. Both forms are exported without
a check and measured in turn in one process, on one thread, with the cache as the engine's state: milliseconds of the
processor for a call of so many tokens after so many others. Other work on the machine disturbs little; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from t2n_llm import export_llm
from t2n_llm.graph.options import LATENTS

FORMS = tuple(form for form in LATENTS if form != "auto")
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
}
CHUNK = 512  # tokens of the past fed at once
LONG = 2048  # a past from which on one round is enough


def main() -> None:
    """Export, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", help="a recipe of t2n-llm export")
    parser.add_argument("--past", default="64,512,2048,8192", help="tokens in the cache, comma-separated")
    parser.add_argument("--steps", default="1,64,512", help="tokens of a call, comma-separated")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pasts, steps = ([int(each) for each in text.split(",")] for text in (options.past, options.steps))
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model", options.layers)
        forms = {form: loaded(model, Path(folder) / form, form, options.compress) for form in FORMS}
        rows = [row for past in pasts for row in measured(forms, past, steps)]
    print(json.dumps(rows) if options.json else table(rows))


def random_model(folder: Path, layers: int) -> Path:
    """Write a checkpoint of random values and return its folder."""
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    dense = {"num_hidden_layers": layers, "first_k_dense_replace": layers, "mlp_layer_types": ["dense"] * layers}
    AutoModelForCausalLM.from_config(DeepseekV2Config(**SHAPE, **dense), dtype=torch.float16).save_pretrained(folder)
    return folder


def loaded(model: Path, folder: Path, form: str, compress: str | None) -> Any:
    """Export one form, and return the model that runs it."""
    import tract

    archive = export_llm(str(model), folder, mla=form, compress=compress, check=False, require_tokenizer=False).archive
    exported = tract.nnef().with_tract_transformers().load(archive)
    exported.transform("transformers_detect_all")
    return exported.into_runnable()


def measured(forms: dict[str, Any], past: int, steps: list[int]) -> list[dict[str, Any]]:
    """Measure every form after one length of the past, in turn."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(1 if past > LONG else 3):
        for form, model in forms.items():
            state = model.spawn_state()
            for start in range(0, past, CHUNK):
                processor_seconds(state, min(CHUNK, past - start))
            for length in steps:
                calls = [processor_seconds(state, length) for _ in range(6 if length == 1 else 1)]
                seconds.setdefault((form, length), []).extend(calls)
    return [
        {"past": past, "steps": length} | {form: 1000 * median(seconds[form, length]) for form in forms}
        for length in steps
    ]


def processor_seconds(state: Any, length: int) -> float:
    """Feed tokens; returns the processor's time."""
    ids = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (1, length))
    start = time.process_time()
    state.run([ids])
    return time.process_time() - start


def table(rows: list[dict[str, Any]]) -> str:
    """Return the measurements in Markdown."""
    lines = [f"| past | tokens | {' | '.join(f'{form}, ms' for form in FORMS)} |", f"|{'---|' * (2 + len(FORMS))}"]
    for row in rows:
        lines.append(f"| {row['past']} | {row['steps']} | {' | '.join(f'{row[form]:.1f}' for form in FORMS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()
