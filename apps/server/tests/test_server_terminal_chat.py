"""`quire chat` and `quire complete`: on a pseudo-terminal, in pipes, against a server that says what a test wants."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from quire_interfaces import ConfigError
from quire_server import cli
from quire_server.protocol import ChatCompletionRequest
from quire_server.terminal.conversation import PARAMETERS, Conversation, image_part, parse_parameter
from quire_server.terminal.display import MarkdownDisplay, printable, split_blocks

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def is_readable(file, seconds):
    """Whether there is something to read within a time; `select.select` takes no descriptor above 1,023."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


class Scripted(ThreadingHTTPServer):
    """Answers chats with what `answers` holds, one after another, and notes requests and clients that left."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[list[dict[str, Any]] | int] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.left = threading.Event()
        """A client went away before the end of its answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"])
        answer = self.server.answers.pop(0)
        if isinstance(answer, int):
            error = {"error": {"message": "the prompt has 9 tokens, and there is room for 5"}}
            self._send(answer, "application/json", json.dumps(error).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for delta in answer:
            if delta == {"hang": True}:
                self._wait_until_left()
                return
            key = "text" if self.path == "/v1/completions" else "delta"
            choice = {"index": 0, key: delta["content"] if key == "text" else delta}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 17}}\n\ndata: [DONE]\n\n')

    def _wait_until_left(self) -> None:
        self.wfile.flush()
        if is_readable(self.connection, 30):
            self.server.left.set()

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def serving() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(serving: Scripted) -> Scripted:
    serving.answers.clear()
    serving.requests.clear()
    serving.keys.clear()
    serving.left.clear()
    return serving


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"content": text} for text in texts]


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.fd, inner = pty.openpty()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "quire_server.cli", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **environment},
        )
        os.close(inner)
        self.output = ""
        self._seen = 0

    def until(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        """Read until new output has it."""
        end_s = time.monotonic() + timeout_s
        while True:
            if found := re.compile(pattern, re.DOTALL).search(self.output, self._seen):
                self._seen = found.end()
                return found
            assert time.monotonic() < end_s, f"no {pattern!r} in {self.output[self._seen :]!r}"
            if is_readable(self.fd, 0.1):
                with contextlib.suppress(OSError):
                    self.output += os.read(self.fd, 65536).decode(errors="replace")
            elif self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}: {self.output}")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """Its exit status."""
        with contextlib.suppress(OSError):
            while self.popen.poll() is None and is_readable(self.fd, 10):
                self.output += os.read(self.fd, 65536).decode(errors="replace")
        status = self.popen.wait(20)
        os.close(self.fd)
        return status


PROMPT = r"\x1b\[1;36m> \x1b\[0m"


def test_a_chat_on_a_terminal(server, tmp_path):
    picture = tmp_path / "my picture.png"
    picture.write_bytes(PNG)
    file = tmp_path / "chat.json"
    terminal = Terminal("chat", "--url", f"{server.url}/v1", "--set", "seed=1", "--stats", EDITOR="")
    try:
        terminal.until(f"one at {re.escape(server.url)}.*{PROMPT}")
        server.answers.append([{"reasoning": "Hm.\n"}, *said("A **bold** ", "word\x1b[2J.\n\n- item")])
        terminal.type("Hello\r")
        shown = terminal.until(rf"17 tokens, first after .*?{PROMPT}").string
        assert "\x1b[1mbold\x1b[0m" in shown
        assert re.search(r"\x1b\[2;3mHm\.", shown), "thoughts are dim"
        assert "\x1b[2J" not in shown, "a model clears no screen"
        assert " • " in shown

        terminal.type("/set temperature 0.2\r")
        terminal.until(f"temperature 0.2.*{PROMPT}")
        terminal.type("/sett top_k 5\r")
        terminal.until(rf"there is no command /sett; did you mean /set\?.*{PROMPT}")
        terminal.type("/system Be brief.\r")
        terminal.until(f"system prompt set.*{PROMPT}")
        terminal.type("/model two\r")
        terminal.until(f"two answers from now on.*{PROMPT}")
        terminal.type(f"/image '{picture}'\r")
        terminal.until(f"1 image for your next message.*{PROMPT}")
        server.answers.append(said("A dot."))
        terminal.type('"""What is\r')
        terminal.until(r"\. ")
        terminal.type('this?"""\r')
        terminal.until(f"A dot.*{PROMPT}")

        server.answers.append(said("Another dot."))
        terminal.type("/regenerate\r")
        terminal.until(f"Another dot.*{PROMPT}")

        server.answers.append([*said("To be "), {"hang": True}])
        terminal.type("Recite.\r")
        terminal.until("To be")
        terminal.type("\x03")  # Ctrl-C
        terminal.until(rf"\(stopped\).*{PROMPT}")
        assert server.left.wait(10), "the server hears of it"

        terminal.type(f"/save {file}\r")
        terminal.until(f"saved to .*{PROMPT}")
        server.answers.append(400)
        terminal.type("More\r")
        terminal.until(rf"there is room for 5 \(HTTP 400.*{PROMPT}")
        server.answers.append(said("Never."))
        terminal.type("/edit Who said that?\r")
        terminal.until(f"Never.*{PROMPT}")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.end() == 0
    finally:
        terminal.popen.kill()

    first, with_image, again, recite, refused, edited = server.requests
    assert first["messages"] == [{"role": "user", "content": "Hello"}]
    assert (first["model"], first["seed"], first["stream"]) == ("one", 1, True)
    assert with_image["model"] == "two"
    assert with_image["temperature"] == 0.2
    assert with_image["messages"][0] == {"role": "system", "content": "Be brief."}
    image, text = with_image["messages"][-1]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert text["text"] == "What is\nthis?"
    assert again["messages"] == with_image["messages"]
    assert recite["messages"][-2:] == [
        {"role": "assistant", "content": "Another dot."}, {"role": "user", "content": "Recite."}
    ]  # fmt: skip
    assert refused["messages"][-2] == {"role": "assistant", "content": "To be "}
    # The refused question is taken back: what is edited is the one before it.
    assert edited["messages"] == [*recite["messages"][:-1], {"role": "user", "content": "Who said that?"}]
    saved = json.loads(file.read_text())
    assert saved["messages"] == refused["messages"][:-1]
    assert file.stat().st_mode & 0o077 == 0


def run(capsys, monkeypatch, *arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    if stdin is not None:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def test_one_answer_for_a_program(capsys, monkeypatch, server):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.answers += [[{"reasoning": "Hm."}, *said("Yes", ".")], said("Yes.\n"), said(" two"), said(" three")]
    url = ("--url", server.url)
    assert run(capsys, monkeypatch, "chat", *url, "-q", "Is it?", "--api-key", "k") == (0, "Yes.\n", "")
    status, out, err = run(capsys, monkeypatch, "chat", *url, "--model-name", "two", "--stats", stdin="Is it?\n")
    assert (status, out) == (0, "Yes.\n")
    assert err.startswith("17 tokens, first after 0.")
    assert run(capsys, monkeypatch, "complete", *url, "-q", "one", "--max-tokens", "3")[:2] == (0, " two\n")
    assert run(capsys, monkeypatch, "complete", *url, stdin="one two")[:2] == (0, " three\n")
    asked, piped, prompted, piped_prompt = server.requests
    assert server.keys == ["Bearer k", None, None, None]
    assert asked["messages"][0]["content"] == "Is it?"
    assert (piped["model"], piped["messages"][0]["content"]) == ("two", "Is it?\n")
    assert (prompted["prompt"], prompted["max_tokens"]) == ("one", 3)
    assert piped_prompt["prompt"] == "one two"


def test_a_server_that_refuses_or_is_gone(capsys, monkeypatch, server):
    server.answers += [401, [{"content": "Y"}, {"hang": True}]]
    status, out, err = run(capsys, monkeypatch, "chat", "--url", server.url, "-q", "Hello")
    assert (status, out.strip()) == (1, "")
    assert "(HTTP 401 from" in err
    assert "--api-key" in err
    command = ("chat", "--url", server.url, "-q", "Hello", "--timeout", "0.3")
    status, out, err = run(capsys, monkeypatch, *command)
    assert (status, out) == (1, "Y\n")
    assert "it says nothing within --timeout" in err
    status, _, err = run(capsys, monkeypatch, "chat", "--url", "http://127.0.0.1:1", "-q", "Hello")
    assert status == 1
    assert "start one with `quire serve`" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chat", "--url", "nowhere", "-q", "x"), "--url must be an address such as http"),
        (("chat", "-q", "x", "--set", "temprature=1"), "did you mean temperature?"),
        (("chat", "-q", "x", "--set", "top_k"), "--set takes NAME=VALUE"),
        (("chat", "-q", "x", "--image", "/none.png"), "cannot read the image '/none.png': No such file"),
        (("chat", "-q", " "), "the message is empty"),
        (("chat", "--timeout", "0", "-q", "x"), "--timeout must be above 0"),
        (("complete", "-q", "x", "--max-tokens", "many"), "max_tokens takes a whole number, got 'many'"),
    ],
)
def test_bad_input_has_status_two(capsys, monkeypatch, arguments, words):
    status, out, err = run(capsys, monkeypatch, *arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_parameters_are_fields_of_requests():
    assert set(PARAMETERS) <= set(ChatCompletionRequest.model_fields)
    assert parse_parameter("top-k", "40") == ("top_k", 40)
    assert parse_parameter("temperature", "0") == ("temperature", 0)
    assert parse_parameter("ignore_eos", "on") == ("ignore_eos", True)
    assert parse_parameter("stop", "END") == ("stop", "END")
    assert parse_parameter("stop", '["a", "b"]') == ("stop", ["a", "b"])
    assert parse_parameter("logit_bias", '{"5": 1}') == ("logit_bias", {"5": 1})
    for name, text in (
        ("temperature", "warm"),
        ("temperature", "NaN"),
        ("top_k", "1.5"),
        ("seed", ""),
        ("top_p", "true"),
    ):
        with pytest.raises(ConfigError, match=name):
            parse_parameter(name, text)


def test_images(tmp_path):
    (tmp_path / "a b.png").write_bytes(PNG)
    escaped = image_part(str(tmp_path / "a\\ b.png"))
    assert escaped == image_part(f'"{tmp_path / "a b.png"}"')
    assert image_part("https://example.org/x.png")["image_url"] == {"url": "https://example.org/x.png"}
    (tmp_path / "text").write_text("PNG")
    with pytest.raises(ConfigError, match="no image that is known"):
        image_part(str(tmp_path / "text"))


def test_a_saved_chat_is_loaded():
    chat = Conversation("m", "Be brief.", {"seed": 3})
    chat.images.append({"type": "image_url", "image_url": {"url": "u"}})
    chat.ask("What?")
    chat.answer("A dot.")
    other = Conversation("n", parameters={"top_k": 2})
    other.load(chat.to_json())
    assert (other.model, other.system, other.parameters) == ("n", "Be brief.", {"seed": 3})
    assert other.messages == chat.messages
    assert other.last_question() == "What?"
    assert "**user**\n\n[image]\nWhat?" in chat.to_markdown()
    assert other.take_back()
    assert (other.messages, len(other.images)) == ([], 1)
    assert not other.take_back()
    for text in ("", "[]", '{"messages": [{"role": "user"}]}', '{"messages": 5}'):
        with pytest.raises(ConfigError, match="no saved chat"):
            other.load(text)


def test_blocks_of_markdown_are_whole_before_they_are_printed():
    text = "# Head\n\none\ntwo\n\n- a\n\n  more\n- b\n\n```py\nx\n\ny\n```\n\nend"
    whole, tail = split_blocks(text)
    assert (whole, tail) == (text[: -len("end")], "end")
    pieces = [split_blocks(text[:place])[0] for place in range(len(text) + 1)]
    assert all(text.startswith(piece) for piece in pieces)
    assert set(pieces) == {
        "", "# Head\n\n", "# Head\n\none\ntwo\n\n", "# Head\n\none\ntwo\n\n- a\n\n  more\n- b\n\n", whole
    }  # fmt: skip
    assert split_blocks("````\n```\n\na\n\nb")[0] == "", "a longer fence is not closed by a shorter one"
    assert printable("a\x1b]0;t\x07b\tc\n\u202ed") == "a]0;tb\tc\nd"


def test_the_screen_holds_a_long_answer_once():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, height=8, color_system=None)
    display = MarkdownDisplay(console)
    lines = [f"line {number}" for number in range(30)]
    for line in lines:
        display.show_text(f"{line}  \n")
        display._live.refresh()
    assert lines[-1] in output.getvalue(), "what comes is seen, though the screen has no room for all"
    display.show_text("\n\nThe end.")
    display.close()
    held = [line.strip() for line in screen(output.getvalue(), height=8)]
    assert [line for line in held if line] == [*lines, "The end."]


def screen(written: str, height: int) -> list[str]:
    """The lines that a terminal of so many rows holds, those that were scrolled away included, which nobody can
    change."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?0-9;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row - len(lines) + 1)
        elif part == "\x1b[1A":
            row = max(row - 1, len(lines) - height, 0)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return lines


def test_against_the_real_server(capsys, monkeypatch, scripted):
    url = ("--url", scripted.url)
    status, out, _ = run(capsys, monkeypatch, "chat", *url, "-q", "Say ¤<think>\nHm.\n</think>\n\nYes.¥")
    assert (status, out) == (0, "Yes.\n")
    assert run(capsys, monkeypatch, "complete", *url, "-q", "Say ¤Yes.¥")[:2] == (0, "Yes.\n")
    status, _, err = run(capsys, monkeypatch, "chat", *url, "-q", "x", "--model-name", "none")
    assert status == 1
    assert "'none'" in err
