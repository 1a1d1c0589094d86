"""What counts as a line of code."""

from __future__ import annotations

from tests.load_script import load_script

code_lines = load_script("code_size").code_lines

TEXT = '''"""A module.

With two paragraphs.
"""

import os  # why


def joined(left: str, right: str) -> str:
    """Return both."""
    # a comment
    text = """
    a string
    """
    return os.path.join(
        left,

        right,
    ) + text
'''


def test_documentation_comments_and_blank_lines_are_no_code() -> None:
    assert code_lines(TEXT) == 9
    assert code_lines("") == code_lines('"""A module."""\n') == 0


def test_a_string_that_documents_nothing_is_code() -> None:
    assert code_lines('x = 1\n"""Of x."""\n') == 2
