"""A server that sleeps: requests wait or are refused, memory comes back, and answers are the same afterwards."""

from __future__ import annotations

import concurrent.futures
import json
import re
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

BODY = {"model": "quire-demo", "prompt": list(range(3, 1003)), "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(quire_serve: Any) -> Any:
    """(client, process)."""
    process = quire_serve("--enable-sleep-mode", "--kv-cache-memory-bytes", "256Mi")
    with httpx.Client(base_url=process.url(), timeout=60) as client:
        yield client, process


def resident(process: Any) -> int:
    """Bytes of the server's processes together."""
    whole = psutil.Process(process.popen.pid)
    return sum(each.memory_info().rss for each in (whole, *whole.children(recursive=True)))


def complete(client: httpx.Client, **fields: Any) -> Any:
    response = client.post("/v1/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def stream(client: httpx.Client, has_begun: threading.Event, **fields: Any) -> Any:
    """The text of `complete`, put together from a stream; says when its first token is there."""
    text = ""
    with client.stream("POST", "/v1/completions", json={**BODY, **fields, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            has_begun.set()
    return text


def sleep_states(client: httpx.Client) -> set[str]:
    """What `engine_sleep_state` says that it holds."""
    return set(re.findall(r'quire:engine_sleep_state\{.*sleep_state="(\w+)"\} 1', client.get("/metrics").text))


def cached_tokens(client: httpx.Client, **fields: Any) -> int:
    usage = client.post("/v1/completions", json={**BODY, **fields}).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_level_0_lets_requests_wait(served: Any) -> None:
    client, _ = served
    expected = complete(client)
    assert client.post("/sleep?level=0").json() == {"level": 0, "bytes_given_back": 0}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True, "level": 0}
    assert sleep_states(client) == set()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, client)
        time.sleep(0.3)
        assert not waiting.done()
        assert client.post("/wake_up").status_code == 200
        assert waiting.result(30) == expected
    assert client.get("/is_sleeping").json() == {"is_sleeping": False, "level": None}


def test_level_1_gives_the_cache_back_and_computes_running_requests_anew(served: Any) -> None:
    client, process = served
    long = {"max_tokens": 900}
    expected = complete(client, **long)
    for first in range(24):  # more than 30 MB of cached prefixes
        complete(client, prompt=[first + 3, *BODY["prompt"]], max_tokens=1)
    assert cached_tokens(client) > 900
    before = resident(process)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, client, has_begun := threading.Event(), **long)
        assert has_begun.wait(60)
        answer = client.post("/sleep").json()
        assert answer["level"] == 1
        assert answer["bytes_given_back"] > 200e6
        asleep = resident(process)
        refused = client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
        assert client.get("/health").status_code == 200
        assert sleep_states(client) == {"kv_cache_released"}
        assert not running.done()
        assert client.post("/wake_up").status_code == 200
        assert running.result(60) == expected
    print(f"resident: before {before / 1e6:.1f} MB, asleep {asleep / 1e6:.1f}, after {resident(process) / 1e6:.1f}")
    assert asleep < before - 30e6
    assert cached_tokens(client, prompt=[7, *BODY["prompt"]]) == 0


def test_level_2_discards_the_weights_and_goes_on_with_running_requests(served: Any) -> None:
    client, _ = served
    expected = complete(client, max_tokens=700)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, client, has_begun := threading.Event(), max_tokens=700)
        assert has_begun.wait(60)
        assert client.post("/sleep?level=2").json()["bytes_given_back"] > 256e6
        assert sleep_states(client) == {"discard_all"}
        early = client.post("/wake_up?tags=kv_cache")
        assert (early.status_code, early.json()["error"]["param"]) == (400, "tags")
        assert client.post("/wake_up", params={"tags": "weights"}).status_code == 200
        assert client.get("/is_sleeping").json() == {"is_sleeping": True, "level": 1}
        assert sleep_states(client) == {"kv_cache_released"}
        assert client.post("/v1/completions", json=BODY).status_code == 503
        assert not running.done()
        assert client.post("/wake_up", params={"tags": "kv_cache"}).status_code == 200
        assert running.result(60) == expected
    assert sleep_states(client) == {"awake"}


def test_what_cannot_be_is_refused(served: Any) -> None:
    client, _ = served
    for level in ("3", "x"):
        response = client.post(f"/sleep?level={level}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "level")
        assert "level must be 0, 1 or 2" in response.json()["error"]["message"]
        assert client.get("/is_sleeping").json()["is_sleeping"] is False
    assert client.post("/wake_up").status_code == 200
    assert sleep_states(client) == {"awake"}
    complete(client)
    (cache,) = re.findall(r"quire:cache_config_info\{(.*)\} 1", client.get("/metrics").text)
    assert 'enable_prefix_caching="True"' in cache
    assert 'num_gpu_blocks="' in cache


def test_without_the_flag_there_is_no_such_route(live: Any) -> None:
    assert live.client.post("/sleep").status_code == 404
