"""Batches, as the official client speaks of them, and what is left of them after a restart."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from openai.types import Batch

from quire_server.batches import load as load_module
from quire_server.batches.batch_lines import check_input, read_lines
from quire_server.batches.load import InteractiveLoad, InteractiveWatch, LineSlots
from quire_server.batches.result_files import LineResult, ResultFiles, line_id, result_line

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: Any, text: str = "¤ok¥", url: str = CHAT, **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def jsonl(lines: list[Any]) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


@pytest.fixture(scope="module")
def server(make_scripted, tmp_path_factory):
    return make_scripted(files_dir=str(tmp_path_factory.mktemp("kept") / "files"), batch_max_requests=400)


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as client:
        yield client


def start(client: openai.OpenAI, lines: list[Any], endpoint: str = CHAT, **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    body: dict[str, Any] = {"endpoint": endpoint, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, **body)


def ended(client: openai.OpenAI, batch: Batch, timeout_s: float = 60) -> Batch:
    deadline = time.monotonic() + timeout_s
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, name: str | None) -> list[dict[str, Any]]:
    return [] if name is None else [json.loads(each) for each in client.files.content(name).text.splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    found = batch.request_counts
    assert found is not None
    return found.total, found.completed, found.failed


def test_lines_make_way_for_the_requests_of_every_door(server):
    layer = server._http.config.app
    while not isinstance(layer, InteractiveWatch):
        layer = layer._app
    busy = []

    async def routes(scope, receive, send):
        busy.append(layer._load.is_busy)

    async def ask(path: str) -> None:
        layer._load.is_busy = False
        await InteractiveWatch(routes, layer._load, layer._paths)(
            {"type": "http", "method": "POST", "path": path, "root_path": ""}, None, None
        )

    work = [
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/completion",
        "/infill",
        "/embedding",
        "/generate",
        "/encode",
        "/generative_scoring",
        "/cohere/v2/chat",
    ]
    for path in [*work, "/api/show", "/v1/files"]:
        server.call(ask(path))
    assert busy == [True] * len(work) + [False, False]


def test_every_line_is_answered(client, server):
    lines: list[Any] = [line(f"r{index}", f"¤answer {index}¥") for index in range(40)]
    lines[3] = line("r3", temperature="hot")
    lines[5] = line("r5", stream=True)
    lines[7] = "this is no JSON"
    lines[9] = {**line("r9"), "method": "GET"}
    lines[11] = {**line("r11"), "custom_id": 11}
    lines[13] = line("r13", model="another")
    lines.insert(20, "")
    batch = start(
        client, lines, metadata={"of": "test"}, output_expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert batch.status == "validating"
    done = ended(client, batch)
    Batch.model_validate_json(server.client.get(f"/v1/batches/{batch.id}").text, strict=True)
    assert (done.status, done.metadata, counts(done)) == ("completed", {"of": "test"}, (40, 34, 6))
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    answers, errors = results(client, done.output_file_id), results(client, done.error_file_id)
    assert sorted(each["custom_id"] for each in answers) == sorted(
        f"r{index}" for index in range(40) if index not in (3, 5, 7, 9, 11, 13)
    )
    for each in answers:
        body = each["response"]["body"]
        assert body["choices"][0]["message"]["content"] == f"answer {each['custom_id'][1:]}"
        assert (each["response"]["status_code"], each["error"]) == (200, None)
        assert each["response"]["request_id"] in body["id"]
    assert len({each["id"] for each in answers + errors}) == 40
    found = {each["line"]: each for each in errors}
    assert sorted(found) == [4, 6, 8, 10, 12, 14]
    assert found[4]["response"]["body"]["error"]["param"] == "temperature"
    assert found[6]["response"]["body"]["error"]["param"] == "stream"
    codes = [found[number]["error"]["code"] for number in (8, 10, 12)]
    assert codes == ["invalid_json_line", "invalid_method", "invalid_custom_id"]
    assert (found[14]["custom_id"], found[14]["response"]["status_code"]) == ("r13", 404)
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.expires_at - file.created_at) == ("batch_output", 3600)
    assert client.files.delete(done.output_file_id).deleted
    text = server.client.get("/metrics").text
    assert 'quire:batch_requests_total{result="completed"} 34.0' in text
    assert "quire:batch_requests_running 0.0" in text


@pytest.mark.parametrize(
    ("endpoint", "body", "seen"),
    [
        ("/v1/completions", {"prompt": "¤ok¥", "max_tokens": 8}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "¤ok¥"}, lambda body: body["output"][0]["content"][0]["text"]),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "¤ok¥"}], "max_tokens": 8},
            lambda body: body["content"][0]["text"],
        ),
    ],
)
def test_every_protocol_has_batches(client, endpoint, body, seen):
    lines = [{"custom_id": str(index), "method": "POST", "url": endpoint, "body": body} for index in range(3)]
    done = ended(client, start(client, lines, endpoint))
    assert counts(done) == (3, 3, 0), results(client, done.error_file_id)
    assert [seen(each["response"]["body"]) for each in results(client, done.output_file_id)] == ["ok"] * 3
    assert done.error_file_id is None


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("a"), line("b", url="/v1/completions")], "mismatched_endpoint", 2),
        (["nonsense", "{}"], "invalid_json_line", 1),
        ([""], "empty_file", None),
        ([line(str(index)) for index in range(401)], "too_many_requests", 401),
    ],
)
def test_what_is_not_certain_is_not_run(client, lines, code, number):
    done = ended(client, start(client, lines))
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert (done.errors.data[0].code, done.errors.data[0].line) == (code, number)


def test_a_batch_is_cancelled_and_its_other_lines_are_told(client, server):
    lines = [line(str(index), "x", ignore_eos=True, max_tokens=1500) for index in range(200)]
    batch = start(client, lines)
    with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
        client.files.delete(batch.input_file_id)
    while client.batches.retrieve(batch.id).status != "in_progress":
        time.sleep(0.01)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled"
    assert counts(done)[0] == sum(counts(done)[1:]) == 200
    answers, errors = results(client, done.output_file_id), results(client, done.error_file_id)
    assert {each["custom_id"] for each in answers + errors} == {each["custom_id"] for each in lines}
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    server.wait_idle()
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_ends_with_its_window(client):
    lines = [line(str(index), "x", ignore_eos=True, max_tokens=1500) for index in range(300)]
    done = ended(client, start(client, lines, completion_window="1s"))
    assert done.status == "expired"
    assert counts(done)[0] == sum(counts(done)[1:]) == 300
    assert {each["error"]["code"] for each in results(client, done.error_file_id)} == {"batch_expired"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_what_is_no_batch_says_why(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        start(client, [line("a")], **fields)
    assert caught.value.param == param


def test_an_input_is_for_batches_and_there(client):
    file = client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-never", endpoint=CHAT, completion_window="24h")


def test_batches_are_listed_and_belong_to_their_key(make_scripted, tmp_path):
    keys = make_scripted(files_dir=str(tmp_path / "files"), api_key=("key-of-ann", "key-of-ben"))
    with keys.openai(api_key="key-of-ann") as ann, keys.openai(api_key="key-of-ben") as ben:
        batches = [ended(ann, start(ann, [line("a")])) for _ in range(3)]
        assert [each.id for each in ann.batches.list(limit=2)] == [each.id for each in reversed(batches)]
        assert list(ben.batches.list()) == []
        for gone in (ben.batches.retrieve, ben.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                gone(batches[0].id)
        with pytest.raises(openai.NotFoundError):
            ben.files.content(batches[0].output_file_id)
        with pytest.raises(openai.NotFoundError):
            ben.batches.create(input_file_id=batches[0].input_file_id, endpoint=CHAT, completion_window="24h")
        assert results(ann, batches[0].output_file_id)[0]["custom_id"] == "a"


def test_results_are_recovered_up_to_the_last_whole_line(tmp_path):
    paths = tmp_path / "out", tmp_path / "err"
    batch = "batch_" + "ab" * 16

    def result(number: int, is_error: bool = False) -> LineResult:
        text = result_line(line_id(batch, number), str(number), response=None, error=None)
        return LineResult(number, is_error, text)

    first = ResultFiles(*paths)
    first.append([result(1), result(4, True), result(2)])
    first.close()
    whole = paths[0].read_bytes()
    for torn in (b"", b"{", result(3).text[:-1], b"\0" * 40 + b"\n", b"x" * 4000):
        paths[0].write_bytes(whole + torn)
        again = ResultFiles(*paths)
        assert (again.done, again.num_completed, again.num_failed) == ({1, 2, 4}, 2, 1)
        again.append([result(3)])
        assert paths[0].read_bytes() == whole + result(3).text
        again.close()
        paths[0].write_bytes(whole)


def test_lines_are_read_one_by_one_whatever_they_hold(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + jsonl([line("a"), "x" * 5000, "[1]", '{"custom_id": "b", "url": 1, "body": {}}'])
    )
    found = list(read_lines(path, max_line_bytes=1000))
    codes = [None if each.problem is None else each.problem.code for each in found]
    assert codes == [None, "line_too_long", "invalid_json_line", "invalid_url"]
    assert [each.number for each in found] == [1, 2, 3, 4]
    check = check_input(path, CHAT, max_lines=10, max_line_bytes=1000)
    assert (check.num_lines, check.problems) == (4, [])


async def test_lines_make_way_for_requests(monkeypatch):
    """The latest lines are begun again when there are no requests any more; a line makes way twice at most."""
    monkeypatch.setattr(load_module, "QUIET_S", 0.05)
    load = InteractiveLoad()
    slots = LineSlots(load, 3, 1)
    begun: list[int] = []
    gates = [asyncio.Event() for _ in range(4)]

    async def work(index: int) -> int:
        begun.append(index)
        await gates[index].wait()
        return index

    async def settle(expected: list[int], num_taken: int) -> None:
        async with asyncio.timeout(10):
            while (begun, slots.num_taken) != (expected, num_taken):
                await asyncio.sleep(0.005)

    tasks = [asyncio.ensure_future(slots.run(lambda index=index: work(index))) for index in range(4)]
    await settle([0, 1, 2], 3)
    load.begin()
    await settle([0, 1, 2], 1)
    load.end()
    await asyncio.sleep(0.01)
    assert slots.num_taken == 1, "who asks once asks again"
    await settle([0, 1, 2, 3, 2], 3)
    load.begin()
    await settle([0, 1, 2, 3, 2], 1)
    load.end()
    await settle([0, 1, 2, 3, 2, 1, 2], 3)
    load.begin()
    await asyncio.sleep(0.02)
    assert slots.num_taken == 2, "this line has made way twice"
    load.end()
    gates[0].set()
    assert await tasks[0] == 0
    tasks[3].cancel()
    for gate in gates:
        gate.set()
    assert await asyncio.gather(*tasks[:3]) == [0, 1, 2]
    await asyncio.gather(tasks[3], return_exceptions=True)
    assert tasks[3].cancelled()
    assert slots.num_taken == 0
