"""API keys from flags, environment and files: read alike, never empty by mistake, never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_interfaces import ConfigError
from quire_server import cli
from quire_server.command_line import Parser, settings_from
from quire_server.config import ServerConfig


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("QUIRE_API_KEY", "QUIRE_API_KEY_FILE", "QUIRE_ADMIN_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def read(*arguments: str) -> tuple[ServerConfig, str | None]:
    parser = Parser("quire serve")
    parser.add_argument("MODEL", nargs="?")
    built, _, _ = settings_from(parser, list(arguments), cli.server_sections())
    return built["server"], built["model"].model


SEVERAL = [("a,b", ("a", "b")), (" a , b ", ("a", "b")), ("a", ("a",)), ('["a", "b"]', ("a", "b")), ("ü-1", ("ü-1",))]


@pytest.mark.parametrize(("text", "keys"), SEVERAL)
def test_keys_are_read_alike_everywhere(monkeypatch, tmp_path, text, keys):
    assert read("--api-key", text)[0].api_key == keys
    assert read(f"--api_key={text}")[0].api_key == keys
    path = tmp_path / "quire.yaml"
    path.write_text(f"api-key: '{text}'\n")
    assert read("--config", str(path))[0].api_key == keys
    monkeypatch.setenv("VLLM_API_KEY", text)
    assert read()[0].api_key == keys
    monkeypatch.setenv("QUIRE_API_KEY", text)
    monkeypatch.setenv("VLLM_API_KEY", "another")
    assert read()[0].api_key == keys
    assert read("--api-key", "c", "--api-key", "d,e")[0].api_key == ("c", "d", "e")


@pytest.mark.parametrize("text", ["", " ", ",", "a,", "a,,b", "[]", '[""]', '["a", " "]'])
def test_an_empty_key_is_an_error_that_says_where_it_came_from(monkeypatch, tmp_path, capsys, text):
    with pytest.raises(ConfigError, match="--api-key"):
        read("--api-key", text)
    with pytest.raises(ConfigError, match="--admin-api-key"):
        read(f"--admin-api-key={text}")
    path = tmp_path / "quire.yaml"
    path.write_text(f"api_key: '{text}'\n")
    with pytest.raises(ConfigError, match=r"api_key \(.*quire\.yaml\)"):
        read("--config", str(path))
    assert cli.main(["serve", "--api-key", text]) == 2
    assert "--api-key" in capsys.readouterr().err
    for name in ("VLLM_API_KEY", "QUIRE_API_KEY"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=name):
            read()


@pytest.mark.parametrize("text", ["api_key:", "api_key: []", "api_key: ''", "api_key: [a, '']", "api_key: [null]"])
def test_an_empty_key_in_a_settings_file(tmp_path, text):
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"api_key .*quire\.yaml"):
        read("--config", str(path))


def test_an_unset_variable_does_not_lose_the_key_file(monkeypatch):
    with pytest.raises(ConfigError, match="--api-key-file is set, but empty"):
        read("--api-key-file", "")
    monkeypatch.setenv("QUIRE_API_KEY_FILE", "")
    with pytest.raises(ConfigError, match="QUIRE_API_KEY_FILE is set, but empty"):
        read()


def test_a_key_is_no_model_and_a_model_is_no_key(tmp_path, monkeypatch):
    assert read("--api-key", "k1", "some/model") == (ServerConfig(api_key=("k1",)), "some/model")
    assert read("some/model", "--api-key", "k1", "--port", "1") == (
        ServerConfig(api_key=("k1",), port=1), "some/model",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert read("--api-key", "k1", "here")[1] == "here"
    for line in (
        ["--api-key", "k1", "sk-secret"],
        ["some/model", "--api-key", "k1", "sk-secret"],
        ["some/model", "--api-key", "k1", "sk/secret"],
        ["--api-key=k1", "--api-key", "k2", "sk-secret", "some/model"],
        ["--admin-api-key", "k1", "sk-secret"],
        ["--port", "1", "--api-key", "k1", "sk-secret=="],
    ):
        with pytest.raises(
            ConfigError, match=r"several values have commas between them \(--(admin-)?api-key A,B\)"
        ) as told:
            read(*line)
        assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    "line",
    [
        ["--api-key", "sk-secret\x07"],
        ["--api-key", "sk-secret,"],
        ["--api-key", '["sk-secret", ""]'],
        ["--admin-api-key", "sk-secret\nx"],
        ["--config", "secret.yaml"],
        ["some/model", "--api-key", "k", "sk-secret"],
    ],
)
def test_no_error_shows_a_key(tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    Path("secret.yaml").write_text("api_key: {name: sk-secret}\n")
    assert cli.main(["serve", *line]) == 2
    told = capsys.readouterr()
    assert "sk-secret" not in told.err + told.out
    assert "api" in told.err


def test_explain_hides_keys(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "sk-hidden")
    monkeypatch.setenv("VLLM_API_KEY", "sk-hidden2")
    for line in (["explain"], ["explain", "api_key"], ["explain", "admin_api_key"], ["explain", "nothing"]):
        cli.main(line)
        told = capsys.readouterr()
        assert "sk-hidden" not in told.out + told.err
