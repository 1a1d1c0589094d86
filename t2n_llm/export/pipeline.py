"""What every export does around its graph: the source opened, archives written, companions copied, the user told.

In: options, and a graph with its sources. Out: files in the staging folder; what was learnt on the way is in the cast report.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from generic_export.documents import producer_version
from generic_export.errors import ValidationError
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.source import TensorSource
from generic_export.write.archive import Resume, check_free_space
from generic_export.write.document import ArchivePlan, WrittenArchive, write_document
from generic_export.write.journal import journal_paths, occupied_bytes
from quant.half import CastReport, OverflowCount
from quant.stream import QuantizationError
from t2n_llm.check.runner import require_engine
from t2n_llm.compress.stored_form import StoredForm
from t2n_llm.export.folder import (
    MANIFEST_NAME,
    TESTS_FOLDER,
    check_free,
    clear_staging,
    file_digests,
    json_text,
    keep_beside,
    put_in_place,
    staging_folder,
    write_manifest,
)
from t2n_llm.export.manifest import Manifest, stored_tensors
from t2n_llm.export.options import ARCHIVES, ExportOptions, LogReporter, Reporter
from t2n_llm.export.plan import ExportPlan, make_plan
from t2n_llm.source.hub import ModelSource, open_source

MODEL_ROLE = "model"
"""What the archive of a folder with a single one is called."""

_DAT = ".dat"
_CONFIGS = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
_MANIFEST_ALLOWANCE = 1 << 20  # export.json, graph.nnef, headers


class Report(Protocol):
    """How an archive compares with PyTorch."""

    @property
    def passed(self) -> bool: ...

    def asdict(self) -> dict[str, Any]: ...

    def failure(self, subject: str, hint: str) -> ValidationError: ...


ReportT = TypeVar("ReportT", bound=Report)


@dataclass(frozen=True)
class ExportResult(Generic[ReportT]):
    """What an export made.

    Attributes:
        output_dir: the folder.
        archives: the NNEF archives in it, by role.
        manifest: content of `export.json`.
        validation: the comparison with PyTorch, or None when it was skipped.
    """

    output_dir: Path
    archives: Mapping[str, Path]
    manifest: Manifest
    validation: ReportT | None

    @property
    def archive(self) -> Path:
        """The archive, or of several the one that a runtime decodes with."""
        return self.output_dir / str(self.manifest["archive"])


@dataclass(frozen=True)
class Stages:
    """The steps that exports of all tasks share.

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

    def plan(self, plan: ArchivePlan, check_bytes: int) -> ExportPlan:
        """Say what an export of a single archive would write.

        Args:
            plan: the archive.
            check_bytes: most memory that the check would take.
        """
        names = [file.name for file in self.companions()]
        bundles = [f"{TESTS_FOLDER}/*.npz"] if self.options.check else []
        return make_plan(
            plan,
            self.target,
            self.archive_name(),
            [*names, *bundles, MANIFEST_NAME],
            compression_level=self.compression_level,
            check_bytes=check_bytes if self.options.check else 0,
        )

    @contextmanager
    def staging(self, plans: Mapping[str, ArchivePlan], bundle_bytes: int = 0) -> Iterator[Path]:
        """Yield the folder in which everything is made, once it is known to fit on the disk.

        Args:
            plans: the archives, by role.
            bundle_bytes: of the test bundles that come to lie beside them.

        Raises:
            DiskFullError: it does not fit.
        """
        with staging_folder(self.target, resume=self.options.resume) as staging:
            # How far a .tgz shrinks is not known before it is written.
            weights = 0 if self.options.archive == "tgz" else sum(plan.tar_bytes for plan in plans.values())
            beside = bundle_bytes + sum(file.stat().st_size for file in self.companions())
            needed = max(weights - occupied_bytes(staging), 0) + beside + _MANIFEST_ALLOWANCE
            check_free_space(self.target, needed)
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
        """Stream the weights into an archive, going on where a killed export of the same identity stopped.

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
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.files]
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
        overflow, error = self.casts.overflows.get(label), errors.get(label)
        noted = {
            "overflow": asdict(overflow) if overflow is not None else None,
            "error": asdict(error) if error is not None else None,
        }
        return noted if any(noted.values()) else None

    def _recall(self, entry: str, note: Any, errors: MutableMapping[str, QuantizationError]) -> None:
        label = entry.removesuffix(_DAT)
        if note and note["overflow"]:
            self.casts.overflows[label] = OverflowCount(**note["overflow"])
        if note and note["error"]:
            errors[label] = QuantizationError(**note["error"])

    def companions(self) -> list[Path]:
        """Return what a runtime needs beside the archive: configs, tokenizer, chat template, how images become pixels."""
        configs = [self.source.folder / name for name in _CONFIGS]
        return [file for file in (*configs, *self.source.tokenizer_files()) if file.is_file()]

    def copy_companions(self, staging: Path) -> None:
        """Copy the companions into the folder."""
        for file in self.companions():
            shutil.copyfile(file, staging / file.name)

    def make(
        self,
        stored: StoredForm,
        unused: Sequence[str],
        identity: str,
        *,
        bundle_bytes: Callable[[], int],
        validate: Callable[[Path, Path], ReportT],
        describe: Callable[[], Manifest],
    ) -> ExportResult[ReportT]:
        """Write a single archive, check it, and put everything in place.

        Args:
            stored: what the archive holds.
            unused: checkpoint tensors that the model does not use.
            identity: see `identity`.
            bundle_bytes: says what the test bundles will take; asked when there is a check.
            validate: compares the archive (second) with PyTorch and writes test bundles into the folder (first).
            describe: makes what the task says in `export.json`, beside what is said of every single archive.

        Raises:
            DiskFullError: it does not fit.
            ValidationError: the check failed.
        """
        check = self.options.check
        self.warn_of_unused(unused)
        for note in stored.notes:
            self.reporter.warn(note)
        with self.staging({MODEL_ROLE: stored.plan}, bundle_bytes() if check else 0) as staging:
            archive = self.write_archive(staging, stored.graph, stored.sources, identity, errors=stored.errors)
            self.report_overflows()
            self.copy_companions(staging)
            stored.write_recipe(staging)
            validation = validate(staging, archive.path) if check else None
            said = {
                "archive": archive.path.name,
                "notes": list(stored.notes),
                "compression": stored.summary(),
                "tensors": stored_tensors(archive),
            }
            return self.complete(staging, {MODEL_ROLE: archive}, validation, unused, lambda: describe() | said)

    def complete(
        self,
        staging: Path,
        archives: Mapping[str, WrittenArchive],
        validation: ReportT | None,
        unused: Sequence[str],
        describe: Callable[[], Manifest],
    ) -> ExportResult[ReportT]:
        """Record what is in the folder, and put it in place, or beside its place when the check failed.

        Args:
            staging: the folder, with everything but `export.json`.
            archives: in it, by role.
            validation: None without a check.
            unused: checkpoint tensors that the model does not use.
            describe: makes what the task says in `export.json`.

        Raises:
            ValidationError: the check failed.
        """
        self.reporter.stage("Recording checksums")
        paths = {role: archive.path for role, archive in archives.items()}
        for path in paths.values():
            for journal in journal_paths(path):
                journal.unlink()
        manifest = {
            **describe(),
            "f16_overflows": {name: asdict(overflow) for name, overflow in self.casts.overflows.items()},
            "companions": [file.name for file in self.companions()],
            "unused_tensors": list(unused),
            "validation": validation.asdict() if validation is not None else None,
            "files": {archive.path.name: {"bytes": archive.nbytes} for archive in archives.values()}
            | file_digests(staging, *(path.name for path in paths.values())),
        }
        write_manifest(staging, manifest)
        if validation is not None and not validation.passed:
            failed = keep_beside(staging, self.target, "failed")
            raise validation.failure(
                self.source.name,
                f"What was exported is kept in {failed}, with its report; for f16 try --f32-attention, --f32-norm or --dtype f32.",
            )
        put_in_place(staging, self.target, self.options.force)
        placed = {role: self.target / path.name for role, path in paths.items()}
        return ExportResult(self.target, placed, manifest, validation)

    def warn_of_unused(self, unused: Sequence[str]) -> None:
        """Tell which tensors of the checkpoint have no parameter."""
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            self.reporter.warn(
                f"the checkpoint holds tensors that the model does not use: {', '.join(unused[:3])}{more}."
            )

    def report_overflows(self) -> None:
        """Tell which tensors had values beyond f16."""
        for name, overflow in self.casts.overflows.items():
            self.reporter.warn(
                f"{name}: {overflow.count} values up to {overflow.max_abs:.3g} do not fit f16 and were set to its "
                f"largest, 65504. Keep that tensor in f32: --keep-f32 {name}"
            )


def open_stages(
    source: str,
    output_dir: str | Path | None,
    options: ExportOptions,
    reporter: Reporter | None,
    *,
    revision: str | None,
    token: str | None,
    trust_remote_code: bool,
    dry: bool = False,
) -> Stages:
    """Resolve the source and the target of an export; see `export_llm` for the arguments.

    Args:
        dry: nothing will be made, so that the engine that would check it is not needed.

    Raises:
        EngineError: there is no engine to check with.
        OutputExistsError: the target is taken.
        SourceError: the source cannot be found or read.
    """
    reporter = reporter or LogReporter()
    if output_dir is not None:
        check_free(Path(output_dir), options.force)
    if options.check and not dry:
        require_engine(options.engine, options.tract_binary)
    reporter.stage(f"Reading {source}")
    model = open_source(
        source,
        revision=revision,
        token=token,
        trust_remote_code=trust_remote_code,
        require_tokenizer=options.require_tokenizer,
    )
    target = Path(output_dir) if output_dir is not None else Path(model.short_name)
    check_free(target, options.force)
    return Stages(model, target, options, reporter)


__all__ = ["MODEL_ROLE", "ExportResult", "Report", "Stages", "open_stages"]
