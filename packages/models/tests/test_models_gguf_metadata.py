"""What a GGUF file's metadata says of a network and its tokens: read, refused by name, or said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models_gguf_small import write

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, resolve_model
from quire_models.gguf.folder import unread_metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((resolve_model(file) / "config.json").read_text())
    return found


ENDS = [
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<turn|>",
]  # fmt: skip
ONLY_AS_CONTROL = ["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["]


@pytest.mark.parametrize("text", ENDS)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_texts_that_end_a_turn_are_known_whatever_the_file_calls_its_end(tmp_path, text, kind):
    file = write(tmp_path / "x.gguf", {"tokenizer.ggml.eos_token_id": 1}, tokens=[("a", 1), ("z", 3), (text, kind)])
    assert config(file)["eos_token_id"] == [1, 2]
    added = json.loads((resolve_model(file) / "tokenizer.json").read_text())["added_tokens"]
    assert [(token["id"], token["special"]) for token in added] == [(1, True), (2, True)]


@pytest.mark.parametrize("text", ONLY_AS_CONTROL)
def test_texts_that_may_be_words_end_a_turn_as_control_tokens_only(tmp_path, text):
    vocabulary = [("a", 1), ("z", 3)]
    for kind, expected in ((NORMAL, [1]), (USER_DEFINED, [1]), (CONTROL, [1, 2])):
        file = write(tmp_path / f"{kind}.gguf", {"tokenizer.ggml.eos_token_id": 1}, tokens=[*vocabulary, (text, kind)])
        assert config(file)["eos_token_id"] == expected


def test_end_of_a_message_is_no_end_where_messages_follow_each_other(tmp_path):
    harmony = [("<|return|>", 3), ("<|call|>", 3), ("<|end|>", 3)]
    assert config(write(tmp_path / "a.gguf", tokens=harmony))["eos_token_id"] == [0, 1]
    solar = [("<|flush|>", 3), ("<|calls|>", 3), ("<|end|>", 3)]
    assert sorted(config(write(tmp_path / "b.gguf", tokens=solar))["eos_token_id"]) == [0, 1]
    gemma = [("<|tool_response>", 3), ("</s>", 3)]
    assert config(write(tmp_path / "c.gguf", tokens=gemma))["eos_token_id"] == [0]


def test_ends_that_the_file_names_come_first_and_must_be_tokens(tmp_path):
    names = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eom", "eot", "eos", "fim_sep"))}
    tokens = [(text, 1) for text in "abcd"]
    assert config(write(tmp_path / "a.gguf", names, tokens=tokens))["eos_token_id"] == [2, 1, 0, 3]
    for name in names:
        with pytest.raises(CheckpointError, match=f"{name} is 4, there are 4 tokens"):
            resolve_model(write(tmp_path / "b.gguf", {name: 4}, tokens=tokens))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN_FOUND = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 1.0, "rope.scaling.finetuned": True}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        (YARN, YARN_FOUND),
        (
            {**YARN, "rope.scaling.original_context_length": 1024, "rope.scaling.yarn_beta_fast": 16.0,
             "rope.scaling.yarn_beta_slow": 2.0},
            {**YARN_FOUND, "original_max_position_embeddings": 1024, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        ({**YARN, "rope.scaling.attn_factor": 1.0}, YARN_FOUND),
        ({**YARN, "rope.scaling.attn_factor": 0.5}, {**YARN_FOUND, "attention_factor": 0.5 * 1.138629436}),
        ({**YARN, "rope.scaling.yarn_attn_factor": 0.5}, {**YARN_FOUND, "attention_factor": 0.5 * 1.138629436}),
    ],
)  # fmt: skip
def test_scaling_of_positions(tmp_path, metadata, expected):
    found = config(write(tmp_path / "x.gguf", metadata))["rope_scaling"]
    assert found == (
        expected and {**expected, **{key: pytest.approx(expected[key]) for key in expected if "att" in key}}
    )
    assert ModelConfig.from_path(resolve_model(tmp_path / "x.gguf")).rope.factor == (expected or {}).get("factor", 1.0)


def test_divisors_of_frequencies_are_used_as_they_are(tmp_path):
    assert config(write(tmp_path / "ones.gguf", frequencies=[1.0, 1.0]))["rope_scaling"] is None
    file = write(tmp_path / "x.gguf", frequencies=[1.0, 7.5])
    for max_model_len in (128, 4096):
        rope = ModelConfig.from_path(resolve_model(file)).within(max_model_len).rope
        assert (rope.divisors, rope.attention_factor) == ((1.0, 7.5), 1.0)
    for values in ([0.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(CheckpointError, match="must hold numbers above 0"):
            resolve_model(write(tmp_path / "wrong.gguf", frequencies=values))


@pytest.mark.parametrize(
    ("metadata", "more", "message"),
    [
        ({"rope.scaling.type": "spiral"}, {}, "rope scaling 'spiral' is not read"),
        ({"rope.scaling.type": "longrope"}, {}, "rope scaling 'longrope' is not read"),
        ({"rope.scaling.factor": 4.0}, {"frequencies": [1.0, 8.0]}, "rope_freqs.weight and a rope scaling factor"),
        (YARN, {"frequencies": [1.0, 8.0]}, "rope_freqs.weight and rope scaling of type yarn"),
        ({"rope.scaling.attn_factor": 1.19}, {}, "an attention factor .* for rope scaling of type yarn only"),
        ({**YARN, "rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor 0.5 is not supported"),
        ({"rope.scaling.factor": -4.0}, {}, "rope.scaling.factor must be at least 0"),
        ({"rope.scaling.factor": "four"}, {}, "rope.scaling.factor must be a number, is 'four'"),
        ({"rope.dimension_count": 2}, {}, "rope.dimension_count 2 is not supported"),
        ({"attention.value_length": 8}, {}, "attention.value_length 8 is not supported"),
        ({"attention.scale": 0.25}, {}, "attention.scale 0.25 is not read"),
        ({"attention.causal": False}, {}, "attention.causal False is not supported"),
        ({"logit_scale": 0.5}, {}, "logit_scale 0.5 is not supported"),
        ({"attention.clamp_kqv": 8.0}, {}, r"llama.attention.clamp_kqv \(8.0\) is set, which is not supported"),
        ({"attention.max_alibi_bias": 8.0}, {}, "max_alibi_bias .* is set"),
        ({"attn_logit_softcapping": 50.0}, {}, "llama.attn_logit_softcapping .* is set"),
        ({"something_new": 3}, {}, r"llama.something_new \(3\) is set"),
        ({"attention.head_count_kv": [1, 2]}, {}, r"head_count_kv differs from layer to layer \(1, 2\)"),
        ({"attention.head_count": [2, 2, 2]}, {}, "head_count has 3 numbers for 2 layers"),
        ({"feed_forward_length": [12, 16]}, {}, "feed_forward_length differs from layer to layer"),
        ({"attention.head_count_kv": ["one", "one"]}, {}, "head_count_kv must be a whole number above 0, is 'one'"),
        ({"attention.head_count": 0}, {}, "head_count must be a whole number above 0, is 0"),
        ({"attention.head_count": True}, {}, "head_count must be a whole number above 0, is True"),
        ({"block_count": 10**9}, {}, "block_count is 1000000000, but there are only 11 tensors"),
        ({"block_count": [2, 2]}, {}, r"block_count must be a whole number, is \[2, 2\]"),
        ({"embedding_length": 10**9}, {}, "embedding_length is 1000000000, but token_embd.weight has the shape"),
        ({"attention.head_count": 10**6}, {}, "head_count times attention.key_length is 4000000, but blk.0.attn_q"),
        ({"attention.head_count_kv": 2}, {}, "head_count_kv times attention.key_length is 8, but blk.0.attn_k"),
        ({"feed_forward_length": 10**9}, {}, "feed_forward_length is 1000000000, but blk.0.ffn_up.weight has"),
        ({"context_length": "long"}, {}, "context_length must be a whole number, is 'long'"),
        ({"context_length": None}, {}, "context_length is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, {}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokenizer.ggml.tokens": "abc"}, {}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokenizer.ggml.eos_token_id": "end"}, {"tokens": [("a", 1)]}, "eos_token_id is 'end', there are 1 tokens"),
        ({"tokenizer.ggml.add_bos_token": 2}, {"tokens": [("a", 1)]}, "add_bos_token must be true or false, is 2"),
        ({"expert_count": 2, "expert_used_count": 3}, {}, "expert_used_count is 3, of 2 experts"),
        ({"tokenizer.ggml.tokens": list("abcde")}, {}, "tokens has 5 tokens, but token_embd.weight has 4 rows"),
        ({"tokenizer.chat_template": 5}, {"tokens": [("a", 1)]}, "tokenizer.chat_template must be a string, is 5"),
    ],
)  # fmt: skip
def test_what_would_make_another_network_is_refused_by_name(tmp_path, metadata, more, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        resolve_model(write(tmp_path / "x.gguf", metadata, **more))
    assert str(tmp_path / "x.gguf") in str(raised.value)


def test_lists_of_equal_numbers_and_values_without_effect_are_read(tmp_path):
    neutral = {
        "attention.head_count_kv": [1, 1], "attention.head_count": [2, 2], "feed_forward_length": [12, 12],
        "vocab_size": 4, "logit_scale": 1.0, "attention.causal": True, "attention.scale": 0.5,
        "tensor_data_layout": "Meta AI original pth", "attention.clamp_kqv": 0.0, "expert_count": 0,
    }  # fmt: skip
    assert config(write(tmp_path / "x.gguf", neutral)) == config(write(tmp_path / "plain.gguf"))


def test_metadata_of_which_nothing_is_made_is_known_at_each_start(tmp_path):
    metadata = {
        "tokenizer.ggml.suppress_tokens": [1, 2], "other.key": 3, "general.sampling.mirostat": 2,
        "attention.sliding_window": 16, "general.name": "x", "tokenizer.ggml.fim_pre_token_id": 0,
    }  # fmt: skip
    file = write(tmp_path / "x.gguf", metadata, tokens=[("a", 1), ("b", 1)])
    for _ in range(2):
        assert sorted(unread_metadata(resolve_model(file))) == [
            "general.sampling.mirostat", "llama.attention.sliding_window", "other.key",
            "tokenizer.ggml.suppress_tokens",
        ]  # fmt: skip
    assert unread_metadata(resolve_model(write(tmp_path / "plain.gguf"))) == ()
    assert unread_metadata(tmp_path) == ()


def test_defaults_of_sampling_become_a_generation_config(tmp_path):
    metadata = {
        "general.sampling.temp": 0.25, "general.sampling.top_k": 20, "general.sampling.top_p": 0.5,
        "general.sampling.min_p": 0.125, "general.sampling.penalty_repeat": 1.5,
    }  # fmt: skip
    folder = resolve_model(write(tmp_path / "x.gguf", metadata))
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "temperature": 0.25, "top_k": 20, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5,
    }  # fmt: skip


def test_chat_templates_by_name(tmp_path):
    key = "tokenizer.chat_template"
    for metadata, expected in (
        ({key: "plain"}, "plain"),
        ({key: "plain", f"{key}.tool_use": "tools", f"{key}.rag": "found", f"{key}s": ["tool_use", "rag"]},
         {"default": "plain", "tool_use": "tools", "rag": "found"}),
        ({f"{key}.tool_use": "tools"}, {"tool_use": "tools"}),
        ({}, None),
    ):  # fmt: skip
        file = write(tmp_path / f"{len(metadata)}.gguf", metadata, tokens=[("a", 1)])
        found = json.loads((resolve_model(file) / "tokenizer_config.json").read_text()).get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        assert found == expected


def test_absurd_headers_are_refused_before_memory_is_taken(tmp_path):
    whole = write(tmp_path / "x.gguf", tokens=[("a", 1), ("b", 1)]).read_bytes()
    key = b"tokenizer.ggml.token_type"
    at = whole.index(key) + len(key)  # then: type of value (4), of elements (4), number of elements (8)
    nested = b"".join(b"\x09\0\0\0" + (1).to_bytes(8, "little") for _ in range(5000))
    damages = [
        (whole[: at + 8] + (2**60).to_bytes(8, "little") + whole[at + 16 :], "ends within its header"),
        (whole[: at + 4] + b"\x08\0\0\0" + (2**62).to_bytes(8, "little") + whole[at + 16 :], "ends within its header"),
        (whole[: at + 4] + nested + whole[at + 4 :], "cannot read|ends within its header"),
        (whole[:8] + (2**63).to_bytes(8, "little") + whole[16:], "ends within its header|dimensions|not read"),
        (whole[:16] + (2**63).to_bytes(8, "little") + whole[24:], "ends within its header|not known"),
    ]
    for number, (data, message) in enumerate(damages):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            resolve_model(file)
