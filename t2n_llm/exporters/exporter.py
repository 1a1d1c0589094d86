"""`TractExporter`: a transformers model and forward keyword arguments to an archive and the metadata that transformers keeps.

transformers' own patches for `torch.export` hold during the capture, as for its other backends. The capture, the archive and its
check are `generic_export`'s.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.exporters import ExportMetadata, HfExporter

from generic_export.compare.comparison import ToleranceLimits
from generic_export.compat import pytree
from generic_export.export import export_model_to_nnef
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.read.entries import archive_entries
from kvcache.experts.engine import explicit_experts
from t2n_llm.compat import experts_implementation
from t2n_llm.exporters.compat import (
    build_export_metadata,
    capture_patches,
    model_settings,
    module_dtype,
    prepare_for_export,
    record_output_structure,
    register_caches,
)
from t2n_llm.exporters.compression import quantized_linears
from t2n_llm.exporters.config import EXPORT_FORMAT, TractConfig
from t2n_llm.exporters.leaves import input_axes, output_names
from t2n_llm.exporters.program import ARCHIVE_SUFFIX, TractProgram

_TOLERANCE = ToleranceLimits(1e-4, 1e-4, of_largest=1e-4)


class TractExporter(HfExporter):
    """Exports a transformers model to an NNEF archive for tract, checked in tract before it returns."""

    export_format = EXPORT_FORMAT
    config_class = TractConfig
    program_suffix = ARCHIVE_SUFFIX
    requires_trust_remote_code = False  # archives are text and numbers
    required_packages = ["torch", "tract"]  # noqa: RUF012 - transformers reads a list

    def export_program(
        self, model: nn.Module, sample_inputs: MutableMapping[str, Any], config: TractConfig
    ) -> tuple[TractProgram, ExportMetadata]:
        """Export one graph.

        Args:
            model: of transformers, or a module of one.
            sample_inputs: keyword arguments of its forward.
            config: the options.

        Raises:
            T2NError: as `export_model_to_nnef`.
        """
        model, prepared, flags = prepare_for_export(model, dict(sample_inputs))
        # Constants are no inputs; caches come last, where the engine can hold them.
        inputs = dict(sorted(prepared.items(), key=lambda item: _is_container(item[1])))
        register_caches(model)
        dtype = _dtype_of(model, config)
        folder = tempfile.TemporaryDirectory(prefix="tract-program-")
        archive = Path(folder.name) / f"model{ARCHIVE_SUFFIX}"
        with ExitStack() as stack:
            stack.enter_context(capture_patches(model))
            stack.enter_context(_experts_of_tract(model))
            stack.enter_context(quantized_linears(model, config.compress))
            stack.enter_context(model_settings(model, flags))
            result = stack.enter_context(_flat_results(model, tuple(inputs)))
            target = TractNNEF(
                dynamic_axes=input_axes(inputs, config),
                check_io=config.check,
                check_io_tolerance=config.tolerance or _TOLERANCE,
            )
            export_model_to_nnef(
                model,
                (),
                archive,
                target,
                kwargs=inputs,
                log_level=logging.WARNING,
                allow_same_io_names=True,
                half=config.dtype == "f16",
                dtype=dtype,
            )
        metadata = _metadata(model, inputs, result.value, dtype)
        return TractProgram(archive, folder), TractMetadata(**vars(metadata), tensors=_digests(archive))

    @classmethod
    def save_program(cls, program: TractProgram, path: str | Path) -> None:
        """Copy the archive to a path."""
        shutil.copyfile(program.archive, path)

    @classmethod
    def load_program(cls, path: str | Path) -> TractProgram:
        """Return the program of a saved archive; nothing is read before it runs."""
        return TractProgram(Path(path))


@contextmanager
def _experts_of_tract(model: nn.Module) -> Iterator[None]:
    """Let mixtures of experts be the operator that language model exports write."""
    configs = {
        id(config): config for module in model.modules() if isinstance(config := _config_of(module), PreTrainedConfig)
    }
    with explicit_experts() as name, experts_implementation(tuple(configs.values()), name):
        yield


def _config_of(module: nn.Module) -> Any:
    return getattr(module, "config", None)


@dataclass
class TractMetadata(ExportMetadata):
    """What transformers records, and length and SHA-256 of each file of the archive, for `t2n-llm verify`."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)


def _digests(archive: Path) -> dict[str, dict[str, Any]]:
    """Return length and SHA-256 of what an archive holds, by label as `export.json` has it."""
    found = {}
    for entry in archive_entries(archive):
        digest = hashlib.sha256()
        while piece := entry.stream.read(_READ_BYTES):
            digest.update(piece)
        found[entry.name.removesuffix(".dat")] = {"bytes": entry.size, "sha256": digest.hexdigest()}
    return found


_READ_BYTES = 1 << 20


def _is_container(value: Any) -> bool:
    return value is not None and not isinstance(value, torch.Tensor | bool | int | float | str)


def _dtype_of(model: nn.Module, config: TractConfig) -> torch.dtype | None:
    """Return what the archive computes in, where that is not what the model does."""
    own = module_dtype(model)
    if own is torch.bfloat16 or (config.dtype is not None and own not in (torch.float32, None)):
        return torch.float32
    return None


def _metadata(model: nn.Module, inputs: Mapping[str, Any], result: Any, dtype: torch.dtype | None) -> ExportMetadata:
    """Return what transformers keeps of a graph."""
    _, in_spec = pytree.tree_flatten(((), dict(inputs)))
    _, out_spec = pytree.tree_flatten(result)
    call = SimpleNamespace(call_spec=SimpleNamespace(in_spec=in_spec, out_spec=out_spec))
    metadata = build_export_metadata(model, inputs, call, TractExporter.required_packages)
    if dtype is not None:
        metadata.export_dtype = str(dtype).removeprefix("torch.")
    record_output_structure(metadata, result)
    return metadata


@dataclass
class _Result:
    """What a forward returned while it was captured, sizes as numbers."""

    value: Any = field(default=None)


@contextmanager
def _flat_results(model: nn.Module, names: tuple[str, ...]) -> Iterator[_Result]:
    """Let a forward take keyword arguments by name and return its tensors as a dict, in the order of its result's leaves."""
    forward, found = model.forward, _Result()
    kinds = inspect.Parameter

    def flat(**kwargs: Any) -> dict[str, torch.Tensor]:
        result = forward(**kwargs)
        leaves, _ = pytree.tree_flatten(result)
        if found.value is None:
            found.value = pytree.tree_map_only(torch.SymInt, lambda size: size.node.hint, result)
        named = zip(output_names(result, leaves), leaves, strict=True)
        return {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}

    flat.__signature__ = inspect.Signature([kinds(name, kinds.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
    with mock.patch.object(model, "forward", flat):
        yield found


__all__ = ["TractExporter"]
