"""`t2n-llm export`, `validate`, `verify`, `card`, `push` and `pull`: export folders made, checked, described and shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from generic_export.errors import OptionError, T2NError
from t2n_llm.cli.parameters import (
    ExportArgument,
    ExportFolderArgument,
    JsonOption,
    QuietOption,
    require_source,
    takes_options,
)
from t2n_llm.cli.session import EXIT_DISAGREES, open_sink, quiet_libraries
from t2n_llm.export.options import ExportOptions, ValidateOptions
from t2n_llm.source.reference import SourceRef

if TYPE_CHECKING:
    from t2n_llm.cli.console import Sink
    from t2n_llm.share.push import PushRequest, PushResult


@takes_options
def export(
    source: Annotated[
        str,
        typer.Argument(help="Hub id, local folder, or .gguf file.", callback=require_source),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to create; default: the name of the model."),
    ] = None,
    options: ExportOptions = ExportOptions(),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written, with sizes; write nothing.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload the export to a private hub repository.", rich_help_panel="Output"
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public (with --push).", rich_help_panel="Output")
    ] = False,
    origin: SourceRef = SourceRef(),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Export a model and verify tract's outputs against PyTorch.

    Exit code 0: exported (and checked). 1: tract disagrees; the archive is kept as DIR.failed. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        quiet_libraries(sink)
        model = origin.named(source)
        request = _push_request(push, public, origin.token, options.check)
        from t2n_llm.diffusion.pipeline import export_pipeline, is_pipeline

        if is_pipeline(source):
            if dry_run or request is not None:
                raise OptionError("--dry-run and --push do not apply to a pipeline of diffusers.", "Omit them.")
            sink.exported_pipeline(export_pipeline(source, output, options=options, reporter=sink))
            return
        from t2n_llm.export.pipeline import export_llm, plan_llm_export

        if dry_run:
            sink.planned(plan_llm_export(model, output, options=options, reporter=sink))
            return
        result = export_llm(model, output, options=options, reporter=sink)
        pushed = _pushed(result.output_dir, request, sink) if request is not None else None
    sink.exported(result, pushed, source=source, adapter=options.adapter, vocoder=options.vocoder)


def _push_request(repository: str | None, public: bool, token: str | None, checked: bool) -> PushRequest | None:
    """Return where an export goes to; what is wrong with that shows before the work."""
    if repository is None:
        if public:
            raise OptionError("--public requires --push.", "Add --push OWNER/NAME, or omit --public.")
        return None
    if not checked:
        raise OptionError(
            "--push uploads validated exports only.",
            "Omit --no-check, or run t2n-llm push DIR OWNER/NAME --unchecked afterwards.",
        )
    from t2n_llm.share.push import PushRequest

    return PushRequest(repository, public, token)


def _pushed(folder: Path, request: PushRequest, sink: Sink) -> PushResult:
    """Send an export that was just made; it stays where it is, whatever happens."""
    from t2n_llm.share.push import push_export

    try:
        return push_export(folder, request, reporter=sink)
    except T2NError as error:
        error.hint = f"{error.hint or ''} The export is in {folder}: t2n-llm push {folder} {request.repository}".strip()
        raise


@takes_options
def validate(
    folder: ExportFolderArgument,
    reference: Annotated[
        str | None, typer.Option(help="Original: hub id or folder; default: the recorded hub id.")
    ] = None,
    origin: SourceRef = SourceRef(),
    options: ValidateOptions = ValidateOptions(),
    noted: Annotated[
        bool, typer.Option("--record", help="Record the result in export.json and the model card.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare an export with PyTorch in tract.

    Exit code 0: they agree within the element type's tolerance. 1: they differ. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        quiet_libraries(sink)
        from t2n_llm.export.revalidate import validate_folder

        if noted and (options.atol is not None or options.rtol is not None):
            raise OptionError("--record does not accept --atol or --rtol.", "Omit --atol and --rtol.")
        report = validate_folder(folder, origin.named(reference or ""), options=options, reporter=sink)
        if noted:
            from t2n_llm.export.card_page import note

            if not note(folder, validation=report.asdict()):
                sink.warn(f"{folder / 'README.md'} was edited and is not changed.")
        if not (report.passed or as_json):
            raise report.failure(
                str(folder), "Check that the reference is the model that was exported; if it is, export it again."
            )
    sink.validated(report)
    if not report.passed:
        raise typer.Exit(EXIT_DISAGREES)


def verify(
    path: ExportArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare with the source: read, cast and quantize again.")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(help="Original, for --deep; default: the recorded hub id."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(metavar="PATH", help="The merged adapter, for --deep.")] = None,
    vocoder: Annotated[str | None, typer.Option(metavar="PATH", help="The vocoder, for --deep.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare every tensor and file of an export with its SHA-256.

    Exit code 0: as written. 1: damaged; each bad, missing or extra tensor is named. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.export.verify import export_folder, verify_export

        if not deep and any(given is not None for given in (reference, adapter, vocoder)):
            raise OptionError("--reference, --adapter and --vocoder require --deep.", "Add --deep, or omit them.")
        report = verify_export(path, sink.progress)
        if deep:
            quiet_libraries(sink)
            from t2n_llm.export.against_source import compare_with_source

            compared = compare_with_source(
                export_folder(path), reference, adapter=adapter, vocoder=vocoder, reporter=sink
            )
            report = replace(report, source=compared)
    sink.verified(report)
    if not report.passed:
        raise typer.Exit(EXIT_DISAGREES)


# --- model card --------------------------------------------------------------------------------------


def card(
    folder: ExportFolderArgument,
    show: Annotated[bool, typer.Option("--print", help="Print the card; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an edited README.md.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the model card of an export (README.md).

    Exit code 0: written. 2: bad input, or README.md was edited (use --force). 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.export.card_page import card_text, write_card

        if show and force:
            raise OptionError("--print and --force exclude each other.", "Omit one of them.")
        text = card_text(folder) if show else None
        path = None if show else write_card(folder, force=force)
    sink.record({"card": text} if path is None else {"card": path.read_text(encoding="utf-8"), "path": str(path)})
    if text is not None and not as_json:
        sink.text(text)
    elif path is not None:
        sink.say(f"written   {path}")


# --- hub ---------------------------------------------------------------------------------------------


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
