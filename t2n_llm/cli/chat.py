"""`t2n-llm chat`: turns with a language model in tract, answers streamed, the past kept by the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from generic_export.errors import OptionError
from t2n_llm.cli.console import Sink
from t2n_llm.cli.generate import tell_not_followed
from t2n_llm.cli.parameters import (
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
from t2n_llm.cli.turns import PipedTurns, TypedTurns
from t2n_llm.runtime.sampling.options import Sampling

if TYPE_CHECKING:
    from t2n_llm.runtime.answering import Account
    from t2n_llm.runtime.chat.conversation import HeldConversation
    from t2n_llm.runtime.chat.models import ChatModel
    from t2n_llm.runtime.chat.template import MediaFile

_HELP = (
    "/image FILE ask the next message about an image\n/audio FILE ask the next message about a recording\n"
    "/reset      start a new conversation\n/save FILE  write the messages to a JSON file\n/help       show this help\n"
    "/exit       leave (also Ctrl-D)\nCtrl-C      stop the answer; twice at an empty prompt: leave"
)


@takes_options
def chat(
    archive: ExportArgument,
    sampling: Sampling,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int | None, most_new_tokens(2048)] = None,
    template_kwargs: TemplateVariablesOption = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Image for the first message; repeatable.", show_default=False),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Recording (WAV) for the first message; repeatable.", show_default=False),
    ] = None,
    prefill_chunk: PrefillChunkOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonLinesOption = False,
) -> None:
    """Chat with a language model in tract. /help lists the commands.

    Exit code 0: left. 2: bad input, or the engine failed. 3: a bug.
    """
    sink, variables = open_sink(as_json), read_template_variables(template_kwargs)
    quiet_libraries(sink, answers=True)
    from t2n_llm.runtime.chat.conversation import HeldConversation
    from t2n_llm.runtime.chat.models import ChatModel

    chat_model = ChatModel.open(archive, device=device, prefill_chunk=prefill_chunk)
    model = chat_model.language
    first = [*_files("image", image or ()), *_files("audio", audio or ())]
    _require_readable(chat_model, first)
    chat_model.require_template(variables)  # refused before the engine starts
    choice = sampling.choice(model.settings)
    tell_not_followed(sink, model.settings, sampled=choice.samples, beams=False)
    turns = TypedTurns(sink.aside) if sink.is_typed_into else PipedTurns()
    sink.waiting(f"Loading {model.archive.name}")
    with chat_model.reader(variables) as reader, turns:
        conversation = HeldConversation(model, reader, choice, system=system, max_new_tokens=max_new_tokens)
        if turns.interactive:
            context = "" if model.max_positions is None else f", up to {model.max_positions} tokens"
            sink.aside(f"{model.folder.resolve().name}{context}; /help lists the commands.")
        _Chat(sink, conversation, turns, chat_model, first).run()


@dataclass(frozen=True)
class _Chat:
    """A conversation, where it is typed and shown, and the files that the next message is about."""

    sink: Sink
    conversation: HeldConversation
    turns: PipedTurns | TypedTurns
    model: ChatModel
    files: list[MediaFile]

    def run(self) -> None:
        """Take turns until the user leaves; a mistake in a terminal is told, elsewhere it ends the command."""
        for line in self.turns.lines():
            try:
                if line.split()[0] in _LEAVING:
                    return
                self._take(line)
            except OptionError as error:
                if not self.turns.interactive:
                    raise
                self.sink.error(error)

    def _take(self, line: str) -> None:
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, rest = line.strip().partition(" ")
        if name not in _COMMANDS:
            raise OptionError(f"{name}: unknown command.", f"Commands: {', '.join(_COMMANDS)} and {_LEAVING[0]}.")
        _COMMANDS[name](self, rest.strip())

    def _answer(self, line: str) -> None:
        with self.turns.answering():
            pieces = []
            files = tuple(self.files)
            self.files.clear()
            for piece in self.conversation.ask(line, self.turns.stopped, files=files):
                pieces.append(piece)
                self.sink.text(piece)
        account = self.conversation.account
        record = {} if account is None else account.asdict()
        self.sink.generated({"prompt": line, "text": "".join(pieces), **record})
        if account is not None:
            self._tell(account)

    def _tell(self, account: Account) -> None:
        """Say how fast it was to people, and to everybody that an answer was cut off."""
        from t2n_llm.runtime.answering import AnswerEnding

        speed = account.tokens_per_second
        said = [f"{account.tokens} tokens" + ("" if speed is None else f", {speed:.1f} tokens/s")]
        cut = {
            AnswerEnding.MOST_TOKENS: "stopped at --max-new-tokens",
            AnswerEnding.CONTEXT: "the context is full: /reset starts a new conversation",
            AnswerEnding.STOPPED: "stopped",
        }.get(account.ending)
        if self.turns.interactive:
            self.sink.aside("; ".join([*said, *([cut] if cut else [])]))
        elif cut:
            self.sink.warn(f"the answer ended after {account.tokens} tokens: {cut}.")

    def _image(self, rest: str) -> None:
        self._attach("image", rest)

    def _hear(self, rest: str) -> None:
        self._attach("audio", rest)

    def _attach(self, kind: str, rest: str) -> None:
        if not rest:
            raise OptionError(f"/{kind}: the file name is missing.", f"Type /{kind} FILE.")
        files = _files(kind, [Path(rest).expanduser()])
        _require_readable(self.model, files)
        self.files.extend(files)
        self.sink.aside(f"The next message is about {', '.join(str(file.path) for file in self.files)}.")

    def _reset(self, rest: str) -> None:
        _refuse_words("/reset", rest)
        self.files.clear()
        self.conversation.reset()
        self.sink.aside("A new conversation.")

    def _save(self, rest: str) -> None:
        from generic_export.files import write_whole
        from t2n_llm.export.folder import json_text

        if not rest:
            raise OptionError("/save: the file name is missing.", "Type /save FILE.")
        path = Path(rest).expanduser()
        text = "[\n" + ",\n".join(f"  {json_text(message)}" for message in self.conversation.messages) + "\n]\n"
        try:
            write_whole(path, text)
        except OSError as error:
            raise OptionError(f"{path}: {error.strerror}.", "Use a file that can be written.") from error
        self.sink.aside(f"{len(self.conversation.messages)} messages written to {path}.")

    def _help(self, rest: str) -> None:
        _refuse_words("/help", rest)
        self.sink.aside(_HELP)


def _files(kind: str, paths: Sequence[Path]) -> list[MediaFile]:
    from t2n_llm.runtime.chat.template import MediaFile

    return [MediaFile(kind, path) for path in paths]


def _require_readable(model: ChatModel, files: Sequence[MediaFile]) -> None:
    """Refuse files that a message cannot be about.

    Raises:
        OptionError: the model does not read such files, or there is no such file.
    """
    for file in files:
        if file.kind != model.reads:
            reads = "text only" if model.reads is None else f"text and {model.reads} files"
            raise OptionError(
                f"{file.path}: {model.language.folder} does not read {file.kind} files.", f"It reads {reads}."
            )
        if not file.path.is_file():
            raise OptionError(f"{file.path}: there is no such file.", "Check the path.")


def _refuse_words(name: str, rest: str) -> None:
    if rest:
        raise OptionError(f"{name} takes nothing.", f"Type {name} without arguments.")


_COMMANDS: Mapping[str, Callable[[_Chat, str], None]] = {
    "/audio": _Chat._hear,
    "/help": _Chat._help,
    "/image": _Chat._image,
    "/reset": _Chat._reset,
    "/save": _Chat._save,
}
_LEAVING = ("/exit", "/quit")
