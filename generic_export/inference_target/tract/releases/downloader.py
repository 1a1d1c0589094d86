"""`TractBinaryDownloader`: the `tract` command of one release, found on this machine or put there.

In: a version. Out: the path of an executable. What is done, and in which order, is `install.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from generic_export.errors import EngineMissingError
from generic_export.inference_target.tract.releases.install import (
    TRACT_CLI_VERSION,
    InstallError,
    install,
)


@dataclass(frozen=True)
class TractBinaryDownloader:
    """Finds the `tract` command, or installs it.

    Args:
        version: the tract release wanted, such as "0.23.9".
        auto_download: fetch the release binary when it is not there: from tract's GitHub releases, through the proxies of
            the environment, against the checksum that GitHub publishes.
        auto_build: build it with cargo when it cannot be fetched; takes minutes.
        cache_dir: where versions live; None takes the user's cache.
    """

    version: str = TRACT_CLI_VERSION
    auto_download: bool = True
    auto_build: bool = False
    cache_dir: Path | None = None

    def binary(self) -> Path:
        """Return the executable.

        Raises:
            EngineMissingError: it is not on this machine, and could not be put there (offline, no build for this
                system); the message says what each way answered.
        """
        try:
            return install(self.version, self.cache_dir, download=self.auto_download, build=self.auto_build)
        except (InstallError, OSError) as error:
            raise EngineMissingError(
                f"the tract command {self.version} is not installed: {error}.",
                "Run scripts/install_tract_cli on a machine with internet access, or give the path of the command.",
            ) from error
