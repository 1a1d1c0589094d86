"""Room 2, translate: each ATen operator of the captured graph becomes NNEF operations.

Importing this package registers every translation; `translate.py` runs them.
"""

from generic_export.ops import elementwise, indexing, linear, norm, reduction, shape

__all__ = ["elementwise", "indexing", "linear", "norm", "reduction", "shape"]
