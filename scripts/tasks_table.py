#!/usr/bin/env python3
"""Write the table of tasks in docs/how-to/tasks.md: archives, inputs, outputs, and how many architectures pass in the zoo.

usage: scripts/tasks_table.py RESULTS.jsonl ... [--document docs/how-to/tasks.md]

RESULTS are files that `t2n-llm zoo run --task ... --results` wrote; the f32 cells count. A task without results has no figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from t2n_llm.tasks.heads.table import HEADS, Head, Reads  # noqa: E402
from t2n_llm.tasks.names import SEQUENCE_CLASSIFICATION, TASKS, TEXT_GENERATION, TEXT_TO_AUDIO  # noqa: E402
from t2n_llm.zoo.history import Run, read_results  # noqa: E402
from t2n_llm.zoo.tables import replace_table  # noqa: E402
from t2n_llm.zoo.tasks import ZOO_TASKS, architectures  # noqa: E402

TABLE = "tasks table"

_INPUTS = {
    Reads.TEXT: "`input_ids`, `attention_mask` [B, S]",
    Reads.CHOICES: "`input_ids`, `attention_mask` [B, N, S]",
    Reads.IMAGE: "`pixel_values` [B, C, H, W]",
    Reads.IMAGE_AND_TEXTS: "`input_ids`, `attention_mask` [N, S], `pixel_values` [B, C, H, W]",
    Reads.PROMPTED_IMAGE: "`pixel_values`, `input_points` [B, 1, K, 2], `input_labels` [B, 1, K]",
    Reads.VIDEO: "`pixel_values` [B, frames, C, H, W]",
    Reads.SOUND: "`input_values` [B, T] or `input_features` [B, T, mel]",
    Reads.SERIES: "`past_values` [B, steps, channels]",
}


def table(run: Run) -> str:
    """Return the table of every task, the figures from a run."""
    lines = [
        "| `--task` | archives | inputs | outputs | validated |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(_row(name, run))} |" for name in TASKS)]) + "\n"


def _row(name: str, run: Run) -> Iterator[str]:
    head = HEADS.get(name)
    yield f"`{name}`"
    yield "`model`" if head is not None or name == TEXT_GENERATION else _page(name)
    yield _inputs(head) if head is not None else "`input_ids`, caches" if name == TEXT_GENERATION else ""
    yield ", ".join(f"`{output}`" for output in head.outputs) if head is not None else ""
    yield "as `text-classification`" if name == SEQUENCE_CLASSIFICATION else _figure(name, run)


def _page(name: str) -> str:
    """Return a link to the page of a task that has several archives."""
    if name == TEXT_TO_AUDIO:
        return "[text to speech](text-to-speech.md)"
    multimodal = name in ("image-text-to-text", "audio-text-to-text")
    return "[multimodal](multimodal.md)" if multimodal else "[encoder-decoder](encoder-decoders.md)"


def _inputs(head: Head) -> str:
    return _INPUTS[head.reads] + (", `token_type_ids` where the model has types" if head.token_types else "")


def _figure(name: str, run: Run) -> str:
    if name == TEXT_GENERATION:
        return "[models](../measurements/models.md)"
    tally = run.of_task(name).tally("f32")
    if name not in ZOO_TASKS or not tally.total:
        return ""
    tried = "" if tally.total == len(architectures(name)) else f", {tally.total} of {len(architectures(name))} tried"
    return f"{tally.right} of {tally.runnable}{tried}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "how-to" / "tasks.md")
    options = parser.parse_args(arguments)
    text = options.document.read_text(encoding="utf-8")
    found = table(Run("these", tuple(read_results(options.results))))
    options.document.write_text(replace_table(text, found, TABLE), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
