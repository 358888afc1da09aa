"""Help and completion: short pages, groups, searches, and every flag somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from quire.setting_fields import config_fields
from quire.vllm_settings import VLLM_SETTINGS
from quire_interfaces import Settings, one_of, setting
from quire_server import cli
from quire_server.completion import CompletedFlag, completion_script
from quire_server.help_text import GROUPS, group_of, one_line

FIELDS = config_fields(cli.server_sections())


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def page(capsys, *arguments: str) -> str:
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_short_page_fits_a_screen_and_names_the_groups(capsys):
    for asked in ("--help", "-h"):
        out = page(capsys, "serve", asked)
        assert len(out.splitlines()) < 60
        for flag in ("--host", "--port", "--max-model-len TOKENS", "--max-num-seqs REQUESTS", "--config FILE"):
            assert f"  {flag}" in out
        for word, group in GROUPS.items():
            assert re.search(rf"--help={word} +{re.escape(group.title)} \(\d+\)", out)


def test_every_flag_is_in_one_group(capsys):
    entry = re.compile(r"^  (--\S+)", re.MULTILINE)
    flags = {f"--[no-]{spec.flag[2:]}" if "bool" in str(spec.type) else spec.flag for spec in FIELDS.values()}
    shown = [flag for word in GROUPS for flag in entry.findall(page(capsys, "serve", f"--help={word}"))]
    assert len(shown) == len(set(shown))
    assert set(shown) == flags
    assert set(entry.findall(page(capsys, "serve", "--help=all"))) == flags
    for group in GROUPS.values():
        assert set(group.names) <= FIELDS.keys()


def test_a_group_shows_choices_units_and_defaults(capsys):
    out = page(capsys, "serve", "--help=memory")
    assert "--block-size TOKENS" in out
    assert "--[no-]enable-prefix-caching" in out
    assert "--prefix-caching-hash-algo {sha256,sha256_cbor,xxhash,xxhash_cbor}" in out
    assert "One of auto, float32, bfloat16, float16, fp8_e4m3" in " ".join(out.split())
    assert "Default: 16 tokens." in out
    assert "Default: on." in out
    assert "Default: 32MiB." in page(capsys, "serve", "--help=max_body_bytes")
    assert page(capsys, "serve", "--help", "Memory and KV cache") == out


def test_a_word_is_looked_for_in_names_and_descriptions(capsys):
    out = page(capsys, "serve", "--help=prefix")
    assert "--[no-]enable-prefix-caching" in out
    assert "--kv-disk-path" in out  # in its description
    assert "--port" not in out
    out = page(capsys, "serve", "--help=--prefill-context-parallel-size")
    assert VLLM_SETTINGS["prefill_context_parallel_size"].words[:40] in out
    assert "no flag has to do with 'zzz'; the groups are model, memory" in page(capsys, "serve", "--help=zzz")


def test_commands_with_the_engines_settings_show_their_own_flags_only(capsys):
    out = page(capsys, "eval", "--help")
    assert "--text FILE" in out
    assert "(required)" in out
    assert "--max-num-seqs " not in out.replace("(--max-num-seqs as", "")
    assert "quire eval --help=all" in out
    assert "--max-num-seqs REQUESTS" in page(capsys, "eval", "--help=all")
    assert "--port" not in page(capsys, "eval", "--help=all")
    assert "--scheme NAME" in page(capsys, "quantize", "--help")
    assert "--max-num-seqs" not in page(capsys, "quantize", "--help")


def test_help_behind_two_dashes_is_a_model():
    with pytest.raises(SystemExit):
        cli.main(["version", "--", "--help"])


def test_a_setting_that_nobody_grouped_is_the_servers():
    from dataclasses import dataclass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Other(Settings):
        colour: str = setting("red", help="Colour; of everything.", check=one_of("red", "blue"))

    spec = config_fields({"other": Other})["colour"]
    assert group_of(spec) == "server"
    assert spec.choices == ("red", "blue")
    assert one_line(spec) == "Colour (default: red)"
    for text, line in (
        ("Path prefix, e.g. /llm. More.", "Path prefix, e.g. /llm (default: red)"),
        (
            "File with a line `name: key` for each caller.",
            "File with a line `name: key` for each caller (default: red)",
        ),
        ("Lists: all of them.", "Lists (default: red)"),
    ):
        assert one_line(spec._replace(help=text)) == line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_every_flag(capsys, shell):
    script = page(capsys, "completion", shell)
    for spec in FIELDS.values():
        assert spec.flag.lstrip("-") in script
    for name in cli.COMMANDS:
        assert name in script
    assert "prefill-context-parallel-size" not in script
    program = shutil.which(shell)
    if program is not None:
        done = subprocess.run([program, "-n"], input=script, text=True, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def completed(script: str, *words: str) -> set[str]:
    listed = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _quire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], text=True, capture_output=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_bash_completes(capsys):
    script = page(capsys, "completion", "bash")
    assert completed(script, "quire", "se") == {"serve"}
    assert completed(script, "quire", "serve", "--max-num-s") == {"--max-num-seqs"}
    assert completed(script, "quire", "plan", "--port") == set()
    assert completed(script, "quire", "serve", "--no-enable-pre") == {"--no-enable-prefix-caching"}
    assert completed(script, "quire", "serve", "--dtype", "b") == {"bfloat16"}


def test_texts_are_quoted():
    flags = [CompletedFlag("--it", "it's [one]: or $HOME", takes_value=True)]
    for shell in ("bash", "zsh", "fish"):
        script = completion_script(shell, {"go": ("go's text", flags)})
        program = shutil.which(shell)
        if program is not None:
            done = subprocess.run([program, "-n"], input=script, text=True, capture_output=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_told_which_there_are(capsys):
    assert cli.main(["completion", "csh"]) == 2
    assert "'csh'; there is for bash, zsh, fish" in capsys.readouterr().err
