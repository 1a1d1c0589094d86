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
from t2n_llm.cli.bench import bench, profile, quantize_report
from t2n_llm.cli.chat import chat
from t2n_llm.cli.console import OutputMode, Sink
from t2n_llm.cli.diagnose import coverage, diagnose
from t2n_llm.cli.export import card, export, pull, push, validate, verify
from t2n_llm.cli.generate import generate
from t2n_llm.cli.inspect import env, inspect
from t2n_llm.cli.remodel import remodel
from t2n_llm.cli.serve import serve
from t2n_llm.cli.session import EXIT_BAD_INPUT, EXIT_BUG, EXIT_DISAGREES, Session
from t2n_llm.cli.zoo import zoo
from t2n_llm.option import removal

if TYPE_CHECKING:
    from t2n_llm.check.agreement import ValidationReport


import errno
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from generic_export.errors import InterruptError, NotEnoughMemoryError, OptionError, T2NError
from generic_export.files import is_disk_full
from t2n_llm.export.folder import disk_full
from t2n_llm.option import guess

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


# --- errors as a user sees them ----------------------------------------------------------------------


COMMAND = "t2n-llm"
_ABOUT_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


class UnforeseenError(T2NError):
    """An unexpected exception, reported as a bug of t2n-llm."""


# click's own error for a wrong command line. typer carries a copy of click and exports only this child of it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def advice_on(error: BaseException) -> T2NError:
    """Return what to tell the user about an exception."""
    if isinstance(error, T2NError):
        return error
    if isinstance(error, Interrupted):
        kept = getattr(error, "kept", None)
        hint = f"Partial output is kept in {kept}: run the same command again to continue." if kept else None
        return InterruptError("interrupted.", hint or error.left or "Nothing was left behind.")
    if isinstance(error, _UsageError):
        unknown = getattr(error, "option_name", "")
        if (removed := removal(unknown.removeprefix("--").replace("-", "_"), unknown)) is not None:
            return removed
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", COMMAND)
        if context is not None and hasattr(error, "possibilities") and unknown:
            flags = [flag for each in context.command.params for flag in (*each.opts, *each.secondary_opts)]
            return OptionError(f"unknown option {unknown}.", f"{guess(unknown, flags)}Run {command} --help.")
        return OptionError(error.format_message(), f"Run {command} --help.")  # type: ignore[attr-defined]
    if isinstance(error, MemoryError):
        return NotEnoughMemoryError("out of memory.", "Try --low-memory, or a machine with more memory.")
    if isinstance(error, OSError) and is_disk_full(error):
        return disk_full(Path(error.filename or tempfile.gettempdir()))
    if isinstance(error, OSError) and error.errno in _ABOUT_A_NAME and error.filename:
        return OptionError(f"{error.filename}: {error.strerror}.", "Use a file or folder name that this system allows.")
    return UnforeseenError(
        f"unexpected {type(error).__name__}: {error}",
        f"This is a bug in t2n-llm: run {COMMAND} --debug ... and report its output.",
    )


# --- renamed options ---------------------------------------------------------------------------------


RENAMED: Mapping[str, Mapping[str, str]] = {
    "bench": {"--checkpoint": "--reference"},
    "diagnose": {"--out": "--output", "--memory": "--max-memory", "--depth": "--max-depth"},
    "profile": {"--past": "--depth"},
    "zoo run": {"--engine": "--runner"},
}
"""Today's names by command and earlier name; removed with the next release."""

_JSON_TOOK_A_FILE = ("coverage", "diagnose")
_JSON, _JSON_FILE, _STDOUT = "--json", "--json-file", "-"


def with_current_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words with today's options, and a warning for each option that was renamed.

    Args:
        words: of the command line, without the program.
    """
    start = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    named = " ".join(words[start : start + 2])
    command = named if named in RENAMED else named.partition(" ")[0]
    renamed = RENAMED.get(command, {})
    current, warnings = list(words), []
    for place, word in enumerate(words[start:], start):
        flag, equals, value = word.partition("=")
        if flag in renamed:
            current[place] = f"{renamed[flag]}{equals}{value}"
            warnings.append(f"{flag} of {command} was renamed to {renamed[flag]}.")
    if command in _JSON_TOOK_A_FILE:
        warnings += _json_to_a_file(current, start + 1)
    return current, warnings


def _json_to_a_file(words: list[str], start: int) -> list[str]:
    """Turn `--json -` and, behind the model, `--json FILE` into what they are called today, in place."""
    for place in range(start, len(words)):
        flag, equals, value = words[place].partition("=")
        if flag != _JSON:
            continue
        follows = words[place + 1] if not equals and place + 1 < len(words) else value
        if follows == _STDOUT:
            words[place : place + (1 if equals else 2)] = [_JSON]
            return ["--json no longer takes a value; it prints."]
        if equals or (follows and not follows.startswith("-") and place > start):
            words[place : place + (1 if equals else 2)] = [_JSON_FILE, follows]
            return ["--json FILE was renamed to --json-file FILE."]
    return []


# --- options that --help shows -----------------------------------------------------------------------


HELP, HELP_ALL = "--help", "--help-all"


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


ADVANCED: Mapping[str, frozenset[str]] = {
    "export": _names(
        "activations allow_nonfinite attention batch cache_dtype decode_steps device_map engine f32_attention "
        "f32_linear_accumulation f32_norm f32_residual fragments frontend image_size imatrix keep_f32 kv_cache low_memory "
        "max_layers max_memory mla num_logits_to_keep prefill_chunk public push quantizers recipe require_tokenizer "
        "save_imatrix stateful threads towers tract_binary weights_in_memory window_cache"
    ),
    "validate": _names(
        "atol decode_steps device_map engine low_memory max_layers max_memory revision rtol threads token tract_binary "
        "trust_remote_code"
    ),
    "generate": _names("beams min_p prefill_chunk prompt_lookup_tokens repetition_penalty template_kwargs"),
    "chat": _names("min_p prefill_chunk repetition_penalty"),
    "bench": _names("engine timeout tract warmup"),
    "diagnose": _names("atol jobs max_layers memory revision rtol strategy timeout token trust_remote_code"),
    "quantize-report": _names(
        "device_map engine max_layers max_memory revision threads token tokens tract_binary trust_remote_code window"
    ),
    "run": _names("expect expected fresh history html markdown max_memory ray_address seed shard update"),
}
"""Options that `--help` leaves out, by command and parameter."""


def wants_everything(words: list[str]) -> bool:
    """Return whether every option is asked for; `--help` takes its place in the words."""
    if HELP_ALL not in words:
        return False
    words[words.index(HELP_ALL)] = HELP
    return True


def set_help_level(command: Any, everything: bool) -> None:
    """Hide the advanced options of a command and of those below it, unless everything is shown.

    Args:
        command: of the command line.
        everything: show every option.
    """
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    advanced = frozenset() if everything else ADVANCED.get(command.name or "", frozenset())
    hidden = [parameter for parameter in command.params if parameter.name in advanced]
    for parameter in hidden:
        parameter.hidden = True
    if hidden:
        command.epilog = f"{HELP_ALL} shows {len(hidden)} more options."
    for each in getattr(command, "commands", {}).values():
        set_help_level(each, everything)


if __name__ == "__main__":
    main()
