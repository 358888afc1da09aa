"""A folder of compiled kernels that can be shipped: made where there is no GPU, read where there is one.

It holds what Triton's own cache holds, under the same keys: hashes of a kernel's source, everything it calls, its
argument types and constants, the options, the target and the compiler. So a kernel that has changed is never found.
Unlike Triton's, it may be moved, and `manifest.json` says with which version it was written and what each file holds; a
file that holds something else is not read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["MANIFEST", "compiler_build", "read_manifest", "reading_class", "seal", "writing_class"]

_logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_GROUP = "__grp__"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the folder's manifest says: `triton`, `build` (`compiler_build`), `targets`, `files` (path -> SHA-256).

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if isinstance(manifest["files"], dict) and isinstance(manifest["triton"], str):
            return manifest
    except OSError as error:
        raise ConfigError(
            f"{folder} is no folder of kernels: {MANIFEST}: {error.strerror}; make one with quire compile-kernels",
            field="kernel_cache",
        ) from None
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{folder / MANIFEST} is damaged; run quire compile-kernels anew", field="kernel_cache")


@cache
def compiler_build() -> str:
    """What tells this build of Triton from others of its version: a part of every kernel's key."""
    from triton.runtime import cache as runtime_cache

    key = getattr(runtime_cache, "triton_key", None)
    if key is None:  # of some versions
        key = import_module("triton.compiler.compiler").triton_key
    return hashlib.sha256(key().encode()).hexdigest()


def seal(folder: Path, target: str) -> None:
    """Write down what is in the folder. Several processes may do so, one after another."""
    import triton

    with _locked(folder):
        paths = sorted(path for path in folder.glob("*/*") if path.is_file() and not path.name.startswith("lock"))
        files = {str(path.relative_to(folder)): _digest(path) for path in paths}
        targets = {target}
        if (folder / MANIFEST).exists():
            before = read_manifest(folder)
            if before["triton"] == triton.__version__:
                targets |= set(before.get("targets", ()))
        manifest = {
            "triton": triton.__version__, "build": compiler_build(), "targets": sorted(targets), "files": files
        }  # fmt: skip
        temporary = folder / f"{MANIFEST}.{os.getpid()}"
        temporary.write_text(json.dumps(manifest, indent=1))
        os.replace(temporary, folder / MANIFEST)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def writing_class(folder: Path) -> type:
    """Triton's manager of one kernel's files, writing into the folder; nothing in it says where the folder is."""
    from triton.runtime.cache import FileCacheManager

    class FolderWriter(FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.key = key
            self.cache_dir = str(folder / key)
            self.lock_path = str(folder / key / "lock")
            os.makedirs(self.cache_dir, exist_ok=True)

        def get_group(self, filename: str) -> dict[str, str] | None:
            return _read_group(Path(self.cache_dir), filename)

        def put_group(self, filename: str, group: dict[str, str]) -> str:
            names = {name: name for name in group}
            return str(self.put(json.dumps({"child_paths": names}), f"{_GROUP}{filename}", binary=False))

    return FolderWriter


def reading_class(folder: Path) -> type:
    """Triton's manager of one kernel's files, looking into the folder before anywhere else."""
    from triton.runtime.cache import FileCacheManager

    files: dict[str, str] = read_manifest(folder)["files"]

    @cache
    def is_whole(key: str) -> bool:
        """Whether the files of a kernel are as they were written."""
        mine = {name: digest for name, digest in files.items() if name.startswith(f"{key}/")}
        damaged = [name for name, digest in mine.items() if not _is_file(folder / name, digest)]
        if damaged:
            _logger.error("%s in the kernel cache is damaged, and is compiled anew", folder / damaged[0])
        return bool(mine) and not damaged

    class FolderReader(FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self._shipped = None if override or dump or not is_whole(key) else folder / key
            if self._shipped is None:
                super().__init__(key, override, dump)

        def get_file(self, filename: str) -> str | None:
            if self._shipped is None:
                return super().get_file(filename)  # type: ignore[no-any-return]
            path = self._shipped / filename
            return str(path) if path.is_file() else None

        def get_group(self, filename: str) -> dict[str, str] | None:
            if self._shipped is None:
                return super().get_group(filename)  # type: ignore[no-any-return]
            return _read_group(self._shipped, filename)

    return FolderReader


def _is_file(path: Path, digest: str) -> bool:
    return path.is_file() and _digest(path) == digest


def _read_group(folder: Path, filename: str) -> dict[str, str] | None:
    try:
        names = json.loads((folder / f"{_GROUP}{filename}").read_text())["child_paths"]
    except (OSError, ValueError, KeyError):
        return None
    paths = {name: folder / name for name in names}
    return {name: str(path) for name, path in paths.items()} if all(p.is_file() for p in paths.values()) else None
