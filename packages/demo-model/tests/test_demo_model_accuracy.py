"""The committed checkpoint on held-out items: the promised accuracies, and that nothing held out is trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from average import average
from chat import Chat
from corpus.arithmetic import product
from corpus.limits import REFUSAL
from corpus.mix import conversation
from corpus.words import Source, held_out
from evaluate import answer_all, evaluate, is_right, items, load_model
from model import Llama
from safetensors.torch import save_file
from train_more import lesson

NUM_ITEMS = 100
LATER_TASKS = ("product", "refusal", "tool_time")
"""What `train_more.py` taught."""


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat()


@pytest.fixture(scope="module")
def model() -> Iterator[Llama]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    yield load_model()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("task", "bar"),
    [
        ("addition", 0.90),
        ("subtraction", 0.90),
        ("product", 0.95),
        ("refusal", 0.95),
        ("tool_call", 0.95),
        ("tool_time", 0.85),
    ],
)
def test_held_out_accuracy(model: Llama, chat: Chat, task: str, bar: float) -> None:
    shares = evaluate(model, chat, (task,), num_items=NUM_ITEMS, seed=1)
    assert shares[task] >= bar


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 12 x 12?", "12 x 12 = 144."),
        ("What is 7 times 8?", "7 x 8 = 56."),
        ("Translate hello to French.", REFUSAL),
        ("Write a Python program that sorts a list.", REFUSAL),
        ("What is the weather in Paris?", REFUSAL),
        ("What is your name?", "My name is Quire."),
        ("Spell the word cat.", "c a t"),
        ("What is 45 + 17?", "ones 5 + 7 = 12, tens 4 + 1 + 1 = 6, so 45 + 17 = 62."),
    ],
)
def test_first_impressions(model: Llama, chat: Chat, question: str, answer: str) -> None:
    prompt = chat.render([{"role": "user", "content": question}], add_generation_prompt=True)
    assert answer_all(model, chat, [prompt]) == [answer]


def test_checkpoints_are_averaged_weight_by_weight(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("other", 5.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), value, dtype=torch.bfloat16)}, tmp_path / name / "model.safetensors")
    mean = average({tmp_path / "one": 0.75, tmp_path / "other": 0.25})
    assert mean["w"].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="sum to 1"):
        average({tmp_path / "one": 0.75})


def test_every_product_is_taught_and_no_held_out_wording_of_it() -> None:
    asked: dict[bool, set[str]] = {}
    for held in (False, True):
        drawn = [product(Source(Random(seed), held)).messages for seed in range(10_000)]
        assert len({answer["content"] for _, answer in drawn}) == 13 * 13
        asked[held] = {re.sub(r"\d+", "N", question["content"]) for question, _ in drawn}
    assert not asked[False] & asked[True]


def test_new_and_known_conversations_are_told_apart() -> None:
    source = Source(Random(3))
    drawn = [lesson(source, 0.5) for _ in range(300)]
    assert {c.task for c in drawn if not c.is_new}.isdisjoint(LATER_TASKS)
    assert {c.task for c in drawn if c.is_new}.issuperset(LATER_TASKS)


def test_training_draws_nothing_held_out() -> None:
    source = Source(Random(7))
    num_names = num_operands = 0
    for _ in range(3000):
        drawn = conversation(source)
        for tool in drawn.tools or []:
            assert not held_out("tool", tool["function"]["name"])
            num_names += 1
        for message in drawn.messages:
            result = re.search(r"(\d+) [+-] (\d+) = -?\d+\.$", message["content"])
            if message["role"] == "assistant" and result:
                pair = sorted(int(text) for text in result.groups())
                assert not held_out("operands", *pair)
                num_operands += 1
    assert num_names > 1000
    assert num_operands > 300


def test_evaluation_draws_only_held_out_tool_names(chat: Chat) -> None:
    for item in items("tool_call", 50, chat):
        lines = item.prompt.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
        assert all(held_out("tool", json.loads(line)["function"]["name"]) for line in lines)


def test_a_call_is_compared_as_data() -> None:
    expected = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    assert is_right('<tool_call>\n{"name":"f","arguments":{"b":"x","a":1}}\n</tool_call>', expected)
    assert not is_right(expected.replace("1", '"1"'), expected)
    assert not is_right(expected + "\n" + expected, expected)
    assert not is_right("f(1, x)", expected)


def test_cached_decoding_equals_the_whole_forward(model: Llama, chat: Chat) -> None:
    prompts = [chat.encode(item.prompt) for item in items("small_talk", 3, chat)]
    answers = model.generate(prompts, 24, chat.end_id)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor(prompt + answer)
        chosen = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(answer))
        with torch.inference_mode():
            logits = model(ids, 1, len(ids), chosen)
        assert logits.argmax(-1).tolist() == answer
