"""Teach the demo model more, and keep what it can do: products, polite refusals, times that tools return.

Run (about 20 minutes of one core):
    python packages/demo-model/train/train_more.py --minutes 20 --out FOLDER

The new skills are learned from their text. In all other conversations the model as it was is the teacher: its
distribution is most of the target (learning without forgetting, Li and Hoiem 2016, arXiv:1606.09282), and what comes
out of its layers is to stay too, for the adapters and drafters that were trained on it. Embeddings do not move.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import MicroBatch, stream
from chat import CHECKPOINT, Chat
from companions import FEATURE_LAYERS, Loss, cross_entropy, fit
from corpus.mix import WEIGHTS, Conversation, conversation
from corpus.words import Source
from evaluate import load_model
from model import Llama
from torch import Tensor
from train import write_checkpoint

NEW = {"product": 60, "refusal": 25, "tool_time": 8, "arithmetic": 4, "small_talk": 4, "spelling": 2}
"""How often each skill stands in a new conversation; a few known ones, so that new ones also stand beside them."""
LABEL_SHARE = 0.2
"""Weight of the text in the target of a known conversation; the rest is the teacher's distribution."""


def lesson(source: Source, new_share: float) -> Conversation:
    """One conversation, new or known."""
    is_new = source.rng.random() < new_share
    return replace(conversation(source, NEW if is_new else WEIGHTS), is_new=is_new)


def drift(outputs: list[Tensor], told: list[Tensor]) -> Tensor:
    """How far outputs of layers [N, D] are from the teacher's: squared and relative, mean over places, summed."""
    total = outputs[0].new_zeros((), dtype=torch.float32)
    for layer in FEATURE_LAYERS:
        was = told[layer - 1].float()
        total = total + ((outputs[layer - 1].float() - was).square().sum(-1) / was.square().sum(-1)).mean()
    return total


def more_loss(student: Llama, teacher: Llama) -> Loss:
    """Loss of a micro-batch: cross entropy, and in known conversations the drift of the layers' outputs."""

    def loss(m: MicroBatch) -> Tensor:
        ids, chosen, is_new = torch.from_numpy(m.ids), torch.from_numpy(m.chosen), torch.from_numpy(m.is_new)
        with torch.no_grad():
            told = teacher.layers(ids, m.rows, m.row_len)
            target = teacher.unembed(told[-1][chosen]).float().softmax(-1)
            text = F.one_hot(torch.from_numpy(m.labels), target.shape[-1]).float()
            target = torch.where(is_new[:, None], text, target.lerp(text, LABEL_SHARE))
        outputs = student.layers(ids, m.rows, m.row_len)
        total = cross_entropy(student.unembed(outputs[-1][chosen]), target)
        known = torch.zeros(m.rows, dtype=torch.bool)
        known[chosen[~is_new] // m.row_len] = True
        if not known.any():
            return total
        places = known.repeat_interleave(m.row_len).nonzero()[:, 0]
        return total + (~is_new).sum() * drift([x[places] for x in outputs], [x[places] for x in told])

    return loss


def main() -> None:
    """Train on from a checkpoint and write the new one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20, help="budget of wall-clock time (default 20)")
    parser.add_argument("--tokens", type=int, help="budget of training tokens")
    parser.add_argument("--start", type=Path, default=CHECKPOINT, help="folder of the checkpoint to go on from")
    parser.add_argument("--teacher", type=Path, help="folder of the checkpoint to stay near to (default: --start)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--peak-lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--new-share", type=float, default=0.55, help="share of new conversations, which are short")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="for machines without a C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    chat = Chat(args.start)
    teacher = load_model(args.teacher or args.start, torch.bfloat16).requires_grad_(False)
    student = load_model(args.start)
    student.embedding.requires_grad_(False)
    if not args.no_compile:
        teacher.compile_layers()
        student.compile_layers()

    def save() -> None:
        write_checkpoint(student, chat, args.out)

    draw = partial(lesson, new_share=args.new_share)
    batches = stream(args.seed, args.micro_batch_tokens, args.micro_batches, draw)
    fit(student, more_loss(student, teacher), args, batches, save, weight_decay=0.0)
    save()


if __name__ == "__main__":
    main()
