"""What leaves this machine in a debug bundle says nothing of the machine: no user, host, home folder or environment.

In: text that is about to be written to a bundle. Out: the same text without them.
"""

from __future__ import annotations

import getpass
import platform
import re

# Absolute paths, of which the last part is kept: `/home/someone/models/a.py` is `a.py`.
_PATH = re.compile(r"(?<![\w/.])(?:/[\w.@+~ -]*[\w.@+~-])+/(?=[\w.@+~-])|[A-Za-z]:\\(?:[^\\\s\"']+\\)+")
_IDENTITY = re.compile(r'^\s*\("(?:user|host|os)",[^\n]*\),?\n', re.MULTILINE)
_DANGLING_COMMA = re.compile(r"\),(\s*\];)")
# Names that are no secret, and are words that a report needs.
_COMMON_NAMES = frozenset({"root", "user", "localhost", "ubuntu", "admin", "runner", "nobody", ""})


def redacted(text: str) -> str:
    """Return text without folders, and without the names of the user and of the machine."""
    shortened = _PATH.sub("", text)
    for name in sorted(_own_names(), key=len, reverse=True):  # box.example before box
        shortened = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(redacted)", shortened)
    return shortened


def without_identity(graph_text: str) -> str:
    """Return a graph's text without the properties that say who exported it (`dump_identity_properties`)."""
    return _DANGLING_COMMA.sub(r")\1", _IDENTITY.sub("", graph_text))


def _own_names() -> set[str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = ""
    return {user, platform.node(), platform.node().split(".")[0]} - _COMMON_NAMES


__all__ = ["redacted", "without_identity"]
