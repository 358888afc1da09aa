"""Lines of a batch's input: what each asks for, or what is wrong with it. Reads files; knows no route and no engine."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

__all__ = ["InputCheck", "InputLine", "LineProblem", "check_input", "read_lines"]

MAX_CUSTOM_ID_CHARS = 512
MAX_PROBLEMS = 50
"""Of one input that are told."""


class LineProblem(NamedTuple):
    """Why a line cannot be run, or why an input cannot."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def object(self) -> dict[str, Any]:
        """As it stands in `errors.data` of a batch."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


class InputLine(NamedTuple):
    """One request."""

    number: int
    """Of the line, from 1 on."""
    custom_id: str | None
    url: str
    body: bytes
    """A JSON object."""
    problem: LineProblem | None = None
    """Why it cannot be run; then the rest is what could be read."""


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class InputCheck:
    """What a first reading of an input found."""

    num_lines: int = 0
    """Requests, those that cannot be run included."""
    problems: list[LineProblem] = field(default_factory=list)
    """Because of which nothing of it is run."""


def check_input(path: Path, endpoint: str | None, *, max_lines: int, max_line_bytes: int) -> InputCheck:
    """Whether an input can be run. Lines that cannot be read are answered one by one; but where it is not certain which
    answer is whose, or what is wanted at all, nothing is run.

    Args:
        path: The input.
        endpoint: Route that all lines must name; None for any.
        max_lines: Most requests.
        max_line_bytes: Longest line.
    """
    check = InputCheck()
    first_lines: dict[bytes, int] = {}
    unreadable: list[LineProblem] = []
    for line in read_lines(path, max_line_bytes=max_line_bytes):
        check.num_lines += 1
        if check.num_lines > max_lines:
            message = f"the file has more than {max_lines} requests (--batch-max-requests)"
            check.problems.insert(0, LineProblem("too_many_requests", message, None, line.number))
            break
        if line.problem is not None:
            unreadable.append(line.problem)
        if line.custom_id is not None:
            digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            first = first_lines.setdefault(digest, line.number)
            if first != line.number:
                message = f"custom_id {reprlib.repr(line.custom_id)} stands on line {first} already"
                check.problems.append(LineProblem("duplicate_custom_id", message, "custom_id", line.number))
        if line.problem is None and endpoint is not None and line.url != endpoint:
            message = f"url must be the batch's endpoint, {endpoint}, got {reprlib.repr(line.url)}"
            check.problems.append(LineProblem("mismatched_endpoint", message, "url", line.number))
        if len(check.problems) > MAX_PROBLEMS:
            break
    if not check.num_lines:
        check.problems.append(LineProblem("empty_file", "the file holds no requests"))
    elif len(unreadable) == check.num_lines:
        check.problems += unreadable
    del check.problems[MAX_PROBLEMS:]
    return check


def read_lines(path: Path, *, max_line_bytes: int) -> Iterator[InputLine]:
    """All requests of an input, blank lines left out.

    Args:
        path: The input.
        max_line_bytes: Longest line; of a longer one the rest is passed over.
    """
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line_bytes + 1):
            number += 1
            if len(text) > max_line_bytes and not text.endswith(b"\n"):
                _pass_over_line(file, max_line_bytes)
                message = f"the line is longer than {max_line_bytes} bytes (--max-body-bytes)"
                yield InputLine(number, None, "", b"", LineProblem("line_too_long", message, None, number))
            elif text.strip():
                yield _parsed(number, text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text)


def _pass_over_line(file: BinaryIO, step: int) -> None:
    while (rest := file.readline(step)) and not rest.endswith(b"\n"):
        pass


def _parsed(number: int, text: bytes) -> InputLine:
    def wrong(code: str, message: str, param: str | None = None) -> InputLine:
        return InputLine(number, custom_id, "", b"", LineProblem(code, message, param, number))

    custom_id = None
    try:
        line = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return wrong("invalid_json_line", f"the line is no JSON object: {error}")
    if not isinstance(line.custom_id, str) or not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        got = reprlib.repr(line.custom_id)
        return wrong(
            "invalid_custom_id",
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters, got {got}",
            "custom_id",
        )
    custom_id = line.custom_id
    if line.method != "POST":
        return wrong("invalid_method", f"method must be POST, got {reprlib.repr(line.method)}", "method")
    if not isinstance(line.url, str):
        return wrong("invalid_url", f"url must be the path of a route, got {reprlib.repr(line.url)}", "url")
    body = bytes(line.body)
    if not body.startswith(b"{"):
        return wrong("invalid_body", "body must be a JSON object", "body")
    return InputLine(number, custom_id, line.url, body)
