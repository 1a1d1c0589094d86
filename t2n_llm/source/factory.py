"""`package.module:factory` as sub-graphs: a function of the user's that returns modules and example inputs.

In: the text of the command line. Out: `Subgraph`s. The factory is imported and called; nothing else of the module is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from generic_export.errors import OptionError, T2NError
from generic_export.remodel import Subgraph

_FORMS = "Return Subgraph objects (generic_export.remodel), or (module, example inputs), or {name: (module, example inputs)}."


def subgraphs_of(spec: str) -> list[Subgraph]:
    """Import a factory, call it, and return the sub-graphs it makes.

    Args:
        spec: `package.module:factory`, found from the current folder too, or `file.py:factory`.

    Raises:
        OptionError: it cannot be imported, fails, or returns something else.
    """
    home, _, name = spec.rpartition(":")
    if not home or not name:
        raise OptionError(
            f"{spec!r} does not name a factory.", "Write it as package.module:factory or file.py:factory."
        )
    with _current_folder_importable():
        try:
            factory = getattr(_imported(home), name)
            made = factory()
        except T2NError:
            raise
        except Exception as error:  # the user's own code
            raise OptionError(
                f"the factory {spec!r} cannot be used: {type(error).__name__}: {error}",
                "It must be importable, and take no arguments.",
            ) from error
    return _subgraphs(made, spec)


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def _imported(home: str) -> ModuleType:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    name = f"t2n_factory_{Path(home).stem}"
    spec = importlib.util.spec_from_file_location(name, home)
    if spec is None or spec.loader is None:
        raise ImportError(f"{home} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def _subgraphs(made: Any, spec: str) -> list[Subgraph]:
    if isinstance(made, Subgraph):
        return [made]
    if isinstance(made, Mapping):
        return [_named(str(name), one, spec) for name, one in made.items()]
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return [_named("model", made, spec)]
    if isinstance(made, (list, tuple)) and made and all(isinstance(one, Subgraph) for one in made):
        return list(made)
    raise OptionError(f"the factory {spec!r} returned a {type(made).__name__}, which is not supported.", _FORMS)


def _named(name: str, made: Any, spec: str) -> Subgraph:
    if isinstance(made, Subgraph):
        return made
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise OptionError(f"the factory {spec!r}: {name!r} is a {type(made).__name__}, which is not supported.", _FORMS)
    module, inputs = made
    if isinstance(inputs, Mapping):
        return Subgraph(name, module, kwargs=inputs)
    return Subgraph(name, module, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs))
