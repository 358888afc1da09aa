"""Bodies of the pooling routes: what is read of each shape, and which field a wrong one names."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from quire_interfaces import PooledOutput, PoolingParams, RequestError
from quire_server.body import parse_body
from quire_server.cohere_protocol import CohereEmbedRequest, CohereMeta, vectors_by_type
from quire_server.pooling_protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingInput,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    pairs_of,
)
from quire_server.scoring import cosine, max_sim
from quire_server.tei import sparse_weights
from quire_server.tei_protocol import (
    TEIEmbedAllRequest,
    TEIEmbedRequest,
    TEIPredictRequest,
    TEIPromptRequest,
    TEISimilarityRequest,
)

USER = {"role": "user", "content": "hi"}


def parsed(model: Any, /, **fields: Any) -> Any:
    return parse_body(json.dumps(fields).encode(), model)


def param_of(work: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        work()
    return caught.value.param


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({"input": "a"}, [PoolingInput("input", prompt="a")]),
        ({"input": ""}, None),
        ({"input": ["a", ""]}, [PoolingInput("input[0]", prompt="a"), PoolingInput("input[1]", prompt="")]),
        ({"input": [5, 6]}, [PoolingInput("input", prompt=[5, 6])]),
        ({"input": [[5], [6, 7]]}, [PoolingInput("input[0]", prompt=[5]), PoolingInput("input[1]", prompt=[6, 7])]),
        ({"messages": [USER]}, [PoolingInput("messages", messages=[USER])]),
        ({"input": [USER]}, [PoolingInput("input", messages=[USER])]),
        (
            {"messages": [[USER], [USER, USER]]},
            [PoolingInput("messages[0]", messages=[USER]), PoolingInput("messages[1]", messages=[USER, USER])],
        ),
        ({"input": [[USER]]}, [PoolingInput("input[0]", messages=[USER])]),
        ({}, None),
        ({"input": []}, None),
        ({"messages": []}, None),
        ({"input": "a", "messages": [USER]}, None),
    ],
)
@pytest.mark.parametrize("model", [EmbeddingRequest, ClassificationRequest, PoolingRequest])
def test_inputs_of_every_shape(model: Any, fields: dict[str, Any], inputs: list[PoolingInput] | None) -> None:
    body = parsed(model, **fields)
    if inputs is None:
        assert param_of(body.inputs) in ("input", "messages")
    else:
        assert body.inputs() == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [2**31]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [None]}, "input"),
        ({"input": ["a"] * 16385}, "input"),
        ({"input": "a", "dimensions": "3"}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "int4"}, "embed_dtype"),
        ({"input": "a", "endianness": "middle"}, "endianness"),
        ({"input": "a", "normalize": "yes"}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": "x"}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "up"}, "truncation_side"),
        ({"input": "a", "errors": "ignore"}, "errors"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "task": "sing"}, "task"),
        ({"input": "a", "task": 5}, "task"),
        ({"messages": "a"}, "messages"),
        ({"messages": [5]}, "messages"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    name = param_of(lambda: parsed(PoolingRequest, **fields))
    assert name is not None
    assert name.split("[")[0].split(".")[0] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"padding": "max_length"}, "padding"),
        ({"errors": "per_item", "encoding_format": "bytes"}, "errors"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_is_not_served_is_refused(fields: dict[str, Any], param: str) -> None:
    body = parsed(EmbeddingRequest, input="a", **fields)
    assert param_of(body.check_supported) == param


def test_texts_are_embedded_for_a_task_as_jinas_api_has_it() -> None:
    assert parsed(EmbeddingRequest, input="a", task="separation").pooling_params("embed") == PoolingParams(
        task="embed", embedding_task="separation"
    )
    assert parsed(EmbeddingRequest, input="a").pooling_params("embed").embedding_task is None
    assert parsed(PoolingRequest, input="a", task="embed").pooling_params("embed").embedding_task is None


def test_pooling_params() -> None:
    body = parsed(EmbeddingRequest, input="a", dimensions=3, normalize=False, truncate_prompt_tokens=-1)
    assert body.pooling_params("embed") == PoolingParams(
        task="embed", dimensions=3, use_activation=False, truncate_prompt_tokens=-1
    )
    assert parsed(EmbeddingRequest, input="a", use_activation=True).activation() is True
    assert parsed(EmbeddingRequest, input="a", use_activation=True, normalize=True).activation() is True
    contradiction = parsed(EmbeddingRequest, input="a", use_activation=True, normalize=False)
    assert param_of(contradiction.activation) == "normalize"
    process = parsed(PoolingRequest, input="a", step_tag_id=5, returned_token_ids=[1, 2]).pooling_params(None)
    assert (process.step_tag_id, process.returned_token_ids) == (5, (1, 2))


@pytest.mark.parametrize(("field", "value"), [("dimensions", 0), ("dimensions", 2**62), ("truncate_prompt_tokens", -2)])
def test_numbers_out_of_range_are_named(field: str, value: int) -> None:
    body = parsed(EmbeddingRequest, input="a", **{field: value})
    assert param_of(lambda: body.pooling_params("embed")) == field


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]
)
def test_scores_pair_each_document_with_its_query(names: tuple[str, str]) -> None:
    first, second = names

    def pairs(one: Any, two: Any) -> list[tuple[Any, Any]]:
        return [(a.prompt, b.prompt) for a, b in pairs_of(*parsed(ScoreRequest, **{first: one, second: two}).sides())]

    assert pairs("q", "d") == [("q", "d")]
    assert pairs("q", ["d", "e"]) == [("q", "d"), ("q", "e")]
    assert pairs(["q"], ["d", "e"]) == [("q", "d"), ("q", "e")]
    assert pairs(["q", "r"], ["d", "e"]) == [("q", "d"), ("r", "e")]
    assert param_of(lambda: pairs(["q", "r"], ["d", "e", "f"])) == first
    assert param_of(lambda: pairs(["q", "r"], "d")) == first
    assert param_of(lambda: pairs("q", [])) == second
    assert param_of(lambda: pairs([], "d")) == first


def test_scores_need_one_pair_of_names() -> None:
    assert param_of(parsed(ScoreRequest, queries="a").sides) == "queries"
    assert param_of(parsed(ScoreRequest).sides) == "queries"
    assert param_of(parsed(ScoreRequest, queries="a", documents="b", text_1="a", text_2="b").sides) == "text_1"


def test_documents_are_texts_or_objects() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    documents = [
        "a", {"text": "b"}, {"content": "c"}, {"content": [{"type": "text", "text": "d"}]}, {"content": [image]},
    ]  # fmt: skip
    (query,), sides = parsed(RerankRequest, query="q", documents=documents).sides()
    assert query == PoolingInput("query", prompt="q")
    assert [each.prompt for each in sides] == ["a", "b", "c", "d", None]
    assert sides[4].messages == [{"role": "user", "content": [image]}]
    for wrong in ({}, {"text": 5}, {"content": []}, {"content": [5]}, {"content": {"text": "a"}}):
        assert param_of(parsed(RerankRequest, query="q", documents=["a", wrong]).sides) == "documents[1]"
        assert param_of(parsed(RerankRequest, query=wrong, documents=["a"]).sides) == "query"
    assert param_of(parsed(RerankRequest, query="q").sides) == "documents"
    assert param_of(parsed(RerankRequest, query="q", documents=["a"], texts=["a"]).sides) == "texts"
    assert param_of(parsed(RerankRequest, query="q", documents=[]).sides) == "documents"


def test_numbers_of_reranking() -> None:
    def num_results(**fields: Any) -> int:
        return parsed(RerankRequest, query="q", documents=["a"] * 3, **fields).num_results(3)

    assert [num_results(), num_results(top_n=2), num_results(top_n=9), num_results(top_n=0)] == [3, 2, 3, 3]
    assert num_results(top_k=1) == 1
    assert param_of(lambda: num_results(top_n=-1)) == "top_n"
    body = parsed(RerankRequest, query="q", documents=["a"], max_tokens_per_doc=-1)
    assert param_of(body.check_supported) == "max_tokens_per_doc"


def test_reranking_as_tei_asks() -> None:
    body = parsed(RerankRequest, query="q", texts=["a"], truncate=True, truncation_direction="Left", raw_scores=True)
    assert body.is_tei
    assert body.pooling_params("score") == PoolingParams(
        task="score", use_activation=False, truncate_prompt_tokens=-1, truncation_side="left"
    )


def test_cohere_reads_one_of_three() -> None:
    assert parsed(CohereEmbedRequest, texts=["a", "b"]).prompts() == [
        PoolingInput("texts[0]", prompt="a"),
        PoolingInput("texts[1]", prompt="b"),
    ]
    (image,) = parsed(CohereEmbedRequest, images=["data:,x"]).prompts()
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert image.messages == [{"role": "user", "content": [part]}]
    text = {"type": "text", "text": "a"}
    one, mixed = parsed(CohereEmbedRequest, inputs=[{"content": [text]}, {"content": [text, part]}]).prompts()
    assert (one.prompt, mixed.messages) == ("a", [{"role": "user", "content": [text, part]}])
    assert param_of(parsed(CohereEmbedRequest).prompts) == "texts"
    assert param_of(parsed(CohereEmbedRequest, texts=[]).prompts) == "texts"
    assert param_of(parsed(CohereEmbedRequest, texts=["a"], images=["b"]).prompts) == "images"
    assert param_of(lambda: parsed(CohereEmbedRequest, inputs=[{"content": []}])) == "inputs[0].content"
    wrong = parsed(CohereEmbedRequest, texts=["a"], max_tokens=0)
    assert param_of(wrong.check_supported) == "max_tokens"


def test_input_types_of_cohere_are_names_of_prompts() -> None:
    def name(input_type: str | None, *prompts: str) -> str | None:
        body = parsed(CohereEmbedRequest, texts=["a"], input_type=input_type)
        chosen: str | None = body.prompt_name(dict.fromkeys(prompts, "text: "))
        return chosen

    assert name("search_query", "query", "passage") == "query"
    assert name("search_document", "query", "passage") == "passage"
    assert name("search_document", "corpus", "document") == "document"
    assert name("search_query", "search_query", "query") == "search_query"
    assert name("search_query", "retrieval.query", "retrieval.passage") == "retrieval.query"
    assert name("search_document", "retrieval.query", "retrieval.passage") == "retrieval.passage"
    assert name("clustering", "separation", "classification") == "separation"
    assert name("clustering", "query") is None
    assert name("search_query") is None
    assert name(None, "query") is None
    assert name("web", "web") == "web"
    assert param_of(lambda: name("web", "query")) == "input_type"


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        (EmbeddingRequest, {"input": "a"}),
        (RerankRequest, {"query": "q", "documents": ["a"]}),
        (CohereEmbedRequest, {"texts": ["a"]}),
        (TEIEmbedRequest, {"inputs": "a"}),
    ],
)
def test_nulls_are_fields_that_were_left_out(model: Any, needed: dict[str, Any]) -> None:
    nulls = dict.fromkeys(set(model.model_fields) - set(needed))
    assert parsed(model, **needed, **nulls).model_dump() == parsed(model, **needed).model_dump()


def test_cohere_truncates_at_the_end() -> None:
    def params(**fields: Any) -> PoolingParams:
        return parsed(CohereEmbedRequest, texts=["a"], **fields).pooling_params("embed")

    assert params() == PoolingParams(task="embed", truncate_prompt_tokens=-1, truncation_side="right")
    assert params(truncate="START", max_tokens=5) == PoolingParams(
        task="embed", truncate_prompt_tokens=5, truncation_side="left"
    )
    assert params(truncate="NONE", output_dimension=64) == PoolingParams(task="embed", dimensions=64)
    body = parsed(CohereEmbedRequest, texts=["a"], truncate="NONE", max_tokens=5)
    body.check_length("texts[0]", 5)
    assert param_of(lambda: body.check_length("texts[0]", 6)) == "texts[0]"


def test_cohere_vectors_in_each_form() -> None:
    vector = struct.pack("<8f", *[1.0, -1.0] * 4)
    forms = vectors_by_type([vector, None], ["float", "int8", "uint8", "binary", "ubinary", "base64"])
    assert forms["float"] == [[1.0, -1.0] * 4, None]
    assert forms["int8"] == [[127, -127] * 4, None]
    assert forms["uint8"] == [[255, 1] * 4, None]
    assert forms["ubinary"] == [[0b10101010], None]
    assert forms["binary"] == [[0b10101010 - 128], None]
    assert param_of(lambda: vectors_by_type([vector[:12]], ["binary"])) == "embedding_types"


def test_bodies_of_tei() -> None:
    assert parsed(TEIEmbedRequest, inputs="a").prompts() == [PoolingInput("inputs", prompt="a")]
    assert parsed(TEIEmbedRequest, inputs=["a"]).prompts() == [PoolingInput("inputs[0]", prompt="a")]
    assert parsed(TEIPromptRequest, inputs=[5, 6]).prompts() == [PoolingInput("inputs", prompt=[5, 6])]
    assert param_of(parsed(TEIPromptRequest, inputs=[]).prompts) == "inputs"
    assert parsed(TEIEmbedRequest, inputs="a", truncate=True, truncation_direction="Left").pooling_params(
        "embed"
    ) == PoolingParams(task="embed", use_activation=True, truncate_prompt_tokens=-1, truncation_side="left")
    body = parsed(
        TEISimilarityRequest,
        inputs={"source_sentence": "a", "sentences": ["b", "c"]},
        parameters={"truncate": True, "prompt_name": "query"},
    )
    assert [each.prompt for each in body.prompts()] == ["a", "b", "c"]
    assert (body.truncate, body.prompt_name) == (True, "query")
    empty = {"source_sentence": "a", "sentences": []}
    assert param_of(lambda: parsed(TEISimilarityRequest, inputs=empty)) == "inputs.sentences"


@pytest.mark.parametrize(
    ("inputs", "texts", "is_batch"),
    [
        ("a", [("a", None)], False),
        (["a"], [("a", None)], False),
        (["a", "b"], [("a", "b")], False),
        ([["a"], ["b", "c"]], [("a", None), ("b", "c")], True),
        ([["a"], "b"], [("a", None), ("b", None)], True),
    ],
)
def test_predictions_of_texts_and_pairs(inputs: Any, texts: list[Any], is_batch: bool) -> None:
    body = parsed(TEIPredictRequest, inputs=inputs)
    assert [(a.prompt, b and b.prompt) for a, b in body.prompts()] == texts
    assert body.is_batch is is_batch


@pytest.mark.parametrize("inputs", [[], ["a", "b", "c"], [[]], [["a"], ["a", "b", "c"]]])
def test_predictions_take_one_text_or_two(inputs: Any) -> None:
    name = param_of(parsed(TEIPredictRequest, inputs=inputs).prompts)
    assert name is not None
    assert name.startswith("inputs")


def test_variables_of_the_template_that_writes_pairs() -> None:
    def variables(**fields: Any) -> Any:
        return parsed(ScoreRequest, queries="a", documents="b", **fields).prompt_options()["chat_template_kwargs"]

    assert variables() == {}
    assert variables(instruction="Judge") == {"instruction": "Judge"}
    own = {"instruction": "Rank", "style": "short"}
    assert variables(instruction="Judge", chat_template_kwargs=own) == own


def test_images_are_billed_apart() -> None:
    image = {"content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    text = {"content": [{"type": "text", "text": "a"}]}
    bodies = ({"texts": ["a"]}, {"inputs": [text]}, {"inputs": [text, image]}, {"images": ["data:,x"]})
    has_images = [parsed(CohereEmbedRequest, **body).has_images for body in bodies]
    assert has_images == [False, False, True, True]
    billed = [CohereMeta.of("2", 7, has_images=each).billed_units for each in has_images[1:3]]
    assert billed == [{"input_tokens": 7}, {"input_tokens": 0, "image_tokens": 7}]
    assert CohereMeta.of("2", 7, search_units=1).billed_units == {"search_units": 1}


def test_vectors_of_tokens_are_not_normalized_for_tei() -> None:
    assert parsed(TEIEmbedAllRequest, inputs="a").pooling_params("token_embed").use_activation is False
    assert parsed(TEIEmbedRequest, inputs="a", normalize=False, dimensions=4).pooling_params("embed").dimensions == 4
    raw = [parsed(TEIPredictRequest, inputs="a", raw_scores=each).pooling_params("classify") for each in (True, False)]
    assert [each.use_activation for each in raw] == [False, True]


def test_scores_of_late_interaction_are_sums_over_the_query() -> None:
    """Of each token of the query, its best token of the document (arXiv 2004.12832, equation 3)."""
    query = PooledOutput(struct.pack("<6f", 1, 0, 0, 1, 2, 1), (3, 2))
    document = PooledOutput(struct.pack("<4f", 3, 1, 0, 2), (2, 2))
    assert max_sim(query, document) == 3 + 2 + 7
    assert max_sim(document, query) == 7 + 2
    assert max_sim(query, PooledOutput(b"", (0, 2))) == 0
    one, two = PooledOutput(struct.pack("<2f", 3, 4), (2,)), PooledOutput(struct.pack("<2f", 4, 3), (2,))
    assert cosine(one, two) == pytest.approx(24 / 25)
    assert cosine(one, PooledOutput(struct.pack("<2f", 0, 0), (2,))) == 0


def test_sparse_weights_are_the_largest_of_a_token() -> None:
    """Of BGE-M3's weights per token, without those of special tokens; of SPLADE's over the vocabulary, those not 0."""
    per_token = PooledOutput(struct.pack("<4f", 0.75, 0.25, 0.5, 0), (4, 1))
    expected = [{"index": 3, "value": 0.5}, {"index": 7, "value": 0.75}]
    assert sparse_weights(per_token, [101, 7, 7, 3, 9, 102], [101, 102]) == expected
    assert sparse_weights(per_token, [7, 7, 3, 9], [101, 102]) == expected
    assert sparse_weights(PooledOutput(struct.pack("<3f", 0, 2, 0), (3,)), [5], []) == [{"index": 1, "value": 2.0}]
