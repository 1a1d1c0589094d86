"""PEFT adapters: a LoRA (rsLoRA, DoRA) opened without reading it, and merged into weights while they stream.

In: an adapter's folder and the model it belongs to. Out: an update per parameter, each of which turns the base tensor's
source into the fine-tuned one's. Formats: PEFT's adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from generic_export.errors import AdapterError, SourceError
from generic_export.files import sha256
from generic_export.weights.checkpoint import open_checkpoint
from generic_export.weights.pinned_file import PinnedFile
from generic_export.weights.source import TensorSource
from t2n_llm.source.adapter_merge import (
    MERGE_ELSEWHERE,
    LoraModule,
    MergedWeights,
    Update,
    lora_updates,
    merge_in_place,
    offloading_hooks,
    refuse_tied,
    replacement,
)
from t2n_llm.source.hub import fetch_folder
from t2n_llm.source.reference import SourceRef

CONFIG_NAME = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin")

_PREFIX = "base_model.model."
# module.lora_A[.adapter name][.weight]; the name is there in files of early releases.
_LORA_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(?:\.(?!weight$|bias$)[^.]+)?"
    r"(?:\.(?P<kind>weight|bias))?"
)
# Parts of a name that say where PEFT's wrapper keeps a tensor.
_WRAPPER_PARTS = re.compile(r"\.(?:modules_to_save(?:\.(?!weight$|bias$)[^.]+)?|base_layer)(?=\.)")

# Options whose effect is not a sum of weights, or is not written down in the adapter -> what to tell.
_UNMERGEABLE = {
    "layer_replication": "it repeats layers of the base model",
    "use_qalora": "QALoRA pools the inputs",
    "alora_invocation_tokens": "an activated LoRA applies to some tokens only",
    "arrow_config": "Arrow selects an adapter for each token",
    "target_parameters": "it targets bare parameters",
    "trainable_token_indices": "it trains single embedding rows",
    "megatron_config": "it was made for Megatron layers",
    "use_bdlora": "its matrices are block-diagonal",
    "kasa_config": "KaSA also changes the base weights",
    "monteclora_config": "MonteCLoRA samples its weights",
}
# Initialisations that change the base weights too, unless the adapter was converted when it was saved.
_MUTATING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraConfig:
    """What `adapter_config.json` says of the merge.

    Attributes:
        r, alpha: rank and numerator of the scaling, where no pattern says otherwise.
        rank_pattern, alpha_pattern: the same by regular expressions on the end of a module's path.
        rslora: the scaling is alpha / sqrt(r), else alpha / r.
        dora: rows are scaled to a learned magnitude.
        base_model: hub id or path of the model it was trained on, as recorded.
    """

    r: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    base_model: str | None = None

    def rank(self, module: str) -> int:
        """Return the rank of a module's update."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a path, as PEFT chooses it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@dataclass(frozen=True)
class Adapter:
    """An opened adapter; no tensor is read.

    Attributes:
        name: hub id or folder, as the user gave it.
        folder: where its files are.
        revision: commit hash of a hub snapshot, or None.
        digest: SHA-256 of the file with its tensors.
        config: see `LoraConfig`.
        modules: the adapted modules by path.
        replaced: parameters that it holds whole (`modules_to_save`, trained biases), by name.
        held: its files, as they were opened.
    """

    name: str
    folder: Path
    revision: str | None
    digest: str
    config: LoraConfig
    modules: Mapping[str, LoraModule]
    replaced: Mapping[str, TensorSource]
    held: tuple[PinnedFile, ...] = ()

    def recorded(self) -> dict[str, Any]:
        """Return what a manifest says of it."""
        public = self.name if self.revision is not None else self.folder.resolve().name
        return {"name": public, "revision": self.revision, "sha256": self.digest}

    def updates(self, model: nn.Module) -> dict[str, Update]:
        """Return what happens to which parameter of a model.

        Args:
            model: the causal LM; its tensors may be on the meta device.

        Raises:
            AdapterError: the adapter belongs to another model; names the module and the size it should have.
        """
        updates: dict[str, Update] = {}
        for lora in self.modules.values():
            updates |= lora_updates(lora, model, self.name)
        for name, source in self.replaced.items():
            updates[name] = replacement(name, source, model, self.name)
        refuse_tied(updates, model, self.name)
        return updates

    def merge_into(self, model: Any) -> Any:
        """Return a loaded model with the adapter merged, by PEFT itself where it is installed."""
        if importlib.util.find_spec("peft") is not None:
            from peft import PeftModel

            with warnings.catch_warnings():  # such as that it found out a Conv1D's layout by itself
                warnings.simplefilter("ignore")
                return PeftModel.from_pretrained(model, str(self.folder)).merge_and_unload().eval()
        for name, update in self.updates(model).items():
            merge_in_place(model.get_parameter(name), name, update)
        return model

    def merge_into_offloaded(self, model: nn.Module) -> None:
        """Merge into a model that accelerate dispatched: what lies on disk is merged each time it is read."""
        for name, update in self.updates(model).items():
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            if module.get_parameter(attribute).device.type != "meta":
                merge_in_place(module.get_parameter(attribute), name, update)
                continue
            for hook in offloading_hooks(module):
                hook.weights_map = MergedWeights(hook.weights_map, attribute, update)


def open_adapter(source: str | SourceRef) -> Adapter:
    """Open an adapter: its config is checked, its tensors are located, none is read.

    Args:
        source: hub id, or a folder with adapter_config.json and its weights.

    Raises:
        SourceError: there is no such adapter, or its config cannot be read.
        AdapterError: its type cannot be merged.
    """
    ref = SourceRef.of(source)
    name = ref.name
    folder, commit = fetch_folder(ref)
    config = _read_config(name, folder)
    weights = next((folder / file for file in WEIGHT_NAMES if (folder / file).is_file()), None)
    if weights is None:
        raise SourceError(f"{name}: no {' and no '.join(WEIGHT_NAMES)} in {folder}.", "Use the folder of an adapter.")
    checkpoint = open_checkpoint(weights)
    modules, replaced = _sort_tensors(name, config, checkpoint.tensors)
    return Adapter(name, folder, commit, sha256(weights), config, modules, replaced, checkpoint.held)


# --- reading ----------------------------------------------------------------------------------


def _read_config(name: str, folder: Path) -> LoraConfig:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise SourceError(f"{name}: no {CONFIG_NAME} in {folder}.", "Use the folder of an adapter saved by peft.")
    try:
        raw = json.loads(path.read_bytes())
        _refuse_unmergeable(name, raw)
        return LoraConfig(
            r=int(raw["r"]),
            alpha=float(raw["lora_alpha"]),
            rank_pattern={str(key): int(value) for key, value in (raw.get("rank_pattern") or {}).items()},
            alpha_pattern={str(key): float(value) for key, value in (raw.get("alpha_pattern") or {}).items()},
            rslora=bool(raw.get("use_rslora")),
            dora=bool(raw.get("use_dora")),
            base_model=raw.get("base_model_name_or_path"),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SourceError(f"{path}: not the config of a LoRA adapter ({error!r}).", "Download it again.") from error


def _refuse_unmergeable(name: str, raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{name}: an adapter of type {kind} cannot be merged; LoRA, rsLoRA and DoRA can.", MERGE_ELSEWHERE
        )
    for option, reason in _UNMERGEABLE.items():
        if raw.get(option):
            raise AdapterError(f"{name}: {option} is set: {reason}.", MERGE_ELSEWHERE)
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_MUTATING_STARTS):
        raise AdapterError(
            f"{name}: it was initialized with {start}, which also changes the base weights.", MERGE_ELSEWHERE
        )


def _sort_tensors(
    name: str, config: LoraConfig, tensors: Mapping[str, TensorSource]
) -> tuple[dict[str, LoraModule], dict[str, TensorSource]]:
    """Return the adapted modules, and the parameters that are held whole."""
    parts: dict[str, dict[str, TensorSource]] = {}
    replaced: dict[str, TensorSource] = {}
    for key, source in tensors.items():
        plain = key.removeprefix(_PREFIX)
        match = _LORA_KEY.fullmatch(plain)
        if match is None and ("lora_" in plain or "token_adapter" in plain):
            raise AdapterError(f"{name}: the tensor {key} is not supported.", MERGE_ELSEWHERE)
        if match is None:
            if ".original_module." not in plain:
                replaced[_WRAPPER_PARTS.sub("", plain)] = source
            continue
        part = match["part"] + ("_bias" if match["kind"] == "bias" else "")
        parts.setdefault(match["module"], {})[part] = source
    modules = {path: _lora_module(name, config, path, found, replaced) for path, found in parts.items()}
    return modules, replaced


def _lora_module(
    name: str,
    config: LoraConfig,
    path: str,
    found: Mapping[str, TensorSource],
    replaced: dict[str, TensorSource],
) -> LoraModule:
    """Put the tensors of one module together; a weight of its own in `replaced` is taken from there."""
    embedding = "embedding_A" in found or "embedding_B" in found
    names = ("embedding_A", "embedding_B") if embedding else ("A", "B")
    missing = [part for part in (*names, *(["magnitude_vector"] if config.dora else [])) if part not in found]
    if missing:
        raise AdapterError(f"{name}: module {path} has no lora_{missing[0]}.", "Download the adapter again.")
    a, b = (found[part] for part in names)
    rank = config.rank(path)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(
            f"{name}: module {path} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, "
            f"expected rank {rank} by {CONFIG_NAME}.",
            "The config and the weights come from different adapters, or it adapts a convolution.",
        )
    return LoraModule(
        path,
        a,
        b,
        embedding,
        config.scaling(path),
        magnitude=found.get("magnitude_vector"),
        bias=found.get("B_bias"),
        base=replaced.pop(f"{path}.weight", None),
    )
