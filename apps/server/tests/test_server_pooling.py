"""The pooling routes over an engine without weights, whose vectors tell which tokens it was given."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types import CreateEmbeddingResponse
from prometheus_client.parser import text_string_to_metric_families

from quire_engine import PooledRequestOutput
from quire_server.list_parts import list_parts, num_answer_bytes
from quire_server.pooling_answers import EmbeddingObject, PoolingAnswer, PoolingUsage
from quire_testkit.fake_runner import expected_pooled

TASKS = ["embed", "token_embed", "classify", "score"]
TEXTS = ["the quire gathers", "twelve blocks", "the quire"]


@pytest.fixture(scope="module")
def pooling(make_live: Any) -> Any:
    server = make_live(engine={"pooling_tasks": TASKS, "max_queued_requests": 512})
    prompts = server.llm.pooling_prompts
    prompts.spec = dataclasses.replace(prompts.spec, tasks=frozenset(TASKS), labels=("dull", "bright"))
    return server


@pytest.fixture(scope="module")
def bi_encoder(make_live: Any) -> Any:
    """Scores by the cosine of embeddings."""
    return make_live(engine={"pooling_tasks": ["embed"]})


def numbers(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def vector(server: Any, text: str | Sequence[int], *, special: bool = True) -> list[float]:
    ids = server.llm.renderer.tokenizer.encode(text, add_special_tokens=special) if isinstance(text, str) else text
    return numbers(expected_pooled(ids).data)


def num_tokens(server: Any, *texts: str) -> int:
    return sum(len(server.llm.renderer.tokenizer.encode(text)) for text in texts)


def cosine(one: Sequence[float], two: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, two, strict=True)) / math.hypot(*one) / math.hypot(*two)


def embedded(server: Any, **fields: Any) -> list[list[float]]:
    response = server.post("/v1/embeddings", fields)
    assert response.status_code == 200, response.text
    CreateEmbeddingResponse.model_validate_json(response.content, strict=True)
    answer = response.json()
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [each["embedding"] for each in answer["data"]]


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), response.text
    return str(error["message"])


def test_embeddings_of_every_form_of_input(pooling: Any) -> None:
    ids = [5, 6, 7]
    user = [{"role": "user", "content": "hello"}]
    chat = pooling.llm.renderer.render_chat(user, add_generation_prompt=False).token_ids
    assert embedded(pooling, input=TEXTS[0]) == [vector(pooling, TEXTS[0])]
    assert embedded(pooling, input=TEXTS) == [vector(pooling, text) for text in TEXTS]
    assert embedded(pooling, input=ids) == [vector(pooling, ids)]
    assert embedded(pooling, input=[ids, [9]]) == [vector(pooling, ids), vector(pooling, [9])]
    assert embedded(pooling, messages=user) == [vector(pooling, chat)]
    assert embedded(pooling, input=user) == [vector(pooling, chat)]
    assert embedded(pooling, messages=[user, user]) == [vector(pooling, chat)] * 2
    longer = pooling.llm.renderer.render_chat(user, add_generation_prompt=True).token_ids
    assert embedded(pooling, messages=user, add_generation_prompt=True) == [vector(pooling, longer)]
    assert embedded(pooling, input=TEXTS[0], add_special_tokens=False) == [vector(pooling, TEXTS[0], special=False)]


def test_usage_and_names(pooling: Any) -> None:
    body = {"input": [[5, 6], [7]], "model": "tiny", "request_id": "mine", "user": "somebody"}
    answer = pooling.post("/v1/embeddings", body).json()
    assert (answer["id"], answer["object"], answer["model"]) == ("embd-mine", "list", "tiny")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"]) == (3, 3, 0)
    refused(pooling.post("/v1/embeddings", {**body, "model": "other"}), "model", 404)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_official_client(pooling: Any, encoding: Any) -> None:
    fields = {} if encoding is None else {"encoding_format": encoding}
    with pooling.openai() as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS, **fields)
    vectors = [each.embedding for each in answer.data]
    if encoding == "base64":
        vectors = [numbers(base64.b64decode(each)) for each in vectors]
    assert vectors == [pytest.approx(vector(pooling, text)) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens


def test_vectors_as_bytes(pooling: Any) -> None:
    body = {"input": TEXTS, "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "big"}
    response = pooling.post("/v1/embeddings", body)
    described = json.loads(response.headers["metadata"])
    vectors = []
    for index, item in enumerate(described["data"]):
        assert (item["index"], item["embed_dtype"], item["endianness"], item["shape"]) == (index, "float16", "big", [2])
        vectors.append(list(struct.unpack(">2e", response.content[item["start"] : item["end"]])))
    assert vectors == [pytest.approx(vector(pooling, text), rel=1e-3) for text in TEXTS]
    assert described["usage"]["prompt_tokens"] == sum(
        len(pooling.llm.renderer.tokenizer.encode(each)) for each in TEXTS
    )
    bare = pooling.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "bytes_only", "endianness": "little"})
    assert "metadata" not in bare.headers
    assert numbers(bare.content) == [number for text in TEXTS for number in vector(pooling, text)]
    many = {"input": [[5]] * 1000, "encoding_format": "bytes"}
    assert "bytes_only" in refused(pooling.post("/v1/embeddings", many), "encoding_format")


def test_one_bad_item_is_named_by_its_place(pooling: Any) -> None:
    for wrong, place in (([5] * 513, "input[1]"), ([1024], "input[1][0]"), ([], "input[1]"), ("", "input[1]")):
        if wrong == "" and pooling.llm.renderer.tokenizer.encode(""):
            continue
        body = {"input": [[5], wrong, [6]]} if not isinstance(wrong, str) else {"input": ["a", wrong]}
        message = refused(pooling.post("/v1/embeddings", body), place)
        assert message.startswith("input[1]")
    long = [{"role": "user", "content": "word " * 600}]
    assert refused(pooling.post("/v1/embeddings", {"messages": [long]}), "messages[0]")


def test_the_other_items_are_answered_where_that_is_asked_for(pooling: Any) -> None:
    body = {"input": [[5], [5] * 513, [1024], [6]], "errors": "per_item"}
    answer = pooling.post("/v1/embeddings", body).json()
    assert [each["embedding"] for each in answer["data"]] == [vector(pooling, [5]), None, None, vector(pooling, [6])]
    errors = [each.get("error") for each in answer["data"]]
    assert (errors[0], errors[3]) == (None, None)
    assert (errors[1]["param"], errors[1]["code"]) == ("input[1]", "context_length_exceeded")
    assert errors[2]["param"] == "input[2][0]"
    assert errors[2]["type"] == "invalid_request_error"
    assert answer["usage"]["prompt_tokens"] == 2
    whole = pooling.post("/v1/embeddings", {"input": [[1024]], "errors": "per_item"}).json()
    assert whole["data"][0]["embedding"] is None
    talks = [[{"role": "user", "content": words}] for words in ("a", "word " * 600)]
    answer = pooling.post("/v1/embeddings", {"messages": talks, "errors": "per_item"}).json()
    assert [each.get("error", {}).get("param") for each in answer["data"]] == [None, "messages[1]"]


def test_ten_thousand_inputs(pooling: Any) -> None:
    vectors = embedded(pooling, input=[[5 + number % 7] for number in range(10_000)])
    assert vectors == [vector(pooling, [5 + number % 7]) for number in range(10_000)]


def test_long_answers_are_sent_in_parts(pooling: Any) -> None:
    """An answer with vectors of megabytes, which is that of its parts."""
    outputs = [
        PooledRequestOutput(request_id="a", packed_token_ids=b"", pooled=expected_pooled([each])) for each in range(200)
    ]
    assert num_answer_bytes(outputs) == 200 * 8
    items = [EmbeddingObject(index=index, embedding=[float(index), 0.5]) for index in range(200)]
    usage = PoolingUsage.of(3, 1)
    answer = PoolingAnswer[Any](id='"data":[]', created=1, model='a "data":[] b', data=[], usage=usage)
    for some in (items, items[:64], items[:1], []):
        parts = list(list_parts(answer, iter(some)))
        assert len(parts) == math.ceil(len(some) / 64) + 1
        expected = msgspec.to_builtins(answer) | {"data": msgspec.to_builtins(some)}
        assert json.loads(b"".join(parts)) == expected


def test_truncation(pooling: Any) -> None:
    ids = list(range(5, 25))
    assert embedded(pooling, input=ids, truncate_prompt_tokens=4) == [vector(pooling, ids[:4])]
    assert embedded(pooling, input=ids, truncate_prompt_tokens=4, truncation_side="left") == [vector(pooling, ids[-4:])]
    assert embedded(pooling, input=[7] * 600, truncate_prompt_tokens=-1) == [vector(pooling, [7] * 512)]
    for keep in (0, -2, 513):
        refused(
            pooling.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": keep}), "truncate_prompt_tokens"
        )


def test_parts_of_a_text_are_read_together(pooling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late chunking: one request to the engine, in which each text has its own tokens."""
    prompts = pooling.llm.pooling_prompts
    body = {"input": TEXTS, "late_chunking": True}
    assert "pools by LAST" in refused(pooling.post("/v1/embeddings", body), "late_chunking")
    changed = dataclasses.replace(prompts.spec, methods=("MEAN",), prompts={"query": "query: "})
    monkeypatch.setattr(prompts, "spec", changed)
    expected = [vector(pooling, text, special=False) for text in TEXTS]
    ids = [[5, 6, 7], [8]]
    plain = pooling.llm.renderer.tokenizer.encode("query: ", add_special_tokens=False)
    for more, before in (({}, 0), ({"prompt_name": "query"}, len(plain)), ({"encoding_format": "base64"}, 0)):
        answer = pooling.post("/v1/embeddings", body | more).json()
        found = [each["embedding"] for each in answer["data"]]
        if more.get("encoding_format"):
            found = [numbers(base64.b64decode(each)) for each in found]
        assert found == expected
        special = num_tokens(pooling, "")
        assert answer["usage"]["prompt_tokens"] == sum(int(each[1]) for each in expected) + before + special
    tokens = pooling.post("/v1/embeddings", body | {"input": ids}).json()["data"]
    assert [each["embedding"] for each in tokens] == [vector(pooling, each) for each in ids]
    assert "has no tokens" in refused(pooling.post("/v1/embeddings", body | {"input": ["a", ""]}), "input[1]")
    user = [{"role": "user", "content": "hello"}]
    chats = {"messages": user, "late_chunking": True}
    assert "leave messages out" in refused(pooling.post("/v1/embeddings", chats), "messages")
    cut = body | {"truncate_prompt_tokens": 8}
    assert "leave truncate_prompt_tokens out" in refused(pooling.post("/v1/embeddings", cut), "truncate_prompt_tokens")
    too_long = body | {"input": [TEXTS[0] * 1000, TEXTS[0] * 1000]}
    assert "maximum context length" in refused(pooling.post("/v1/embeddings", too_long), "input")


def test_what_texts_are_in_coheres_words(pooling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = pooling.llm.pooling_prompts
    names = {"query": "query: ", "passage": "passage: "}
    monkeypatch.setattr(prompts, "spec", dataclasses.replace(prompts.spec, prompts=names))
    for path in ("/v1/embeddings", "/pooling"):
        for kind, before in (("search_query", "query: "), ("search_document", "passage: "), ("passage", "passage: ")):
            (item,) = pooling.post(path, {"input": TEXTS[0], "input_type": kind}).json()["data"]
            assert (item.get("embedding") or item["data"]) == vector(pooling, before + TEXTS[0])
        assert "it may be" in refused(pooling.post(path, {"input": TEXTS[0], "input_type": "poem"}), "input_type")
        both = {"input": TEXTS[0], "input_type": "query", "prompt_name": "query"}
        assert "leave one out" in refused(pooling.post(path, both), "input_type")


def test_classification(pooling: Any) -> None:
    for path in ("/classify", "/v1/classify"):
        answer = pooling.post(path, {"input": TEXTS}).json()
        assert [each["probs"] for each in answer["data"]] == [vector(pooling, text) for text in TEXTS]
        assert [each["num_classes"] for each in answer["data"]] == [2, 2, 2]
        assert [each["label"] for each in answer["data"]] == ["bright"] * 3  # a number of tokens is above 1
        assert answer["id"].startswith("classify-")
    refused(pooling.post("/classify", {"input": []}), "input")


def test_pooling_by_task(pooling: Any) -> None:
    for task in TASKS:
        answer = pooling.post("/pooling", {"input": TEXTS, "task": task}).json()
        assert [each["data"] for each in answer["data"]] == [vector(pooling, text) for text in TEXTS]
        assert [each["object"] for each in answer["data"]] == ["pooling"] * 3
    assert pooling.post("/pooling", {"input": "a"}).json()["data"][0]["data"] == vector(pooling, "a")
    message = refused(pooling.post("/pooling", {"input": "a", "task": "token_classify"}), "task")
    assert message.startswith("Unsupported task: 'token_classify'")


def test_tasks_that_texts_are_embedded_for(make_live: Any) -> None:
    """The adapter's name reaches the engine, the prompt of its name stands before the text."""
    server = make_live(engine={"pooling_tasks": ["embed"]})
    prompts = server.llm.pooling_prompts
    plain = prompts.spec
    refused(server.post("/v1/embeddings", {"input": "a", "task": "find"}), "task")
    named = {"find": "the quire ", "retrieval.query": "twelve "}
    prompts.spec = dataclasses.replace(plain, prompts=named)
    assert embedded(server, input="gathers", task="find") == [vector(server, "the quire gathers")]
    prompts.spec = dataclasses.replace(plain, prompts=named, embedding_tasks=("retrieval.query",))
    message = refused(server.post("/v1/embeddings", {"input": "a", "task": "find"}), "task")
    assert "it has those of retrieval.query" in message
    expected = [vector(server, "twelve blocks")]
    assert embedded(server, input="blocks", task="retrieval.query") == expected
    body = {"texts": ["blocks"], "input_type": "search_query", "embedding_types": ["float"]}
    assert server.post("/v2/embed", body).json()["embeddings"]["float"] == expected
    prompts.spec = dataclasses.replace(prompts.spec, merged_task="other")
    message = refused(server.post("/v1/embeddings", {"input": "blocks", "task": "retrieval.query"}), "task")
    assert "embeds all texts for the task other" in message
    assert server.post("/v2/embed", body).json()["embeddings"]["float"] == expected


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_vectors_are_cosines(bi_encoder: Any, path: str) -> None:
    body = {"queries": TEXTS[0], "documents": TEXTS}
    answer = bi_encoder.post(path, body).json()
    scores = [each["score"] for each in answer["data"]]
    vectors = [vector(bi_encoder, text) for text in TEXTS]
    assert scores == pytest.approx([cosine(vectors[0], each) for each in vectors])
    assert answer["usage"]["prompt_tokens"] == num_tokens(bi_encoder, TEXTS[0], *TEXTS)
    answer = bi_encoder.post(path, {"queries": TEXTS[::-1], "documents": TEXTS}).json()
    pairs = zip(vectors[::-1], vectors, strict=True)
    assert [each["score"] for each in answer["data"]] == pytest.approx([cosine(*pair) for pair in pairs])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking(bi_encoder: Any, path: str) -> None:
    scores = [
        each["score"] for each in bi_encoder.post("/score", {"queries": TEXTS[1], "documents": TEXTS}).json()["data"]
    ]
    body = {"query": TEXTS[1], "documents": TEXTS, "top_n": 2}
    answer = bi_encoder.post(path, body).json()
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == [scores[index] for index in order]
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[index] for index in order]
    assert answer["meta"]["api_version"]["version"] == ("1" if path == "/v1/rerank" else "2")
    bare = bi_encoder.post(path, {**body, "return_documents": False}).json()
    assert [set(each) for each in bare["results"]] == [{"index", "relevance_score"}] * 2


def test_reranking_names_and_leaves_out_what_fails(bi_encoder: Any) -> None:
    body = {"query": "q", "documents": ["a", "long " * 600, "b"]}
    assert refused(bi_encoder.post("/rerank", body), "documents[1]").startswith("documents[1]: ")
    answer = bi_encoder.post("/rerank", {**body, "errors": "per_item"}).json()
    assert sorted(each["index"] for each in answer["results"]) == [0, 2]
    assert [each["index"] for each in answer["errors"]] == [1]
    whole = bi_encoder.post("/rerank", {**body, "max_tokens_per_doc": 3})
    assert len(whole.json()["results"]) == 3
    assert whole.json()["usage"]["prompt_tokens"] < 40


def test_cohere(bi_encoder: Any) -> None:
    vectors = [vector(bi_encoder, text) for text in TEXTS]
    answer = bi_encoder.post(
        "/v2/embed", {"model": "tiny", "texts": TEXTS, "embedding_types": ["float", "int8"]}
    ).json()
    assert answer["embeddings"]["float"] == vectors
    assert [len(each) for each in answer["embeddings"]["int8"]] == [2, 2, 2]
    assert (answer["texts"], answer["response_type"]) == (TEXTS, "embeddings_by_type")
    assert answer["meta"]["billed_units"]["input_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0
    older = bi_encoder.post("/v1/embed", {"texts": TEXTS}).json()
    assert (older["embeddings"], older["response_type"]) == (vectors, "embeddings_floats")
    refused(bi_encoder.post("/v2/embed", {"texts": TEXTS, "embedding_types": ["binary"]}), "embedding_types")
    refused(bi_encoder.post("/v2/embed", {"texts": TEXTS, "truncate": "NONE", "max_tokens": 1}), "texts[0]")
    assert bi_encoder.post("/v2/embed", {"texts": ["long " * 600]}).status_code == 200
    mixed = bi_encoder.post(
        "/v2/embed", {"texts": ["a", "long " * 600], "truncate": "NONE", "errors": "per_item"}
    ).json()
    assert mixed["embeddings"]["float"] == [vector(bi_encoder, "a"), None]
    assert (mixed["errors"][0], mixed["errors"][1]["param"]) == (None, "texts[1]")


def test_text_embeddings_inference(pooling: Any, bi_encoder: Any) -> None:
    vectors = [vector(pooling, text) for text in TEXTS]
    for path in ("/embed", "/"):
        assert pooling.post(path, {"inputs": TEXTS}).json() == vectors
        assert pooling.post(path, {"inputs": TEXTS[0]}).json() == vectors[:1]
    assert pooling.post("/embed_all", {"inputs": TEXTS}).json() == vectors
    refused(pooling.post("/embed_sparse", {"inputs": TEXTS}), None, 404)
    classes = []
    for each in vectors:
        entries = [{"score": number, "label": label} for number, label in zip(each, ("dull", "bright"), strict=True)]
        classes.append(sorted(entries, key=lambda entry: -entry["score"]))
    assert pooling.post("/predict", {"inputs": TEXTS[0]}).json() == classes[0]
    assert pooling.post("/predict", {"inputs": [[text] for text in TEXTS]}).json() == classes
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    scores = bi_encoder.post("/score", {"queries": TEXTS[0], "documents": TEXTS}).json()["data"]
    assert bi_encoder.post("/similarity", body).json() == [each["score"] for each in scores]
    ranks = bi_encoder.post("/rerank", {"query": TEXTS[0], "texts": TEXTS, "return_text": True}).json()
    assert ranks[0] == {"index": 0, "score": pytest.approx(1.0), "text": TEXTS[0]}
    info = pooling.client.get("/info").json()
    assert info["max_input_length"] == 512
    assert list(info["model_type"]) == ["embedding"]


@pytest.mark.parametrize(
    ("path", "body", "hint"),
    [
        ("/v1/embeddings", {"input": "a"}, "--convert embed"),
        ("/v2/embed", {"texts": ["a"]}, "--convert embed"),
        ("/classify", {"input": "a"}, "--convert classify"),
        ("/score", {"queries": "a", "documents": "b"}, "--convert classify"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "--convert classify"),
        ("/pooling", {"input": "a"}, "--convert embed"),
        ("/embed", {"inputs": "a"}, "--convert embed"),
        ("/predict", {"inputs": "a"}, "--convert classify"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "--convert embed"),
        ("/", {"inputs": "a"}, "--convert embed"),
    ],
)
def test_a_server_that_generates_says_what_would_pool(live: Any, path: str, body: Any, hint: str) -> None:
    response = live.post(path, body)
    message = refused(response, None, 404)
    assert "--runner pooling" in message
    assert hint in message


def test_metrics_and_models_know_pooling(pooling: Any) -> None:
    def counts(name: str) -> dict[str, float]:
        text = pooling.client.get("/metrics").text
        families = text_string_to_metric_families(text)
        return {
            sample.labels["task"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"quire:{name}"
        }

    before = [counts(name).get("classify", 0) for name in ("pooling_requests_total", "pooling_prompt_tokens_total")]
    pooling.post("/classify", {"input": [[5, 6], [7]]})
    assert counts("pooling_requests_total")["classify"] == before[0] + 2
    assert counts("pooling_prompt_tokens_total")["classify"] == before[1] + 3
    assert counts("pooling_request_latency_seconds_count")["classify"] == before[0] + 2
    assert pooling.client.get("/v1/models").json()["data"][0]["pooling_tasks"] == TASKS


def test_what_fails_in_the_engine_is_no_answer(pooling: Any) -> None:
    with pooling.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="a", dimensions=5)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(("path", "body"), [("/v1/embeddings", {"input": "a"}), ("/embed", {"inputs": "a"})])
def test_answers_come_whole(pooling: Any, path: str, body: dict[str, Any]) -> None:
    assert "come whole" in refused(pooling.post(path, {**body, "stream": True}), "stream")
