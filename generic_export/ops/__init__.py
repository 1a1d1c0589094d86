"""Room 2, translate: each ATen operator of the captured graph becomes NNEF operations.

Importing this package imports every module in it, and so registers every translation; `translate.py` runs them.
"""

from importlib import import_module
from pkgutil import iter_modules

from generic_export.translate import modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["modules"]
