"""The command `t2n-llm`: parses, calls, prints. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.main import get_command

from generic_export.interrupts import Interrupted, interruptible
from t2n_llm.cli.bench import bench, profile
from t2n_llm.cli.card import card
from t2n_llm.cli.chat import chat
from t2n_llm.cli.console import OutputMode, Sink
from t2n_llm.cli.diagnose import coverage, diagnose
from t2n_llm.cli.edge import COMMAND, UnforeseenError, advice_on
from t2n_llm.cli.env import env
from t2n_llm.cli.export import export, validate, verify
from t2n_llm.cli.generate import generate
from t2n_llm.cli.help_level import HELP, set_help_level, wants_everything
from t2n_llm.cli.inspect import inspect
from t2n_llm.cli.quantize_report import quantize_report
from t2n_llm.cli.remodel import remodel
from t2n_llm.cli.renamed_options import with_current_names
from t2n_llm.cli.serve import serve
from t2n_llm.cli.session import EXIT_BAD_INPUT, EXIT_BUG, EXIT_DISAGREES, Session
from t2n_llm.cli.share import pull, push
from t2n_llm.cli.zoo import zoo
from t2n_llm.option import removal

if TYPE_CHECKING:
    from t2n_llm.check.agreement import ValidationReport

_COMPLETION = "_T2N_LLM_COMPLETE"  # set by the shell that asks for completions

app = typer.Typer(
    help="Bring Hugging Face models to the tract inference engine.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"t2n-llm {version('t2n-llm')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")] = False,
) -> None:
    del version
    context.ensure_object(Session).debug = debug


# --- the edge: exceptions become one line, a hint and an exit code -----------------------------


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    write_utf8()
    words, renamed = with_current_names((sys.argv[1:] if arguments is None else arguments) or [HELP])
    everything = wants_everything(words) or _COMPLETION in os.environ  # a shell completes every option
    session = Session(mode=_spoken(words))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with interruptible():
        try:
            for warning in renamed:
                Sink(session.mode).warn(warning)
            code = _command_line(everything)(words, prog_name=COMMAND, standalone_mode=False, obj=session)
        except (Exception, Interrupted) as error:
            code = _report(error, session)
    sys.exit(code or 0)


@cache
def _command_line(everything: bool = False) -> Callable[..., Any]:
    """Return the parser of all commands, built once per process: typer takes 0.1 s to build it."""
    root = get_command(app)
    set_help_level(root, everything)
    _escape_help(root)
    return root


def _escape_help(command: Any) -> None:
    """Keep brackets in help texts, as in t2n-llm[plot], which rich would take for markup."""
    for parameter in command.params:
        parameter.help = escape(getattr(parameter, "help", None) or "")
    for each in getattr(command, "commands", {}).values():
        _escape_help(each)


def write_utf8() -> None:
    """Let what goes to files and pipes be UTF-8 on Windows too, where Python takes the code page of the machine."""
    for stream in (sys.stdout, sys.stderr):
        if sys.platform == "win32" and isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8")


def _spoken(words: list[str]) -> OutputMode:
    """Return how errors are printed."""
    return OutputMode.JSON if "--json" in words else OutputMode.HUMAN


def _report(error: BaseException, session: Session) -> int:
    """Print an error; return the exit code."""
    if session.debug:
        import traceback

        traceback.print_exception(error)
    advice = advice_on(error)
    advice.hint = advice.hint or f"Run {COMMAND} --debug ... for the Python traceback."
    report: ValidationReport | None = getattr(error, "report", None)
    Sink(session.mode).error(advice, report)
    if report is not None:
        return EXIT_DISAGREES
    return EXIT_BUG if isinstance(advice, UnforeseenError) else EXIT_BAD_INPUT


# each in a file of its own
for _command in (
    export,
    validate,
    verify,
    card,
    push,
    pull,
    generate,
    chat,
    serve,
    inspect,
    profile,
    bench,
    coverage,
    diagnose,
    remodel,
    env,
):
    app.command()(_command)
app.command(name="quantize-report")(quantize_report)


@app.command(
    "speculate",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _removed(context: typer.Context) -> NoReturn:
    """Reject a removed command, with any arguments."""
    error = removal(str(context.info_name), context.command_path)
    assert error is not None
    raise error


app.add_typer(zoo, name="zoo")


if __name__ == "__main__":
    main()
