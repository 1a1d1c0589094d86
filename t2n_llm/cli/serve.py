"""`t2n-llm serve`: a language model behind OpenAI's HTTP interface, for trying it and for tests."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from generic_export.errors import OptionError
from generic_export.interrupts import Interrupted
from t2n_llm.cli.generate import tell_not_followed
from t2n_llm.cli.parameters import DeviceOption, ExportArgument
from t2n_llm.cli.session import open_sink, quiet_libraries

_TEXT_BYTES, _FILE_BYTES = 1 << 20, 32 << 20  # of a request, without and with files
_GRACE_SECONDS = 2  # that answers have to end in, when the server is told to


def serve(
    archive: ExportArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; not local: open to all.")] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; default: the folder's name.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Maximum tokens per answer.")
    ] = 2048,
    max_seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="Maximum seconds per answer.")] = 300.0,
    max_request_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Maximum bytes per request; default: 1 MiB, with files 32 MiB.",
            show_default=False,
        ),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum waiting requests.")] = 32,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Prompt tokens per call; default: recorded in export.json."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Allowed name in Host headers; repeatable.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="T2N_LLM_API_KEY", help="Require this API key.", show_default=False),
    ] = None,
    sanitize_special_tokens: Annotated[
        bool, typer.Option("--sanitize-special-tokens", help="Encode special tokens in messages as plain text.")
    ] = False,
    device: DeviceOption = "cpu",
) -> None:
    """Serve a model over an OpenAI-compatible API, one request at a time.

    Exit code 0: ended. 2: bad input, a port in use, or the engine failed. 3: a bug.
    """
    if api_key is not None and not (api_key.isascii() and api_key.strip()):
        raise typer.BadParameter("the key must have at least one character, all ASCII.", param_hint="--api-key")
    sink = open_sink(False)
    quiet_libraries(sink, answers=True)
    try:
        import uvicorn

        from t2n_llm.runtime.serve.app import application
        from t2n_llm.runtime.serve.guard import LOOPBACK, Admission
    except ImportError as error:
        raise OptionError(f"serve needs {error.name}.", "Install it: pip install 't2n-llm[serve]'.") from error
    from t2n_llm.runtime.chat.models import ChatModel
    from t2n_llm.runtime.sampling.options import Sampling
    from t2n_llm.runtime.serve.request_queue import RequestQueue, ServerLimits

    chat_model = ChatModel.open(archive, device=device, prefill_chunk=prefill_chunk)
    model = chat_model.language
    tell_not_followed(sink, model.settings, sampled=Sampling().choice(model.settings).samples, beams=False)
    if sanitize_special_tokens or chat_model.sensing:  # refused before the engine starts
        chat_model.require_template(sanitized=sanitize_special_tokens)
    if host not in LOOPBACK and api_key is None:
        sink.warn(f"{host} is reachable from other machines and no --api-key is set: anyone there can use the model.")
    if max_request_bytes is None:
        max_request_bytes = _TEXT_BYTES if chat_model.sensing is None else _FILE_BYTES
    limits = ServerLimits(max_request_bytes, max_new_tokens, max_seconds, max_waiting)
    listening = _listen(host, port)
    sink.waiting(f"Loading {model.archive.name}")
    with listening, chat_model.reader(sanitized=sanitize_special_tokens) as reader:
        queue = RequestQueue(model, reader, name or model.folder.resolve().name, limits)
        config = uvicorn.Config(
            application(queue, Admission.of(host, allowed_host or (), api_key)),
            log_level="warning",
            timeout_graceful_shutdown=_GRACE_SECONDS,
            lifespan="off",
        )
        at = f"[{host}]" if ":" in host else host
        sink.aside(
            f"{queue.name} at http://{at}:{listening.getsockname()[1]}/v1, for development and tests; Ctrl-C stops it."
        )
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except Interrupted:  # uvicorn ends what is under way, and passes the signal on
            sink.aside("Ended.")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OptionError(f"{host}:{port}: {error.strerror}.", "Use another --port, or --port 0.") from error
