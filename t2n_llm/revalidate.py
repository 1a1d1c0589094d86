"""`t2n-llm validate`: an export folder compared again with the model it came from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError, SourceError
from kvcache.cache import CacheTensor
from t2n_llm.archive_weights import ArchiveWeights
from t2n_llm.export import LogReporter, Reporter, archive_in
from t2n_llm.folder import read_manifest
from t2n_llm.reference import DEFAULT_DECODE_STEPS, plan_check, run_reference, run_reference_apart
from t2n_llm.runner import open_runner
from t2n_llm.source import ModelSource, open_source
from t2n_llm.validate import ValidationReport, validate_archive

logger = logging.getLogger(__name__)


def validate_folder(
    folder: Path,
    reference: str | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    decode_steps: int = DEFAULT_DECODE_STEPS,
    low_memory: bool = False,
    engine: str = "wheel",
    tract_binary: Path | None = None,
    reporter: Reporter | None = None,
) -> ValidationReport:
    """Run the four checks on an export folder.

    Args:
        folder: made by `export_llm`.
        reference: hub id or folder of the original; None takes the hub id recorded in the folder.
        revision: of a hub reference; None takes the recorded one.
        token, trust_remote_code: see `open_source`.
        decode_steps: tokens to decode.
        low_memory: run PyTorch in a process that ends before the engine starts.
        engine, tract_binary: see `open_runner`.
        reporter: told what happens; None logs.

    Raises:
        ArchiveError: the folder is no export.
        SourceError: the reference cannot be found.
        EngineError: the engine refused the archive, or died.
    """
    reporter = reporter or LogReporter()
    manifest = read_manifest(folder)
    archive = archive_in(folder, manifest)
    source = _open_reference(manifest["source"], reference, revision, token, trust_remote_code)
    _check_same_model(folder, manifest, source)
    caches = [CacheTensor(**cache) for cache in manifest["graph"]["caches"]]
    dtype = manifest["graph"]["dtype"]
    with open_runner(archive, caches, dtype, engine=engine, tract_binary=tract_binary) as runner:
        logger.info("%s %s will check", runner.engine_name, runner.engine_version)  # or is not there
        reporter.stage("Running PyTorch in f32 for reference")
        with_text = manifest.get("options", {}).get("require_tokenizer", True) and source.has_tokenizer()
        tokenizer = source.tokenizer() if with_text else None
        plan = plan_check(source.config, tokenizer, decode_steps)
        run = run_reference_apart if low_memory else run_reference
        records = (manifest.get("compression") or {}).get("tensors", ())
        overrides = ArchiveWeights.of_records(archive, records) if records else None
        expected = run(source.folder, plan, trust_remote_code=trust_remote_code, overrides=overrides)
        return validate_archive(
            runner, expected, dtype, on_check=lambda name: reporter.stage(f"Checking in tract: {name}")
        )


def _check_same_model(folder: Path, manifest: Mapping[str, Any], source: ModelSource) -> None:
    """Refuse a reference that cannot be the model that was exported."""
    text = source.config.get_text_config(decoder=True)
    for what, exported, given in (
        ("a model of type", manifest["source"]["model_type"], source.config.model_type),
        ("a model with a vocabulary of", manifest["model"]["vocab_size"], text.vocab_size),
    ):
        if exported != given:
            raise OptionError(
                f"{folder} was exported from {what} {exported}, {source.name} has {given}.",
                "Give the model that was exported with --reference.",
            )


def _open_reference(
    recorded: dict[str, str | None],
    reference: str | None,
    revision: str | None,
    token: str | None,
    trust_remote_code: bool,
) -> ModelSource:
    name = reference or recorded["name"]
    if reference is None:
        if recorded["revision"] is None:
            raise SourceError(
                f"this export was made from a local folder ({name}), whose place is not recorded.",
                "Name it: t2n-llm validate FOLDER --reference PATH.",
            )
        revision = revision or recorded["revision"]
    return open_source(
        str(name), revision=revision, token=token, trust_remote_code=trust_remote_code, require_tokenizer=False
    )
