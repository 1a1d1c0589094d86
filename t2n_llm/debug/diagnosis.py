"""`diagnose_model`: which part of a language model does not export, or is wrong: of its twin, its skeleton or itself.

In: hub id, folder or config. Out: a `generic_export.diagnose.Diagnosis`. This room chooses what is run and with which
calls; the search itself is `generic_export.diagnose`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from generic_export.debug.search import STRATEGIES
from generic_export.diagnose import Diagnosis, Limits, Outcome, Progress, Stage, diagnose
from generic_export.errors import CaptureError, NotEnoughMemoryError, OptionError, described
from generic_export.inference_target import TractNNEF
from kvcache import explicit_operators, state_form
from kvcache.operators import OperatorNames
from kvcache.states.state_adapters import register_cache_adapters
from t2n_llm.compat import choose_implementations
from t2n_llm.debug.call_sets import ModelCalls, calls_of
from t2n_llm.debug.tiny_model import tiny_model
from t2n_llm.graph.capture import FUSIONS, TORCHSCRIPT
from t2n_llm.graph.causal_lm import probe_states
from t2n_llm.graph.options import DTYPES, torch_dtype
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import open_config, open_source
from t2n_llm.source.reference import SourceRef
from t2n_llm.weights.f32_model import load_f32
from t2n_llm.weights.placement import available_memory

_F32_BYTES = 4
_HEADROOM = 1.6  # the model, and the piece that is being tried once more in the engine
# Absolute and relative, for f32 pieces of real sizes with random weights: their outputs are about 1, and a sum over 14,336
# products differs by up to 5e-4 between two right orders of summation (measured, tract against PyTorch).
_LONG_SUMS = (1e-3, 1e-4)
DIAGNOSIS_FILE = "diagnosis.json"


class Subject(Enum):
    """What of a model is diagnosed."""

    SKELETON = "skeleton"  # its config: all layers, no weights
    TINY = "tiny"  # its tiny twin, with random weights
    WEIGHTS = "weights"  # the model with its weights


@dataclass(frozen=True)
class DiagnosisOptions:
    """The choices of a diagnosis; those of the search are told at `generic_export.diagnose.diagnose`.

    Attributes:
        subject: what is diagnosed.
        dtype: element type of weights, activations and caches.
        strategy, depth, only, atol, rtol, jobs, out, resume, limits: of the search.
    """

    subject: Subject = Subject.SKELETON
    dtype: str = "f32"
    strategy: str = "failing"
    depth: int | None = None
    only: str | None = None
    atol: float | None = None
    rtol: float | None = None
    jobs: int = 1
    out: Path | None = None
    resume: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"--dtype {self.dtype} is unknown.", f"Use one of {', '.join(DTYPES)}.")
        if self.strategy not in STRATEGIES:
            raise OptionError(f"unknown strategy {self.strategy!r}.", f"Use one of {', '.join(STRATEGIES)}.")
        _ = self.limits.memory_bytes  # refuses what is no size, before any work
        if self.resume and self.out is None:
            raise OptionError("--resume continues an earlier run and needs its folder.", "Name it with --output DIR.")


@dataclass(frozen=True)
class _Prepared:
    """A model ready to be recorded, and what a reader of the report should know of it."""

    model: nn.Module
    notes: tuple[str, ...]


def diagnose_model(
    source: str | SourceRef,
    options: DiagnosisOptions | None = None,
    *,
    reporter: Reporter | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Diagnosis:
    """Find the parts of a language model that do not export, or export and are wrong.

    Args:
        source: hub id, folder, config file or `.gguf` file; weights are fetched and read only for `Subject.WEIGHTS`.
        options: what is diagnosed, and how.
        reporter: told what happens; None logs.
        progress: told of every attempt.

    Returns:
        The diagnosis; Ctrl-C during the search ends that and is told in it. With `options.out` it is in that folder, with a
        reproduction of each fault (random weights of the same shapes, never the model's own).

    Raises:
        SourceError: there is no such model.
        CaptureError: transformers cannot build or run it.
        NotEnoughMemoryError: its weights do not fit in memory.
        OptionError: an option makes no sense, or `only` names no module.
    """
    options, reporter = options or DiagnosisOptions(), reporter or LogReporter()
    register_cache_adapters()
    ref = SourceRef.of(source)
    reporter.stage(f"Reading {ref.name}")
    with explicit_operators() as operators:
        prepared = _prepared(ref, options, operators)
        for note in prepared.notes:
            reporter.stage(note)
        calls = _calls(prepared.model, operators)
        atol, rtol = _limits(options)
        reporter.stage(f"Trying the modules of {type(prepared.model).__name__}")
        diagnosis = diagnose(
            prepared.model,
            TractNNEF(check_io=False),
            calls.keywords,
            strategy=options.strategy,
            depth=options.depth,
            only=options.only,
            atol=atol,
            rtol=rtol,
            jobs=options.jobs,
            out=options.out,
            resume=options.resume,
            fusions=FUSIONS,
            torchscript=TORCHSCRIPT,
            axes=calls.axes,
            limits=options.limits,
            context=calls.code,
            progress=progress,
        )
    warnings = (*prepared.notes, *_not_compared(diagnosis), *diagnosis.warnings)
    told = replace(diagnosis, warnings=warnings, versions=_versions(diagnosis))
    if options.out is not None:
        told.write_json(options.out / DIAGNOSIS_FILE)
    return told


def _limits(options: DiagnosisOptions) -> tuple[float | None, float | None]:
    """Return the limits of a comparison: as given; wider than measured ones for sums over thousands of random numbers."""
    if options.subject is Subject.SKELETON and options.dtype == "f32" and options.atol is options.rtol is None:
        return _LONG_SUMS
    return options.atol, options.rtol


def _not_compared(diagnosis: Diagnosis) -> list[str]:
    """Say which pieces passed without having been computed, so that nobody takes them for right."""
    passed = {verdict.key for verdict in diagnosis.verdicts if verdict.outcome is Outcome.OK}
    short = {
        verdict.key for verdict in diagnosis.verdicts if verdict.key in passed and verdict.stage is not Stage.COMPARE
    }
    names = [piece.class_name for piece in diagnosis.pieces if piece.key in short]
    if not names:
        return []
    return [
        f"{', '.join(names)}: translated but not run, because large modules are not run without weights. "
        "--strategy leaves runs the small ones; --tiny or --weights runs all"
    ]


def _versions(diagnosis: Diagnosis) -> dict[str, str]:
    import transformers

    return {**diagnosis.versions, "transformers": str(transformers.__version__)}


def _calls(model: nn.Module, operators: OperatorNames) -> ModelCalls:
    try:
        return calls_of(model, masked=operators.choice.masked)
    except CaptureError as error:
        if not any(parameter.is_meta for parameter in model.parameters()):
            raise
        raise CaptureError(
            f"{error.message} (with shapes only, without weights)",
            "Diagnose its tiny model, which has weights: --tiny.",
        ) from error


# --- what is diagnosed ----------------------------------------------------------------------------


def _prepared(ref: SourceRef, options: DiagnosisOptions, operators: OperatorNames) -> _Prepared:
    trust = ref.trust_remote_code
    if options.subject is Subject.WEIGHTS:
        source = open_source(ref, require_tokenizer=False)
        source.checkpoint()  # refuses a folder without weights, or with damaged ones
        _require_memory(source.config, trust)
        model = load_f32(source.weights, trust)
        model.set_experts_implementation(operators.experts)
        model = _with_attention(operators, partial(_attending, model))
        notes = ["diagnosed with the model's own weights"]
    else:
        config = open_config(ref).config
        make = _tiny if options.subject is Subject.TINY else _skeleton
        model, notes = make(config, operators, trust)
    dtype = torch_dtype(options.dtype)
    return _Prepared(model.to(dtype).eval().requires_grad_(False), tuple(notes))


def _tiny(config: Any, operators: OperatorNames, trust_remote_code: bool) -> tuple[nn.Module, list[str]]:
    twin = tiny_model(config, trust_remote_code=trust_remote_code)
    notes = [f"diagnosed on a tiny model: {twin.sentence}"]
    moved = [(place, pick) for place, pick in enumerate(twin.cut.picks) if place != pick]
    if moved:
        notes.append(
            "; ".join(f"layer {place} of the tiny model is layer {pick} of the model" for place, pick in moved)
        )
    try:
        model = _with_attention(
            operators, lambda names: twin.model(operators=names, trust_remote_code=trust_remote_code)
        )
    except ValueError:  # a class that takes no other attention than its own
        model = twin.model(trust_remote_code=trust_remote_code)
    return model, notes


def _skeleton(config: Any, operators: OperatorNames, trust_remote_code: bool) -> tuple[nn.Module, list[str]]:
    def built(names: OperatorNames) -> nn.Module:
        own = copy.deepcopy(config)
        choose_implementations(own, names.attention, names.experts)
        return meta_model(own, trust_remote_code=trust_remote_code)

    model = _with_attention(operators, built)
    count = sum(parameter.numel() for parameter in model.parameters())
    return model, [f"diagnosed without weights: {count / 1e6:.1f} M parameters; each module runs with random ones"]


def _with_attention(operators: OperatorNames, make: Callable[[OperatorNames], nn.Module]) -> nn.Module:
    """Make a model with the attention that an export of it has.

    Args:
        operators: what transformers knows them under.
        make: makes the model with other names.
    """

    def build(attention: str) -> nn.Module:
        try:
            model = make(replace(operators, attention=attention))
        except ValueError as error:
            raise CaptureError(described(error)) from error
        probe_states(model, state_form(model))
        return model

    try:
        return operators.choice.first_that_runs(build)
    except CaptureError:  # no export takes it either: what can be said of it is said with as much of ours as it takes
        return make(operators)


def _attending(model: Any, names: OperatorNames) -> nn.Module:
    model.set_attn_implementation(names.attention)
    found: nn.Module = model
    return found


def _require_memory(config: Any, trust_remote_code: bool) -> None:
    model = meta_model(config, trust_remote_code=trust_remote_code)
    needed = int(_F32_BYTES * _HEADROOM * sum(parameter.numel() for parameter in model.parameters()))
    free = available_memory()
    if needed > free:
        raise NotEnoughMemoryError(
            f"a diagnosis with weights needs about {needed / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free.",
            "Omit --weights, or use the tiny model (--tiny).",
        )


__all__ = ["DiagnosisOptions", "Subject", "diagnose_model"]
