"""The command `quire new-op`: the module, the test and the table rows of a new op.

What it writes multiplies by a factor, through the reference and through torch, and passes its test; it is to be changed
into what the op is meant to compute.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["register_new_op", "summary", "write_op"]

MODULE = '''"""Op `{name}`: what it is for. Shape legend: N rows, I numbers of a row."""

from __future__ import annotations

from torch import Tensor

from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["{name}"]


@op
def {name}(x: Tensor, factor: float) -> Tensor:
    """x * factor; x [N, I] -> [N, I], dtype of x (authors and year, equation)."""
    return (x.double() * factor).to(x.dtype)


@torch_backend_for({name})
def _torch_{name}(x: Tensor, factor: float) -> Tensor:
    return x * factor
'''

TEST = '''"""Op `{name}`: every backend against the reference."""

from __future__ import annotations

import pytest
import torch
from ops_conformance import cases, check, random

from quire_ops import OpBackend, ops


@cases(ops.{name})
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_{name}(backend: OpBackend, dtype: torch.dtype, rows: int) -> None:
    x = random(rows, 70, dtype=dtype)
    check(backend.function(x.clone(), 1.5), ops.{name}(x, 1.5))
'''


def write_op(root: Path, name: str) -> list[Path]:
    """Write the files of a new op into a checkout, and its entries into the tables.

    Args:
        root: The repository.
        name: Of the op, a Python name in lower case.

    Returns:
        What was written.

    Raises:
        ConfigError: Not a checkout, a name that cannot be one, or an op that is there already.
    """
    package, table = root / "packages" / "ops", root / "docs" / "ops.md"
    module, test = package / "src" / "quire_ops" / f"{name}.py", package / "tests" / f"test_ops_{name}.py"
    names = module.with_name("ops.py")
    if not names.is_file() or not table.is_file():
        raise ConfigError(f"{root} is not a checkout of Quire; run this command in one, or give --root")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"an op's name is one in lower case, as a Python module's, got {name!r}")
    if module.exists() or f'"{name}"' in names.read_text(encoding="utf-8"):
        raise ConfigError(f"{name} is there already: see {names}; choose another name")
    module.write_text(MODULE.format(name=name), encoding="utf-8")
    test.write_text(TEST.format(name=name), encoding="utf-8")
    names.write_text(_with_name(names.read_text(encoding="utf-8"), name), encoding="utf-8")
    table.write_text(_with_row(table.read_text(encoding="utf-8"), name, "x * factor"), encoding="utf-8")
    return [module, test, names, table]


def summary(doc: str) -> str:
    """What an op computes, as the table of ops says it: the beginning of its docstring, up to the first pause, without
    the paper."""
    text = re.sub(r" \([^()]*\b(?:19|20)\d\d\b[^()]*\)", "", " ".join(doc.split()))
    return re.split(r"[;:.](?:\s|$)", text, maxsplit=1)[0]


def _with_name(text: str, name: str) -> str:
    """The text of `ops.py` with the op's import and its name in `__all__`, both in alphabetical order."""
    imports = re.findall(r"^from quire_ops\.\w+ import (?:\((?:\n .*)*\n\)|.*)\n", text, re.MULTILINE)
    block = "".join(sorted([*imports, f"from quire_ops.{name} import {name}\n"]))
    text = text.replace("".join(imports), block)
    before, listed, after = re.split(
        r"(?<=^__all__ = \[\n)(.*?)(?=^\])", text, maxsplit=1, flags=re.DOTALL | re.MULTILINE
    )
    entries = sorted([*re.findall(r'"\w+"', listed), f'"{name}"'])
    return before + textwrap.indent(textwrap.fill(", ".join(entries) + ",", 116), " " * 4) + "\n" + after


def _with_row(text: str, name: str, what: str) -> str:
    """The table of ops with one more row, in alphabetical order."""
    head, _, rows = text.partition("| --- | --- |\n")
    ordered = sorted([*rows.splitlines(keepends=True), f"| `{name}` | {what} |\n"])
    return f"{head}| --- | --- |\n{''.join(ordered)}"


def register_new_op(commands: Any) -> None:
    """Add `new-op` to the command line."""
    parser = commands.add_parser("new-op", help="begin an op: reference, torch form, test, table row")
    parser.add_argument("NAME", help="of the op, e.g. rms_norm")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: here)")
    parser.set_defaults(run=run_new_op)


def run_new_op(args: argparse.Namespace) -> int:
    """Write, and say what is next."""
    for path in write_op(args.root, args.NAME):
        print(path)
    print(f"now change them, and run packages/ops/tests/test_ops_{args.NAME}.py (docs/adding-a-kernel.md)")
    return 0
