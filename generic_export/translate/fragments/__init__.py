"""NNEF fragments, one file each, inserted in a graph only when it calls them."""

from __future__ import annotations

from importlib.resources import files

from generic_export.errors import RegistrationError
from generic_export.nnef.graph import NnefFragment


def load_fragment(name: str) -> NnefFragment:
    """Return the fragment in `<name>.nnef`.

    Raises:
        RegistrationError: there is no such file.
    """
    resource = files(__package__) / f"{name}.nnef"
    if not resource.is_file():
        raise RegistrationError(f"no fragment file {name}.nnef in generic_export/translate/fragments.")
    return NnefFragment(name, resource.read_text(encoding="utf-8"))
