"""`t2n-llm validate` for exports of heads: the archive compared again with the model it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from generic_export.errors import OptionError
from generic_export.nnef.contents import read_contents
from t2n_llm.answers import open_answerer
from t2n_llm.archive_weights import ArchiveWeights
from t2n_llm.folder import archive_in, read_manifest
from t2n_llm.heads.check import HeadReport, check_head, plan_cases, run_head_reference
from t2n_llm.heads.model import BATCH, HEAD_TASKS, HeadTask
from t2n_llm.options import LogReporter, Reporter
from t2n_llm.reference_model import Placement
from t2n_llm.revalidate import check_same_model, open_original
from t2n_llm.source import ModelSource
from t2n_llm.tasks import recorded_task
from t2n_llm.validate import Tolerance
from t2n_llm.weightless import instantiate


def validate_head_folder(
    folder: Path,
    reference: str | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    engine: str = "wheel",
    tract_binary: Path | None = None,
    device_map: str = "auto",
    max_memory: str | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    reporter: Reporter | None = None,
) -> HeadReport:
    """Compare an export made by `export_head` with PyTorch once more; see `validate_folder` for the arguments.

    Raises:
        ArchiveError: the folder is no export.
        OptionError: it is one of another task.
        SourceError: the reference cannot be found.
        EngineError: the engine refused the archive, or died.
    """
    reporter = reporter or LogReporter()
    placement = Placement.parse(device_map, max_memory)
    manifest = read_manifest(folder)
    task = HEAD_TASKS.get(recorded_task(manifest))
    if task is None:
        raise OptionError(f"{folder} was exported for {recorded_task(manifest)}.", "Use validate_folder.")
    archive = archive_in(folder, manifest)
    source = open_original(manifest["source"], reference, revision, token, trust_remote_code)
    check_same_model(folder, manifest, source)
    with_text = manifest.get("options", {}).get("require_tokenizer", True) and source.has_tokenizer()
    batched = BATCH in manifest["graph"]["symbols"]
    cases = plan_cases(task, source.config, source.tokenizer() if with_text else None, batched=batched)
    reporter.stage("Running PyTorch in f32 for reference")
    records = (manifest.get("compression") or {}).get("tensors", ())
    network = _empty_model(source, task)
    # What the archive holds, and nothing else, must be in the checkpoint.
    held = {tensor.label for tensor in read_contents(archive).tensors}
    expected = run_head_reference(
        source,
        task,
        network,
        frozenset(held),
        cases,
        placement=placement,
        overrides=ArchiveWeights.of_records(archive, records) if records else None,
    )
    dtype = str(manifest["graph"]["dtype"])
    with open_answerer(archive, engine=engine, tract_binary=tract_binary) as answerer:
        return check_head(
            answerer,
            task,
            dtype,
            cases,
            expected,
            tolerance=Tolerance.for_dtype(dtype).limited(atol, rtol),
            on_case=lambda name: reporter.stage(f"Checking in tract: {name}"),
        )


def _empty_model(source: ModelSource, task: HeadTask) -> Any:
    return instantiate(task.kind, source.config, torch.float32, "eager", "eager", source.trust_remote_code)
