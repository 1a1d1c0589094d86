"""What exports that were killed left beside a folder: named where a message would say that nothing was left behind.

In: the final place. Out: a sentence, in the hint of the error that ends this run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from generic_export.errors import T2NError
from generic_export.interrupts import Interrupted
from generic_export.write.journal import claim_abandoned
from t2n_llm.export.folder import OWNER_SUFFIX, calibration_target

NOTHING_LEFT = "Nothing was left behind"


def leftovers(target: Path) -> tuple[Path, ...]:
    """Return the unfinished folders beside `target` that nobody works on any more."""
    found = []
    for place in (target.absolute(), calibration_target(target.absolute())):
        for staging, owner in claim_abandoned(place, OWNER_SUFFIX):
            owner.release()
            found += [path for path in (staging, owner.path) if path.exists()]
    return tuple(found)


@contextmanager
def telling_leftovers(target: Path) -> Iterator[None]:
    """Let an error or an interrupt that ends the block name what earlier runs left; an interrupt has it as `left`."""
    try:
        yield
    except (T2NError, Interrupted) as error:
        found = leftovers(target)
        if found and getattr(error, "kept", None) is None:
            told = (
                f"This run left nothing behind; an earlier one left {found[0]}. --resume continues it (a tgz "
                f"starts again); `rm -r {shlex.join(map(str, found))}` removes it."
            )
            if isinstance(error, Interrupted):
                error.left = told
            elif error.hint is not None and NOTHING_LEFT in error.hint:
                error.hint = f"{error.hint.replace(NOTHING_LEFT, 'This run left nothing behind')} {told}"
        raise


__all__ = ["leftovers", "telling_leftovers"]
