"""Which of the programs that archives are measured against are here."""

from __future__ import annotations

import functools

from generic_export.errors import MissingExtraError
from t2n_llm.bench.compared_engines.llama_cpp import node_package, node_program


@functools.cache
def llama_cpp_lacks() -> str:
    """Return what llama.cpp needs and is not here; "" when all is."""
    try:
        _ = node_program(), node_package()
    except MissingExtraError as error:
        return str(error)
    return ""
