"""Chats about images and sound: each answer is transformers' own, and an image that the engine has read is not looked at again."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import BadRequestError
from PIL import Image

from generic_export.errors import EngineError, OptionError
from t2n_llm.runtime.chat.conversation import HeldConversation
from t2n_llm.runtime.chat.models import ChatModel
from t2n_llm.runtime.chat.template import MediaFile, Message
from t2n_llm.runtime.multimodal import MultimodalReader
from t2n_llm.runtime.sampling.options import Sampling
from t2n_llm.tasks.media.sound import read_waveform
from tests.shared_folders import SharedFolders
from tests.t2n_llm.command_line import Outcome, call, strict_json
from tests.t2n_llm.runtime.multimodal_models import (
    export_gemma,
    export_mllama,
    export_qwen2_audio,
    write_recording,
)
from tests.t2n_llm.runtime.serve.test_serve import _Server

_TOKENS = 5


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Three different images."""
    random = np.random.default_rng(1)
    files = [tmp_path / f"{name}.png" for name in ("first", "second", "third")]
    for file in files:
        Image.fromarray(random.integers(0, 255, (64, 64, 3), np.uint8)).save(file)
    return files


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """`t2n-llm chat`, with the lines that are piped into it as the first argument."""

    def run(lines: str, *arguments: object) -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return call("chat", *arguments)

    return run


class _Theirs:
    """transformers' own answers."""

    def __init__(self, export: Path) -> None:
        from transformers import AutoModelForMultimodalLM, AutoProcessor

        source = export.parent / "source"
        self._processor = AutoProcessor.from_pretrained(source)
        self._model = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32).eval()

    def answer(self, messages: Sequence[Message]) -> str:
        made = self._processor.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        token = self._model.config.image_token_id
        said = self._model.generate(**made, max_new_tokens=_TOKENS, do_sample=False, suppress_tokens=[token])
        return str(self._processor.decode(said[0, made["input_ids"].shape[1] :], skip_special_tokens=True))


def _conversation(model: ChatModel, reader: Any) -> HeldConversation:
    choice = Sampling(greedy=True).choice(model.language.settings)
    return HeldConversation(model.language, reader, choice, system="w30", max_new_tokens=_TOKENS)


def _check_turns(
    export: Path,
    turns: Sequence[tuple[str, Sequence[Path]]],
    prefill: int | None = 7,
    held: Callable[[int], bool] = lambda number: number > 0,
) -> None:
    model, theirs = ChatModel.open(export, prefill_chunk=prefill), _Theirs(export)
    with model.reader() as reader:
        conversation = _conversation(model, reader)
        for number, (text, files) in enumerate(turns):
            answer = "".join(conversation.ask(text, files=[MediaFile("image", file) for file in files]))
            assert answer.split() == theirs.answer(conversation.messages[:-1]).split() != []
            assert conversation.account is not None
            assert (conversation.account.held_tokens > 0) == held(number)


def test_turns_with_images_are_those_of_transformers(llava: Path, pictures: list[Path]) -> None:
    _check_turns(llava, [("w20 w21", pictures[:1]), ("w22", ()), ("w23 w24", pictures[1:]), ("w25", ())])


def test_images_read_in_both_directions(shared_folders: SharedFolders, pictures: list[Path]) -> None:
    folder = shared_folders("sensing-gemma3", export_gemma) / "export"
    _check_turns(folder, [("w20 w21", ()), ("w22", pictures[:2]), ("w23", ())])


def test_images_for_cross_attention_are_known_from_the_start(
    shared_folders: SharedFolders, pictures: list[Path]
) -> None:
    """What was said before a new image is read again, with that image beside it."""
    folder = shared_folders("sensing-mllama", export_mllama) / "export"
    turns = [("w20 w21", pictures[:1]), ("w22", ()), ("w23 w24", pictures[1:]), ("w25", ())]
    _check_turns(folder, turns, held=lambda number: number in (1, 3))


def _asked(files: Sequence[Path], *texts: str) -> list[Message]:
    """A chat whose first message is about images."""
    parts = [{"type": "image", "image": str(file)} for file in files]
    first: Message = {"role": "user", "content": [*parts, {"type": "text", "text": texts[0]}]}
    later = [{"role": role, "content": text} for role, text in zip(("assistant", "user") * 3, texts[1:], strict=False)]
    return [first, *later]


def test_what_was_seen_is_not_looked_at_again(llava: Path, pictures: list[Path]) -> None:
    model, theirs = ChatModel.open(llava), _Theirs(llava)
    looked: list[int] = []

    def answer(reader: MultimodalReader, files: Sequence[Path], *texts: str) -> tuple[str, int]:
        messages = _asked(files, *texts)
        reading = reader.of_messages(messages, list(files))
        reading.start()
        choice = Sampling(greedy=True).choice(model.language.settings)
        said = model.language.answer(reader.held, reading.left, choice, max_new_tokens=_TOKENS)
        text = "".join(said)
        assert text.split() == theirs.answer(messages).split()
        return text, said.account.held_tokens

    with model.reader() as reader:
        assert isinstance(reader, MultimodalReader)
        pipeline: Any = reader._pipeline
        encode = pipeline.encode
        pipeline.encode = lambda pixels, frames=(): looked.append(len(pixels)) or encode(pixels, frames)
        first, held = answer(reader, pictures[:2], "w20")
        assert held == 0 and sum(looked) == 2
        _, held = answer(reader, pictures[:2], "w20", first, "w21")
        assert held > 128 and sum(looked) == 2
        # the same tokens about another image
        _, held = answer(reader, [pictures[0], pictures[2]], "w20", first, "w21")
        assert held == 0 and sum(looked) == 4
        # what is read is stopped within the second image
        reader.held.forget()
        reading = reader.of_messages(_asked(pictures[:2], "w22"), pictures[:2])
        reading.start()
        reader.held.read(reading.left[:100])
        _, held = answer(reader, pictures[:2], "w22")
        assert held == 0


def test_after_the_engine_failed_everything_is_read_again(
    llava: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_inputs: object) -> None:
        raise EngineError("the engine ended.")

    model = ChatModel.open(llava)
    image = [MediaFile("image", pictures[0])]
    with model.reader() as reader:
        conversation = _conversation(model, reader)
        first = "".join(conversation.ask("w20", files=image))
        monkeypatch.setattr(reader._text, "run", fail)  # type: ignore[attr-defined]
        with pytest.raises(EngineError):
            list(conversation.ask("w21"))
        assert "".join(conversation.ask("w22")).split() == _Theirs(llava).answer(conversation.messages[:-1]).split()
        assert conversation.messages[2]["content"] == first


def test_sound_in_a_chat(shared_folders: SharedFolders, chat: Callable[..., Outcome], tmp_path: Path) -> None:
    folder = shared_folders("sensing-qwen2-audio", export_qwen2_audio) / "export"
    sounds = [write_recording(tmp_path / f"{samples}.wav", samples) for samples in (9_000, 5_000)]
    turns = "".join((f"/audio {sounds[0]}\nw20\n", "w21\n", f"/audio {sounds[1]}\nw22\n"))
    words = ("--greedy", "--max-new-tokens", _TOKENS, "--json")
    outcome = chat(turns, folder, *words)
    assert outcome.code == 0, outcome.err
    records = [record for record in map(strict_json, outcome.out.splitlines()) if "held_tokens" in record]
    assert [record["prompt"] for record in records] == ["w20", "w21", "w22"]
    held = [record["held_tokens"] for record in records]
    assert held[0] == 0 < held[1] < held[2]
    expected = _heard_by_transformers(folder, [sounds[:1], (), sounds[1:]], records)
    assert [record["text"].split() for record in records] == expected


def _heard_by_transformers(
    export: Path, sounds: Sequence[Sequence[Path]], records: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Return transformers' answer to each turn of a chat, after the answers of the export before it."""
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    source = export.parent / "source"
    processor = AutoProcessor.from_pretrained(source)
    model = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32).eval()
    messages: list[dict[str, Any]] = []
    waveforms: list[np.ndarray] = []
    expected = []
    for files, record in zip(sounds, records, strict=True):
        content = [
            *({"type": "audio", "audio": str(file)} for file in files),
            {"type": "text", "text": record["prompt"]},
        ]
        messages.append({"role": "user", "content": content if files else record["prompt"]})
        waveforms += [read_waveform(file, 12_800) for file in files]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        made = processor(text=text, audio=waveforms, sampling_rate=12_800, return_tensors="pt")
        said = model.generate(**made, max_new_tokens=_TOKENS, do_sample=False, suppress_tokens=[151])
        words = processor.tokenizer.decode(said[0, made["input_ids"].shape[1] :], skip_special_tokens=True)
        expected.append(words.split())
        messages.append({"role": "assistant", "content": record["text"]})
    return expected


def test_images_in_a_chat_at_the_command_line(
    llava: Path, chat: Callable[..., Outcome], pictures: list[Path], tmp_path: Path
) -> None:
    words = ("--greedy", "--max-new-tokens", _TOKENS, "--json", "--image", pictures[0])
    saved = tmp_path / "chat.json"
    outcome = chat(f"w20 w21\n/image {pictures[1]}\nw22\n/save {saved}\n", llava, *words)
    assert outcome.code == 0, outcome.err
    messages = strict_json(saved.read_text())
    assert messages[0]["content"][0] == {"type": "image", "image": str(pictures[0])}
    assert messages[3]["content"].split() == _Theirs(llava).answer(messages[:3]).split()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("/image\n", "the file name is missing"),
        ("/image none.png\n", "no such file"),
        ("/audio none.wav\n", "does not read audio files"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    lines: str, error: str, llava: Path, chat: Callable[..., Outcome]
) -> None:
    outcome = chat(lines, llava)
    assert outcome.code == 2 and error in outcome.line("error")


def test_a_language_model_reads_text_only(real_export: Path, pictures: list[Path]) -> None:
    outcome = call("chat", real_export, "--image", pictures[0])
    assert outcome.code == 2 and "does not read image files" in outcome.line("error")
    with ChatModel.open(real_export).reader() as reader, pytest.raises(OptionError, match="language model"):
        reader.of_messages(_asked(pictures[:1], "x"), pictures[:1])


@pytest.fixture(scope="module")
def server(llava: Path) -> Iterator[_Server]:
    """A server of a model that sees."""
    running = _Server(llava)
    yield running
    running.end()


def _url(file: Path) -> dict[str, Any]:
    data = base64.b64encode(file.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_the_server_sees_images(server: _Server, llava: Path, pictures: list[Path]) -> None:
    theirs = _Theirs(llava)
    text = {"type": "text", "text": "w20 w21"}
    first: list[Any] = [{"role": "user", "content": [_url(pictures[0]), text]}]
    with server.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=first, max_tokens=_TOKENS, temperature=0)
        said = answer.choices[0].message.content
        assert said is not None and said.split() == theirs.answer(_asked(pictures[:1], "w20 w21")).split()
        further = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "w22"}]
        answer = client.chat.completions.create(model="tiny", messages=further, max_tokens=_TOKENS, temperature=0)
        expected = theirs.answer(_asked(pictures[:1], "w20 w21", said, "w22"))
        assert (answer.choices[0].message.content or "").split() == expected.split()
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 64
        whole = client.completions.create(model="tiny", prompt="w20 w21", max_tokens=_TOKENS)
        assert whole.choices[0].text


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}, "the server downloads nothing"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "not an image"),
        ({"type": "image_url", "image_url": "x"}, "must have the text url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "does not read audio"),
        ({"type": "file", "file": {}}, "is not supported"),
        ({"type": "text", "text": "<image> <image>"}, "image token"),
    ],
)
def test_parts_that_cannot_be_read(part: Any, error: str, server: _Server) -> None:
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "w20"}]}]
    with server.client() as client, pytest.raises(BadRequestError, match=error):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=_TOKENS)


def test_special_tokens_cannot_be_sanitized(llava: Path) -> None:
    outcome = call("serve", llava, "--port", 0, "--sanitize-special-tokens")
    assert outcome.code == 2 and "not supported for models that read images" in outcome.line("error")
