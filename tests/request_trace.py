"""Which files carry a request from HTTP to the network: asks a server with the demo model one question and looks.

    python tests/request_trace.py

A file carries the request when one of its functions is on the call stack at a hand-over: when the front takes the
request, when it leaves the API process, when it enters the scheduler's queue, and when the network is called with its
prompt. Stacks begin at the route's handler in the API process, and at the core's loop in the engine process. What only
looks at the request and returns (renderers, checks, the KV cache, samplers) carries nothing, nor does what passes bytes
on before there is a request (the HTTP protocol, the guards of the app). The network is where the way ends.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FACTORY = "request_trace:build_traced_engine"


class StackTrace:
    """Notes whose functions are on the stack when one of the `hand_overs` is called.

    Args:
        root: The function at which stacks begin.
        hand_overs: Functions whose call hands the request over.
        end: Folder of the modules with whose first `forward` the way ends; their files are not noted.
    """

    def __init__(
        self,
        root: Callable[..., Any],
        hand_overs: tuple[Callable[..., Any], ...],
        end: Path | None = None,
    ) -> None:
        self._root = _code(root)
        self._hand_overs = {_code(each) for each in hand_overs}
        self._end = end
        self.files: list[str] = []
        """Below the repository, in the order in which the request came to them."""

    def __enter__(self) -> StackTrace:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code in self._hand_overs:
            self._note(frame)
        elif self._end is not None and frame.f_code.co_name == "forward" and self._end in _path(frame).parents:
            self._end = None
            self._note(frame.f_back)

    def _note(self, frame: FrameType | None) -> None:
        stack: list[str] = []
        while frame is not None:
            path = _path(frame)
            if path.is_relative_to(ROOT) and "src" in path.parts:
                stack.append(str(path.relative_to(ROOT)))
            if frame.f_code is self._root:
                break
            frame = frame.f_back
        self.files += [path for path in dict.fromkeys(reversed(stack)) if path not in self.files]


def _path(frame: FrameType) -> Path:
    return Path(frame.f_code.co_filename)


def _code(function: Callable[..., Any]) -> CodeType:
    return inspect.unwrap(function).__code__  # type: ignore[attr-defined]


def build_traced_engine(config: dict[str, Any], report: Callable[[str, float], None]) -> Any:
    """The engine of `quire.assemble` (an `EngineFactory`), whose loop writes the files of its side when it ends."""
    from quire.assemble import engine_factory
    from quire_engine import CoreLoop
    from quire_scheduler import Scheduler

    path = Path(config.pop("trace_path"))
    parts = engine_factory(config, report)
    run = CoreLoop.run

    def traced_run(loop: CoreLoop) -> None:
        trace = StackTrace(run, (Scheduler.add_request,), end=ROOT / "packages" / "models" / "src")
        try:
            with trace:
                run(loop)
        finally:
            path.write_text(json.dumps(trace.files))

    CoreLoop.run = traced_run  # type: ignore[method-assign]
    return parts


async def trace_request() -> list[str]:
    """The files that carry one chat request, in order."""
    import httpx

    from quire import AsyncLLM, QuireConfig
    from quire_engine import AsyncEngine, ProcessClient
    from quire_observability import EngineMetrics
    from quire_server.app import make_app
    from quire_server.chat import chat_completions
    from quire_server.config import ServerConfig
    from quire_server.context import ServerContext

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "files.json"
        config = QuireConfig.of(max_model_len=256, num_threads=1)
        llm = AsyncLLM.start(config, factory=(FACTORY, {**config.to_dict(), "trace_path": str(path)}))
        try:
            await llm.ready()
            context = ServerContext(llm=llm, config=ServerConfig(), metrics=EngineMetrics(), model_names=("demo",))
            transport = httpx.ASGITransport(make_app(context))
            body = {"messages": [{"role": "user", "content": "What is 12 + 34?"}], "max_tokens": 4, "stream": True}
            trace = StackTrace(chat_completions, (AsyncEngine.generate, ProcessClient._send))
            async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
                with trace:
                    response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
        finally:
            await llm.client.shutdown(5.0)
        return trace.files + [file for file in json.loads(path.read_text()) if file not in trace.files]


def main() -> None:
    files = asyncio.run(trace_request())
    for number, path in enumerate(files, 1):
        print(f"{number:2} {path}")


if __name__ == "__main__":
    main()
