"""QUIRE_ environment variables: they are settings below the arguments; one that nobody knows is named."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, QuireConfig
from quire.environment import OTHER_VARIABLES, environment_values, unknown_variables
from quire.setting_fields import config_fields
from quire_interfaces import ConfigError

FIELDS = config_fields(QuireConfig.sections())
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("QUIRE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("QUIRE_MAX_NUM_SEQ", "QUIRE_MAX_NUM_SEQS"),
        ("QUIRE_MAXNUMSEQS", "QUIRE_MAX_NUM_SEQS"),
        ("QUIRE_max_num_seqs", "QUIRE_MAX_NUM_SEQS"),
        ("quire_dtype", "QUIRE_DTYPE"),
        ("QUIRE_CPU_KERNEL", "QUIRE_CPU_KERNELS"),
        ("QUIRE_PREFIX_CACHING_HASH_ALGORITHM", "QUIRE_PREFIX_CACHING_HASH_ALGO"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest(name: str, nearest: str) -> None:
    (complaint,) = unknown_variables(FIELDS, {name: "1", "PATH": "/bin", "QUIRE_MODEL": "x"})
    assert f" {name} is not known" in complaint
    assert f"did you mean {nearest}?" in complaint


def test_nothing_is_near() -> None:
    complaints = unknown_variables(FIELDS, {"QUIRE_ZZZZ": "1", "QUIRE_": "2"})
    assert len(complaints) == 2
    assert all("quire explain" in complaint for complaint in complaints)


def test_known_names_are_silent() -> None:
    known = {spec.env: "1" for spec in FIELDS.values()} | dict.fromkeys(OTHER_VARIABLES, "1")
    assert unknown_variables(FIELDS, known | {"REQUIRE_NOTHING": "1", "HOME": "/"}) == []
    assert len(environment_values(FIELDS, known)) == len(FIELDS)


def test_settings_of_other_packages_are_known(tmp_path: Path) -> None:
    """A script with `LLM()` runs where the server's variables are set."""
    (tmp_path / "their_settings.py").write_text(
        "from dataclasses import dataclass\n"
        "from quire_interfaces import Settings, setting\n"
        "@dataclass(frozen=True, slots=True, kw_only=True)\n"
        "class TheirConfig(Settings):\n"
        "    tea_time: int = setting(5, help='When.')\n"
    )
    metadata = tmp_path / "their-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[quire.settings]\ntheirs = their_settings:TheirConfig\n")
    script = (
        "from quire import QuireConfig\nfrom quire.setting_fields import config_fields\n"
        "from quire.environment import unknown_variables\n"
        "print(unknown_variables(config_fields(QuireConfig.sections())))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "QUIRE_TEA_TIME": "4",
        "QUIRE_TEE_TIME": "4",
    }
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "QUIRE_TEA_TIME is not known" not in run.stdout
    assert "QUIRE_TEE_TIME is not known and has no effect; did you mean QUIRE_TEA_TIME?" in run.stdout


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "2k")
    config = QuireConfig.from_environment(max_num_seqs=3)
    assert (config.scheduler.max_num_seqs, config.model.max_model_len) == (3, 2000)
    assert QuireConfig.of(max_num_seqs=3).model.max_model_len is None, "a configuration by hand is what it says"


def test_a_value_that_cannot_be_read_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "tcp://10.0.0.1:80")
    with pytest.raises(
        ConfigError, match=r"QUIRE_MAX_NUM_SEQS expects a whole number of requests, .* got 'tcp://10\.0\.0\.1:80'"
    ):
        QuireConfig.from_environment()


def test_an_llm_reads_the_environment_and_says_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQ", "6")
    with caplog.at_level(logging.WARNING, "quire"), LLM(max_model_len=64, num_gpu_blocks_override=16) as llm:
        assert llm.config.scheduler.max_num_seqs == 5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "QUIRE_MAX_NUM_SEQ is not known" in record.message
    assert "did you mean QUIRE_MAX_NUM_SEQS?" in record.message


def test_every_variable_that_the_sources_read_is_known() -> None:
    """Whole texts such as "QUIRE_PORT" in the sources; in tests, which invent names, only where they are read."""
    text = re.compile(r"""["'](QUIRE_[A-Z0-9_]+)["']""")
    read = re.compile(r"""(?:getenv|environ(?:\.get)?)\s*[(\[]\s*["'](QUIRE_[A-Z0-9_]+)["']""")
    names = {
        name
        for folder in ("packages", "apps", "kernels-cpu", "kernels-cuda", "kernels-rocm")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".cc", ".h", ".hpp") and path.is_file()
        for name in (read if "tests" in path.parts else text).findall(path.read_text(errors="replace"))
    }
    assert {"QUIRE_REQUIRE_BROWSER", "QUIRE_CPU_KERNELS"} <= names, "otherwise this test reads nothing"
    assert names <= {spec.env for spec in FIELDS.values()} | OTHER_VARIABLES.keys()
