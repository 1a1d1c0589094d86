"""The devices that tract computes on. In: names that a user gives. Out: the same, checked. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from generic_export.errors import OptionError

CPU = "cpu"
DEVICES = (CPU, "cuda", "metal")


def check_device(device: str) -> None:
    """Refuse a device that tract does not know.

    Raises:
        OptionError: it is not one of `DEVICES`.
    """
    if device not in DEVICES:
        raise OptionError(f"device {device!r} is unknown.", f"Use one of {', '.join(DEVICES)}.")


def devices_of(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Return the devices that a user names, each once; the CPU where none is named.

    Raises:
        OptionError: one of them is unknown.
    """
    names = (devices,) if isinstance(devices, str) else tuple(devices)
    for name in names:
        check_device(name)
    return tuple(dict.fromkeys(names)) or (CPU,)


__all__ = ["CPU", "DEVICES", "check_device", "devices_of"]
