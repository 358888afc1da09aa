"""Train the demo model's companions for speculative decoding: a one-layer draft model and an EAGLE-3 head.

Run (about 10 minutes of one core each):
    python packages/demo-model/train/companions.py draft
    python packages/demo-model/train/companions.py eagle3

With --hidden-states the head learns from what an engine has written (`extract.py`), as it would for a model that only
an engine can run: from its embedding, final norm, LM head and these files.

Both learn to say what the demo model would say: the loss is the cross entropy with its distribution, on the corpus it
learned from. Seed and clock decide the run: with --tokens instead of --minutes it is reproducible.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batches import MicroBatch, steps, stream
from chat import CHECKPOINT, Chat
from eagle import EagleHead, head_from_checkpoint, head_to_checkpoint
from evaluate import load_model
from extracted import ExtractedBatch, extracted
from model import Llama, LlamaConfig, from_checkpoint, to_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train import write_manifest

FEATURE_LAYERS = (1, 3, 5)
"""Layers, counted from 1, whose output the head reads."""
DRAFT_VOCAB_SIZE = 1024
UNROLLED = 5
Loss = Callable[[MicroBatch], Tensor]


@dataclass(slots=True)
class Told:
    """What the teacher says about a micro-batch."""

    features: Tensor
    """[R, T, 3 D]"""
    logits: Tensor
    """[A, vocab_size] at the chosen places."""


@torch.no_grad()
def ask(teacher: Llama, m: MicroBatch) -> Told:
    """Features and logits of the teacher, in its own dtype; features that the batch has are not computed."""
    chosen = torch.from_numpy(m.chosen)
    if isinstance(m, ExtractedBatch):
        last = m.features.flatten(0, 1)[:, -teacher.config.hidden_size :]
        return Told(m.features, teacher.unembed(last[chosen]))
    outputs = teacher.layers(torch.from_numpy(m.ids[: m.rows * m.row_len]), m.rows, m.row_len)
    joined = torch.cat([outputs[layer - 1] for layer in FEATURE_LAYERS], -1).view(m.rows, m.row_len, -1)
    return Told(joined, teacher.unembed(outputs[-1][chosen]))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Sum over places: logits [A, V] against a distribution [A, V]."""
    return -(target * logits.float().log_softmax(-1)).sum()


def draft_loss(student: Llama, teacher: Llama) -> Loss:
    """Loss of the draft model on a micro-batch."""

    def loss(m: MicroBatch) -> Tensor:
        target = ask(teacher, m).logits.float().softmax(-1)
        used = m.rows * m.row_len
        logits = student(torch.from_numpy(m.ids[:used]), m.rows, m.row_len, torch.from_numpy(m.chosen))
        return cross_entropy(logits, target)

    return loss


def head_loss(head: EagleHead, teacher: Llama) -> Loss:
    """Loss of the head on a micro-batch, all unrolled guesses alike."""

    def loss(m: MicroBatch) -> Tensor:
        told = ask(teacher, m)
        ids = torch.from_numpy(m.ids[: m.rows * m.row_len]).view(m.rows, m.row_len)
        embedded = F.embedding(F.pad(ids[:, 1:], (0, 1)), teacher.embedding)
        cos, sin = (table[:, 0] for table in teacher.rope(torch.arange(m.row_len), embedded.dtype))
        # Which logits say what follows: -1 where the teacher is not asked, or says what the head cannot.
        asked = torch.full((m.rows * m.row_len,), -1)
        sayable = torch.isin(told.logits.argmax(-1), head.draft_ids)
        asked[torch.from_numpy(m.chosen)] = torch.where(sayable, torch.arange(len(m.chosen)), -1)
        asked = asked.view(m.rows, m.row_len)
        bases, held = _bases(asked)
        logits = head(embedded, told.features, (cos, sin), bases, UNROLLED)
        target = told.logits[:, head.draft_ids].float().softmax(-1)
        total = logits.new_zeros((), dtype=torch.float32)
        for step in range(UNROLLED):
            which = asked.gather(1, bases + step + 1)
            said = held & (which >= 0)
            total = total + cross_entropy(logits[step][said], target[which[said]])
        return total / UNROLLED

    return loss


def _bases(asked: Tensor) -> tuple[Tensor, Tensor]:
    """Positions before each one that is asked about [R, M], and which of them are no filler."""
    near = F.pad(asked[:, 1:] >= 0, (0, 1))
    near[:, -UNROLLED - 1 :] = False
    count = int(near.sum(-1).max().clamp(min=1))
    order = near.int().sort(dim=-1, descending=True, stable=True)
    return order.indices[:, :count].clamp(max=asked.shape[1] - UNROLLED - 2), order.values[:, :count] > 0


def frequent_ids(count: int) -> Tensor:
    """[count] the most frequent tokens of answers, ascending."""
    seen = torch.zeros(LlamaConfig().vocab_size, dtype=torch.int64)
    batches = steps(99, 8192, 8, pool=2)
    for _ in range(4):
        for m in next(batches):
            seen += torch.bincount(torch.from_numpy(m.labels), minlength=len(seen))
    return seen.topk(count).indices.sort().values


def batches(args: argparse.Namespace) -> Iterator[list[MicroBatch]]:
    """Steps of training: from the corpus, or from the files of an engine."""
    if args.hidden_states is None:
        return stream(args.seed, args.micro_batch_tokens, args.micro_batches)
    return extracted(args.hidden_states, args.seed, args.micro_batch_tokens, args.micro_batches, Chat().pad_id)


def fit(
    network: nn.Module,
    loss_of: Loss,
    args: argparse.Namespace,
    train_steps: Iterator[list[MicroBatch]],
    save: Callable[[], None] | None = None,
    weight_decay: float = 0.05,
) -> None:
    """Train until the budget is spent. The computation is in bf16 beside float32 parameters.

    Args:
        network: What is trained.
        loss_of: Summed over the targets of a micro-batch.
        args: The command line.
        train_steps: What each step learns from.
        save: Called every five minutes.
        weight_decay: Decoupled.
    """
    master = [p.detach().clone().float() for p in network.parameters()]
    network.bfloat16()
    optimizer = torch.optim.AdamW(master, lr=args.peak_lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
    start, tokens, window = time.perf_counter(), 0, [0.0, 0]
    saved = start
    for step, micro_batches in enumerate(train_steps):
        spent = tokens / args.tokens if args.tokens else (time.perf_counter() - start) / (60 * args.minutes)
        if spent >= 1:
            break
        num_targets = sum(len(m.chosen) for m in micro_batches)
        for m in micro_batches:
            loss = loss_of(m)
            (loss / num_targets).backward()
            window[0] += loss.item()
            tokens += m.rows * m.row_len
        window[1] += num_targets
        for kept, parameter in zip(master, network.parameters(), strict=True):
            kept.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.peak_lr * min(1.0, (step + 1) / 50) * (1 - spent)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(network.parameters()), master)
        if step % 20 == 0:
            print(
                f"{spent:6.1%} step {step}, {tokens / 1e6:.1f} M tokens, loss {window[0] / window[1]:.4f}", flush=True
            )
            window = [0.0, 0]
        if save and time.perf_counter() - saved > 300:
            save()
            saved = time.perf_counter()


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json, model.safetensors and the list of hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_manifest(folder)


def main() -> None:
    """Train one companion and write it beside the demo model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("companion", choices=("draft", "eagle3"))
    parser.add_argument("--minutes", type=float, default=10, help="budget of wall-clock time (default 10)")
    parser.add_argument("--tokens", type=int, help="budget of training tokens")
    parser.add_argument("--out", type=Path, help="folder to write")
    parser.add_argument("--start", type=Path, help="folder of a companion to go on from")
    parser.add_argument("--hidden-states", type=Path, help="folder of an engine's files to learn from (eagle3)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--peak-lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=2)
    args = parser.parse_args()
    if args.hidden_states is not None and args.companion != "eagle3":
        parser.error("--hidden-states is for eagle3: a draft model reads tokens alone")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    out = args.out or CHECKPOINT.parent / args.companion
    teacher = load_model(dtype=torch.bfloat16).requires_grad_(False)
    shared = json.loads((CHECKPOINT / "config.json").read_text())
    if args.companion == "draft":
        config = replace(teacher.config, num_hidden_layers=1, intermediate_size=576)
        student = Llama(config)
        with torch.no_grad():
            student.embedding.copy_(teacher.embedding)
        if args.start:
            student = from_checkpoint(config, load_file(args.start / "model.safetensors"))
        fit(student, draft_loss(student, teacher), args, batches(args))
        write(out, {**shared, **asdict(config)}, to_checkpoint(student))
        return
    config = replace(teacher.config, num_hidden_layers=1, intermediate_size=320)
    head = EagleHead(config, len(FEATURE_LAYERS), frequent_ids(DRAFT_VOCAB_SIZE))
    if args.start:
        head_from_checkpoint(head, load_file(args.start / "model.safetensors"))
    fit(head, head_loss(head, teacher), args, batches(args))
    values = {
        **shared,
        **asdict(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS), "use_aux_hidden_state": True},
    }
    write(out, values, head_to_checkpoint(head, config.vocab_size))


if __name__ == "__main__":
    main()
