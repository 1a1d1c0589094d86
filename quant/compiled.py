"""Functions compiled by numba, three ways: to be called from Python, as parts of others, and copied to where they are used.

In: a Python function over arrays and numbers. Out: the compiled one, which runs without Python's lock; no sum is reordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

Compiled = Callable[..., Any]


def compiled(function: Compiled) -> Compiled:
    """Compile at the first call, without Python's lock, and keep the result between processes where a cache can be written."""
    try:
        result: Compiled = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the home can be written
        result = njit(nogil=True, error_model="numpy")(function)
    return result


def part(function: Compiled) -> Compiled:
    """Compile as a part of compiled functions only: nothing to call it from Python is made, which takes the most time."""
    result: Compiled = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return result


def inlined(function: Compiled) -> Compiled:
    """As `part`, copied to where it is used, so that arguments that are constants there remove branches from its loops."""
    result: Compiled = njit(
        nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, inline="always"
    )(function)
    return result
