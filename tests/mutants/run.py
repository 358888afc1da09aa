"""Applies each mutation of `mutations.toml` to a copy of its package and runs that package's own tests on the copy.

    nox -s mutants                                  every mutation, and the score
    nox -s mutants -- --only kv-cache,scheduler     those of some packages
    nox -s mutants -- --jobs 1                      one at a time

A mutation is killed when the package's tests fail. One that survives shows something that no test holds. The checkout
itself is never changed: tests import the copy, which stands first on the path.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTATIONS = Path(__file__).with_name("mutations.toml")
_TIMEOUT_S = 1200
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
    tests: str = "tests"
    """Where the tests that should notice stand within the package, for packages whose tests take long."""

    @property
    def title(self) -> str:
        """What is changed, in a line."""
        return f"{self.package} {self.file}: {_line(self.before)} -> {_line(self.after)}"


def read_mutations(path: Path = MUTATIONS) -> list[Mutation]:
    """The committed list.

    Raises:
        ValueError: A mutation's `before` does not stand exactly once in its file, or `after` is the same.
    """
    with path.open("rb") as file:
        mutations = [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]
    for mutation in mutations:
        source = (ROOT / mutation.package / "src" / mutation.file).read_text()
        count = source.count(mutation.before)
        if count != 1:
            raise ValueError(f"{mutation.title}: stands {count} times in the file, must stand there once")
        if mutation.before == mutation.after:
            raise ValueError(f"{mutation.title}: changes nothing")
    return mutations


def is_killed(mutation: Mutation) -> bool:
    """Whether the package's tests fail on a copy that holds the mutation.

    Raises:
        RuntimeError: There were no tests to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / mutation.package / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        mutated = source / mutation.file
        mutated.write_text(mutated.read_text().replace(mutation.before, mutation.after))
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        tests = ROOT / mutation.package / mutation.tests
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(tests)]
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return True  # it hangs, which is noticed too
    if run.returncode == _NO_TESTS:
        raise RuntimeError(f"{mutation.title}: {mutation.package}/{mutation.tests} has no tests")
    return run.returncode != 0


def run_all(mutations: Iterable[Mutation], jobs: int) -> list[tuple[Mutation, bool]]:
    """Each mutation and whether it was killed, printed as it comes."""
    found = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [(mutation, pool.submit(is_killed, mutation)) for mutation in mutations]
        for mutation, future in futures:
            killed = future.result()
            print("killed  " if killed else "SURVIVED", mutation.title, flush=True)
            found.append((mutation, killed))
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
