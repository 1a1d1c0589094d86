"""Arguments and options that several commands have, each with its name and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ArchiveArgument = Annotated[
    Path, typer.Argument(help="Folder made by `t2n-llm export`, or an archive: folder, tar, tgz.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or metal, where tract has it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
TokenOption = Annotated[
    str | None, typer.Option(help="Hub access token; by default the one of `hf auth login` or HF_TOKEN.")
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
