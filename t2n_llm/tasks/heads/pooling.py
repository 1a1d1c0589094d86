"""From the rows of tokens to the one row of a text, as the files of sentence-transformers say.

In: the folder of a checkpoint. Out: a `Pooling`, which computes the row inside the graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generic_export.errors import SourceError

MODULES_FILE = "modules.json"


@dataclass(frozen=True)
class Pooling:
    """What is made of the last hidden states of a text.

    Attributes:
        mode: `mean`, `cls` (the first token), `max`, `mean_sqrt_len` or `lasttoken`.
        normalized: whether the row has length 1.
    """

    mode: str = "mean"
    normalized: bool = True

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [B, D] for hidden states [B, S, D] and a mask int64 [B, S], 1 for a token."""
        row = _MODES[self.mode](hidden, mask)
        return torch.nn.functional.normalize(row, dim=-1) if self.normalized else row

    def recorded(self) -> dict[str, Any]:
        """Return what `export.json` says."""
        return {"mode": self.mode, "normalized": self.normalized}


def _sum(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask[..., None].to(hidden.dtype)).sum(dim=1)


def _count(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask.sum(dim=1, keepdim=True).to(hidden.dtype).clamp(min=1.0)


def _largest(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    lowest = torch.finfo(hidden.dtype).min
    return torch.where(mask[..., None] == 1, hidden, lowest).amax(dim=1)


def _at(hidden: torch.Tensor, mask: torch.Tensor, *, last: bool) -> torch.Tensor:
    """Return the row of the first or last token of each text, whichever side is padded: no position but one has its place."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)[None] * mask
    if last:
        chosen = places == places.amax(dim=1, keepdim=True)
    else:
        chosen = (mask.cumsum(dim=1) == 1) & (mask == 1)
    return _sum(hidden, chosen)


_MODES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": lambda hidden, mask: _sum(hidden, mask) / _count(hidden, mask),
    "mean_sqrt_len": lambda hidden, mask: _sum(hidden, mask) / _count(hidden, mask).sqrt(),
    "max": _largest,
    "cls": lambda hidden, mask: _at(hidden, mask, last=False),
    "lasttoken": lambda hidden, mask: _at(hidden, mask, last=True),
}
# What sentence-transformers' older files call them.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "lasttoken",
}


def pooling_of(folder: Path | None) -> Pooling:
    """Return what the files beside a checkpoint say; the mean of the tokens at length 1 where there are none.

    Args:
        folder: of the checkpoint, with `modules.json` where sentence-transformers wrote it; None for none.

    Raises:
        SourceError: they name a module or a way that is not known, or cannot be read.
    """
    if folder is None or not (folder / MODULES_FILE).is_file():
        return Pooling()
    try:
        modules = json.loads((folder / MODULES_FILE).read_text(encoding="utf-8"))
        kinds = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
        unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        if unknown:
            raise SourceError(
                f"{folder}: its sentence model has a {unknown[0]} module, which is not supported.",
                "Export with --task feature-extraction, and compute the rest outside the archive.",
            )
        settings = json.loads((folder / kinds["Pooling"] / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{folder}: {MODULES_FILE} or a file that it names cannot be read: {error}", "Download the model again."
        ) from error
    return Pooling(_mode(folder, settings), "Normalize" in kinds)


def _mode(folder: Path, settings: Mapping[str, Any]) -> str:
    modes = [mode for flag, mode in _FLAGS.items() if settings.get(flag)]
    modes += [str(settings["pooling_mode"])] if isinstance(settings.get("pooling_mode"), str) else []
    modes += [flag for flag, on in settings.items() if flag.startswith("pooling_mode_") and on and flag not in _FLAGS]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise SourceError(
            f"{folder}: pooling by {' and '.join(modes) or 'nothing'} is not supported.",
            f"Supported: {', '.join(_MODES)}. Otherwise export with --task feature-extraction and pool outside "
            "the archive.",
        )
    return modes[0]


__all__ = ["MODULES_FILE", "Pooling", "pooling_of"]
