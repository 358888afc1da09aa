"""What can be said to a chat with a slash before it: each command is a function of the chat and of the line's rest."""

from __future__ import annotations

import difflib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from quire_interfaces import ConfigError
from quire_server.terminal.conversation import Conversation, image_part, parse_parameter, text_of

__all__ = ["COMMANDS", "Chat", "ChatEnd", "run_command"]


class ChatEnd(Exception):  # noqa: N818 - no error
    """The user leaves."""


class Chat(Protocol):
    """What commands may ask of the program."""

    conversation: Conversation

    def say(self, text: str) -> None:
        """Show a line that is no answer."""

    def reply(self) -> None:
        """Have the model answer the conversation."""

    def model_names(self) -> list[str]:
        """What the server serves. Raises QuireError."""

    def read_line(self, prompt: str, text: str) -> str:
        """Let the user change a text. Raises EOFError."""


class SlashCommand(NamedTuple):
    """One of them."""

    usage: str
    text: str
    run: Callable[[Chat, str], None]


def run_command(chat: Chat, line: str) -> None:
    """Run a line that begins with a slash.

    Raises:
        ChatEnd: the user leaves.
        QuireError: the command is unknown or wrong, or the server is; the chat is as it was.
    """
    name, _, rest = line[1:].partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"; did you mean /{nearest[0]}?" if nearest else ""
        raise ConfigError(f"there is no command /{name}{hint} (/help lists them; begin with a space to say it)")
    COMMANDS[name].run(chat, rest.strip())


def _help(chat: Chat, rest: str) -> None:
    for each in COMMANDS.values():
        chat.say(f"{each.usage:<26}{each.text}")
    chat.say('A text of several lines stands between lines of """. Ctrl-C stops an answer, Ctrl-D leaves.')


def _system(chat: Chat, rest: str) -> None:
    if rest == "":
        chat.say(chat.conversation.system or "no system prompt")
    else:
        chat.conversation.system = None if rest == "-" else rest
        chat.say("no system prompt from now on" if rest == "-" else "system prompt set")


def _set(chat: Chat, rest: str) -> None:
    parameters = chat.conversation.parameters
    if rest == "":
        for name, value in parameters.items():
            chat.say(f"{name} {value}")
        if not parameters:
            chat.say("nothing is set: the server's defaults hold (/set temperature 0.2)")
        return
    name, _, text = rest.replace("=", " ", 1).partition(" ")
    if text.strip() in ("", "-"):
        if parameters.pop(name.replace("-", "_"), None) is None:
            raise ConfigError(f"/set {name}: a value is missing, and none was set", field=name)
        chat.say(f"{name} as the server's default")
        return
    name, value = parse_parameter(name, text)
    parameters[name] = value
    chat.say(f"{name} {value}")


def _image(chat: Chat, rest: str) -> None:
    if not rest:
        raise ConfigError("/image PATH: which file, or which http(s) address?")
    chat.conversation.images.append(image_part(rest))
    count = len(chat.conversation.images)
    chat.say(f"{count} image{'s' if count > 1 else ''} for your next message")


def _save(chat: Chat, rest: str) -> None:
    if not rest:
        raise ConfigError("/save FILE: which file? (.md for Markdown, else JSON, which /load reads)")
    path = Path(rest).expanduser()
    text = chat.conversation.to_markdown() if path.suffix == ".md" else chat.conversation.to_json()
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    chat.say(f"saved to {path}")


def _load(chat: Chat, rest: str) -> None:
    if not rest:
        raise ConfigError("/load FILE: which file?")
    path = Path(rest).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    chat.conversation.load(text)
    for message in chat.conversation.messages:
        mark = ">" if message["role"] == "user" else " "
        chat.say(f"{mark} {text_of(message['content'])}")


def _clear(chat: Chat, rest: str) -> None:
    chat.conversation.messages.clear()
    chat.conversation.images.clear()
    chat.say("the conversation begins anew")


def _regenerate(chat: Chat, rest: str) -> None:
    messages = chat.conversation.messages
    if not messages:
        raise ConfigError("there is no answer yet")
    while messages[-1]["role"] != "user":
        messages.pop()
    chat.reply()


def _edit(chat: Chat, rest: str) -> None:
    question = chat.conversation.last_question()
    if question is None:
        raise ConfigError("there is no message of yours yet")
    text = rest or _edited(chat, question)
    if not text.strip():
        chat.say("an empty text: nothing has changed")
        return
    chat.conversation.take_back()
    chat.conversation.ask(text)
    chat.reply()


def _edited(chat: Chat, text: str) -> str:
    """By the editor of $VISUAL or $EDITOR, else on the line."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        try:
            return chat.read_line("edit> ", text)
        except EOFError:
            return ""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=True)
            return path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"the editor {editor!r} (of $VISUAL or $EDITOR) failed: {error}") from None


def _undo(chat: Chat, rest: str) -> None:
    if not chat.conversation.take_back():
        raise ConfigError("there is nothing to take back")
    chat.conversation.images.clear()
    chat.say("the last question and its answer are forgotten")


def _model(chat: Chat, rest: str) -> None:
    names = chat.model_names()
    if rest == "":
        for name in names:
            chat.say(f"{'*' if name == chat.conversation.model else ' '} {name}")
        return
    if rest not in names:
        raise ConfigError(f"the server has no model {rest!r}; there are {', '.join(names)}", field="model")
    chat.conversation.model = rest
    chat.say(f"{rest} answers from now on")


def _exit(chat: Chat, rest: str) -> None:
    raise ChatEnd


COMMANDS: dict[str, SlashCommand] = {
    "help": SlashCommand("/help", "this list", _help),
    "system": SlashCommand("/system [TEXT]", "show or set the system prompt; - takes it away", _system),
    "set": SlashCommand("/set [NAME [VALUE]]", "show, set or reset sampling parameters", _set),
    "image": SlashCommand("/image PATH", "send an image with the next message; also an address", _image),
    "save": SlashCommand("/save FILE", "write the chat: JSON, or Markdown to a file that ends in .md", _save),
    "load": SlashCommand("/load FILE", "go on with a saved chat", _load),
    "clear": SlashCommand("/clear", "begin anew; system prompt and parameters stay", _clear),
    "regenerate": SlashCommand("/regenerate", "another answer to the same question", _regenerate),
    "edit": SlashCommand("/edit [TEXT]", "change the last question, and have it answered", _edit),
    "undo": SlashCommand("/undo", "forget the last question and its answer", _undo),
    "model": SlashCommand("/model [NAME]", "list the server's models, or choose one", _model),
    "exit": SlashCommand("/exit", "leave", _exit),
}
"""Name -> command, as /help lists them."""
ALIASES = {"bye": "exit", "quit": "exit", "?": "help", "retry": "regenerate"}
