"""`quire run`: a server of its own that goes when the chat goes, also when that is killed."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time

import psutil
import pytest

from quire_interfaces import ConfigError
from quire_server import cli
from quire_server.command_line import settings_from
from quire_server.terminal.run import question_of, settings_of_run

PROGRAM = """
import json, sys
from quire_server import cli
from quire_server.command_line import settings_from
from quire_server.terminal.run import RunOptions, run
model, engine, *rest = sys.argv[1:]
parsed = cli.ParsedCommand(*settings_from(cli.COMMANDS["run"].parser("run"), [model, *rest], cli.server_sections()))
options = RunOptions(parsed.args.PROMPT, None, ["max_tokens=3"], [], True, False)
factory = ("quire_testkit.fake_engine:fake_engine_factory", json.loads(engine))
sys.exit(run(parsed.engine_config(), parsed.sections["server"], parsed.origins, options, factory))
"""
ENGINE = {"vocab_size": 1024, "num_token_ids": 1000, "max_model_len": 512, "num_blocks": 64}


def is_readable(file, seconds):
    """Whether there is something to read within a time; `select.select` takes no descriptor above 1,023."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def parsed(*arguments: str) -> cli.ParsedCommand:
    parser = cli.COMMANDS["run"].parser("run")
    return cli.ParsedCommand(*settings_from(parser, list(arguments), cli.server_sections()))


def settled(*arguments: str):
    command = parsed(*arguments)
    return settings_of_run(command.engine_config(), command.sections["server"], command.origins)


def test_the_server_is_for_the_chat_alone(tmp_path, tiny_folder):
    _, server = settled()
    assert (server.host, server.port, server.access_log) == ("127.0.0.1", 0, False)
    assert len(server.api_key[0]) >= 32
    assert settled()[1].api_key != server.api_key
    _, server = settled("--port", "8123", "--log-level", "info")
    assert (server.port, server.log_level) == (8123, "info")
    (tmp_path / "mine").symlink_to(tiny_folder)
    config, server = settled("mine", "--models-dir", str(tmp_path))
    assert config.model.model == str(tmp_path / "mine")
    assert (server.served_model_name, server.models_dir) == (("mine",), None)
    for flags in (("--uds", "/x"), ("--log-format", "json")):
        with pytest.raises(ConfigError, match=f"does not go with {flags[0]}"):
            settled(*flags)


def test_bad_input(capsys):
    for arguments, words in (
        (("run", "--set", "x"), "--set takes NAME=VALUE"),
        (("run", "model", " "), "the prompt is empty"),
        (("run", "--prot", "1"), "--port"),
    ):
        assert cli.main(list(arguments)) == 2
        assert words in capsys.readouterr().err


def test_piped_text_stands_behind_the_prompt(monkeypatch, tmp_path):
    (tmp_path / "in").write_text("a text\n")
    with open(tmp_path / "in") as piped:
        monkeypatch.setattr("sys.stdin", piped)
        assert question_of("Sum up:") == "Sum up:\n\na text\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("a text"))
    assert question_of("Sum up:") == "Sum up:", "no pipe: a prompt does not wait for it"
    assert question_of(None) == "a text"


def test_the_server_of_a_killed_chat_ends(tiny_folder):
    outside, inside = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tiny_folder), json.dumps(ENGINE)]
    chat = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)

    def until(text: str) -> str:
        output, end_s = "", time.monotonic() + 90
        while text not in output:
            assert time.monotonic() < end_s, output
            if is_readable(outside, 0.2):
                output += os.read(outside, 65536).decode()
        return output

    try:
        until("\n> ")
        os.write(outside, b"Hello\r")
        assert len(until("\n> ").split("\r\n", 1)[1].strip()) > 3, "it answers"
        children = psutil.Process(chat.pid).children(recursive=True)
        assert len(children) >= 2, "the server, and the engine's process"
    finally:
        chat.kill()
        chat.wait()
        os.close(outside)
    _, alive = psutil.wait_procs(children, timeout=20)
    for process in alive:
        process.kill()
    assert not alive
