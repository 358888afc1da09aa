"""Held-out accuracy of the companion that sees, per task, with greedy decoding.

Drawings are new ones of what training may draw, or ones with pairs of colour and shape, numbers and words of which it
draws none. An answer counts when it is exactly right.

Run: python packages/demo-model/train/evaluate_vision.py [--items 200] [--json] [--show-wrong 3]
"""

from __future__ import annotations

import argparse
import json
from random import Random

import torch
from corpus.words import Source
from evaluate import load_model
from model import Llama
from pictures.conversations import messages
from pictures.questions import TASKS, Viewing, viewing
from pictures.stream import drawn
from vision import Seeing, VisionChat
from vision_checkpoint import load_reader, load_seeing

BATCH = 50
"""Questions answered together."""


def held_out(task: str, num_items: int, seed: int = 0, *, new_kinds: bool = True) -> list[Viewing]:
    """Pictures of a task with one question each; with `new_kinds`, each shows something that training never shows."""
    source = Source(Random(f"pictures-{task}-{seed}"), held=new_kinds)
    return [viewing(source, task) for _ in range(num_items)]


@torch.inference_mode()
def answers(seeing: Seeing, reader: Llama, chat: VisionChat, viewings: list[Viewing]) -> list[str]:
    """Greedy answers to the questions of viewings with equally many pictures."""
    pixels = torch.cat([torch.from_numpy(drawn(each).pixels) for each in viewings])
    prompts = [chat.encode(chat.render(messages(each)[:-1], add_generation_prompt=True)) for each in viewings]
    images = seeing.embeds(seeing.features(pixels))
    outputs = reader.generate(prompts, 48, chat.end_id, images)
    return [chat.tokenizer.decode(output) for output in outputs]


def evaluate(
    seeing: Seeing,
    reader: Llama,
    tasks: tuple[str, ...],
    num_items: int,
    seed: int = 0,
    show_wrong: int = 0,
    *,
    new_kinds: bool = True,
) -> dict[str, float]:
    """The share of exactly right answers per task.

    Args:
        seeing: The tower.
        reader: The demo model with the adapter.
        tasks: Of `TASKS`.
        num_items: Questions of a task.
        seed: Which ones are drawn.
        show_wrong: How many wrong answers to print per task.
        new_kinds: As for `held_out`.
    """
    chat, shares = VisionChat(), {}
    for task in tasks:
        asked = held_out(task, num_items, seed, new_kinds=new_kinds)
        answered: list[str] = []
        for start in range(0, num_items, BATCH):
            answered += answers(seeing, reader, chat, asked[start : start + BATCH])
        questions = [each.questions[0] for each in asked]
        wrong = [(q, text) for q, text in zip(questions, answered, strict=True) if text != q.answer]
        shares[task] = 1 - len(wrong) / num_items
        for question, text in wrong[:show_wrong]:
            print(f"{task}: {question.text} {question.answer!r}, answered {text!r}")
    return shares


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=200, help="held-out questions a task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers a task")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    seeing, reader = load_seeing(), load_reader(load_model())
    shares = {}
    for name, new_kinds in (("new drawings", False), ("new combinations", True)):
        shares[name] = evaluate(
            seeing, reader, tuple(args.tasks), args.items, args.seed, args.show_wrong, new_kinds=new_kinds
        )
    if args.json:
        print(json.dumps({"items": args.items, "seed": args.seed, "exact_match": shares}))
        return
    print(f"{'task':<14} {'new drawings':>14} {'new combinations':>18}   ({args.items} questions each, greedy)")
    for task in args.tasks:
        print(f"{task:<14} {shares['new drawings'][task]:>14.1%} {shares['new combinations'][task]:>18.1%}")


if __name__ == "__main__":
    main()
