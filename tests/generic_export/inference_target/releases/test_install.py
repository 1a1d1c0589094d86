"""Installing the tract command: finding, downloading from a local release server, cargo's command line, the script.

Nothing is built here, and nothing leaves the machine.
"""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from generic_export.inference_target.tract.releases import install
from generic_export.inference_target.tract.releases.install import (
    TRACT_CLI_VERSION,
    InstallError,
    cargo_command,
    cargo_install,
    default_cache_dir,
    download_release,
    find_tract_cli,
    installed_path,
    probe_version,
    release_asset,
)

SCRIPT = Path(install.__file__).parents[4] / "scripts" / "install_tract_cli"
CLI = find_tract_cli()
needs_cli = pytest.mark.skipif(CLI is None, reason="tract command not installed: run scripts/install_tract_cli")
TARGET = install.RELEASE_TARGETS.get((platform.system(), platform.machine()))
ASSET = f"tract-{TARGET}-{TRACT_CLI_VERSION}.tgz"
needs_release = pytest.mark.skipif(TARGET is None, reason="tract publishes no binary for this machine")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, dict[str, str]]]:
    """Serve a folder laid out like GitHub's releases; yield it with the two URLs."""
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    root = tmp_path / "server"
    (root / "files").mkdir(parents=True)
    (root / "api").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield root, {"download_url": f"{url}/files", "api_url": f"{url}/api"}
        server.shutdown()


def publish(root: Path, tag: str, binary: Path, digest: str | None = None) -> str:
    """Put a release file and its API answer in place; return the true digest."""
    folder = root / "files" / tag
    folder.mkdir(parents=True)
    with tarfile.open(folder / ASSET, "w:gz", compresslevel=1) as tar:
        tar.add(binary, arcname=f"{ASSET.removesuffix('.tgz')}/tract")
    true_digest = "sha256:" + hashlib.sha256((folder / ASSET).read_bytes()).hexdigest()
    answer = {"assets": [{"name": ASSET, "digest": digest or true_digest}]}
    (root / "api" / tag).write_text(json.dumps(answer))
    return true_digest


# --- find -------------------------------------------------------------------------------------


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert installed_path("0.23.9") == tmp_path / "t2n-llm/tract/0.23.9/bin/tract"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == Path.home() / ".cache/t2n-llm/tract"
    with pytest.raises(InstallError, match="not a version number"):
        installed_path("../../etc")


@needs_cli
def test_find_looks_in_the_cache_then_on_path_for_the_exact_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CLI is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tract-cli").symlink_to(CLI)
    shutil.copy(shutil.which("true") or "/bin/true", tmp_path / "bin" / "tract")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_tract_cli(cache_dir=tmp_path / "cache") is None
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_tract_cli(cache_dir=tmp_path / "cache") == tmp_path / "bin" / "tract-cli"
    assert find_tract_cli("0.1.0", tmp_path / "cache") is None
    cached = installed_path(TRACT_CLI_VERSION, tmp_path / "cache")
    cached.parent.mkdir(parents=True)
    cached.symlink_to(CLI)
    assert find_tract_cli(cache_dir=tmp_path / "cache") == cached


def test_other_programs_are_not_tract(tmp_path: Path) -> None:
    assert probe_version(Path(shutil.which("true") or "/bin/true")) is None
    assert probe_version(Path(sys.executable)) is None
    assert probe_version(tmp_path) is None
    (tmp_path / "text").write_text("not a program")
    (tmp_path / "text").chmod(0o755)
    assert probe_version(tmp_path / "text") is None


# --- download ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "machine", "target"),
    [
        ("Linux", "x86_64", "x86_64-unknown-linux-musl"),
        ("Linux", "aarch64", "aarch64-unknown-linux-musl"),
        ("Darwin", "arm64", "aarch64-apple-darwin"),
    ],
)
def test_release_asset(system: str, machine: str, target: str) -> None:
    assert release_asset("0.23.9", system, machine) == f"tract-{target}-0.23.9.tgz"


def test_machine_without_release() -> None:
    with pytest.raises(InstallError, match="no binary for Windows on AMD64"):
        release_asset("0.23.9", "Windows", "AMD64")


@needs_cli
@needs_release
@pytest.mark.parametrize("tag", [f"v{TRACT_CLI_VERSION}", TRACT_CLI_VERSION])
def test_download_installs_a_verified_binary(
    release: tuple[Path, dict[str, str]], tmp_path: Path, tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert CLI is not None
    root, urls = release
    publish(root, tag, CLI)
    path = download_release(TRACT_CLI_VERSION, tmp_path / "cache", **urls)
    assert path == installed_path(TRACT_CLI_VERSION, tmp_path / "cache")
    assert probe_version(path) == TRACT_CLI_VERSION
    assert list(path.parent.iterdir()) == [path]
    assert "not verified" not in caplog.text


@needs_release
def test_wrong_checksum_installs_nothing(release: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, urls = release
    publish(root, f"v{TRACT_CLI_VERSION}", Path(shutil.which("true") or "/bin/true"), digest="sha256:00")
    with pytest.raises(InstallError, match="SHA-256 is"):
        download_release(TRACT_CLI_VERSION, tmp_path / "cache", **urls)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@needs_release
def test_release_that_holds_another_program_installs_nothing(
    release: tuple[Path, dict[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, urls = release
    tag = f"v{TRACT_CLI_VERSION}"
    publish(root, tag, Path(shutil.which("true") or "/bin/true"))
    (root / "api" / tag).unlink()
    with pytest.raises(InstallError, match="does not run here, or is not tract"):
        download_release(TRACT_CLI_VERSION, tmp_path / "cache", **urls)
    assert "was not verified" in caplog.text
    (root / "files" / tag / ASSET).write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(InstallError, match=ASSET):
        download_release(TRACT_CLI_VERSION, tmp_path / "cache", **urls)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@needs_release
def test_missing_release_and_no_network(release: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    _, urls = release
    with pytest.raises(InstallError, match="there is no release file"):
        download_release("0.0.1", tmp_path, **urls)
    with pytest.raises(InstallError, match="refused"):
        download_release("0.0.1", tmp_path, download_url="http://127.0.0.1:1", api_url="http://127.0.0.1:1")


# --- build ------------------------------------------------------------------------------------


def test_cargo_command_is_the_one_known_to_build(tmp_path: Path) -> None:
    command = cargo_command("0.23.9", tmp_path)
    assert Path(command[0]).name == "cargo"
    features = ["--no-default-features", "--features", "transformers,extra,pulse,onnx,multithread-mm"]
    assert command[1:] == ["install", "tract-cli", "--version", "0.23.9", *features, "--root", str(tmp_path / "0.23.9")]


def test_missing_cargo_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InstallError, match="cargo is not installed"):
        cargo_install("0.23.9", tmp_path)


# --- script -----------------------------------------------------------------------------------


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with an interpreter that sees neither the project nor its packages."""
    command = [sys.executable, "-I", "-S", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


@needs_cli
def test_script_prints_the_installed_path(tmp_path: Path) -> None:
    assert CLI is not None
    cached = installed_path(TRACT_CLI_VERSION, tmp_path)
    cached.parent.mkdir(parents=True)
    cached.symlink_to(CLI)
    for _ in range(2):
        run = run_script("--cache-dir", str(tmp_path))
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines()[-1] == str(cached)


def test_script_fails_in_one_line(tmp_path: Path) -> None:
    run = run_script("--cache-dir", str(tmp_path), "--version", "0.0.1", "--no-download", "--no-build")
    assert run.returncode == 1 and not run.stdout
    assert run.stderr == "install_tract_cli: tract 0.0.1 is not installed, and downloading and building are disabled\n"
    run = run_script("--version", "latest")
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "not a version number" in run.stderr


def test_script_helps() -> None:
    run = run_script("--help")
    assert run.returncode == 0 and "--no-download" in run.stdout
