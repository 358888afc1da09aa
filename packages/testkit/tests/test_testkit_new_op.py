"""`quire new-op` and the page that tells how to go on: what is written runs, and so does what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire_interfaces import ConfigError
from quire_ops import ops
from quire_testkit.new_op import summary, write_op

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding-a-kernel.md"
PARTS = ("packages/ops", "kernels-cuda/src")
NAME = "relu2_and_mul"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the parts that the exercise changes."""
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "ops.md", tmp_path / "docs")
    return tmp_path


def run_tests(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The new op's tests, with the copies before everything else."""
    path = os.pathsep.join([str(checkout / "packages/ops/src"), str(checkout / "kernels-cuda/src"), *sys.path])
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(checkout), str(checkout / f"packages/ops/tests/test_ops_{NAME}.py")]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, check=False
    )


def test_what_is_written_passes_its_test_and_stands_in_the_tables(checkout: Path) -> None:
    written = write_op(checkout, NAME)
    assert [path.name for path in written] == [f"{NAME}.py", f"test_ops_{NAME}.py", "ops.py", "ops.md"]
    done = run_tests(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch-torch.bfloat16" in done.stdout
    lint = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), *map(str, written[:3])]
    checked = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    lines = (checkout / "docs" / "ops.md").read_text().splitlines()
    places = [lines.index(next(x for x in lines if x.startswith(f"| `{name}`"))) for name in (NAME, "rms_norm")]
    assert lines[places[0]] == f"| `{NAME}` | x * factor |"
    assert places[1] == places[0] + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_is_an_exercise(checkout: Path) -> None:
    """Every block of the page in its order: files that are named get what stands below, a line goes into a table."""
    page = PAGE.read_text()
    steps = re.findall(
        r"^```\n(.*?)^```|`([\w/.-]+\.py)`:\n\n```(?:py|text)\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    assert steps[0][0] == f"quire new-op {NAME}\n"
    before = {path for path in checkout.rglob("*") if path.is_file()}
    written = write_op(checkout, NAME)
    edited = []
    for _, name, text in steps[1:]:
        if not name:
            continue
        path = checkout / name
        edited.append(path)
        if path.name == "ops.py":
            old = path.read_text()
            assert old.count("SERVED = (\n") == 1
            text = old.replace("SERVED = (\n", "SERVED = (\n" + text)
        path.write_text(text)
    new = {path for path in checkout.rglob("*") if path.is_file() and "__pycache__" not in path.parts} - before
    assert f"Files written for you: {len(set(written) & new)}, and a line in two more" in page
    assert f"Files opened and edited by hand: {len(edited)}, which are those two" in page
    assert set(edited[:2]) == set(written[:2])
    done = run_tests(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    interpreted = run_tests(checkout, TRITON_INTERPRET="1")
    assert interpreted.returncode == 0, interpreted.stdout + interpreted.stderr
    assert "triton-torch.float32" in interpreted.stdout
    # Held to the reference: a kernel that errs is seen.
    kernel = edited[2]
    kernel.write_text(kernel.read_text().replace("positive * positive *", "positive *"))
    broken = run_tests(checkout, TRITON_INTERPRET="1")
    assert broken.returncode == 1
    assert re.search(r"triton-torch.float32.* FAILED", broken.stdout)
    assert re.search(r"\[1-torch-torch.float32.* PASSED", broken.stdout)


def test_the_table_is_of_all_ops() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs" / "ops.md").read_text(), re.MULTILINE)
    assert rows == [(op.name, summary(op.__doc__ or "")) for op in ops.OPS]


@pytest.mark.parametrize(
    ("name", "message"), [("rms_norm", "is there already"), ("RMSNorm", "in lower case"), ("2d", "in lower case")]
)
def test_names_that_cannot_be(checkout: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_op(checkout, name)


def test_only_a_checkout_is_written_into(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a checkout"):
        write_op(tmp_path, NAME)
