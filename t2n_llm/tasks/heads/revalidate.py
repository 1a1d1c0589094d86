"""`t2n-llm validate` for exports of heads: the archive compared again with the model it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from generic_export.errors import OptionError
from generic_export.read.contents import read_contents
from t2n_llm.check.answers import open_answerer
from t2n_llm.check.causal_lm import Tolerance
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.export.options import LogReporter, Reporter
from t2n_llm.export.revalidate import ValidateOptions
from t2n_llm.source.empty_model import instantiate
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.heads.check import HeadReport, check_head, plan_cases, run_head_reference
from t2n_llm.tasks.heads.model import BATCH, HEAD_TASKS, HeadTask
from t2n_llm.tasks.names import recorded_task
from t2n_llm.weights.archive_weights import ArchiveWeights


def validate_head_folder(
    folder: Path,
    reference: str | None = None,
    *,
    options: ValidateOptions | None = None,
    reporter: Reporter | None = None,
) -> HeadReport:
    """Compare an export made by `export_head` with PyTorch once more; see `validate_folder` for the arguments.

    Raises:
        ArchiveError: the folder is no export.
        OptionError: it is one of another task.
        SourceError: the reference cannot be found.
        EngineError: the engine refused the archive, or died.
    """
    options, reporter = options or ValidateOptions(), reporter or LogReporter()
    manifest = read_manifest(folder)
    task = HEAD_TASKS.get(recorded_task(manifest))
    if task is None:
        raise OptionError(f"{folder} was exported for {recorded_task(manifest)}.", "Use validate_folder.")
    archive = archive_in(folder, manifest)
    source = options.original(folder, manifest, reference)
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
        placement=options.placement,
        overrides=ArchiveWeights.of_records(archive, records) if records else None,
    )
    dtype = str(manifest["graph"]["dtype"])
    with open_answerer(archive, engine=options.engine, tract_binary=options.tract_binary) as answerer:
        return check_head(
            answerer,
            task,
            dtype,
            cases,
            expected,
            tolerance=Tolerance.for_dtype(dtype).limited(options.atol, options.rtol),
            on_case=lambda name: reporter.stage(f"Checking in tract: {name}"),
        )


def _empty_model(source: ModelSource, task: HeadTask) -> Any:
    return instantiate(task.kind, source.config, torch.float32, "eager", "eager", source.trust_remote_code)
