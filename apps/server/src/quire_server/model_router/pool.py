"""Which models of a folder are loaded: on demand, at most so many, the least recently used one gives way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.available_memory import available_memory_bytes
from quire_interfaces import ModelNotFoundError
from quire_models.made_folder import is_mistral_format
from quire_server.errors import HTTPError
from quire_server.model_router.process import ModelProcess

__all__ = ["ModelPool", "find_models"]

_logger = logging.getLogger(__name__)

IDLE_LOOK_S = 0.5
"""How often to look for models that nobody uses any more."""
WEIGHTS_SHARE = 0.8
"""Of free memory that the weights of one more model may take; the rest is for its KV cache and its processes."""


def find_models(folder: Path) -> dict[str, Path]:
    """Name -> place of each model in a folder: its subfolders with a config.json, GGUF files or Mistral's own
    format, and its GGUF files."""
    models = {}
    for path in sorted(folder.iterdir()):
        is_checkpoint = path.is_dir() and (
            (path / "config.json").is_file() or any(path.glob("*.gguf")) or is_mistral_format(path)
        )
        if is_checkpoint or path.suffix == ".gguf":
            models[path.name if path.is_dir() else path.stem] = path
    return models


class ModelPool:
    """All models of a folder.

    Args:
        folder: Holds the models.
        settings: Of each model's server.
        work_folder: For sockets; nobody else may read it.
        most: How many may be loaded at a time; 0 for any number.
        ttl_s: A model without requests for so long is unloaded; 0 keeps it.
        stop_timeout_s: How long running requests have when a model is stopped.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        work_folder: Path,
        *,
        most: int,
        ttl_s: float,
        stop_timeout_s: float,
    ) -> None:
        self._folder, self._settings, self._work_folder = folder, settings, work_folder
        self._most, self._ttl_s, self._stop_timeout_s = most, ttl_s, stop_timeout_s
        self._placing = asyncio.Lock()
        self._is_changed = asyncio.Condition()
        self.models: dict[str, ModelProcess] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for models that are new, and forget those that are gone and not loaded."""
        found = find_models(self._folder)
        for name in [name for name, each in self.models.items() if name not in found and not each.is_alive]:
            del self.models[name]
        for name, path in found.items():
            if name not in self.models:
                place = self._work_folder / f"{len(self.models)}-{time.monotonic_ns()}"
                self.models[name] = ModelProcess(name, path, self._settings, place, stop_timeout_s=self._stop_timeout_s)

    def find(self, name: str) -> ModelProcess:
        """The model of a name, which may have the tag `:latest`.

        Raises:
            ModelNotFoundError: there is none.
        """
        for known in (name, name.removesuffix(":latest")):
            if known in self.models:
                return self.models[known]
        self.refresh()
        if name not in self.models:
            known_names = ", ".join(map(repr, self.models)) or "none"
            raise ModelNotFoundError(f"the model {name!r} is not in the models' folder; there are {known_names}")
        return self.models[name]

    @property
    def loaded(self) -> list[ModelProcess]:
        """Models with a process."""
        return [each for each in self.models.values() if each.is_alive]

    @contextlib.asynccontextmanager
    async def using(self, name: str, *, loads: bool = True) -> AsyncGenerator[ModelProcess, None]:
        """The model, loaded, which is not unloaded inside.

        Args:
            name: Its name.
            loads: Whether to load it where it is not.

        Raises:
            ModelNotFoundError: there is none of this name.
            HTTPError: 503, it is not loaded, or cannot be.
        """
        model = self.find(name)
        model.num_requests += 1
        try:
            if not (model.is_alive and model.status == "loaded"):
                if not loads:
                    raise HTTPError(
                        503, f"the model {name!r} is not loaded: POST /models/load loads it", code="model_not_loaded"
                    )
                async with self._placing:
                    await self._make_room(model)
                    await model.start()
            yield model
        finally:
            model.num_requests -= 1
            model.last_used_s = time.monotonic()
            async with self._is_changed:
                self._is_changed.notify_all()

    async def _make_room(self, wanted: ModelProcess) -> None:
        """Unload models that were used the longest ago until there is a place, and memory for the weights."""
        while True:
            others = [each for each in self.loaded if each is not wanted]
            is_full = self._most and len(others) >= self._most
            if not is_full and (not others or _weights_bytes(wanted.path) <= WEIGHTS_SHARE * available_memory_bytes()):
                return
            idle = [each for each in others if each.num_requests == 0]
            if idle:
                await min(idle, key=lambda each: each.last_used_s).stop()
            elif is_full:
                async with self._is_changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._is_changed.wait(), IDLE_LOOK_S)
            else:
                return  # its own planner says whether it fits

    async def unload(self, name: str) -> None:
        """Let its requests finish, and end its process. Raises ModelNotFoundError."""
        await self.find(name).stop()

    async def unload_idle(self) -> None:
        """Unload, for ever, what nobody has used for its time."""
        while True:
            await asyncio.sleep(IDLE_LOOK_S)
            for model in self.loaded:
                ttl_s = self._ttl_s if model.ttl_s is None else model.ttl_s
                is_timed = model.ttl_s is not None or self._ttl_s > 0
                is_old = time.monotonic() - model.last_used_s >= ttl_s
                if is_timed and is_old and model.num_requests == 0 and model.status == "loaded":
                    _logger.info("%s was not used for %g s", model.name, ttl_s)
                    await model.stop()

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(each.stop() for each in self.loaded))

    def kill(self) -> None:
        """End all processes at once."""
        for each in self.loaded:
            each.kill()


def _weights_bytes(path: Path) -> int:
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.suffix in (".safetensors", ".gguf", ".bin"))
