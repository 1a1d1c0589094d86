"""The whole model at the end: scales and norms learned at once, so that its logits come nearer to the original's.

In: a model, what calibration made of it, and a text. Out: the same tensors with other values. What is lowered is the KL divergence
of the next token from the original's, by Adam. Neither levels nor anything about the graph changes.
One text in eight only judges, and the best of all states that were judged is kept: the first one, if no other is better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from generic_export.interrupts import asking
from generic_export.weights.values import read_tensor
from quant.blocks import Q4Blocks
from quant.learned import LearnedBlocks
from quant.packing import pack_q4_0, unpack_q4_0
from t2n_llm.compress.calibrate import CalibrationResult, write_tensor
from t2n_llm.compress.effort import Effort
from t2n_llm.compress.progress import DistilProgress
from t2n_llm.compress.reconstruct import split
from t2n_llm.compress.walk import WalkableModel, first_inputs, inner_width, layer_runs, logits_behind

FEWEST_TEXTS = 4
"""Fewer say nothing: what is learned from one is judged by another."""

_BATCH = 2  # texts of a step
_ROUNDS = 8  # most passes over one text; more of them learn its own turns
_WARM = 0.05  # of all steps
_JUDGEMENTS = 8
_MEMORY = 0.95  # of what is averaged, a step later
_BETAS = (0.9, 0.99)
# Steps of Adam, as shares of what is moved: with twice as much, SmolLM2 comes away from the original before it comes nearer.
_SCALE_STEP = 5e-4
_NORM_STEP = 5e-4
# Of a quantised weight: its level, its value in f32 and bfloat16, a slope; of 32 the scale and what moves it.
_BYTES_LEARNED = 12
_BYTES_PLAIN = 4
# Activations of one text in f32, by what they are as wide as.
_LOGITS_HELD, _STATES_HELD, _INNER_HELD, _SCORES_HELD = 6, 30, 8, 4
_NORM = "norm"
_WIDEST = 16  # outputs for an input: no linear of a layer has so many, a vocabulary has
_HALF_GAIN = 0.6  # of the time in f32: below that, bfloat16 is worth its rounding


@dataclass(frozen=True)
class Distilled:
    """What learning brought.

    Attributes:
        before, after: mean KL to the original, nats, on the texts that only judge.
        steps: made.
        kept: the step whose state was kept; 0 when nothing was better than the beginning.
    """

    before: float
    after: float
    steps: int
    kept: int


def bytes_needed(model: WalkableModel, made: CalibrationResult, length: int) -> int:
    """Return what learning holds in memory, as it is estimated.

    Args:
        model: the model.
        made: what calibration made of it.
        length: tokens of a text.
    """
    sizes = {name: parameter.numel() for name, parameter in model.causal_lm.named_parameters(remove_duplicate=False)}
    learned = sum(sizes[name] for name in made.packed)
    config = model.causal_lm.config.get_text_config()
    plain = sum(parameter.numel() for parameter in model.causal_lm.parameters()) - learned
    heads = getattr(config, "num_attention_heads", None) or 0  # none where nothing attends
    of_layer = _STATES_HELD * config.hidden_size + _INNER_HELD * inner_width(config) + _SCORES_HELD * heads * length
    activations = length * (config.num_hidden_layers * of_layer + _LOGITS_HELD * config.vocab_size)
    return _BYTES_LEARNED * learned + _BYTES_PLAIN * max(plain, 0) + 4 * activations


def distil(
    model: WalkableModel,
    made: CalibrationResult,
    text_ids: torch.Tensor,
    effort: Effort,
    *,
    work_dir: Path,
    progress: Callable[[DistilProgress], None] | None = None,
) -> Distilled:
    """Learn the scales of everything that was quantised, and the norms, against the logits of the original.

    Args:
        model: no weight of it is quantised, nor becomes so.
        made: what calibration made; its sources are replaced where learning made better ones.
        text_ids: int64 [n, L].
        effort: how long.
        work_dir: where the packed tensors are written.
        progress: told after every judgement.
    """
    began = time.monotonic()
    hidden = _outputs_of_original(model, text_ids)
    student = _Student.of(model, made)
    inside = f"{model.layers_name}."  # what is outside of the layers makes the original's logits, too
    with model.resident_but([name for name in made.packed if name.startswith(inside)]):
        found, state = _Lesson(model, student, text_ids, hidden).learn(effort, progress, began)
    if found.kept:
        state.write(made, work_dir)
    return found


def _outputs_of_original(model: WalkableModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return what leaves the last layer for each text, [1, L, H]."""
    hidden, calls = first_inputs(model, ids)
    for index, call in enumerate(asking(calls)):
        with model.resident(index) as layer:
            hidden = [run() for run in layer_runs(layer, hidden, call)]
    return hidden


@dataclass(frozen=True)
class _Student:
    """The values of a quantised model, by parameter name.

    Attributes:
        blocks: learned; names of one tied tensor share theirs.
        norms: learned, by name.
        fixed: whatever else is not the original's.
    """

    blocks: Mapping[str, LearnedBlocks]
    norms: Mapping[str, torch.Tensor]
    fixed: Mapping[str, torch.Tensor]

    @staticmethod
    def of(model: WalkableModel, made: CalibrationResult) -> _Student:
        """Begin with what calibration made."""
        blocks: dict[str, LearnedBlocks] = {}
        fixed: dict[str, torch.Tensor] = {}
        first: dict[int, tuple[str, Q4Blocks]] = {}
        for name, source in made.packed.items():
            parameter = model.causal_lm.get_parameter(name)
            stored = unpack_q4_0(read_tensor(source))
            known = first.setdefault(id(parameter), (name, stored))
            if parameter.ndim != 2:  # stacked experts, each of which sees few of the texts
                fixed[name] = stored.dequantize()
            elif known[0] != name and torch.equal(known[1].q, stored.q) and torch.equal(known[1].d, stored.d):
                blocks[name] = blocks[known[0]]
            else:
                blocks[name] = LearnedBlocks.of(stored)
        changed = {name: read_tensor(source).clone() for name, source in made.changed.items()}
        named = model.causal_lm.named_parameters(remove_duplicate=False)
        norms = {
            name: changed.pop(name) if name in changed else model.value(name)
            for name, parameter in named
            if parameter.ndim == 1 and _NORM in name and name.endswith(".weight")
        }
        return _Student(blocks, {name: values.requires_grad_() for name, values in norms.items()}, fixed | changed)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the values of every parameter that is not the original's."""
        rounded = {id(learned): learned.values() for learned in self.blocks.values()}
        return {**self.fixed, **self.norms, **{name: rounded[id(learned)] for name, learned in self.blocks.items()}}

    def groups(self) -> list[dict[str, Any]]:
        """Return what Adam moves, and by what steps."""
        learned = list({id(each): each for each in self.blocks.values()}.values())
        return [
            {"params": [each.shares for each in learned], "lr": _SCALE_STEP},
            *(
                {"params": [values], "lr": _NORM_STEP * float(values.detach().abs().mean())}
                for values in self.norms.values()
            ),
        ]

    def state(self) -> _State:
        """Return what an archive would hold now."""
        blocks = {id(learned): learned.blocks() for learned in self.blocks.values()}
        norms = {name: values.detach().clone() for name, values in self.norms.items()}
        return _State({name: blocks[id(learned)] for name, learned in self.blocks.items()}, norms)


@dataclass(frozen=True)
class _State:
    """What an archive would hold.

    Attributes:
        blocks, norms: by parameter name.
    """

    blocks: Mapping[str, Q4Blocks]
    norms: Mapping[str, torch.Tensor]

    def write(self, made: CalibrationResult, folder: Path) -> None:
        """Put it into the result of a calibration."""
        for name, blocks in self.blocks.items():
            made.packed[name] = write_tensor(folder / f"{name}.learned.q4_0", name, pack_q4_0(blocks))
        for name, values in self.norms.items():
            made.changed[name] = write_tensor(folder / f"{name}.learned.f32", name, values)


# --- learning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lesson:
    """A student, and what the original says to each text.

    Attributes:
        model: its own values are the original's, its linears have none.
        student: learns.
        ids: int64 [n, L].
        hidden: what leaves the original's last layer, [1, L, H] for each text.
    """

    model: WalkableModel
    student: _Student
    ids: torch.Tensor
    hidden: Sequence[torch.Tensor]

    def learn(
        self, effort: Effort, progress: Callable[[DistilProgress], None] | None, began: float
    ) -> tuple[Distilled, _State]:
        """Move the student; return what that brought, and the best state that was judged. `began` is when the effort did."""
        learned, judging = split(len(self.ids))
        judge_began = time.monotonic()
        before = lowest = self.judged(judging)
        judgements = _judgements(effort, time.monotonic() - judge_began)
        best, kept, step, due = self.student.state(), 0, 0, 1
        mean = _Mean.of(group["params"] for group in self.student.groups())
        optimizer = torch.optim.Adam(self.student.groups(), betas=_BETAS, foreach=False)
        steps = [group["lr"] for group in optimizer.param_groups]
        order, clock = _order(learned, effort.seed), _Clock.of(effort, _ROUNDS * len(learned), began)
        while clock.share(step) < 1:
            for group, size in zip(optimizer.param_groups, steps, strict=True):
                group["lr"] = size * _paced(clock.share(step))
            self.step(optimizer, [next(order) for _ in range(_BATCH)])
            step += 1
            mean.add()
            share = min(1.0, clock.share(step))
            if share * judgements < due:
                continue
            due = int(share * judgements) + 1
            with mean.given():
                now = self.judged(judging)
                if now < lowest:
                    lowest, best, kept = now, self.student.state(), step
            if progress is not None:
                progress(DistilProgress(step, round(step / share), before, now, clock.left(share)))
        return Distilled(before, lowest, step, kept), best

    def step(self, optimizer: torch.optim.Optimizer, texts: Sequence[int]) -> None:
        """Move once, by the mean slope of some texts."""
        optimizer.zero_grad(set_to_none=True)
        for index in asking(texts):
            expected = self.original_logits(index).log_softmax(-1)
            with torch.enable_grad(), _products():
                logits = self.logits(self.student.values(), index)
            with torch.no_grad():
                actual = logits.log_softmax(-1)
                slope = actual.exp_().sub_(expected.exp_()).div_(len(actual) * len(texts))
            logits.backward(slope)  # of KL(expected || actual), which softmax makes that simple
        optimizer.step()

    @torch.no_grad()
    def judged(self, texts: Sequence[int]) -> float:
        """Return the mean KL to the original on texts, in f32."""
        values, total, count = self.student.values(), 0.0, 0
        for index in asking(texts):
            expected = self.original_logits(index).log_softmax(-1)
            actual = self.logits(values, index).log_softmax(-1)
            total += float((expected.exp() * (expected - actual)).sum(dtype=torch.float64))
            count += len(actual)
        return total / count

    def logits(self, values: Mapping[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the quantised model's logits for a text, [L, vocab]."""
        call = {"input_ids": self.ids[index : index + 1], "use_cache": False}
        result = torch.func.functional_call(self.model.causal_lm, dict(values), (), call, tie_weights=False)
        return result.logits[0].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def original_logits(self, index: int) -> torch.Tensor:
        """Return the original's logits for a text, [L, vocab]."""
        return logits_behind(self.model, self.ids[index], self.hidden[index]).float()


@dataclass
class _Mean:
    """Learned tensors, averaged over the last steps: what single texts say of a scale is mostly noise (Polyak and Juditsky, 1992).

    Attributes:
        learned: what moves.
        averaged: of each of them.
        steps: that were averaged.
    """

    learned: list[torch.Tensor]
    averaged: list[torch.Tensor]
    steps: int = 0

    @staticmethod
    def of(groups: Iterable[Sequence[torch.Tensor]]) -> _Mean:
        """Begin with the tensors as they are."""
        learned = [tensor for group in groups for tensor in group]
        return _Mean(learned, [tensor.detach().clone() for tensor in learned])

    @torch.no_grad()
    def add(self) -> None:
        """Count the tensors as they are now; earlier ones count less and less, and at first the very first ones little."""
        self.steps += 1
        share = max(1 - _MEMORY, 1 / (1 + self.steps))
        for mean, tensor in zip(self.averaged, self.learned, strict=True):
            mean.lerp_(tensor, share)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give the tensors their averages for a `with` block."""
        moved = [tensor.detach().clone() for tensor in self.learned]
        try:
            self._put(self.averaged)
            yield
        finally:
            self._put(moved)

    @torch.no_grad()
    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self.learned, values, strict=True):
            tensor.copy_(value)


@dataclass(frozen=True)
class _Clock:
    """How much of an effort is made.

    Attributes:
        steps: of all; None where seconds count.
        seconds: of all.
        began: by the clock.
    """

    steps: int | None
    seconds: float
    began: float

    @staticmethod
    def of(effort: Effort, most: int, began: float) -> _Clock:
        steps = -(-min(effort.passes, most) // _BATCH) if effort.seconds is None else None
        return _Clock(steps, effort.seconds or 0.0, began)

    def share(self, step: int) -> float:
        """Return how much is made after so many steps, from 0 to 1; 1 of no effort."""
        if self.steps is not None:
            return step / self.steps if self.steps else 1.0
        return (time.monotonic() - self.began) / self.seconds if self.seconds else 1.0

    def left(self, share: float) -> float:
        """Return the seconds that the rest takes as things go."""
        return (time.monotonic() - self.began) * (1 / share - 1)


def _judgements(effort: Effort, seconds: float) -> int:
    """Return how often to judge: as often as takes a quarter of a time that is given, or 8 times.

    Args:
        effort: what is given.
        seconds: that one takes.
    """
    if effort.seconds is None:
        return _JUDGEMENTS
    return min(_JUDGEMENTS, max(1, int(effort.seconds / 4 / max(seconds, 1e-3))))


def _order(texts: Sequence[int], seed: int) -> Iterator[int]:
    """Yield texts for ever: each once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for place in torch.randperm(len(texts), generator=generator).tolist():
            yield texts[place]


def _paced(share: float) -> float:
    """Return the size of steps after a share of them: up from nothing, then down by a cosine."""
    return min(1.0, share / _WARM) * 0.5 * (1 + math.cos(math.pi * share))


class _HalfProducts(TorchFunctionMode):
    """Linears with learned weights multiply in bfloat16; everything else, and what is added up, stays f32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear and _is_learned_inside(args):
            inputs, weight, *bias = args
            product = func(inputs.to(torch.bfloat16), weight.to(torch.bfloat16)).float()
            return product if not bias or bias[0] is None else product + bias[0]
        return func(*args, **(kwargs or {}))


def _is_learned_inside(args: Sequence[Any]) -> bool:
    """Say whether a linear's weight is learned, and is none of the head's, whose rounding the logits would show."""
    return len(args) >= 2 and args[1].requires_grad and args[1].shape[0] < _WIDEST * args[1].shape[1]


def _products() -> AbstractContextManager[Any]:
    """Return what makes products fast where the machine has fast ones."""
    return _HalfProducts() if _is_fast_in_half() else nullcontext()


@cache
def _is_fast_in_half() -> bool:
    """Say whether this machine multiplies bfloat16 much faster than f32."""
    plain, half = (_product_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
    return half < _HALF_GAIN * plain


def _product_seconds(dtype: torch.dtype) -> float:
    left, right = torch.ones(256, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - began)
    return best


__all__ = ["FEWEST_TEXTS", "Distilled", "bytes_needed", "distil"]
