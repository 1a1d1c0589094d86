"""Tests of transformers' exporters are skipped where transformers has no backends to register."""

import pytest

from generic_export.errors import MissingExtraError


def skip_without_backends() -> None:
    """Skip the module that calls this, with the reason, where transformers is older than the interface."""
    try:
        import t2n_llm.exporters  # noqa: F401
    except MissingExtraError as error:
        pytest.skip(str(error), allow_module_level=True)
