"""Registers the tract backend with transformers, where transformers has backends to register."""

from __future__ import annotations

from importlib import import_module

from generic_export.errors import MissingExtraError

FIRST_RELEASE = "5.23"
"""The first release of transformers with `register_backend`, `ExportedModel` and runners."""


def require_backends() -> None:
    """Look for `transformers.exporters.register_backend`.

    Raises:
        MissingExtraError: this transformers does not have it; names the release that does.
    """
    import transformers

    try:
        has_backends = hasattr(import_module("transformers.exporters"), "register_backend")
    except ImportError:
        has_backends = False
    if not has_backends:
        raise MissingExtraError(
            f"transformers {transformers.__version__} has no register_backend in transformers.exporters.",
            f"Install transformers {FIRST_RELEASE} or later: pip install 'transformers>={FIRST_RELEASE}'.",
        )


def register() -> None:
    """Register `TractExporter` and `TractModelRunner` under "tract"; a second call changes nothing.

    Raises:
        MissingExtraError: see `require_backends`.
    """
    require_backends()
    from transformers.exporters import register_backend
    from transformers.exporters.auto import EXPORT_BACKENDS

    from t2n_llm.exporters.exporter import TractExporter
    from t2n_llm.exporters.runner import TractModelRunner

    if TractExporter.export_format not in EXPORT_BACKENDS:
        register_backend(TractExporter, TractModelRunner)


__all__ = ["FIRST_RELEASE", "register", "require_backends"]
