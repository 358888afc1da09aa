"""`quire chat` and `quire complete`: a conversation with a server at a terminal, or one answer for a script.

Ctrl-C stops the answer, not the program. With input from a pipe there is one question, and the answer alone goes to
standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire_interfaces import ConfigError, QuireError
from quire_server.terminal.api_client import APIClient, NoServerError
from quire_server.terminal.conversation import Conversation, image_part, parse_parameter
from quire_server.terminal.display import AnswerDisplay, MarkdownDisplay, PlainDisplay, displays_markdown, printable
from quire_server.terminal.slash_commands import COMMANDS, ChatEnd, run_command

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ChatProgram", "answer_once", "chat", "complete", "first_model", "parsed_parameters"]

QUOTES = '"""'
INTERRUPTED = 130
"""Exit status of a program that Ctrl-C has ended."""


class Piece(NamedTuple):
    """Of an answer."""

    text: str = ""
    reasoning: str = ""


class AnswerCounts:
    """Times and numbers of one answer."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.num_tokens = 0
        """As the server counts, else the number of pieces."""

    def count(self) -> None:
        """A piece has come."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self._start_s
        self.num_tokens += 1

    def told(self) -> str:
        """In a line."""
        seconds = time.perf_counter() - self._start_s
        first_s = self.first_token_s or seconds
        rate = (self.num_tokens - 1) / (seconds - first_s) if seconds > first_s and self.num_tokens > 1 else 0.0
        return f"{self.num_tokens} tokens, first after {first_s:.2f} s, then {rate:.1f} tokens/s"


def chat_pieces(client: APIClient, conversation: Conversation, counts: AnswerCounts) -> Generator[Piece, None, None]:
    """What the model answers, piece by piece. Raises QuireError, as `APIClient.events`."""
    body = {**conversation.body(), "stream_options": {"include_usage": True}}
    with contextlib.closing(_stream(client, "/v1/chat/completions", body, counts)) as choices:
        for choice in choices:
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            calls = "".join(_call_text(call) for call in delta.get("tool_calls") or ())
            yield Piece((delta.get("content") or "") + calls, reasoning)


def _call_text(call: dict[str, Any]) -> str:
    """Calls are shown, not made: no tool runs here."""
    function = call.get("function") or {}
    name = f"\n[call of {function['name']}] " if function.get("name") else ""
    return f"{name}{function.get('arguments') or ''}"


def _stream(
    client: APIClient, path: str, body: dict[str, Any], counts: AnswerCounts
) -> Generator[dict[str, Any], None, None]:
    with contextlib.closing(client.events(path, body)) as events:
        for event in events:
            for choice in event.get("choices") or ():
                counts.count()
                yield choice
            usage = event.get("usage")
            if isinstance(usage, dict) and usage.get("completion_tokens"):
                counts.num_tokens = int(usage["completion_tokens"])


def parsed_parameters(settings: Sequence[str]) -> dict[str, Any]:
    """Parameters given as NAME=VALUE.

    Raises:
        ConfigError: one is something else, or unknown, or wrong.
    """
    parameters = {}
    for text in settings:
        name, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"--set takes NAME=VALUE, for example temperature=0.2, got {text!r}", field="set")
        name, parsed = parse_parameter(name, value)
        parameters[name] = parsed
    return parameters


def first_model(client: APIClient, name: str | None) -> str:
    """The model that was named, else the server's first.

    Raises:
        QuireError: nobody answers, or there is none.
    """
    if name is not None:
        return name
    names = client.models()
    if not names:
        raise QuireError(f"the server at {client.base_url} serves no model")
    return names[0]


def _display(console: Console | None, *, shows_reasoning: bool) -> AnswerDisplay:
    if console is not None:
        return MarkdownDisplay(console)
    return PlainDisplay(sys.stdout, shows_reasoning=shows_reasoning)


def _console(*, is_plain: bool) -> Console | None:
    if is_plain or not displays_markdown():
        return None
    from rich.console import Console

    return Console(highlight=False)


def answer_once(
    client: APIClient, conversation: Conversation, *, is_plain: bool = False, shows_stats: bool = False
) -> int:
    """Show the answer to a conversation; the exit status, 130 where Ctrl-C has stopped it.

    Raises:
        QuireError: the server refuses, or is gone.
    """
    counts = AnswerCounts()
    display = _display(_console(is_plain=is_plain), shows_reasoning=False)
    return _show(client, chat_pieces(client, conversation, counts), display, counts if shows_stats else None)


@contextlib.contextmanager
def _stops_on_interrupt(client: APIClient) -> Iterator[threading.Event]:
    """Ctrl-C breaks off the answer that is read inside, and sets the event. An exception that is raised wherever the
    program is at that moment may be lost: Python drops those of finalizers."""
    is_stopped = threading.Event()

    def on_interrupt(number: int, frame: object) -> None:
        if is_stopped.is_set() or not client.stop():
            raise KeyboardInterrupt
        is_stopped.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield is_stopped
    except NoServerError:
        if not is_stopped.is_set():
            raise
    except KeyboardInterrupt:
        is_stopped.set()
    finally:
        signal.signal(signal.SIGINT, before)


def _show(
    client: APIClient, pieces: Generator[Piece, None, None], display: AnswerDisplay, counts: AnswerCounts | None
) -> int:
    """Show an answer as it comes, and then what was counted of it, if that is wanted; the exit status."""
    try:
        with _stops_on_interrupt(client) as is_stopped, contextlib.closing(pieces):
            for piece in pieces:
                if piece.reasoning:
                    display.show_reasoning(piece.reasoning)
                if piece.text:
                    display.show_text(piece.text)
    finally:
        display.close()
    if is_stopped.is_set():
        return INTERRUPTED
    if counts is not None:
        print(counts.told(), file=sys.stderr)
    return 0


class ChatProgram:
    """The loop of `quire chat`.

    Args:
        client: Of the server.
        conversation: What was said before.
        is_plain: No Markdown, no colours.
        shows_stats: A line of figures below each answer.
        check_server: Called when the server is gone; may raise what says why.
    """

    def __init__(
        self,
        client: APIClient,
        conversation: Conversation,
        *,
        is_plain: bool = False,
        shows_stats: bool = False,
        check_server: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self.conversation = client, conversation
        self._console = _console(is_plain=is_plain)
        self._shows_stats, self._check_server = shows_stats, check_server
        self._readline: Any = None
        with contextlib.suppress(ImportError):  # not there on every platform
            self._readline = importlib.import_module("readline")
            self._readline.set_completer(_complete_command)
            self._readline.set_completer_delims(" ")
            self._readline.parse_and_bind("tab: complete")

    def run(self) -> int:
        """Until the user leaves; the exit status."""
        self.say(f"{self.conversation.model} at {self._client.base_url} (/help lists commands)")
        while True:
            try:
                line = self._read_message()
                if line.startswith("/"):
                    run_command(self, line)
                elif line.strip():
                    self.conversation.ask(line)
                    self.reply()
            except KeyboardInterrupt:
                print()
                self.say("Ctrl-D or /exit leaves")
            except (EOFError, ChatEnd):
                return 0
            except NoServerError as error:
                self._check_server()
                self._complain(error)
            except QuireError as error:
                self._complain(error)

    def _read_message(self) -> str:
        """A line, or the lines between two of quotes. Raises EOFError at the end of input."""
        try:
            line = input(self._prompt("> "))
        except EOFError:
            print()
            raise
        if not line.lstrip().startswith(QUOTES):
            return line
        lines = [line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(input(self._prompt(". ")))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def _prompt(self, text: str) -> str:
        # The marks tell the line editor that what is between them takes no room.
        return text if self._console is None else f"\x01\x1b[1;36m\x02{text}\x01\x1b[0m\x02"

    def read_line(self, prompt: str, text: str) -> str:
        """Let the user change a text of one line. Raises EOFError."""
        if self._readline is None:
            return input(prompt)
        self._readline.set_startup_hook(lambda: self._readline.insert_text(text))
        try:
            return input(self._prompt(prompt))
        finally:
            self._readline.set_startup_hook(None)

    def say(self, text: str) -> None:
        """Show a line that is no answer."""
        if self._console is None:
            print(printable(text), flush=True)
        else:
            from rich.text import Text

            self._console.print(Text(printable(text), style="dim"))

    def _complain(self, error: QuireError) -> None:
        if self._console is None:
            print(f"quire: {printable(str(error))}", file=sys.stderr, flush=True)
        else:
            from rich.text import Text

            self._console.print(Text(f"quire: {printable(str(error))}", style="red"))

    def model_names(self) -> list[str]:
        """What the server serves. Raises QuireError."""
        return self._client.models()

    def reply(self) -> None:
        """Have the model answer. An answer that Ctrl-C stops is kept as far as it came.

        Raises:
            QuireError: the server refuses or is gone; the question is taken back then, its images wait again.
        """
        display = _display(self._console, shows_reasoning=True)
        counts, text = AnswerCounts(), ""
        try:
            with (
                _stops_on_interrupt(self._client) as is_stopped,
                contextlib.closing(chat_pieces(self._client, self.conversation, counts)) as pieces,
            ):
                for piece in pieces:
                    if piece.reasoning:
                        display.show_reasoning(piece.reasoning)
                    if piece.text:
                        text += piece.text  # before it is shown: what was seen is kept
                        display.show_text(piece.text)
        except QuireError:
            self.conversation.take_back()
            raise
        finally:
            display.close()
        self.conversation.answer(text)
        if is_stopped.is_set():
            self.say("(stopped)")
        elif self._shows_stats:
            self.say(counts.told())


def _complete_command(text: str, state: int) -> str | None:
    names = [f"/{name}" for name in COMMANDS if f"/{name}".startswith(text)] if text.startswith("/") else []
    return names[state] if state < len(names) else None


def piped_input() -> str | None:
    """All of standard input where it is no terminal; None where it is one.

    Raises:
        ConfigError: it is no UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ConfigError("standard input is no text in UTF-8", field="stdin") from None


class ChatOptions(NamedTuple):
    """What `quire chat` was told."""

    url: str
    model: str | None
    api_key: str | None
    system: str | None
    quick: str | None
    settings: Sequence[str]
    images: Sequence[str]
    is_plain: bool
    shows_stats: bool
    timeout_s: float


def chat(options: ChatOptions) -> int:
    """`quire chat`; the exit status."""
    parameters = parsed_parameters(options.settings)
    images = [image_part(place) for place in options.images]
    client = APIClient(options.url, options.api_key, timeout_s=options.timeout_s)
    conversation = Conversation("", options.system, parameters, images=images)
    question = options.quick if options.quick is not None else piped_input()
    if question is not None and not question.strip():
        raise ConfigError("the message is empty", field="quick")
    conversation.model = first_model(client, options.model)
    return converse(client, conversation, question, is_plain=options.is_plain, shows_stats=options.shows_stats)


def converse(
    client: APIClient,
    conversation: Conversation,
    question: str | None,
    *,
    is_plain: bool,
    shows_stats: bool,
    check_server: Callable[[], None] = lambda: None,
) -> int:
    """Answer a question, or without one chat; the exit status."""
    if question is None:
        return ChatProgram(
            client, conversation, is_plain=is_plain, shows_stats=shows_stats, check_server=check_server
        ).run()
    conversation.ask(question)
    return answer_once(client, conversation, is_plain=is_plain, shows_stats=shows_stats)


def complete(
    client: APIClient, model: str | None, prompt: str | None, parameters: dict[str, Any], *, shows_stats: bool
) -> int:
    """`quire complete`: go on with a prompt, or with each line that is typed; the exit status.

    Raises:
        QuireError: the server refuses a prompt that was given, or nobody answers.
    """
    name = first_model(client, model)
    if prompt is not None:
        return _complete_prompt(client, name, prompt, parameters, shows_stats=shows_stats)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\nCtrl-D leaves")
            continue
        if line.strip():
            try:
                _complete_prompt(client, name, line, parameters, shows_stats=shows_stats)
            except QuireError as error:
                print(f"quire: {printable(str(error))}", file=sys.stderr)


def _complete_prompt(
    client: APIClient, model: str, prompt: str, parameters: dict[str, Any], *, shows_stats: bool
) -> int:
    counts = AnswerCounts()
    body = {"model": model, "prompt": prompt, "stream_options": {"include_usage": True}, **parameters}

    def pieces() -> Generator[Piece, None, None]:
        with contextlib.closing(_stream(client, "/v1/completions", body, counts)) as choices:
            for choice in choices:
                yield Piece(choice.get("text") or "")

    return _show(client, pieces(), PlainDisplay(sys.stdout), counts if shows_stats else None)
