"""`t2n-llm pull`: an export fetched from the hub, in place only when it is what was pushed.

In: the name of a repository. Out: a folder whose every tensor was held against its `export.json`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from generic_export.errors import ArchiveError, SourceError, T2NError
from t2n_llm.export.contents import export_patterns
from t2n_llm.export.folder import MANIFEST_NAME, check_free, put_in_place, read_manifest
from t2n_llm.export.verify import IntegrityReport, verify_export
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.share.errors import SharingError, bad_name
from t2n_llm.source.hub import download_error
from t2n_llm.source.reference import SourceRef

_CACHE = ".cache"  # huggingface-hub's, in the folder that it fetches to


@dataclass(frozen=True)
class PullResult:
    """An export that was fetched.

    Attributes:
        folder: where it is.
        report: of its verification.
        checked: whether it was compared with PyTorch when it was made.
    """

    folder: Path
    report: IntegrityReport
    checked: bool


def pull_export(
    ref: SourceRef, target: Path | None = None, *, force: bool = False, reporter: Reporter | None = None
) -> PullResult:
    """Fetch an export from the hub; after one that was cut short, files that came whole are not fetched again.

    Args:
        ref: repository, revision, token.
        target: folder to make; None takes the repository's name, in the current folder.
        force: replace an earlier export.
        reporter: told what happens; None logs.

    Raises:
        SourceError: there is no such repository, or it cannot be reached.
        SharingError: it holds no export.
        ArchiveError: what came is not what was pushed.
        OutputExistsError: the folder exists.
    """
    reporter = reporter or LogReporter()
    if ref.name.count("/") != 1:
        raise bad_name(ref.name)
    target = target or Path(ref.name.rpartition("/")[2])
    check_free(target, force)
    partial = target.absolute().with_name(f".{target.name}.pull")
    reporter.stage(f"Fetching {ref.name}")
    _fetch(ref, partial)
    reporter.stage(f"Verifying {target.name}")
    report = verify_export(partial, reporter.progress)
    if not report.passed:
        first = report.findings[0]
        shutil.rmtree(partial, ignore_errors=True)
        raise ArchiveError(
            f"{ref.name}: differs from what was exported: {first.name} is {first.problem}, "
            f"{len(report.findings)} in all.",
            "Ask its owner to push it again. Nothing was kept.",
        )
    shutil.rmtree(partial / _CACHE, ignore_errors=True)
    put_in_place(partial, target, force)
    return PullResult(target, report, (read_manifest(target).get("validation") or {}).get("passed") is True)


def _fetch(ref: SourceRef, partial: Path) -> None:
    """Download the files that the repository's `export.json` names, and no others."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> None:
        snapshot_download(
            ref.name, revision=ref.revision, token=ref.token, local_dir=partial, allow_patterns=list(patterns)
        )

    try:
        fetch(MANIFEST_NAME)
        if not (partial / MANIFEST_NAME).is_file():
            raise SharingError(
                f"{ref.name}: not an export of t2n-llm; it has no {MANIFEST_NAME}.",
                "To export a model, use t2n-llm export.",
            )
        fetch(*export_patterns(read_manifest(partial)))
    except T2NError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except Exception as error:
        if not (partial / MANIFEST_NAME).is_file():
            shutil.rmtree(partial, ignore_errors=True)
        raise _described(ref, error) from error


def _described(ref: SourceRef, error: Exception) -> T2NError:
    said = download_error(ref.name, ref.revision, error)
    if isinstance(said, SourceError) and said.hint is not None:
        said.hint = said.hint.replace(", or use a local folder", "")
    return said


__all__ = ["PullResult", "pull_export"]
