"""Real sizes: a default config captured and translated without weights, and what that may take.

In: a config as transformers has it by default. Out: its layers, and the processor seconds that its document took; the bar that
those, and the memory of the process, are held against.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from t2n_llm.zoo.verdict import FULL_SIZE, NOT_RUNNABLE, OVER, RIGHT, CellVerdict

SECONDS_A_LAYER = 0.5
SECONDS_BESIDE = 10.0
PEAK_BYTES = 1_500_000_000
_NEAR = 1.25  # what a busy machine takes more

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Capture:
    """One model in its real size.

    Attributes:
        class_name: the transformers class.
        layers: of the decoder.
        processor_seconds: from the config to the document.
        peak_bytes: most memory that the process ever held.
    """

    class_name: str
    layers: int
    processor_seconds: float
    peak_bytes: int


def captured(config: Any) -> Capture:
    """Make the document of a config, as an export does before it reads a weight.

    Raises:
        T2NError: it cannot be captured or translated.
    """
    from generic_export.inference_target.tract.engines.wheel_worker import peak_rss_bytes
    from t2n_llm.graph.causal_lm import build_graph
    from t2n_llm.graph.options import GraphOptions
    from t2n_llm.graph.storage import finish_model

    begin = time.process_time()
    options = GraphOptions()
    graph = finish_model(build_graph(config, options, name=config.model_type), options)
    seconds = time.process_time() - begin
    return Capture(type(graph.network).__name__, layers_of(config), round(seconds, 2), peak_rss_bytes())


def layers_of(config: Any) -> int:
    """Return how many layers the decoder of a config has; 1 where the config does not say."""
    text = config.get_text_config(decoder=True)
    counts = (getattr(text, name, None) for name in _COUNTS)
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)


def allowed_seconds(layers: int) -> float:
    """Return the processor seconds that so many layers may take."""
    return SECONDS_A_LAYER * layers + SECONDS_BESIDE


def judged(verdict: CellVerdict) -> CellVerdict:
    """Hold a cell in full size against the bar; others, and those that failed, are what they were."""
    if verdict.dtype != FULL_SIZE or verdict.outcome != RIGHT or load(verdict) <= 1:
        return verdict
    seconds, peak = allowed_seconds(verdict.layers), PEAK_BYTES / 1e9
    message = (
        f"{verdict.processor_seconds:.0f} s of CPU time of {seconds:.0f}, "
        f"{verdict.peak_rss_bytes / 1e9:.2f} GB of {peak:.1f}, {verdict.layers} layers"
    )
    return replace(verdict, outcome=OVER, message=message)


def load(verdict: CellVerdict) -> float:
    """Return the part of the bar that a cell took, of time or of memory, whichever is larger."""
    return max(verdict.processor_seconds / allowed_seconds(verdict.layers), verdict.peak_rss_bytes / PEAK_BYTES)


def is_near_the_bar(verdict: CellVerdict) -> bool:
    """Say whether another machine, or a busier one, may well say the other thing."""
    return 1 / _NEAR < load(verdict) < _NEAR


def table(verdicts: Sequence[CellVerdict]) -> Iterator[str]:
    """Yield the lines of the table in Markdown, architectures sorted."""
    rows = sorted((verdict for verdict in verdicts if verdict.dtype == FULL_SIZE), key=lambda row: row.architecture)
    within = sum(row.outcome == RIGHT for row in rows)
    over = sum(row.outcome == OVER for row in rows)
    runnable = sum(row.outcome != NOT_RUNNABLE for row in rows)
    yield (
        f"{within} of {runnable} default configs are within the limit, {over} exceed it, {runnable - within - over} "
        "fail."
    )
    yield ""
    yield "| architecture | layers | CPU time | limit | memory | |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        yield f"| `{row.architecture}` | {' | '.join(_figures(row))} |"


def _figures(row: CellVerdict) -> tuple[str, ...]:
    if not row.layers:
        return "", "", "", f"{row.peak_rss_bytes / 1e9:.2f} GB", f"{row.outcome} ({row.stage})"
    return (
        f"{row.layers}",
        f"{row.processor_seconds:.1f} s",
        f"{allowed_seconds(row.layers):.1f} s",
        f"{row.peak_rss_bytes / 1e9:.2f} GB",
        "✓" if row.outcome == RIGHT else f"**{row.outcome}**",
    )


__all__ = ["Capture", "allowed_seconds", "captured", "is_near_the_bar", "judged", "layers_of", "load", "table"]
