"""What a user says of where a model is; it travels as one thing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from t2n_llm.option import Panel, option


@dataclass(frozen=True)
class SourceRef:
    """The name of a model, and how it may be reached.

    Attributes:
        name: hub id (`owner/name`), folder, or the path of a `.gguf` file; empty where another place says which.
    """

    name: str = ""
    revision: str | None = option(None, "Branch, tag or commit of a hub repository.")
    token: str | None = option(
        None, "Hub access token; by default the one of `hf auth login` or HF_TOKEN.", Panel.SOURCE
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.", Panel.SOURCE)
    max_layers: int = option(1000, "Most layers that a config may ask for.", Panel.SOURCE, minimum=1)

    @staticmethod
    def of(source: str | SourceRef) -> SourceRef:
        """Return a bare name as a reference."""
        return SourceRef(source) if isinstance(source, str) else source

    def named(self, name: str) -> SourceRef:
        """Return the same way to another model."""
        return replace(self, name=name)
