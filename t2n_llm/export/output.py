"""What every export does around its archives: the folder they come to lie in, their bytes, `export.json`, the place in the end.

In: graphs and where their tensors come from. Out: a folder in place, or beside its place when the check failed. What happened
on the way is in the cast report.
"""

from __future__ import annotations

import re
import secrets
import typing
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from generic_export.compat import pytree
from generic_export.documents import producer_version
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastReport, FlushedCount, NonFiniteCount, OverflowCount
from generic_export.weights.pinned_file import PinnedFile, readers_of, refuse_changed, restrict
from generic_export.weights.source import TensorSource
from generic_export.write.archive import DEFAULT_TGZ_LEVEL, Resume, check_free_space
from generic_export.write.document import ArchivePlan, WrittenArchive, write_document
from generic_export.write.journal import journal_paths, occupied_bytes
from quant.stream import QuantizationError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.export.card_page import keep_edited, with_card
from t2n_llm.export.folder import (
    CARD_FILE,
    EDITED_CARD_FILE,
    SOURCE_CARD_FILE,
    Manifest,
    clear_staging,
    file_digests,
    json_text,
    keep_beside,
    put_in_place,
    remove_calibrations,
    staging_folder,
    write_manifest,
)
from t2n_llm.export.options import ExportOptions
from t2n_llm.model_graph import MODEL_ROLE, ModelGraph
from t2n_llm.reporter import Reporter
from t2n_llm.source.hub import ModelSource
from t2n_llm.source.source_files import copied_files, recorded_files
from t2n_llm.tasks.names import TEXT_GENERATION, recorded_task

# archive form -> (file name, compression level)
ARCHIVES: Mapping[str, tuple[str, int | None]] = {
    "dir": ("model.nnef", None),
    "tar": ("model.nnef.tar", 0),
    "tgz": ("model.nnef.tgz", DEFAULT_TGZ_LEVEL),
}

_DAT = ".dat"
_FLOAT_BYTES = {"f16": 2, "f32": 4}
_TRACE = 1e-3  # share of a tensor that may become zero without a warning; of normal weights some 1e-6 do
_MANIFEST_ALLOWANCE = 1 << 20  # export.json, graph.nnef, headers


@dataclass(frozen=True)
class ExportResult:
    """Result of an export.

    Attributes:
        output_dir: the export folder.
        archives: paths of the NNEF archives, by role.
        manifest: content of `export.json`.
        validation: comparison with PyTorch, or None without a check.
    """

    output_dir: Path
    archives: Mapping[str, Path]
    manifest: Manifest
    validation: ValidationReport | None

    @property
    def archive(self) -> Path:
        """Path of the archive; of several, the one that generates or answers."""
        return self.output_dir / str(self.manifest["archive"])


@dataclass(frozen=True)
class ExportFolder:
    """The folder that an export makes.

    Attributes:
        source: the model.
        target: the folder to make.
        options: every choice.
        reporter: told what happens.
        casts: filled while weights stream.
    """

    source: ModelSource
    target: Path
    options: ExportOptions
    reporter: Reporter
    casts: CastReport = field(default_factory=CastReport)

    def archive_name(self, role: str = MODEL_ROLE) -> str:
        """Return the file or folder name of an archive: `model.nnef.tar`, `vision.nnef`."""
        return ARCHIVES[self.options.archive][0].replace(MODEL_ROLE, role, 1)

    @property
    def compression_level(self) -> int | None:
        """Of the archives; None for folders."""
        return ARCHIVES[self.options.archive][1]

    @property
    def continues_archives(self) -> bool:
        """Whether archives of a killed export are continued; a .tgz, one compressed stream, always starts again."""
        return self.options.resume and self.options.archive != "tgz"

    def refuse_full_disk(self, graphs: Sequence[ModelGraph]) -> None:
        """Refuse a disk that cannot hold plain weights, before PyTorch runs; `staging` knows the size of every other form.

        Raises:
            DiskFullError: it does not fit.
        """
        options = self.options
        if options.resume or options.archive == "tgz" or options.compression.compresses:
            return
        variables = (variable for graph in graphs for variable in graph.document.variables)
        values = sum(variable.values for variable in variables if variable.dtype in _FLOAT_BYTES)
        check_free_space(self.target, values * _FLOAT_BYTES[options.graph.dtype])

    @contextmanager
    def staging(
        self, plans: Mapping[str, ArchivePlan], bundle_bytes: int = 0, files: Sequence[PinnedFile] = ()
    ) -> Iterator[Path]:
        """Yield the folder in which everything is made, once it is known to fit on the disk.

        Args:
            plans: the archives, by role.
            bundle_bytes: of the test bundles that come to lie beside them.
            files: of the source; who may not read them may not look into the folder.

        Raises:
            DiskFullError: it does not fit.
        """
        if not self.options.resume:
            remove_calibrations(self.target)
        with staging_folder(self.target, resume=self.continues_archives) as staging:
            # How far a .tgz shrinks is not known before it is written.
            weights = 0 if self.options.archive == "tgz" else sum(plan.tar_bytes for plan in plans.values())
            beside = bundle_bytes + sum(file.identity.bytes for file in self.companions().values())
            needed = max(weights - occupied_bytes(staging), 0) + beside + _MANIFEST_ALLOWANCE
            check_free_space(self.target, needed)
            restrict(staging, readers_of(files))
            clear_staging(staging, *(self.archive_name(role) for role in plans))
            yield staging

    def write_archive(
        self,
        staging: Path,
        graph: NnefGraph,
        sources: Mapping[str, TensorSource],
        identity: str,
        *,
        role: str = MODEL_ROLE,
        errors: MutableMapping[str, QuantizationError] | None = None,
    ) -> WrittenArchive:
        """Stream the weights into an archive, going on where a killed export of the same identity stopped; see `Resume`.

        Args:
            staging: where the archive comes to lie.
            graph, sources: what it holds.
            identity: see `identity`.
            role: first part of its name.
            errors: what quantisation does to each tensor, filled while the sources are streamed.
        """
        name = self.archive_name(role)
        self.reporter.stage(f"Writing {name}")
        errors = {} if errors is None else errors
        resume = Resume(
            identity,
            wanted=self.options.resume,
            on_found=self.reporter.stage,
            on_lost=self.reporter.warn,
            note=lambda entry: self._note_of(entry, errors),
            recall=lambda entry, note: self._recall(entry, note, errors),
            keep_journal=True,
        )
        return write_document(
            staging / name,
            graph,
            sources,
            compression_level=self.compression_level,
            overwrite=True,  # a whole archive that an earlier run left here, see `Resume.keep_journal`
            progress=self.reporter.progress,
            resume=resume,
        )

    def identity(self, checkpoint: Checkpoint, **further: Any) -> str:
        """Return text that two exports share when the same weights and options go in, by the same version."""
        files = [(file.path.name, file.identity.bytes, file.identity.mtime_ns) for file in checkpoint.held]
        return json_text(
            {
                "files": files,
                "options": self.options.identity(),
                # Two calibrations need not agree to the last bit: what one made is not mixed with the other's.
                "calibration": secrets.token_hex(8) if self.options.compression.calibrates() else None,
                "versions": [producer_version(), torch.__version__],
                **further,
            }
        )

    def _note_of(self, entry: str, errors: Mapping[str, QuantizationError]) -> Any:
        """Return what was learnt of a tensor while it was streamed; kept in the journal for an export that is continued."""
        label = entry.removesuffix(_DAT)
        counts = {
            "overflow": self.casts.overflows.get(label),
            "nonfinite": self.casts.nonfinite.get(label),
            "flushed": self.casts.flushed.get(label),
            "error": errors.get(label),
        }
        noted = {name: asdict(count) if count is not None else None for name, count in counts.items()}  # type: ignore[call-overload]
        return noted if any(noted.values()) else None

    def _recall(self, entry: str, note: Any, errors: MutableMapping[str, QuantizationError]) -> None:
        label = entry.removesuffix(_DAT)
        if note and note["overflow"]:
            self.casts.overflows[label] = OverflowCount(**note["overflow"])
        if note and note.get("nonfinite"):
            self.casts.nonfinite[label] = NonFiniteCount(
                **note["nonfinite"] | {"first": tuple(note["nonfinite"]["first"])}
            )
        if note and note.get("flushed"):
            self.casts.flushed[label] = FlushedCount(**note["flushed"])
        if note and note["error"]:
            errors[label] = QuantizationError(**note["error"])

    def companions(self) -> dict[str, PinnedFile]:
        """Return what is copied beside the archive, by name: configs, tokenizer, chat template, how images become pixels; and
        the card of the source."""
        return copied_files(self.source.held, SOURCE_CARD_FILE)

    def copy_companions(self, staging: Path) -> None:
        """Copy the companions into the folder."""
        for name, file in self.companions().items():
            (staging / name).write_bytes(file.read())

    def complete(
        self,
        staging: Path,
        archives: Mapping[str, WrittenArchive],
        validation: ValidationReport | None,
        unused: Sequence[str],
        described: Manifest,
        files: Sequence[PinnedFile] = (),
    ) -> ExportResult:
        """Record what is in the folder, and put it in place, or beside its place when the check failed.

        Args:
            staging: the folder, with everything but its card and `export.json`.
            archives: in it, by role.
            validation: None without a check.
            unused: checkpoint tensors that the model does not use.
            described: what else `export.json` says.
            files: everything that was read of the source, held against what lies there in the end.

        Raises:
            ValidationError: the check failed.
            SourceChangedError: the source is not what it was.
        """
        self.reporter.stage("Recording checksums")
        paths = {role: archive.path for role, archive in archives.items()}
        for path in paths.values():
            for journal in journal_paths(path):
                journal.unlink()
        manifest = {
            **described,
            "f16_overflows": {name: asdict(overflow) for name, overflow in self.casts.overflows.items()},
            "f16_underflows": {name: asdict(flushed) for name, flushed in self.casts.flushed.items()},
            "nonfinite": {name: asdict(found) for name, found in self.casts.nonfinite.items()},
            "copied_files": list(self.companions()),
            "source_files": recorded_files(files),
            "unused_tensors": list(unused),
            "validation": validation.asdict() if validation is not None else None,
            "files": {archive.path.name: {"bytes": archive.nbytes} for archive in archives.values()}
            | file_digests(staging, *(path.name for path in paths.values())),
        }
        manifest = with_card(staging, {**manifest, **self._for_transformers(manifest)})
        if keep_edited(self.target, staging):
            self.reporter.warn(f"{self.target / CARD_FILE} was edited; it is kept as {EDITED_CARD_FILE}.")
        write_manifest(staging, manifest)
        refuse_changed(files)
        restrict(staging, readers_of(files))
        if validation is not None and not validation.passed:
            failed = keep_beside(staging, self.target, "failed")
            raise validation.failure(
                self.source.name,
                f"The export is kept in {failed}, with its report{self._other_numerics()}.",
            )
        put_in_place(staging, self.target, self.options.force)
        placed = {role: self.target / path.name for role, path in paths.items()}
        return ExportResult(self.target, placed, manifest, validation)

    def _for_transformers(self, manifest: Manifest) -> dict[str, Any]:
        """Return the entries by which transformers loads the folder; a folder archive is no file that it could load."""
        entries = transformers_entries(manifest)
        components = entries["components"]
        files = {
            name: each for name, each in components.items() if manifest["files"].get(each["file"], {}).get("bytes")
        }
        return {**entries, "components": files}

    def _other_numerics(self) -> str:
        """Say what computes with more bits than this export did."""
        graph = self.options.graph
        if graph.dtype == "f32":
            return ""
        return "; try --dtype f32" if graph.mixed else "; try --activations f32, the default"

    def warn_of_unused(self, unused: Sequence[str]) -> None:
        """Tell which tensors of the checkpoint have no parameter."""
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            self.reporter.warn(
                f"the checkpoint has tensors that the model does not use: {', '.join(unused[:3])}{more}."
            )

    def report_casts(self) -> None:
        """Tell which tensors had values beyond f16, on either side, and which were not finite."""
        for name, found in self.casts.nonfinite.items():
            self.reporter.warn(f"{name}: {found}; exported unchanged.")
        if self.casts.flushed:
            self._report_flushed()
        for name, overflow in self.casts.overflows.items():
            self.reporter.warn(
                f"{name}: {overflow.count} values up to {overflow.max_abs:.3g} do not fit f16 and became 65504, "
                f"its largest value. Keep the tensor in f32: --keep-f32 {name}"
            )

    def _report_flushed(self) -> None:
        """Tell how many values f16 has no number for: in one line, a warning where a tensor loses more than a trace of itself."""
        flushed = self.casts.flushed
        total, worst = sum(each.count for each in flushed.values()), max(flushed, key=lambda name: _lost(flushed[name]))
        told = (
            f"{total} value{'s' * (total > 1)} of {len(flushed)} tensor{'s' * (len(flushed) > 1)} "
            f"{'are' if total > 1 else 'is'} too small for f16 and became zero, most in {worst} ({_lost(flushed[worst]):.2g} "
            "of it)"
        )
        if _lost(flushed[worst]) > _TRACE:
            self.reporter.warn(f"{told}. To keep such a tensor in f32: --keep-f32 {worst}")
        else:
            self.reporter.stage(told)


def _lost(flushed: FlushedCount) -> float:
    """Return the share of a tensor that became zero."""
    return flushed.count / max(1, flushed.values)


# --- entries of transformers -------------------------------------------------------------------------


SCHEMA_VERSION = 1
EXPORT_FORMAT = "tract"
LANGUAGE_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "cache")
_ENCODER = "encoder"
_TYPES = {"i64": "int64", "f16": "float16", "f32": "float32", "bool": "bool"}
_STATE = re.compile(r"cache_(key|value)")


def transformers_entries(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `export.json` by which transformers loads the folder.

    Args:
        manifest: of an export. An archive that transformers' interface has no call for gets no component.
    """
    return {"schema_version": SCHEMA_VERSION, "export_format": EXPORT_FORMAT, "components": _components(manifest)}


def _components(manifest: Mapping[str, Any]) -> dict[str, Any]:
    graph, parts = manifest["graph"], manifest.get("archives") or {}
    if "interface" in graph:
        return {"model": _component(manifest, manifest["archive"], graph["inputs"], graph["outputs"])}
    if recorded_task(manifest) == TEXT_GENERATION and all(_STATE.fullmatch(state["kind"]) for state in graph["states"]):
        return {"model": _component(manifest, manifest["archive"], LANGUAGE_MODEL_INPUTS, ("logits",))}
    if _ENCODER in parts and "encoder_decoder" in manifest:
        part = parts[_ENCODER]
        return {_ENCODER: _component(manifest, part["archive"], part["graph"]["inputs"], part["graph"]["outputs"])}
    return {}


def _component(
    manifest: Mapping[str, Any], archive: str, inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, Any]:
    tensors = manifest["graph"].get("interface", {})
    architecture = str(manifest["source"].get("architecture", ""))
    leaf = torch.empty(0)
    _, in_spec = pytree.tree_flatten(((), dict.fromkeys(inputs, leaf)))
    _, out_spec = pytree.tree_flatten(_result(architecture, outputs, leaf))
    return {
        "file": archive,
        "metadata": {
            "architecture": architecture,
            "packages": {name: text for name, text in manifest["versions"].items() if isinstance(text, str)},
            "export_config": {"export_format": EXPORT_FORMAT},
            "export_dtype": "float32",
            "export_device": "cpu",
            "kwargs": {name: _described(tensors.get(name)) for name in inputs},
            "in_spec": pytree.treespec_dumps(in_spec),
            "out_spec": pytree.treespec_dumps(out_spec),
            "in_constants": {},
            "out_constants": [],
        },
    }


def _described(tensor: Mapping[str, Any] | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    dtype = _TYPES.get(tensor["dtype"], tensor["dtype"])
    return {"rank": len(tensor["shape"]), "shape": list(tensor["shape"]), "dtype": dtype}


def _result(architecture: str, outputs: Sequence[str], leaf: torch.Tensor) -> Any:
    """Return what the model's forward returns with these outputs: of the class that it is annotated with, or a dict."""
    import transformers
    from transformers.utils import ModelOutput

    forward = getattr(getattr(transformers, architecture, None), "forward", None)
    try:
        returned = typing.get_type_hints(forward).get("return") if forward is not None else None
    except Exception:  # annotations of names that a module imports for type checkers alone
        returned = None
    for kind in (returned, *typing.get_args(returned)):
        if isinstance(kind, type) and issubclass(kind, ModelOutput) and set(outputs) <= set(kind.__annotations__):
            found = kind(**dict.fromkeys(outputs, leaf))
            if list(found) == list(outputs):  # the archive's order
                return found
    return dict.fromkeys(outputs, leaf)
