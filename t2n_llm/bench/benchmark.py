"""`bench`: the speed of archives, beside each other and beside other engines.

In: archives, an engine, a `ComparisonPlan`. Out: `SpeedComparison`. The wheel is measured by `compare`; the tract command
measures itself, with its `llm-bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.bench.compared_engines import compared_engine
from t2n_llm.bench.compared_engines.archive import ArchiveContender
from t2n_llm.bench.compared_engines.protocol import Contender, SharedModel
from t2n_llm.bench.comparison import ComparisonPlan, Point, Samples, SpeedComparison, SpeedRun, compare
from t2n_llm.export.archive_lookup import LocatedArchive, distinct_names
from t2n_llm.source.reference import SourceRef

PREFILL_TOKENS = 512
DECODE_TOKENS = 128
_LLM_BENCH = ((PREFILL_TOKENS,), (0,), DECODE_TOKENS)  # llm-bench of tract 0.23.9 ignores other sizes

Progress = Callable[[str], None]


def bench_archives(
    archives: Sequence[LocatedArchive],
    engine: TractWheel | TractCli,
    plan: ComparisonPlan,
    progress: Progress,
    *,
    against: Sequence[str] = (),
    checkpoint: str | None = None,
) -> SpeedComparison:
    """Measure archives and other engines against each other; the engines run the first archive's model.

    Args:
        archives: at least one; the first is what the others are compared with.
        engine: its device and its time limit count.
        plan: what to measure.
        progress: told what begins.
        against: other engines, as `--against` names them (`llama.cpp:FILE.gguf`).
        checkpoint: hub id or folder of the first archive's model; None for the one that it records.

    Raises:
        ArchiveError: one is damaged. All are looked at before the first is measured.
        OptionError: the plan does not fit the engine, or an engine or its variant is unknown or runs on the CPU only.
        T2NError: as `compare`.
    """
    names = distinct_names(archives)
    contenders = [
        ArchiveContender(archive, name, engine.timeout_seconds, engine.device)
        for archive, name in zip(archives, names, strict=True)
    ]
    if isinstance(engine, TractCli):
        if against:
            raise OptionError("--against measures tract from pip only.", "Omit --engine and --tract.")
        return _bench_command(contenders, engine, plan, progress)
    source = SourceRef(checkpoint) if checkpoint else None
    subject = SharedModel(archives[0], source, engine.timeout_seconds, engine.device)
    others: list[Contender] = [compared_engine(text, subject) for text in against]
    vocabulary = min((archive.vocab_size or 1 for archive in archives), default=1)
    return compare([*contenders, *others], plan, vocabulary, progress)


def _bench_command(
    contenders: Sequence[ArchiveContender], engine: TractCli, plan: ComparisonPlan, progress: Progress
) -> SpeedComparison:
    """Let the tract command measure archives, one after another.

    Raises:
        OptionError: the plan has other sizes than its `llm-bench`.
    """
    if (plan.prefills, plan.depths, plan.decode) != _LLM_BENCH:
        raise OptionError(
            f"tract's llm-bench measures {PREFILL_TOKENS} and {DECODE_TOKENS} tokens from an empty cache only.",
            "Omit the sizes, or use --engine wheel.",
        )
    archives = {each.name: each.asdict() for each in contenders}
    return SpeedComparison(plan, tuple(_command_run(each, engine, plan, progress) for each in contenders), archives)


def _command_run(contender: ArchiveContender, engine: TractCli, plan: ComparisonPlan, progress: Progress) -> SpeedRun:
    progress(f"Measuring {contender.name}")
    runs = [engine.llm_bench(contender.archive.path, warmup_runs=plan.warmup) for _ in range(plan.repeats)]
    return SpeedRun(
        name=contender.name,
        version=f"tract {engine.version} (command, {engine.device})",
        threads=engine.threads,
        load_seconds=Samples(tuple(run.load + run.optimise for run in runs)).median,
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
        points=(
            Point("prefill", PREFILL_TOKENS, Samples(tuple(run.prefill for run in runs))),
            Point("decode", 0, Samples(tuple(run.decode for run in runs))),
        ),
    )


__all__ = ["DECODE_TOKENS", "PREFILL_TOKENS", "bench_archives"]
