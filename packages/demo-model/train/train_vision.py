"""Train the companion that sees: its tower to say what each patch of a picture shows, its connector to give the demo
model the words for it, and the connector with an adapter of the demo model to answer questions. The tower learns in the
first stage only: the small steps of answers, of few pictures each, make it forget what patches show.

Run (stage by stage; each goes on from what the one before left in a folder; the last one writes the companion):
    python packages/demo-model/train/train_vision.py patches --minutes 35 --work FOLDER
    python packages/demo-model/train/train_vision.py connector --minutes 2 --work FOLDER
    python packages/demo-model/train/train_vision.py answers --minutes 30 --work FOLDER
    python packages/demo-model/train/train_vision.py write --work FOLDER
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from batches import MicroBatch, Row, pack
from corpus.words import Source
from evaluate import load_model
from model import Llama
from muon import Muon
from pictures.conversations import messages, mixed
from pictures.scenes import CHARACTERS, COLORS, SHAPES
from pictures.stream import Drawn, stream
from torch import Tensor
from train_adapters import Adapter
from vision import VISION, Seeing, VisionChat
from vision_checkpoint import write_processor, write_weights

ROWS = {1: 12, 2: 9}
"""Pictures of a conversation -> conversations of a micro-batch."""
NUM_TOKENS = 2048
"""Places of a micro-batch."""


class Trainer:
    """Computation in bf16 beside float32 parameters; matrices by Muon, everything else by Adam.

    Args:
        parameters: What is trained; made bf16.
        lr: Of a parameter's name, its highest learning rate.
        minutes: The rates rise over the first 20 steps and fall to zero at the end of this time.
    """

    def __init__(self, parameters: Mapping[str, Tensor], lr: Callable[[str], float], minutes: float) -> None:
        self.parameters = parameters
        self.master = {name: each.detach().clone().float() for name, each in parameters.items()}
        for each in parameters.values():
            each.data = each.data.bfloat16()
        self._optimizers: list[torch.optim.Optimizer] = []
        for multiplies, optimizer in ((True, Muon), (False, torch.optim.AdamW)):
            names = [name for name in parameters if _multiplies(name, parameters[name]) == multiplies]
            groups = [{"params": [self.master[name]], "lr": lr(name), "highest": lr(name)} for name in names]
            self._optimizers.append(optimizer(groups, lr=0.0, weight_decay=0.01))
        self._num_steps, self._start, self._seconds = 0, time.perf_counter(), 60 * minutes

    @property
    def progress(self) -> float:
        """Share of the time that is over."""
        return min(1.0, (time.perf_counter() - self._start) / self._seconds)

    def step(self) -> None:
        """Change the parameters by their gradients, which are gone then."""
        for name, parameter in self.parameters.items():
            self.master[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(list(self.master.values()), 1.0)
        self._num_steps += 1
        share = min(1.0, self._num_steps / 20) * (1 - self.progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * share
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.master[name])


def _multiplies(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix that multiplies hidden states; adapters are left to Adam."""
    return parameter.ndim == 2 and "embedding" not in name and "adapter" not in name


def tensors(step: list[Drawn]) -> tuple[Tensor, Tensor]:
    """Pixels [B, 3, SIDE, SIDE] in bf16 and labels [B, P, L] of a step's pictures."""
    images = np.concatenate([each.pixels for each in step])
    return torch.from_numpy(images).bfloat16(), torch.from_numpy(np.concatenate([each.labels for each in step]))


def train_patches(args: argparse.Namespace) -> None:
    """The tower alone, on what each patch shows."""
    seeing = Seeing()
    if args.resume:
        seeing.load_state_dict(torch.load(args.work / "patches.pt"))
    connector = "multi_modal_projector"
    trainer = Trainer(
        {name: each for name, each in seeing.named_parameters() if not name.startswith(connector)},
        lambda name: args.lr,
        args.minutes,
    )
    for index, step in enumerate(stream(args.seed, args.pictures)):
        if trainer.progress == 1:
            break
        pixels, labels = tensors(step)
        loss, shares = seeing.label_loss(seeing.features(pixels), labels)
        loss.backward()
        trainer.step()
        if index % 20 == 0:
            right = " ".join(f"{share:.2f}" for share in shares.tolist())
            print(f"{trainer.progress:.1%} step {index} loss {loss.item():.2f} right {right}", flush=True)
    torch.save({**seeing.state_dict(), **trainer.master}, args.work / "patches.pt")


def word_embeddings(embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings of the words for patches' labels: for what it is [LABEL_SIZES[0], D], for colours [1 + C, D]."""
    tokenizer = VisionChat().tokenizer

    def mean(text: str) -> Tensor:
        return embedding[tokenizer.encode(text).ids].mean(0)

    what = [mean(" "), *(mean(f" {shape}") for shape in SHAPES), *(mean(character) for character in CHARACTERS)]
    colors = [torch.zeros_like(embedding[0]), *(mean(f" {color}") for color in COLORS)]
    return torch.stack(what), torch.stack(colors)


def train_connector(args: argparse.Namespace) -> None:
    """The connector alone: embeddings of patches become those of the words for what they show."""
    seeing = Seeing()
    seeing.load_state_dict(torch.load(args.work / "patches.pt"))
    seeing.vision_tower.bfloat16()
    what, colors = word_embeddings(load_model().embedding.detach())
    named = seeing.multi_modal_projector.named_parameters()
    connector = {f"multi_modal_projector.{name}": each for name, each in named}
    trainer = Trainer(connector, lambda name: args.lr, args.minutes)
    for index, step in enumerate(stream(args.seed + 2, args.pictures)):
        if trainer.progress == 1:
            break
        pixels, labels = tensors(step)
        with torch.no_grad():
            features = seeing.features(pixels)
        wanted = (what[labels[..., 0]] + colors[labels[..., 1]]).flatten(0, 1)
        shown = labels[..., 0].flatten() > 0
        distance = (seeing.embeds(features).float() - wanted).square().mean(-1)
        loss = (distance * torch.where(shown, 1.0, 0.1)).sum() / shown.sum()
        loss.backward()
        trainer.step()
        if index % 20 == 0:
            print(f"{index} loss {loss.item():.5f}, of the mean {wanted[shown].var(0).mean().item():.5f}", flush=True)
    torch.save({**seeing.state_dict(), **trainer.master}, args.work / "connector.pt")


class Answers:
    """The loss of answers, and what learns from it: connector and adapter.

    Args:
        seeing: The tower, in bf16, which stays as it is, and the connector.
        adapter: Of the demo model, which is changed: it holds its own weights and the adapter in them.
        seed: Decides what else is spoken of.
    """

    def __init__(self, seeing: Seeing, adapter: Adapter, seed: int) -> None:
        self.seeing, self.adapter = seeing, adapter
        self._model = Llama(adapter.model.config).bfloat16()
        self._weights = dict(self._model.named_parameters())
        self._model.compile_layers()
        self._chat, self._source = VisionChat(), Source(Random(seed))

    def parameters(self) -> dict[str, Tensor]:
        """Name -> what is trained."""
        connector = self.seeing.multi_modal_projector.named_parameters()
        named: dict[str, Tensor] = {f"connector.{name}": each for name, each in connector}
        for name, (a, b) in self.adapter.pairs.items():
            named |= {f"adapter.{name}.A": a, f"adapter.{name}.B": b}
        return named

    def learn(self, batches: list[list[Drawn]]) -> float:
        """Gradients of micro-batches: mean loss of a token of the answers."""
        merged = self.adapter.merged()
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(merged[name])
        packed = [pack_drawn(batch, self._source, self._chat) for batch in batches]
        num_targets = sum(len(each.labels) for each in packed)
        mean = 0.0
        for batch, places in zip(batches, packed, strict=True):
            loss = self._loss(batch, places) / num_targets
            loss.backward()
            mean += loss.item()
        trained = {name: each for name, each in merged.items() if each.requires_grad}
        torch.autograd.backward(
            list(trained.values()), [self._weights[name].grad.to(each.dtype) for name, each in trained.items()]
        )
        for weight in self._weights.values():
            weight.grad = None
        return mean

    def _loss(self, batch: list[Drawn], places: MicroBatch) -> Tensor:
        with torch.no_grad():
            features = self.seeing.features(tensors(batch)[0])
        logits = self._model(
            torch.from_numpy(places.ids), places.rows, places.row_len, torch.from_numpy(places.chosen),
            self.seeing.embeds(features),
        )  # fmt: skip
        return F.cross_entropy(logits.float(), torch.from_numpy(places.labels), reduction="sum")


def pack_drawn(batch: list[Drawn], source: Source, chat: VisionChat) -> MicroBatch:
    """A micro-batch of conversations about drawn pictures, of as many turns as there is room for.

    Args:
        batch: What was drawn, for each conversation.
        source: Draws what else is spoken of.
        chat: Renders and encodes.
    """
    rows: list[Row] = []
    longest = NUM_TOKENS // len(batch) // 32 * 32
    for each in batch:
        plain = messages(each.viewing)
        for turns in (mixed(source, each.viewing), plain, plain[:4], plain[:2]):
            ids = chat.encode(chat.render(turns))
            if len(ids) <= longest:
                break
        rows.append(Row(ids, chat.targets(ids)))
    return pack(rows, NUM_TOKENS, chat.pad_id)


def micro_batches(drawings: Iterator[list[Drawn]]) -> Iterator[list[list[Drawn]]]:
    """Steps of two micro-batches: of conversations about one picture, and about two."""
    waiting: dict[int, list[Drawn]] = {num_pictures: [] for num_pictures in ROWS}
    for drawn in drawings:
        for each in drawn:
            waiting[len(each.pixels)].append(each)
        if all(len(waiting[num_pictures]) >= rows for num_pictures, rows in ROWS.items()):
            yield [waiting[num_pictures][:rows] for num_pictures, rows in ROWS.items()]
            for num_pictures, rows in ROWS.items():
                del waiting[num_pictures][:rows]
                del waiting[num_pictures][4 * rows :]


def train_answers(args: argparse.Namespace) -> None:
    """Connector and adapter together, on answers."""
    seeing = Seeing()
    seeing.load_state_dict(torch.load(args.work / "connector.pt"))
    seeing.vision_tower.bfloat16()
    answers = Answers(seeing, Adapter(load_model(), args.seed), args.seed)
    if args.resume:
        for name, each in torch.load(args.work / "answers.pt").items():
            answers.parameters()[name].data.copy_(each)
    trainer = Trainer(
        answers.parameters(),
        lambda name: args.lr if name.startswith("connector") else args.adapter_lr,
        args.minutes,
    )
    for index, batches in enumerate(micro_batches(stream(args.seed + 1, 16))):
        if trainer.progress == 1:
            break
        loss = answers.learn(batches)
        trainer.step()
        if index % 10 == 0:
            print(f"{trainer.progress:.1%} step {index} loss {loss:.3f}", flush=True)
        if index % 50 == 49:
            torch.save(trainer.master, args.work / "answers.pt")
    torch.save(trainer.master, args.work / "answers.pt")


def write_companion(args: argparse.Namespace) -> None:
    """The checkpoint, of what the last stage left."""
    seeing, adapter = Seeing(), Adapter(load_model(), args.seed)
    seeing.load_state_dict(torch.load(args.work / "connector.pt"))
    answers = Answers(seeing, adapter, args.seed)
    for name, each in torch.load(args.work / "answers.pt").items():
        answers.parameters()[name].data.copy_(each)
    write_processor(args.out)
    write_weights(seeing, adapter, args.out)


def main() -> None:
    """Train one stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--minutes", type=float, default=20, help="budget of wall-clock time (default 20)")
    parser.add_argument("--pictures", type=int, default=64, help="pictures of a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--adapter-lr", type=float, default=3e-3, help="that of the adapter")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with the patches or the answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, required=True, help="folder of what a stage leaves")
    parser.add_argument("--out", type=Path, default=VISION, help="folder of the companion")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    STAGES[args.stage](args)


STAGES = {"patches": train_patches, "connector": train_connector, "answers": train_answers, "write": write_companion}

if __name__ == "__main__":
    main()
