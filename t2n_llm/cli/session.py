"""What one run of the command was told: how it speaks, and whether it shows tracebacks."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass

from generic_export.garbage_collection import collection_paused
from t2n_llm.cli.console import OutputMode, Sink

EXIT_DISAGREES = 1
EXIT_BAD_INPUT = 2
EXIT_BUG = 3


@dataclass
class Session:
    """Made by `main`, filled by typer's callbacks as the context's object, read where errors are told."""

    debug: bool = False
    mode: OutputMode = OutputMode.HUMAN


def open_sink(as_json: bool, quiet: bool = False) -> Sink:
    """Return the sink of a command."""
    return Sink(OutputMode.JSON if as_json else OutputMode.QUIET if quiet else OutputMode.HUMAN)


def quiet_libraries(sink: Sink, *, answers: bool = False) -> None:
    """Keep the progress bars and notices of other libraries out of our output; downloads may show theirs to people.

    Args:
        sink: of the command.
        answers: the command's output is an answer, so that what takes seconds is named on a terminal alone.
    """
    if "transformers" not in sys.modules:
        (sink.waiting if answers else sink.stage)("Loading PyTorch and transformers")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    with collection_paused():
        from huggingface_hub.utils.tqdm import enable_progress_bars
        from transformers.utils import logging

    logging.disable_progress_bar()  # the hub's as well
    if sink.mode is OutputMode.HUMAN and sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        enable_progress_bars()
