"""`t2n-llm card`: the page of an export, written again, or for an export that has none."""

from __future__ import annotations

from typing import Annotated

import typer

from generic_export.errors import OptionError
from t2n_llm.cli.parameters import ExportFolderArgument, JsonOption, QuietOption
from t2n_llm.cli.session import open_sink


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
