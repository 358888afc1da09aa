"""`quire new-model`: what it writes is a network that runs, and what it cannot write it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire_interfaces import ConfigError
from quire_testkit.new_model import write_model

ROOT = Path(__file__).parents[3]
PARTS = ("packages/models/src/quire_models", "packages/testkit/src/quire_testkit")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the parts that the command writes into, without one of the architectures."""
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / PARTS[0] / "families" / "arcee.py").unlink()
    for table in (f"{PARTS[0]}/registry.py", f"{PARTS[1]}/parity/dense_cases.py"):
        lines = (tmp_path / table).read_text().splitlines(keepends=True)
        (tmp_path / table).write_text("".join(line for line in lines if "ArceeForCausalLM" not in line))
    return tmp_path


def test_what_is_written_runs_and_is_verified(checkout: Path) -> None:
    # Written as Llama is, it is Llama: with a gate instead of Arcee's squared ReLU, only Llama's class agrees with it.
    write_model(checkout, "ArceeForCausalLM", "arcee", "ArceeConfig")
    code = (
        "from quire_testkit.parity.case import ParityCase\n"
        "from quire_testkit.parity.oracle import write_checkpoint\n"
        "from quire_testkit.parity.verify import compare, verify_architecture\n"
        "import json, pathlib, tempfile\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "oracle = write_checkpoint(folder, 'LlamaForCausalLM', ParityCase(config='LlamaConfig'))\n"
        "config = json.loads((folder / 'config.json').read_text())\n"
        "(folder / 'config.json').write_text(json.dumps({**config, 'architectures': ['ArceeForCausalLM']}))\n"
        "verdict = compare(folder, oracle, ParityCase(config=''))\n"
        "print(verdict.architecture, verdict.failures)\n"
    )
    path = os.pathsep.join([*(str(checkout / Path(part).parent) for part in PARTS), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "ArceeForCausalLM {}\n", run.stderr


def test_lines_are_in_the_tables(checkout: Path) -> None:
    written = write_model(checkout, "ArceeForCausalLM", "arcee", "ArceeConfig")
    assert [path.name for path in written] == ["arcee.py", "registry.py", "dense_cases.py"]
    assert '"ArceeForCausalLM": Architecture("arcee"' in written[1].read_text()
    assert '"ArceeForCausalLM": case("ArceeConfig")' in written[2].read_text()
    with pytest.raises(ConfigError, match="ArceeForCausalLM is there already"):
        write_model(checkout, "ArceeForCausalLM", "arcee", "ArceeConfig")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("New ForCausalLM", "new", "NewConfig"), "'New ForCausalLM' is not the name of a class"),
        (("NewForCausalLM", "../new", "NewConfig"), "model_type must be a name in lower case"),
        (("LlamaForCausalLM", "llama", "LlamaConfig"), "is there already"),
    ],
)
def test_bad_names_are_refused(checkout: Path, names: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_model(checkout, *names)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a checkout of Quire"):
        write_model(tmp_path, "NewForCausalLM", "new", "NewConfig")


def test_a_class_that_takes_media_gets_a_case_that_runs(checkout: Path) -> None:
    architecture = "DeepseekVLForConditionalGeneration"
    cases = checkout / PARTS[1] / "parity" / "vision_cases.py"
    text = cases.read_text()
    start = text.index(f'    "{architecture}": ParityCase(')
    end = text.index("\n    ),\n", start) + len("\n    ),\n")
    cases.write_text(text[:start] + text[end:])
    assert write_model(checkout, architecture, "deepseek_vl", "DeepseekVLConfig") == [cases]
    with pytest.raises(ConfigError, match="has a case already"):
        write_model(checkout, architecture, "deepseek_vl", "DeepseekVLConfig")
    code = (
        "from quire_models import ModelConfig, load_model\n"
        "from quire_testkit.parity.cases import CASES\n"
        "from quire_testkit.parity.media_items import media_item\n"
        "from quire_testkit.parity.oracle import write_checkpoint\n"
        "import sys, tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        "write_checkpoint(folder, sys.argv[1], CASES[sys.argv[1]])\n"
        "network = load_model(ModelConfig.from_path(folder), folder, dtype='float32')\n"
        "modality, item = media_item(sys.argv[1], 0)\n"
        "print(*network.encode_media(modality, [item])[0].shape)\n"
    )
    path = os.pathsep.join([*(str(checkout / Path(part).parent) for part in PARTS), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code, architecture],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "16 64\n", run.stderr
