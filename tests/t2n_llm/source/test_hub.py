"""Where a model comes from: hub ids through huggingface-hub's own cache, variables and answers, and local folders."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from transformers import MistralConfig, MistralForCausalLM

from generic_export.errors import MissingTokenizerError
from t2n_llm import export_llm
from t2n_llm.source.hub import load_tokenizer, open_source
from tests.families import config, save_tiny_model
from tests.t2n_llm.command_line import call, refused, run_new, small_disk, unchanged

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_test"


@pytest.fixture
def cache(tiny_llama: Path, tmp_path: Path) -> Path:
    """A hub cache that holds `org/tiny` at `main`, and `org/broken` without its weights."""
    for name in ("tiny", "broken"):
        repository = tmp_path / "hub" / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        shutil.copytree(tiny_llama, repository / "snapshots" / COMMIT)
    weights = tmp_path / "hub" / "models--org--broken" / "snapshots" / COMMIT / "model.safetensors"
    weights.unlink()
    weights.symlink_to("../../blobs/gone")
    return tmp_path / "hub"


def export(source: str, parent: Path, *options: object) -> list[object]:
    return ["export", source, "-o", parent / "x", "--no-tokenizer", "--no-check", *options]


def test_offline(cache: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without -o, the folder is named after the model, in the current folder."""
    monkeypatch.chdir(parent)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    commands: list[list[object]] = [
        ["export", "org/tiny", "--no-tokenizer", "--no-check", "--json"],
        export("org/tiny", parent, "--revision", COMMIT),
        export("org/tiny", parent, "--force", "--revision", "dev"),
        export("org/broken", parent, "--force"),
        export("org/tiny", parent, "--force", "--revision", "f" * 40),
        export("org/absent", parent, "--force"),
    ]
    by_branch, by_commit, revision, dangling, commit, absent = (
        call(*command, variables=offline) for command in commands
    )
    assert (by_branch.code, by_commit.code) == (0, 0), (by_branch, by_commit)
    assert sorted(path.name for path in parent.iterdir()) == ["tiny", "x"]
    assert json.loads(by_branch.out)["output_dir"] == "tiny"
    manifest = json.loads((parent / "tiny" / "export.json").read_text())
    assert manifest["source"] == {
        "name": "org/tiny",
        "revision": COMMIT,
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
    }
    assert str(cache) not in (parent / "tiny" / "export.json").read_text()
    refused(absent, "org/absent", "cache", "HF_HUB_OFFLINE")
    refused(revision, "org/tiny", "'dev'")
    refused(dangling, "model.safetensors")
    refused(commit, "org/tiny", "f" * 40)


@pytest.mark.nightly
def test_a_new_process_reads_the_variables(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests have them read again in this process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refused(run_new(*export("org/absent", parent)), "org/absent", "cache", "HF_HUB_OFFLINE")


def test_unreachable_hub(cache: Path, parent: Path) -> None:
    endpoint = "http://127.0.0.1:9"
    variables = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache)}
    absent, cached = (call(*export(name, parent), variables=variables) for name in ("org/absent", "org/tiny"))
    refused(absent, "org/absent", endpoint, "refused")
    assert cached.code == 0, cached


# --- a hub that answers -----------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as a download needs: repository, tree and files; `org/tiny` is private."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files = files
        self.asked: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        repository, _, rest = path.removeprefix("/api/models/").lstrip("/").partition("/revision/")
        owner_and_name = "/".join(repository.split("/")[:2])
        if owner_and_name == "org/gated":
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif owner_and_name == "org/tiny" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif owner_and_name not in ("org/tiny", "org/short"):
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest and rest not in ("main", COMMIT):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" in path:
            self._send_file(path.partition(f"/resolve/{COMMIT}/")[2], cut=owner_and_name == "org/short")
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            self._answer(200, json.dumps(tree).encode(), {})
        else:
            siblings = [{"rfilename": name} for name in self.server.files]
            about = {"id": owner_and_name, "sha": COMMIT, "siblings": siblings}
            self._answer(200, json.dumps(about).encode(), {})

    def _send_file(self, name: str, *, cut: bool) -> None:
        data = self.server.files[name]
        if self.command == "GET":
            self.server.asked.append(name)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._answer(200, data, headers, cut=cut and name.endswith(".safetensors"))

    def _answer(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub(tiny_llama: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    files["pytorch_model.bin"] = files["original/consolidated.safetensors"] = b"not wanted"
    files["consolidated.safetensors"] = files["model.gguf"] = b"not wanted"
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_the_hub_refuses_and_what_it_gives(hub: Hub, parent: Path, tmp_path: Path) -> None:
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}
    commands = [
        export("org/absent", parent),
        export("org/gated", parent),
        export("org/tiny", parent, "--token", "hf_wrong"),
        export("org/tiny", parent, "--token", TOKEN, "--revision", "dev"),
        export("org/tiny", parent, "--token", TOKEN, "--json"),
    ]
    absent, gated, private, revision, given = (call(*command, variables=variables) for command in commands)
    refused(absent, "org/absent", "the model does not exist")
    refused(gated, "org/gated", "granted")
    assert "--token" in gated.line("hint")
    refused(private, "org/tiny", "private")
    assert "--token" in private.line("hint")
    refused(revision, "org/tiny", "'dev'")
    assert (given.code, given.err) == (0, ""), given
    assert json.loads(given.out)["source"]["revision"] == COMMIT
    assert set(hub.asked) == {"config.json", "generation_config.json", "model.safetensors"}
    assert TOKEN not in (parent / "x" / "export.json").read_text()


def test_a_repository_without_safetensors_gives_its_pytorch_file(
    tiny_llama: Path, parent: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(tiny_llama / "model.safetensors"), tmp_path / "pytorch_model.bin")
    files = {path.name: path.read_bytes() for path in tiny_llama.glob("*.json")}
    files |= {"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes(), "training_args.bin": b"not wanted"}
    server = Hub(files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        variables = {"HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}
        given = call(*export("org/tiny", parent, "--token", TOKEN), variables=variables)
    finally:
        server.shutdown()
        server.server_close()
    assert given.code == 0, given
    assert set(server.asked) == {"config.json", "generation_config.json", "pytorch_model.bin"}


def test_a_download_that_breaks_off_or_does_not_fit(hub: Hub, parent: Path, tmp_path: Path) -> None:
    """The token comes from the environment here."""
    with small_disk(tmp_path / "hub", "128k") as disk, unchanged(parent):
        if disk is None:
            pytest.skip("needs the right to mount a tmpfs")
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_TOKEN": TOKEN}
        broken, full = (call(*export(f"org/{name}", parent), variables=variables) for name in ("short", "tiny"))
    refused(broken, "org/short", hub.endpoint)
    refused(full, "org/tiny", "full", str(tmp_path / "hub"))


# --- names ------------------------------------------------------------------------------------

NAMES = {
    "/does/not/exist": "no such folder",
    "./nowhere": "no such folder",
    "C:\\models\\nowhere": "no such folder",
    "~nobody-of-that-name/model": "no such folder",
    "~nobody-of-that-name/model.gguf": "no such folder",
    "a/b/c": "no such folder",
    "two words": "hub id",
    "x" * 5000: "hub id",
    "-": "hub id",
    "": "model",
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:10] or "empty")
def test_names_that_are_neither_folder_nor_hub_id(name: str, parent: Path) -> None:
    with unchanged(parent):
        refused(call("export", "-o", parent / "x", "--", name), NAMES[name])


def test_a_file_is_not_a_folder(tiny_llama: Path, parent: Path) -> None:
    refused(call("export", tiny_llama / "model.safetensors", "-o", parent / "x"), "model.safetensors", "file")


def _write_tekken(folder: Path, *specials: str) -> None:
    """Mistral's tokenizer format, with a token for each byte."""
    size = len(specials)
    said = {
        "pattern": r"\S+|\s+",
        "default_vocab_size": 256 + size,
        "default_num_special_tokens": size,
        "version": "v7",
    }
    vocab = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    named = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(specials)]
    record = {"config": said, "vocab": vocab} | ({"special_tokens": named} if named else {})
    (folder / "tekken.json").write_text(json.dumps(record))


def test_tekken_is_read_and_copied(tmp_path: Path) -> None:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    model = MistralForCausalLM(MistralConfig(vocab_size=259, num_key_value_heads=2, **size))
    model.save_pretrained(tmp_path / "model")
    _write_tekken(tmp_path / "model", "<unk>", "<s>", "</s>")
    result = export_llm(tmp_path / "model", tmp_path / "export", archive="dir")
    assert result.validation is not None
    assert result.validation.passed
    assert load_tokenizer(tmp_path / "export").encode("Hi") == [3 + ord("H"), 3 + ord("i")]


def test_a_tokenizer_that_needs_a_package_names_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("mistral_common"):
        pytest.skip("mistral-common is installed")
    MistralConfig().save_pretrained(tmp_path)
    _write_tekken(tmp_path)  # as before mistral-common wrote special tokens
    with pytest.raises(MissingTokenizerError, match="mistral-common") as refused:
        load_tokenizer(tmp_path)
    assert refused.value.hint is not None
    assert "Install" in refused.value.hint


def test_a_folder_with_odd_characters_is_named_as_it_is(tmp_path: Path, parent: Path) -> None:
    odd = tmp_path / "[bold]a[/nothing] b\\"
    save_tiny_model("llama", odd, configs={"llama": config("llama", num_hidden_layers=1)})
    refused(call("export", odd, "-o", parent / "x"), str(odd))
    assert call("export", odd, "-o", parent / "[/x]", "--no-tokenizer", "--no-check").code == 0


def test_the_name_of_an_export_says_nothing_about_this_machine(tiny_llama: Path) -> None:
    source = open_source(f"{tiny_llama}/../{tiny_llama.name}/", require_tokenizer=False)
    assert source.short_name == source.public_name == "tiny-llama"
    assert source.revision is None


# --- code that comes with the model -----------------------------------------------------------


@pytest.fixture
def homemade(model: Path) -> Path:
    """A Llama under another name, whose config and model classes come as code beside the weights."""
    (model / "homemade.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(model / 'ran')!r}).touch()\n"
        "class HomemadeConfig(LlamaConfig):\n"
        "    model_type = 'homemade'\n"
        "class HomemadeForCausalLM(LlamaForCausalLM):\n"
        "    config_class = HomemadeConfig\n"
    )
    content = json.loads((model / "config.json").read_text()) | {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "homemade.HomemadeConfig", "AutoModelForCausalLM": "homemade.HomemadeForCausalLM"},
    }
    (model / "config.json").write_text(json.dumps(content))
    return model


def test_code_is_run_only_when_asked_for(homemade: Path, parent: Path) -> None:
    refusal, trusted = (call(*export(str(homemade), parent), *words) for words in ((), ("--trust-remote-code",)))
    refused(refusal, str(homemade), "Python code")
    assert "--trust-remote-code" in refusal.line("hint")
    assert trusted.code == 0, trusted


def test_refused_code_does_not_run(homemade: Path, parent: Path) -> None:
    refused(call(*export(str(homemade), parent)), "Python code")
    assert not (homemade / "ran").exists()
