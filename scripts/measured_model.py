"""Which model the tables of quality are made of: a folder or a GGUF file, its channels permuted.

In: what the command line says. Out: a folder with a checkpoint. Weights that come from a 4-bit file lie on its grid; permuted
consistently everywhere they compute the same function, and the groups of 32 are no longer those of the old grid.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fetch_test_models import MODEL_NAME, default_output

PROJECT = Path(__file__).resolve().parent.parent
EXAMPLE = PROJECT / "examples" / "models" / "tiny-llama-real"


_LOGIT_TOLERANCE = 1e-3  # relative to the largest logit: sums in another order, through outlier channels of every layer
_PERMUTED_MARK = "permuted"


class NoModelError(Exception):
    """There is no model that can be measured; the message says why, on one line."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which model is measured, and on which texts."""
    parser.add_argument("--model", type=Path, default=default_output() / MODEL_NAME)
    parser.add_argument("--text", type=Path, default=EXAMPLE / "eval.txt", help="held-out text")
    parser.add_argument("--calibration", default=str(EXAMPLE / "calib.txt"), help="a text, builtin or auto")
    parser.add_argument("--no-permute", action="store_true", help="of a model that was never on a 4-bit grid")
    parser.add_argument("--work", type=Path, help="keep the permuted model here for the next time")


@contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    """Give a folder for what is made: the one asked for, which stays, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="t2n-measured-") as folder:
        yield Path(folder)


def measured_model(given: Path, work: Path, *, permute: bool = True) -> Path:
    """Return the folder to measure: the one given, or what is made of it in `work` unless it is there.

    Args:
        given: a checkpoint's folder, or a GGUF file, which is de-quantised.
        work: folder for what is made.
        permute: its channels.

    Raises:
        NoModelError: there is no model, or it cannot be permuted.
    """
    is_gguf = given.suffix == ".gguf" and given.is_file()
    if not is_gguf and not (given / "config.json").is_file():
        raise NoModelError(f"{given}: no model there; run scripts/fetch_test_models.py.")
    plain = dequantized_model(given, work / "plain") if is_gguf else given
    return permuted_model(plain, work / "permuted") if permute else plain


def dequantized_model(gguf: Path, output: Path) -> Path:
    """Write the checkpoint in bf16 that a GGUF file stands for; `output` is left alone when it is there already."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (output / "config.json").is_file():
        return output
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=plain)
    vars(model.config).pop("quantization_config", None)
    AutoTokenizer.from_pretrained(**where).save_pretrained(output)
    model.save_pretrained(output)
    return output


def permuted_model(folder: Path, output: Path, seed: int = 1) -> Path:
    """Write a Llama-shaped checkpoint with permuted channels that computes the same function.

    Args:
        folder: the model: Llama's module names, tied or untied, with norms before or behind (Gemma).
        output: folder to make; left alone when it is there already.
        seed: of the permutations.

    Raises:
        NoModelError: the model has another structure, or its logits changed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (output / _PERMUTED_MARK).is_file():
        return output
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.no_grad():
        before = model(ids).logits
        try:
            _permute(model, torch.Generator().manual_seed(seed))
        except AttributeError as error:
            raise NoModelError(f"{folder}: not a Llama-shaped model: {error}") from error
        change = float((model(ids).logits - before).abs().max() / before.abs().max())
    if change > _LOGIT_TOLERANCE:
        raise NoModelError(f"{folder}: permuting its channels changed logits by {change:.2g} of the largest.")
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(output)
    (output / _PERMUTED_MARK).write_text(f"seed {seed}, largest change of a logit {change:.2g}\n")
    return output


def _permute(model: Any, generator: Any) -> None:
    """Permute, in place, the residual stream, the hidden channels of every MLP, and the channels of every value head."""
    import torch

    base, config = model.model, model.config
    stream = torch.randperm(config.hidden_size, generator=generator)
    _reorder(base.embed_tokens.weight, columns=stream)
    if model.lm_head.weight is not base.embed_tokens.weight:
        _reorder(model.lm_head.weight, columns=stream)
    _reorder(base.norm.weight, rows=stream)
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (module for name, module in layer.named_children() if name.endswith("layernorm")):
            _reorder(norm.weight, rows=stream)
        hidden = torch.randperm(config.intermediate_size, generator=generator)
        values, outputs = _head_permutations(config, attention.head_dim, generator)
        for linear in (attention.q_proj, attention.k_proj):
            _reorder(linear.weight, columns=stream)
        _reorder(attention.v_proj.weight, rows=values, columns=stream)
        _reorder(attention.o_proj.weight, rows=stream, columns=outputs)
        for linear in (mlp.gate_proj, mlp.up_proj):
            _reorder(linear.weight, rows=hidden, columns=stream)
        _reorder(mlp.down_proj.weight, rows=stream, columns=hidden)


def _head_permutations(config: Any, head_dim: int, generator: Any) -> tuple[Any, Any]:
    """Return the order of the value rows, and of the output channels: query heads follow the value head they share."""
    import torch

    orders = [torch.randperm(head_dim, generator=generator) for _ in range(config.num_key_value_heads)]
    shared = config.num_attention_heads // config.num_key_value_heads
    values = torch.cat([order + head * head_dim for head, order in enumerate(orders)])
    outputs = torch.cat([orders[head // shared] + head * head_dim for head in range(config.num_attention_heads)])
    return values, outputs


def _reorder(parameter: Any, rows: Any = None, columns: Any = None) -> None:
    values = parameter.data if rows is None else parameter.data[rows]
    parameter.data = (values if columns is None else values[:, columns]).contiguous()
