"""`t2n-llm speculate`: text of a target, guessed by a small model or by the text itself and checked several tokens at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from generic_export.errors import OptionError
from t2n_llm.cli.console import Sink
from t2n_llm.cli.generate import tell_not_followed
from t2n_llm.cli.parameters import (
    ChatTemplateOption,
    DeviceOption,
    JsonLinesOption,
    PrefillChunkOption,
    QuietTextOption,
    most_new_tokens,
    takes_options,
)
from t2n_llm.cli.session import open_sink, quiet_libraries
from t2n_llm.sampling.wishes import Sampling

if TYPE_CHECKING:
    from t2n_llm.measure.answering import Account
    from t2n_llm.measure.generate import ExportedModel
    from t2n_llm.sampling.choice import TokenChoice
    from t2n_llm.speculate.answer import SpeculativeAnswer

_DRAFT_TOKENS = 2  # growing drafts were not faster (docs/speculate.md)


@takes_options
def speculate(
    target: Annotated[Path, typer.Argument(help="Export whose text it is, made with --num-logits-to-keep 0.")],
    sampling: Sampling,
    draft: Annotated[
        Path | None, typer.Argument(help="Smaller export with the same tokenizer, which guesses.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What to answer, or to continue.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same, from a file; - for what is piped in.", show_default=False),
    ] = None,
    prompt_lookup: Annotated[
        bool, typer.Option("--prompt-lookup", help="Guess what followed earlier in the text, without a draft.")
    ] = False,
    draft_tokens: Annotated[
        int,
        typer.Option(min=1, metavar="K", help="Tokens guessed at once."),
    ] = _DRAFT_TOKENS,
    compare: Annotated[
        bool, typer.Option("--compare", help="Generate again without guessing, and tell both speeds.")
    ] = False,
    max_new_tokens: Annotated[int | None, most_new_tokens(128, "--max-tokens")] = None,
    chat: ChatTemplateOption = True,
    prefill_chunk: PrefillChunkOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonLinesOption = False,
    quiet: QuietTextOption = False,
) -> None:
    """Generate text whose tokens are guessed first: the same text, sooner where guesses are cheap and right.

    Measured faster: --prompt-lookup, where the text repeats the prompt (edited code, summaries). With a DRAFT nothing was measured
    faster yet: SmolLM2-135M with itself in Q4_0 is not. It has to be many times faster than its TARGET (docs/speculate.md).
    """
    if (draft is None) != prompt_lookup:
        raise typer.BadParameter("give either a draft or --prompt-lookup.", param_hint="draft")
    sink = open_sink(as_json, quiet)
    quiet_libraries(sink)
    from t2n_llm.speculate.pair import SpeculativePair

    text = _prompt(prompt, prompt_file)
    pair = SpeculativePair.open(target, draft, draft_tokens, device=device, prefill_chunk=prefill_chunk)
    ids = pair.target.encode(text, chat=chat)
    pair.target.limit(len(ids), max_new_tokens)  # refused before the engine starts
    choice = sampling.choice(pair.target.settings)
    tell_not_followed(sink, pair.target.settings, sampled=choice.samples, beams=False)
    with pair.opened(choice) as opened:
        answer = opened.answer(ids, draft_tokens, max_new_tokens=max_new_tokens)
        pieces = []
        for piece in answer:
            pieces.append(piece)
            sink.text(piece)
    plain = _plain(pair.target, ids, choice, max_new_tokens) if compare else None
    sink.generated({"prompt": text, "text": "".join(pieces), **_record(answer, plain)})
    _tell(sink, answer, plain)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file.", param_hint="prompt")
    if prompt is not None:
        return prompt
    if str(file) == "-":
        return sys.stdin.read()
    try:
        return Path(str(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} cannot be read: {error}.", "Give a file of UTF-8 text.") from error


def _plain(model: ExportedModel, ids: Sequence[int], choice: TokenChoice, most: int | None) -> Account:
    """Return what the target takes alone, as `t2n-llm generate` runs it."""
    with model.opened() as held:
        answer = model.answer(held, ids, choice, max_new_tokens=most)
        for _ in answer:
            pass
    return answer.account


def _record(answer: SpeculativeAnswer, plain: Account | None) -> dict[str, Any]:
    record: dict[str, Any] = {**answer.account.asdict(), **answer.tally.asdict()}
    if plain is None:
        return record
    with_drafts, without = answer.account.tokens_per_second, plain.tokens_per_second
    ratio = with_drafts / without if with_drafts and without else None
    return {**record, "plain_tokens": plain.tokens, "plain_tokens_per_second": without, "speed_up": ratio}


def _tell(sink: Sink, answer: SpeculativeAnswer, plain: Account | None) -> None:
    record = _record(answer, plain)
    acceptance, speed = record["acceptance"], record["tokens_per_second"]
    said = [f"{record['tokens']} tokens in {record['runs']} runs"]
    if acceptance is not None:
        said.append(f"{record['accepted_tokens']} of {record['drafted_tokens']} guesses right ({acceptance:.0%})")
        said.append(f"{record['tokens_per_run']:.2f} tokens a run")
    else:
        said.append("nothing was guessed")
    said += [] if speed is None else [f"{speed:.1f} tokens/s"]
    if plain is not None and record["speed_up"] is not None:
        said.append(f"{record['plain_tokens_per_second']:.1f} without guessing ({record['speed_up']:.2f} x)")
    sink.aside("; ".join(said))


__all__ = ["speculate"]
