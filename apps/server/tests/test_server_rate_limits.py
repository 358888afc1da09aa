"""Limits of API keys, and the usage that is counted of each tenant."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.sync.client import connect

from quire import QuireConfig
from quire_interfaces import ConfigError
from quire_server.api_servers import num_api_processes
from quire_server.callers import Caller, KeyLimits, read_api_keys
from quire_server.config import ServerConfig
from quire_server.rate_limits import RateLimiter, RateLimitError, TokenBucket
from quire_server.usage import SECONDS_PER_DAY, Usage, UsageBook, make_usage_book

KEYS = """
free: sk-free
few: {key: sk-few, requests_per_minute: 3}
tokens: {key: sk-tokens, tokens_per_minute: 40}
day: {key: sk-day, tokens_per_day: 30}
root: {key: sk-root, admin: true}
"""
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}


def key_file(folder: Path, text: str = KEYS) -> str:
    path = folder / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def server(make_live, tmp_path):
    return make_live(api_key_file=key_file(tmp_path), response_store=str(tmp_path / "responses.sqlite"))


def ask(server: Any, key: str, path: str = "/v1/chat/completions", body: Any = CHAT) -> httpx.Response:
    return server.client.post(path, json=body, headers={"Authorization": f"Bearer sk-{key}"})


def usage_of(server: Any, key: str, query: str = "") -> dict[str, Any]:
    response = server.client.get(f"/v1/usage{query}", headers={"Authorization": f"Bearer sk-{key}"})
    assert response.status_code == 200, response.text
    return response.json()


def test_requests_per_minute(server):
    answers = [ask(server, "few") for _ in range(3)]
    assert [each.status_code for each in answers] == [200] * 3
    left = [int(each.headers["x-ratelimit-remaining-requests"]) for each in answers]
    assert left == [2, 1, 0]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert 0 < float(answers[0].headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 20
    refused = ask(server, "few", body={**CHAT, "stream": True})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "3 requests per minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert ask(server, "few", "/v1/messages", {**CHAT, "model": "tiny"}).json()["error"]["type"] == "rate_limit_error"
    # Others have limits of their own or none, and what takes no body is never refused.
    assert ask(server, "free").status_code == 200
    assert "x-ratelimit-limit-requests" not in ask(server, "free").headers
    assert server.client.get("/v1/models", headers={"Authorization": "Bearer sk-few"}).status_code == 200
    assert ask(server, "few", "/inference/v1/abort_requests", {"request_ids": ["x"]}).status_code < 429


def test_a_route_that_asks_another_takes_one_request(server):
    answers = [ask(server, "few", "/invocations") for _ in range(4)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429]


def test_tokens_per_minute_are_owed(server):
    first = ask(server, "tokens")
    assert first.status_code == 200
    used = first.json()["usage"]["total_tokens"]
    assert int(first.headers["x-ratelimit-remaining-tokens"]) in (40 - used, 40 - used + 1)
    long = ask(server, "tokens", body={**CHAT, "max_tokens": 60})
    assert long.status_code == 200, "what was admitted is never cut off"
    assert len(long.json()["choices"]) == 1
    assert long.json()["usage"]["completion_tokens"] == 60
    refused = ask(server, "tokens")
    assert refused.status_code == 429
    owed = used + long.json()["usage"]["total_tokens"] - 40
    assert int(refused.headers["retry-after"]) == pytest.approx((owed + 1) * 60 / 40, abs=3)


def test_tokens_per_day_of_streams_and_sockets(server):
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "a b c", "max_tokens": 30, "ignore_eos": True, "stream": True},
        headers={"Authorization": "Bearer sk-day"},
    ) as response:  # fmt: skip
        assert response.status_code == 200
        response.read()
    refused = ask(server, "day")
    assert refused.status_code == 429
    assert "30 tokens of today" in refused.json()["error"]["message"]
    url = server.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers={"Authorization": "Bearer sk-day"}) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "hello", "model": "tiny"}))
        event = json.loads(socket.recv(20))
        assert event["type"] == "error"
        assert "30 tokens of today" in json.dumps(event)
    usage = usage_of(server, "day")
    assert usage["limits"] == {"tokens_per_day": 30}
    assert usage["remaining"] == {"tokens_per_day": 0}


def test_usage_is_what_the_answers_said(server):
    answers = [ask(server, "free") for _ in range(2)]
    answers.append(ask(server, "free", "/v1/completions", {"prompt": ["x y", "z"], "n": 2, "max_tokens": 3}))
    sums = {name: sum(each.json()["usage"][name] for each in answers) for name in ("completion_tokens", "total_tokens")}
    usage = usage_of(server, "free")
    assert usage["tenant"] == "free"
    assert usage["limits"] == usage["remaining"] == {}
    (today,) = usage["days"]
    assert today["date"] == time.strftime("%Y-%m-%d", time.gmtime())
    assert usage["total"] == {key: value for key, value in today.items() if key != "date"}
    assert usage["total"]["completion_tokens"] == sums["completion_tokens"]
    assert usage["total"]["requests"] == 6
    assert usage["total"]["total_tokens"] >= sums["total_tokens"]  # each of `n` has the prompt
    assert usage_of(server, "few")["total"]["requests"] == 0, "nobody sees what others used"
    everybody = usage_of(server, "root")["tenants"]
    assert [each["tenant"] for each in everybody] == ["free", "few", "tokens", "day", "root"]
    assert everybody[0] == usage
    text = server.client.get("/metrics", headers={"Authorization": "Bearer sk-root"}).text
    line = next(line for line in text.splitlines() if "tenant_generation_tokens_total{" in line and '"free"' in line)
    assert float(line.split()[-1]) == sums["completion_tokens"]
    for wrong in ("0", "401", "x", "-1", "1" * 30):
        response = server.client.get(f"/v1/usage?days={wrong}", headers={"Authorization": "Bearer sk-free"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "days"


def test_the_official_client_waits_as_it_is_told(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-few", max_retries=0)
    for _ in range(3):
        client.chat.completions.create(model="tiny", messages=CHAT["messages"], max_tokens=2)
    with pytest.raises(openai.RateLimitError) as refusal:
        client.chat.completions.create(model="tiny", messages=CHAT["messages"], max_tokens=2)
    assert refusal.value.code == "rate_limit_exceeded"
    assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 20


def test_bursts_get_no_more_than_the_limit(server):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(server, "few").status_code, range(24)))
    assert 3 <= answers.count(200) <= 4  # one more flows in within 20 s
    assert set(answers) == {200, 429}


def test_without_keys_there_is_nothing_to_count(live):
    response = live.client.get("/v1/usage")
    assert response.status_code == 404
    assert "--api-key-file" in response.json()["error"]["message"]


def test_usage_outlives_a_server_and_is_shared(tmp_path):
    config = ServerConfig(api_key_file=key_file(tmp_path), response_store=str(tmp_path / "responses.sqlite"))
    one, other = make_usage_book(config), make_usage_book(config)
    one.count(Metrics("day", 5, 2, 7))
    other.count(Metrics("day", 1, 0, 1))
    assert one.of_day("day", one.today) == Usage(1, 5, 2, 7)
    one.save(), other.save(), one.save()
    for book in (one, other, make_usage_book(config)):
        assert book.of_day("day", book.today) == Usage(2, 6, 2, 8)
        assert list(book.days("day", 3).values()) == [Usage(2, 6, 2, 8)]
    one.save()
    assert make_usage_book(config).of_day("day", one.today) == Usage(2, 6, 2, 8), "nothing is written twice"


def test_a_new_day_begins_with_nothing(tmp_path):
    now = [10 * SECONDS_PER_DAY + 5.0]
    book = UsageBook(clock=lambda: now[0])
    limiter = RateLimiter(book, {"a": KeyLimits(tokens_per_day=10)}, clock=lambda: now[0])
    caller = Caller("a", "x", limits=KeyLimits(tokens_per_day=10))
    limiter.admit(caller)
    book.count(Metrics("a", 9, 0, 1))
    with pytest.raises(RateLimitError) as refusal:
        limiter.admit(caller)
    assert refusal.value.retry_after_s == SECONDS_PER_DAY - 5
    now[0] += SECONDS_PER_DAY - 5
    limiter.admit(caller)
    assert list(book.days("a", 2)) == ["1970-01-11"]
    assert book.days("a", 1) == {}


def test_a_bucket_refills_with_time_and_no_further():
    bucket = TokenBucket(60, 0.0)
    bucket.level -= 90
    assert bucket.seconds_until(1) == 31
    bucket.flow(31.0)
    assert bucket.level == pytest.approx(1)
    bucket.flow(1e6)
    assert bucket.level == 60


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a: {key: k, tokens_per_day: 0}", "tokens_per_day of 'a' must be a whole number above 0"),
        ("a: {key: k, tokens_per_minute: many}", "tokens_per_minute of 'a'"),
        ("a: {key: k, requests_per_minute: [1]}", "requests_per_minute of 'a'"),
        ("a: {key: k, requests_per_hour: 1}", "not 'requests_per_hour'"),
    ],
)
def test_wrong_limits_are_refused(tmp_path, line, words):
    with pytest.raises(ConfigError, match=words):
        read_api_keys(ServerConfig(api_key_file=key_file(tmp_path, line), response_store="none"))


def test_limits_are_counted_by_one_process(tmp_path):
    server = ServerConfig(api_key_file=key_file(tmp_path), response_store="none", api_server_count=2)
    with pytest.raises(ConfigError, match="limits of keys"):
        num_api_processes(QuireConfig.of(), server)


class Metrics:
    """Of a request that ended."""

    def __init__(self, tenant: str, prompt: int, cached: int, generated: int) -> None:
        self.tenant, self.num_prompt_tokens = tenant, prompt
        self.num_cached_tokens, self.num_generation_tokens = cached, generated
