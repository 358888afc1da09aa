"""Command lines as they are mistyped: nothing that starts with dashes is ever taken for a value."""

from __future__ import annotations

import pytest

from quire_interfaces import ConfigError
from quire_server import cli
from quire_server.command_line import Parser, settings_from


def settings(*arguments: str) -> dict:
    parser = Parser("quire serve")
    parser.add_argument("MODEL", nargs="?")
    built, _, _ = settings_from(parser, list(arguments), cli.server_sections())
    return built


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--served-model-name", "X", "--foo.bar", "1"], "there is no flag --foo"),
        (["--served-model-name", "X", "--foo={a: 1}"], "there is no flag --foo"),
        (["--served-model-name", "X", "--foo bar"], "there is no flag --foo"),
        (["--served-model-name", "X", "--hots", "1"], "did you mean --host?"),
        (["--port", "--foo"], "there is no flag --foo"),
        (["--allowed-origins", "*", "--allowed-heder", "a"], "did you mean --allowed-headers"),
        (["--max_num_seq", "3"], "there is no flag --max_num_seq; did you mean --max-num-seqs?"),
        (["-x"], "there is no flag -x"),
        (["--served-model-name", "X", "-x y"], "there is no flag -x"),
        (["--port.a", "1"], "--port takes no object"),
        (["--hf-overrides.a"], "--hf-overrides.a expects a value after it"),
        (["--hf-overrides.a", "--port"], "--hf-overrides.a expects a value after it"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "a is given as 1 and by its members"),
        (["--enable-prefix-caching", "false"], "write --enable-prefix-caching alone, or --no-enable-prefix-caching"),
        (["--enable-prefix-caching=maybe"], "is a switch; write it alone, not with 'maybe'"),
        (["--no-enable-prefix-caching=true"], "is a switch"),
        ([""], "MODEL is empty; name a model, or leave it out for the demo model"),
        (["a/b", "--model", "c/d"], "MODEL is 'a/b' and --model is 'c/d'; give one of them"),
        (["--served-model-name", "X", "org/model"], "write MODEL first (quire serve org/model --served-model-name"),
        (["--kv-cache-memory-bytes", "8Q"], "8G, 8GiB (of 1024)"),
        (["--num-gpu-blocks-override", "many"], "expects a whole number of blocks"),
        (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization must be a number from 0.01 to 1, got nan"),
        (["--gpu-memory-utilization", "half"], "--gpu-memory-utilization expects a number, got 'half'"),
        (["--enable-lora=1", "--hf-overrides", "{a}"], "--hf-overrides expects a JSON object, got '{a}'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arguments, words):
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--served-model-name", "a", "b"],
        ["--served-model-name", "a", "b", "--", "m"],
        ["--served-model-name=a", "m", "--served-model-name", "b"],
        ["--served-model-name", "a", "b", "--port", "8000", "m"],
        ["--model", "m", "--served-model-name", '["a", "b"]'],
        ["--model", "m", "m", "--served-model-name", "a", "b"],
    ],
)
def test_a_model_stands_before_a_list_or_behind_two_dashes(arguments):
    built = settings(*arguments)
    assert (built["model"].model, built["server"].served_model_name) == ("m", ("a", "b"))


def test_a_folder_behind_a_list_is_not_lost(tmp_path):
    with pytest.raises(ConfigError, match="was read as one more value of --served-model-name"):
        settings("--served-model-name", "X", str(tmp_path))


def test_values_that_look_like_flags():
    assert settings("--max-logprobs", "-1")["model"].max_logprobs == -1
    assert settings("--seed", "-5")["engine"].seed == -5
    assert settings("--api-key=--secret")["server"].api_key == ("--secret",)
    assert settings("--hf-overrides", '{"--x": -1}')["model"].hf_overrides == {"--x": -1}
    assert settings("--", "--strange-name")["model"].model == "--strange-name"


def test_the_last_of_a_repeated_flag_wins():
    assert settings("--port", "1", "--port=2")["server"].port == 2
    built = settings("--enable-prefix-caching", "--enable-prefix-caching=false")
    assert built["kv_cache"].enable_prefix_caching is False
    assert settings("--enable_prefix_caching=on")["kv_cache"].enable_prefix_caching is True


def test_short_flags_of_vllm():
    built = settings("-q", "int8", "-sc", '{"method": "ngram"}', "-tp", "1", "-dpn", "0", "--spec-tokens", "2", "-O1")
    assert built["model"].quantization == "int8"
    assert (built["speculative"].method, built["speculative"].num_speculative_tokens) == ("ngram", 2)
    assert built["model"].compilation_config == {"mode": 1}
    assert settings("--optimization-level", "2") == settings("-O2") == settings("-O=2")
    assert settings("-cc.mode", "1")["model"].compilation_config == {"mode": 1}


@pytest.mark.parametrize("arguments", [["ops", "--foo"], ["quantize", "a", "b", "--schem", "int8"], ["version", "-x"]])
def test_commands_without_settings_name_the_flag_too(capsys, arguments):
    assert cli.main(arguments) == 2
    assert f"there is no flag {arguments[-2] if len(arguments) > 3 else arguments[-1]}" in capsys.readouterr().err
