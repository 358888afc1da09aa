"""Held-out accuracy of the checkpoint, per skill, with greedy decoding.

Names, values, words, operand pairs and questions of the held-out split never occur in training. An answer counts when
it is exactly right: a tool call when its names and arguments equal the expected ones as data, everything else (the
working and the thoughts included) when the text is equal.

Run: python packages/demo-model/train/evaluate.py [--items 300] [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from chat import CHECKPOINT, Chat
from corpus.mix import Conversation, conversation
from corpus.words import Source
from model import Llama, LlamaConfig, from_checkpoint
from safetensors.torch import load_file

TASKS = (
    "addition",
    "subtraction",
    "tool_call",
    "tool_answer",
    "no_tool",
    "json",
    "spelling",
    "reversing",
    "small_talk",
    "names",
    "several_turns",
    "thinking",
    "product",
    "refusal",
    "tool_time",
)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(slots=True, kw_only=True)
class Item:
    """One held-out conversation, cut before its last answer."""

    prompt: str
    expected: str


def load_model(checkpoint: Path = CHECKPOINT, dtype: torch.dtype = torch.float32) -> Llama:
    """The checkpoint's network."""
    config = LlamaConfig.from_json(json.loads((checkpoint / "config.json").read_text()))
    return from_checkpoint(config, load_file(checkpoint / "model.safetensors"), dtype)


def _draw(task: str, source: Source) -> Conversation:
    if task == "several_turns":
        return conversation(source, turns=3)
    if task in ("addition", "subtraction"):
        while True:
            drawn = conversation(source, {"arithmetic": 1}, turns=1)
            if drawn.task == task:
                return drawn
    if task == "thinking":
        while True:
            drawn = conversation(source, turns=1)
            if any("reasoning_content" in message for message in drawn.messages):
                return drawn
    return conversation(source, {task: 1}, turns=1)


def items(task: str, num_items: int, chat: Chat, seed: int = 0) -> list[Item]:
    """Held-out items of a skill."""
    source = Source(Random(f"{task}-{seed}"), held=True)
    drawn: list[Item] = []
    while len(drawn) < num_items:
        c = _draw(task, source)
        options = {"tools": c.tools, "enable_thinking": c.enable_thinking}
        whole = chat.render(c.messages, **options)
        prompt = whole[: whole.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")]
        drawn.append(Item(prompt=prompt, expected=whole[len(prompt) :].removesuffix("<|im_end|>\n")))
    return drawn


def calls(text: str) -> list[Any] | None:
    """The tool calls in an answer as data, or ``None`` when one does not parse."""
    try:
        return [json.loads(body) for body in _CALL.findall(text)]
    except json.JSONDecodeError:
        return None


def is_right(answer: str, expected: str) -> bool:
    """Whether the answer is exactly right."""
    wanted = calls(expected)
    return calls(answer) == wanted if wanted else answer == expected


def answer_all(model: Llama, chat: Chat, prompts: list[str], batch: int = 64, max_new_tokens: int = 160) -> list[str]:
    """Greedy answers, in batches of prompts of similar length, in the order of the prompts."""
    ids = [chat.encode(prompt) for prompt in prompts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    answers = [""] * len(ids)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        for index, out in zip(
            chosen, model.generate([ids[i] for i in chosen], max_new_tokens, chat.end_id), strict=True
        ):
            answers[index] = chat.tokenizer.decode(out, skip_special_tokens=False)
    return answers


def evaluate(
    model: Llama, chat: Chat, tasks: tuple[str, ...] = TASKS, num_items: int = 300, seed: int = 0, show_wrong: int = 0
) -> dict[str, float]:
    """The share of exactly right answers per skill.

    Args:
        model: the network.
        chat: its template and tokenizer.
        tasks: the skills.
        num_items: held-out items a skill.
        seed: which items are drawn.
        show_wrong: how many wrong answers to print per skill.
    """
    shares: dict[str, float] = {}
    for task in tasks:
        drawn = items(task, num_items, chat, seed)
        answers = answer_all(model, chat, [item.prompt for item in drawn])
        wrong = [(i, a) for i, a in zip(drawn, answers, strict=True) if not is_right(a, i.expected)]
        shares[task] = 1 - len(wrong) / num_items
        for item, answer in wrong[:show_wrong]:
            print(f"--- {task}\n{item.prompt[-400:]}\nexpected {item.expected!r}\nanswered {answer!r}")
    return shares


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=300, help="held-out items a skill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers a skill")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    started = time.perf_counter()
    model, chat = load_model(args.checkpoint), Chat(args.checkpoint)
    shares = evaluate(model, chat, tuple(args.tasks), args.items, args.seed, args.show_wrong)
    if args.json:
        print(json.dumps({"items": args.items, "seed": args.seed, "exact_match": shares}))
        return
    print(f"{'skill':<14} {'exact match':>11}   ({args.items} held-out items each, greedy)")
    for task, share in shares.items():
        print(f"{task:<14} {share:>10.1%}")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
