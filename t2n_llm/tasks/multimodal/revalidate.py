"""`t2n-llm validate` for vision-language and speech models: the archives compared again with the model they came from."""

from __future__ import annotations

from pathlib import Path

import torch

from generic_export.errors import ArchiveError
from generic_export.read.contents import read_contents
from t2n_llm.check.causal_lm import Tolerance, ValidationReport
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.manifest import recorded_states
from t2n_llm.export.options import LogReporter, Reporter
from t2n_llm.export.revalidate import ValidateOptions
from t2n_llm.source.empty_model import MULTIMODAL_MODEL, instantiate
from t2n_llm.tasks.multimodal.check import check_multimodal, plan_prompts, run_multimodal_reference
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.names import recorded_task


def validate_multimodal_folder(
    folder: Path,
    reference: str | None = None,
    *,
    options: ValidateOptions | None = None,
    reporter: Reporter | None = None,
) -> ValidationReport:
    """Compare an export made by `export_multimodal` with PyTorch once more; see `validate_folder` for the arguments.

    Raises:
        ArchiveError: the folder is no such export.
        SourceError: the reference cannot be found.
        EngineError: the engine refused an archive, or died.
    """
    options, reporter = options or ValidateOptions(), reporter or LogReporter()
    manifest = read_manifest(folder)
    try:
        archives = {role: folder / str(part["archive"]) for role, part in manifest["parts"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ArchiveError(f"{folder}: its export.json names no {error}.", "Export the model again.") from error
    source = options.original(folder, manifest, reference)
    family = family_of(source.config, manifest.get("options", {}).get("image_size"), recorded_task(manifest))
    prompts = plan_prompts(source.config, family)
    held = {tensor.label for path in archives.values() for tensor in read_contents(path).tensors}
    network = instantiate(MULTIMODAL_MODEL, source.config, torch.float32, "eager", "eager", options.trust_remote_code)
    reporter.stage("Running PyTorch in f32 for reference")
    expected = run_multimodal_reference(source, family, network, frozenset(held), prompts, options.placement)
    dtype = str(manifest["graph"]["dtype"])
    return check_multimodal(
        archives,
        family,
        source.config,
        recorded_states(manifest),
        dtype,
        prompts,
        expected,
        engine=options.engine,
        tract_binary=options.tract_binary,
        tolerance=Tolerance.for_dtype(dtype).limited(options.atol, options.rtol),
        on_check=lambda name: reporter.stage(f"Checking in tract: {name}"),
    )
