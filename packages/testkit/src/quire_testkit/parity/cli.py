"""The command `quire verify`: one architecture or one checkpoint, or all of them into docs/models.md."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_interfaces import CheckpointError
from quire_models.config import ModelConfig

if TYPE_CHECKING:
    from quire_testkit.parity.verify import Verdict

__all__ = ["main", "register_verify"]


def register_verify(commands: Any) -> None:
    """Add `verify` to the command line."""
    parser = commands.add_parser("verify", help="compare Quire with Transformers, in every situation")
    parser.add_argument("MODEL", nargs="*", help="architecture names and checkpoint folders; none: all architectures")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the results of the architectures into FILE")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    """Print a table per model; 1 when one of them fails."""
    _require_transformers()
    from quire_testkit.parity.cases import CASES
    from quire_testkit.parity.table import update_table
    from quire_testkit.parity.verify import verify_architecture, verify_checkpoint

    for name in args.MODEL:  # a misspelt one is told before the others have run
        if name not in CASES:
            _check_checkpoint(name, sorted(CASES))
    failed = False
    for name in args.MODEL or sorted(CASES):
        is_folder = name not in CASES
        verdict = verify_checkpoint(name) if is_folder else verify_architecture(name)
        print_verdict(name, verdict)
        failed = failed or bool(verdict.failures)
        if args.table is not None and not is_folder and not verdict.failures:
            update_table(args.table, [verdict])
    return int(failed)


def _require_transformers() -> None:
    """Raises QuireError where the other side of the comparison is not installed."""
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        raise CheckpointError(
            "quire verify compares Quire with Transformers, which is not installed: pip install 'quire-testkit[parity]'"
        )


def _check_checkpoint(name: str, architectures: list[str]) -> None:
    """Raises QuireError when it is no folder with a model that Quire reads."""
    if Path(name).is_dir():
        ModelConfig.from_path(Path(name))
        return
    nearest = difflib.get_close_matches(name, architectures, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "; `quire verify` without a name takes every architecture"
    raise CheckpointError(f"{name!r} is neither the folder of a checkpoint nor an architecture with a case{hint}")


def print_verdict(name: str, verdict: Verdict) -> None:
    """One line per situation."""
    print(f"{name}: {verdict.architecture}" if name != verdict.architecture else name)
    for situation, error in verdict.errors.items():
        figure, verdict_of = (f"{error:8.1e}", "ok") if not math.isnan(error) else (f"{'-':>8}", "does not apply")
        print(f"  {situation:<16}{figure}  {verdict.failures.get(situation, verdict_of)}")
    for situation in verdict.failures.keys() - verdict.errors.keys():
        print(f"  {situation:<16}          {verdict.failures[situation]}")


def main(argv: list[str] | None = None) -> int:
    """`python -m quire_testkit.parity.cli verify ...`."""
    parser = argparse.ArgumentParser("quire")
    register_verify(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
