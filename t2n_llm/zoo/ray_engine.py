"""Cells on a Ray cluster: the same hosts as on one machine, one in each actor.

Ray only places the work; limits, kills and verdicts are the host's. Needs the extra: pip install t2n-llm[ray].
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from generic_export.errors import MissingExtraError
from t2n_llm.zoo.local import Host, HostOptions
from t2n_llm.zoo.verdict import CRASHED, Cell, CellVerdict

_TRIES = 2
"""A node that is lost takes its cell along; the cell is tried once more. A verdict is never tried again."""


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
        raise MissingExtraError(
            "Ray is not installed.", "Run pip install 't2n-llm[ray]', or use --runner local."
        ) from None
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
