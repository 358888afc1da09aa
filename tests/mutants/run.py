"""Applies each mutation of `mutations.toml` to a copy of its package and runs that package's own tests on the copy.

    nox -s mutants                                  every mutation, and the score
    nox -s mutants -- --only kv-cache,scheduler     those of some packages
    nox -s mutants -- --jobs 1                      one at a time

A mutation is killed when the package's tests fail, which they must not do on an unchanged copy. One that survives shows
something that no test holds. The checkout itself is never changed: tests import the copy, which stands first on the
path. Each mutation names the test files that know what it breaks, most of them a few seconds of processor time.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTATIONS = Path(__file__).with_name("mutations.toml")
_LEAST_TIMEOUT_S = 120.0
_TIMEOUT_FACTOR = 5
"""A mutation under which the tests take this many times as long as without it makes them hang."""
_NO_TESTS = 5
"""Exit status of pytest that found no tests: nothing was proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of one place."""

    package: str
    """Folder of the workspace: "packages/kv-cache"."""
    file: str
    """Within the package's `src`."""
    before: str
    """What stands there, exactly once."""
    after: str
    tests: tuple[str, ...]
    """Files of the package's tests that should notice, or their folder."""

    @property
    def title(self) -> str:
        """What is changed, in a line."""
        return f"{self.package} {self.file}: {_line(self.before)} -> {_line(self.after)}"


def read_mutations(path: Path = MUTATIONS) -> list[Mutation]:
    """The committed list.

    Raises:
        ValueError: A mutation's `before` does not stand exactly once in its file, `after` is the same or no Python, or
            a file of `tests` is missing.
    """
    with path.open("rb") as file:
        entries = tomllib.load(file)["mutation"]
    mutations = [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    for mutation in mutations:
        source = (ROOT / mutation.package / "src" / mutation.file).read_text()
        count = source.count(mutation.before)
        if count != 1:
            raise ValueError(f"{mutation.title}: stands {count} times in the file, must stand there once")
        if mutation.before == mutation.after:
            raise ValueError(f"{mutation.title}: changes nothing")
        try:
            ast.parse(source.replace(mutation.before, mutation.after))
        except SyntaxError as error:
            raise ValueError(f"{mutation.title}: is no Python any more: {error}") from None
        for name in mutation.tests:
            if not (ROOT / mutation.package / name).exists():
                raise ValueError(f"{mutation.title}: there are no tests {name}")
    return mutations


def passes(package: str, tests: Iterable[str], mutation: Mutation | None, timeout_s: float) -> bool:
    """Whether these tests of a package pass on a copy of its sources, which holds the mutation.

    Raises:
        RuntimeError: There were no tests to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / package / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            mutated = source / mutation.file
            mutated.write_text(mutated.read_text().replace(mutation.before, mutation.after))
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        files = [str(ROOT / package / name) for name in tests]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return False  # it hangs, which is noticed too
    if run.returncode == _NO_TESTS:
        raise RuntimeError(f"{package} has no tests in {', '.join(files)}")
    return run.returncode == 0


def _check_unchanged(package: str, mutations: Iterable[Mutation]) -> float:
    """How long, at most, the tests of a package's mutations take without any of them.

    Raises:
        RuntimeError: They fail.
    """
    tests = sorted({name for mutation in mutations for name in mutation.tests})
    begin_s = time.monotonic()
    if not passes(package, tests, None, timeout_s=3600):
        raise RuntimeError(f"the tests of {package} fail without a mutation: {', '.join(tests)}")
    return time.monotonic() - begin_s


def run_all(mutations: list[Mutation], jobs: int) -> list[tuple[Mutation, bool]]:
    """Each mutation and whether it was killed, printed as it comes.

    Raises:
        RuntimeError: Tests fail without a mutation.
    """
    packages: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        packages.setdefault(mutation.package, []).append(mutation)
    found = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            checks = {name: pool.submit(_check_unchanged, name, members) for name, members in packages.items()}
            timeouts = {name: max(_LEAST_TIMEOUT_S, _TIMEOUT_FACTOR * check.result()) for name, check in checks.items()}
            futures = [(m, pool.submit(passes, m.package, m.tests, m, timeouts[m.package])) for m in mutations]
            for mutation, future in futures:
                killed = not future.result()
                print("killed  " if killed else "SURVIVED", mutation.title, flush=True)
                found.append((mutation, killed))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _line(text: str, longest: int = 60) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= longest else joined[: longest - 3] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests of each package on copies that hold a mutation.")
    parser.add_argument("--only", help="names of packages, separated by commas")
    parser.add_argument("--match", help="only mutations whose title holds this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutations at once")
    parser.add_argument("--least", type=float, default=0.95, help="share that must be killed")
    options = parser.parse_args()
    mutations = read_mutations()
    if options.only:
        mutations = [each for each in mutations if Path(each.package).name in options.only.split(",")]
    if options.match:
        mutations = [each for each in mutations if options.match in each.title]
    if not mutations:
        parser.error("no mutation is left to run")
    found = run_all(mutations, options.jobs)
    num_killed = sum(killed for _, killed in found)
    share = num_killed / len(found)
    print(f"{num_killed} of {len(found)} mutations killed: {share:.1%}")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
