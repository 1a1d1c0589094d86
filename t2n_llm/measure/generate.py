"""Text from an exported folder: tokenizer from Python, everything else from tract with the cache as its state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.measure import check_device
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.write.archive import GRAPH_FILE
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.graph.prefill import Chunks, chunks_of, split_prompt
from t2n_llm.source.hub import load_tokenizer
from t2n_llm.tasks.names import require_language_model

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token; higher is more varied.
        top_p: sample among the fewest tokens that together have this probability.
        seed: of the random choice; None differs from run to run.

    Raises:
        OptionError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise OptionError(f"temperature is {self.temperature}.", "Use 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}.", "Use a probability above 0, at most 1.")


@dataclass(frozen=True)
class ExportedModel:
    """An export folder opened for generation."""

    folder: Path
    archive: Path
    tokenizer: Any
    eos_token_ids: frozenset[int]
    max_positions: int | None
    prefill: Chunks
    device: str = "cpu"

    @staticmethod
    def open(path: Path, *, device: str = "cpu", prefill_chunk: int | None = None) -> ExportedModel:
        """Open an export folder, or the folder around an archive.

        Args:
            path: the folder, or the archive in it.
            device: what tract computes on: "cpu", "cuda" or "metal".
            prefill_chunk: tokens of a prompt fed at once; None for what the export says.

        Raises:
            OptionError: an unknown device, or a chunk without a token.
            ArchiveError: it is no export folder, or its archive is missing.
            MissingTokenizerError: it carries no tokenizer.
        """
        check_device(device)
        if prefill_chunk is not None and prefill_chunk < 1:
            raise OptionError(f"prefill_chunk is {prefill_chunk}.", "Use 1 or more.")
        folder = export_folder(path)
        manifest = read_manifest(folder)
        require_language_model(folder, manifest, "generate")
        return ExportedModel(
            folder=folder,
            archive=archive_in(folder, manifest),
            tokenizer=load_tokenizer(folder),
            eos_token_ids=_eos_token_ids(folder),
            max_positions=manifest["model"]["max_position_embeddings"],
            prefill=chunks_of(manifest) if prefill_chunk is None else [(0, prefill_chunk)],
            device=device,
        )

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """Return the ids of a prompt, put into the chat template when `chat` is set and the model has one."""
        if chat and getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        return [int(i) for i in self.tokenizer(prompt)["input_ids"]]

    def generate(self, prompt: str, *, max_new_tokens: int, sampling: Sampling, chat: bool = True) -> Iterator[str]:
        """Yield pieces of text as they are decided.

        Raises:
            OptionError: the prompt is empty or leaves no position free.
            EngineError: the engine failed.
        """
        ids = self.encode(prompt, chat=chat)
        if not ids:
            raise OptionError("the prompt has no token.", "Give some text.")
        room = max_new_tokens if self.max_positions is None else min(max_new_tokens, self.max_positions - len(ids))
        if room <= 0:
            raise OptionError(
                f"the prompt has {len(ids)} tokens, the model {self.max_positions} positions.", "Give a shorter prompt."
            )
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        yield from text_pieces(decode, self._tokens(ids, room, sampling))

    def _tokens(self, ids: Sequence[int], count: int, sampling: Sampling) -> Iterator[int]:
        random = np.random.default_rng(sampling.seed)
        with WheelRunner(self.archive, TractWheel(device=self.device)) as runner:
            session = runner.open_session()
            logits = np.zeros(0)
            for piece in split_prompt(ids, self.prefill):
                logits = session.run([np.array([piece], np.int64)])[0][0, -1]
            for produced in range(count):
                token = choose_token(logits, sampling, random)
                if token in self.eos_token_ids:
                    return
                yield token
                if produced + 1 < count:
                    logits = session.run([np.array([[token]], np.int64)])[0][0, -1]


def export_folder(path: Path) -> Path:
    """Return an export folder, or the one around an archive."""
    return path.parent if path.is_file() or (path / GRAPH_FILE).is_file() else path


def choose_token(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """Choose the next token from logits [vocab]; top-p as in Holtzman et al. 2020, §3.1."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    cumulated = np.cumsum(weights[order])
    kept = order[: int(np.searchsorted(cumulated, sampling.top_p)) + 1]
    return int(random.choice(kept, p=weights[kept] / weights[kept].sum()))


def text_pieces(decode: Callable[[Sequence[int]], str], tokens: Iterator[int]) -> Iterator[str]:
    """Yield text as soon as it is final: a character may need several tokens.

    Args:
        decode: makes tokens text.
        tokens: as they are decided.
    """
    pending: list[int] = []
    context: list[int] = []
    for token in tokens:
        pending.append(token)
        before = decode(context)
        text = decode(context + pending)
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            continue
        yield text[len(before) :]
        # The last tokens stay as context: a decoder may treat the first token of a text in a special way.
        context, pending = pending[-4:], []
    if pending:
        yield decode(context + pending)[len(decode(context)) :]


def _eos_token_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if eos is not None:
                return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()
