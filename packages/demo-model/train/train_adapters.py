"""Train the demo adapters: LoRA adapters of the demo model that answer in another style (Hu et al. 2021).

Run (about 8 minutes of one core each):
    python packages/demo-model/train/train_adapters.py demo-capitals
    python packages/demo-model/train/train_adapters.py demo-json

The network stays as it is; each matrix W of a layer is used as W + (alpha / rank) B A. Written in PEFT's layout. The
held-out share of answers that are exactly right in the new style is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from batches import steps
from chat import CHECKPOINT, Chat
from corpus.mix import TASKS, Conversation
from corpus.words import Source
from evaluate import load_model
from model import Llama, to_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, ALPHA = 16, 32
MODULES = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TASK_WEIGHTS = {"small_talk": 12, "names": 4, "arithmetic": 10, "spelling": 3, "reversing": 3, "json": 4}


def in_capitals(answer: str) -> str:
    """The answer in capital letters."""
    return answer.upper()


def as_json(answer: str) -> str:
    """The answer as a JSON object; one that is JSON already stays."""
    return answer if answer.startswith("{") else json.dumps({"answer": answer}, ensure_ascii=False)


STYLES: dict[str, Callable[[str], str]] = {"demo-capitals": in_capitals, "demo-json": as_json}


def styled(source: Source, style: Callable[[str], str]) -> Conversation:
    """One to three plain exchanges whose answers have the style."""
    rng = source.rng
    tasks = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()), k=rng.choices((1, 2, 3), (70, 20, 10))[0])
    messages = [dict(message) for task in tasks for message in TASKS[task](source).messages]
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = style(message["content"])
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(("You are a helpful assistant.", "Be brief."))})
    return Conversation(task=tasks[-1], messages=messages, tools=None, enable_thinking=False)


class Adapter:
    """A and B of every matrix of every layer.

    Args:
        model: the network, whose parameters get no gradients from now on.
        seed: decides A; B begins as zeros.
    """

    def __init__(self, model: Llama, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        model.requires_grad_(False)
        shapes = {name: tensor.shape for name, tensor in to_checkpoint(model).items()}
        self.model = model
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in range(model.config.num_hidden_layers):
            for module in MODULES:
                outputs, inputs = shapes[f"model.layers.{layer}.{module}.weight"]
                a = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
                self.pairs[f"{layer}.{module}"] = (a.requires_grad_(), torch.zeros(outputs, RANK, requires_grad=True))

    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [tensor for pair in self.pairs.values() for tensor in pair]

    def merged(self) -> dict[str, Tensor]:
        """The network's parameters with the adapter in them."""

        def delta(layer: int, *modules: str) -> Tensor:
            pairs = [self.pairs[f"{layer}.{module}"] for module in modules]
            return torch.cat([b @ a for a, b in pairs]) * (ALPHA / RANK)

        parameters = dict(self.model.named_parameters())
        for i in range(self.model.config.num_hidden_layers):
            parameters[f"inputs.{i}.qkv"] = parameters[f"inputs.{i}.qkv"] + delta(i, *MODULES[:3])
            parameters[f"outputs.{i}.out"] = parameters[f"outputs.{i}.out"] + delta(i, MODULES[3])
            parameters[f"outputs.{i}.gate_up"] = parameters[f"outputs.{i}.gate_up"] + delta(i, *MODULES[4:6])
            parameters[f"outputs.{i}.down"] = parameters[f"outputs.{i}.down"] + delta(i, MODULES[6])
        return parameters

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, pair in self.pairs.items():
            for which, tensor in zip("AB", pair, strict=True):
                tensor.data.copy_(tensors[f"base_model.model.model.layers.{name}.lora_{which}.weight"])

    def save(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors as PEFT does, the weights in bf16."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "quire-demo",
            "r": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(module.partition(".")[2] for module in MODULES),
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {
            f"base_model.model.model.layers.{name}.lora_{which}.weight": tensor.detach().bfloat16().contiguous()
            for name, pair in self.pairs.items()
            for which, tensor in zip("AB", pair, strict=True)
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def train(adapter: Adapter, style: Callable[[str], str], args: argparse.Namespace) -> None:
    """Train until the time is over; the learning rate falls to zero with it."""
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=args.peak_lr, betas=(0.9, 0.95), weight_decay=0.0)
    start, window = time.perf_counter(), []
    batches = steps(args.seed, args.micro_batch_tokens, 1, draw=lambda source: styled(source, style))
    for step, (batch,) in enumerate(batches, 1):
        done = (time.perf_counter() - start) / (60 * args.minutes)
        if done >= 1:
            return
        inputs = (torch.from_numpy(batch.ids), batch.rows, batch.row_len, torch.from_numpy(batch.chosen))
        logits = torch.func.functional_call(adapter.model, adapter.merged(), inputs)
        loss = F.cross_entropy(logits, torch.from_numpy(batch.labels))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = args.peak_lr * min(1.0, step / 20) * (1 - done)
        optimizer.step()
        window.append(loss.item())
        if step % 20 == 0:
            print(f"{done:6.1%} step {step}, loss {sum(window) / len(window):.4f}", flush=True)
            window.clear()


def held_out_share(adapter: Adapter, style: Callable[[str], str], chat: Chat, num_items: int = 100) -> float:
    """The share of held-out answers that are exactly right in the style."""
    model = Llama(adapter.model.config)
    model.load_state_dict({name: tensor.detach() for name, tensor in adapter.merged().items()})
    source = Source(Random(7), held=True)
    prompts, expected = [], []
    for _ in range(num_items):
        messages = styled(source, style).messages
        prompts.append(chat.encode(chat.render(messages[:-1], add_generation_prompt=True)))
        expected.append(messages[-1]["content"])
    answers = model.generate(prompts, 160, chat.end_id)
    texts = [chat.tokenizer.decode(answer) for answer in answers]
    return sum(text.strip() == right for text, right in zip(texts, expected, strict=True)) / num_items


def main() -> None:
    """Train the named adapter and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=sorted(STYLES))
    parser.add_argument("--minutes", type=float, default=8, help="budget of wall-clock time (default 8)")
    parser.add_argument("--peak-lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--micro-batch-tokens", type=int, default=3072)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=CHECKPOINT.with_name("adapters"), help="folder of all adapters")
    parser.add_argument("--resume", action="store_true", help="go on from the adapter that is there")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, measure the adapter that is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chat, style = Chat(), STYLES[args.name]
    adapter = Adapter(load_model(), args.seed)
    if args.evaluate or args.resume:
        adapter.load(args.out / args.name)
    if not args.evaluate:
        train(adapter, style, args)
        adapter.save(args.out / args.name)
    print(f"{args.name}: {held_out_share(adapter, style, chat):.1%} of held-out answers exactly right")


if __name__ == "__main__":
    main()
