"""What every export does around its graph: the source opened, archives written, companions copied, the user told.

In: options, and a graph with its sources. Out: files in the staging folder; what was learnt on the way is in the cast report.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from generic_export.export import producer_version
from generic_export.nnef.archive import Resume
from generic_export.nnef.document import WrittenArchive, write_document
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.journal import journal_paths
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.source import TensorSource
from quant.half import CastReport, OverflowCount
from quant.stream import QuantizationError
from t2n_llm.folder import check_free, json_text
from t2n_llm.options import ARCHIVES, ExportOptions, LogReporter, Reporter
from t2n_llm.source import ModelSource, open_source

MODEL_ROLE = "model"
"""What the archive of a folder with a single one is called."""

_DAT = ".dat"


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
        """Return what a runtime needs beside the archive; configs, tokenizer, chat template."""
        configs = [self.source.folder / name for name in ("config.json", "generation_config.json")]
        return [file for file in (*configs, *self.source.tokenizer_files()) if file.is_file()]

    def copy_companions(self, staging: Path) -> list[str]:
        """Copy the companions into the folder, and return their names."""
        companions = self.companions()
        for file in companions:
            shutil.copyfile(file, staging / file.name)
        return [file.name for file in companions]

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
) -> Stages:
    """Resolve the source and the target of an export; see `export_llm` for the arguments.

    Raises:
        OutputExistsError: the target is taken.
        SourceError: the source cannot be found or read.
    """
    reporter = reporter or LogReporter()
    if output_dir is not None:
        check_free(Path(output_dir), options.force)
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


def drop_journals(archive: Path) -> None:
    """Remove what made a written archive resumable."""
    for journal in journal_paths(archive):
        journal.unlink()


__all__ = ["MODEL_ROLE", "Stages", "drop_journals", "open_stages"]
