"""Where an archive's time goes: by operator of the engine, and by module of the model, beside what the machine can do.

In: an archive and the sizes of a prefill and of a decoding step. Out: `ProfileReport`, one `PhaseProfile` each.

The engine times nodes on fresh states only, where a past has to come in as inputs, which are copied. What users run keeps it as
state. So a decoding step is timed as a whole with the engine's state, and by node with inputs, without the copies; what the
nodes leave of the whole is what the state costs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from generic_export.devices import CPU
from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.engine import EngineNode, Profile
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.read.contents import StoredTensor, read_contents
from generic_export.read.expansion import engine_names
from generic_export.read.outline import GraphOutline, module_paths, read_outline
from t2n_llm.bench.compared_engines.archive import timed_turns
from t2n_llm.bench.machine_limits import MachineLimits, measured_limits
from t2n_llm.bench.traffic import bytes_read, cache_concats, consumers, flops
from t2n_llm.check.runner import BIND_BATCH
from t2n_llm.export.archive_lookup import LocatedArchive
from t2n_llm.graph.prefill import split_prompt
from t2n_llm.inspect.inspection import stateful_transforms

ELSEWHERE = "(not in one module)"
STATE = "(caches kept by the engine)"
ATTENTION_AND_STATE = "(attention, caches kept by the engine)"
_ATTENTION_OVER_INPUTS = {"FlashSDPA"}  # becomes `InPlaceKvSdpa` over a state
_STEPS = 8
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
        bytes: of weights and caches that they read.
        flops: that the engine counts.
    """

    name: str
    kind: str
    nodes: int
    seconds: float
    share: float
    bytes: float = 0.0
    flops: float = 0.0

    def share_of_limit(self, limits: MachineLimits) -> float:
        """Return how near to the machine's limit this is, 0 to 1: the time that it needs at the least, in the time it takes."""
        least = max(self.bytes / limits.bytes_per_second, self.flops / limits.flops_per_second)
        return least / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepTime:
    """A decoding step with the cache as the engine's state.

    Attributes:
        past: tokens in the cache.
        seconds: best of a few steps.
    """

    past: int
    seconds: float


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
        steps: whole steps by the number of past tokens, where the engine kept the caches.
    """

    name: str
    new_tokens: int
    past_tokens: int
    caches_as_inputs: bool
    seconds: float
    iterations: int
    operators: tuple[TimeShare, ...]
    modules: tuple[TimeShare, ...]
    steps: tuple[StepTime, ...] = ()

    @property
    def seconds_per_position(self) -> float | None:
        """What one more token in the cache adds to a step; None where that was not measured."""
        if len(self.steps) < 2:
            return None
        first, last = self.steps[0], self.steps[-1]
        return (last.seconds - first.seconds) / (last.past - first.past)


@dataclass(frozen=True)
class ProfileReport:
    """The profiles of one archive."""

    archive: str
    engine: str
    engine_version: str
    device: str
    phases: tuple[PhaseProfile, ...]
    limits: MachineLimits

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
        past: tokens in the cache at the decoding step. The pip-installed engine keeps it as state; the command profiles single
            runs on fresh states, to which it comes as inputs.
        progress: told what begins.

    Raises:
        ArchiveError: it is damaged.
        OptionError: a size is out of range, or the archive has no `S`.
        EngineError: the engine is missing, has no such device, refuses the archive, or fails.
    """
    _check_sizes(archive, prefill, past)
    contents = read_contents(archive.path)
    outline = read_outline(contents.graph_text)
    stateful = stateful_transforms(outline)
    if "S" not in outline.symbols:
        symbols = ", ".join(outline.symbols) or "none"
        raise OptionError(f"{archive.path}: no symbol S for new tokens was found; the symbols are {symbols}.")
    with_state = isinstance(engine, TractWheel) and engine.device == CPU
    if past and not stateful and not with_state:
        raise OptionError(
            f"{archive.path}: the engine keeps its caches, so their length cannot be set.",
            "Use --depth 0, or --engine wheel.",
        )
    text = contents.graph_text
    subject = _Subject(archive, outline, contents.tensors, module_paths(text), engine_names(text), stateful)
    progress("Profiling prefill")
    phases = [_plain_phase(subject, engine, "prefill", prefill, 0)]
    progress("Profiling decode")
    if past and isinstance(engine, TractWheel) and with_state:
        phases.append(_decoding_with_state(subject, engine, past))
    else:
        phases.append(_plain_phase(subject, engine, "decode", 1, past))
    progress("Measuring bandwidth and compute rate of this machine")
    limits = measured_limits()
    return ProfileReport(str(archive.path), engine.name, engine.version, engine.device, tuple(phases), limits)


@dataclass(frozen=True)
class _Subject:
    archive: LocatedArchive
    outline: GraphOutline
    tensors: tuple[StoredTensor, ...]
    modules: Mapping[str, tuple[str, str]]
    names: Mapping[str, str]  # what the engine calls nodes inside of fragments -> identifiers
    stateful: Sequence[str]


def _check_sizes(archive: LocatedArchive, prefill: int, past: int) -> None:
    if prefill < 1 or past < 0:
        raise OptionError(f"prefill {prefill}, past {past}.", "Use 1 or more, and 0 or more.")
    if archive.max_positions is not None and max(prefill, past + 1) > archive.max_positions:
        raise OptionError(
            f"{archive.name} has {archive.max_positions} positions, but the profile needs {max(prefill, past + 1)}.",
            "Request fewer tokens.",
        )


def _spelled(transforms: list[str], engine: TractWheel | TractCli) -> list[str]:
    """Return transforms in the engine's own form: the command writes parameters in parentheses, the wheel as JSON."""
    if isinstance(engine, TractWheel):
        return transforms
    return ['set_symbols(values: {"B": 1})' if transform == BIND_BATCH else transform for transform in transforms]


def _plain_phase(subject: _Subject, engine: TractWheel | TractCli, name: str, new: int, past: int) -> PhaseProfile:
    """Profile single runs, each on a fresh state; a past comes in as inputs."""
    profile = _profiled(subject, engine, new, past)
    parts = _parts(subject, profile.nodes, {"S": new, "P": past})
    whole = sum(part.seconds for part in parts)
    shares = _by_operator(parts, whole), _by_module(parts, whole)
    return PhaseProfile(name, new, past, past > 0, profile.seconds, profile.iterations, *shares)


def _profiled(subject: _Subject, engine: TractWheel | TractCli, new: int, past: int) -> Profile:
    symbols = subject.outline.symbols
    transforms = ([BIND_BATCH] if "B" in symbols else []) if past else list(subject.stateful)
    profile = engine.profile(subject.archive.path, {"S": new, "P": past}, transforms=_spelled(transforms, engine))
    return replace(profile, nodes=tuple(_known_by_identifier(node, subject.names) for node in profile.nodes))


def _known_by_identifier(node: EngineNode, names: Mapping[str, str]) -> EngineNode:
    """Return a node under the identifier that it comes from, where the engine calls it after a fragment too."""
    begin = _identifier(node.name, names)
    return node if begin is None else replace(node, name=f"{names[begin]}{node.name[len(begin) :]}")


# --- decoding with the engine's state --------------------------------------------------------------


def _decoding_with_state(subject: _Subject, engine: TractWheel, past: int) -> PhaseProfile:
    """Time whole steps with the engine's state, and divide the last of them among the nodes.

    An archive that keeps its caches itself takes no past as input: its nodes are timed without one.
    """
    steps = _timed_steps(subject, engine, past)
    profile = _profiled(subject, engine, 1, past if subject.stateful else 0)
    copies = cache_concats(subject.outline)
    nodes = [node for node in profile.nodes if node.name not in copies and node.operator not in _ATTENTION_OVER_INPUTS]
    attends = len(profile.nodes) - len(nodes) == len(copies) > 0
    whole = steps[-1].seconds
    # The nodes may have been timed while the machine was busier: their proportions hold, the whole is what it is.
    scale = min(1.0, whole / (sum(map(_seconds, nodes)) or 1.0))
    parts = _parts(subject, [replace(node, seconds=_seconds(node) * scale) for node in nodes], {"S": 1, "P": past})
    left = STATE if attends else ATTENTION_AND_STATE
    parts.append(_Part(left, (left, ""), max(whole - sum(part.seconds for part in parts), 0.0), 0.0, 0.0))
    shares = _by_operator(parts, whole), _by_module(parts, whole)
    return PhaseProfile("decode", 1, past, False, whole, profile.iterations, *shares, steps)


def _timed_steps(subject: _Subject, engine: TractWheel, past: int) -> tuple[StepTime, ...]:
    """Time steps behind a quarter, a half and the whole of the past, each on a state of its own."""
    points = sorted({max(past // 4, 1), max(past // 2, 1), past})
    with engine.load(subject.archive.path, transforms=subject.stateful) as model:
        return tuple(StepTime(point, _step_seconds(model, subject.archive, point)) for point in points)


def _step_seconds(model: WheelModel, archive: LocatedArchive, past: int) -> float:
    room = _STEPS if archive.max_positions is None else min(_STEPS, archive.max_positions - past)
    pieces = [*split_prompt([0] * past, archive.prefill), *[[0]] * room]
    seconds = timed_turns(model, [[np.array([piece], np.int64)] for piece in pieces])
    return min(seconds[-room:])


# --- sums over nodes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A node with what it reads and computes, under the names that tables show."""

    operator: str
    module: tuple[str, str]
    seconds: float
    bytes: float
    flops: float


def _parts(subject: _Subject, nodes: Sequence[EngineNode], sizes: Mapping[str, int]) -> list[_Part]:
    """Return what tables are made of."""
    sizes = {"B": 1, **sizes}
    read = _bytes_by_node(subject, nodes, sizes)
    return [
        _Part(
            node.operator,
            subject.modules.get(_identifier(node.name, subject.modules) or "", (ELSEWHERE, "")),
            _seconds(node),
            read.get(place, 0.0),
            flops(node, sizes),
        )
        for place, node in enumerate(nodes)
    ]


def _bytes_by_node(subject: _Subject, nodes: Sequence[EngineNode], sizes: Mapping[str, int]) -> dict[int, float]:
    """Return what nodes read, by their places; what an identifier reads belongs to the slowest of its nodes.

    The engine joins a product with what follows it, and the node then bears the later name, while what packs its operands keeps
    the earlier one: so nodes that compute come first.
    """
    readers = consumers(subject.outline)
    names = [_identifier(node.name, readers) for node in nodes]
    computing = _slowest(names, [_seconds(node) if flops(node, sizes) else None for node in nodes])
    anything = _slowest(names, [_seconds(node) for node in nodes])
    found: defaultdict[int, float] = defaultdict(float)
    for source, size in bytes_read(subject.outline, subject.tensors, sizes).items():
        place = _first_reader(source, readers, computing)
        place = _first_reader(source, readers, anything) if place is None else place
        if place is not None:
            found[place] += size
    return found


def _slowest(names: Sequence[str | None], seconds: Sequence[float | None]) -> dict[str, int]:
    """Return, by name, the place of the slowest node; nodes without a time do not count."""
    found: dict[str, int] = {}
    for place, (name, spent) in enumerate(zip(names, seconds, strict=True)):
        if name is not None and spent is not None and spent >= (seconds[found.setdefault(name, place)] or 0.0):
            found[name] = place
    return found


def _first_reader(name: str, readers: Mapping[str, str], places: Mapping[str, int]) -> int | None:
    """Return the place of a name, or of what reads it first; None where neither has one."""
    while name and name not in places:
        name = readers.get(name, "")
    return places.get(name)


def _seconds(node: EngineNode) -> float:
    return node.seconds or 0.0


def _by_operator(parts: Sequence[_Part], whole: float) -> tuple[TimeShare, ...]:
    return _shares(parts, lambda part: (part.operator, ""), whole)


def _by_module(parts: Sequence[_Part], whole: float) -> tuple[TimeShare, ...]:
    return _shares(parts, lambda part: (_LAYER_NUMBER.sub(".*", part.module[0]), part.module[1]), whole)


def _shares(parts: Sequence[_Part], name: Callable[[_Part], tuple[str, str]], whole: float) -> tuple[TimeShare, ...]:
    groups: defaultdict[tuple[str, str], list[_Part]] = defaultdict(list)
    for part in parts:
        groups[name(part)].append(part)
    shares = (_share(*key, group, whole) for key, group in groups.items())
    return tuple(sorted(shares, key=lambda share: share.seconds, reverse=True))


def _share(name: str, kind: str, parts: Sequence[_Part], whole: float) -> TimeShare:
    seconds = sum(part.seconds for part in parts)
    share = seconds / whole if whole else 0.0
    read, computed = sum(part.bytes for part in parts), sum(part.flops for part in parts)
    return TimeShare(name, kind, len(parts), seconds, share, read, computed)


def _identifier(node: str, known: Mapping[str, object]) -> str | None:
    """Return the identifier that a node comes from: tract appends to ours, `q_proj.pack_b`, `view_1_2`."""
    name = node
    while name and name not in known:
        name = name[: max(name.rfind("."), name.rfind("_"), 0)]
    return name or None
