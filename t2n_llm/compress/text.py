"""Which tokens a model is calibrated on: a text file, the text that comes with the package, or what the model itself writes.

In: `builtin`, `auto` or a path. Out: token ids, int64 [n, L], n sequences of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from generic_export.errors import OptionError
from generic_export.interrupts import asking
from kvcache.compat import cache_keyword, cache_of
from t2n_llm.source.hub import ModelSource, opening_ids
from t2n_llm.weights.f32_model import load_f32
from t2n_llm.weights.placement import Placement, plan_residency

BUILTIN, AUTO = "builtin", "auto"
DEFAULT_SEQUENCES = 32
DEFAULT_LENGTH = 512
_SHORTEST_TEXT = 64  # tokens; less says nothing about a model
_AUTO_LENGTH = 128
_AUTO_BATCH = 32  # texts written at once: the weights are read once for all of them
_TEXTS = ("prose.txt", "chat.txt", "code.txt")
_HELD_OUT = "held-out.txt"


def calibration_ids(
    choice: str,
    source: ModelSource,
    *,
    sequences: int = DEFAULT_SEQUENCES,
    length: int = DEFAULT_LENGTH,
) -> torch.Tensor:
    """Return the token ids to calibrate on.

    Args:
        choice: `builtin`, `auto` (sampled from the model itself), or the path of a UTF-8 text.
        source: the model; `builtin` and a path need its tokenizer.
        sequences: at most so many, spread evenly over the text.
        length: tokens in each; less when the model's positions or the text do not reach so far.

    Raises:
        OptionError: the text cannot be read, or is too short.
        MissingTokenizerError: a text is given and the model has no tokenizer.
        NotEnoughMemoryError: the model does not fit, to write a text itself.
    """
    length = min(length, _position_limit(source.config))
    if choice == AUTO:
        return _generated_ids(source, sequences, min(length, _AUTO_LENGTH))
    text = builtin_text() if choice == BUILTIN else read_text(Path(choice))
    tokenizer = source.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return spread_ids(ids, sequences, length, choice, opening_ids(tokenizer))


@torch.no_grad()
def _generated_ids(source: ModelSource, count: int, length: int) -> torch.Tensor:
    """Sample texts [count, length] from the model itself (LLM-QAT, arXiv:2305.17888): any first token, then its continuation.

    The model is loaded whole for this. The seed is fixed: a model gives the same texts again.
    """
    model, generator = _load(source), torch.Generator().manual_seed(0)
    opening = torch.tensor(opening_ids(source.tokenizer()) if source.has_tokenizer() else [], dtype=torch.int64)
    vocabulary = model.config.get_text_config().vocab_size
    first = torch.randint(vocabulary, (count, 1), generator=generator)
    prompts = torch.cat([opening.expand(count, -1), first], dim=1)
    return torch.cat([_continued(model, part, length, generator) for part in prompts.split(_AUTO_BATCH)])


def _continued(model: Any, prompts: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return texts [n, length] that begin with prompts [n, P]."""
    ids, past, step, keyword = prompts, None, prompts, cache_keyword(model.forward)
    for _ in asking(range(length - prompts.shape[1])):
        result = model(input_ids=step, use_cache=True, logits_to_keep=1, **{keyword: past})
        past = cache_of(result)
        probabilities = result.logits[:, -1].to(torch.float32).softmax(dim=-1)
        step = torch.multinomial(probabilities, 1, generator=generator)
        ids = torch.cat([ids, step], dim=1)
    return ids


def _load(source: ModelSource) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        skeleton = AutoModelForCausalLM.from_config(source.config, trust_remote_code=source.trust_remote_code)
    plan_residency(skeleton, Placement("cpu"))
    return load_f32(source.weights, source.trust_remote_code)


def builtin_text() -> str:
    """Return the text that comes with the package: public-domain prose and verse, a conversation, and code."""
    folder = files("t2n_llm") / "texts"
    return "\n\n".join((folder / name).read_text(encoding="utf-8") for name in _TEXTS)


def evaluation_text(path: Path | None) -> str:
    """Return the text to measure on: a file, or one that comes with the package and shares nothing with `builtin_text`.

    Raises:
        OptionError: the file cannot be read.
    """
    if path is None:
        return (files("t2n_llm") / "texts" / _HELD_OUT).read_text(encoding="utf-8")
    return read_text(path, "text")


def spread_ids(
    ids: list[int], sequences: int, length: int, origin: str = "the text", opening: Sequence[int] = ()
) -> torch.Tensor:
    """Cut sequences of one length out of a long text, evenly spread over it and without overlap.

    Args:
        ids: the text's tokens.
        sequences: at most so many.
        length: of each; a shorter text gives one sequence of its own length.
        origin: named in the error.
        opening: tokens that each sequence begins with, part of its length.

    Returns:
        int64 [n, L].

    Raises:
        OptionError: the text is too short.
    """
    if len(ids) < _SHORTEST_TEXT:
        raise OptionError(
            f"calibration text {origin}: {len(ids)} tokens are not enough.", "Use a text of a few thousand words."
        )
    length = min(length, len(opening) + len(ids))
    return torch.tensor(evenly_cut(ids, sequences, length, opening), dtype=torch.int64)


def evenly_cut(ids: Sequence[int], count: int, length: int, opening: Sequence[int] = ()) -> list[list[int]]:
    """Cut pieces of one length out of a long text, evenly spread over it and without overlap.

    Args:
        ids: the text's tokens.
        count: at most so many pieces; none where the text is shorter than one.
        length: tokens in each.
        opening: tokens that each piece begins with, part of its length.
    """
    cut = max(1, length - len(opening))
    count = min(count, len(ids) // cut)
    step = len(ids) // max(1, count)
    return [[*opening, *ids[index * step : index * step + cut]] for index in range(count)]


def _position_limit(config: Any) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else DEFAULT_LENGTH


def read_text(path: Path, what: str = "calibration text", hint: str = "Use a text, builtin or auto.") -> str:
    """Return a text file.

    Raises:
        OptionError: it cannot be read, or is not UTF-8; the message says what it is, and the hint what to give.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{what} {path}: {error.strerror}.", hint) from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{what} {path}: not UTF-8.", "Convert it to UTF-8, or use another text.") from error
