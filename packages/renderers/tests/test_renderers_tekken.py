"""Tekken checkpoints: token ids of texts and of conversations are those of mistral-common.

Its version 1.13.1 wrote the golden files, with the small tekken.json beside them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_interfaces import CheckpointError
from quire_renderers import ChatFormat, ChatRenderer, load_tokenizer

GOLDEN = Path(__file__).parent / "golden" / "tekken"
CONTENT = json.loads((GOLDEN / "tekken.json").read_text())
CHATS = json.loads((GOLDEN / "chats.json").read_text())


def write(folder, content=CONTENT, version="v13"):
    content = {**content, "config": {**content["config"], "version": version}}
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    versions = ("v3", "v7", "v11", "v13")
    return {each: ChatRenderer(load_tokenizer(write(tmp_path_factory.mktemp(each), version=each))) for each in versions}


def test_texts(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path))
    texts = json.loads((GOLDEN / "texts.json").read_text())
    for text, ids in texts[:-1]:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode(texts[-1][0], add_special_tokens=False) == [1, 3]  # as text, it is ordinary: see the chats
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 309)


@pytest.mark.parametrize("prompt", CHATS["prompts"], ids=lambda each: f"{each['version']}-{each['case']}")
def test_conversations(prompt, renderers):
    case = CHATS["conversations"][prompt["case"]]
    rendered = renderers[prompt["version"]].render_chat(case["messages"], tools=case["tools"])
    assert rendered.token_ids == prompt["ids"]


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("22", "22"),
        ("true", "true"),
        ('{"a":1}', '{"a": 1}'),
        ('"é"', '"é"'),
        ("[error] no such city", '"[error] no such city"'),
        ("{", '"{"'),
        ("sunny", '"sunny"'),
        ("", '""'),
        ("9" * 5000, '"' + "9" * 5000 + '"'),
    ],
)
def test_results_of_tools_are_json_in_version_3(content, written, renderers):
    call = {"id": "a12345678", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a12345678", "content": content},
    ]
    renderer = renderers["v3"]
    prompt = renderer.tokenizer.decode(renderer.render_chat(messages).token_ids, skip_special_tokens=False)
    result = prompt.partition("[TOOL_RESULTS]")[2].partition("[/TOOL_RESULTS]")[0]
    assert result == f'{{"content": {written}, "call_id": "a12345678"}}'


def test_the_format_is_recognised_and_other_versions_have_no_template(tmp_path):
    template = load_tokenizer(write(tmp_path)).files.chat_templates["default"]
    form = ChatFormat(chat_template=template)
    assert (form.tool_parser, form.reasoning_parser) == ("mistral", "mistral")
    assert load_tokenizer(write(tmp_path, version="v99")).files.chat_templates == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab": CONTENT["vocab"][1:]}, "each byte be one"),
        ({"vocab": [{"rank": 0}]}, "no token_bytes"),
        ({"vocab": None}, "must have a vocab"),
        ({"special_tokens": [{"rank": 99, "token_str": "<s>"}]}, "rank and a token_str"),
        ({"special_tokens": [{"rank": 0, "token_str": "<s>"}]}, "must hold <s> and </s>"),
        ({"special_tokens": 3}, "rank and a token_str"),
        ({"special_tokens": [{"rank": -1, "token_str": "<s>"}]}, "rank and a token_str"),
        ({"special_tokens": None, "config": {**CONTENT["config"], "default_num_special_tokens": 1}}, "must hold <s>"),
        ({"config": {**CONTENT["config"], "default_num_special_tokens": -1}}, "must be at least 0"),
        ({"config": {**CONTENT["config"], "default_vocab_size": 3}}, "each byte be one"),
        ({"config": {**CONTENT["config"], "pattern": "(["}}, "pattern"),
    ],
)
def test_files_that_are_wrong_are_refused(change, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(write(tmp_path, {**CONTENT, **change}))
