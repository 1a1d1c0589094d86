"""Find the `tract` command on this machine, or put it there: release binary first, cargo otherwise.

In: a version. Out: the path of an executable in `<cache>/t2n-llm/tract/<version>/bin/`.
Standard library only, and imports nothing from the package: scripts/install_tract_cli loads this file by path
on machines where nothing is installed yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

TRACT_CLI_VERSION = "0.23.9"  # the release that docs/contributing/engine-facts.md describes and that the tests run

# What NNEF archives can need, and threads (`--threads`). The default features have no threads, and add CUDA, TensorFlow and TFLite:
# twice the build time.
CARGO_FEATURES = ("transformers", "extra", "pulse", "onnx", "multithread-mm")
DOWNLOAD_URL = "https://github.com/sonos/tract/releases/download"
API_URL = "https://api.github.com/repos/sonos/tract/releases/tags"

# (system, machine) as `platform` reports them -> target triple in the release's file names.
# Source: sonos/tract .github/workflows/binaries.yml.
RELEASE_TARGETS = {
    ("Linux", "x86_64"): "x86_64-unknown-linux-musl",
    ("Linux", "aarch64"): "aarch64-unknown-linux-musl",
    ("Linux", "armv7l"): "armv7-unknown-linux-musleabihf",
    ("Darwin", "x86_64"): "x86_64-apple-darwin",
    ("Darwin", "arm64"): "aarch64-apple-darwin",
}

_VERSION_LINE = re.compile(r"tract(?:-cli)? (\d+\.\d+\.\d+\S*)")
_VERSION = re.compile(r"\d+\.\d+\.\d+[-.\w]*")
_SOCKET_TIMEOUT_SECONDS = 20.0
_BUILD_TIMEOUT_SECONDS = 3600.0

log = logging.getLogger(__name__)


class InstallError(RuntimeError):
    """The command could not be installed; the message is one line.

    Outside the tree of `errors.py` because this file must load without the package; `cli.py` never lets it out.
    """


# --- find -------------------------------------------------------------------------------------


def default_cache_dir() -> Path:
    """Return the folder that holds one sub-folder per installed version ($XDG_CACHE_HOME honoured)."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return root / "t2n-llm" / "tract"


def installed_path(version: str, cache_dir: Path | None = None) -> Path:
    """Return where `version` is, or would be, installed."""
    if not _VERSION.fullmatch(version):
        raise InstallError(f"{version!r} is not a version number such as {TRACT_CLI_VERSION}")
    return (cache_dir or default_cache_dir()) / version / "bin" / "tract"


def probe_version(binary: Path) -> str | None:
    """Ask an executable which tract it is.

    Returns:
        Its version, or None: not executable, or some other program that is also called tract.
    """
    if not os.access(binary, os.X_OK) or binary.is_dir():
        return None
    match = _VERSION_LINE.fullmatch(_first_words(binary, "--version"))
    if match is None or "nnef" not in _first_words(binary, "--help"):
        return None
    return match[1]


def _first_words(binary: Path, flag: str) -> str:
    try:
        run = subprocess.run(
            [binary, flag], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()


def binaries_on_path() -> Iterator[Path]:
    """Yield every executable called `tract` or `tract-cli` on PATH, whatever it is, in order."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        for name in ("tract", "tract-cli"):
            found = shutil.which(name, path=folder) if folder else None
            if found:
                yield Path(found).absolute()


def find_tract_cli(version: str = TRACT_CLI_VERSION, cache_dir: Path | None = None) -> Path | None:
    """Find the command in exactly this version: in the cache, then on PATH.

    Args:
        version: the tract release wanted.
        cache_dir: see `default_cache_dir`.
    Returns:
        The executable, or None when this machine has none of this version.
    """
    for binary in (installed_path(version, cache_dir), *binaries_on_path()):
        if probe_version(binary) == version:
            return binary
    return None


# --- download ---------------------------------------------------------------------------------


def release_target(system: str | None = None, machine: str | None = None) -> str:
    """Return the name of a machine, this one by default, in the file names of a release.

    Raises:
        InstallError: the project publishes no binary for it.
    """
    key = (system or platform.system(), machine or platform.machine())
    if key not in RELEASE_TARGETS:
        raise InstallError(f"tract publishes no binary for {key[0]} on {key[1]}")
    return RELEASE_TARGETS[key]


def release_asset(version: str, system: str | None = None, machine: str | None = None) -> str:
    """Return the file name of the release for a machine, this one by default.

    Raises:
        InstallError: the project publishes no binary for it.
    """
    return f"tract-{release_target(system, machine)}-{version}.tgz"


def download_release(
    version: str = TRACT_CLI_VERSION,
    cache_dir: Path | None = None,
    *,
    download_url: str = DOWNLOAD_URL,
    api_url: str = API_URL,
) -> Path:
    """Download the project's own release binary into the cache.

    Proxies are taken from the environment (urllib). The SHA-256 that GitHub publishes for the file is verified
    when it can be read; the binary must in any case run here and name the right version before it is installed.

    Args:
        version: the tract release wanted.
        cache_dir: see `default_cache_dir`.
        download_url, api_url: where releases live; for mirrors and tests.
    Returns:
        The installed executable.
    Raises:
        InstallError: no network, no such release, no binary for this machine, or a damaged file.
    """
    target = installed_path(version, cache_dir)
    asset = release_asset(version)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder:
        tag, archive = _download(version, asset, download_url, Path(folder))
        _verify(archive, _published_digest(f"{api_url}/{tag}", asset))
        binary = _extract(archive, Path(folder) / "tract")
        if probe_version(binary) != version:
            raise InstallError(f"{asset}: the binary does not run here, or is not tract {version}")
        binary.replace(target)
    return target


def _download(version: str, asset: str, download_url: str, folder: Path) -> tuple[str, Path]:
    path = folder / asset
    for tag in (f"v{version}", version):  # newer tags carry a "v", older ones none
        url = f"{download_url}/{tag}/{asset}"
        try:
            with _open(url) as response, path.open("wb") as out:
                log.info("downloading %s", url)
                shutil.copyfileobj(response, out, 1 << 20)
                expected = response.headers.get("Content-Length")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise InstallError(f"{url}: HTTP {error.code}") from error
        except OSError as error:  # URLError, timeouts, resets, a full disk
            raise InstallError(f"{url}: {getattr(error, 'reason', error)}") from error
        else:
            if expected is not None and path.stat().st_size != int(expected):
                raise InstallError(f"{url}: {path.stat().st_size} bytes of {expected} arrived")
            return tag, path
    raise InstallError(f"there is no release file {asset} under {download_url}")


def _open(url: str) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "t2n-llm"})
    return urllib.request.urlopen(request, timeout=_SOCKET_TIMEOUT_SECONDS)


def _published_digest(url: str, asset: str) -> str | None:
    """Read "sha256:..." of a release file from GitHub's API; None when it says nothing."""
    try:
        with _open(url) as response:
            files = json.load(response)["assets"]
        return next((file.get("digest") for file in files if file["name"] == asset), None)
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.info("no published checksum for %s (%s)", asset, error)
        return None


def _verify(archive: Path, digest: str | None) -> None:
    if digest is None or not digest.startswith("sha256:"):
        log.warning("%s: the release publishes no readable checksum; it was not verified", archive.name)
        return
    with archive.open("rb") as stream:
        found = _sha256(stream)
    if found != digest.removeprefix("sha256:"):
        raise InstallError(f"{archive.name}: SHA-256 is {found}, the release says {digest}")


def _sha256(stream: IO[bytes]) -> str:
    hasher = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        hasher.update(chunk)
    return hasher.hexdigest()


def _extract(archive: Path, target: Path) -> Path:
    try:
        with tarfile.open(archive) as tar:
            member = next((m for m in tar if m.isfile() and Path(m.name).name == "tract"), None)
            source = tar.extractfile(member) if member else None
            if source is None:
                raise InstallError(f"{archive.name}: contains no file named tract")
            with source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InstallError(f"{archive.name}: {error}") from error
    target.chmod(0o755)
    return target


# --- build ------------------------------------------------------------------------------------


def cargo_command(version: str = TRACT_CLI_VERSION, cache_dir: Path | None = None) -> list[str]:
    """Return the cargo command line that builds the command into the cache.

    Without `--locked`: known to build (6 minutes on 2 cores) with the newest compatible dependencies.
    """
    root = installed_path(version, cache_dir).parent.parent
    cargo = shutil.which("cargo") or str(Path.home() / ".cargo" / "bin" / "cargo")
    features = ["--no-default-features", "--features", ",".join(CARGO_FEATURES)]
    return [cargo, "install", "tract-cli", "--version", version, *features, "--root", str(root)]


def cargo_install(version: str = TRACT_CLI_VERSION, cache_dir: Path | None = None) -> Path:
    """Build the command from crates.io into the cache; minutes, with cargo's progress on stderr.

    Returns:
        The installed executable.
    Raises:
        InstallError: cargo is missing, or the build failed.
    """
    command = cargo_command(version, cache_dir)
    if not os.access(command[0], os.X_OK):
        raise InstallError("cargo is not installed (https://rustup.rs)")
    log.info("building: %s", shlex.join(command))
    try:
        code = subprocess.run(command, stdout=sys.stderr, timeout=_BUILD_TIMEOUT_SECONDS).returncode
    except subprocess.TimeoutExpired:
        raise InstallError(f"cargo did not finish within {_BUILD_TIMEOUT_SECONDS:g} s") from None
    target = installed_path(version, cache_dir)
    if code or probe_version(target) != version:
        raise InstallError(f"cargo failed (exit code {code}): {shlex.join(command)}")
    return target


# --- command line -----------------------------------------------------------------------------


def install(
    version: str = TRACT_CLI_VERSION, cache_dir: Path | None = None, *, download: bool = True, build: bool = True
) -> Path:
    """Return the command in this version, installing it in the cheapest way that works.

    Args:
        version: the tract release wanted.
        cache_dir: see `default_cache_dir`.
        download: allow fetching the release binary.
        build: allow building with cargo.
    Raises:
        InstallError: nothing worked; the message says what each way answered.
    """
    found = find_tract_cli(version, cache_dir)
    if found is not None:
        return found
    ways = [("download", download_release)] * download + [("build", cargo_install)] * build
    reasons: list[str] = []
    for name, attempt in ways:
        if reasons:
            log.info("%s; trying to %s", reasons[-1], name)
        try:
            return attempt(version, cache_dir)
        except InstallError as error:
            reasons.append(f"{name}: {error}")
    raise InstallError(
        "; ".join(reasons) or f"tract {version} is not installed, and downloading and building are disabled"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of scripts/install_tract_cli: print the path as last line, or one line saying why not."""
    parser = argparse.ArgumentParser(
        prog="install_tract_cli",
        description="Install the tract command: reuse it, download the release binary, or build it with cargo.",
        epilog="The last line printed is the path of the command. A second run is instant.",
    )
    parser.add_argument("--version", default=TRACT_CLI_VERSION, help="tract release (default: %(default)s)")
    parser.add_argument(
        "--cache-dir", type=Path, help=f"folder of the installed versions (default: {default_cache_dir()})"
    )
    parser.add_argument("--no-download", action="store_true", help="do not download the release binary")
    parser.add_argument("--no-build", action="store_true", help="do not build with cargo")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        path = install(options.version, options.cache_dir, download=not options.no_download, build=not options.no_build)
    except InstallError as error:
        print(f"install_tract_cli: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"install_tract_cli: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(path)
    return 0
