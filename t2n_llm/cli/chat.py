"""`t2n-llm chat`: turns with a language model in tract, answers streamed, the past kept by the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

_HELP = """\
/reset      begin a new conversation
/save FILE  write the messages to a file, as JSON
/help       show this
/exit       leave; so does Ctrl-D
Ctrl-C      stop an answer; at an empty prompt, twice: leave"""


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
    from t2n_llm.runtime.chat.template import ChatTemplate
    from t2n_llm.runtime.generate import ExportedModel

    model = ExportedModel.open(archive, device=device, prefill_chunk=prefill_chunk)
    ChatTemplate.of(model.tokenizer, model.folder, variables)  # refused before the engine starts
    choice = sampling.choice(model.settings)
    tell_not_followed(sink, model.settings, sampled=choice.samples, beams=False)
    turns = TypedTurns(sink.aside) if sink.is_typed_into else PipedTurns()
    sink.waiting(f"Loading {model.archive.name}")
    with model.opened() as held, turns:
        conversation = HeldConversation(
            model, held, choice, system=system, max_new_tokens=max_new_tokens, variables=variables
        )
        if turns.interactive:
            context = "" if model.max_positions is None else f", up to {model.max_positions} tokens"
            sink.aside(f"{model.folder.resolve().name}{context}; /help lists the commands.")
        _Chat(sink, conversation, turns).run()


@dataclass(frozen=True)
class _Chat:
    """A conversation, and where it is typed and shown."""

    sink: Sink
    conversation: HeldConversation
    turns: PipedTurns | TypedTurns

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
            raise OptionError(f"{name} is no command.", f"There are {', '.join(_COMMANDS)} and {_LEAVING[0]}.")
        _COMMANDS[name](self, rest.strip())

    def _answer(self, line: str) -> None:
        with self.turns.answering():
            pieces = []
            for piece in self.conversation.ask(line, self.turns.stopped):
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
            AnswerEnding.MOST_TOKENS: "cut off there (--max-new-tokens)",
            AnswerEnding.CONTEXT: "the model's longest context is reached: /reset begins anew",
            AnswerEnding.STOPPED: "stopped",
        }.get(account.ending)
        if self.turns.interactive:
            self.sink.aside("; ".join([*said, *([cut] if cut else [])]))
        elif cut:
            self.sink.warn(f"an answer has {account.tokens} tokens: {cut}.")

    def _reset(self, rest: str) -> None:
        _refuse_words("/reset", rest)
        self.conversation.reset()
        self.sink.aside("A new conversation.")

    def _save(self, rest: str) -> None:
        from generic_export.files import write_whole
        from t2n_llm.export.folder import json_text

        if not rest:
            raise OptionError("/save needs a file.", "Type /save FILE.")
        path = Path(rest).expanduser()
        text = "[\n" + ",\n".join(f"  {json_text(message)}" for message in self.conversation.messages) + "\n]\n"
        try:
            write_whole(path, text)
        except OSError as error:
            raise OptionError(f"{path}: {error.strerror}.", "Give a file that can be written.") from error
        self.sink.aside(f"{len(self.conversation.messages)} messages in {path}.")

    def _help(self, rest: str) -> None:
        _refuse_words("/help", rest)
        self.sink.aside(_HELP)


def _refuse_words(name: str, rest: str) -> None:
    if rest:
        raise OptionError(f"{name} takes nothing.", f"Type {name} alone.")


_COMMANDS: Mapping[str, Callable[[_Chat, str], None]] = {
    "/help": _Chat._help,
    "/reset": _Chat._reset,
    "/save": _Chat._save,
}
_LEAVING = ("/exit", "/quit")
