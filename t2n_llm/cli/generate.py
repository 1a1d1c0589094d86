"""`t2n-llm generate`: text from an export, streamed: of a prompt, or of a text, a recording or a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from generic_export.errors import OptionError
from t2n_llm.cli.parameters import DeviceOption, JsonOption
from t2n_llm.cli.session import open_sink, quiet_libraries

_SOURCES = "Encoder-decoders"


def generate(
    archive: Annotated[Path, typer.Argument(help="Folder made by `t2n-llm export`, or the archive in it.")],
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue, to answer, or to make another text of.", show_default=False)
    ] = None,
    audio: Annotated[
        Path | None, typer.Option(help="A recording (WAV) to write down.", metavar="FILE", rich_help_panel=_SOURCES)
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="A picture to describe or to read.", metavar="FILE", rich_help_panel=_SOURCES)
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(help="Spoken language, such as en; by default the model finds out.", rich_help_panel=_SOURCES),
    ] = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Write what is said in English.", rich_help_panel=_SOURCES)
    ] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Write when it is said, in seconds.", rich_help_panel=_SOURCES)
    ] = False,
    beams: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Texts followed at a time, for encoder-decoders; by default what the model's settings say.",
            show_default=False,
            rich_help_panel=_SOURCES,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")
    ] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most likely token; higher: more varied.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put the prompt in the model's chat template, if any.")
    ] = True,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of the prompt fed at once; by default what export.json says."),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Generate text in tract, streamed, with the cache kept by the engine."""
    if prompt is None and audio is None and image is None:
        raise typer.BadParameter(
            "there is nothing to start from; give a text, --audio or --image.", param_hint="prompt"
        )
    with open_sink(as_json) as sink:
        quiet_libraries(sink)
        from t2n_llm.export.folder import read_manifest
        from t2n_llm.measure.generate import ExportedModel, Sampling, export_folder
        from t2n_llm.tasks.names import CTC, WITH_SOURCES, recorded_task

        folder, sampling = export_folder(archive), Sampling(temperature, top_p, seed)
        task = recorded_task(read_manifest(folder))
        answer: Iterable[str]
        if task in WITH_SOURCES:
            from t2n_llm.measure.from_source import SourceModel, Wishes

            purpose = "translate" if translate else None
            wishes = Wishes(max_new_tokens, sampling, beams, language, purpose, timestamps)
            source = SourceModel.open(folder, device=device)
            answer = source.text_of(wishes, text=prompt, audio=audio, image=image)
        elif beams is not None or language is not None or translate or timestamps:
            raise OptionError(
                f"{archive} was exported for {task}.", "Leave --beams, --language, --translate and --timestamps out."
            )
        elif task == CTC:
            from t2n_llm.measure.from_frames import text_of_frames

            if audio is None or prompt is not None or image is not None:
                raise OptionError(f"{archive} was exported for ctc.", "Give --audio FILE.wav, and nothing else.")
            answer = [text_of_frames(folder, audio, device=device)]
        else:
            model = ExportedModel.open(archive, device=device, prefill_chunk=prefill_chunk)
            if prompt is None or audio is not None or image is not None:
                raise OptionError(f"{archive} holds a language model.", "Give it a prompt, and nothing else.")
            answer = model.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling, chat=chat)
        pieces: list[str] = []
        for piece in answer:
            pieces.append(piece)
            if not as_json:
                sink.text(piece)
    given = prompt if prompt is not None else str(audio or image)
    sink.generated({"prompt": given, "text": "".join(pieces)})
