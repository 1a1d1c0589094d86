"""A run of the zoo: which cells, in which order, by which engine; verdicts as lines of a file while they come."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from generic_export.errors import MissingExtraError, OptionError
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo.history import write_results
from t2n_llm.zoo.local import Host, HostOptions, run_local
from t2n_llm.zoo.suites.case import HALF
from t2n_llm.zoo.suites.registry import cases_of
from t2n_llm.zoo.tasks import architectures
from t2n_llm.zoo.verdict import COLUMNS, CRASHED, DTYPES, FULL_SIZE, Cell, CellVerdict

ENGINES = ("local", "ray")

# The families that people use most come first: `limit` takes from the front.
BEST_KNOWN = (
    *("llama", "qwen3", "mistral", "gemma3_text", "gpt2", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
    *("mamba2", "qwen3_next", "gemma2", "qwen2", "olmo2", "smollm3", "gpt_neox", "falcon_h1", "lfm2", "granite"),
    *("glm4", "cohere2", "llama4_text", "bloom", "opt", "phi", "gptj", "falcon", "stablelm", "starcoder2"),
    *("olmoe", "jamba", "mamba", "rwkv", "gemma", "gemma3n_text", "gemma4_text", "qwen2_moe", "qwen3_5_text", "phimoe"),
    *("deepseek_v2", "granitemoe", "exaone4", "ministral", "nemotron", "minimax", "mpt", "codegen", "gpt_bigcode"),
    *("gpt_neo", "recurrent_gemma", "zamba2", "bamba", "dbrx", "olmo", "olmo3", "glm", "cohere", "bert", "bart"),
)


# The same for what other tasks have beside those.
BEST_KNOWN_ELSEWHERE = (
    *("t5", "whisper", "vit", "wav2vec2", "clip", "roberta", "distilbert", "resnet", "detr", "segformer", "marian"),
    *("m2m_100", "pegasus", "mbart", "mt5", "deberta-v2", "modernbert", "electra", "albert", "mpnet", "xlm-roberta"),
    *("siglip", "swin", "convnext", "dinov2", "beit", "sam", "hubert", "wavlm", "audio-spectrogram-transformer"),
    *("depth_anything", "dpt", "rt_detr", "yolos", "videomae", "moonshine", "vision-encoder-decoder", "patchtst"),
)

_TRIES = 2
"""A node that is lost takes its cell along; the cell is tried once more. A verdict is never tried again."""


@dataclass(frozen=True)
class RunOptions:
    """What to run, and how.

    Attributes:
        only: shell patterns on model types; empty for all.
        tasks: what is made of the architectures.
        suites: libraries of modules, beside the tasks; their cells are `dynamic` and `static` in f32, `half` in f16.
        dtypes: element types, or `full-size`, which text generation alone has.
        models: real checkpoints (hub ids or folders), instead of tiny random ones.
        limit: at most so many architectures of a task, the best known first; None for all.
        shard: (i, n): the i-th of n parts, counted from 1.
        engine: `local` or `ray`.
        ray_address: cluster to use; None for the one that Ray finds, or a new one on this machine.
        jobs: cells at the same time.
        timeout_seconds, max_rss_bytes: limits of one cell.
        decode_steps, seed: see `Cell`.
        hosts: how the processes are started.
    """

    only: tuple[str, ...] = ()
    tasks: tuple[str, ...] = (TEXT_GENERATION,)
    suites: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("f32",)
    models: tuple[str, ...] = ()
    limit: int | None = None
    shard: tuple[int, int] = (1, 1)
    engine: str = "local"
    ray_address: str | None = None
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    timeout_seconds: float = 300.0
    max_rss_bytes: int = 4 << 30
    decode_steps: int = 16
    seed: int = 0
    hosts: HostOptions = field(default_factory=HostOptions)

    def __post_init__(self) -> None:
        unknown = [dtype for dtype in self.dtypes if dtype not in COLUMNS]
        if unknown:
            raise OptionError(f"element type {unknown[0]!r} is unknown.", f"Use {', '.join(DTYPES)}.")
        if self.models and FULL_SIZE in self.dtypes:
            raise OptionError(
                "real checkpoints have no column of default configs.", "Leave --models or --full-size out."
            )
        if self.suites and not {"f32", "f16"} & set(self.dtypes):
            raise OptionError(
                f"modules of suites have no {', '.join(self.dtypes)}.",
                "Use --dtype f32 (dynamic, static) or f16 (half).",
            )
        if FULL_SIZE in self.dtypes and self.tasks != (TEXT_GENERATION,):
            raise OptionError(
                f"default configs are captured for {TEXT_GENERATION} alone.", "Leave --task or --full-size out."
            )
        if self.models and self.suites:
            raise OptionError("real checkpoints are no suite of modules.", "Leave --models or --suite out.")
        if self.models and len(self.tasks) > 1:
            raise OptionError("real checkpoints have one task.", "Name one with --task.")
        if self.engine not in ENGINES:
            raise OptionError(f"engine {self.engine!r} is unknown.", f"Use {' or '.join(ENGINES)}.")
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise OptionError(f"shard {part}/{parts} does not exist.", f"Use 1/{parts} to {parts}/{parts}.")


def plan_cells(options: RunOptions, known: Mapping[str, Iterable[str]]) -> list[Cell]:
    """Return the cells of a run, in a fixed order.

    Args:
        options: what to run.
        known: the model types that there are, by task; and the cases, by suite.

    Raises:
        OptionError: a pattern names no architecture.
    """
    base = Cell(
        "",
        decode_steps=options.decode_steps,
        seed=options.seed,
        timeout_seconds=options.timeout_seconds,
        max_rss_bytes=options.max_rss_bytes,
    )
    if options.models:
        rows = [_real(replace(base, task=options.tasks[0]), model) for model in options.models[: options.limit]]
    else:
        chosen = _chosen(options, {task: list(known[task]) for task in (*options.tasks, *options.suites)})
        rows = [replace(base, task=task, architecture=name) for task, names in chosen.items() for name in names]
    cells = [replace(row, dtype=column) for row in rows for column in _columns(row, options)]
    part, parts = options.shard
    return [cell for cell in cells if shard_of(cell.architecture, parts) == part]


def _columns(row: Cell, options: RunOptions) -> tuple[str, ...]:
    if row.task not in options.suites:
        return options.dtypes
    single = cases_of(row.task)[row.architecture].columns if "f32" in options.dtypes else ()
    return (*single, HALF) if "f16" in options.dtypes else single


def _real(base: Cell, line: str) -> Cell:
    model, _, revision = line.partition("@") if not Path(line).exists() else (line, "", "")
    return replace(base, architecture=line, model=model, revision=revision or None)


def shard_of(architecture: str, parts: int) -> int:
    """Return the part, from 1, that an architecture belongs to; it does not move when others come or go."""
    return zlib.crc32(architecture.encode()) % parts + 1


def _chosen(options: RunOptions, known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the model types of each task that are wanted, at most `limit` of each, the best known first."""
    everyone = [name for names in known.values() for name in names]
    for pattern in options.only:
        if not any(fnmatchcase(name, pattern) for name in everyone):
            raise OptionError(f"no architecture is called {pattern!r}.", "t2n-llm zoo list shows their names.")
    patterns = options.only or ("*",)
    wanted = {
        task: [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        for task, names in known.items()
    }
    return {task: _ranked(names, task)[: options.limit] for task, names in wanted.items()}


def _ranked(names: list[str], task: str) -> list[str]:
    best = BEST_KNOWN if task == TEXT_GENERATION else (*BEST_KNOWN, *BEST_KNOWN_ELSEWHERE)
    rank = {name: position for position, name in enumerate(best)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def parse_shard(text: str) -> tuple[int, int]:
    """Read `I/N`.

    Raises:
        OptionError: it is something else.
    """
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit()):
        raise OptionError(f"shard {text!r} is not I/N.", "Such as 2/8: the second of eight parts.")
    return int(part), int(parts)


def read_models(path: Path) -> tuple[str, ...]:
    """Return the checkpoints that a file names: a hub id, `ID@REVISION` or a folder a line; # begins a comment.

    Raises:
        OptionError: it cannot be read, or names none.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: {error}", "Give a text file with one model a line.") from error
    if not any(lines):
        raise OptionError(f"{path}: it names no model.", "Write one hub id or folder a line.")
    return tuple(dict.fromkeys(line for line in lines if line))


def local_hosts(fresh: bool) -> HostOptions:
    """Return how hosts are started: a new interpreter for each cell where that is asked for, or forks are not safe."""
    return replace(HostOptions(), fresh=True) if fresh else HostOptions()


def run_cells(cells: Sequence[Cell], options: RunOptions) -> Iterator[CellVerdict]:
    """Yield the verdicts of cells as they come."""
    if options.engine == "ray":
        return run_on_ray(cells, options.jobs, options.hosts, options.ray_address)
    return run_local(cells, options.jobs, options.hosts)


def run_zoo(
    options: RunOptions,
    results: Path | None = None,
    on_verdict: Callable[[CellVerdict], None] = lambda _: None,
) -> list[CellVerdict]:
    """Run, and write each verdict as a line as soon as it is known.

    Args:
        options: what to run.
        results: file of JSON lines; what it held is replaced.
        on_verdict: told each verdict.

    Returns:
        The verdicts, in the order of the cells.
    """
    known = {} if options.models else {task: architectures(task) for task in options.tasks}
    cells = plan_cells(options, known | {suite: cases_of(suite) for suite in options.suites})
    found: dict[str, CellVerdict] = {}
    if results is not None:
        write_results(results, [])
    for verdict in run_cells(cells, options):
        found[verdict.key] = verdict
        if results is not None:
            with results.open("a", encoding="utf-8") as file:
                file.write(verdict.to_json() + "\n")
        on_verdict(verdict)
    return [found[cell.key] for cell in cells]


def run_on_ray(
    cells: Sequence[Cell], jobs: int, options: HostOptions, address: str | None = None
) -> Iterator[CellVerdict]:
    """Yield verdicts as they come.

    Args:
        cells: what to try, in the order in which they are begun.
        jobs: actors at the same time, one CPU each.
        options: how the hosts are started.
        address: of the cluster; None takes the one that is there (RAY_ADDRESS), else starts one on this machine.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        paths = os.pathsep.join(path for path in sys.path if path)
        ray.init(
            address=address,
            log_to_driver=False,
            include_dashboard=False,
            configure_logging=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )
    try:
        yield from _spread(ray, cells, jobs, options)
    finally:
        if started:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("Ray is not installed.", "pip install 't2n-llm[ray]', or use --engine local.") from None
    return ray


def _spread(ray: Any, cells: Sequence[Cell], jobs: int, options: HostOptions) -> Iterator[CellVerdict]:
    remote = ray.remote(num_cpus=1, max_restarts=0)(Host)
    waiting = [(cell, 1) for cell in cells]
    idle = [remote.remote(options) for _ in range(max(1, min(jobs, len(cells))))]
    running: dict[Any, tuple[Any, Cell, int]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                (cell, tries), actor = waiting.pop(0), idle.pop()
                running[actor.run.remote(cell)] = (actor, cell, tries)
            (answer,), _ = ray.wait(list(running), num_returns=1)
            actor, cell, tries = running.pop(answer)
            try:
                yield ray.get(answer)
                idle.append(actor)
            except ray.exceptions.RayError as error:  # the node or the actor is lost
                idle.append(remote.remote(options))
                if tries < _TRIES:
                    waiting.insert(0, (cell, tries + 1))
                else:
                    message = " ".join(str(error).split())[:300]
                    yield cell.ended(CRASHED, "node", error=type(error).__name__, message=message)
    finally:
        _close(ray, [*idle, *(actor for actor, _, _ in running.values())])


def _close(ray: Any, actors: Sequence[Any]) -> None:
    """End the hosts of actors that are idle, then the actors; one that is busy ends with its actor."""
    ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=5.0)
    for actor in actors:
        ray.kill(actor)
