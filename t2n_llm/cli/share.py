"""`t2n-llm push` and `pull`: exports on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t2n_llm.cli.parameters import ExportFolderArgument, JsonOption, QuietOption
from t2n_llm.cli.session import open_sink, quiet_libraries
from t2n_llm.source.reference import SourceRef

TokenOption = Annotated[str | None, typer.Option(help="Hub token; default: HF_TOKEN or `hf auth login`.")]


def push(
    folder: ExportFolderArgument,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; created if needed.")],
    public: Annotated[bool, typer.Option("--public", help="Make the repository public; default: private.")] = False,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Send an export without validation.")] = False,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Verify an export and upload it to the hub.

    Exit code 0: it is there. 2: bad input, an export that is changed or wrong, or the hub refuses. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        quiet_libraries(sink)
        from t2n_llm.share.push import PushRequest, push_export

        result = push_export(folder, PushRequest(repository, public, token), unchecked=unchecked, reporter=sink)
    sink.record(result.asdict())
    sink.say(f"pushed    {result.url} ({'private' if result.private else 'public'}), commit {result.commit}")


def pull(
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub.")],
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to create; default: the name of the repository.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Download an export from the hub and verify it. An interrupted pull skips completed files.

    Exit code 0: it is in place, as it was pushed. 2: bad input, no such repository, or damaged. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        quiet_libraries(sink)
        from t2n_llm.share.pull import pull_export

        ref = SourceRef(repository, revision, token)
        result = pull_export(ref, folder, force=force, reporter=sink)
    sink.record(result.report.asdict() | {"path": str(result.folder), "checked": result.checked})
    sink.say(f"pulled    {result.folder}: {result.report.tensors} tensors, {result.report.bytes / 1e6:.1f} MB verified")
    if not result.checked:
        sink.warn("this export was not validated against PyTorch.")
