"""A target and what guesses for it: exports opened, held against each other, and ready to answer.

In: an export of all logits, and a smaller one of the same tokenizer, or none. Out: `OpenedPair`, which makes answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.folder import read_manifest
from t2n_llm.measure.generate import ExportedModel
from t2n_llm.sampling.choice import TokenChoice
from t2n_llm.speculate.answer import SpeculativeAnswer
from t2n_llm.speculate.drafts import Drafter, ModelDrafts, PromptLookup
from t2n_llm.speculate.rewinding import RewindableTokens


@dataclass(frozen=True)
class SpeculativePair:
    """A target, and what guesses.

    Attributes:
        target: whose text it is.
        draft: the model that guesses; None where the text itself does.
    """

    target: ExportedModel
    draft: ExportedModel | None

    @staticmethod
    def open(
        target: Path, draft: Path | None, most: int, *, device: str = "cpu", prefill_chunk: int | None = None
    ) -> SpeculativePair:
        """Open exports; the engine is not started.

        Args:
            target: an export folder of all logits, or the archive in it.
            draft: likewise, of any logits; None for prompt lookup.
            most: tokens of a draft.
            device: what tract computes on.
            prefill_chunk: tokens of a prompt fed at once; None for what each export says.

        Raises:
            OptionError: the target gives too few logits, or the models have different tokens.
            ArchiveError, MissingTokenizerError: one is no export folder of a language model with a tokenizer.
        """
        asked = ExportedModel.open(target, device=device, prefill_chunk=prefill_chunk)
        _require_logits(asked, most + 1)
        if draft is None:
            return SpeculativePair(asked, None)
        guessing = ExportedModel.open(draft, device=device, prefill_chunk=prefill_chunk)
        require_same_tokens(asked, guessing)
        return SpeculativePair(asked, guessing)

    @contextmanager
    def opened(self, choice: TokenChoice) -> Iterator[OpenedPair]:
        """Yield the pair with its engines running; they end with the block.

        Args:
            choice: how a token is chosen, by both.

        Raises:
            EngineError: an engine refuses an archive.
            EngineLoadError: an archive keeps what cannot be taken back.
        """
        with ExitStack() as stack:
            held = _opened(self.target, stack)
            yield OpenedPair(self.target, held, self._drafter(choice, stack), choice)

    def _drafter(self, choice: TokenChoice, stack: ExitStack) -> Drafter:
        if self.draft is None:
            return PromptLookup()
        held = _opened(self.draft, stack)
        sizes = [size for size in (_vocab_size(self.target), _vocab_size(self.draft)) if size is not None]
        return ModelDrafts(held, choice, vocab_size=min(sizes, default=None), max_positions=self.draft.max_positions)


@dataclass(frozen=True)
class OpenedPair:
    """A pair with its engines running.

    Attributes:
        model: the target.
        held: what its engine has read.
        drafter: what guesses.
        choice: how a token is chosen.
    """

    model: ExportedModel
    held: RewindableTokens
    drafter: Drafter
    choice: TokenChoice

    def answer(self, ids: Sequence[int], draft_tokens: int, *, max_new_tokens: int | None = None) -> SpeculativeAnswer:
        """Return the text that follows a prompt.

        Args:
            ids: of the prompt; what is held of it already is not read again.
            draft_tokens: tokens to guess at once.
            max_new_tokens: most tokens; None for what the model's settings say.

        Raises:
            OptionError: there is no token, or no position is left.
        """
        limit = self.model.limit(len(ids), max_new_tokens)
        return SpeculativeAnswer(
            self.held, self.drafter, ids, self.choice, limit, draft_tokens, self.model.decode, self.choice.random()
        )

    def forget(self) -> None:
        """Forget every text that was read, so that the next prompt is read from its start, by both."""
        self.held.keep(0)
        self.drafter.forget()


def require_same_tokens(target: ExportedModel, draft: ExportedModel) -> None:
    """Refuse a draft that has other tokens than its target.

    Raises:
        OptionError: names the first id that means something else.
    """
    ours, theirs = _texts_by_id(target), _texts_by_id(draft)
    if ours == theirs:
        return
    first = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    here, there = (repr(texts[first]) if first in texts else "no token" for texts in (ours, theirs))
    raise OptionError(
        f"token {first} is {here} in {target.folder} and {there} in {draft.folder}.",
        "A draft has to be an export of a model with the target's own tokenizer.",
    )


def _texts_by_id(model: ExportedModel) -> Mapping[int, str]:
    return {token: text for text, token in model.tokenizer.get_vocab().items()}


def _require_logits(model: ExportedModel, positions: int) -> None:
    kept = int(read_manifest(model.folder).get("options", {}).get("num_logits_to_keep", 1))
    if 0 < kept < positions:
        raise OptionError(
            f"{model.folder} gives the logits of {kept} position{'s' if kept > 1 else ''}, and {positions} are needed.",
            "Export the target with --num-logits-to-keep 0, or use fewer --draft-tokens.",
        )


def _vocab_size(model: ExportedModel) -> int | None:
    size: int | None = read_manifest(model.folder)["model"]["vocab_size"]
    return size


def _opened(model: ExportedModel, stack: ExitStack) -> RewindableTokens:
    runner = stack.enter_context(WheelRunner(model.archive, TractWheel(device=model.device)))
    return RewindableTokens(runner.open_rewindable(), model.prefill)


__all__ = ["OpenedPair", "SpeculativePair", "require_same_tokens"]
