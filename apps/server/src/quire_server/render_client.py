"""The engine's side of a server that has none (`quire launch render`): routes that need none, what one would say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from quire import AsyncLLM, QuireConfig
from quire.adapters import offered_adapters, takes_adapters
from quire.assemble import model_folder, read_model_config
from quire.config import LONGEST_THAT_FITS
from quire_engine import EngineInfo, HubClient
from quire_engine.client import PauseMode
from quire_engine.messages import AddRequest
from quire_engine.streams import OutputStream
from quire_interfaces import (
    AdapterInfo,
    ConfigError,
    EngineDeadError,
    FinishReason,
    Modality,
    RequestError,
    SchedulerStats,
)
from quire_interfaces.engine_watch import RequestRecord, WatchCursor, WatchReport
from quire_structured_output import resolve_backend

__all__ = ["RENDER_PATHS", "RenderClient", "render_info", "render_llm", "renders_only"]

RENDER_PATHS = frozenset(
    {
        "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/render",
        "/v1/completions/derender", "/v1/messages/render", "/v1/messages/count_tokens", "/v1/responses/render",
        "/v1/responses/input_tokens", "/tokenize", "/detokenize", "/tokenizer_info", "/health", "/ping", "/ready",
        "/version", "/load", "/v1/models", "/v1/models/{name:path}", "/v1/usage", "/metrics",
    }
)  # fmt: skip
"""Routes that need no engine."""


def renders_only(llm: AsyncLLM) -> bool:
    """Whether there is no engine behind it."""
    return isinstance(llm.client, RenderClient)


def render_info(config: QuireConfig) -> EngineInfo:
    """What an engine of these settings would say of itself, as far as requests are checked by it.

    Raises:
        CheckpointError, ConfigError: the model or a setting is wrong.
    """
    model = read_model_config(config, model_folder(config))
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_model_len and not model.has_positions_without_end:
        raise ConfigError(
            f"max_model_len {asked} is more than the model's context of {model.max_model_len} tokens; lower it",
            field="max_model_len",
        )
    media = () if model.media is None else tuple(map(str, model.media.modalities))
    return EngineInfo(
        model=config.model.model or "quire-demo",
        max_model_len=model.max_model_len if asked in (None, LONGEST_THAT_FITS) else int(asked or 0),
        vocab_size=model.vocab_size,
        max_encoder_len=model.max_encoder_len,
        modalities=(*media, str(Modality.EMBEDS)) if config.media.enable_prompt_embeds else media,
        decoder_start_token_ids=model.decoder_start_token_ids,
        device="none",
        # What an engine cannot promise, it refuses itself.
        batch_invariant=True,
        adapters=offered_adapters(config),
        default_mm_adapters=config.lora.default_adapters(),
        takes_adapters=takes_adapters(config),
        structured_output_backend=resolve_backend(config.structured_output.backend),
        max_grammar_bytes=config.structured_output.max_bytes,
        returns_routed_experts=config.model.enable_return_routed_experts,
    )


class RenderClient:
    """An `EngineClient` without an engine: it knows what one would be, and runs nothing."""

    def __init__(self, config: QuireConfig) -> None:
        self._config = config
        self._is_shut_down = False
        self.info: EngineInfo | None = None
        self.on_progress: Any = None

    @property
    def adapters(self) -> Mapping[str, str]:
        return {} if self.info is None else self.info.adapters

    def start(self) -> None:
        """Nothing is to be started."""

    async def ready(self) -> EngineInfo:
        self.info = render_info(self._config)
        return self.info

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError(
            "this server renders and tokenizes only (quire launch render); ask one that has an engine",
            param=None,
            code="unsupported",
        )

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """No request runs."""

    def abort_all(self) -> None:
        """No request runs."""

    def num_requests(self) -> int:
        return 0

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        self._refuse()

    async def resume(self) -> None:
        self._refuse()

    async def is_paused(self) -> bool:
        return False

    async def sleep(self, level: int = 1) -> int:
        self._refuse()

    async def wake_up(self, tags: Sequence[str] = ()) -> int | None:
        self._refuse()

    async def sleep_level(self) -> int | None:
        return None

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        self._refuse()

    async def reset_encoder_cache(self) -> bool:
        self._refuse()

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        self._refuse()

    async def unload_adapter(self, name: str) -> None:
        self._refuse()

    async def engine_ranks(self) -> list[int]:
        return []

    async def watch(self, rank: int, watcher: str, cursor: WatchCursor) -> WatchReport:
        self._refuse()

    async def leave_watch(self, watcher: str) -> None:
        """Nobody watches."""

    async def explain_request(self, request_id: str) -> RequestRecord | None:
        return None

    async def stats(self) -> SchedulerStats:
        return SchedulerStats()

    async def ping(self) -> float:
        return 0.0

    async def check_integrity(self) -> str | None:
        return None

    def check_health(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("the server was shut down")

    @property
    def is_loading(self) -> bool:
        return self.info is None

    @property
    def is_resting(self) -> bool:
        return False

    @property
    def is_stalled(self) -> bool:
        return False

    @property
    def stalled_s(self) -> float:
        return 0.0

    def kill(self) -> None:
        """Nothing is to be ended."""

    async def shutdown(self, drain_s: float | None = None) -> None:
        self._is_shut_down = True


def render_llm(config: QuireConfig, chat_template: str | None = None) -> AsyncLLM:
    """The front of an engine that is not there."""
    client = cast(HubClient, RenderClient(config))  # any EngineClient of another process will do
    return AsyncLLM(config, client=client, chat_template=chat_template)
