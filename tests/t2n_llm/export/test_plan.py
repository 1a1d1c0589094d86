"""The dry run: exact bytes, nothing read, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from t2n_llm.export.options import ExportOptions
from t2n_llm.export.pipeline import export_llm, plan_llm_export
from tests.t2n_llm.command_line import call, refused, strict_json, unchanged


@pytest.mark.parametrize(("archive", "compress"), [("tar", None), ("dir", None), ("tar", "q4_0")])
def test_the_size_is_exact(archive: str, compress: str | None, tiny_llama: Path, parent: Path) -> None:
    options = ExportOptions.of(archive=archive, compress=compress, check=False, require_tokenizer=False)
    with unchanged(parent, tiny_llama):
        plan = plan_llm_export(str(tiny_llama), parent / "x", options=options)
    result = export_llm(str(tiny_llama), parent / "x", options=options)
    files = result.archive.iterdir() if result.archive.is_dir() else [result.archive]
    written = sum(path.stat().st_size for path in files)
    assert (plan.archive_bytes, plan.exact) == (written, True)
    assert sorted(plan.files) == sorted(path.name for path in (parent / "x").iterdir())
    assert sum(group.count for group in plan.groups) == len(result.manifest["tensors"]) - 1
    assert plan.peak_bytes > 100_000_000 and plan.seconds is not None and plan.check_bytes == 0


def test_no_weight_is_read(model: Path, parent: Path) -> None:
    file = model / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    with file.open("r+b") as stream:  # the values become a hole in the file
        stream.truncate(header)
        stream.truncate(size)
    plan = plan_llm_export(str(model), parent / "x", options=ExportOptions(require_tokenizer=False))
    assert plan.check_bytes > 0
    assert list(parent.iterdir()) == []


def test_the_command(tiny_llama: Path, parent: Path) -> None:
    arguments = ("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", "--dry-run")
    with unchanged(parent):
        outcome = call(*arguments)
        record = strict_json(call(*arguments, "--archive", "tgz", "--json").out)
    assert outcome.code == 0, outcome
    assert "model.layers.*.mlp.down_proj.weight" in outcome.out
    assert "estimate" in outcome.out and "tests/*.npz" in outcome.out
    assert record["exact"] is False and record["archive"] == "model.nnef.tgz"
    (group,) = [group for group in record["groups"] if group["name"] == "model.layers.*.mlp.down_proj.weight"]
    assert (group["count"], group["dtype"]) == (2, "float16")


def test_a_head_has_a_plan_of_its_own(tiny_llama: Path, parent: Path) -> None:
    options = ExportOptions.of(task="feature-extraction", require_tokenizer=False)
    plan = plan_llm_export(str(tiny_llama), parent / "x", options=options)
    result = export_llm(str(tiny_llama), parent / "x", options=options)
    assert [(archive.name, archive.bytes) for archive in plan.archives] == [
        (result.archive.name, result.archive.stat().st_size)
    ]
    assert "lm_head.weight" not in {group.name for group in plan.groups}
    assert "tests/*.npz" in plan.files and (parent / "x" / "tests").is_dir()


def test_a_dry_run_refuses_what_the_export_would(tiny_llama: Path, parent: Path) -> None:
    (parent / "x").write_text("mine")
    refused(call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", "--dry-run"), "exists")
    refused(call("export", parent / "none", "-o", parent / "y", "--dry-run"), "none")
