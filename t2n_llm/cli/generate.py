"""`t2n-llm generate`: text from an export, streamed: of a prompt, or of a text, a recording or a picture; or speech of a text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from generic_export.errors import OptionError
from t2n_llm.cli.console import Sink
from t2n_llm.cli.parameters import (
    ChatTemplateOption,
    DeviceOption,
    ExportArgument,
    JsonLinesOption,
    PrefillChunkOption,
    TemplateVariablesOption,
    most_new_tokens,
    read_template_variables,
    takes_options,
)
from t2n_llm.cli.session import open_sink, quiet_libraries
from t2n_llm.option import Panel
from t2n_llm.runtime.sampling.options import Sampling

if TYPE_CHECKING:
    from t2n_llm.runtime.answering import StreamedAnswer
    from t2n_llm.runtime.generate import ExportedModel

_SOURCES = Panel.ENCODER_DECODER.value
_FILES = Panel.FILES.value
_SPEECH = Panel.SPEECH.value
_MOST_NEW_TOKENS = 128  # of a text that is made of a source
_GUESSED_TOKENS = 2  # more were not faster (docs/measurements/speed.md#prompt-lookup)


@dataclass(frozen=True)
class _Asked:
    """What stood on the command line beside the archive and the sampling.

    Attributes:
        prompt, audio, images: what the text is made of.
        system: what the model is told before the prompt.
        language, translate, timestamps, beams: about encoder-decoders only.
        guessed_tokens: of prompt lookup, at once; None without it.
        max_new_tokens, chat, variables, prefill_chunk, device: see the options.
        output, speaker: of speech.
    """

    prompt: str | None
    system: str | None
    audio: tuple[Path, ...]
    images: tuple[Path, ...]
    language: str | None
    translate: bool
    timestamps: bool
    beams: int | None
    guessed_tokens: int | None
    max_new_tokens: int | None
    chat: bool
    variables: Mapping[str, Any]
    prefill_chunk: int | None
    device: str
    output: Path | None
    speaker: str | None


@takes_options
def generate(
    archive: ExportArgument,
    sampling: Sampling,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Prompt; - or nothing: read from a pipe.",
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the prompt (UTF-8).", metavar="FILE", show_default=False)
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message.", show_default=False),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            help="Recording (WAV) to transcribe, or that the prompt is about; then repeatable.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=_FILES,
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image to read, or that the prompt is about; then repeatable.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=_FILES,
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(help="Spoken language, such as en; default: detected.", rich_help_panel=_SOURCES),
    ] = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Translate into English.", rich_help_panel=_SOURCES)
    ] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print times in seconds.", rich_help_panel=_SOURCES)
    ] = False,
    beams: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Beams, for encoder-decoders; default: the model's setting.",
            show_default=False,
            rich_help_panel=_SOURCES,
        ),
    ] = None,
    prompt_lookup: Annotated[
        bool, typer.Option("--prompt-lookup", help="Speculative decoding from the prompt; faster on repeated text.")
    ] = False,
    prompt_lookup_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="K", help=f"Guessed tokens per run; default: {_GUESSED_TOKENS}.", show_default=False
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, most_new_tokens(128)] = None,
    chat: ChatTemplateOption = True,
    template_kwargs: TemplateVariablesOption = None,
    prefill_chunk: PrefillChunkOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--out",
            "-o",
            metavar="FILE",
            help="WAV file to write (speech models).",
            rich_help_panel=_SPEECH,
        ),
    ] = None,
    speaker: Annotated[
        str | None,
        typer.Option(metavar="N|FILE", help="Speaker: a number, an .npy file, or a WAV file.", rich_help_panel=_SPEECH),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonLinesOption = False,
) -> None:
    """Generate text in tract.

    Exit code 0: generated. 2: bad input, or the engine failed. 3: a bug.
    """
    sounds, images = tuple(audio or ()), tuple(image or ())
    prompt = _given_prompt(prompt, prompt_file, awaited=not sounds and not images)
    if prompt is None and not sounds and not images:
        raise typer.BadParameter(
            "there is no input; pass a prompt, --prompt-file, --audio or --image.", param_hint="prompt"
        )
    if system is not None and not chat:
        raise typer.BadParameter(
            "it sets a variable of the chat template, which --raw disables.", param_hint="--system"
        )
    if prompt_lookup_tokens is not None and not prompt_lookup:
        raise typer.BadParameter("it requires --prompt-lookup.", param_hint="--prompt-lookup-tokens")
    variables = read_template_variables(template_kwargs)
    if variables and not chat:
        raise typer.BadParameter("it does not apply with --raw.", param_hint="--template-kwargs")
    guessed = (prompt_lookup_tokens or _GUESSED_TOKENS) if prompt_lookup else None
    asked = _Asked(
        *(prompt, system, sounds, images, language, translate, timestamps, beams, guessed),
        *(max_new_tokens, chat, variables, prefill_chunk, device, output, speaker),
    )
    with open_sink(as_json) as sink, ExitStack() as stack:
        quiet_libraries(sink, answers=True)
        if _speaks(archive):
            _speak(archive, sampling, asked, sink)
            return
        pieces: list[str] = []
        made = _text_of(archive, sampling, asked, sink, stack)
        for piece in made:
            pieces.append(piece)
            sink.text(piece)
        given = prompt if prompt is not None else str((*sounds, *images)[0])
        sink.generated({"prompt": given, "text": "".join(pieces), **_account(made)})


def _given_prompt(prompt: str | None, file: Path | None, *, awaited: bool) -> str | None:
    """Return the prompt: what was typed, a file's text, or what is piped in.

    Args:
        prompt: the argument; `-` stands for what is piped in.
        file: with the prompt.
        awaited: nothing else was given to start from.

    Raises:
        OptionError: there are two prompts, or the text cannot be read.
    """
    if file is not None:
        if prompt is not None:
            raise OptionError("both a prompt and --prompt-file were given.", "Omit one of them.")
        return _read(lambda: file.read_text(encoding="utf-8"), str(file))
    if prompt == "-" or (prompt is None and awaited and sys.stdin is not None and not sys.stdin.isatty()):
        piped = _read(lambda: sys.stdin.read(), "the input")
        return piped or None
    return prompt


def _read(read: Callable[[], str], name: str) -> str:
    """Return a text without the line end that files and pipes have."""
    try:
        text = read()
        text.encode("utf-8")  # what cannot be decoded may come as half characters
    except UnicodeError as error:
        raise OptionError(f"{name} is not UTF-8: {error}.", "Convert it first.") from error
    except OSError as error:
        raise OptionError(
            f"{name}: {error.strerror or error}.", "Use a text file, or pass the prompt directly."
        ) from error
    return text.rstrip("\r\n")


def _speaks(archive: Path) -> bool:
    """Say whether an export makes speech."""
    from t2n_llm.export.folder import read_any_manifest
    from t2n_llm.runtime.generate import export_folder
    from t2n_llm.tasks.names import TEXT_TO_AUDIO, recorded_task

    return recorded_task(read_any_manifest(export_folder(archive))) == TEXT_TO_AUDIO


def _speak(archive: Path, sampling: Sampling, asked: _Asked, sink: Sink) -> None:
    """Write the speech of a text."""
    from t2n_llm.runtime.generate import export_folder
    from t2n_llm.runtime.speech import SpeakingModel
    from t2n_llm.tasks.media.sound import write_waveform

    if asked.prompt is None or asked.output is None:
        raise OptionError(f"{archive} makes speech of a text.", "Pass a text, and --output FILE.wav.")
    model = SpeakingModel.open(export_folder(archive), device=asked.device)
    sink.waiting(f"Speaking with {archive.name}")
    waveform = model.spoken(asked.prompt, speaker=asked.speaker, seed=sampling.seed or 0)
    rate = model.plan.sampling_rate
    write_waveform(asked.output, waveform, rate)
    seconds = len(waveform) / rate
    sink.say(f"{asked.output}: {seconds:.2f} s at {rate} Hz")
    sink.record({"prompt": asked.prompt, "file": str(asked.output), "seconds": seconds, "sampling_rate": rate})


def _text_of(archive: Path, sampling: Sampling, asked: _Asked, sink: Sink, stack: ExitStack) -> Iterable[str]:
    """Return the text that an export makes; the stack keeps its engine."""
    from t2n_llm.export.folder import read_any_manifest
    from t2n_llm.runtime.generate import export_folder
    from t2n_llm.tasks.names import CTC, MULTIMODAL, WITH_SOURCES, recorded_task

    task = recorded_task(read_any_manifest(export_folder(archive)))
    if asked.guessed_tokens is not None and task in (*WITH_SOURCES, *MULTIMODAL, CTC):
        raise OptionError(f"{archive} was exported for {task}.", "Omit --prompt-lookup.")
    if asked.variables and task in (*WITH_SOURCES, CTC):
        raise OptionError(f"{archive} was exported for {task}.", "Omit --template-kwargs.")
    if asked.system is not None and task in (*WITH_SOURCES, CTC):
        raise OptionError(f"{archive} was exported for {task}.", "Omit --system.")
    if asked.output is not None or asked.speaker is not None:
        raise OptionError(f"{archive} was exported for {task}.", "Omit --output and --speaker.")
    if task in WITH_SOURCES:
        return _of_source(archive, sampling, asked, sink)
    if asked.beams is not None or asked.language is not None or asked.translate or asked.timestamps:
        raise OptionError(
            f"{archive} was exported for {task}.", "Omit --beams, --language, --translate and --timestamps."
        )
    if task in MULTIMODAL:
        return _of_sensed(archive, sampling, asked, sink, stack)
    return _of_frames(archive, asked) if task == CTC else _of_prompt(archive, sampling, asked, sink, stack)


def _of_prompt(archive: Path, sampling: Sampling, asked: _Asked, sink: Sink, stack: ExitStack) -> StreamedAnswer:
    from t2n_llm.runtime.generate import ExportedModel
    from t2n_llm.runtime.prompt_lookup import lookup_answer, opened_rewindable, require_logits

    model = ExportedModel.open(archive, device=asked.device, prefill_chunk=asked.prefill_chunk)
    if asked.prompt is None or asked.audio or asked.images:
        raise OptionError(f"{archive} is a language model.", "It takes a prompt only.")
    ids = _ids_of(asked.prompt, model, asked)
    # refused before the engine starts
    model.limit(len(ids), asked.max_new_tokens)
    if asked.guessed_tokens is not None:
        require_logits(model, asked.guessed_tokens)
    choice = sampling.choice(model.settings)
    tell_not_followed(sink, model.settings, sampled=choice.samples, beams=False)
    sink.waiting(f"Loading {model.archive.name}")
    if asked.guessed_tokens is None:
        held = stack.enter_context(model.opened())
        return model.answer(held, ids, choice, max_new_tokens=asked.max_new_tokens)
    rewindable = stack.enter_context(opened_rewindable(model))
    return lookup_answer(
        model, rewindable, ids, choice, max_new_tokens=asked.max_new_tokens, guessed_tokens=asked.guessed_tokens
    )


def _of_sensed(archive: Path, sampling: Sampling, asked: _Asked, sink: Sink, stack: ExitStack) -> StreamedAnswer:
    from t2n_llm.runtime.generate import export_folder
    from t2n_llm.runtime.multimodal import MultimodalModel

    if asked.prompt is None:
        raise OptionError("there is no prompt.", 'Say what to do with the file, such as "Describe this.".')
    model = MultimodalModel.open(export_folder(archive), device=asked.device, prefill_chunk=asked.prefill_chunk)
    prompt = model.prompt(
        asked.prompt,
        images=asked.images,
        audio=asked.audio,
        system=asked.system,
        chat=asked.chat,
        variables=asked.variables,
    )
    # refused before the engine starts
    model.language.limit(len(prompt.ids), asked.max_new_tokens)
    choice = sampling.choice(model.language.settings)
    tell_not_followed(sink, model.language.settings, sampled=choice.samples, beams=False)
    sink.waiting(f"Loading {archive.name}")
    held = stack.enter_context(model.opened(prompt))
    return model.language.answer(held, prompt.ids, choice, max_new_tokens=asked.max_new_tokens)


def _ids_of(prompt: str, model: ExportedModel, asked: _Asked) -> Sequence[int]:
    """Return the tokens of a prompt, after what the model is told before it."""
    if asked.system is None:
        return model.encode(prompt, chat=asked.chat, variables=asked.variables)
    from t2n_llm.runtime.chat.template import ChatTemplate

    messages = [{"role": "system", "content": asked.system}, {"role": "user", "content": prompt}]
    return ChatTemplate.of(model.tokenizer, model.folder, asked.variables).written(messages).ids


def _of_source(archive: Path, sampling: Sampling, asked: _Asked, sink: Sink) -> Iterable[str]:
    from t2n_llm.runtime.from_source import GenerationOptions, SourceModel
    from t2n_llm.runtime.generate import export_folder

    source = SourceModel.open(export_folder(archive), device=asked.device)
    sampled = sampling.choice(source.settings).samples
    tell_not_followed(sink, source.settings, sampled=sampled, beams=not sampled)
    purpose = "translate" if asked.translate else None
    most = asked.max_new_tokens or _MOST_NEW_TOKENS
    wishes = GenerationOptions(most, sampling, asked.beams, asked.language, purpose, asked.timestamps)
    audio, image = _only(asked.audio, "--audio"), _only(asked.images, "--image")
    return source.text_of(wishes, text=asked.prompt, audio=audio, image=image)


def _of_frames(archive: Path, asked: _Asked) -> Iterable[str]:
    from t2n_llm.runtime.from_source import text_of_frames
    from t2n_llm.runtime.generate import export_folder

    audio = _only(asked.audio, "--audio")
    if audio is None or asked.prompt is not None or asked.images:
        raise OptionError(f"{archive} was exported for ctc.", "It takes --audio FILE.wav only.")
    return [text_of_frames(export_folder(archive), audio, device=asked.device)]


def _only(files: Sequence[Path], option: str) -> Path | None:
    """Return the one file of a model that reads one at a time."""
    if len(files) > 1:
        raise OptionError(f"{option} was given {len(files)} times; this model reads one file.", "Run it for each file.")
    return files[0] if files else None


def tell_not_followed(sink: Sink, settings: Mapping[str, Any], *, sampled: bool, beams: bool) -> None:
    """Warn of what the model's settings ask for and is not done; see `sampling.settings.not_followed`."""
    from t2n_llm.export.folder import json_text
    from t2n_llm.runtime.sampling.settings import SETTINGS_FILE, not_followed

    left = not_followed(settings, sampled=sampled, beams=beams)
    if left:
        sink.warn(f"{SETTINGS_FILE} sets options that are not supported and are ignored: {json_text(left)[1:-1]}.")


def _account(made: Iterable[str]) -> dict[str, Any]:
    """Return what an answer of a language model took."""
    from t2n_llm.runtime.answering import StreamedAnswer
    from t2n_llm.runtime.prompt_lookup import LookupAnswer

    if not isinstance(made, StreamedAnswer):
        return {}
    guesses = made.counts.asdict() if isinstance(made, LookupAnswer) else {}
    return {**made.account.asdict(), **guesses}
