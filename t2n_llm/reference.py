"""What PyTorch says: one plain run of the Hugging Face model in f32, recorded as arrays that outlive it.

No part of the exporter is used here: transformers' own eager attention, masks and caches are the judge.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.errors import CorruptCheckpointError, NotEnoughMemoryError, OptionError, ReferenceDiedError
from t2n_llm.archive_weights import ArchiveWeights

# Public domain (Melville, Moby-Dick, 1851): something a tokenizer of any language model can chew on.
CHECK_TEXT = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing "
    "particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is "
    "a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the "
    "mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin "
    "warehouses, and bringing up the rear of every funeral I meet, then, I account it high time to get to sea as soon as I can."
)

PROMPT_LENGTH = 12
DEFAULT_DECODE_STEPS = 64
_SHORTEST_TEXT = 29  # longer than the traced length, not a multiple of the chunk sizes
_LONGEST_WINDOW = 256  # sliding windows up to this size are crossed by the check


@dataclass(frozen=True)
class CheckPlan:
    """The tokens of a validation.

    Attributes:
        text_ids: int64 [L]; prefilled whole, and in chunks.
        chunk_ends: positions where the chunks end; the last is L.
        prompt_length: how many of `text_ids` start the decoding.
        decode_steps: tokens decoded after the prompt.
    """

    text_ids: tuple[int, ...]
    chunk_ends: tuple[int, ...]
    prompt_length: int
    decode_steps: int


def plan_check(
    config: Any, tokenizer: Any | None, decode_steps: int = DEFAULT_DECODE_STEPS, seed: int = 0
) -> CheckPlan:
    """Choose the tokens: text when there is a tokenizer, else random ids; long enough to leave a sliding window.

    Args:
        config: transformers config (vocabulary, position limit, window).
        tokenizer: turns `CHECK_TEXT` into ids; None draws random ones.
        decode_steps: tokens to decode, cut to what the model's positions allow.
        seed: for random ids.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    limit = int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
    window = int(getattr(text, "sliding_window", 0) or 0)
    wanted = 3 * window + 5 if 0 < window <= _LONGEST_WINDOW else _SHORTEST_TEXT
    length = max(2, min(wanted, limit))
    if tokenizer is not None:
        ids = list(tokenizer(CHECK_TEXT)["input_ids"])
    else:
        generator = np.random.default_rng(seed)
        ids = generator.integers(0, text.vocab_size, size=length).tolist()
    while len(ids) < length:
        ids += ids
    prompt = min(PROMPT_LENGTH, max(1, length // 2))
    first = max(1, length // 3)
    ends = sorted({first, min(first + 1, length), length})
    return CheckPlan(tuple(int(i) for i in ids[:length]), tuple(ends), prompt, min(decode_steps, limit - prompt))


@dataclass(frozen=True)
class ReferenceRun:
    """What PyTorch answered to a plan, in f32.

    Attributes:
        plan: the tokens.
        text_logits: [L, vocab], the logits after each token of the text.
        greedy_ids: the greedy continuation of the prompt, `decode_steps` ids.
        greedy_logits: [decode_steps, vocab]; row i chose `greedy_ids[i]`.
        text_caches: key and value of each layer over the whole text, [1, Hkv, L, D].
        original_logits: [L, vocab] of the model as its checkpoint has it, when `text_logits` come from other weights.
    """

    plan: CheckPlan
    text_logits: np.ndarray
    greedy_ids: tuple[int, ...]
    greedy_logits: np.ndarray
    text_caches: tuple[np.ndarray, ...]
    original_logits: np.ndarray | None = None


def run_reference(
    folder: Path, plan: CheckPlan, *, trust_remote_code: bool = False, overrides: ArchiveWeights | None = None
) -> ReferenceRun:
    """Load the checkpoint in f32 and run the plan; the model is released before this returns.

    Args:
        folder: config and safetensors.
        plan: the tokens.
        trust_remote_code: allow code that comes with the model.
        overrides: the weights of a compressed archive, to run the plan with; the original's text logits are kept too.

    Raises:
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
        ArchiveError, ValidationError: the overrides cannot be read, or belong to another model.
    """
    model = _load(folder, trust_remote_code)
    original = None
    with torch.no_grad():
        if overrides is not None:
            original, _ = _run_text(model, plan.text_ids)
            overrides.apply(model)
        text_logits, caches = _run_text(model, plan.text_ids)
        ids, greedy_logits = _run_greedy(model, plan.text_ids[: plan.prompt_length], plan.decode_steps)
    return ReferenceRun(plan, text_logits, ids, greedy_logits, caches, original)


def run_reference_apart(
    folder: Path, plan: CheckPlan, *, trust_remote_code: bool = False, overrides: ArchiveWeights | None = None
) -> ReferenceRun:
    """Do `run_reference` in a process of its own, so that all its memory is given back before the engine starts.

    Raises:
        ReferenceDiedError: that process ended without an answer.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share the memory that is to be given back
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, folder, plan, trust_remote_code, overrides), daemon=True)
    try:
        process.start()
        sender.close()
        answer: ReferenceRun | Exception = receiver.recv()
    except EOFError:
        process.join()
        raise ReferenceDiedError(
            f"{folder}: the PyTorch process died (exit code {process.exitcode}).",
            "Most often the machine ran out of memory. Pass --no-check, and validate on a larger machine.",
        ) from None
    finally:  # on Ctrl-C too: nobody waits for its answer any more
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(
    sender: Connection, folder: Path, plan: CheckPlan, trust_remote_code: bool, overrides: ArchiveWeights | None
) -> None:
    """Run in the other process: send what `run_reference` returns or raises."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    try:
        sender.send(run_reference(folder, plan, trust_remote_code=trust_remote_code, overrides=overrides))
    except Exception as error:
        sender.send(error)


def check_memory(parameters: int) -> None:
    """Refuse a reference run that the machine has no memory for, before hours of work end in a killed process.

    Args:
        parameters: of the model; each takes 4 bytes in f32, and a tenth more is needed around them.

    Raises:
        NotEnoughMemoryError: says how much is needed and how much is free.
    """
    needed, free = int(parameters * 4 * 1.1), available_memory()
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"the check runs the PyTorch model in f32, which needs {needed / 1e9:.1f} GB of memory; "
            f"{free / 1e9:.1f} GB are free.",
            "Pass --no-check, and run t2n-llm validate on a larger machine.",
        )


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping (Linux: MemAvailable of proc(5)), or None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kilobytes) * 1024 if kilobytes is not None else None


def _load(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise CorruptCheckpointError(
            f"{folder}: transformers finds no weights for {missing[0]} ({len(missing)} missing)."
        )
    return model.eval()


def _run_text(model: Any, ids: Sequence[int]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    from transformers import DynamicCache

    # Without a config every layer keeps all positions, which is the form of the exported caches.
    cache = DynamicCache()
    logits = model(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True).logits
    caches = tuple(tensor.numpy() for layer in cache.layers for tensor in (layer.keys, layer.values))
    return logits[0].float().numpy(), caches


def _run_greedy(model: Any, prompt: Sequence[int], steps: int) -> tuple[tuple[int, ...], np.ndarray]:
    from transformers import DynamicCache

    # With the config: sliding layers drop what they no longer see, as generate() has it.
    cache = DynamicCache(config=model.config)
    pending = torch.tensor([list(prompt)])
    ids: list[int] = []
    rows: list[np.ndarray] = []
    for _ in range(steps):
        logits = model(input_ids=pending, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        rows.append(logits.float().numpy())
        ids.append(int(logits.argmax()))
        pending = torch.tensor([[ids[-1]]])
    if not rows:
        raise OptionError(
            "the check decodes no token: the model has no position left after the prompt.", "Pass --no-check."
        )
    return tuple(ids), np.stack(rows)
