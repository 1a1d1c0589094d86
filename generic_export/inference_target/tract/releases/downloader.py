"""`TractBinaryDownloader`: the `tract` command of one release, found on this machine or put there.

In: a version. Out: the path of an executable. What is done, and in which order, is `install.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from generic_export.errors import EngineMissingError
from generic_export.inference_target.tract.releases.install import (
    TRACT_CLI_VERSION,
    InstallError,
    install,
    release_target,
)
from generic_export.inference_target.version import SemanticVersion

INSTALL_COMMAND = "python -m generic_export.inference_target.tract.releases command"


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

    version: str | SemanticVersion = TRACT_CLI_VERSION
    auto_download: bool = True
    auto_build: bool = False
    cache_dir: Path | None = None

    @property
    def arch(self) -> str:
        """The machine as tract's release files name it, such as `x86_64-unknown-linux-musl`.

        Raises:
            EngineMissingError: tract publishes no binary for it.
        """
        try:
            return release_target()
        except InstallError as error:
            raise EngineMissingError(f"{error}.", "Build the command: cargo install tract-cli.") from error

    def dl_tract(self) -> Path:
        """Download the release into the cache, whatever `auto_download` says, unless it is there; return the executable.

        Raises:
            EngineMissingError: as `binary`.
        """
        return replace(self, auto_download=True).binary()

    def binary(self) -> Path:
        """Return the executable.

        Raises:
            EngineMissingError: it is not on this machine, and could not be put there (offline, no build for this
                system); the message says what each way answered.
        """
        version = str(self.version)
        try:
            return install(version, self.cache_dir, download=self.auto_download, build=self.auto_build)
        except (InstallError, OSError) as error:
            raise EngineMissingError(
                f"the tract command {version} is not installed: {error}.",
                f"Where there is a network, run: {INSTALL_COMMAND} --version {version}. Or give the path of the command.",
            ) from error
