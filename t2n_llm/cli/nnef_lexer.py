"""Colours for `graph.nnef`: a pygments lexer of the flat syntax with tract's extension lines."""

from __future__ import annotations

from pygments.lexer import RegexLexer, bygroups
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text


class NnefLexer(RegexLexer):
    """Highlights comments, definitions, operators by their call, named arguments, strings and numbers."""

    name = "NNEF"
    aliases = ("nnef",)
    filenames = ("*.nnef",)
    tokens = {  # noqa: RUF012 - the base class wants a plain dict
        "root": [
            (r"\s+", Text),
            (r"#[^\n]*", Comment.Single),
            (r"(extension)(\s+)(\w+)", bygroups(Keyword, Text, Keyword.Type)),
            (r"\b(version|fragment|graph)\b", Keyword),
            (r"\b(tensor|scalar|integer|logical|string)\b", Keyword.Type),
            (r"\b(true|false)\b", Keyword.Constant),
            (r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'', String),
            (r"-?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?", Number),
            (r"[^\W\d]\w*(?=\s*(<\w+>)?\()", Name.Function),
            (r"([^\W\d]\w*)(\s*)(=)(?!=)(?=[^\n]*\()", bygroups(Name.Variable, Text, Operator)),
            (r"([^\W\d]\w*)(\s*)(=)(?!=)", bygroups(Name.Attribute, Text, Operator)),
            (r"[^\W\d]\w*", Name),
            (r"->|[=<>+\-*/!&|?]", Operator),
            (r"[()\[\]{},;:]", Punctuation),
            (r".", Text),
        ]
    }
