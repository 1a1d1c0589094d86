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
    """Locates the `tract` command, or installs it.

    Args:
        version: tract release, such as "0.23.9".
        auto_download: download the release binary if it is missing, from tract's GitHub releases. Proxies of the environment
            are used, and the checksum that GitHub publishes is verified.
        auto_build: build the command with cargo if it cannot be downloaded. This takes minutes.
        cache_dir: folder of the installed versions; None for the user's cache.
    """

    version: str | SemanticVersion = TRACT_CLI_VERSION
    auto_download: bool = True
    auto_build: bool = False
    cache_dir: Path | None = None

    @property
    def arch(self) -> str:
        """Name of this platform in tract's release files, such as `x86_64-unknown-linux-musl`.

        Raises:
            EngineMissingError: tract publishes no binary for this platform.
        """
        try:
            return release_target()
        except InstallError as error:
            raise EngineMissingError(f"{error}.", "Build the command: cargo install tract-cli.") from error

    def dl_tract(self) -> Path:
        """Download the release into the cache if it is missing, regardless of `auto_download`, and return the executable.

        Raises:
            EngineMissingError: the download failed; see `binary`.
        """
        return replace(self, auto_download=True).binary()

    def binary(self) -> Path:
        """Return the path of the executable, installing it if allowed.

        Raises:
            EngineMissingError: the command is not installed and could not be installed. The message lists each attempt and why
                it failed.
        """
        version = str(self.version)
        try:
            return install(version, self.cache_dir, download=self.auto_download, build=self.auto_build)
        except (InstallError, OSError) as error:
            raise EngineMissingError(
                f"the tract command {version} is not installed: {error}.",
                f"Where there is a network, run: {INSTALL_COMMAND} --version {version}. Or give the path of the command.",
            ) from error
