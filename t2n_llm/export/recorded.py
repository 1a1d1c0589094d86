"""What an export folder records of its making: options, source, adapter, archives.

In: `export.json`. Out: the options as they were, the source and the adapter opened again, the archives and their own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, OptionError, SourceError
from t2n_llm.compress.request import AS_STORED
from t2n_llm.export.folder import archive_in
from t2n_llm.export.manifest_form import misfit, require_said
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import MODEL_ROLE
from t2n_llm.source.adapter import Adapter, open_adapter
from t2n_llm.source.hub import ModelSource, open_source, open_vocoder
from t2n_llm.source.reference import SourceRef
from t2n_llm.source.vocoder import Vocoder
from t2n_llm.tasks.frontends.frontend import FRONTEND
from t2n_llm.tasks.names import TASKS, recorded_task
from t2n_llm.weights.archive_weights import ArchiveWeights


def graph_options_of(manifest: Mapping[str, Any]) -> GraphOptions:
    """Return what decided the graph of an export; what an older one does not record is what there was then."""
    require_said(Path("export.json"), manifest, ["graph.dtype"])
    dtype = manifest["graph"]["dtype"]
    before = {"activations": dtype, "attention": "sdpa", "mla": "expanded", "frontend": False}
    recorded = {**before, **manifest.get("options", {}), "dtype": dtype}
    known = {each.name: recorded[each.name] for each in fields(GraphOptions) if each.name in recorded}
    wrong = misfit(known, GraphOptions, "options")
    if wrong is not None:
        raise ArchiveError(f"export.json: {wrong}.", "Export the model again.")
    try:
        return GraphOptions(
            **known | {"keep_f32": tuple(known.get("keep_f32", ())), "device": tuple(known.get("device", ("cpu",)))}
        )
    except (TypeError, ValueError) as error:
        raise ArchiveError(f"export.json: its options are invalid: {error}.", "Export the model again.") from error


def require_whole(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest without what a comparison relies on.

    Raises:
        ArchiveError: names what is missing.
    """
    needed = {"source": ("name", "revision", "model_type"), "graph": ("dtype",), "model": ("vocab_size",)}
    needed |= {"adapter": ("name", "revision", "sha256")} if manifest.get("adapter") is not None else {}
    if recorded_task(manifest) not in TASKS:
        raise ArchiveError(f"{folder}: its export.json names no supported task.", "Export the model again.")
    require_said(folder, manifest, [f"{part}.{key}" for part, keys in needed.items() for key in keys])


def open_recorded_adapter(recorded: Mapping[str, Any] | None, given: str | None, token: str | None) -> Adapter | None:
    """Open the adapter that an export was made with; it must be the very same."""
    ref = _recorded_ref("adapter", recorded, given, token, "Pass it: t2n-llm validate FOLDER --adapter PATH.")
    if recorded is None or ref is None:
        return None
    adapter = open_adapter(ref)
    if adapter.digest != recorded["sha256"]:
        raise OptionError(
            f"{adapter.name} is not the adapter of this export ({recorded['name']}): its checksum differs.",
            "Pass the adapter that was merged with --adapter.",
        )
    return adapter


def _recorded_vocoder(recorded: Mapping[str, Any] | None, given: str | None, token: str | None) -> Vocoder | None:
    """Open the vocoder that an export was made with, or the one that is given in its place.

    Raises:
        OptionError: the export has none.
        SourceError: it was a local folder, whose place is not recorded.
    """
    ref = _recorded_ref("vocoder", recorded, given, token, "Pass it with --vocoder PATH.")
    return None if ref is None else open_vocoder(ref)


def _recorded_ref(
    kind: str, recorded: Mapping[str, Any] | None, given: str | None, token: str | None, advice: str
) -> SourceRef | None:
    """Return where an adapter or a vocoder of an export is; None where the export has none."""
    article = "an" if kind[0] in "aeiou" else "a"
    if recorded is None:
        if given is not None:
            raise OptionError(f"--{kind} {given}: this export was made without {article} {kind}.", f"Omit --{kind}.")
        return None
    if given is None and recorded["revision"] is None:
        raise SourceError(
            f"this export was made with a local {kind} ({recorded['name']}), whose path is not recorded.", advice
        )
    return SourceRef(given or str(recorded["name"]), recorded["revision"] if given is None else None, token)


def open_original(folder: Path, manifest: Mapping[str, Any], ref: SourceRef, vocoder: str | None = None) -> ModelSource:
    """Open the model that an export was made from, and the vocoder beside it.

    Args:
        folder, manifest: of the export.
        ref: hub id or folder; without a name the recorded hub id is taken.
        vocoder: the same for the vocoder; None takes the recorded one.

    Raises:
        SourceError: it was a local folder, whose place is not recorded, or it cannot be found.
        OptionError: it cannot be the model that was exported.
    """
    recorded = manifest["source"]
    if not ref.name:
        if recorded["revision"] is None:
            origin, advice = f"a local folder ({recorded['name']})", "Pass it with --reference PATH."
            adapter = manifest.get("adapter")
            if adapter is not None and adapter["revision"] is None:
                origin += f" with a local adapter ({adapter['name']})"
                advice = "Pass both with --reference PATH --adapter PATH."
            raise SourceError(f"this export was made from {origin}, whose path is not recorded.", advice)
        revision = ref.revision or recorded["revision"]
        ref = replace(ref, name=str(recorded["name"]), revision=revision)
    source = open_source(ref, require_tokenizer=False)
    for what, exported, given in (
        ("a model of type", recorded["model_type"], source.config.model_type),
        ("a model with a vocabulary of", manifest["model"]["vocab_size"], _vocabulary(source.config)),
    ):
        if exported != given:
            raise OptionError(
                f"{folder} was exported from {what} {exported}, but {source.name} has {given}.",
                "Pass the model that was exported with --reference.",
            )
    return replace(source, vocoder=_recorded_vocoder(manifest.get("vocoder"), vocoder, ref.token))


def _vocabulary(config: Any) -> int | None:
    """Return how many tokens a config has; of a speech model with a vocoder the model's own config has them."""
    text = getattr(config, "model_config", None) or config.get_text_config(decoder=True)
    size: int | None = getattr(text, "vocab_size", None)
    return size


def recorded_frontend_input(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return which of the model's inputs the front end makes."""
    try:
        return str(manifest[FRONTEND]["outputs"][0])
    except (KeyError, TypeError, IndexError) as error:
        raise ArchiveError(
            f"{folder}: its export.json does not describe the output of the front end.", "Export the model again."
        ) from error


def recorded_archives(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Path]:
    """Return the archives by role, in the order in which they run."""
    if "archives" not in manifest:
        return {MODEL_ROLE: archive_in(folder, manifest)}
    try:
        archives = {role: folder / str(part["archive"]) for role, part in manifest["archives"].items()}
        return archives or {MODEL_ROLE: archive_in(folder, manifest)}
    except (AttributeError, KeyError, TypeError) as error:
        raise ArchiveError(f"{folder}: its export.json has no entry {error}.", "Export the model again.") from error


def recorded_weights(manifest: Mapping[str, Any], archives: Mapping[str, Path]) -> ArchiveWeights | None:
    """Return the values of the archives that are not those of the checkpoint; None where all are."""
    parts = manifest.get("archives") or {MODEL_ROLE: manifest}
    recorded = {role: part.get("compression") or {} for role, part in parts.items()}
    compressed = {
        role: compression.get("tensors", ())
        for role, compression in recorded.items()
        if compression.get("recipe", {}).get("name") != AS_STORED
    }
    return ArchiveWeights.joined(
        [ArchiveWeights.of_records(archives[role], records) for role, records in compressed.items() if records]
    )


__all__ = [
    "graph_options_of",
    "open_original",
    "open_recorded_adapter",
    "recorded_archives",
    "recorded_frontend_input",
    "recorded_weights",
    "require_whole",
]
