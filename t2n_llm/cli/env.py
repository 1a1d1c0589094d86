"""`t2n-llm env`: what to put into a report of a problem."""

from __future__ import annotations

from t2n_llm.cli.parameters import JsonOption, QuietOption
from t2n_llm.cli.session import open_sink
from t2n_llm.cli.tables import filled_table


def env(as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Show versions, processor, memory, disk and variables for a bug report.

    Exit code 0: shown. 2: bad input. 3: a bug.
    """
    with open_sink(as_json, quiet) as sink:
        from t2n_llm.inspect.environment import read_environment

        found = read_environment()
    sink.record(found.asdict())
    sink.show(filled_table(("t2n-llm env", ""), found.rows()))
