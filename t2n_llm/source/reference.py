"""What a user says of where a model is; it travels as one thing."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from generic_export.errors import SourceError
from t2n_llm.option import Panel, option

_ADDRESS = re.compile(r"https?://[^/]+/(?P<id>[^/?#]+/[^/?#]+)")


def refuse_address(name: str) -> None:
    """Refuse the address of a page in the place of a hub id.

    Raises:
        SourceError: it is one; the advice is the hub id in it.
    """
    if name.startswith(("http://", "https://")):
        found = _ADDRESS.match(name)
        raise SourceError(f"{name}: an address.", f"Use the hub id alone: {found['id'] if found else 'owner/name'}.")


@dataclass(frozen=True)
class SourceRef:
    """The name of a model, and how it may be reached.

    Attributes:
        name: hub id (`owner/name`), folder, or the path of a `.gguf` file; empty where another place says which.
    """

    name: str = ""
    revision: str | None = option(None, "Branch, tag or commit of a hub repository.")
    token: str | None = option(None, "Hub token; default: HF_TOKEN or `hf auth login`.", Panel.SOURCE)
    trust_remote_code: bool = option(False, "Run the Python code of the model.", Panel.SOURCE)
    max_layers: int = option(1000, "Maximum number of layers of a config.", Panel.SOURCE, minimum=1)

    @staticmethod
    def of(source: str | SourceRef) -> SourceRef:
        """Return a bare name as a reference."""
        return SourceRef(source) if isinstance(source, str) else source

    def named(self, name: str) -> SourceRef:
        """Return the same way to another model."""
        return replace(self, name=name)
