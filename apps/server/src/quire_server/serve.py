"""From settings to a listening server: the engine process starts first, the web stack meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire import AsyncLLM, QuireConfig, __version__
from quire.demo import seeing_demo
from quire_engine import EngineInfo
from quire_interfaces import ConfigError, EngineDeadError, RequestError
from quire_observability import EngineMetrics, ThroughputLog
from quire_renderers import checked_template_kwargs
from quire_server.api_servers import HubProcess, num_api_processes
from quire_server.callers import APIKeys, read_api_keys
from quire_server.config import ServerConfig
from quire_server.exit_status import EngineStartError, ExitStatus
from quire_server.files.folder import check_files_dir
from quire_server.io_processors import load_io_processor
from quire_server.listening import address_of, bind, check_tls, listen
from quire_server.log_settings import begin_logging
from quire_server.mcp_servers import MCPServer, read_mcp_servers
from quire_server.metric_labels import label_metrics
from quire_server.middleware import load_middleware
from quire_server.response_store import check_response_store
from quire_server.scheduler_defaults import with_scheduler_defaults
from quire_server.stopping import Stopping, stopping_on_signals

if TYPE_CHECKING:
    from quire_server.context import ServerContext

__all__ = ["ready_engine", "serve", "serve_http", "start_progress"]

_logger = logging.getLogger(__name__)

Announce = Callable[["ServerContext", EngineInfo], None]
"""Called when the server answers."""
PROGRESS_EVERY_S = 10.0
"""Between two lines of the log that say how far the start is."""
SWITCH_INTERVAL_S = 0.001
"""How long worker threads, which read large requests, keep the event loop waiting for the interpreter lock. Python's
own 5 ms are lost with every write of every stream."""


def serve(
    config: QuireConfig, server: ServerConfig, *, factory: tuple[str, dict[str, Any]] | None = None
) -> ExitStatus:
    """Serve until SIGTERM or Ctrl-C; running requests finish first. Returns the exit status.

    Args:
        config: Settings of the engine.
        server: Settings of the HTTP side.
        factory: Another engine than the configured one; see `AsyncLLM`.

    Raises:
        QuireError: the port is taken, the model is wrong, or the engine could not start.
    """
    start_s = time.monotonic()
    config = seeing_demo(config)
    chat_template, mcp_servers = _begin(server)
    config = with_scheduler_defaults(read_api_keys(server), config)
    check_tls(server)
    if _serves_grpc(server):
        from quire_server.grpc_service.server import check_grpc

        check_grpc(server)
    num_processes = num_api_processes(config, server)
    run = _runner()
    try:
        with stopping_on_signals() as stopping, bind(server) as listening:
            if server.uds is not None:
                stopping.before_end(Path(server.uds).unlink)
            metrics = EngineMetrics(prefix=server.metrics_prefix)
            llm = AsyncLLM(config, listener_of=metrics.of_engine, chat_template=chat_template, factory=factory)
            second = _pooling_llm(config, server)
            _logger.info("Quire %s loads %s", __version__, config.model.model or "the embedded demo model")
            for each in (llm,) if second is None else (llm, second.llm):
                stopping.before_end(each.kill)
                try:
                    each.client.start()
                except OSError as error:
                    raise EngineStartError(f"the engine process cannot be started: {error.strerror}") from None

            def announce(pooling: EngineInfo | None, info: EngineInfo) -> None:
                _announce(info, pooling, server, listening, time.monotonic() - start_s)

            if num_processes > 1:
                processes = HubProcess(llm, server, metrics, listening, num_processes, stopping)
                stopping.before_end(processes.kill)
                throughput = ThroughputLog()
                death = functools.partial(_engine_death, (llm,))
                log = functools.partial(_log_throughput, throughput, metrics, server)
                status = run(processes.run(_engines_ready, functools.partial(announce, None), (death, log)))
                if not server.disable_log_stats:
                    throughput.tell_totals(metrics.stats, metrics.num_finished)
                return status

            def announce_all(context: ServerContext, info: EngineInfo) -> None:
                announce(None if second is None else second.llm.engine.info, info)

            return run(_serve(llm, server, metrics, listening, mcp_servers, stopping, second, announce_all))
    finally:
        gc.enable()


def serve_http(
    server: ServerConfig,
    stopping: Stopping,
    listening: socket.socket,
    make_llm: Callable[[str | None], AsyncLLM],
    metrics: EngineMetrics,
    announce: Announce,
) -> ExitStatus:
    """Serve on one of several API processes, whose engine is another process's. Returns the exit status.

    Args:
        server: Settings.
        stopping: Signals.
        listening: What connections come from; others may take some, too.
        make_llm: Makes the front of the engine, with a chat template.
        metrics: What the requests of this process are counted in.
        announce: Called when it answers.

    Raises:
        QuireError: the model is wrong, or the engine could not start.
    """
    chat_template, mcp_servers = _begin(server)
    llm = make_llm(chat_template)
    stopping.before_end(llm.kill)
    try:
        return _runner()(_serve(llm, server, metrics, listening, mcp_servers, stopping, None, announce))
    finally:
        gc.enable()


def _begin(server: ServerConfig) -> tuple[str | None, dict[str, MCPServer]]:
    """Set this process up, and check settings that name files. The chat template, and MCP servers by label.

    Raises:
        ConfigError: a setting is wrong.
    """
    begin_logging(server)
    gc.disable()  # until everything is there that stays
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    chat_template = read_template(server.chat_template)
    mcp_servers = read_mcp_servers(server.mcp_servers, server.mcp_timeout_s)
    check_response_store(server)
    check_files_dir(server)
    if server.io_processor_plugin is not None:
        load_io_processor(server.io_processor_plugin)
    if server.diarizer_plugin is not None:
        from quire_server.speech.diarizers import load_diarizer

        load_diarizer(server.diarizer_plugin)
    if server.otlp_traces_endpoint is not None:
        from quire_server.tracing import check_endpoint

        check_endpoint(server.otlp_traces_endpoint)
    for path in server.middleware:
        load_middleware(path)
    read_api_keys(server)
    _check_template_kwargs(server.default_chat_template_kwargs)
    return chat_template, mcp_servers


def _serves_grpc(server: ServerConfig) -> bool:
    return server.grpc_port is not None or server.grpc_uds is not None


def _runner() -> Callable[[Coroutine[Any, Any, ExitStatus]], ExitStatus]:
    """What runs an event loop."""
    with contextlib.suppress(ImportError):  # not there on every platform
        import uvloop

        return uvloop.run
    return asyncio.run


class PoolingModel(NamedTuple):
    """The second model of a server."""

    llm: AsyncLLM
    metrics: EngineMetrics


def _pooling_llm(config: QuireConfig, server: ServerConfig) -> PoolingModel | None:
    """The second model, on the device of the first; None where there is none. Its metrics have a prefix of their own.

    Raises:
        ConfigError: the device has no such setting.
    """
    if server.pooling_model is None:
        return None
    runner = config.runner
    settings = QuireConfig.of(
        model=server.pooling_model, runner="pooling", device=runner.device, num_threads=runner.num_threads
    )
    metrics = EngineMetrics(prefix=f"{server.metrics_prefix}_pooling")
    return PoolingModel(AsyncLLM(settings, listener=metrics), metrics)


async def _serve(
    llm: AsyncLLM,
    server: ServerConfig,
    metrics: EngineMetrics,
    listening: socket.socket,
    mcp_servers: dict[str, MCPServer],
    stopping: Stopping,
    second: PoolingModel | None,
    announce: Announce,
) -> ExitStatus:
    # The engine loads in its own process while this one imports its libraries.
    from quire_server.context import ServerContext
    from quire_server.draining import drain
    from quire_server.http_server import make_http_server

    gc.freeze()
    watchers: list[asyncio.Future[None]] = []
    throughput = ThroughputLog()
    try:
        with start_progress(llm):
            info = await ready_engine(llm)
            if second is not None:
                second.metrics.set_labels(model_name=(await ready_engine(second.llm)).model, engine="1")
        names = server.served_model_name or (info.model,)
        context = ServerContext(
            llm=llm,
            config=server,
            metrics=metrics,
            model_names=names,
            pooling_llm=None if second is None else second.llm,
            pooling_metrics=None if second is None else second.metrics,
            mcp_servers=mcp_servers,
        )
        label_metrics(metrics, names[0], llm.config, info)
        metrics.adapter_labels = context.adapter_labels
        http = make_http_server(context)
        if _serves_grpc(server):
            from quire_server.grpc_service.server import start_grpc

            context.state.background.append((await start_grpc(context)).run)
        listen(listening, server)
        stopped = asyncio.ensure_future(stopping.drains().wait())
        running = asyncio.ensure_future(http.serve(sockets=[listening]))
        while not (http.started or running.done()):  # who reads the banner may connect
            await asyncio.sleep(0.005)
        # What was made until now stays for good: the collector would walk it while every stream waits, 40 ms at a time.
        gc.collect()
        gc.freeze()
        gc.enable()
        announce(context, info)
        dead = asyncio.ensure_future(_engine_death(context.llms))
        watchers = [dead, asyncio.ensure_future(_log_throughput(throughput, metrics, server))]
        await asyncio.wait((running, stopped, dead), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await drain(context, http, running, delay_s=server.drain_delay_s if stopping.signal == signal.SIGTERM else 0.0)
        if dead.done():
            dead.result()
        return ExitStatus.OK
    finally:
        for task in watchers:
            task.cancel()
        for mcp_server in mcp_servers.values():
            await mcp_server.close()
        await llm.shutdown()
        if second is not None:
            await second.llm.shutdown()
        if watchers and not server.disable_log_stats:
            throughput.tell_totals(metrics.stats, metrics.num_finished)


async def ready_engine(llm: AsyncLLM) -> EngineInfo:
    with _start_errors():
        return await llm.ready()


async def _engines_ready(llm: AsyncLLM) -> EngineInfo:
    """The same, where nothing but the engines is in this process."""
    with _start_errors():
        return await llm.client.ready()


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Raise what an engine that could not start means for this program."""
    try:
        yield
    except EngineDeadError as error:
        raise (ConfigError if error.is_wrong_setting else EngineStartError)(str(error)) from None


async def _log_throughput(throughput: ThroughputLog, metrics: EngineMetrics, server: ServerConfig) -> None:
    while not server.disable_log_stats:
        await asyncio.sleep(server.log_stats_interval_s)
        throughput.tell(metrics.stats)


async def _engine_death(llms: Sequence[AsyncLLM]) -> None:
    """Ends, with the engine's own error, when an engine is gone for good: whoever supervises this process is better
    at starting it again than at guessing from answers that it should."""
    while True:
        for llm in llms:
            llm.client.check_health()
        await asyncio.sleep(1.0)


def read_template(value: str | None) -> str | None:
    """A chat template from a file's name, or given as it is.

    Raises:
        ConfigError: it looks like a file's name and there is no such file.
    """
    if value is None or "{%" in value or "{{" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise ConfigError(f"there is no chat template file {value!r}", field="chat_template")
    return path.read_text(encoding="utf-8")


def _check_template_kwargs(values: dict[str, Any] | None) -> None:
    try:
        checked_template_kwargs(values)
    except RequestError as error:
        raise ConfigError(f"default_{error}", field="default_chat_template_kwargs") from None


@contextlib.contextmanager
def start_progress(llm: AsyncLLM) -> Iterator[None]:
    """A progress bar on a terminal while the engine starts, elsewhere lines in the log where it takes long."""
    if not sys.stderr.isatty():
        told_s = time.monotonic()

        def tell(stage: str, fraction: float) -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= PROGRESS_EVERY_S:
                told_s = time.monotonic()
                _logger.info("%s: %.0f %%", stage, 100 * fraction, extra={"stage": stage, "fraction": fraction})

        llm.client.on_progress = tell
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting the engine", total=1.0)

        def show(stage: str, fraction: float) -> None:
            bar.update(task, description=stage, completed=fraction)

        llm.client.on_progress = show
        yield


def _announce(
    info: EngineInfo, pooling: EngineInfo | None, server: ServerConfig, listening: socket.socket, seconds: float
) -> None:
    if server.banner and server.log_format == "text":
        print(banner(info, pooling, server, listening, seconds), flush=True)
        return
    facts = {"model": info.model, "address": address_of(listening, server), "ready_after_s": round(seconds, 1)}
    if pooling is not None:
        facts["pooling_model"] = pooling.model
    _logger.info("ready: {model} at {address}, after {ready_after_s} s".format(**facts), extra=facts)


def banner(
    info: EngineInfo, pooling: EngineInfo | None, server: ServerConfig, listening: socket.socket, seconds: float
) -> str:
    """What was started, and why it was chosen so.

    Args:
        info: Of the served model.
        pooling: Of the second model, which pools; None where there is none.
        server: Settings.
        listening: Socket of the server.
        seconds: How long the start took.
    """
    from quire.plan import format_bytes

    address = address_of(listening, server)
    weights = sum(size for what, size in info.memory_bytes.items() if what.startswith("weights"))
    cache = info.memory_bytes.get("KV cache", 0)
    memory, concurrency = f"{format_bytes(weights)} weights", f"up to {info.max_num_seqs} requests at a time"
    if info.num_blocks:
        memory += f" + {format_bytes(cache)} KV cache = {info.num_blocks} blocks of {info.block_size} tokens"
        concurrency += f"; the KV cache holds {info.extra.get('max_concurrency', 0):.1f} of full length"
    lines = {
        **({} if info.runner == "pooling" else {"chat page": f"{address}/"}),
        "OpenAI API": f"{address}/v1",
        "model": f"{info.model} ({info.dtype} on {info.device}, context {info.max_model_len} tokens)",
        "memory": memory,
        "concurrency": concurrency,
        **info.choices,
        **({} if pooling is None else {"pooling model": _pooling_line(pooling)}),
        "access": _access(read_api_keys(server)),
        "ready after": f"{seconds:.1f} s",
    }
    notes = [f"  note: {note}" for note in info.extra.get("notes", [])]
    return "\n".join(["Quire", *(f"  {name + ':':<19}{value}" for name, value in lines.items()), *notes])


def _pooling_line(info: EngineInfo) -> str:
    """The second model: what it is, what it takes of the memory, and what can be asked of it."""
    from quire.plan import format_bytes

    memory = format_bytes(sum(info.memory_bytes.values()))
    tasks = ", ".join(info.pooling_tasks)
    return f"{info.model} ({info.dtype} on {info.device}, texts of {info.max_model_len} tokens, {memory}: {tasks})"


def _access(keys: APIKeys) -> str:
    if keys.is_open:
        return "no API key: anyone who reaches the address may use it"
    return f"API key required ({keys.num_keys} known)"
