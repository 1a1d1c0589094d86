"""Options that are declared once, as options of the command line; and those that every command shares.

In: a command whose parameters are dataclasses of options. Out: the same command with one parameter an option, in panels.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from generic_export.errors import SourceError
from t2n_llm.cli.console import OutputMode
from t2n_llm.cli.session import Session
from t2n_llm.export.folder import MANIFEST_NAME, no_export
from t2n_llm.option import Option, Panel, made, options_of
from t2n_llm.source.reference import refuse_address


def _speaks_json(context: typer.Context, value: bool) -> bool:
    """Note that errors are told as JSON too."""
    if value:
        context.ensure_object(Session).mode = OutputMode.JSON
    return value


def _speaks_little(context: typer.Context, value: bool) -> bool:
    """Note that an error is told without the checks before it, unless in JSON."""
    session = context.ensure_object(Session)
    if value and session.mode is OutputMode.HUMAN:
        session.mode = OutputMode.QUIET
    return value


# What is mistyped is refused here, before anything is imported that takes seconds.


def require_export(path: Path) -> Path:
    """Refuse a path that is neither an export's folder nor in one."""
    if not any((folder / MANIFEST_NAME).is_file() for folder in (path, path.absolute().parent)):
        raise no_export(path)
    return require_archive(path)


def require_archive(path: Path) -> Path:
    """Refuse a path where nothing is."""
    if not path.exists():
        raise no_export(path)
    return path


def require_archives(paths: list[Path]) -> list[Path]:
    """Do `require_archive` for each."""
    return [require_archive(path) for path in paths]


def require_source(name: str) -> str:
    """Refuse an address, and what is written as a path where nothing is."""
    refuse_address(name)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not os.path.exists(os.path.expanduser(name)):
        raise SourceError(
            f"{name}: no such folder.", "Use a folder with a config.json, or a hub id such as owner/name."
        )
    return name


ArchiveArgument = Annotated[
    Path,
    typer.Argument(help="Export folder, or an archive: folder, tar, tgz.", callback=require_archive),
]
ExportArgument = Annotated[
    Path,
    typer.Argument(help="Export folder, or its archive.", callback=require_export),
]
ExportFolderArgument = Annotated[Path, typer.Argument(help="Export folder.", callback=require_export)]
DeviceOption = Annotated[str, typer.Option(help="Device: cpu, cuda or metal.")]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Prompt tokens per call; default: recorded in export.json."),
]
ChatTemplateOption = Annotated[bool, typer.Option("--chat/--raw", help="Use the model's chat template, if any.")]
TemplateVariablesOption = Annotated[
    str | None,
    typer.Option(
        "--template-kwargs",
        metavar="JSON",
        help="Template variables, such as '{\"enable_thinking\": false}'.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_speaks_json,
        help="Print one JSON object.",
        rich_help_panel=Panel.OUTPUT.value,
    ),
]
JsonLinesOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_speaks_json,
        help="Print JSON lines: pieces, then a summary.",
        rich_help_panel=Panel.OUTPUT.value,
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        callback=_speaks_little,
        help="Print only warnings and errors.",
        rich_help_panel=Panel.OUTPUT.value,
    ),
]


def read_template_variables(text: str | None) -> dict[str, Any]:
    """Return the variables that `--template-kwargs` names.

    Raises:
        BadParameter: it is no JSON object.
    """
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it is not JSON: {error}.", param_hint="--template-kwargs") from error
    if not isinstance(given, dict):
        raise typer.BadParameter(
            'it is not a JSON object such as {"enable_thinking": false}.', param_hint="--template-kwargs"
        )
    return given


def most_new_tokens(otherwise: int) -> Any:
    """Return the option of how long an answer may be.

    Args:
        otherwise: tokens, where neither the user nor the model's settings say.
    """
    return typer.Option(
        "--max-new-tokens",
        "-n",
        min=1,
        metavar="N",
        help=f"Maximum number of tokens; default: the model's, or {otherwise}.",
        show_default=False,
    )


_PANELS = [panel.value for panel in Panel]


def takes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one parameter for each option of the dataclasses that it takes; those of a panel stand together.

    The command is called with the dataclasses, made of what was given on the command line.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, own in inspect.signature(command).parameters.items():
        shown = own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        parameters += _parameters(groups[name]) if name in groups else [shown]
    parameters.sort(key=lambda each: _place(each.annotation))

    def called(**given: Any) -> Any:
        for name, group in groups.items():
            keywords = [option.keyword for option in options_of(group)]
            values = {keyword: given.pop(keyword) for keyword in keywords}
            given[name] = made(group, {keyword: value for keyword, value in values.items() if value is not None})
        return command(**given)

    called.__doc__, called.__name__ = command.__doc__, command.__name__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return called


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    for option in options_of(group):
        hint, default = _on_the_command_line(option)
        yield inspect.Parameter(
            option.keyword,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hint, _typer_option(option)],
        )


def _on_the_command_line(option: Option) -> tuple[Any, Any]:
    """Return the type and the default that typer can read: lists for tuples, text for what may be text."""
    if get_origin(option.hint) is tuple:
        return list[str] | None, None
    if {str, int} <= set(get_args(option.hint)):
        return str | None, option.default
    return option.hint, option.default


def _typer_option(option: Option) -> OptionInfo:
    declaration = option.declaration
    flags = declaration.flags or (f"--{option.keyword.replace('_', '-')}",)
    further: Mapping[str, Any] = {} if declaration.minimum is None else {"min": declaration.minimum}
    info: OptionInfo = typer.Option(
        *flags,
        help=declaration.help,
        metavar=declaration.metavar,
        rich_help_panel=None if declaration.panel is Panel.FIRST else declaration.panel.value,
        **further,
    )
    return info


def _place(annotation: Any) -> int:
    """Return where a parameter stands: arguments, then the panels in their order."""
    shown = next((each for each in get_args(annotation) if isinstance(each, OptionInfo)), None)
    if shown is None:
        return -1
    return _PANELS.index(shown.rich_help_panel or Panel.FIRST.value)
