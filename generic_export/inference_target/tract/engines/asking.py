"""One question to either engine: an archive and its inputs in, the outputs in order out.

In: an engine, an archive, arrays. Out: arrays; an engine that refuses, dies or hangs is an `EngineError`.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from generic_export.compare.comparison import ToleranceLimits, TractCheckTolerance
from generic_export.errors import EngineRunError
from generic_export.inference_target.tract.engines.cli import CommandOptions, TractCli, options_within
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.npz_bundle import write_bundle
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.reading import read_graph_text, signature_of


def ask_wheel(
    engine: TractWheel, archive: Path, inputs: Sequence[np.ndarray], *, registries: Sequence[str]
) -> list[np.ndarray]:
    """Load an archive in the pip-installed engine, run it once and close it."""
    with engine.load(archive, registries=registries) as model:
        return model.run(list(inputs))


def ask_cli(
    engine: TractCli, archive: Path, inputs: Sequence[np.ndarray], *, registries: Sequence[str]
) -> list[np.ndarray]:
    """Run an archive once with the `tract` command; f16 goes in and comes out as f32.

    Raises:
        EngineRunError: wrong number of inputs, or an output that the command does not give back.
    """
    signature = signature_of(read_graph_text(archive))
    if len(inputs) != len(signature.inputs):
        raise EngineRunError(f"{archive}: takes {len(signature.inputs)} inputs, got {len(inputs)}.")
    with tempfile.TemporaryDirectory(prefix="tract-inputs-") as folder:
        bundle = Path(folder) / "inputs.npz"
        write_bundle(bundle, [dict(zip(signature.inputs, inputs, strict=True))], {})
        options = CommandOptions(llm=False, registries=registries, allow_float_casts=_any_half(inputs))
        answers = engine.run_bundle(archive, bundle, options)
    missing = [name for name in signature.outputs if name not in answers]
    if missing:
        raise EngineRunError(f"{archive}: the tract command gives no output {missing[0]!r}, only {', '.join(answers)}.")
    return [answers[name] for name in signature.outputs]


def assert_io_cmd_str(
    archive: str | Path,
    bundle: str | Path,
    *,
    tolerance: TractCheckTolerance | ToleranceLimits = TractCheckTolerance.APPROXIMATE,
    registries: Sequence[str] = DEFAULT_REGISTRIES,
    binary: str | Path = "tract",
    half: bool = False,
) -> str:
    """Return a shell command that repeats a check. Nothing is run, and no engine needs to be installed.

    Args:
        archive: folder, `.tar` or `.tgz`.
        bundle: npz file with inputs and expected outputs, as `write_bundle` writes it.
        tolerance: a level or numeric limits.
        registries: operator registries to enable besides tract's core.
        binary: name or path of the command.
        half: inputs or outputs are f16, which the npz file stores as f32.
    """
    options = options_within(tolerance, allow_float_casts=half, registries=registries)
    model = [str(binary), str(archive), *options.model_flags(), "-O", "run"]
    data = ["--input-from-npz", str(bundle), *options.run_flags(), "--assert-output-bundle", str(bundle)]
    return shlex.join([*model, *data, *options.judge_flags()])


def _any_half(arrays: Sequence[np.ndarray]) -> bool:
    return any(array.dtype == np.float16 for array in arrays)


__all__ = ["ask_cli", "ask_wheel", "assert_io_cmd_str"]
