"""The one place that chooses an engine."""

from __future__ import annotations

import logging

from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.options import EngineOptions

logger = logging.getLogger(__name__)


def chosen_engine(options: EngineOptions | None = None) -> TractWheel | TractCli:
    """Return the engine that is asked for; the pip-installed one by default.

    Raises:
        EngineMissingError: it is not installed.
    """
    options = options or EngineOptions()
    if options.uses_command:
        return TractCli(options.tract_binary, device=options.device, threads=options.threads)
    return TractWheel(device=options.device)


def require_engine(options: EngineOptions) -> None:
    """Look for an engine, and for the device that it is to use, before the work and not after it.

    Raises:
        EngineMissingError, DeviceMissingError: it is not here.
    """
    engine = chosen_engine(options)
    logger.info("checking with %s %s", engine.name, engine.version)
    if isinstance(engine, TractWheel):
        engine.require_device()
