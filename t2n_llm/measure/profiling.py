"""Where an archive's time goes: by operator of the engine, and by module of the model.

In: an archive and the sizes of a prefill and of a decoding step. Out: `ProfileReport`, one `PhaseProfile` each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.engine import EngineNode, Profile
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.contents import read_contents
from generic_export.read.outline import module_paths, read_outline
from t2n_llm.check.runner import BIND_BATCH
from t2n_llm.export.located import LocatedArchive
from t2n_llm.measure.inspection import stateful_transforms

ELSEWHERE = "(not from one module)"
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class TimeShare:
    """The time of one group of nodes.

    Attributes:
        name: operator, or module path with layer numbers as `*`.
        kind: class of the module; empty for an operator.
        nodes: how many.
        seconds: their time in one run.
        share: of the whole run, 0 to 1.
    """

    name: str
    kind: str
    nodes: int
    seconds: float
    share: float


@dataclass(frozen=True)
class PhaseProfile:
    """One kind of run.

    Attributes:
        name: "prefill" or "decode".
        new_tokens, past_tokens: its sizes.
        caches_as_inputs: the past came in as inputs, so that `Concat` copies it; a runtime keeps it as state.
        seconds: of one run.
        iterations: runs that were measured.
        operators, modules: shares, the largest first.
    """

    name: str
    new_tokens: int
    past_tokens: int
    caches_as_inputs: bool
    seconds: float
    iterations: int
    operators: tuple[TimeShare, ...]
    modules: tuple[TimeShare, ...]


@dataclass(frozen=True)
class ProfileReport:
    """The profiles of one archive."""

    archive: str
    engine: str
    engine_version: str
    device: str
    phases: tuple[PhaseProfile, ...]

    def asdict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)


def profile_archive(
    archive: LocatedArchive,
    engine: TractWheel | TractCli,
    *,
    prefill: int,
    past: int,
    progress: Callable[[str], None],
) -> ProfileReport:
    """Profile a prefill and one decoding step.

    Args:
        archive: a language model with `S` new and `P` past tokens.
        engine: its device and its time limit count.
        prefill: tokens of the prompt.
        past: tokens in the cache at the decoding step. 0 has the engine keep the cache; otherwise it comes in as
            inputs, since engines profile single runs on fresh states.
        progress: told what begins.

    Raises:
        ArchiveError: it is damaged.
        OptionError: a size is out of range, or the archive has no `S`.
        EngineError: the engine is missing, has no such device, refuses the archive, or fails.
    """
    _check_sizes(archive, prefill, past)
    text = read_contents(archive.path).graph_text
    outline = read_outline(text)
    stateful = stateful_transforms(outline)
    if "S" not in outline.symbols:
        symbols = ", ".join(outline.symbols) or "none"
        raise OptionError(f"{archive.path}: no symbol S for the new tokens; its symbols are {symbols}.")
    if past and not stateful:
        raise OptionError(f"{archive.path}: keeps its caches itself: no past can be given.", "Use --past 0.")
    modules = module_paths(text)
    phases = []
    for name, new, old in (("prefill", prefill, 0), ("decode", 1, past)):
        progress(f"Profiling {name}")
        transforms = [BIND_BATCH] if old and "B" in outline.symbols else [] if old else stateful
        profile = engine.profile(archive.path, {"S": new, "P": old}, transforms=_spelled(transforms, engine))
        phases.append(_phase(name, new, old, profile, modules))
    return ProfileReport(str(archive.path), engine.name, engine.version, engine.device, tuple(phases))


def _check_sizes(archive: LocatedArchive, prefill: int, past: int) -> None:
    if prefill < 1 or past < 0:
        raise OptionError(f"prefill {prefill}, past {past}.", "Use 1 or more, and 0 or more.")
    if archive.max_positions is not None and max(prefill, past + 1) > archive.max_positions:
        raise OptionError(
            f"{archive.name} has {archive.max_positions} positions, the profile needs {max(prefill, past + 1)}.",
            "Ask for fewer tokens.",
        )


def _spelled(transforms: list[str], engine: TractWheel | TractCli) -> list[str]:
    """Return transforms in the engine's own form: the command writes parameters in parentheses, the wheel as JSON."""
    if isinstance(engine, TractWheel):
        return transforms
    return ['set_symbols(values: {"B": 1})' if transform == BIND_BATCH else transform for transform in transforms]


def _phase(name: str, new: int, old: int, profile: Profile, modules: Mapping[str, tuple[str, str]]) -> PhaseProfile:
    return PhaseProfile(
        name=name,
        new_tokens=new,
        past_tokens=old,
        caches_as_inputs=old > 0,
        seconds=profile.seconds,
        iterations=profile.iterations,
        operators=_shares(profile, lambda node: (node.operator, "")),
        modules=_shares(profile, lambda node: _module_of(node.name, modules)),
    )


def _shares(profile: Profile, group: Callable[[EngineNode], tuple[str, str]]) -> tuple[TimeShare, ...]:
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    count: defaultdict[tuple[str, str], int] = defaultdict(int)
    for node in profile.nodes:
        key = group(node)
        seconds[key] += node.seconds or 0.0
        count[key] += 1
    whole = sum(seconds.values())
    shares = (
        TimeShare(name, kind, count[name, kind], spent, spent / whole if whole else 0.0)
        for (name, kind), spent in seconds.items()
    )
    return tuple(sorted(shares, key=lambda share: share.seconds, reverse=True))


def _module_of(node: str, modules: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the module that a node comes from: tract appends to our identifiers, `q_proj.pack_b`, `view_1_2`."""
    name = node
    while name:
        if name in modules:
            path, kind = modules[name]
            return _LAYER_NUMBER.sub(".*", path), kind
        name = name[: max(name.rfind("."), name.rfind("_"), 0)]
    return ELSEWHERE, ""
