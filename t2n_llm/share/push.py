"""`t2n-llm push`: an export sent to the hub, once it is known to be whole and right.

In: an export folder, the name of a repository. Out: a commit there. Everything goes through
huggingface-hub, which sends no file twice.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, OptionError, T2NError, ValidationError
from t2n_llm.export.contents import REPLACED, export_patterns, other_files
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.verify import verify_export
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.share.errors import SharingError, bad_name, push_error

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FAILED = re.compile(r"\.failed(-\d+)?$")
_NAMED = 3  # files that are named before the rest is counted


@dataclass(frozen=True)
class PushResult:
    """An export on the hub.

    Attributes:
        repository: owner/name.
        url: its page.
        commit: its revision there.
        private: whether others can see it.
    """

    repository: str
    url: str
    commit: str
    private: bool

    def asdict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class PushRequest:
    """Where an export is to go; made, and refused, before any work is done for it.

    Attributes:
        repository: owner/name.
        public: everybody may see it; else a new repository is private.
        token: of the hub; None takes the one of `hf auth login` or HF_TOKEN.

    Raises:
        SharingError: no name of a repository, or no token.
    """

    repository: str
    public: bool = False
    token: str | None = None

    def __post_init__(self) -> None:
        from huggingface_hub import get_token

        if not _NAME.fullmatch(self.repository):
            raise bad_name(self.repository)
        if self.token is None and get_token() is None:
            raise SharingError(
                f"{self.repository}: no hub token with write access was found.",
                "Run `hf auth login`, set HF_TOKEN, or pass --token.",
            )


def push_export(
    folder: Path, request: PushRequest, *, unchecked: bool = False, reporter: Reporter | None = None
) -> PushResult:
    """Send an export to the hub.

    Args:
        folder: made by `t2n-llm export`.
        request: where to.
        unchecked: send one that was never compared with PyTorch.
        reporter: told what happens; None logs.

    Raises:
        ArchiveError: it is no export, or not as it was written.
        ValidationError: its check failed, or there was none.
        SharingError: the hub cannot be reached, or refuses.
    """
    reporter = reporter or LogReporter()
    manifest = read_manifest(folder)
    refuse_unchecked(folder, manifest, unchecked)
    reporter.stage(f"Verifying {folder.name}")
    _refuse_changed(folder, reporter)
    others = other_files(folder, manifest)
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        reporter.warn(f"not uploaded, because they are not part of the export: {', '.join(others[:_NAMED])}{more}.")
    try:
        return _sent(folder, manifest, request, reporter)
    except T2NError:
        raise
    except Exception as error:  # besides its own errors, those of whichever HTTP library it uses
        raise push_error(request.repository, error) from error


def refuse_unchecked(folder: Path, manifest: Mapping[str, Any], unchecked: bool) -> None:
    """Refuse an export that nobody knows to be right.

    Raises:
        ValidationError: its check failed, or there was none and `unchecked` is not set.
    """
    validation = manifest.get("validation")
    if _FAILED.search(folder.resolve().name) or (validation is not None and not validation.get("passed")):
        raise ValidationError(
            f"{folder}: its validation failed: tract differs from PyTorch.", "Export the model again."
        )
    if validation is None and not unchecked:
        raise ValidationError(
            f"{folder}: it was not validated against PyTorch.",
            "Run t2n-llm validate DIR --reference SOURCE --record, or pass --unchecked; the card mentions it.",
        )


def _refuse_changed(folder: Path, reporter: Reporter) -> None:
    report = verify_export(folder, reporter.progress)
    if not report.passed:
        first = report.findings[0]
        raise ArchiveError(
            f"{folder}: changed since the export: {first.name} is {first.problem}{f' ({first.detail})' if first.detail else ''}, "
            f"{len(report.findings)} in all.",
            "t2n-llm verify DIR lists all changes; export the model again.",
        )


def _sent(folder: Path, manifest: Mapping[str, Any], request: PushRequest, reporter: Reporter) -> PushResult:
    from huggingface_hub import HfApi

    hub, repository = HfApi(token=request.token), request.repository
    reporter.stage(f"Sending to {repository}")
    hub.create_repo(repository, private=not request.public, exist_ok=True)
    private = bool(hub.model_info(repository).private)
    if not private and not request.public:
        raise OptionError(f"{repository} exists and is public.", "Pass --public, or use another repository.")
    if private and request.public:
        reporter.warn(f"{repository} exists and is private; it stays private.")
    with warnings.catch_warnings(record=True) as said:  # of the hub's, on metadata
        warnings.simplefilter("always", UserWarning)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=export_patterns(manifest),
            delete_patterns=list(REPLACED),
            commit_message=f"{manifest['source']['name']} for tract, by t2n-llm",
        )
    for each in said:
        if "README.md" in str(each.message):
            reporter.warn(" ".join(str(each.message).split()))
    return PushResult(repository, f"{hub.endpoint}/{repository}", str(commit.oid), private)


__all__ = ["PushRequest", "PushResult", "push_export", "refuse_unchecked"]
