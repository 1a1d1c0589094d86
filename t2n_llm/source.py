"""Where a model comes from: a hub id or a local folder, resolved to a config, a checkpoint and a tokenizer.

The hub is reached only through huggingface-hub, so its cache, tokens, offline mode and `HF_*` variables all hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import MissingTokenizerError, SourceError, UnknownArchitectureError
from generic_export.weights.safetensors_index import Checkpoint, open_checkpoint

# What an export reads of a repository; no .bin, .gguf, .onnx or image is ever downloaded.
_REPOSITORY_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.py")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TOKENIZER_MODELS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelSource:
    """A resolved model.

    Attributes:
        name: hub id or folder, as the user gave it.
        folder: local folder with its files.
        revision: commit hash of a hub snapshot, or None.
        config: transformers config.
        trust_remote_code: whether code beside the checkpoint may run.
    """

    name: str
    folder: Path
    revision: str | None
    config: Any
    trust_remote_code: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the model was given as a folder."""
        return self.revision is None

    @property
    def short_name(self) -> str:
        """Last part of the name: the default name of an export folder."""
        return self.folder.resolve().name if self.is_local else self.name.rsplit("/", 1)[-1]

    @property
    def public_name(self) -> str:
        """The name to record in what is shared: the hub id, or a folder's own name without the path to it."""
        return self.short_name if self.is_local else self.name

    def checkpoint(self) -> Checkpoint:
        """Open the safetensors files (headers only).

        Raises:
            CorruptCheckpointError: a file is missing, truncated, or disagrees with the index.
        """
        return open_checkpoint(self.folder)

    def tokenizer_files(self) -> list[Path]:
        """Return the tokenizer files that are there."""
        return [self.folder / name for name in TOKENIZER_FILES if (self.folder / name).is_file()]

    def has_tokenizer(self) -> bool:
        """Say whether a tokenizer can be built from the folder."""
        return any((self.folder / name).is_file() for name in _TOKENIZER_MODELS)

    def tokenizer(self) -> Any:
        """Load the tokenizer.

        Raises:
            MissingTokenizerError: there are no tokenizer files, or transformers cannot read them.
        """
        if not self.has_tokenizer():
            raise _missing_tokenizer(self.folder)
        return load_tokenizer(self.folder, self.trust_remote_code)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder.

    Raises:
        MissingTokenizerError: transformers cannot build one from the files there.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise MissingTokenizerError(
            f"{folder}: transformers cannot build its tokenizer: {_first_line(error)}",
            "Put the model's tokenizer files beside its config, or pass --no-tokenizer to export without one.",
        ) from error


def _missing_tokenizer(folder: Path) -> MissingTokenizerError:
    return MissingTokenizerError(
        f"{folder}: no tokenizer files (tokenizer.json, tokenizer.model or vocab.json).",
        "Put the model's tokenizer there, or pass --no-tokenizer to export without one.",
    )


def open_source(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    require_tokenizer: bool = True,
) -> ModelSource:
    """Resolve a hub id or a local folder.

    Args:
        name: `owner/name` on the hub, or a folder.
        revision: branch, tag or commit of a hub repository.
        token: hub access token; None takes the one of `huggingface-cli login` or `HF_TOKEN`.
        trust_remote_code: allow Python code that comes with the model.
        require_tokenizer: refuse a source without tokenizer files.

    Raises:
        SourceError: the id or folder cannot be found or read.
        UnknownArchitectureError: transformers does not know the model type.
        MissingTokenizerError: a tokenizer is required and there is none.
    """
    folder = Path(name).expanduser()
    commit = None
    if folder.is_dir():
        if revision is not None:
            raise SourceError(f"{name} is a local folder: --revision has no meaning there.", "Leave --revision out.")
    elif _looks_like_path(name):
        raise SourceError(
            f"{name}: no such folder.", "Give a folder with a config.json, or a hub id such as owner/name."
        )
    else:
        folder, commit = _download(name, revision, token)
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"{name}: no config.json in {folder}.", "Give the folder that holds config.json and *.safetensors."
        )
    source = ModelSource(name, folder, commit, _load_config(name, folder, trust_remote_code), trust_remote_code)
    if require_tokenizer and not source.has_tokenizer():
        raise _missing_tokenizer(folder)
    return source


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _download(repository: str, revision: str | None, token: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            repository, revision=revision, token=token, allow_patterns=list(_REPOSITORY_PATTERNS)
        )
    except GatedRepoError as error:
        raise SourceError(
            f"{repository}: access to this model must be granted by its owner.",
            "Ask for it on the model's page, then run `hf auth login` or pass --token.",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(
            f"{repository}: no revision {revision!r}.", "Give a branch, tag or commit of the repository."
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{repository}: no such model on the hub, or it is private.",
            "Check the spelling; for a private model run `hf auth login` or pass --token.",
        ) from error
    except HFValidationError as error:
        raise SourceError(
            f"{repository}: neither a local folder nor a hub id: {_first_line(error)}", "Give a folder, or owner/name."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SourceError(
            f"{repository}: not in the local cache, and the hub cannot be reached (offline?).",
            "Connect and retry, unset HF_HUB_OFFLINE, or give a local folder.",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise SourceError(
            f"{repository}: the hub answered: {_first_line(error)}", "Retry, or give a local folder."
        ) from error
    path = Path(folder)
    return path, path.name


def _load_config(name: str, folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, KeyError) as error:
        message = str(error)
        if "trust_remote_code" in message:
            raise SourceError(
                f"{name}: the model comes with its own Python code.", "Read that code, then pass --trust-remote-code."
            ) from error
        if "model type" in message or "model_type" in message:
            raise UnknownArchitectureError(
                f"{name}: transformers does not know this model type: {_first_line(error)}",
                "Install a transformers release that knows it.",
            ) from error
        raise _unreadable_config(name, error) from error
    except OSError as error:
        raise _unreadable_config(name, error) from error
    if getattr(config, "quantization_config", None) is not None:
        method = _quantization_method(config.quantization_config)
        raise SourceError(
            f"{name}: the checkpoint is quantised already ({method}), which cannot be exported yet.",
            "Give the original bf16, f16 or f32 checkpoint.",
        )
    return config


def _unreadable_config(name: str, error: Exception) -> SourceError:
    return SourceError(f"{name}: config.json cannot be read: {_first_line(error)}", "Download the model again.")


def _quantization_method(quantization: Any) -> str:
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    return str(method or "unknown method")


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
