"""Text from an exported folder: tokenizer from Python, everything else from tract with the cache as its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.devices import check_device
from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.write.archive import GRAPH_FILE
from t2n_llm.check.decode_program import DecodeProgram
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.folder import DECODE_COMPONENT, archive_in, read_any_manifest
from t2n_llm.export.manifest_form import ComponentMetadata, ExportManifest
from t2n_llm.graph.prefill import Chunks, chunks_of
from t2n_llm.runtime.answering import AnswerEnding, HeldTokens, Limit, StreamedAnswer
from t2n_llm.runtime.chat.template import ChatTemplate
from t2n_llm.runtime.sampling.choice import TokenChoice
from t2n_llm.runtime.sampling.options import Sampling
from t2n_llm.runtime.sampling.rules import Suppressed
from t2n_llm.runtime.sampling.settings import generation_settings
from t2n_llm.source.hub import load_tokenizer
from t2n_llm.tasks.names import require_language_model

_CHUNK = 64  # tokens of a prompt that a decode program of transformers is fed at once
MOST_NEW_TOKENS = 128
"""Of an answer, where neither a user nor the model's settings say it."""


@dataclass(frozen=True)
class ExportedModel:
    """An export folder of a language model that generates text in the engine.

    Attributes:
        folder: the export folder.
        archive: path of the archive.
        tokenizer: the folder's tokenizer.
        settings: generation settings of the folder, with transformers' names.
        max_positions: longest context; None if unlimited.
        prefill: prompt tokens per call, by the number of past tokens.
        device: "cpu", "cuda" or "metal".
        is_decode_program: the archive comes from `transformers.exporters`; see `DecodeProgram`.
        never: tokens that are never generated, such as those that stand for images.
    """

    folder: Path
    archive: Path
    tokenizer: Any
    settings: Mapping[str, Any]
    max_positions: int | None
    prefill: Chunks
    device: str = "cpu"
    is_decode_program: bool = False
    never: tuple[int, ...] = ()

    @staticmethod
    def open(path: Path, *, device: str = "cpu", prefill_chunk: int | None = None) -> ExportedModel:
        """Open an export folder.

        Args:
            path: the folder, or an archive in it.
            device: "cpu", "cuda" or "metal".
            prefill_chunk: prompt tokens per call; None for the numbers recorded in the export.

        Raises:
            OptionError: the device is unknown, or `prefill_chunk` is below 1.
            ArchiveError: the path is not an export folder, or its archive is missing.
            MissingTokenizerError: the folder has no tokenizer.
        """
        check_device(device)
        if prefill_chunk is not None and prefill_chunk < 1:
            raise OptionError(f"prefill_chunk is {prefill_chunk}.", "Use 1 or more.")
        folder = export_folder(path)
        manifest = read_any_manifest(folder)
        require_language_model(folder, manifest, "generate")
        return ExportedModel(
            folder=folder,
            archive=archive_in(folder, manifest),
            tokenizer=load_tokenizer(folder),
            settings=generation_settings(folder),
            max_positions=manifest["model"].get("max_position_embeddings"),
            prefill=_chunks(manifest) if prefill_chunk is None else [(0, prefill_chunk)],
            device=device,
            is_decode_program=_decode_program(manifest) is not None,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompt: str, *, chat: bool, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: the text.
            chat: apply the chat template, if the model has one.
            variables: variables of the chat template, which must exist then.

        Raises:
            OptionError: the chat template failed, exceeded its limits, or dropped the prompt.
        """
        if chat and (self.has_chat_template or variables):
            template = ChatTemplate.of(self.tokenizer, self.folder, variables)
            return list(template.written([{"role": "user", "content": prompt}]).ids)
        return [int(i) for i in self.tokenizer(prompt)["input_ids"]]

    def generate(
        self, prompt: str, *, max_new_tokens: int | None = None, sampling: Sampling | None = None, chat: bool = True
    ) -> Iterator[str]:
        """Yield text piece by piece while it is generated.

        Args:
            prompt: text to answer or to continue.
            max_new_tokens: largest number of tokens; None for the model's settings, or `MOST_NEW_TOKENS`.
            sampling: sampling options; None for the model's settings.
            chat: apply the chat template.

        Raises:
            OptionError: the prompt is empty, or leaves no free position.
            EngineError: the engine failed.
        """
        ids = self.encode(prompt, chat=chat)
        self.limit(len(ids), max_new_tokens)
        with self.opened() as held:
            choice = (sampling or Sampling()).choice(self.settings)
            yield from self.answer(held, ids, choice, max_new_tokens=max_new_tokens)

    @contextmanager
    def opened(self) -> Iterator[HeldTokens]:
        """Yield a session of the engine, which is closed at the end of the `with` block.

        Raises:
            EngineError: the engine refused the archive.
        """
        kind = DecodeProgram if self.is_decode_program else WheelRunner
        with kind(self.archive, TractWheel(device=self.device)) as runner:
            yield HeldTokens(runner.open_session, self.prefill)

    def answer(
        self,
        held: HeldTokens,
        ids: Sequence[int],
        choice: TokenChoice,
        *,
        max_new_tokens: int | None = None,
        random: np.random.Generator | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> StreamedAnswer:
        """Return the text that follows the given tokens; see `StreamedAnswer`.

        Args:
            held: a session from `opened`.
            ids: tokens to read after those in the session's cache.
            choice: sampling options.
            max_new_tokens: see `generate`.
            random: random generator; None for a new one from the seed in `choice`.
            stopped: called regularly; return True to stop.

        Raises:
            OptionError: there are no tokens, or no free position is left.
        """
        suppressed = (Suppressed(self.never),) if self.never else ()
        return StreamedAnswer(
            held,
            ids,
            replace(choice, rules=(*choice.rules, *suppressed)),
            self.limit(len(held.tokens) + len(ids), max_new_tokens),
            decode=self.decode,
            random=random or choice.random(),
            stopped=stopped,
        )

    @property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Function that decodes token ids to text without special tokens."""
        return partial(self.tokenizer.decode, skip_special_tokens=True)

    def limit(self, tokens: int, max_new_tokens: int | None) -> Limit:
        """Return how many tokens may be generated.

        Args:
            tokens: number of tokens before them.
            max_new_tokens: see `generate`.

        Raises:
            OptionError: there are no tokens, or no free position is left.
        """
        if not tokens:
            raise OptionError("the prompt has no tokens.", "Use a text with at least one token.")
        wanted = self._most_new(tokens) if max_new_tokens is None else max_new_tokens
        if self.max_positions is None:
            return Limit(wanted)
        room = self.max_positions - tokens
        if room <= 0:
            raise OptionError(
                f"the prompt has {tokens} tokens, but the model has {self.max_positions} positions.",
                "Use a shorter prompt.",
            )
        return Limit(wanted) if wanted <= room else Limit(room, AnswerEnding.CONTEXT)

    def _most_new(self, tokens: int) -> int:
        """Return how many tokens the model's settings allow after so many."""
        if self.settings.get("max_new_tokens"):
            return int(self.settings["max_new_tokens"])
        left = int(self.settings.get("max_length") or 0) - tokens
        return min(MOST_NEW_TOKENS, left) if left > 0 else MOST_NEW_TOKENS


def _decode_program(manifest: ExportManifest) -> ComponentMetadata | None:
    """Return what is recorded of a decode program, where the export is one of `transformers.exporters`."""
    found = manifest.get("components", {}).get(DECODE_COMPONENT)
    return None if found is None else found["metadata"]


def _chunks(manifest: ExportManifest) -> Chunks:
    """Return how many tokens are fed at once; a decode program whose example had one takes one."""
    program = _decode_program(manifest)
    if program is None:
        return chunks_of(manifest)
    shape = program.get("kwargs", {}).get("input_ids", {}).get("shape", [])
    return [(0, _CHUNK if len(shape) == 2 and shape[1] != 1 else 1)]


def export_folder(path: Path) -> Path:
    """Return an export folder, or the one around an archive."""
    return path.parent if path.is_file() or (path / GRAPH_FILE).is_file() else path


__all__ = ["MOST_NEW_TOKENS", "ExportedModel", "export_folder"]
