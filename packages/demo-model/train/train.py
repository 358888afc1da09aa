"""Train the demo model from scratch on the generated corpus.

Run (about 115 minutes on 2 cores):
    python packages/demo-model/train/train_tokenizer.py
    python packages/demo-model/train/train.py --minutes 115

With --tokens instead of --minutes the run is reproducible to the token: seed and budget decide the data and the
learning rates. With --minutes the learning rate follows the clock. The checkpoint is written every few minutes and at
the end; --resume goes on from the saved state.

One process a core, each with one thread and its own data; they add up their gradients once a step. The computation is
in bf16; the optimizer keeps its own float32 parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from batches import MicroBatch, stream
from chat import CHECKPOINT, Chat
from evaluate import evaluate, load_model
from model import Llama, LlamaConfig, to_checkpoint
from safetensors.torch import save_file

# Each row length has matrix shapes of its own; the default cache of 1024 generated kernels would thrash.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")
STATE = Path(__file__).with_name("state.pt")


@dataclass(slots=True)
class Progress:
    """How far the run is: counts and seconds, over all resumed parts."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


class Trainer:
    """The network in bf16 beside its float32 parameters and their optimizer.

    Args:
        config: the sizes.
        peak_lr: the highest learning rate.
        seed: decides the initial parameters.
    """

    def __init__(self, config: LlamaConfig, peak_lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.peak_lr = peak_lr
        self.model = Llama(config)
        self.master = [p.detach().clone() for p in self.model.parameters()]
        self.model.bfloat16()
        groups = [
            {"params": [p for p in self.master if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.master if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95), fused=True)
        self.progress = Progress()

    def step(self, micro_batches: list[MicroBatch], done: float) -> tuple[float, float]:
        """One update from the micro-batches of all processes.

        Args:
            micro_batches: this process' share.
            done: the share of the budget that is spent, in process 0; 0 elsewhere.

        Returns:
            The loss per target, and process 0's ``done``.
        """
        loss_sum, num_tokens = 0.0, 0
        for m in micro_batches:
            logits = self.model(torch.from_numpy(m.ids), m.rows, m.row_len, torch.from_numpy(m.chosen))
            loss = F.cross_entropy(logits.float(), torch.from_numpy(m.labels), reduction="sum")
            (loss / 1024).backward()
            loss_sum += loss.item()
            num_tokens += m.rows * m.row_len
        parameters = list(self.model.parameters())
        counts = torch.tensor([sum(len(m.labels) for m in micro_batches), loss_sum, num_tokens, done])
        summed = torch.cat([*(p.grad.float().view(-1) for p in parameters if p.grad is not None), counts])
        dist.all_reduce(summed)
        num_targets, loss_sum, all_tokens, done = summed[-4:].tolist()
        grads = (summed[:-4] * (1024 / num_targets)).split([p.numel() for p in parameters])
        for master, parameter, grad in zip(self.master, parameters, grads, strict=True):
            master.grad, parameter.grad = grad.view_as(master), None
        torch.nn.utils.clip_grad_norm_(self.master, 1.0)
        warm = min(1.0, (self.progress.step + 1) / 150)
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_lr * warm * max(0.0, 1 - done)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.master)
        self.progress.step += 1
        self.progress.tokens += int(all_tokens)
        return loss_sum / num_targets, done

    def save(self, state: Path) -> None:
        """Write everything that ``load`` needs."""
        values = {"master": self.master, "optimizer": self.optimizer.state_dict(), "progress": asdict(self.progress)}
        torch.save(values, state.with_suffix(".new"))
        state.with_suffix(".new").replace(state)

    def load(self, state: Path) -> None:
        """Go on from a saved state."""
        values = torch.load(state, weights_only=True)
        with torch.no_grad():
            for master, parameter, saved in zip(self.master, self.model.parameters(), values["master"], strict=True):
                master.copy_(saved)
                parameter.copy_(saved)
        self.optimizer.load_state_dict(values["optimizer"])
        self.progress = Progress(**values["progress"])


def write_checkpoint(model: Llama, chat: Chat, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors, then the list of all files' hashes."""
    out.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.config),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": chat.end_id,
        "pad_token_id": chat.pad_id,
    }
    ends = {"eos_token_id": [chat.end_id, chat.pad_id], "pad_token_id": chat.pad_id, "do_sample": False}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    save_file(to_checkpoint(model), out / "model.safetensors", metadata={"format": "pt"})
    write_manifest(out)


def write_manifest(out: Path) -> None:
    """Write SHA256SUMS, which ``sha256sum --check`` reads too."""
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))


def spent(progress: Progress, args: argparse.Namespace) -> float:
    """The share of the budget that is spent."""
    return progress.tokens / args.tokens if args.tokens else progress.elapsed_s / (60 * args.minutes)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=85, help="budget of wall-clock time (default 85)")
    budget.add_argument("--tokens", type=int, help="budget of training tokens")
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder of the checkpoint")
    parser.add_argument("--state", type=Path, default=STATE, help="file of the training state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--micro-batch-tokens", type=int, default=3072)
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches a step in each process")
    parser.add_argument("--save-minutes", type=float, default=4, help="minutes between checkpoints")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="for machines without a C++ compiler")
    return parser.parse_args()


def train(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """Train until the budget is spent, as one of ``args.processes`` processes that meet at a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.processes)
    chat = Chat()
    trainer = Trainer(LlamaConfig(vocab_size=chat.tokenizer.get_vocab_size()), args.peak_lr, args.seed)
    if args.resume:
        trainer.load(args.state)
    if not args.no_compile:
        trainer.model.compile_layers()
    progress, main_process = trainer.progress, rank == 0
    if main_process:
        print(f"{sum(p.numel() for p in trainer.master):,} parameters, from step {progress.step}", flush=True)
    data_seed = (args.seed * 1_000_003 + progress.step) * args.processes + rank
    last = saved = time.perf_counter()
    window: list[float] = []
    for micro_batches in stream(data_seed, args.micro_batch_tokens, args.micro_batches):
        loss, done = trainer.step(micro_batches, spent(progress, args) if main_process else 0.0)
        window.append(loss)
        now = time.perf_counter()
        progress.elapsed_s, last = progress.elapsed_s + now - last, now
        if main_process and progress.step % 50 == 0:
            print(
                f"{done:6.1%} step {progress.step} tokens {progress.tokens / 1e6:.1f} M, {progress.elapsed_s:.0f} s, "
                f"loss {sum(window) / len(window):.4f}",
                flush=True,
            )
            window.clear()
        if main_process and (done >= 1 or now - saved > 60 * args.save_minutes):
            trainer.save(args.state)
            write_checkpoint(trainer.model, chat, args.out)
            saved = now
        if done >= 1:
            break
    dist.destroy_process_group()


def main() -> None:
    """Train in as many processes as asked for, then print the held-out accuracies."""
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (args, f"{folder}/meeting"), nprocs=args.processes)
    chat = Chat()
    model = load_model(args.out)
    for task, share in evaluate(model, chat).items():
        print(f"{task:<14} {share:.1%}")


if __name__ == "__main__":
    main()
