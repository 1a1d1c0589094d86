"""The whole model at the end: scales and norms learned at once, so that its logits come nearer to the original's.

In: a model, what calibration made of it, and a text. Out: the same tensors with other values. What is lowered is the KL divergence
of the next token from the original's, by Adam. Neither levels nor anything about the graph changes.
One text in eight only judges, and the best of all states that were judged is kept: the first one, if no other is better.
What a model reads again and again it learns by heart, so texts that it wrote itself can be given besides; these never judge.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from generic_export.interrupts import asking
from generic_export.weights.values import read_tensor
from quant.blocks import Q4Blocks
from quant.learned import LearnedBlocks
from quant.packing import pack_q4_0, unpack_q4_0
from t2n_llm.compress.course import Course
from t2n_llm.compress.effort import Effort
from t2n_llm.compress.half_products import fast_products
from t2n_llm.compress.learning_journal import LearningJournal
from t2n_llm.compress.pace import BATCH, Clock, judgements, paced, texts_in_turn
from t2n_llm.compress.progress import DistilProgress
from t2n_llm.compress.reconstruct import split
from t2n_llm.compress.result import CalibrationResult, write_tensor
from t2n_llm.compress.walk import WalkableModel, first_inputs, inner_width, layer_runs, logits_behind

FEWEST_TEXTS = 4
"""Fewer say nothing: what is learned from one is judged by another."""

_ROUNDS = 8  # most passes over one text; more of them learn its own turns
_FRESH = 2  # passes over one text, where as many texts are written as that takes
_MOST_WRITTEN = 1024  # texts, where a time says how long
# Steps of Adam, as shares of what is moved: with twice as much, SmolLM2 comes away from the original before it comes nearer.
_SCALE_STEP = 5e-4
_NORM_STEP = 5e-4
# Of a quantised weight: its level, its value in f32 and bfloat16, a slope; of 32 the scale and what moves it.
_BYTES_LEARNED = 12
_BYTES_PLAIN = 4
# Activations of one text in f32, by what they are as wide as.
_LOGITS_HELD, _STATES_HELD, _INNER_HELD, _SCORES_HELD = 6, 30, 8, 4
_NORM = "norm"


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


def texts_to_write(effort: Effort, given: int) -> int:
    """Return how many texts a model should write besides so many that are given, to read none of them too often."""
    if effort.seconds is not None:
        return _MOST_WRITTEN
    return max(0, -(-effort.passes // _FRESH) - len(split(given)[0]))


def bytes_needed(model: WalkableModel, made: CalibrationResult, texts: int, length: int) -> int:
    """Return what learning holds in memory, as it is estimated.

    Args:
        model: the model.
        made: what calibration made of it.
        texts: that are read.
        length: tokens of a text.
    """
    sizes = {name: parameter.numel() for name, parameter in model.causal_lm.named_parameters(remove_duplicate=False)}
    learned = sum(sizes[name] for name in made.packed)
    config = model.causal_lm.config.get_text_config()
    plain = sum(parameter.numel() for parameter in model.causal_lm.parameters()) - learned
    heads = getattr(config, "num_attention_heads", None) or 0  # none where nothing attends
    of_layer = _STATES_HELD * config.hidden_size + _INNER_HELD * inner_width(config) + _SCORES_HELD * heads * length
    activations = length * (config.num_hidden_layers * of_layer + _LOGITS_HELD * config.vocab_size)
    kept = texts * bytes_of_text(model, length)
    return _BYTES_LEARNED * learned + _BYTES_PLAIN * max(plain, 0) + 4 * activations + kept


def bytes_of_text(model: WalkableModel, length: int) -> int:
    """Return what is kept of each text while the model learns: what leaves the original's last layer, in f32."""
    return 4 * length * int(model.causal_lm.config.get_text_config().hidden_size)


def distil(
    model: WalkableModel,
    made: CalibrationResult,
    text_ids: torch.Tensor,
    effort: Effort,
    *,
    written: torch.Tensor | None = None,
    work_dir: Path,
    journal: LearningJournal | None = None,
    progress: Callable[[DistilProgress], None] | None = None,
) -> Distilled:
    """Learn the scales of everything that was quantised, and the norms, against the logits of the original.

    Args:
        model: no weight of it is quantised, nor becomes so.
        made: what calibration made; its sources are replaced where learning made better ones.
        text_ids: int64 [n, L].
        effort: how long.
        written: int64 [m, M], texts that never judge.
        work_dir: where the packed tensors are written.
        journal: keeps how far it has come, and knows how far an earlier run with the same arguments had.
        progress: told after every judgement.
    """
    began = time.monotonic()
    hidden = _outputs_of_original(model, text_ids)
    further = [] if written is None else list(written)
    if written is not None and further:
        hidden += _outputs_of_original(model, written)
    student = _Student.of(model, made)
    inside = f"{model.layers_name}."  # what is outside of the layers makes the original's logits, too
    with model.resident_but([name for name in made.packed if name.startswith(inside)]):
        found, state = _Lesson(model, student, [*text_ids, *further], len(text_ids), hidden).learn(
            effort, began, journal, progress
        )
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
        ids: int64 [L], of each text.
        given: so many of them, the first ones, are a user's; the others never judge.
        hidden: what leaves the original's last layer, [1, L, H] for each text.
    """

    model: WalkableModel
    student: _Student
    ids: Sequence[torch.Tensor]
    given: int
    hidden: Sequence[torch.Tensor]

    def learn(
        self,
        effort: Effort,
        began: float,
        journal: LearningJournal | None,
        progress: Callable[[DistilProgress], None] | None,
    ) -> tuple[Distilled, _State]:
        """Move the student; return what that brought, and the best state that was judged. `began` is when the effort did."""
        learned, judging = split(self.given)
        learned += range(self.given, len(self.ids))
        course, seconds = self._course(effort, judging, journal)
        began = began if seconds is None else time.monotonic() - seconds
        order = itertools.islice(texts_in_turn(learned, effort.seed), course.step * BATCH, None)
        clock = Clock.of(effort, _ROUNDS * len(learned), began)
        while clock.share(course.step) < 1:
            texts = [next(order) for _ in range(BATCH)]
            course.move(paced(clock.share(course.step)), partial(self.step, texts=texts))
            share = min(1.0, clock.share(course.step))
            if not course.is_due(share):
                continue
            with course.mean.given():
                now = self.judged(judging)
            course.judged(now)
            if journal is not None:
                journal.keep_course(course.stage(time.monotonic() - began))
            if progress is not None:
                progress(DistilProgress(course.step, round(course.step / share), course.before, now, clock.left(share)))
        with course.at_best():
            return Distilled(course.before, course.lowest, course.step, course.kept), self.student.state()

    def _course(
        self, effort: Effort, judging: Sequence[int], journal: LearningJournal | None
    ) -> tuple[Course, float | None]:
        """Return a course: one that was kept, and the seconds that it had taken, or one that begins, and None."""
        groups = self.student.groups()
        shapes = [tensor.shape for group in groups for tensor in group["params"]]
        stage = None if journal is None else journal.recalled_course(shapes)
        if stage is not None:
            return Course.gone_on(groups, stage), stage.numbers.seconds
        began = time.monotonic()
        before = self.judged(judging)
        return Course.begun(groups, before, judgements(effort, time.monotonic() - began)), None

    def step(self, optimizer: torch.optim.Optimizer, texts: Sequence[int]) -> None:
        """Move once, by the mean slope of some texts."""
        optimizer.zero_grad(set_to_none=True)
        for index in asking(texts):
            expected = self.original_logits(index).log_softmax(-1)
            with torch.enable_grad(), fast_products():
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
        call = {"input_ids": self.ids[index].unsqueeze(0), "use_cache": False}
        result = torch.func.functional_call(self.model.causal_lm, dict(values), (), call, tie_weights=False)
        return result.logits[0].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def original_logits(self, index: int) -> torch.Tensor:
        """Return the original's logits for a text, [L, vocab]."""
        return logits_behind(self.model, self.ids[index], self.hidden[index]).float()


__all__ = ["FEWEST_TEXTS", "Distilled", "bytes_needed", "bytes_of_text", "distil", "texts_to_write"]
