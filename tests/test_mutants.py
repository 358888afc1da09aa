"""The committed mutations fit the sources: each one changes exactly one place. `nox -s mutants` runs them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

RUN = runpy.run_path(str(Path(__file__).with_name("mutants") / "run.py"), run_name="mutants")


def test_each_mutation_changes_one_place() -> None:
    mutations = RUN["read_mutations"]()
    assert len({(each.package, each.file, each.before, each.after) for each in mutations}) == len(mutations)


@pytest.mark.parametrize(
    ("before", "after", "tests", "message"),
    [
        ("no such text", "x", "tests", "stands 0 times"),
        ("import", "x", "tests", "must stand there once"),
        ("class BlockHasher:", "class BlockHasher:", "tests", "changes nothing"),
        ("class BlockHasher:", "class BlockHasher", "tests", "is no Python any more"),
        ("class BlockHasher:", "class X:", "tests/test_gone.py", "there are no tests tests/test_gone.py"),
    ],
)
def test_a_mutation_that_does_not_fit_is_named(
    tmp_path: Path, before: str, after: str, tests: str, message: str
) -> None:
    path = tmp_path / "mutations.toml"
    path.write_text(
        "[[mutation]]\npackage = 'packages/kv-cache'\nfile = 'quire_kv_cache/hashing.py'\n"
        f"before = '{before}'\nafter = '{after}'\ntests = ['{tests}']\n"
    )
    with pytest.raises(ValueError, match=message):
        RUN["read_mutations"](path)
