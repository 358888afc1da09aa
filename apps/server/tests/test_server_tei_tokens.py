"""POST /tokenize with `inputs`, and /decode, in TEI's shapes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

TEXT = "the quire gathers"


@pytest.fixture(scope="module")
def words(make_live: Any, write_word_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of words, with [CLS] before texts and [SEP] behind them; its model has a prompt "query"."""
    folder = tmp_path_factory.mktemp("words")
    write_word_tokenizer(folder, "capital of France Where")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 200, **sizes}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    server = make_live(folder=folder, engine={"pooling_tasks": ["embed"], "vocab_size": 200, "num_token_ids": 100})
    prompts = server.llm.pooling_prompts
    prompts.spec = dataclasses.replace(prompts.spec, prompts={"query": "Where "})
    return server


def test_tokens_with_their_places(words: Any) -> None:
    tokenizer = words.llm.renderer.tokenizer
    (tokens,) = words.post("/tokenize", {"inputs": "capital of France"}).json()
    assert [each["id"] for each in tokens] == tokenizer.encode("capital of France")
    assert [each["text"] for each in tokens] == ["[CLS]", "capital", "of", "France", "[SEP]"]
    assert [each["special"] for each in tokens] == [True, False, False, False, True]
    assert [(each["start"], each["stop"]) for each in tokens] == [(None, None), (0, 7), (8, 10), (11, 17), (None, None)]
    plain = words.post("/tokenize", {"inputs": ["of", "capital of"], "add_special_tokens": False}).json()
    assert [[each["text"] for each in text] for text in plain] == [["of"], ["capital", "of"]]
    (asked,) = words.post("/tokenize", {"inputs": "of", "prompt_name": "query"}).json()
    assert [each["start"] for each in asked] == [None, 0, 6, None]


def test_token_ids_to_texts(words: Any) -> None:
    ids = words.llm.renderer.tokenizer.encode("capital of France")
    assert words.post("/decode", {"ids": ids}).json() == ["capital of France"]
    assert words.post("/decode", {"ids": [ids[1:2], ids[2:3]]}).json() == ["capital", "of"]
    (whole,) = words.post("/decode", {"ids": ids, "skip_special_tokens": False}).json()
    assert whole.startswith("[CLS]")
    assert whole.endswith("[SEP]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"inputs": "a", "prompt": "b"}, "inputs"),
        ("/tokenize", {"inputs": [5]}, "inputs"),
        ("/tokenize", {"inputs": "a", "prompt_name": "passage"}, "prompt_name"),
        ("/decode", {"ids": [5, 200]}, "ids[1]"),
        ("/decode", {"ids": [[5], [6, 999]]}, "ids[1][1]"),
        ("/decode", {"ids": "a"}, "ids"),
        ("/decode", {}, "ids"),
        ("/decode", {"ids": [-1]}, "ids"),
    ],
)
def test_what_is_wrong_is_named(words: Any, path: str, body: dict[str, Any], param: str) -> None:
    response = words.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_a_model_that_generates_has_no_prompts(live: Any) -> None:
    (tokens,) = live.post("/tokenize", {"inputs": TEXT}).json()
    assert "".join(each["text"] for each in tokens if not each["special"]) == TEXT
    error = live.post("/tokenize", {"inputs": TEXT, "prompt_name": "query"}).json()["error"]
    assert error["param"] == "prompt_name"
