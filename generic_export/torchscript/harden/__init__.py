"""Hardening: a ScriptModule goes in, the same module specialised for example inputs comes out, ready to be captured.

`harden_jit_for_export` runs all; each pass is a function of its own, named as its file.
"""

from generic_export.torchscript.harden.chain import harden_jit_for_export
from generic_export.torchscript.harden.passes import (
    fold_constant_ifs,
    fold_constant_scalar_arithmetic,
    fold_data_dependent_ifs,
    fold_tuple_index_through_tuple_construct,
    fold_tuple_unpack_through_tuple_construct,
    inline_unresolvable_submodules,
    replace_size_calls_with_constants,
    strip_assertion_ifs,
    strip_prim_data,
)

__all__ = [
    "fold_constant_ifs",
    "fold_constant_scalar_arithmetic",
    "fold_data_dependent_ifs",
    "fold_tuple_index_through_tuple_construct",
    "fold_tuple_unpack_through_tuple_construct",
    "harden_jit_for_export",
    "inline_unresolvable_submodules",
    "replace_size_calls_with_constants",
    "strip_assertion_ifs",
    "strip_prim_data",
]
