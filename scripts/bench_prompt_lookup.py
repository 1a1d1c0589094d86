#!/usr/bin/env python3
"""Measure prompt lookup: tokens a second with and without guesses, in turn, on the same prompts.

usage: scripts/bench_prompt_lookup.py EXPORT [--guessed-tokens 2,4,5,8] [--prompts all|NAME,...] [--tokens N] [--repeat N] [--json]

EXPORT has --num-logits-to-keep 0. Every repeat decodes each prompt greedily without guesses, and then with each number of guessed
tokens, on one thread; the figures are medians. Texts that differ are marked: runs of several tokens differ from single ones in
the last bits.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.prompt_lookup import lookup_answer, opened_rewindable, require_logits
from t2n_llm.runtime.sampling.options import Sampling

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


@dataclass
class Row:
    """What was measured of one number of guessed tokens on one prompt."""

    prompt: str
    guessed_tokens: int
    speeds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    acceptance: float | None = None
    tokens_per_run: float | None = None
    same: bool = True

    @property
    def speed_up(self) -> float:
        """Median of the repeats' ratios."""
        return median(ours / plain for ours, plain in zip(self.speeds, self.plain, strict=True))


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--guessed-tokens", default="2,4,5,8")
    parser.add_argument("--prompts", default="all")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = list(PROMPTS) if options.prompts == "all" else options.prompts.split(",")
    unknown = [name for name in names if name not in PROMPTS]
    if unknown:
        parser.error(f"--prompts: no prompt {unknown[0]!r}; choose from {', '.join(PROMPTS)}")
    lengths = [int(each) for each in options.guessed_tokens.split(",")]
    rows = measure(options.export, names, lengths, options.tokens, options.repeat)
    print(json.dumps([vars(row) | {"speed_up": row.speed_up} for row in rows]) if options.json else table(rows))


def measure(export: Path, names: list[str], lengths: list[int], tokens: int, repeat: int) -> list[Row]:
    """Measure every number of guessed tokens on every prompt, in turn."""
    model = ExportedModel.open(export)
    require_logits(model, max(lengths))
    choice = Sampling(greedy=True).choice(model.settings)
    rows = {(name, length): Row(name, length) for name in names for length in lengths}
    with model.opened() as held, opened_rewindable(model) as rewindable:
        for _ in range(repeat):
            for name in names:
                ids = model.encode(PROMPTS[name], chat=True)
                held.forget()
                without = model.answer(held, ids, choice, max_new_tokens=tokens)
                text = "".join(without)
                for length in lengths:
                    rewindable.forget()
                    answer = lookup_answer(model, rewindable, ids, choice, max_new_tokens=tokens, guessed_tokens=length)
                    row = rows[name, length]
                    row.same &= "".join(answer) == text
                    row.plain.append(without.account.tokens_per_second or 0.0)
                    row.speeds.append(answer.account.tokens_per_second or 0.0)
                    row.acceptance, row.tokens_per_run = answer.counts.acceptance, answer.counts.tokens_per_run
    return list(rows.values())


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = ["| prompt | K | right | tokens a run | tokens/s, with / without | |", "|---|---|---|---|---|---|"]
    for row in rows:
        right = "-" if row.acceptance is None else f"{row.acceptance:.0%}"
        other = "" if row.same else ", another text"
        lines.append(
            f"| {row.prompt} | {row.guessed_tokens} | {right} | {row.tokens_per_run or 0.0:.2f} | {median(row.speeds):.1f} / "
            f"{median(row.plain):.1f} | {row.speed_up:.2f} x{other} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()
