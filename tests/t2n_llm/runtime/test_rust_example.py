"""`examples/rust` generates the tokens of `t2n-llm generate`, without Python. Built with cargo (its README)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.multimodal import MultimodalModel
from t2n_llm.runtime.sampling.options import Sampling
from tests.shared_folders import SharedFolders
from tests.t2n_llm.command_line import call
from tests.t2n_llm.runtime.multimodal_models import export_gemma

EXAMPLE = Path(__file__).parents[3] / "examples" / "rust"
PROGRAM = Path(os.environ.get("CARGO_TARGET_DIR", EXAMPLE / "target")) / "release" / "generate"

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="examples/rust is not built")


def _said(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("prompt", ["The sea was calm", "Once upon a time there was a — ", "x " * 300])
def test_it_says_what_python_says(prompt: str, real_export: Path) -> None:
    """The last prompt is longer than a chunk."""
    wanted = "".join(
        ExportedModel.open(real_export).generate(prompt, max_new_tokens=40, sampling=Sampling(greedy=True), chat=False)
    )
    done = _said(real_export, prompt, 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout == wanted + "\n"
    assert re.search(r"\d+ tokens read in [\d.]+ s, \d+ made in [\d.]+ s", done.stderr)


_NEW = 8


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[Path, Path]:
    """Two PNG files of different sizes, one of them with an alpha channel."""
    random = np.random.default_rng(0)
    for name, shape in (("first.png", (70, 90, 3)), ("second.png", (120, 50, 4))):
        Image.fromarray(random.integers(0, 255, shape, np.uint8)).save(tmp_path / name)
    return tmp_path / "first.png", tmp_path / "second.png"


@pytest.fixture(scope="session")
def gemma(shared_folders: SharedFolders) -> Path:
    """An export of a tiny Gemma 3, whose decoder takes `token_type_ids`."""
    return shared_folders("sensing-gemma3", export_gemma) / "export"


def _python_logits(folder: Path, text: str, images: tuple[Path, ...]) -> np.ndarray:
    """Return the logits by which greedy decoding chooses each token, f32 [tokens, vocabulary]."""
    model = MultimodalModel.open(folder)
    prompt = model.prompt(text, images=images, chat=False)
    rows: list[np.ndarray] = []
    with model.opened(prompt) as held:
        logits = held.read(prompt.ids)
        while logits is not None and len(rows) < _NEW:
            logits = logits.copy()
            logits[list(model.language.never)] = -np.inf
            token = int(logits.argmax())
            if token == model.language.settings["eos_token_id"]:
                break
            rows.append(logits)
            logits = held.read([token])
    return np.stack(rows)


def _rust_logits(folder: Path, text: str, images: tuple[Path, ...]) -> np.ndarray:
    command: list[str | Path] = [PROGRAM.with_name("logits"), folder, text, str(_NEW), *images]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    vocabulary = json.loads((folder / "export.json").read_text())["model"]["vocab_size"]
    return np.frombuffer(done.stdout, "<f4").reshape(-1, vocabulary)


@pytest.mark.parametrize(
    ("model", "count", "prompt", "expanded"),
    [
        ("llava", 1, "w20 w21", "w20 w21"),
        ("llava", 2, "w20 w21", "w20 w21"),
        ("llava", 1, "w30 <image> w31 w99", "w30 <image> w31 w99"),
        ("gemma", 1, "w30 w31 w99 w40 w41", "<image><soft><end> w30 w31 w99 w40 w41"),
        ("gemma", 2, "w100 <image> w3 <image> w60", "w100 <image><soft><end> w3 <image><soft><end> w60"),
    ],
)
def test_images_are_described_as_by_python(
    model: str, count: int, prompt: str, expanded: str, pictures: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    """`expanded` has the tokens that the model's processor writes around an image."""
    folder: Path = request.getfixturevalue(model)
    images = pictures[:count]
    options = [word for file in images for word in ("--image", file)]
    expected = call("generate", folder, prompt, *options, "--raw", "--greedy", "-n", _NEW, "--json")
    assert expected.code == 0, expected.err
    done = _said(folder, expanded, _NEW, *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(expected.out.splitlines()[-1])
    assert done.stdout.split() == record["text"].split()
    assert f"{record['prompt_tokens']} tokens read" in done.stderr and f", {record['tokens']} made" in done.stderr
    wanted = _python_logits(folder, prompt, images)
    np.testing.assert_allclose(_rust_logits(folder, expanded, images), wanted, rtol=1e-4, atol=1e-4)


def test_a_photograph_is_turned_as_its_camera_records(llava: Path, tmp_path: Path) -> None:
    """Decoders of JPEG round differently, so the logits are not the same to the last digit."""
    rows, columns = np.mgrid[:60, :90] / 90
    exif = Image.Exif()
    exif[0x0112] = 6  # turned right
    picture = Image.fromarray(np.uint8(255 * np.stack([rows, columns, rows * columns], axis=-1)))
    picture.save(tmp_path / "photo.jpg", exif=exif)
    picture.save(tmp_path / "lying.jpg")
    wanted, lying = (_python_logits(llava, "w20", (tmp_path / name,))[0] for name in ("photo.jpg", "lying.jpg"))
    found = _rust_logits(llava, "w20", (tmp_path / "photo.jpg",))[0]
    used = np.isfinite(wanted)
    error, difference = (np.abs(row[used] - wanted[used]).max() for row in (found, lying))
    assert error < 0.1 * difference


def _with_other_inputs(manifest: dict[str, Any]) -> None:
    manifest["graph"]["inputs"].insert(1, "position_ids")


def _with_other_rows(manifest: dict[str, Any]) -> None:
    manifest["multimodal"]["rows_per_image"] = "H*W"


def _without_frontend(manifest: dict[str, Any]) -> None:
    del manifest["frontend"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_other_inputs, "the decoder takes position_ids"),
        (_with_other_rows, 'an image has "H*W" rows'),
        (_without_frontend, "the export has no frontend"),
    ],
)
def test_other_models_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, llava: Path, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    manifest = json.loads((llava / "export.json").read_text())
    change(manifest)
    (tmp_path / "export.json").write_text(json.dumps(manifest))
    refused = _said(tmp_path, "w20", 8, "--image", pictures[0])
    assert refused.returncode != 0 and message in refused.stderr


def test_wrong_images_are_refused(real_export: Path, llava: Path, pictures: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("text")
    for arguments, message in (
        ((real_export, "The sea", "--image", pictures[0]), "not for image-text-to-text"),
        ((llava, "w20"), "not for text-generation"),
        ((llava, "w20", "--image"), "--image takes a value"),
        ((llava, "w20", "--image", tmp_path / "text.png"), "text.png cannot be read"),
        (
            (llava, "<image> w20", "--image", pictures[0], "--image", pictures[1]),
            "the prompt has <image> 1 times, for 2 images",
        ),
    ):
        refused = _said(*arguments)
        assert refused.returncode != 0 and message in refused.stderr, refused.stderr


def test_mistakes_are_told(real_export: Path, tmp_path: Path) -> None:
    assert "usage: generate DIR PROMPT" in _said(real_export).stderr
    wrong = _said(tmp_path, "The sea")
    assert wrong.returncode != 0 and "export.json cannot be read" in wrong.stderr
    long = _said(real_export, "x " * 700)
    assert long.returncode != 0 and "tokens, the model 1024 positions" in long.stderr
