#!/usr/bin/env python3
"""Measure speculative decoding: tokens a second with and without guesses, in turn, on the same prompts.

usage: scripts/bench_speculate.py TARGET [--draft DIR ...] [--draft-tokens 2,4,5,8] [--prompts all|NAME,...]
                                  [--tokens N] [--repeat N] [--predict 127,19] [--json]

TARGET and each DIR are exports of one tokenizer, TARGET with --num-logits-to-keep 0. Every repeat decodes each prompt greedily
without guesses (as `t2n-llm generate`), with prompt lookup, and with each draft, one after another on one thread; the figures are
medians. Texts that differ are told: runs of several tokens differ from single ones in the last bits.

--predict T,D: no measurement, but what the acceptance seen would give where a step of the target takes T ms, a run of several
tokens as much, and a step of the draft D ms.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from t2n_llm.sampling.wishes import Sampling
from t2n_llm.speculate.acceptance import expected_tokens
from t2n_llm.speculate.pair import OpenedPair, SpeculativePair

CODE = """def read_rows(path, separator):
    rows = []
    with open(path) as file:
        for line in file:
            cells = line.rstrip().split(separator)
            rows.append(cells)
    return rows


def column_of(rows, name):
    header = rows[0]
    place = header.index(name)
    return [row[place] for row in rows[1:]]


def total_of(rows, name):
    values = column_of(rows, name)
    return sum(float(value) for value in values)
"""
NOTE = (
    "The harbour of Lindholm was built in 1871 by the engineer Ada Brandt. Its two stone piers are 340 metres long and protect "
    "the fishing fleet from the north wind. In 1923 a storm destroyed the lighthouse on the eastern pier, and a steel tower took "
    "its place. Today the harbour has room for sixty boats, and a small museum shows the tools of the first builders."
)
PROMPTS = {
    "editing code": f"Rename the variable rows to records in this code, and repeat all of it:\n\n{CODE}",
    "summary": f"Summarize this text, in its own words and sentences:\n\n{NOTE}",
    "question": "Explain why the sky is blue.",
    "story": "Write a short story about a lonely dragon.",
}
MOST = 8


@dataclass
class Row:
    """What was measured of one way of one prompt."""

    prompt: str
    way: str
    length: int
    speeds: list[float]
    plain: list[float]
    acceptance: float | None
    tokens_per_run: float | None
    same: bool

    @property
    def speed_up(self) -> float:
        """Median of the repeats' ratios."""
        return median(ours / plain for ours, plain in zip(self.speeds, self.plain, strict=True))


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path, nargs="*", default=[])
    parser.add_argument("--draft-tokens", default="2,4,5,8")
    parser.add_argument("--prompts", default="all")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--predict", help="ms of a step of another target and of another draft")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = list(PROMPTS) if options.prompts == "all" else options.prompts.split(",")
    rows = measured(options, names)
    print(json.dumps([vars(row) | {"speed_up": row.speed_up} for row in rows]) if options.json else table(rows))
    if options.predict:
        print(predicted(rows, *map(float, options.predict.split(","))))


def measured(options: argparse.Namespace, names: list[str]) -> list[Row]:
    """Measure every way on every prompt, in turn."""
    lengths = [int(each) for each in options.draft_tokens.split(",")]
    rows: dict[tuple[str, str, int], Row] = {}
    with ExitStack() as stack:
        pairs = {"prompt lookup": None, **{path.name: path for path in options.draft}}
        opened: dict[str, OpenedPair] = {}
        for way, draft in pairs.items():
            pair = SpeculativePair.open(options.target, draft, MOST)
            choice = Sampling(greedy=True).choice(pair.target.settings)
            opened[way] = stack.enter_context(pair.opened(choice))
        model = opened["prompt lookup"].model
        held = stack.enter_context(model.opened())
        for _ in range(options.repeat):
            for name in names:
                ids = model.encode(PROMPTS[name], chat=True)
                held.forget()
                answer = model.answer(held, ids, opened["prompt lookup"].choice, max_new_tokens=options.tokens)
                text = "".join(answer)
                plain = answer.account.tokens_per_second or 0.0
                for way, pair_of_way in opened.items():
                    for length in lengths:
                        pair_of_way.forget()
                        guessed = pair_of_way.answer(ids, length, max_new_tokens=options.tokens)
                        same = "".join(guessed) == text
                        row = rows.setdefault((name, way, length), Row(name, way, length, [], [], None, None, True))
                        row.speeds.append(guessed.account.tokens_per_second or 0.0)
                        row.plain.append(plain)
                        row.acceptance, row.tokens_per_run = guessed.tally.acceptance, guessed.tally.tokens_per_run
                        row.same = row.same and same
    return list(rows.values())


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| prompt | guesses of | K | right | tokens a run | tokens/s, with / without | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        right = "-" if row.acceptance is None else f"{row.acceptance:.0%}"
        per_run = 0.0 if row.tokens_per_run is None else row.tokens_per_run
        other = "" if row.same else ", another text"
        lines.append(
            f"| {row.prompt} | {row.way} | {row.length} | {right} | {per_run:.2f} | {median(row.speeds):.1f} / "
            f"{median(row.plain):.1f} | {row.speed_up:.2f} x{other} |"
        )
    return "\n".join(lines)


def predicted(rows: list[Row], target: float, draft: float) -> str:
    """Return what the tokens a run that were seen give at other step times, in ms; nothing of it was measured."""
    lines = [f"Predicted, target {target:g} ms, draft {draft:g} ms:"]
    for row in rows:
        if row.way == "prompt lookup" or row.tokens_per_run is None:
            continue
        drafted = row.length
        gain = row.tokens_per_run * target / (target + drafted * draft)
        lines.append(f"{row.prompt}, {row.way}, K {drafted}: {gain:.2f} x")
    for acceptance in (0.5, 0.6, 0.7, 0.8):
        gains = (expected_tokens(acceptance, k) * target / (target + k * draft) for k in (2, 5, 8))
        lines.append(f"acceptance {acceptance:.0%}, K 2, 5, 8: " + ", ".join(f"{gain:.2f} x" for gain in gains))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
