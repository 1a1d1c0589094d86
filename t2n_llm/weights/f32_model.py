"""The PyTorch model of a checkpoint in f32, its weights where a `Residency` has them, quantised ones dequantised.

In: a folder or GGUF file. Out: transformers' own model. Names, conversions, tied weights and buffers are transformers' own;
weights on disk are read by accelerate, layer after layer.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from generic_export.allocator import Malloc, malloc_settings
from generic_export.errors import CorruptCheckpointError, DiskFullError, NotEnoughMemoryError
from generic_export.logs import logging_at
from generic_export.weights.checkpoint import Checkpoint, open_checkpoint
from generic_export.weights.values import read_tensor
from t2n_llm.compat import around_initialisers, is_loaded
from t2n_llm.source.empty_model import CAUSAL_LM, ModelKind, meta_model
from t2n_llm.source.gguf import load_gguf_model
from t2n_llm.source.hub import GGUF_SUFFIX, ModelSource, open_source
from t2n_llm.source.reference import SourceRef
from t2n_llm.source.wrapped_names import unwrapped
from t2n_llm.weights.placement import CPU, Residency

if TYPE_CHECKING:
    from t2n_llm.source.adapter import Adapter

# glibc raises the size from which it maps memory for each block up to 32 MiB, and keeps what it frees below: a run that reads
# layer after layer would grow to the size of the model.
_FREED_AT_ONCE = {Malloc.MMAP_THRESHOLD: 1 << 20}


# The names of weight files that transformers looks for, by suffix; with `.index.json` behind, of their index.
_FOUND_BY_TRANSFORMERS = {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}


@contextmanager
def reference_model(
    folder: Path,
    residency: Residency | None = None,
    *,
    adapter: Adapter | None = None,
    trust_remote_code: bool = False,
) -> Iterator[Any]:
    """Yield the model of a checkpoint in f32, its weights where the residency has them.

    Args:
        folder: config and safetensors, quantised or not, or a GGUF file.
        residency: None keeps everything in memory; a quantised model stays there in any case.
        adapter: merged into the weights.
        trust_remote_code: allow code that comes with the model.

    Raises:
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
    """
    devices = dict(residency.devices) if residency is not None else {}
    places = set(devices.values())
    model = load_dequantized(folder, trust_remote_code=trust_remote_code)
    if model is None and len(places) <= 1:
        whole = {} if places <= {CPU} else {"device_map": {"": places.pop()}}
        model = _from_pretrained(folder, trust_remote_code, **whole)
    if model is not None:
        yield model if adapter is None else adapter.merge_into(model)
        return
    # Tensors that a conversion makes (stacked experts) lie in no file; transformers writes them here.
    with malloc_settings(_FREED_AT_ONCE), tempfile.TemporaryDirectory(prefix="t2n-llm-offload-") as made:
        with _explained_disk_full(made), logging_at(logging.ERROR, "accelerate.big_modeling"):
            model = _from_pretrained(folder, trust_remote_code, device_map=devices, offload_folder=made)
        if adapter is not None:
            adapter.merge_into_offloaded(model)
        yield model


def load_f32(weights: Path, trust_remote_code: bool = False) -> Any:
    """Return the whole model of a checkpoint in f32, in memory, whether it is quantised or not.

    Args:
        weights: a folder, or a GGUF file.
        trust_remote_code: allow code that comes with the model.

    Raises:
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
    """
    model = load_dequantized(weights, trust_remote_code=trust_remote_code)
    return _from_pretrained(weights, trust_remote_code) if model is None else model


def load_dequantized(weights: Path, *, trust_remote_code: bool = False) -> Any | None:
    """Return the model of a quantised checkpoint in f32, or None when the checkpoint is not quantised.

    A GGUF file is dequantised by transformers where it can. The other formats would need a library each, most of which
    run on GPUs only: their values come from this project's own decoders, which are tested against the published formats.

    Args:
        weights: a folder, or a `.gguf` file.
        trust_remote_code: allow code that comes with the model.

    Raises:
        SourceError, WeightError: it cannot be read.
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
    """
    if weights.suffix == GGUF_SUFFIX and weights.is_file():
        model = load_gguf_model(weights)
        if model is not None:
            return model
    elif not (weights / "config.json").is_file():
        return None
    source = open_source(
        SourceRef(str(weights), trust_remote_code=trust_remote_code, max_layers=sys.maxsize), require_tokenizer=False
    )
    if not source.is_quantized:
        return None
    model_class = type(meta_model(source.config, trust_remote_code=source.trust_remote_code))
    model, missing = dequantized(source, model_class)
    refuse_invented(source.name, missing)
    return model


def _from_pretrained(folder: Path, trust_remote_code: bool, **placement: Any) -> Any:
    model, missing = eager_model(CAUSAL_LM, folder, trust_remote_code, **placement)
    refuse_invented(str(folder), missing)
    return model


def eager_model(
    kind: ModelKind, folder: Path, trust_remote_code: bool, **placement: Any
) -> tuple[Any, tuple[str, ...]]:
    """Return transformers' own model of a checkpoint in f32, and the parameters that it had to invent.

    Args:
        kind: which class of transformers.
        folder: config.json and weights in safetensors or PyTorch files of any name.
        trust_remote_code: allow code that comes with the model.
        placement: of its weights, for `from_pretrained`; without any they are in memory.
    """
    import transformers

    own = _own_reading(folder)
    if own is not None:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        model_class = type(meta_model(config, kind=kind, trust_remote_code=trust_remote_code))
        return _load(model_class, None, config=config, state_dict=_values(own), **placement)
    return _load(
        getattr(transformers, kind.auto_class),
        folder,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        **placement,
    )


def dequantized(source: ModelSource, model_class: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a quantised checkpoint in f32, and the parameters that the checkpoint has no values of.

    Args:
        source: a folder with quantised weights.
        model_class: of transformers.
    """
    return _load(model_class, None, config=source.config, state_dict=_values(source.checkpoint()))


def _own_reading(folder: Path) -> Checkpoint | None:
    """Return the checkpoint where transformers does not find its files or tensors under their names; None where it does."""
    opened = open_checkpoint(folder)
    checkpoint = unwrapped(opened)
    name = _FOUND_BY_TRANSFORMERS.get(opened.files[0].suffix)
    is_found = name is not None and any((folder / f"{name}{end}").is_file() for end in ("", ".index.json"))
    return None if is_found and checkpoint is opened else checkpoint


def _values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: read_tensor(tensor) for name, tensor in checkpoint.tensors.items()}


def _load(model_class: Any, weights: Path | None, **options: Any) -> tuple[Any, tuple[str, ...]]:
    with _padding_rows_kept():
        model, report = model_class.from_pretrained(
            weights, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
        )
    return model.eval(), tuple(sorted(report.get("missing_keys", ())))


@contextmanager
def _padding_rows_kept() -> Iterator[None]:
    """Keep the padding token's row of an embedding as the checkpoint has it, also where a model's initialiser writes to it.

    transformers marks loaded parameters, and its initialisers leave marked tensors alone; a view of one (`weight.data[row]`,
    Youtu) has no mark, so `from_pretrained` sets the row to zero, and with tied embeddings the token's logit.
    """

    def keeping_the_row(module: Any, initialise: Callable[[], None]) -> None:
        loaded = isinstance(module, nn.Embedding) and is_loaded(module.weight)
        row = module.padding_idx if loaded else None
        kept = module.weight[row].detach().clone() if row is not None else None
        initialise()
        if kept is not None:
            with torch.no_grad():
                module.weight[row] = kept

    with around_initialisers(keeping_the_row):
        yield


def refuse_invented(name: str, missing: Iterable[str]) -> None:
    """Refuse a model some of whose weights are not the checkpoint's.

    Args:
        name: of the checkpoint, for the message.
        missing: parameters that it does not have.

    Raises:
        CorruptCheckpointError: there is one.
    """
    invented = sorted(missing)
    if invented:
        raise CorruptCheckpointError(
            f"{name}: transformers finds no weights for {invented[0]} ({len(invented)} missing)."
        )


@contextmanager
def _explained_disk_full(folder: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors tells the system's reason in words only
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise DiskFullError(
            f"{folder}: the disk is full; converted tensors of PyTorch's weights are stored there.",
            "Set TMPDIR to a folder on a larger disk, or pass --no-check.",
        ) from error


def require_resident(source: ModelSource, offloaded: bool) -> None:
    """Refuse the check of a quantised checkpoint whose dequantised weights do not fit in memory.

    Raises:
        NotEnoughMemoryError: they do not.
    """
    if source.is_quantized and offloaded:
        raise NotEnoughMemoryError(
            "the check of a quantized checkpoint needs its PyTorch model in memory in f32, which does not fit.",
            "Pass --no-check, and run t2n-llm validate on a larger machine.",
        )
