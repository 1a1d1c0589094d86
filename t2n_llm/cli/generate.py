"""`t2n-llm generate`: text from an export, streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t2n_llm.cli.parameters import DeviceOption, JsonOption
from t2n_llm.cli.session import open_sink, quiet_libraries


def generate(
    archive: Annotated[Path, typer.Argument(help="Folder made by `t2n-llm export`, or the archive in it.")],
    prompt: Annotated[str, typer.Argument(help="What to continue, or to answer.")],
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
    with open_sink(as_json) as sink:
        quiet_libraries(sink)
        from t2n_llm.measure.generate import ExportedModel, Sampling

        sampling = Sampling(temperature, top_p, seed)
        model = ExportedModel.open(archive, device=device, prefill_chunk=prefill_chunk)
        pieces: list[str] = []
        for piece in model.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling, chat=chat):
            pieces.append(piece)
            if not as_json:
                sink.text(piece)
    sink.generated({"prompt": prompt, "text": "".join(pieces)})
