"""`python -m generic_export.inference_target.tract.releases`: put tract on this machine ahead of its use."""

from __future__ import annotations

import sys

from generic_export.inference_target.tract.releases import install, wheels

_PARTS = {"wheels": wheels.main, "command": install.main}


def main(arguments: list[str]) -> int:
    """Run `wheels RELEASE...` or `command [--version RELEASE]`."""
    if not arguments or arguments[0] not in _PARTS:
        print(f"usage: python -m {__package__} {{{','.join(_PARTS)}}} [--help]", file=sys.stderr)
        return 2
    return _PARTS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
