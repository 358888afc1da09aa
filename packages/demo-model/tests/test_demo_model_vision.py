"""The companion that sees: small, right on held-out drawings, and nothing to those who send text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from chat import CHECKPOINT, Chat
from corpus.words import Source, held_out
from evaluate import load_model
from evaluate_vision import evaluate
from model import Llama
from pictures.conversations import messages
from pictures.labels import GRID, LABEL_SIZES, labels
from pictures.questions import TASKS, viewing
from pictures.scenes import HELD_KINDS, Scene
from pictures.stream import drawn
from train_vision import NUM_TOKENS, ROWS, pack_drawn
from vision import EMBED_ID, NUM_EMBEDS, Seeing, VisionChat
from vision_checkpoint import ADAPTER, load_reader, load_seeing

import quire_demo_model

NUM_ITEMS = 40


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Seeing, Llama]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    yield load_seeing(), load_reader(load_model())
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("task", "bar"), [("naming", 0.9), ("counting", 0.7), ("digits", 0.9), ("words", 0.8), ("comparing", 0.7)]
)
def test_accuracy_on_new_drawings(network: tuple[Seeing, Llama], task: str, bar: float) -> None:
    assert evaluate(*network, (task,), NUM_ITEMS, seed=1, new_kinds=False)[task] >= bar


def test_it_is_small_and_as_listed() -> None:
    towers, adapter = quire_demo_model.vision_paths()
    assert adapter == ADAPTER
    files = [path for path in towers.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 3_000_000
    listed = dict(line.split("  ")[::-1] for line in (towers / "SHA256SUMS").read_text().splitlines())
    assert set(listed) == {path.name for path in towers.iterdir() if path.is_file()} - {"SHA256SUMS"}
    for name, digest in listed.items():
        assert hashlib.sha256((towers / name).read_bytes()).hexdigest() == digest, name


def is_held_out(scene: Scene) -> bool:
    """Whether a picture shows what training must not."""
    if not scene.text:
        return any((each.color, each.shape) in HELD_KINDS for each in scene.shapes)
    if scene.text.isdigit():
        return len(scene.text) > 1 and held_out("number in a picture", scene.text)
    return held_out("word", scene.text.lower())


@pytest.mark.parametrize("task", TASKS)
def test_training_draws_nothing_held_out_and_the_evaluation_something(task: str) -> None:
    trained, held = Source(Random(3)), Source(Random(4), held=True)
    for _ in range(300):
        assert not any(map(is_held_out, viewing(trained, task, 3).scenes))
        assert any(map(is_held_out, viewing(held, task).scenes))


def test_labels_stand_where_things_are() -> None:
    drawn = viewing(Source(Random(5)), "counting").scenes[0]
    grid = labels(drawn).reshape(GRID, GRID, len(LABEL_SIZES))
    assert all(grid[..., i].max() < size for i, size in enumerate(LABEL_SIZES))
    for each in drawn.shapes:
        assert grid[int(each.y * GRID), int(each.x * GRID), 2] == len(drawn.shapes)
    line = labels(viewing(Source(Random(6)), "words").scenes[0])
    assert sorted(set(line[:, 6])) == list(range(line[:, 6].max() + 1)), "characters are numbered from left to right"


TEXTS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello, \u00ff\u00e4\u4f60 <b>"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "27 + 35?"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [
        {"function": {"name": "f", "arguments": {"x": 1}}}]}, {"role": "tool", "content": "c"}],
]  # fmt: skip


@pytest.mark.parametrize("conversation", TEXTS)
def test_texts_have_the_tokens_that_they_have_without_it(conversation: list[dict[str, Any]]) -> None:
    plain, seeing = Chat(CHECKPOINT), VisionChat()
    options = {"add_generation_prompt": True, "enable_thinking": True}
    text = plain.render(conversation, **options)
    assert seeing.render(conversation, **options) == text
    assert seeing.encode(text) == plain.encode(text)


def test_pictures_are_numbered_and_have_a_place_for_each_embedding() -> None:
    chat, asked = VisionChat(), viewing(Source(Random(7)), "comparing")
    text = chat.render(messages(asked))
    assert "user\nPicture 1: <image>\nPicture 2: <image>\n" + asked.questions[0].text in text
    assert chat.encode(text).count(EMBED_ID) == 2 * NUM_EMBEDS


def test_a_micro_batch_trains_what_answers_say() -> None:
    chat, source = VisionChat(), Source(Random(8))
    batch = [drawn(viewing(source, "comparing", 2)) for _ in range(ROWS[2])]
    m = pack_drawn(batch, source, chat)
    assert (m.rows, len(m.ids)) == (ROWS[2], NUM_TOKENS)
    assert (m.ids == EMBED_ID).sum() == 2 * NUM_EMBEDS * len(batch)
    assert EMBED_ID not in m.labels
    for row, each in enumerate(batch):
        learned = chat.tokenizer.decode(m.labels[m.chosen // m.row_len == row].tolist())
        assert each.viewing.questions[0].answer in learned
        assert each.viewing.questions[0].text not in learned


def test_embeddings_of_words_in_their_place_give_what_the_words_give() -> None:
    model, chat = load_model(), Chat()
    ids = chat.encode("<|im_start|>user\nWhat is 27 + 35?<|im_end|>\n<|im_start|>assistant\n")
    shown = [EMBED_ID if 4 <= place < 12 else token_id for place, token_id in enumerate(ids)]
    images = model.embedding.detach()[ids[4:12]]
    assert model.generate([shown], 40, chat.end_id, images) == model.generate([ids], 40, chat.end_id)
