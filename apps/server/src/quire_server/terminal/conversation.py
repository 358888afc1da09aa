"""What a chat knows: messages, system prompt, sampling parameters. Pure data; knows no server and no terminal."""

from __future__ import annotations

import base64
import difflib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["PARAMETERS", "Conversation", "image_part", "parse_parameter"]

FLOATS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base",
)  # fmt: skip
INTEGERS = ("max_tokens", "max_completion_tokens", "top_k", "min_tokens", "seed", "thinking_token_budget", "priority")
SWITCHES = ("ignore_eos", "include_reasoning", "deterministic", "skip_special_tokens")
TEXTS = ("reasoning_effort", "cache_salt", "user")
OBJECTS = ("chat_template_kwargs", "response_format", "structured_outputs", "logit_bias", "stop", "tools")
PARAMETERS: dict[str, str] = {
    **dict.fromkeys(FLOATS, "a number"),
    **dict.fromkeys(INTEGERS, "a whole number"),
    **dict.fromkeys(SWITCHES, "true or false"),
    **dict.fromkeys(TEXTS, "a text"),
    **dict.fromkeys(OBJECTS, "JSON"),
}
"""Fields of a chat request that can be set -> what they take."""
IMAGE_TYPES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)
"""Beginning of a file -> its media type."""


def parse_parameter(name: str, text: str) -> tuple[str, Any]:
    """Name and value of a parameter.

    Args:
        name: As in a request's body.
        text: Its value.

    Raises:
        ConfigError: there is no such parameter, or it does not take this value.
    """
    name = name.strip().lower().replace("-", "_")
    if name not in PARAMETERS:
        nearest = difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(PARAMETERS)}"
        raise ConfigError(f"there is no parameter {name!r}{hint}", field=name)
    text = text.strip()
    value: Any
    wrong = ConfigError(f"{name} takes {PARAMETERS[name]}, got {text!r}", field=name)
    if name in TEXTS:
        value = text
    elif name in SWITCHES:
        value = {"true": True, "on": True, "false": False, "off": False}.get(text.lower())
    else:
        value = _number_or_json(text)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name == "stop" and value is None:
            value = text
        elif (name in FLOATS and not is_number) or (name in INTEGERS and not (is_number and value == int(value))):
            raise wrong
        elif name in INTEGERS:
            value = int(value)
    if value is None or value == "":
        raise wrong
    return name, value


def _number_or_json(text: str) -> Any:
    """None for what is neither. NaN and infinities are no values of JSON."""
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        return None


def image_part(place: str) -> dict[str, Any]:
    """A part of a message with an image.

    Args:
        place: A file, also in quotes or with escaped spaces, as terminals write a file that is dropped on them; or an
            http(s) address, which the server fetches.

    Raises:
        ConfigError: there is no such file, or it is no image.
    """
    place = place.strip()
    if re.match(r"https?://", place):
        return {"type": "image_url", "image_url": {"url": place}}
    if len(place) > 1 and place[0] == place[-1] and place[0] in "'\"":
        place = place[1:-1]
    path = Path(place.removeprefix("file://")).expanduser()
    if not path.exists() and "\\" in place:
        path = Path(re.sub(r"\\(.)", r"\1", place)).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the image {str(path)!r}: {error.strerror}", field="image") from None
    kind = next((kind for beginning, kind in IMAGE_TYPES if data.startswith(beginning)), None)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "image/webp"
    if kind is None:
        raise ConfigError(
            f"{str(path)!r} is no image that is known here (PNG, JPEG, GIF, WebP, BMP, TIFF)", field="image"
        )
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


@dataclass(slots=True)
class Conversation:
    """Messages of a chat and how it is sampled."""

    model: str
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """As in a request's body, without the system prompt."""
    images: list[dict[str, Any]] = field(default_factory=list)
    """Parts of the next message."""

    def ask(self, text: str) -> None:
        """Add a message of the user, with the images that wait."""
        parts = [*self.images, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if self.images else text})
        self.images = []

    def answer(self, text: str) -> None:
        """Add a message of the assistant."""
        self.messages.append({"role": "assistant", "content": text})

    def body(self) -> dict[str, Any]:
        """Of a chat request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"model": self.model, "messages": [*system, *self.messages], **self.parameters}

    def take_back(self) -> bool:
        """Forget the last question and what followed; its images wait again. Whether there was one."""
        last = next((place for place in reversed(range(len(self.messages))) if _is_user(self.messages[place])), None)
        if last is None:
            return False
        content = self.messages[last]["content"]
        self.images = [part for part in content if part.get("type") != "text"] if isinstance(content, list) else []
        del self.messages[last:]
        return True

    def last_question(self) -> str | None:
        """Text of the user's last message; None where there is none."""
        content = next((each["content"] for each in reversed(self.messages) if _is_user(each)), None)
        if isinstance(content, list):
            return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
        return content

    def to_json(self) -> str:
        """For a file, in the shape of a request's body."""
        return json.dumps(self.body(), ensure_ascii=False, indent=1) + "\n"

    def to_markdown(self) -> str:
        """For people. Images are named, not shown."""
        lines = [f"**system**\n\n{self.system}\n"] if self.system is not None else []
        lines += [f"**{each['role']}**\n\n{text_of(each['content'])}\n" for each in self.messages]
        return "\n".join(lines)

    def load(self, text: str) -> None:
        """Take messages, system prompt and parameters of a file that `to_json` wrote, or any chat request. The model
        stays.

        Raises:
            ConfigError: it is none; nothing has changed then.
        """
        try:
            value = json.loads(text)
            messages = value["messages"]
            is_chat = all(
                isinstance(each["role"], str) and isinstance(each["content"], (str, list)) for each in messages
            )
        except (ValueError, LookupError, TypeError):
            is_chat = False
        if not is_chat:
            raise ConfigError("the file is no saved chat: a JSON object with messages, each with role and content")
        system = [each for each in messages if each["role"] == "system"]
        self.system = text_of(system[0]["content"]) if system else None
        self.messages = [each for each in messages if each["role"] != "system"]
        self.parameters = {name: each for name, each in value.items() if name in PARAMETERS}
        self.images = []


def text_of(content: str | list[dict[str, Any]]) -> str:
    """What a message says, with [image] for images."""
    if isinstance(content, str):
        return content
    texts = [str(part.get("text", "")) if part.get("type") == "text" else "[image]" for part in content]
    return "\n".join(texts)


def _is_user(message: dict[str, Any]) -> bool:
    return bool(message["role"] == "user")
