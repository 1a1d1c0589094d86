"""What PyTorch says: one plain run of the Hugging Face model in f32, recorded as arrays that outlive it.

No part of the exporter computes here: transformers' own eager attention, masks, caches and recurrences are the judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from generic_export.errors import OptionError, ReferenceDiedError, SourceError
from generic_export.interrupts import asking, raise_if_interrupted
from generic_export.processes import start_task, wait_for_news
from kvcache.forms import state_form
from kvcache.rotary.scaling import switching_length
from kvcache.states.tensors import Slot
from t2n_llm.check.cache_range import largest_values
from t2n_llm.check.options import DEFAULT_DECODE_STEPS
from t2n_llm.graph.interface import sliding_window_of
from t2n_llm.reporter import Steps, no_steps
from t2n_llm.weights.archive_weights import ArchiveWeights
from t2n_llm.weights.f32_model import reference_model
from t2n_llm.weights.placement import Residency

if TYPE_CHECKING:
    from t2n_llm.source.adapter import Adapter

# Public domain (Melville, Moby-Dick, 1851): something a tokenizer of any language model can chew on.
CHECK_TEXT = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing "
    "particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is "
    "a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the "
    "mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin "
    "warehouses, and bringing up the rear of every funeral I meet, then, I account it high time to get to sea as soon as I can."
)

# What makes activations large: first tokens, line ends, digits, rare characters, the same token again and again.
STRESS_TEXT = (
    "\n\n\n# 0000000000 1234567890 3.14159265358979\n\tdef f(x):\n\t\treturn {'key': [x, -x, None]}  # !!! ??? ;;;\n"
    "AAAAAAAAAAAAAAAA the the the the . . . . ,,,, \n\n<|x|> </s> \u00e9\u00df\u4f60\u597d\u043f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f600\n\n\n"
)

PROMPT_LENGTH = 12
OFFLOADED_GREEDY_STEPS = 4  # each one reads every weight that is on disk
_TYPICAL_TOKENS = 256
_SHORTEST_TEXT = 29  # longer than the traced length, not a multiple of the chunk sizes
_LOOK_SECONDS = 0.5
_LONGEST_WINDOW = 256  # sliding windows up to this size are crossed by the check


@dataclass(frozen=True)
class CheckPlan:
    """The tokens of a validation.

    Attributes:
        text_ids: int64 [L]; prefilled whole, and in chunks.
        chunk_ends: positions where the chunks end; the last is L.
        prompt_length: how many of `text_ids` start the decoding.
        decode_steps: tokens decoded after the prompt.
        teacher_forced: the decoded tokens are the text's own, whose logits one pass gives; greedy generation is cut to
            `OFFLOADED_GREEDY_STEPS`. For models whose weights are read from disk in every pass.
        depends_on_feeding: the model answers to the text in chunks as PyTorch does to the same chunks, and not as it does to the
            whole (LongRoPE).
    """

    text_ids: tuple[int, ...]
    chunk_ends: tuple[int, ...]
    prompt_length: int
    decode_steps: int
    teacher_forced: bool = False
    depends_on_feeding: bool = False

    @property
    def greedy_steps(self) -> int:
        """How many tokens are generated greedily."""
        return min(self.decode_steps, OFFLOADED_GREEDY_STEPS) if self.teacher_forced else self.decode_steps

    @property
    def passes(self) -> int:
        """How often the whole model runs."""
        # Teacher-forced, the pass over the text gives the first greedy token as well.
        return self.greedy_steps if self.teacher_forced else self.greedy_steps + 1


def refuse_beyond(ids: Sequence[int], vocabulary: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        SourceError: the tokenizer belongs to another model.
    """
    largest = max(ids, default=0)
    if largest >= vocabulary:
        raise SourceError(
            f"the tokenizer produces token {largest}, but the model's vocab_size is {vocabulary}.",
            "Use the model's own tokenizer, or pass --no-tokenizer.",
        )


def plan_check(
    config: Any,
    tokenizer: Any | None,
    decode_steps: int = DEFAULT_DECODE_STEPS,
    seed: int = 0,
    *,
    teacher_forced: bool = False,
    at_least: int = 0,
) -> CheckPlan:
    """Choose the tokens: text when there is a tokenizer, else random ids; long enough to leave a sliding window.

    Args:
        config: transformers config (vocabulary, position limit, window).
        tokenizer: turns `CHECK_TEXT` into ids; None draws random ones.
        decode_steps: tokens to decode, cut to what the model's positions allow.
        seed: for random ids.
        teacher_forced: see `CheckPlan`; the text is then long enough to be decoded. A model whose answers depend on how text is
            fed decodes a few tokens of its own instead.
        at_least: tokens of the text, where the model has so many positions.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    limit = _positions(text) or 1 << 20
    window = int(sliding_window_of(text) or 0)
    wanted = 3 * window + 5 if 0 < window <= _LONGEST_WINDOW else _SHORTEST_TEXT
    switch = switching_length(text)
    if teacher_forced and switch is not None and switch < PROMPT_LENGTH + decode_steps:
        teacher_forced, decode_steps = False, min(decode_steps, OFFLOADED_GREEDY_STEPS)
    if teacher_forced:
        wanted = max(wanted, PROMPT_LENGTH + decode_steps)
    length = max(2, min(max(wanted, at_least), limit))
    if tokenizer is not None:
        ids = list(tokenizer(CHECK_TEXT)["input_ids"])
        refuse_beyond(ids, text.vocab_size)
    else:
        generator = np.random.default_rng(seed)
        ids = generator.integers(0, text.vocab_size, size=length).tolist()
    while len(ids) < length:
        ids += ids
    prompt = min(PROMPT_LENGTH, max(1, length // 2))
    first = max(1, length // 3)
    ends = sorted({first, min(first + 1, length), length})
    steps = min(decode_steps, (length if teacher_forced else limit) - prompt)
    depends = switch is not None and switch < length
    return CheckPlan(tuple(int(i) for i in ids[:length]), tuple(ends), prompt, steps, teacher_forced, depends)


def _positions(text: Any) -> int:
    """Return how many tokens a decoder has positions for; 0 where its config names no such number."""
    return int(getattr(text, "max_position_embeddings", 0) or getattr(text, "max_target_positions", 0) or 0)


def typical_tokens(config: Any, tokenizer: Any | None, seed: int = 0) -> tuple[int, ...]:
    """Return ids to measure a model on: the check's text, then one that makes activations large; random ids without a tokenizer."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    limit = min(_TYPICAL_TOKENS, _positions(text) or _TYPICAL_TOKENS)
    if tokenizer is None:
        return tuple(np.random.default_rng(seed).integers(0, text.vocab_size, size=limit).tolist())
    ids = [*tokenizer(STRESS_TEXT)["input_ids"], *tokenizer(CHECK_TEXT)["input_ids"]]
    return tuple(int(each) for each in ids[:limit])


@dataclass(frozen=True)
class ReferenceRun:
    """What PyTorch answered to a plan, in f32.

    Attributes:
        plan: the tokens.
        text_logits: [L, vocab], the logits after each token of the text.
        greedy_ids: the greedy continuation of the prompt, `greedy_steps` ids.
        greedy_logits: [greedy_steps, vocab]; row i chose `greedy_ids[i]`.
        text_states: what the model keeps after the whole text; keys and values are [1, Hkv, L, D].
        past_states: the states of fixed size before the last token of the text; empty where a pass is too dear to know them.
        fed_in_chunks: [L, vocab], the logits where the text is fed in the plan's chunks, of a model that answers differently then.
    """

    plan: CheckPlan
    text_logits: np.ndarray
    greedy_ids: tuple[int, ...]
    greedy_logits: np.ndarray
    text_states: Mapping[Slot, np.ndarray]
    past_states: Mapping[Slot, np.ndarray] = field(default_factory=dict)
    fed_in_chunks: np.ndarray | None = None

    @property
    def chunk_logits(self) -> np.ndarray:
        """[L, vocab], the logits after each token of the text, fed in chunks."""
        return self.text_logits if self.fed_in_chunks is None else self.fed_in_chunks

    @property
    def largest_states(self) -> dict[Slot, float]:
        """The largest magnitude of each float state after the text, by slot."""
        return largest_values(self.text_states)

    @property
    def decode_ids(self) -> tuple[int, ...]:
        """The tokens of the decode check, one after the other: the text's own, or the greedy ones."""
        start, steps = self.plan.prompt_length, self.plan.decode_steps
        return self.plan.text_ids[start : start + steps] if self.plan.teacher_forced else self.greedy_ids

    @property
    def decode_logits(self) -> np.ndarray:
        """[decode_steps, vocab]; row i are the logits at the position before `decode_ids[i]`."""
        start, steps = self.plan.prompt_length - 1, self.plan.decode_steps
        return self.text_logits[start : start + steps] if self.plan.teacher_forced else self.greedy_logits


def run_reference(
    folder: Path,
    plan: CheckPlan,
    *,
    trust_remote_code: bool = False,
    residency: Residency | None = None,
    adapter: Adapter | None = None,
    overrides: ArchiveWeights | None = None,
    decodes: bool = True,
    tell: Steps = no_steps,
) -> ReferenceRun:
    """Load the checkpoint in f32 and run the plan; the model is released before this returns.

    Args:
        folder: config and safetensors.
        plan: the tokens.
        trust_remote_code: allow code that comes with the model.
        residency: where the weights stay; None keeps them in memory.
        adapter: merged into the weights.
        overrides: the weights of a compressed archive, to run the plan with.
        decodes: generate tokens; False runs the text alone.
        tell: receives how many tokens are generated, and how many will be.

    Raises:
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
        ArchiveError, ValidationError: the overrides cannot be read, or belong to another model.
    """
    loaded = reference_model(folder, residency, adapter=adapter, trust_remote_code=trust_remote_code)
    with torch.no_grad(), loaded as model:
        if overrides is not None:
            overrides.apply(model)
        text_logits, states = _run_text(model, plan.text_ids)
        if not decodes:
            return ReferenceRun(plan, text_logits, (), text_logits[:0], states)
        in_chunks = _run_chunks(model, plan) if plan.depends_on_feeding else None
        past = {} if plan.teacher_forced else _fixed_states(model, plan.text_ids[:-1], states)
        prompt = plan.text_ids[: plan.prompt_length]
        if plan.teacher_forced:
            ids, greedy_logits = _continue(model, prompt, plan.greedy_steps, text_logits[plan.prompt_length - 1], tell)
        else:
            ids, greedy_logits = _run_greedy(model, prompt, plan.greedy_steps, tell)
    return ReferenceRun(plan, text_logits, ids, greedy_logits, states, past, in_chunks)


def run_reference_apart(folder: Path, plan: CheckPlan, *, tell: Steps = no_steps, **options: Any) -> ReferenceRun:
    """Do `run_reference`, with the same arguments, in a process of its own: all its memory is given back at the end.

    Raises:
        ReferenceDiedError: that process ended without an answer.
    """
    # Spawned: a fork would share the memory that is to be given back.
    with start_task(partial(_answer, folder, plan, **options), method="spawn", keep_output=False) as process:
        while True:
            raise_if_interrupted()
            wait_for_news([process], _LOOK_SECONDS)
            news, ending = process.news()
            for done in (each for each in news if isinstance(each, tuple)):
                tell(*done)
            answers = [each for each in news if not isinstance(each, tuple)]
            if answers:
                break
            if ending is not None:
                raise ReferenceDiedError(
                    f"{folder}: the PyTorch process died ({ending.cause}).",
                    "The machine probably ran out of memory. Pass --no-check, and run t2n-llm validate on a "
                    "larger machine.",
                )
    answer: ReferenceRun | Exception = answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(folder: Path, plan: CheckPlan, parent: Connection, **options: Any) -> None:
    """Run in the other process: send what `run_reference` returns or raises."""
    try:
        parent.send(run_reference(folder, plan, tell=lambda *done: parent.send(done), **options))
    except Exception as error:
        parent.send(error)


def _run_text(model: Any, ids: Sequence[int]) -> tuple[np.ndarray, dict[Slot, np.ndarray]]:
    conversation = state_form(model).conversation(model, windowed=False)
    logits = conversation.answer(_tokens(model, ids))
    states = {slot: tensor.cpu().numpy() for slot, tensor in conversation.states().items()}
    return logits[0].float().cpu().numpy(), states


def _run_chunks(model: Any, plan: CheckPlan) -> np.ndarray:
    conversation = state_form(model).conversation(model, windowed=False)
    chunks = (plan.text_ids[start:end] for start, end in pairwise((0, *plan.chunk_ends)))
    answers = [conversation.answer(_tokens(model, chunk))[0] for chunk in chunks]
    return torch.cat(answers).float().cpu().numpy()


def _fixed_states(model: Any, ids: Sequence[int], after: Mapping[Slot, np.ndarray]) -> dict[Slot, np.ndarray]:
    """Return the states of fixed size after these tokens; keys and values of the whole text can be cut instead."""
    fixed = [slot for slot in after if not slot.grows]
    if not fixed:
        return {}
    _, states = _run_text(model, ids)
    return {slot: states[slot] for slot in fixed}


def _run_greedy(model: Any, prompt: Sequence[int], steps: int, tell: Steps) -> tuple[tuple[int, ...], np.ndarray]:
    conversation = state_form(model).conversation(model, windowed=True)
    pending = _tokens(model, prompt)
    ids: list[int] = []
    rows: list[np.ndarray] = []
    for step in asking(range(steps)):
        tell(step, steps)
        logits = conversation.answer(pending, logits_to_keep=1)[0, -1]
        rows.append(logits.float().cpu().numpy())
        ids.append(int(logits.argmax()))
        pending = _tokens(model, ids[-1:])
    if not rows:
        raise OptionError(
            "the check decodes no tokens: the prompt fills all positions of the model.", "Pass --no-check."
        )
    return tuple(ids), np.stack(rows)


def _continue(
    model: Any, prompt: Sequence[int], steps: int, first: np.ndarray, tell: Steps
) -> tuple[tuple[int, ...], np.ndarray]:
    """Generate greedily from logits that are known already: one pass less, without a cache."""
    rows, ids = [first], [int(first.argmax())]
    for step in asking(range(1, steps)):
        tell(step, steps)
        tokens = _tokens(model, [*prompt, *ids])
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
        rows.append(logits.float().cpu().numpy())
        ids.append(int(logits.argmax()))
    return tuple(ids), np.stack(rows)


def _tokens(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return ids [1, S] where the model takes them; one with weights in several places moves them itself."""
    first = next(model.parameters()).device
    return torch.tensor([list(ids)], device="cpu" if first.type == "meta" else first)
