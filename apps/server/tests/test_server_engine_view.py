"""The engine, live, over HTTP: what happens in it as events, whose requests a caller sees, and what is explained."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

ALICE, BOB, ROOT = "sk-alice", "sk-bob", "sk-root"
ENGINE = {"step_time_s": 0.01, "num_blocks": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
PROMPT = list(range(100, 180))


@pytest.fixture(scope="module")
def keyed(make_live, tmp_path_factory) -> Any:
    """Two callers and an administrator."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(f"alice: {ALICE}\nbob: {BOB}\nroot: {{key: {ROOT}, admin: true}}\n")
    path.chmod(0o600)
    return make_live(api_key_file=str(path), engine=ENGINE)


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(server: Any, key: str, name: str, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, **fields}
    response = server.post("/v1/completions", body, headers={**headers(key), "x-request-id": name})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Any, key: str, until: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """Events up to the one that fits, which is the last."""
    with server.client.stream("GET", "/v1/engine/events", headers=headers(key)) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                yield event
                if until(event):
                    return
    raise AssertionError("the stream ended")


def has_finished(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: any(each.get("id") == name and each["finished_at"] for each in event.get("requests", ()))


def ended(event: dict[str, Any], known: set[int]) -> list[dict[str, Any]]:
    """Finished requests of an event, but those that were told of before."""
    return [each for each in event["requests"] if each["finished_at"] and each["number"] not in known]


def test_events(keyed):
    with ThreadPoolExecutor(1) as pool:
        source = events(keyed, ALICE, has_finished("a-1"))
        first = next(source)
        assert (first["anew"], first["state"], first["num_blocks"]) == (True, "up", 64)
        assert len(first["holders"]) == 64
        answer = pool.submit(complete, keyed, ALICE, "a-1")
        told = [first, *source]
        answer.result()
    steps = [step for event in told for step in event["steps"]]
    numbers = [step[0] for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(steps)))
    prefills = [step[3] for step in steps if step[3]]
    assert prefills == [32, 32, 16]
    assert sum(step[4] for step in steps) == 39
    phases = {row[1] for event in told for row in event["rows"]}
    assert "decode" in phases
    (record,) = [each for event in told for each in event["requests"] if each["finished_at"]]
    assert (record["id"], record["tenant"], record["num_chunks"]) == ("a-1", "alice", 3)
    assert record["queued_at"] <= record["scheduled_at"] < record["first_token_at"] < record["finished_at"]
    assert abs(record["finished_at"] - time.time()) < 60
    holders = list(first["holders"])
    seen = set()
    for event in told[1:]:
        for block, holder in event["changes"]:
            holders[block - 1] = holder
            seen.add(holder)
    assert record["number"] in seen
    # 119 of its tokens were computed: seven whole blocks can be found by others now.
    assert sorted(set(holders)) == [-1, 0]
    assert holders.count(-1) == 7
    assert told[-1]["totals"]["num_generation_tokens_total"] >= 40


def test_who_looks_later_is_told_what_is_known(keyed):
    with contextlib.closing(events(keyed, ALICE, lambda event: False)) as one:
        known = {step[0] for step in next(one)["steps"]}
        complete(keyed, ALICE, "a-2", prompt=list(range(200, 280)), max_tokens=4)
        while not has_finished("a-2")(next(one)):
            pass
        with contextlib.closing(events(keyed, ALICE, lambda event: False)) as other:
            first = next(other)
    assert first["anew"]
    assert has_finished("a-2")(first)
    assert sum(step[3] for step in first["steps"] if step[0] not in known) == 80
    assert first["holders"].count(-1) >= 5


def test_of_others_requests_only_numbers_are_told(keyed):
    for key, sees in ((ALICE, True), (ROOT, True), (BOB, False)):
        with contextlib.closing(events(keyed, key, lambda event: False)) as source:
            told = [next(source)]
            known = {each["number"] for each in told[0]["requests"]}
            complete(keyed, ALICE, f"secret-{key}", max_tokens=8)
            while not (
                new := [each for each in told[-1]["requests"] if each["finished_at"] and each["number"] not in known]
            ):
                told.append(next(source))
        text = json.dumps(told)
        assert (f"secret-{key}" in text) == sees
        assert ("alice" in text) == sees
        (record,) = new
        assert record["is_own"] == sees
        assert record["num_prompt_tokens"] == 80
        assert ("miss_reason" in record) == sees


def test_an_explanation_is_its_callers_and_the_administrators(keyed):
    answer = complete(keyed, ALICE, "a-3")
    for name in ("a-3", answer["id"]):
        for key, status in ((ALICE, 200), (ROOT, 200), (BOB, 404)):
            response = keyed.client.get(f"/v1/requests/{name}/explain", headers=headers(key))
            assert response.status_code == status, response.text
    assert "no request" in response.json()["error"]["message"]
    (told,) = keyed.client.get("/v1/requests/a-3/explain", headers=headers(ALICE)).json()["requests"]
    assert (told["status"], told["finish_reason"]) == ("finished", "length")
    assert told["numbers"]["num_cached_tokens"] + told["numbers"]["num_missed_tokens"] == 80
    listed = {
        key: [each["id"] for each in keyed.client.get("/v1/requests", headers=headers(key)).json()["data"]]
        for key in (ALICE, BOB, ROOT)
    }
    assert "a-3" in listed[ALICE]
    assert "a-3" in listed[ROOT]
    assert "a-3" not in listed[BOB]


def test_what_was_watched_is_explained_in_full(keyed):
    with contextlib.closing(events(keyed, BOB, lambda event: False)) as source:
        next(source)
        complete(keyed, BOB, "b-1", prompt=list(range(300, 400)), max_tokens=8)
        while not has_finished("b-1")(next(source)):
            pass
    (told,) = keyed.client.get("/v1/requests/b-1/explain", headers=headers(BOB)).json()["requests"]
    assert told["is_watched"]
    numbers = told["numbers"]
    assert (numbers["num_cached_tokens"], numbers["num_missed_tokens"], numbers["num_chunks"]) == (0, 100, 4)
    assert numbers["miss_reason"] == "never_stored"
    marks = [mark["event"] for mark in told["timeline"]]
    assert marks == ["queued", "scheduled", *["chunk"] * 4, "first token", "finished"]
    assert sum(mark.get("num_tokens", 0) for mark in told["timeline"]) == 100
    text = " ".join(told["sentences"])
    assert "0 were cached, 100 had to be computed" in text
    assert "computed in 4 chunks" in text


def test_nobody_hears_that_others_have_sent_the_same(keyed):
    prompt = list(range(500, 580))
    with contextlib.closing(events(keyed, ROOT, lambda event: False)) as source:
        next(source)
        complete(keyed, ALICE, "a-4", prompt=prompt, max_tokens=2)
        complete(keyed, BOB, "b-2", prompt=prompt, max_tokens=2)
        while not has_finished("b-2")(next(source)):
            pass
    reasons = {}
    for key in (BOB, ROOT):
        response = keyed.client.get("/v1/requests/b-2/explain", headers=headers(key))
        reasons[key] = response.json()["requests"][0]["numbers"]["miss_reason"]
        assert ("another cache_salt" in response.text) == (key == ROOT)
    assert reasons == {BOB: "never_stored", ROOT: "different_salt"}


def test_a_request_that_waits_is_explained(keyed):
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(complete, keyed, ALICE, f"r-{index}", max_tokens=100) for index in range(3)]
        deadline = time.monotonic() + 30
        told: dict[str, Any] = {}
        while time.monotonic() < deadline and "max_num_seqs" not in str(told.get("numbers")):
            for index in range(3):
                response = keyed.client.get(f"/v1/requests/r-{index}/explain", headers=headers(ALICE))
                if response.status_code == 200 and response.json()["requests"][0]["status"] == "waiting":
                    (told,) = response.json()["requests"]
        assert told["numbers"]["wait_reason"] == "max_num_seqs"
        assert any("waits now for a free row" in sentence for sentence in told["sentences"])
        for each in running:
            each.result()


def test_the_engine_is_not_watched_when_nobody_looks(keyed):
    with contextlib.closing(events(keyed, ALICE, lambda event: False)) as source:
        first = next(source)
        complete(keyed, ALICE, "a-5", max_tokens=2)
        while not has_finished("a-5")(next(source)):
            pass
    time.sleep(0.3)
    complete(keyed, ALICE, "a-6", max_tokens=2)
    with contextlib.closing(events(keyed, ALICE, lambda event: False)) as source:
        again = next(source)
    assert first["anew"]
    assert again["anew"]
    assert again["steps"] == []
    assert again["requests"] == []


@pytest.mark.parametrize("query", ["num_events=0", "num_events=x", "engine=-1", "engine=1"])
def test_wrong_questions(keyed, query):
    response = keyed.client.get(f"/v1/engine/events?{query}", headers=headers(ALICE))
    assert response.status_code == 400
    assert response.json()["error"]["param"] in query


def test_an_end_can_be_asked_for(keyed):
    response = keyed.client.get("/v1/engine/events?num_events=2&engine=0", headers=headers(ALICE))
    assert response.text.count("data: {") == 2
    assert keyed.client.head("/v1/engine/events", headers=headers(ALICE)).status_code == 200
