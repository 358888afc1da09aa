"""Media among the tokens of prompts: whatever shares the step, in whatever pieces, each gets its own embeddings."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_graph_network import DeviceNetwork, add_torch_ops
from runner_harness import FULL, HYBRID, VOCAB_SIZE, WIDTH, Engine, TinyNetwork, make_request
from torch import Tensor

from quire_interfaces import FeatureArray, FinishReason, MediaItem, MediaSpan, Modality, PromptMedia, Request
from quire_kv_cache import NoKVCache
from quire_runner.encoder_runner import EncoderRunner
from quire_scheduler import MediaRule, Scheduler, SchedulerConfig
from quire_testkit.memory_encoder_cache import MemoryEncoderCache
from quire_testkit.recorded_graph import record_graph


def make_item(folder: Path, key: str, pixels: Tensor, *, is_encoded: bool = False) -> MediaItem:
    """An item in a file, behind some other bytes."""
    path = folder / key
    path.write_bytes(b"\0" * 64 + pixels.numpy().tobytes())
    array = FeatureArray("pixels", "float32", tuple(pixels.shape), 64)
    return MediaItem(
        modality=Modality.IMAGE,
        key=key,
        num_embeds=len(pixels),
        path=str(path),
        features=(array,),
        is_encoded=is_encoded,
    )


class Pictures:
    """Items with their embeddings, and requests that show them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.embeds: dict[str, Tensor] = {}
        self.items: list[MediaItem] = []
        for number in range(6):
            pixels = torch.randn(self.draw.randrange(1, 9), WIDTH, generator=generator)
            item = make_item(folder, f"p{number}", pixels, is_encoded=number == 5)
            self.items.append(item)
            self.embeds[item.key] = pixels * (1 if item.is_encoded else 2)

    def request(self, name: str, *, num_spans: int, rotated: bool) -> Request:
        """A request whose pictures stand among random tokens, with a mark within each that takes no embedding."""
        draw = self.draw
        tokens, spans = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 6))], []
        for _ in range(num_spans):
            item = draw.choice(self.items)
            cut = draw.randrange(item.num_embeds)
            embeds = tuple(each for each in ((1, 1 + cut), (2 + cut, 2 + item.num_embeds)) if each[0] < each[1])
            spans.append(MediaSpan(item=item, start=len(tokens), length=item.num_embeds + 3, embeds=embeds))
            tokens += [1] * spans[-1].length + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(3))]
        request = make_request(name, tokens, max_tokens=draw.randrange(1, 9), temperature=0.0)
        if spans:
            table = np.array([[draw.randrange(40) for _ in tokens] for _ in range(3)], dtype="<i4")
            delta = draw.randrange(-3, 4)
            request.media = PromptMedia(
                spans=tuple(spans),
                positions=table.tobytes() if rotated else b"",
                position_delta=delta if rotated else 0,
            )
            request.cache_extra_keys = request.media.extra_keys
        return request

    def reference_tokens(self, network: TinyNetwork, request: Request) -> list[int]:
        """The request alone, every token from a fresh dense pass over the whole sequence."""
        tokens, media, num_prompt = list(request.prompt_token_ids), request.media, request.num_prompt_tokens
        rows: dict[int, Tensor] = {}
        for span in () if media is None else media.spans:
            rows |= dict(zip(span.tokens_between(0, num_prompt), self.embeds[span.item.key], strict=True))
        for _ in range(request.max_tokens):
            positions = torch.arange(len(tokens)).expand(3, -1).clone()
            if media is not None and media.positions:
                table = np.frombuffer(media.positions, dtype="<i4").reshape(3, num_prompt)
                positions[:, :num_prompt] = torch.from_numpy(table.astype(np.int64))
                positions[:, num_prompt:] += media.position_delta
            tokens.append(int(network.dense_logits(tokens, positions, rows)[-1].argmax()))
        return tokens[num_prompt:]


@pytest.mark.parametrize("rotated", [False, True], ids=["counted", "three axes"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests(tmp_path: Path, seed: int, depth: int, rotated: bool) -> None:
    pictures = Pictures(tmp_path, seed)
    draw = random.Random(seed)
    budget = draw.choice([1, 5, 16, 64])
    windows = draw.choice([FULL, HYBRID])
    cache_size = draw.choice([9, 30])
    engine = Engine(
        TinyNetwork(windows),
        num_blocks=draw.choice([26, 60]) * (2 if windows is HYBRID else 1),
        max_num_batched_tokens=budget,
        depth=depth,
        rules=[MediaRule(draw.choice([3, 10]), cache_size, budget)],
    )
    requests = [pictures.request(f"r{n}", num_spans=draw.randrange(4), rotated=rotated) for n in range(12)]
    try:
        outcomes = engine.run(*requests)
    finally:
        engine.close()
    assert 0 < engine.runner.encoder_cache.num_embeds <= cache_size
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.error is None
        assert outcome.token_ids == pictures.reference_tokens(engine.network, request), request.request_id


@pytest.mark.parametrize("seed", range(3))
def test_decode_steps_behind_media_stay_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    add_torch_ops(monkeypatch)
    pictures = Pictures(tmp_path, seed)
    engine = Engine(
        DeviceNetwork(FULL),
        capture=record_graph,
        max_num_seqs=4,
        rules=[MediaRule(64, 64, 64)],
        config={"rotates_by_axes": True},
    )
    requests = [pictures.request(f"r{n}", num_spans=n % 3, rotated=True) for n in range(9)]
    for request in requests:
        request.max_tokens = 25
        if request.media is not None:
            request.media = dataclasses.replace(request.media, position_delta=-(1 + len(request.request_id)))
    outcomes = engine.run(*requests)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.failure is None
    assert graphs.captured
    for request in requests:
        expected = pictures.reference_tokens(engine.network, request)
        assert outcomes[request.request_id].token_ids == expected, request.request_id
    assert engine.network.num_forwards < engine.num_steps / 2, "decodes run kernel by kernel"
    engine.close()


def test_a_picture_is_encoded_once_and_shared_by_the_prefix_cache(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path, 0)
    engine = Engine(rules=[MediaRule(64, 64, 64)])
    first = pictures.request("first", num_spans=2, rotated=False)
    second = make_request("second", first.prompt_token_ids, max_tokens=4)
    second.media, second.cache_extra_keys = first.media, first.cache_extra_keys
    engine.run(first)
    num_encoded = engine.network.num_encoded
    engine.run(second)
    assert engine.network.num_encoded == num_encoded
    (seconds,) = engine.scheduler.stats().encode_seconds_total.items()
    assert seconds[0] == "image"
    assert seconds[1] > 0
    assert second.num_cached_tokens > 0
    common = min(len(first.output_token_ids), len(second.output_token_ids))
    assert first.output_token_ids[:common] == second.output_token_ids[:common]


def test_what_cannot_be_encoded_fails_those_who_sent_it(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path, 1)
    blank = make_item(tmp_path, "blank", torch.zeros(3, WIDTH))
    short = make_item(tmp_path, "short", torch.ones(2, WIDTH))
    gone = make_item(tmp_path, "gone", torch.ones(2, WIDTH))
    (tmp_path / "gone").unlink()
    requests = [pictures.request(f"r{n}", num_spans=1, rotated=False) for n in range(2)]
    for name, item, num_embeds in (("blank", blank, 3), ("short", short, 2), ("gone", gone, 2)):
        request = make_request(name, range(10))
        if name == "short":
            item = MediaItem(modality=item.modality, key="short", num_embeds=4, path=item.path, features=item.features)
            num_embeds = 4
        request.media = PromptMedia(
            spans=(MediaSpan(item=item, start=1, length=num_embeds, embeds=((0, num_embeds),)),)
        )
        request.cache_extra_keys = request.media.extra_keys
        requests.append(request)
    engine = Engine(rules=[MediaRule(64, 64, 64)])
    outcomes = engine.run(*requests)
    assert "nothing to see" in outcomes["blank"].error
    assert "2 embeddings of an item that has 4 places" in outcomes["short"].error
    assert "No such file" in outcomes["gone"].error
    assert all(outcomes[name].error is None for name in ("r0", "r1"))
    for request in requests[:2]:
        assert outcomes[request.request_id].token_ids == request.output_token_ids
    again = make_request("again", range(10))
    again.media, again.cache_extra_keys = requests[2].media, requests[2].cache_extra_keys
    assert "nothing to see" in engine.run(again)["again"].error


def test_a_connector_has_what_another_engine_encoded(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path, 2)
    cache = MemoryEncoderCache(dtype="float32", width=WIDTH)
    num_encoded, tokens = [], []
    for name in ("first", "second"):
        engine = Engine(rules=[MediaRule(16, 16, 64)], encoder_connector=cache)
        requests = [pictures.request(f"{name}{n}", num_spans=3, rotated=False) for n in range(6)]
        outcomes = engine.run(*requests)
        for request in requests:
            expected = pictures.reference_tokens(engine.network, request)
            assert outcomes[request.request_id].token_ids == expected, request.request_id
        num_encoded.append(engine.network.num_encoded)
        tokens.append(engine.scheduler.stats().num_encoded_items_total.get("image", 0))
        if name == "first":
            assert cache.embeds.keys() == {item.key for item in pictures.items if not item.is_encoded}
    assert num_encoded == tokens == [5, 0], "each of five pictures once, though 16 embeddings are kept"
    assert not cache.is_stopped
    engine.close()
    assert cache.is_stopped


def test_towers_alone_keep_what_they_make_and_end_requests(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path, 3)
    cache = MemoryEncoderCache(dtype="float32", width=WIDTH)
    network = TinyNetwork()
    runner = EncoderRunner(network.encode_media, torch.device("cpu"), cache)
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=128)
    scheduler = Scheduler(config, NoKVCache(), rules=[MediaRule(16, 16, 16)])
    blank = make_item(tmp_path, "blank", torch.zeros(3, WIDTH))
    requests = [pictures.request(f"r{n}", num_spans=3, rotated=False) for n in range(5)]
    requests.append(make_request("blank", range(10)))
    requests[-1].media = PromptMedia(spans=(MediaSpan(item=blank, start=1, length=3, embeds=((0, 3),)),))
    for request in requests:
        request.stop_token_ids, request.max_tokens = frozenset({7, 9}), 5
        scheduler.add_request(request)
    reasons = {}
    while (step := scheduler.schedule()) is not None:
        for output in scheduler.update(step, runner.execute(step).result()):
            reasons[output.request_id] = (output.finish_reason, output.new_token_ids)
    assert reasons.pop("blank") == (FinishReason.ERROR, [])
    assert all(reason == (FinishReason.STOP, [7]) for reason in reasons.values())
    shown = {span.item.key: span.item for request in requests[:-1] for span in request.media.spans}
    encoded = {key: item for key, item in shown.items() if not item.is_encoded}
    assert cache.embeds == {key: pictures.embeds[key].numpy().tobytes() for key in encoded}
    runner.close()
    late = make_request("late", range(10))
    late.stop_token_ids = frozenset({7})
    scheduler.add_request(late)
    step = scheduler.schedule()
    assert step is not None
    (output,) = scheduler.update(step, runner.execute(step).result())
    assert output.finish_reason is FinishReason.ERROR, "nothing is kept any more"
