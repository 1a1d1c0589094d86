"""Which of the programs that archives are measured against are here."""

from __future__ import annotations

import functools

import pytest

from generic_export.errors import MissingExtraError
from generic_export.inference_target.tract.releases.install import find_tract_cli
from t2n_llm.bench.compared_engines.llama_cpp import node_package, node_program

NEEDS_CLI = pytest.mark.skipif(
    find_tract_cli() is None, reason="tract command not installed: run scripts/install_tract_cli"
)


@functools.cache
def llama_cpp_lacks() -> str:
    """Return what llama.cpp needs and is not here; "" when all is."""
    try:
        _ = node_program(), node_package()
    except MissingExtraError as error:
        return str(error)
    return ""
