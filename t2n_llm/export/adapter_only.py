"""`--adapter-only`: an adapter's own tensors as `.dat` files, so that several fine-tunes share one base archive.

In: an opened adapter and the config of its base model. Out: a folder with a `.dat` per tensor and `adapter.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generic_export.errors import OptionError
from generic_export.nnef.dat import dat_size, write_dat
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.weights.held_file import refuse_changed
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor
from generic_export.write.archive import check_free_space
from t2n_llm.export.folder import (
    ADAPTER_MANIFEST_NAME,
    check_free,
    file_digests,
    json_text,
    put_in_place,
    recover,
    staging_folder,
)
from t2n_llm.source.adapter import Adapter, open_adapter
from t2n_llm.source.adapter_merge import BiasShift, LoraModule, LowRankUpdate, Update
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import open_source
from t2n_llm.source.reference import SourceRef

ADAPTER_FORMAT = 1

_DTYPES = {"f32": torch.float32, "f16": torch.float16}
_SAFE_NAME = re.compile(r"[\w.\-]+")


@dataclass(frozen=True)
class AdapterExport:
    """What `export_adapter` made.

    Attributes:
        output_dir: the folder.
        manifest: content of `adapter.json`.
    """

    output_dir: Path
    manifest: Mapping[str, Any]


def export_adapter(
    source: str | SourceRef,
    adapter: str,
    output_dir: str | Path | None = None,
    *,
    dtype: str = "f16",
    force: bool = False,
) -> AdapterExport:
    """Write an adapter's tensors, not merged, after checking that they fit the base model; no base weight is read.

    Args:
        source: hub id or folder of the base model.
        adapter: hub id or folder of a LoRA or DoRA.
        output_dir: folder to make; None takes the adapter's name, in the current folder.
        dtype: `f16` or `f32`.
        force: replace an earlier export of that name.

    Raises:
        OptionError: the element type is unknown, or values do not fit f16.
        AdapterError: the adapter cannot be merged, or belongs to another model.
        SourceError: the model or the adapter cannot be found or read, or was written to meanwhile.
        ArchiveError: the folder cannot be written.
    """
    if dtype not in _DTYPES:
        raise OptionError(f"element type {dtype!r} is not supported.", f"Use one of {', '.join(_DTYPES)}.")
    ref = SourceRef.of(source)
    opened = open_adapter(SourceRef(adapter, token=ref.token))
    target = Path(output_dir) if output_dir is not None else Path(opened.recorded()["name"].rsplit("/", 1)[-1])
    recover(target)
    check_free(target, force)
    model = open_source(ref, require_tokenizer=False)
    updates = opened.updates(meta_model(model.config, trust_remote_code=ref.trust_remote_code))
    tensors = dict(_tensors(opened))
    check_free_space(target, sum(dat_size(held.shape, _DTYPES[dtype], name=name) for name, held in tensors.items()))
    with staging_folder(target) as staging:
        for name, held in tensors.items():
            _write(staging, name, held, _DTYPES[dtype])
        manifest = _manifest(opened, updates, model.public_name, model.revision, dtype) | {
            "files": file_digests(staging)
        }
        (staging / ADAPTER_MANIFEST_NAME).write_text(json_text(manifest, indent=2) + "\n", encoding="utf-8")
        refuse_changed((*model.held, *opened.held))
        put_in_place(staging, target, force)
    return AdapterExport(target, manifest)


def _tensors(adapter: Adapter) -> Iterator[tuple[str, TensorSource]]:
    """Yield every tensor of an adapter under the name of its file."""
    for lora in adapter.modules.values():
        yield from _module_tensors(lora).items()
    yield from adapter.replaced.items()


def _module_tensors(lora: LoraModule) -> dict[str, TensorSource]:
    named = {
        "lora_A.weight": lora.a,
        "lora_B.weight": lora.b,
        "lora_magnitude_vector": lora.magnitude,
        "lora_B.bias": lora.bias,
        "weight": lora.base,
    }
    return {f"{lora.path}.{part}": source for part, source in named.items() if source is not None}


def _write(folder: Path, name: str, source: TensorSource, dtype: torch.dtype) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise OptionError(f"tensor {name!r} of the adapter has a name that is no file name.")
    report = CastReport()
    write_dat(folder / f"{name}.dat", read_tensor(cast_tensor(source, dtype, report)))
    if report.overflows:
        overflow = next(iter(report.overflows.values()))
        raise OptionError(
            f"{name}: {overflow.count} values up to {overflow.max_abs:.3g} do not fit f16.", "Use --dtype f32."
        )


def _manifest(
    adapter: Adapter, updates: Mapping[str, Update], base: str, revision: str | None, dtype: str
) -> dict[str, Any]:
    config = adapter.config
    return {
        "format": ADAPTER_FORMAT,
        "adapter": adapter.recorded(),
        "base_model": {"name": base, "revision": revision, "trained_on": config.base_model},
        "dtype": dtype,
        "r": config.r,
        "alpha": config.alpha,
        "rslora": config.rslora,
        "dora": config.dora,
        "modules": {
            name.removesuffix(".weight"): _module_record(update)
            for name, update in updates.items()
            if isinstance(update, LowRankUpdate)
        },
        "biases": sorted(name for name, update in updates.items() if isinstance(update, BiasShift)),
        "replaced": sorted(adapter.replaced),
    }


def _module_record(update: LowRankUpdate) -> dict[str, Any]:
    """Say how a module's tensors are merged: weight + scaling * B A, transposed where the weight is [in, out]."""
    lora = update.lora
    return {
        "rank": lora.rank,
        "scaling": lora.scaling,
        "transposed": update.transposed,
        "dora": lora.magnitude is not None,
        "tensors": sorted(_module_tensors(lora)),
    }
