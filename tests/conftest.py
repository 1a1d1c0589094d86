"""Shared by all tests: one PyTorch thread (the pytest workers are the parallelism), quiet libraries, reused engine processes."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from generic_export.inference_target.tract.engines.wheel_process import reuse_workers
from tests.shared_folders import SharedExport, SharedFolders

torch.set_num_threads(1)
# pytest adds a handler to each logger that does not propagate; with one, PyTorch computes a trace of every capture.
_trace = logging.getLogger("torch.__trace")
_trace.propagate = True
_trace.handlers.clear()
# A job that a shell started in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run the tests marked nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave nightly tests out, unless they are asked for."""
    if config.getoption("--nightly"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules: they are half a million objects that stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _reused_engine_workers() -> Iterator[None]:
    """Let the engine process of a closed model load the next one, as the zoo and `diagnose` do."""
    with reuse_workers():
        yield


@pytest.fixture
def new_engine_workers() -> Iterator[None]:
    """Give every model that the test loads an engine process of its own."""
    with reuse_workers(False):
        yield


@pytest.fixture(scope="session")
def shared_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFolders]:
    """Folders made once for all pytest workers."""
    folders = SharedFolders.of_run(tmp_path_factory)
    yield folders
    folders.require_unchanged()


@pytest.fixture(scope="session")
def shared_export(shared_folders: SharedFolders) -> SharedExport:
    """Exports made once for all pytest workers."""
    return SharedExport(shared_folders)
