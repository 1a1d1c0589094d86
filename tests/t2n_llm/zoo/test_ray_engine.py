"""The same cells on a local two-worker Ray cluster: the same result lines as on this machine without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from generic_export.errors import MissingExtraError
from t2n_llm.zoo.local import HostOptions, run_local
from t2n_llm.zoo.run import run_on_ray
from t2n_llm.zoo.verdict import CRASHED, Cell, CellVerdict

FAKE = HostOptions("tests.t2n_llm.zoo.fake_cells")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray with two workers on this machine."""
    ray = pytest.importorskip("ray", reason="the extra t2n-llm[ray] is not installed")
    paths = os.pathsep.join(path for path in sys.path if path)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield ray
    ray.shutdown()


def lines(verdicts: Iterator[CellVerdict]) -> list[str]:
    """Return result lines without what differs from run to run."""
    return sorted(replace(verdict, seconds=0.0, peak_rss_bytes=0).to_json() for verdict in verdicts)


def test_a_two_worker_cluster_gives_the_same_lines(cluster: Any) -> None:
    cells = [Cell(name) for name in ("good", "killed", "noise", "garbage", "absent", "abort", "another good")]
    cells += [Cell("hang", timeout_seconds=1.5), Cell("good", "f16")]
    assert lines(run_on_ray(cells, 2, FAKE)) == lines(run_local(cells, 2, FAKE))


@pytest.mark.nightly
def test_a_real_cell_on_the_cluster(cluster: Any) -> None:
    (verdict,) = run_on_ray([Cell("opt", decode_steps=4)], 1, HostOptions())
    assert verdict.outcome == "right", verdict
    assert [check.passed for check in verdict.checks.values()] == [True] * 4


def test_a_worker_that_is_lost_is_replaced(cluster: Any) -> None:
    """A cell that takes its whole worker along is tried twice, then it is a verdict; the others run."""
    found = {verdict.architecture: verdict for verdict in run_on_ray([Cell("kill-host"), Cell("good")], 1, FAKE)}
    assert found["good"].outcome == "right"
    assert found["kill-host"].outcome == CRASHED


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"t2n-llm\[ray\]"):
        list(run_on_ray([Cell("good")], 1, FAKE))
