#!/usr/bin/env python3
"""Measure decoding of layers that are no plain attention beside PyTorch: recurrences, gated delta nets, mixtures of experts.

usage: scripts/bench_mixers.py [--models NAME,...] [--prefill N,...] [--depth N,...] [--decode N] [--repeat N] [--threads N]

models     random weights of these families at about 100 million parameters, with a small vocabulary; `llama` is what to compare
           them with. All by default.

Each is exported in f16 and measured beside the transformers model in f32 with its own cache (`t2n-llm bench --against torch`), in
turn: read the ratios. Everything made is deleted at the end.
Run it with the project's environment: .venv/bin/python scripts/bench_mixers.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from bench_rivals import measured

from generic_export.errors import T2NError
from t2n_llm import export_llm
from t2n_llm.bench.comparison import SpeedComparison

WIDTH, VOCABULARY = 768, 8192
_SIZES = {"hidden_size": WIDTH, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384}


def configs() -> dict[str, Callable[[], Any]]:
    """Return what makes the config of each family."""
    import transformers

    return {
        "llama": lambda: transformers.LlamaConfig(
            **_SIZES, **_HEADS, intermediate_size=2048, num_hidden_layers=16, max_position_embeddings=8192
        ),
        "mamba": lambda: transformers.MambaConfig(**_SIZES, num_hidden_layers=24, state_size=16),
        "mamba2": lambda: transformers.Mamba2Config(
            **_SIZES, num_hidden_layers=24, num_heads=24, head_dim=64, n_groups=1, state_size=128
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **_SIZES, **_HEADS, **_EXPERTS, intermediate_size=2048, num_hidden_layers=8
        ),
        "qwen3_next": lambda: transformers.Qwen3NextConfig(
            **_SIZES,
            **_HEADS,
            **_EXPERTS,
            num_hidden_layers=8,
            shared_expert_intermediate_size=384,
            linear_num_key_heads=8,
            linear_num_value_heads=16,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
    }


def write_checkpoint(config: Any, folder: Path) -> Path:
    """Write random weights, the same each time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder


def beside_torch(name: str, work: Path, options: argparse.Namespace) -> SpeedComparison:
    """Return a family's export beside PyTorch."""
    checkpoint = write_checkpoint(configs()[name](), work / name)
    output = work / f"{name}-f16"
    export_llm(str(checkpoint), output, check=False, require_tokenizer=False)
    return measured(output, checkpoint, options)


def rows(name: str, comparison: SpeedComparison) -> Iterator[str]:
    """Yield a line for each speed: ours, PyTorch's, and how many times as fast ours is."""
    ours, torch = comparison.with_threads(comparison.plan.threads[0])
    for point in ours.points:
        label = f"prefill {point.tokens}" if point.kind == "prefill" else f"decode after {point.tokens}"
        speeds = (each.speed(point.kind, point.tokens).median for each in (ours, torch))
        gain = 1 / comparison.ratio(torch, point.kind, point.tokens)
        yield f"| {name} | {label} | {' | '.join(f'{speed:,.1f}' for speed in speeds)} | {gain:.2f} x |"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--models", default=",".join(configs()), metavar="NAME,...", help="which families")
    parser.add_argument("--prefill", default="64,512", metavar="N,...", help="lengths of prompts")
    parser.add_argument("--depth", default="64,1024", metavar="N,...", help="tokens before the decoded ones")
    parser.add_argument("--decode", type=int, default=16, metavar="N", help="steps at each depth, a repeat")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measurements of each")
    parser.add_argument("--threads", default="1", metavar="N", help="of both")
    parser.set_defaults(against=["torch"])
    options = parser.parse_args(arguments)
    options.models = options.models.split(",")
    unknown = [name for name in options.models if name not in configs()]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}: one of {', '.join(configs())}.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    options = parsed(arguments)
    print("| model | tokens a second | tract, f16 | PyTorch, f32 | |\n|---|---|---|---|---|", flush=True)
    try:
        for name in options.models:
            with tempfile.TemporaryDirectory(prefix="t2n-mixers-") as work:
                print("\n".join(rows(name, beside_torch(name, Path(work), options))), flush=True)
    except T2NError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())
