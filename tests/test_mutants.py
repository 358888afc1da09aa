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
    ("before", "after", "message"),
    [
        ("no such text", "x", "stands 0 times"),
        ("import", "x", "must stand there once"),
        ("class BlockHasher:",) * 2 + ("changes nothing",),
    ],
)
def test_a_mutation_that_does_not_fit_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "mutations.toml"
    path.write_text(
        "[[mutation]]\npackage = 'packages/kv-cache'\nfile = 'quire_kv_cache/hashing.py'\n"
        f"before = '{before}'\nafter = '{after}'\n"
    )
    with pytest.raises(ValueError, match=message):
        RUN["read_mutations"](path)
