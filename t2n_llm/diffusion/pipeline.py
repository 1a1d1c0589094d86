"""`t2n-llm export DIR` of a pipeline of diffusers: each component an archive that was compared with PyTorch.

In: a folder with `model_index.json`. Out: a folder with the archives, `pipeline.json`, and the source's configs and tokenizers.
"""

from __future__ import annotations

import gc
import importlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.documents import producer_version
from generic_export.errors import MissingExtraError, OptionError, SourceError, described
from generic_export.files import sha256
from t2n_llm.diffusion.components import COMPONENTS, Component
from t2n_llm.export.folder import PIPELINE_NAME, check_free, json_text, put_in_place, staging_folder
from t2n_llm.export.options import ExportOptions
from t2n_llm.graph.options import GraphOptions
from t2n_llm.reporter import LogReporter, Reporter

INDEX = "model_index.json"
_FORMAT = 1
_SUFFIXES = {"dir": ("", None), "tar": (".tar", 0), "tgz": (".tgz", 6)}
_LIBRARIES = ("diffusers", "transformers")
# What runs outside of the engine, or decides nothing of the picture.
_BESIDE = ("scheduler", "tokenizer", "feature_extractor", "image_processor", "safety_checker")
_NAME = re.compile(r"[A-Za-z0-9]\w*", re.ASCII)
_COPIED = ("*.json", "*.txt", "*.model")  # of a component's folder, without weights
_LARGEST_COPY = 64 << 20


@dataclass(frozen=True)
class PipelineResult:
    """What an export of a pipeline made.

    Attributes:
        output_dir: the folder.
        archives: by name of the component.
        record: content of `pipeline.json`.
    """

    output_dir: Path
    archives: Mapping[str, Path]
    record: Mapping[str, Any]


def is_pipeline(source: str) -> bool:
    """Say whether a name stands for a folder of a pipeline."""
    try:
        return (Path(source).expanduser() / INDEX).is_file()
    except (OSError, RuntimeError):  # longer than a path can be; ~ of a user who does not exist
        return False


def export_pipeline(
    source: str | Path,
    output_dir: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    reporter: Reporter | None = None,
) -> PipelineResult:
    """Export every component of a pipeline of diffusers.

    Args:
        source: folder with `model_index.json`, as diffusers saves it.
        output_dir: folder to make; None takes the source's name.
        options: element type, archive form, whether to check and to replace; others have no meaning here.
        reporter: told what happens; None logs.

    Raises:
        SourceError: the index or a component cannot be read, or no component's class is known.
        OptionError: another option was given.
        MissingExtraError: diffusers is not installed.
        CaptureError, TranslationError, MismatchError: of a component; nothing is left behind.
    """
    folder, options, reporter = Path(source).expanduser(), options or ExportOptions(), reporter or LogReporter()
    _refuse_options(options)
    target = Path(output_dir) if output_dir is not None else Path(folder.resolve().name)
    check_free(target, options.force)
    index = _read_index(folder)
    classes = _classes(folder, index)
    record: dict[str, Any] = {"format": _FORMAT, "producer": f"t2n-llm {producer_version()}"}
    record |= {"pipeline": str(index.get("_class_name")), "dtype": options.graph.dtype, "components": {}}
    with staging_folder(target) as staging:
        for name, kind in classes.items():
            reporter.stage(f"Reading {name} ({kind.__name__})")
            for component in COMPONENTS[kind.__name__](name, _loaded(folder / name, kind)):
                record["components"][component.name] = _exported(component, kind, staging, options, reporter)
            gc.collect()  # the next one needs its memory
        _copy_configs(folder, staging)
        (staging / PIPELINE_NAME).write_text(json_text(record, 2) + "\n", encoding="utf-8")
        put_in_place(staging, target, options.force)
    archives = {name: target / str(each["archive"]) for name, each in record["components"].items()}
    return PipelineResult(target, archives, record)


def _refuse_options(options: ExportOptions) -> None:
    """Refuse choices that no component has a use for."""
    plain = replace(
        ExportOptions(graph=GraphOptions(dtype=options.graph.dtype)),
        **{name: getattr(options, name) for name in ("check", "force", "archive", "require_tokenizer")},
    ).recorded()
    other = [name for name, value in options.recorded().items() if plain[name] != value]
    if other or options.adapter is not None:
        names = ", ".join([*other, *(["adapter"] if options.adapter is not None else [])])
        raise OptionError(
            f"{names}: not applicable to a pipeline of diffusers.", "It takes --dtype, --archive, --check and --force."
        )


def _read_index(folder: Path) -> Mapping[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{folder / INDEX}: cannot be read: {described(error)}.", "Download it again.") from error
    if not isinstance(index, dict):
        raise SourceError(f"{folder / INDEX}: not a JSON object.", "Download it again.")
    return index


def _classes(folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of each component that is exported, by name.

    Raises:
        SourceError: one is not known, or its folder is not there.
    """
    found: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2 or None in value:
            continue
        if not _NAME.fullmatch(name):  # it names folders here and files there
            raise SourceError(
                f"{folder / INDEX}: {name!r} is not a valid component name.", "Names consist of letters, digits and _."
            )
        library, kind = map(str, value)
        if name.rstrip("_0123456789") in _BESIDE or kind == "StableDiffusionSafetyChecker":
            continue
        if library not in _LIBRARIES or kind not in COMPONENTS:
            raise SourceError(
                f"{folder}: component {name!r} is a {kind} of {library}, which cannot be exported as part of a pipeline.",
                f"Known: {', '.join(COMPONENTS)}. Export it from Python with export_model_to_nnef (docs/how-to/any-module.md).",
            )
        if not (folder / name / "config.json").is_file():
            raise SourceError(f"{folder / name}: no config.json.", "Download the whole pipeline.")
        found[name] = _imported(library, kind)
    if not found:
        raise SourceError(f"{folder / INDEX}: no component is listed.", f"Known: {', '.join(COMPONENTS)}.")
    return found


def _imported(library: str, kind: str) -> Any:
    try:
        return getattr(importlib.import_module(library), kind)
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f"{kind} needs {library}: {described(error)}.", f"Run pip install {library}, and try again."
        ) from error


def _loaded(folder: Path, kind: Any) -> Any:
    """Return a component with its weights in float32; files that would run code are not read."""
    dtype = {"torch_dtype" if kind.__module__.startswith("diffusers.") else "dtype": torch.float32}
    try:
        return kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, **dtype).eval()
    except Exception as error:  # the libraries raise what they like
        raise SourceError(
            f"{folder}: {kind.__name__} cannot be read: {described(error)}", "Download the pipeline again."
        ) from error


def _exported(
    component: Component, kind: Any, staging: Path, options: ExportOptions, reporter: Reporter
) -> dict[str, Any]:
    """Write one archive and compare it; returns its record."""
    checked = " and checking it" if options.check else ""
    reporter.stage(f"Exporting {component.name}{checked}")
    suffix, level = _SUFFIXES[options.archive]
    path = export_model_to_nnef(
        component.module,
        component.example(),
        staging / f"{component.name}.nnef{suffix}",
        TractNNEF(dynamic_axes=component.dynamic_axes, check_io=options.check, check_io_sizes=component.others),
        tuple(component.inputs),
        component.outputs,
        compression_level=level,
        log_level=None,
        half=options.graph.dtype == "f16",
    )
    return {
        "archive": path.name,
        "class": kind.__name__,
        "inputs": {name: list(each.shape) for name, each in component.inputs.items()},
        "outputs": list(component.outputs),
        "multiples": {symbol: factor for symbol, factor in component.multiples.items() if factor > 1},
        "compared_at": [dict(sizes) for sizes in (component.sizes, *component.others)] if options.check else [],
        "parameters": sum(parameter.numel() for parameter in component.module.parameters()),
        "bytes": path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.rglob("*")),
        "sha256": sha256(path) if path.is_file() else None,
    }


def _copy_configs(folder: Path, staging: Path) -> None:
    """Copy what a runtime needs beside the archives: the index, configs, schedulers and tokenizers."""
    shutil.copyfile(folder / INDEX, staging / INDEX)
    for part in sorted(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()):
        files = [path for pattern in _COPIED for path in part.glob(pattern) if path.is_file()]
        for path in files:
            if path.stat().st_size <= _LARGEST_COPY and not path.name.endswith(".index.json"):
                (staging / part.name).mkdir(exist_ok=True)
                shutil.copyfile(path, staging / part.name / path.name)


__all__ = ["INDEX", "PipelineResult", "export_pipeline", "is_pipeline"]
