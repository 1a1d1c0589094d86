"""`t2n-llm validate`: an export folder compared again with the model it came from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError, SourceError
from t2n_llm.check.causal_lm import Tolerance, ValidationReport, validate_archive
from t2n_llm.check.reference import DEFAULT_DECODE_STEPS, plan_check, run_reference, run_reference_apart
from t2n_llm.check.runner import open_runner
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.export.manifest import recorded_states
from t2n_llm.export.options import LogReporter, Reporter
from t2n_llm.source.adapter import Adapter, open_adapter
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import ModelSource, open_source
from t2n_llm.weights.archive_weights import ArchiveWeights
from t2n_llm.weights.f32_model import require_resident
from t2n_llm.weights.placement import Placement, plan_residency

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidateOptions:
    """How an export is compared once more.

    Attributes:
        revision: of a hub reference; None takes the recorded one.
        token, trust_remote_code: see `open_source`.
        decode_steps: tokens that a language model decodes.
        low_memory: run PyTorch in a process that ends before the engine starts; language models only.
        engine, tract_binary: see `open_runner`.
        adapter: the adapter that was merged, by hub id or folder; None takes the hub id recorded in the folder.
        placement: where the weights of the PyTorch reference may stay.
        atol, rtol: limit of a value's error, `atol + rtol * largest value`; None for both takes the element type's.
    """

    revision: str | None = None
    token: str | None = None
    trust_remote_code: bool = False
    decode_steps: int = DEFAULT_DECODE_STEPS
    low_memory: bool = False
    engine: str = "wheel"
    tract_binary: Path | None = None
    adapter: str | None = None
    placement: Placement = field(default_factory=Placement)
    atol: float | None = None
    rtol: float | None = None

    def original(self, folder: Path, manifest: Mapping[str, Any], reference: str | None) -> ModelSource:
        """Open the model that an export was made from; see `open_original` for what is raised."""
        source = open_original(manifest["source"], reference, self.revision, self.token, self.trust_remote_code)
        check_same_model(folder, manifest, source)
        return source


def validate_folder(
    folder: Path,
    reference: str | None = None,
    *,
    options: ValidateOptions | None = None,
    reporter: Reporter | None = None,
) -> ValidationReport:
    """Run the four checks on an export folder.

    Args:
        folder: made by `export_llm`.
        reference: hub id or folder of the original; None takes the hub id recorded in the folder.
        options: every choice; None takes the defaults.
        reporter: told what happens; None logs.

    Raises:
        ArchiveError: the folder is no export.
        SourceError: the reference cannot be found.
        EngineError: the engine refused the archive, or died.
    """
    options, reporter = options or ValidateOptions(), reporter or LogReporter()
    manifest = read_manifest(folder)
    archive = archive_in(folder, manifest)
    source = options.original(folder, manifest, reference)
    adapter = _open_adapter(manifest.get("adapter"), options.adapter, options.token)
    states = recorded_states(manifest)
    dtype = manifest["graph"]["dtype"]
    with open_runner(archive, states, dtype, engine=options.engine, tract_binary=options.tract_binary) as runner:
        logger.info("%s %s will check", runner.engine_name, runner.engine_version)  # or is not there
        with_text = manifest.get("options", {}).get("require_tokenizer", True) and source.has_tokenizer()
        tokenizer = source.tokenizer() if with_text else None
        network = meta_model(source.config, trust_remote_code=options.trust_remote_code)
        residency = plan_residency(network, options.placement)
        require_resident(source, residency.offloaded)
        plan = plan_check(source.config, tokenizer, options.decode_steps, teacher_forced=residency.offloaded)
        about = f": {residency.summary(source.folder, plan.passes)}" if residency.offloaded else ""
        reporter.stage(f"Running PyTorch in f32 for reference{about}")
        run = run_reference_apart if options.low_memory else run_reference
        records = (manifest.get("compression") or {}).get("tensors", ())
        overrides = ArchiveWeights.of_records(archive, records) if records else None
        expected = run(
            source.weights,
            plan,
            trust_remote_code=options.trust_remote_code,
            residency=residency,
            adapter=adapter,
            overrides=overrides,
        )
        kv_cache = manifest.get("options", {}).get("kv_cache")
        tolerance = Tolerance.for_export(dtype, kv_cache).limited(options.atol, options.rtol)
        return validate_archive(
            runner,
            expected,
            dtype,
            tolerance=tolerance,
            on_check=lambda name: reporter.stage(f"Checking in tract: {name}"),
        )


def _open_adapter(recorded: Mapping[str, Any] | None, given: str | None, token: str | None) -> Adapter | None:
    """Open the adapter that an export was made with; it must be the very same."""
    if recorded is None:
        if given is not None:
            raise OptionError(f"--adapter {given}: this export was made without an adapter.", "Leave --adapter out.")
        return None
    if given is None and recorded["revision"] is None:
        raise SourceError(
            f"this export was made with a local adapter ({recorded['name']}), whose place is not recorded.",
            "Name it: t2n-llm validate FOLDER --adapter PATH.",
        )
    revision = recorded["revision"] if given is None else None
    adapter = open_adapter(given or str(recorded["name"]), revision=revision, token=token)
    if adapter.digest != recorded["sha256"]:
        raise OptionError(
            f"{adapter.name} is not the adapter of this export ({recorded['name']}): its checksum differs.",
            "Give the adapter that was merged with --adapter.",
        )
    return adapter


def check_same_model(folder: Path, manifest: Mapping[str, Any], source: ModelSource) -> None:
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


def open_original(
    recorded: Mapping[str, str | None],
    reference: str | None,
    revision: str | None,
    token: str | None,
    trust_remote_code: bool,
) -> ModelSource:
    """Open the model that an export was made from.

    Args:
        recorded: `source` of the export's manifest.
        reference: hub id or folder; None takes the recorded hub id.
        revision, token, trust_remote_code: see `open_source`.

    Raises:
        SourceError: it was a local folder, whose place is not recorded, or it cannot be found.
    """
    name = reference or recorded["name"]
    if reference is None:
        if recorded["revision"] is None:
            raise SourceError(
                f"this export was made from a local folder ({name}), whose place is not recorded.",
                "Name it with --reference PATH.",
            )
        revision = revision or recorded["revision"]
    return open_source(
        str(name), revision=revision, token=token, trust_remote_code=trust_remote_code, require_tokenizer=False
    )
