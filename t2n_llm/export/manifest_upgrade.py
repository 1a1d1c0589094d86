"""Reads an `export.json` of an earlier format: fields that were renamed get their present names.

In: JSON of format 1, 2, ... Out: the same JSON in the present format. The file itself is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MANIFEST_FORMAT = 2
"""The version of `export.json` that exports write."""

_ARCHIVES = ("", "archives.*.")  # the only archive, and each of several
_EVERY = "*"

# By format: (path of the table, earlier name, name in the next format). Outer names come first.
_RENAMED: Mapping[int, tuple[tuple[str, str, str], ...]] = {
    1: (
        ("", "parts", "archives"),
        ("", "companions", "copied_files"),
        ("", "ranges", "activation_ranges"),
        ("", "f16_flushed", "f16_underflows"),
        *((f"{place}graph", "caches", "states") for place in _ARCHIVES),
        *((f"{place}graph", "sizes", "size_constraints") for place in _ARCHIVES),
        ("graph", "tensors", "interface"),
        ("activation_ranges.*", "largest", "max_abs"),
        ("activation_ranges.*.rescaled.*", "largest", "max_abs"),
        ("activation_ranges.*.rescaled.*", "obstacle", "reason"),
        *((f"{place}compression.tensors.*", "kept", "kept_reason") for place in _ARCHIVES),
        *((f"{place}compression.tensors.*", "remainder_of", "residual_of") for place in _ARCHIVES),
        ("validation", "original", "compressed_vs_original"),
        ("validation", "largest_states", "state_max_abs"),
        ("validation.tolerance", "max_abs_error", "rtol"),
        ("validation.tolerance", "absolute", "atol"),
        ("validation.tolerance", "kl_divergence", "max_kl_divergence"),
        ("validation.checks.*", "same_top1", "same_top1_count"),
        ("validation.compressed_vs_original", "same_top1", "same_top1_count"),
        ("quality", "mean_kl", "mean_kl_divergence"),
        ("quality", "tail_kl", "p99_kl_divergence"),
        ("quality", "max_kl", "max_kl_divergence"),
        ("quality", "same_top1", "same_top1_share"),
        ("encoder_decoder", "source", "encoder_inputs"),
        ("encoder_decoder", "cross", "cross_attention"),
        ("encoder_decoder", "mask", "encoder_mask"),
        ("frontend", "bands", "num_mel_bins"),
        ("frontend", "least_samples", "min_samples"),
        ("frontend", "n_samples", "samples"),
        ("frontend", "longer", "longer_input"),
    ),
}


def upgrade_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest in the present format; one that is in it already, or in none that is known, is returned unchanged.

    Args:
        manifest: JSON of an `export.json`, edited in place. Sections of the wrong type are left for the parser to report.
    """
    found = manifest.get("format")
    while isinstance(found, int) and found in _RENAMED:
        for path, earlier, name in _RENAMED[found]:
            for table in _tables(manifest, path.split(".") if path else []):
                if earlier in table and name not in table:
                    table[name] = table.pop(earlier)
        found += 1
        manifest["format"] = found
    return manifest


def _tables(value: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the tables at a path; `*` stands for every item of a list or a table."""
    if not path:
        if isinstance(value, dict):
            yield value
        return
    first, *rest = path
    items: Iterable[Any]
    if first == _EVERY:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    else:
        items = (value[first],) if isinstance(value, dict) and first in value else ()
    for item in items:
        yield from _tables(item, rest)


__all__ = ["MANIFEST_FORMAT", "upgrade_manifest"]
