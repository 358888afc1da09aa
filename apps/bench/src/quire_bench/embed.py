"""`quire bench embed`: texts per second, and the time of one text alone, in this process or of a server.

Texts are token ids of exact lengths, which both take, so that no tokenizer is measured. Knows nothing of the engine
behind an address.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire_bench.report import percentiles
from quire_bench.serve import ServeLoad
from quire_interfaces import ConfigError, QuireError

if TYPE_CHECKING:
    from quire import LLM

__all__ = ["EmbedTexts", "ServerEmbedder", "embed_offline", "measure_embedding"]

EmbedTexts = Callable[[Sequence[list[int]]], object]
"""Embeds texts of token ids, which it gets all at once."""


def measure_embedding(
    embed: EmbedTexts,
    texts: Sequence[list[int]],
    *,
    repeats: int,
    num_latencies: int,
    on_run: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Embed all texts at once, `repeats` times, then some of them one after another; one run before does not count.

    Args:
        embed: What embeds.
        texts: Token ids of each.
        repeats: Runs over all texts.
        num_latencies: Texts that are sent one after another.
        on_run: Called after each run over all texts.

    Returns:
        Counts, the median rates, the rate of each run, and percentiles of the times of single texts in seconds.

    Raises:
        ConfigError: A number below 1.
    """
    for name, count in (("repeats", repeats), ("num_latencies", num_latencies), ("num_prompts", len(texts))):
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}", field=name)
    embed(texts)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        embed(texts)
        rates.append(len(texts) / (time.perf_counter() - start))
        on_run()
    times = []
    for number in range(num_latencies):
        start = time.perf_counter()
        embed([texts[number % len(texts)]])
        times.append(time.perf_counter() - start)
    num_tokens = sum(map(len, texts))
    return {
        "num_texts": len(texts),
        "input_tokens": num_tokens,
        "texts_per_s": median(rates),
        "input_tokens_per_s": median(rates) * num_tokens / len(texts),
        "rates_texts_per_s": rates,
        "latency_s": percentiles(times),
    }


def embed_offline(llm: LLM) -> EmbedTexts:
    """Texts through `LLM.embed`."""
    return lambda texts: llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)


class ServerEmbedder:
    """Texts through a server's `/v1/embeddings`, some in each request, over connections that are kept.

    Args:
        load: Address, key, model, requests in flight, and bound on each request.
        batch_size: Texts of a request.

    Raises:
        ConfigError: batch_size below 1.
        QuireError: No model was named, and the server does not say which it has.
    """

    def __init__(self, load: ServeLoad, batch_size: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}", field="batch_size")
        self._load, self._batch_size = load, batch_size
        self._free: list[http.client.HTTPConnection] = []
        self._threads = ThreadPoolExecutor(load.max_concurrency or 16)
        self._model = load.model or str(self._ask("GET", "/v1/models", None)["data"][0]["id"])

    def __call__(self, texts: Sequence[list[int]]) -> None:
        """Embed all texts.

        Raises:
            QuireError: A request failed.
        """
        batches = [texts[i : i + self._batch_size] for i in range(0, len(texts), self._batch_size)]
        list(self._threads.map(self._embed, batches))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._threads.shutdown()
        for connection in self._free:
            connection.close()

    def _embed(self, texts: Sequence[list[int]]) -> None:
        body = {"model": self._model, "input": list(texts), "encoding_format": "base64", **self._load.extra_body}
        answer = self._ask("POST", "/v1/embeddings", body)
        if len(answer["data"]) != len(texts):
            raise QuireError(f"the server answered {len(answer['data'])} embeddings for {len(texts)} texts")

    def _ask(self, method: str, route: str, body: Any) -> Any:
        address = urlsplit(self._load.url(route))
        try:
            connection = self._free.pop()
        except IndexError:
            kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
            connection = kind(address.netloc, timeout=self._load.timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, address.path, data, {"Content-Type": "application/json", **self._load.headers()})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise QuireError(f"{method} {self._load.url(route)} failed: {type(error).__name__}: {error}") from error
        self._free.append(connection)
        if response.status != 200:
            text = content[:300].decode(errors="replace")
            raise QuireError(f"{method} {self._load.url(route)}: HTTP {response.status}: {text}")
        return json.loads(content)
