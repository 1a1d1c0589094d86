"""How a checkpoint says that its weights are quantised already: in config.json, or in ModelOpt's own file.

In: a folder. Out: the quantization config with its method, as `quant.prequantized.decode_checkpoint` takes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generic_export.errors import SourceError
from quant.prequantized import METHODS
from t2n_llm.source.source_files import MODELOPT_FILE

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def quantization_of(name: str, folder: Path) -> dict[str, Any] | None:
    """Return how config.json says that the weights are quantised, or None.

    Raises:
        SourceError: in a way that is not known here.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # transformers says what is wrong with it
    if not isinstance(config, dict):
        return None
    parts = (config, *(config.get(key) for key in ("text_config", "llm_config")))
    found = (part.get(key) for part in parts if isinstance(part, dict) for key in _QUANTIZATION_KEYS)
    quantization = next((value for value in found if isinstance(value, dict)), None) or _modelopt_file(folder)
    method = _quantization_method(quantization) if quantization is not None else None
    if method is not None and method not in METHODS:
        raise SourceError(
            f"{name}: the checkpoint is quantized ({method}), which is not supported.",
            f"Supported: {', '.join(METHODS)} and GGUF files; otherwise use the original bf16, f16 or f32 checkpoint.",
        )
    return None if quantization is None else quantization | {"quant_method": method}


def _modelopt_file(folder: Path) -> dict[str, Any] | None:
    """Return what ModelOpt says in a file of its own: its earlier releases wrote nothing into config.json."""
    try:
        quantization = json.loads((folder / MODELOPT_FILE).read_text(encoding="utf-8"))["quantization"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    known = isinstance(quantization, dict) and quantization.get("quant_algo")
    return {"quant_method": "modelopt", **quantization} if known else None


def _quantization_method(quantization: Mapping[str, Any]) -> str:
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):  # before quant_method was written
        return str(quantization.get("quant_method") or "bitsandbytes")
    method = str(quantization.get("quant_method") or quantization.get("quant_library") or "").lower()
    # ModelOpt's own configs name the library alone; vLLM and SGLang call its NVFP4 modelopt_fp4.
    if method.startswith("modelopt") or (not method and "quant_algo" in quantization):
        return "modelopt"
    return str(quantization.get("quant_method") or "unknown method")
