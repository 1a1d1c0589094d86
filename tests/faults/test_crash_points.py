"""An export that is killed, at every step that it does to the disk: there is a whole export or none, and the next one cleans up.

Python announces each step (`sys.audit`) before it is done; a process that was forked for it dies there, without a last word.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from generic_export.errors import T2NError
from generic_export.files import exchange
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastReport
from generic_export.weights.source import TensorSource
from generic_export.write.document import plan_document
from t2n_llm.export import folder as export_folder
from t2n_llm.export.folder import check_free, read_manifest, recover
from t2n_llm.export.manifest import stored_tensors
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.output import ExportFolder
from t2n_llm.export.verify import verify_export
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.storage import finish_model
from t2n_llm.reporter import LogReporter
from t2n_llm.source.hub import ModelSource, open_source
from t2n_llm.tasks.text_generation import TextGeneration
from tests.families import FAMILIES, save_tiny_model
from tests.load_script import load_script

faults = load_script("faults")


class Made:
    """A model whose graph is there: what is left of an export is what it does to the disk."""

    def __init__(self, model: Path) -> None:
        self.source: ModelSource = open_source(str(model), require_tokenizer=False)
        self.checkpoint: Checkpoint = self.source.checkpoint()
        (captured,) = TextGeneration().graphs(self.source, GraphOptions())
        part = finish_model(captured.with_parameters(self.checkpoint), GraphOptions()).with_sources(CastReport())
        self.graph: NnefGraph = part.document
        self.described = TextGeneration().interface(self.source, (part,), GraphOptions())
        self.sources: dict[str, TensorSource] = dict(part.sources)

    def export(self, target: Path, archive: str, *, force: bool, resume: bool, marker: str) -> None:
        """Export as the pipeline does, from the writer to the rename."""
        recover(target)
        check_free(target, force)
        options = ExportOptions(archive=archive, force=force, resume=resume, check=False)
        folder = ExportFolder(self.source, target, options, LogReporter())
        plan = plan_document(self.graph, self.sources)
        with folder.staging({"model": plan}) as staging:
            written = folder.write_archive(staging, self.graph, self.sources, folder.identity(self.checkpoint))
            folder.copy_companions(staging)
            described = {"source": {}, "archive": written.path.name, "format": 1, "versions": {"tract": "0.23.9"}}
            described |= self.described | {"tensors": stored_tensors(written), "marker": marker}
            folder.complete(staging, {"model": written}, None, (), described, self.checkpoint.held)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def small() -> Any:
        config = FAMILIES["llama"]()
        config.num_hidden_layers = 1
        return config

    folder = tmp_path_factory.mktemp("models") / "one-layer"
    return Made(save_tiny_model("llama", folder, configs={"llama": small}))


@pytest.fixture(scope="module")
def earlier(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export that is in the place of the next one."""
    target = tmp_path_factory.mktemp("earlier") / "x"
    made.export(target, "tar", force=False, resume=False, marker="old")
    return target


def put(earlier: Path, target: Path) -> None:
    """Put a copy of an earlier export under a name, in the place of what is there."""
    export_folder._remove(target)
    shutil.copytree(earlier, target)


def ended(fault: Callable[[], None], work: Callable[[], None]) -> int:
    """Do the work in a fork that a fault was made for; return its exit code: 2 for an error of ours, 1 for any other."""
    child = os.fork()
    if not child:
        try:
            fault()
            work()
        except T2NError:
            os._exit(2)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Do the work in a fork that dies before its n-th step; return whether it came that far."""
    code = ended(lambda: faults.die_at(step), work)
    assert code in (0, faults.KILLED)
    return bool(code == faults.KILLED)


def crashes(work: Callable[[], None]) -> Iterator[int]:
    """Yield after each crash, until the work is done without one."""
    for step in count():
        if not killed_at(step, work):
            assert step > 10
            return
        yield step


def marker_of(target: Path) -> str | None:
    """Return which export lies there, whole; None when there is nothing."""
    if not target.exists():
        return None
    assert verify_export(target).passed
    return str(read_manifest(target)["marker"])


@pytest.mark.parametrize(
    ("archive", "force", "resume"),
    [
        *(("tar", True, False), ("dir", True, True)),
        *(
            pytest.param(*options, marks=pytest.mark.nightly)
            for options in (
                *(("tar", False, False), ("tar", False, True), ("tar", True, True)),
                *(("tgz", True, False), ("tgz", False, True)),
            )
        ),
    ],
)
def test_every_crash_point(archive: str, force: bool, resume: bool, made: Made, earlier: Path, tmp_path: Path) -> None:
    target = tmp_path / "exports" / "x"
    if force:
        put(earlier, target)
    seen = set()

    def export() -> None:
        made.export(target, archive, force=force, resume=resume, marker="new")

    for step in crashes(export):
        marker = marker_of(target)
        seen.add(marker)
        assert marker in (("old", "new") if force else (None, "new")), step
        if archive == "dir" and marker != "new" and step % 5:  # a file after the other, all alike
            continue
        made.export(target, archive, force=True, resume=resume, marker="next")
        assert os.listdir(target.parent) == ["x"], step  # what was left behind is not in the way of the next, and goes
        assert marker_of(target) == "next"
        if force:
            put(earlier, target)
        else:
            export_folder._remove(target)
    assert seen == ({"old", "new"} if force else {None, "new"})
    assert marker_of(target) == "new" and os.listdir(target.parent) == ["x"]


@pytest.mark.parametrize(
    ("number", "lasting"), [pytest.param(errno.EROFS, False, marks=pytest.mark.nightly), (errno.ENOSPC, True)]
)
def test_every_step_that_fails(number: int, lasting: bool, made: Made, earlier: Path, tmp_path: Path) -> None:
    """Whatever the system refuses: an error of ours and the earlier export, or a whole new one."""
    target = tmp_path / "exports" / "x"
    put(earlier, target)
    codes = []
    for step in range(45):
        codes.append(
            ended(
                lambda step=step: faults.fail_at(step, number, target.parent, lasting=lasting),  # type: ignore[misc]
                lambda: made.export(target, "tar", force=True, resume=False, marker="new"),
            )
        )
        assert codes[-1] in (0, 2), step
        assert marker_of(target) == ("old" if codes[-1] else "new"), step
        if codes[-1] and step % 5:
            continue
        made.export(target, "tar", force=True, resume=False, marker="old")
        assert os.listdir(target.parent) == ["x"], step
    assert codes.count(2) > 5 and codes[-1] == 0  # the last step was behind the end


def test_where_the_system_cannot_exchange(
    made: Made, earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is free for a moment; who comes next finds the earlier export back in its place."""
    monkeypatch.setattr(export_folder, "exchange", lambda *_: False)
    target = tmp_path / "exports" / "x"
    put(earlier, target)
    recovered = 0
    for step in crashes(lambda: made.export(target, "tar", force=True, resume=False, marker="new")):
        if marker_of(target) is None:
            assert recover(target)
            recovered += 1
            assert marker_of(target) == "old", step
        elif marker_of(target) == "new":
            made.export(target, "tar", force=True, resume=False, marker="next")
            assert os.listdir(target.parent) == ["x"]
            put(earlier, target)
    assert recovered
    assert os.listdir(target.parent) == ["x"]


def test_an_exchange(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system has no exchange")
    assert [os.listdir(tmp_path / name) for name in "ab"] == [["b"], ["a"]]
    with pytest.raises(OSError):
        exchange(tmp_path / "a", tmp_path / "nothing")
