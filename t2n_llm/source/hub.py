"""Where a model comes from: a hub id, a local folder or a GGUF file, resolved to a config, a checkpoint and a tokenizer.

The hub is reached only through huggingface-hub, so its cache, tokens, offline mode and `HF_*` variables all hold.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from generic_export.errors import DiskFullError, MissingTokenizerError, SourceError, UnknownArchitectureError
from generic_export.files import is_disk_full
from generic_export.weights.checkpoint import Checkpoint, open_checkpoint
from generic_export.weights.pinned_file import PinnedFile
from quant.prequantized import decode_checkpoint
from quant.prequantized.gguf_parts import first_part, model_name
from t2n_llm.source.limits import refuse_layers
from t2n_llm.source.quantization import quantization_of
from t2n_llm.source.reference import SourceRef, refuse_address
from t2n_llm.source.source_card import CARD_NAME
from t2n_llm.source.source_files import TOKENIZER_FILES, TOKENIZER_MODELS, hold_files
from t2n_llm.source.vocoder import Vocoder
from t2n_llm.source.wrapped_names import unwrapped

logger = logging.getLogger(__name__)

# What an export reads of a repository; no .gguf, .onnx or image is ever downloaded.
_REPOSITORY_PATTERNS = (
    *("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.py"),
    CARD_NAME,
)
# What is read of one whose weights are not wanted.
_CONFIG_PATTERNS = ("config.json", "generation_config.json", "*.py")
# Its weights where it has no safetensors (before 2023); not what a trainer left beside them.
_PYTORCH_PATTERNS = ("pytorch_model*.bin",)
# The same weights once more, in the vendor's own layout.
_DUPLICATE_PATTERNS = ("consolidated*", "original/*")

GGUF_SUFFIX = ".gguf"

_ANY_TEXT = "text"


@dataclass(frozen=True)
class ModelSource:
    """A resolved model.

    Attributes:
        name: hub id or folder, as the user gave it.
        folder: local folder with its files.
        revision: commit hash of a hub snapshot, or None.
        config: transformers config.
        trust_remote_code: whether code beside the checkpoint may run.
        quantization: `quantization_config` of a checkpoint that is quantised already, or None; `config` is without.
        gguf: the GGUF file that the model comes from, the first where it has parts, or None; `folder` then holds what was
            read of its metadata.
        keeps: what must live as long as this source (the folder of a GGUF file's metadata).
        held: the files that are read beside the weights, opened before anything was read of them.
        vocoder: beside a model of spectrograms, or None.
    """

    name: str
    folder: Path
    revision: str | None
    config: Any
    trust_remote_code: bool = False
    quantization: Mapping[str, Any] | None = None
    gguf: Path | None = None
    keeps: Any = None
    held: tuple[PinnedFile, ...] = ()
    vocoder: Vocoder | None = None

    @property
    def is_local(self) -> bool:
        """Whether the model was given as a folder."""
        return self.revision is None

    @property
    def short_name(self) -> str:
        """Last part of the name: the default name of an export folder."""
        if self.gguf is not None:
            return model_name(self.gguf)
        return self.folder.resolve().name if self.is_local else self.name.rsplit("/", 1)[-1]

    @property
    def weights(self) -> Path:
        """Where the weights are: the folder, or a GGUF file."""
        return self.gguf or self.folder

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint must be dequantised for PyTorch."""
        return self.gguf is not None or self.quantization is not None

    @property
    def public_name(self) -> str:
        """The name to record in what is shared: the hub id, or a folder's own name without the path to it."""
        return self.short_name if self.is_local else self.name

    def checkpoint(self) -> Checkpoint:
        """Open the weight files, safetensors, PyTorch or GGUF (headers only); what is quantised is decoded while it streams.

        Raises:
            WeightError: there are none, unpickling one would run code, or two have one name.
            CorruptCheckpointError: a file is missing, truncated, or disagrees with the index.
        """
        if self.gguf is not None:
            from t2n_llm.source.gguf import gguf_checkpoint

            return gguf_checkpoint(self.gguf, self.config)
        checkpoint = unwrapped(open_checkpoint(self.folder))
        if self.quantization is None:
            return checkpoint
        decoding = decode_checkpoint(self.quantization, checkpoint.tensors)
        return replace(checkpoint, tensors=decoding.tensors, notes=(*checkpoint.notes, *decoding.notes))

    def tokenizer_files(self) -> list[Path]:
        """Return the tokenizer files that are there."""
        return [self.folder / name for name in TOKENIZER_FILES if (self.folder / name).is_file()]

    def has_tokenizer(self) -> bool:
        """Say whether there are the files of a tokenizer."""
        return _has_tokenizer(self.folder)

    def tokenizer(self) -> Any:
        """Load the tokenizer.

        Raises:
            MissingTokenizerError: there are no tokenizer files, or transformers cannot read them.
        """
        return load_tokenizer(self.folder, self.trust_remote_code)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder.

    Raises:
        MissingTokenizerError: it has none, or transformers cannot build it from the files there.
    """
    from transformers import AutoTokenizer

    hint = "Add the model's tokenizer files, or pass --no-tokenizer to export without them."
    if not _has_tokenizer(folder):
        raise MissingTokenizerError(f"{folder}: no tokenizer files ({', '.join(sorted(TOKENIZER_MODELS))}).", hint)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers itself raises plain Exception
        if isinstance(error, ImportError):  # such as mistral-common for tekken.json
            hint = "Install that package, or pass --no-tokenizer to export without it."
        raise MissingTokenizerError(
            f"{folder}: transformers cannot build its tokenizer: {_one_line(error)}", hint
        ) from error


def opening_ids(tokenizer: Any) -> list[int]:
    """Return what a tokenizer puts before every text: `<bos>` for Llama and Gemma, nothing for SmolLM2 and Qwen.

    A model that has always read it first reads any other text badly: its attention rests on that token.
    """
    plain = tokenizer.encode(_ANY_TEXT, add_special_tokens=False)
    whole = tokenizer.encode(_ANY_TEXT)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return [int(each) for each in whole[:start]]
    return []


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_MODELS)


def open_source(
    source: str | SourceRef, *, require_tokenizer: bool = True, tell: Callable[[str], None] = logger.debug
) -> ModelSource:
    """Resolve a hub id, a local folder or a GGUF file.

    Args:
        source: where the model is; a bare name needs no revision, token or trust.
        require_tokenizer: refuse a source without a tokenizer that transformers can load.
        tell: told what is done meanwhile that takes seconds.

    Raises:
        SourceError: the id or folder cannot be found or read.
        UnknownArchitectureError: transformers does not know the model type.
        MissingTokenizerError: a tokenizer is required and there is none.
    """
    ref = SourceRef.of(source)
    name = ref.name
    gguf = _gguf_file(name)
    if gguf is not None:
        return _open_gguf(gguf, ref, require_tokenizer, tell)
    folder, commit = _fetched(ref)
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"{name}: no config.json in {folder}.", "Use the folder that contains config.json and the weights."
        )
    held = hold_files(folder, ref.trust_remote_code)
    refuse_layers(name, folder / "config.json", ref.max_layers)
    quantization = quantization_of(name, folder)
    config = _load_config(name, folder, ref.trust_remote_code)
    opened = ModelSource(name, folder, commit, config, ref.trust_remote_code, quantization, held=held)
    if require_tokenizer:
        _refuse_larger(name, opened.tokenizer(), config)
    return opened


def _refuse_larger(name: str, tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer of another model; tokens that were added to it may have no row in the table, and never be used."""
    tokens = getattr(tokenizer, "vocab_size", 0)
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if isinstance(vocabulary, int) and isinstance(tokens, int) and tokens > vocabulary:
        raise SourceError(
            f"{name}: the tokenizer has {tokens} tokens, but the model's vocab_size is {vocabulary}.",
            "Use the model's own tokenizer, or pass --no-tokenizer.",
        )


def _fetched(ref: SourceRef, wanted: tuple[str, ...] = _REPOSITORY_PATTERNS) -> tuple[Path, str | None]:
    """Return the folder that a reference stands for, downloaded if need be, and the commit of a hub snapshot."""
    folder = _local_folder(ref.name)
    if folder is None:
        return _download(ref, wanted)
    _refuse_revision(ref, "folder")
    return folder, None


def is_gguf(name: str) -> bool:
    """Say whether a name stands for a GGUF file, or a folder with one."""
    return _gguf_file(name) is not None


def _gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name stands for: the file, the first of its parts, or the one model of a folder."""
    from t2n_llm.source.gguf import gguf_in

    path = _existing_path(name)
    if path is None:
        return None
    if path.is_dir():
        return gguf_in(path)
    return first_part(path) if path.suffix == GGUF_SUFFIX else None


def _existing_path(name: str) -> Path | None:
    """Return what a name stands for on this machine's disk; None when there is no such file or folder."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # longer than a path can be; ~ of a user who does not exist
        return None


def _refuse_revision(ref: SourceRef, what: str) -> None:
    if ref.revision is not None:
        raise SourceError(f"{ref.name} is a local {what}: --revision does not apply.", "Omit --revision.")


def _open_gguf(path: Path, ref: SourceRef, require_tokenizer: bool, tell: Callable[[str], None]) -> ModelSource:
    from t2n_llm.source.gguf import read_gguf_metadata

    _refuse_revision(ref, "file" if Path(ref.name).suffix == GGUF_SUFFIX else "folder")
    metadata = read_gguf_metadata(path, ref.max_layers, require_tokenizer=require_tokenizer, tell=tell)
    folder = Path(metadata.folder.name)
    held = hold_files(folder)
    return ModelSource(ref.name, folder, None, metadata.config, gguf=path, keeps=metadata.folder, held=held)


def fetch_folder(ref: SourceRef) -> tuple[Path, str | None]:
    """Return the folder that a reference stands for, downloaded if need be, and the commit of a hub snapshot.

    Raises:
        SourceError: the id or folder cannot be found or read.
    """
    folder = _local_folder(ref.name)
    return _download(ref) if folder is None else (folder, None)


def open_vocoder(ref: SourceRef) -> Vocoder:
    """Open a vocoder, a hub id or a folder; see `Vocoder.of`."""
    folder, revision = fetch_folder(ref)
    return Vocoder.of(ref.name, folder, revision)


@dataclass(frozen=True)
class ConfigSource:
    """The config of a model alone.

    Attributes:
        name: hub id, folder or file, as the user gave it.
        config: transformers config.
        revision: commit hash of a hub snapshot, or None.
        trust_remote_code: whether code beside the config may run.
    """

    name: str
    config: Any
    revision: str | None = None
    trust_remote_code: bool = False


def open_config(source: str | SourceRef) -> ConfigSource:
    """Read the config of a model, and nothing else of it: no weight file is downloaded or opened.

    Args:
        source: hub id, folder, `config.json` or a file like it, or a `.gguf` file (of which the metadata are read).

    Raises:
        SourceError: there is none, or it cannot be read.
        UnknownArchitectureError: transformers does not know the model type.
    """
    ref = SourceRef.of(source)
    name, trust = ref.name, ref.trust_remote_code
    gguf = _gguf_file(name)
    if gguf is not None:
        from t2n_llm.source.gguf import read_gguf_config

        _refuse_revision(ref, "file" if Path(name).suffix == GGUF_SUFFIX else "folder")
        return ConfigSource(name, read_gguf_config(gguf, ref.max_layers))
    path = _existing_path(name)
    if path is not None and path.suffix == ".json" and path.is_file():
        _refuse_revision(ref, "file")
        refuse_layers(name, path, ref.max_layers)
        return ConfigSource(name, _load_config(name, path, trust), None, trust)
    folder, commit = _fetched(ref, _CONFIG_PATTERNS)
    if not (folder / "config.json").is_file():
        raise SourceError(f"{name}: no config.json in {folder}.", "Use the folder that contains config.json.")
    refuse_layers(name, folder / "config.json", ref.max_layers)
    return ConfigSource(name, _load_config(name, folder, trust), commit, trust)


def _local_folder(name: str) -> Path | None:
    """Return the folder that a name stands for; None when it can only be a hub id."""
    if not name:
        raise SourceError("the name of the model is empty.", "Use a folder, or a hub id such as owner/name.")
    path = _existing_path(name)
    if path is not None and path.is_dir():
        return path
    if path is not None:
        raise SourceError(
            f"{name}: a file, not a folder.", "Use the folder that contains config.json, or a .gguf file."
        )
    refuse_address(name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or Path(name).drive:
        raise SourceError(
            f"{name}: no such folder.", "Use a folder with a config.json, or a hub id such as owner/name."
        )
    return None


def _download(ref: SourceRef, wanted: tuple[str, ...] = _REPOSITORY_PATTERNS) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    def fetch(patterns: tuple[str, ...]) -> Path:
        folder = snapshot_download(
            ref.name,
            revision=ref.revision,
            token=ref.token,
            allow_patterns=list(patterns),
            ignore_patterns=list(_DUPLICATE_PATTERNS),
        )
        return Path(folder)

    try:
        path = fetch(wanted)
        if wanted is _REPOSITORY_PATTERNS and not any(path.glob("*.safetensors")):
            path = fetch((*_REPOSITORY_PATTERNS, *_PYTORCH_PATTERNS))
    except Exception as error:  # besides its own errors, those of whichever HTTP library it uses
        raise download_error(ref.name, ref.revision, error) from error
    return path, path.name


def download_error(repository: str, revision: str | None, error: Exception) -> SourceError | DiskFullError:
    """Return what to tell a user whose download failed."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    subject = repository if revision is None else f"{repository} at {revision!r}"
    if isinstance(error, GatedRepoError):
        return SourceError(
            f"{repository}: access to this model must be granted by its owner.",
            "Request access on the model's page, then run `hf auth login` or pass --token.",
        )
    if isinstance(error, RevisionNotFoundError):
        return SourceError(
            f"{repository}: the revision {revision!r} does not exist.", "Use a branch, tag or commit of the repository."
        )
    if isinstance(error, RepositoryNotFoundError):
        return SourceError(
            f"{repository}: the model does not exist on the hub, or is private.",
            "Check the spelling; for a private model run `hf auth login` or pass --token.",
        )
    if isinstance(error, HFValidationError):
        return SourceError(
            f"{repository}: neither a local folder nor a hub id: {_one_line(error)}", "Use a folder, or owner/name."
        )
    if constants.HF_HUB_OFFLINE:
        return SourceError(
            f"{subject}: not completely in the local cache, and HF_HUB_OFFLINE is set.",
            "Unset HF_HUB_OFFLINE, or use a local folder.",
        )
    if isinstance(error, LocalEntryNotFoundError):
        return SourceError(
            f"{subject}: not completely in the local cache, and {constants.ENDPOINT} cannot be reached: "
            f"{_one_line(error.__cause__ or error)}",
            "Connect and retry (downloaded files are kept), or use a local folder.",
        )
    if isinstance(error, OSError) and is_disk_full(error):
        return DiskFullError(
            f"{subject}: the disk of the hub cache is full ({constants.HF_HUB_CACHE}).",
            "Free some space, or set HF_HUB_CACHE to a folder on another disk; then retry.",
        )
    return SourceError(
        f"{subject}: the download from {constants.ENDPOINT} failed: {_one_line(error)}",
        "Retry (downloaded files are kept), or use a local folder.",
    )


def _load_config(name: str, folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the classes check their fields as they like
        raise _config_error(name, folder, error) from error
    # The weights are dequantised here: transformers must not look for a library that does.
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def _config_error(name: str, folder: Path, error: Exception) -> SourceError:
    message = str(error)
    if "trust_remote_code" in message:
        return SourceError(
            f"{name}: the model comes with its own Python code.", "Review that code, then pass --trust-remote-code."
        )
    if "model type" in message or "model_type" in message:
        return UnknownArchitectureError(
            f"{name}: transformers does not know this model type: {_one_line(error)}",
            f"Install a transformers release that supports it{_written_with(folder)}.",
        )
    return SourceError(
        f"{name}: config.json cannot be read: {_one_line(error)}", "Correct that file, or download it again."
    )


def _written_with(folder: Path) -> str:
    """Return which release of transformers wrote a config that the installed one does not know, as far as it says so."""
    import transformers

    try:
        release = json.loads((folder / "config.json").read_text(encoding="utf-8"))["transformers_version"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ""
    return f": its config was written with {str(release)[:20]}, but {transformers.__version__} is installed"


def _one_line(error: BaseException) -> str:
    """Return the first sentence of an exception: its first line, and the next one when that one ends in a colon."""
    sentence = ""
    for line in str(error).splitlines():
        sentence = f"{sentence} {line.strip()}".strip()
        if sentence and not sentence.endswith(":"):
            break
    speaks_for_itself = " " in sentence  # unlike a KeyError's 'name'
    return sentence if speaks_for_itself else f"{type(error).__name__}: {sentence}"
