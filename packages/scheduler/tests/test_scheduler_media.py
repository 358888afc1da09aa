"""Media: what a step computes has been encoded, within the budget of a step and the size of the cache, and once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire_interfaces import (
    FinishReason,
    MediaItem,
    MediaSpan,
    Modality,
    PromptMedia,
    Request,
    RequestError,
    SchedulerOutput,
)
from quire_interfaces.media import END_OF_SEQUENCE
from quire_scheduler import MediaRule
from quire_testkit.conformance.scheduler import make_request


def item(key: str, num_embeds: int, *, is_encoded: bool = False) -> MediaItem:
    return MediaItem(
        modality=Modality.IMAGE, key=key, num_embeds=num_embeds, path="", features=(), is_encoded=is_encoded
    )


def with_media(request: Request, *spans: MediaSpan) -> Request:
    request.media = PromptMedia(spans=spans)
    request.cache_extra_keys = request.media.extra_keys
    return request


def span(start: int, of: MediaItem, margin: int = 1) -> MediaSpan:
    """A mark on both sides, embeddings between them."""
    embeds = ((margin, margin + of.num_embeds),)
    return MediaSpan(item=of, start=start, length=of.num_embeds + 2 * margin, embeds=embeds)


class WatchedSteps:
    """Does to a set of keys what steps ask for, and checks each step against it."""

    def __init__(self, cache_size: int, budget: int, *, whole: bool) -> None:
        self.sizes: dict[str, int] = {}
        self.encoded: Counter[str] = Counter()
        self._cache_size, self._budget, self._whole = cache_size, budget, whole
        self._requests: dict[str, Request] = {}

    def watch(self, driver, requests):
        self._requests.update({request.request_id: request for request in requests})
        driver.add(*requests)
        while driver.step():
            for output in driver.steps:
                self.check(output)
            driver.steps.clear()

    def check(self, output) -> None:
        for key in output.freed_media:
            del self.sizes[key]  # KeyError: it was not there
        costs = [each.num_embeds for each in output.encode if not each.is_encoded]
        assert sum(costs) <= self._budget or len(costs) == 1
        for each in output.encode:
            assert each.key not in self.sizes, "encoded although it is there"
            self.sizes[each.key] = each.num_embeds
            self.encoded[each.key] += 1
        assert sum(self.sizes.values()) <= self._cache_size
        entries = zip(output.request_ids, output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
        for request_id, start, count in entries:
            media = self._requests[request_id].media
            for each in () if media is None else media.spans:
                if each.is_read(start, start + count):
                    assert each.item.key in self.sizes, f"{request_id} computes what was not encoded"
                if self._whole and each.start < start + count:
                    assert start + count >= each.end, "a span is split"
            if media is not None and start < media.prefix_len:
                assert start + count >= media.prefix_len, "a prompt is split whose tokens see one another"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_random_conversations(make_driver, seed: int, depth: int, whole: bool) -> None:
    draw = random.Random(seed)
    budget, cache_size = draw.choice([6, 12, 30]), draw.choice([20, 40])
    rule = MediaRule(budget, cache_size, 32, keeps_spans_whole=whole)
    driver = make_driver(
        num_blocks=draw.choice([24, 60]), depth=depth, prefix_cache=True, rules=(rule,), max_num_batched_tokens=32
    )
    items = [item(f"k{number}", draw.randrange(1, 18), is_encoded=draw.random() < 0.2) for number in range(8)]
    requests = []
    for number in range(30):
        spans, place = [], draw.randrange(3)
        for _ in range(draw.randrange(4)):
            spans.append(span(place, draw.choice(items)))
            place = spans[-1].end + draw.randrange(6)
        tokens = [draw.randrange(9) for _ in range(max(place, 1) + draw.randrange(8))][:80]
        spans = [each for each in spans if each.end <= len(tokens)]
        requests.append(with_media(make_request(f"r{number}", tokens, max_tokens=draw.randrange(1, 12)), *spans))
    steps = WatchedSteps(cache_size, budget, whole=whole)
    steps.watch(driver, requests[:15])
    steps.watch(driver, requests[15:])
    assert all(each.finish_reason == FinishReason.LENGTH for each in driver.transcripts.values())
    stats = driver.scheduler.stats()
    assert stats.encoder_cache_queries_total - stats.encoder_cache_hits_total == steps.encoded.total()
    assert steps.sizes
    assert rule.reset_cache(), "somebody still holds an item"


def test_an_item_is_encoded_once_for_all_who_send_it(make_driver) -> None:
    driver = make_driver(rules=(MediaRule(10, 20, 64),))
    image = item("cat", 8)
    steps = WatchedSteps(20, 10, whole=False)
    steps.watch(driver, [with_media(make_request(f"r{n}", range(12), max_tokens=3), span(1, image)) for n in range(5)])
    steps.watch(driver, [with_media(make_request("later", range(12)), span(1, image))])
    assert steps.encoded == {"cat": 1}


def test_an_item_larger_than_the_budget_goes_alone(make_driver) -> None:
    driver = make_driver(rules=(MediaRule(4, 30, 64),))
    driver.add(
        with_media(make_request("small", range(8), max_tokens=1), span(0, item("a", 3))),
        with_media(make_request("large", range(30), max_tokens=1), span(0, item("b", 20))),
    )
    driver.run()
    assert [[each.key for each in step.encode] for step in driver.steps if step.encode] == [["a"], ["b"]]


def test_an_item_makes_room_once_its_tokens_are_computed(make_driver) -> None:
    rule = MediaRule(10, 10, 64)
    driver = make_driver(rules=(rule,))
    names = "abcd"
    driver.add(*(with_media(make_request(n, range(12), max_tokens=9), span(1, item(n, 8))) for n in names))
    driver.run()
    steps = [[each.key for each in step.encode] for step in driver.steps]
    assert steps[:4] == [[name] for name in names], "who decodes holds nothing"
    assert rule.reset_cache()


def test_an_item_that_is_still_read_is_kept(make_driver) -> None:
    rule = MediaRule(10, 20, 64)
    driver = make_driver(rules=(rule,), max_num_batched_tokens=8)
    image = item("cat", 12)
    driver.add(with_media(make_request("a", range(40), max_tokens=2), span(1, image), span(20, image)))
    driver.step()
    assert not rule.reset_cache(), "the step ends within it"
    driver.run()
    assert sum(len(step.encode) for step in driver.steps) == 1
    assert rule.reset_cache()


def test_text_passes_through_while_an_item_waits_for_its_turn(make_driver) -> None:
    driver = make_driver(rules=(MediaRule(4, 30, 64),))
    driver.add(
        with_media(make_request("a", range(20)), span(2, item("a", 4))),
        with_media(make_request("b", range(20)), span(9, item("b", 4))),
    )
    driver.step()
    step = driver.steps[0]
    computed = dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))
    assert computed == {"a": 20, "b": 9}, "b goes as far as its item"
    driver.run()


def test_what_is_too_large_is_refused_in_words(make_driver) -> None:
    driver = make_driver(rules=(MediaRule(4, 30, 16, keeps_spans_whole=True),), max_num_batched_tokens=16)
    with pytest.raises(RequestError, match="31 embeddings, but at most 30") as error:
        driver.add(with_media(make_request("a", range(40)), span(2, item("a", 31))))
    assert error.value.code == "media_too_large"
    assert "larger --encoder-cache-size" in str(error.value)
    with pytest.raises(RequestError, match="17 tokens, which this model reads at once"):
        driver.add(with_media(make_request("b", range(40)), span(2, item("b", 15))))


def test_an_item_that_failed_is_encoded_again_for_the_next(make_driver) -> None:
    rule = MediaRule(10, 20, 64)
    driver = make_driver(rules=(rule,))
    driver.add(with_media(make_request("a", range(12), max_tokens=4), span(1, item("cat", 8))))
    output = driver.scheduler.schedule()
    result = driver.runner.execute(output)
    result.failed_media = {"cat": "no such layer"}
    driver.scheduler.update(output, result)
    driver.add(with_media(make_request("b", range(12), max_tokens=4), span(1, item("cat", 8))))
    again = driver.scheduler.schedule()
    assert [each.key for each in again.encode] == ["cat"]


def test_a_discarded_step_encodes_again(make_driver) -> None:
    driver = make_driver(rules=(MediaRule(10, 20, 64),))
    driver.add(with_media(make_request("a", range(12), max_tokens=4), span(1, item("cat", 8))))
    output = driver.scheduler.schedule()
    driver.scheduler.discard_step(output)
    again = driver.scheduler.schedule()
    assert again.freed_media == ["cat"]
    assert [each.key for each in again.encode] == ["cat"]


def empty_step() -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0, rows=[], request_ids=[], num_computed_tokens=[], num_scheduled_tokens=[], samples=[]
    )


def test_who_is_not_admitted_holds_nothing_and_what_nobody_needs_is_not_encoded() -> None:
    rule = MediaRule(50, 20, 64)
    a = with_media(make_request("a", range(30)), span(0, item("a", 15)))
    b = with_media(make_request("b", range(30)), span(0, item("b", 15)))
    assert rule.allowed_tokens(a, 0, 30) == 30  # and then there are no blocks for it
    assert rule.allowed_tokens(b, 0, 30) == 30
    rule.admitted(b)
    output = empty_step()
    assert rule.step_planned(output, is_idle=False)
    assert [each.key for each in output.encode] == ["b"]
    assert output.freed_media == []
    assert rule.allowed_tokens(a, 0, 30) == 0, "b holds its item"
    rule.released(b)
    assert rule.allowed_tokens(a, 0, 30) == 30
    assert rule.step_planned(output, is_idle=False)
    assert output.freed_media == ["b"]


def test_a_span_that_stays_whole_may_be_longer_than_the_threshold(make_driver) -> None:
    rule = MediaRule(50, 50, 64, keeps_spans_whole=True)
    driver = make_driver(rules=(rule,), long_prefill_token_threshold=4)
    request = with_media(make_request("a", range(30), max_tokens=2), span(6, item("a", 15)))
    WatchedSteps(50, 50, whole=True).watch(driver, [request])
    assert driver.transcripts["a"].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_whose_tokens_see_one_another_is_computed_at_once(make_driver, depth: int) -> None:
    """Beside texts in pieces; an equal prompt is found in the prefix cache, one that ends otherwise is not."""
    rule = MediaRule(30, 30, 40)
    driver = make_driver(
        num_blocks=60, depth=depth, prefix_cache=True, rules=(rule,), max_num_batched_tokens=40,
        long_prefill_token_threshold=4,
    )  # fmt: skip
    spans = (span(2, item("a", 12)), span(18, item("b", 10)))
    prompts = [list(range(33)), list(range(33)), [*range(32), 99]]
    requests = []
    for number, tokens in enumerate(prompts):
        request = make_request(f"r{number}", tokens, max_tokens=6)
        request.media = PromptMedia(spans=spans).as_prefix(tokens)
        request.cache_extra_keys = request.media.extra_keys
        requests.append(request)
    texts = [make_request(f"t{number}", range(number, number + 30), max_tokens=9) for number in range(3)]
    steps = WatchedSteps(30, 30, whole=True)
    for request in requests:
        steps.watch(driver, [texts.pop(), request])
    assert all(each.finish_reason == FinishReason.LENGTH for each in driver.transcripts.values())
    assert [request.num_cached_tokens for request in requests] == [0, 32, 0]
    assert steps.encoded == {"a": 1, "b": 1}


@pytest.mark.parametrize(("num_tokens", "num_embeds"), [(41, 12), (33, 20)])
def test_a_prompt_that_is_too_large_to_be_computed_at_once_is_refused(
    make_driver, num_tokens: int, num_embeds: int
) -> None:
    driver = make_driver(rules=(MediaRule(30, 30, 40),), max_num_batched_tokens=40)
    request = with_media(make_request("a", range(num_tokens)), span(0, item("a", num_embeds)), span(22, item("b", 11)))
    assert request.media is not None
    request.media = request.media.as_prefix(request.prompt_token_ids)
    with pytest.raises(RequestError, match="which this model reads at once") as error:
        driver.add(request)
    assert error.value.code == "media_too_large"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_items_that_tokens_attend_to_stay_while_they_do(make_driver, seed: int, depth: int) -> None:
    """Answers attend to the last ones, too; those side by side are read together, and nobody waits with one of them."""
    draw = random.Random(seed)
    rule = MediaRule(draw.choice([6, 30]), 24, 32)
    driver = make_driver(
        num_blocks=draw.choice([30, 80]), depth=depth, prefix_cache=True, rules=(rule,), max_num_batched_tokens=32
    )
    items = [item(f"k{number}", draw.randrange(1, 13)) for number in range(8)]
    requests = []
    for number in range(30):
        tokens, spans = list[int](), list[MediaSpan]()
        for _ in range(draw.randrange(4)):
            for each in draw.sample(items, draw.randrange(1, 3)):
                spans.append(MediaSpan(item=each, start=len(tokens), length=1, embeds=()))
                tokens.append(9)
            tokens += [draw.randrange(9) for _ in range(1 + draw.randrange(9))]
        request = make_request(f"r{number}", tokens or [1], max_tokens=draw.randrange(1, 12))
        request.media = PromptMedia(spans=tuple(spans)).as_cross_attended()
        request.cache_extra_keys = request.media.extra_keys
        requests.append(request)
    steps = WatchedSteps(24, 30, whole=False)
    steps.watch(driver, requests[:15])
    steps.watch(driver, requests[15:])
    assert all(each.finish_reason == FinishReason.LENGTH for each in driver.transcripts.values())
    assert len(driver.transcripts) == 30
    assert rule.reset_cache(), "somebody still holds an item"


def test_media_side_by_side_that_are_too_large_together_are_refused(make_driver) -> None:
    driver = make_driver(rules=(MediaRule(30, 30, 64),))
    spans = [MediaSpan(item=item(key, 16), start=start, length=1, embeds=()) for key, start in (("a", 3), ("b", 4))]
    request = with_media(make_request("a", range(9)), *spans)
    assert request.media is not None
    request.media = request.media.as_cross_attended()
    with pytest.raises(RequestError, match="32 embeddings which this model reads at once") as error:
        driver.add(request)
    assert error.value.code == "media_too_large"


def test_tokens_attend_to_the_last_items_before_them() -> None:
    spans = [MediaSpan(item=item("a", 2), start=start, length=1, embeds=((0, 1),)) for start in (2, 5, 6, 9)]
    media = PromptMedia(spans=tuple(spans)).as_cross_attended()
    assert [(span.start, span.cross_end, span.embeds) for span in media.spans] == [
        (2, 5, ()), (5, 9, ()), (6, 9, ()), (9, END_OF_SEQUENCE, ())
    ]  # fmt: skip
    first, last = media.spans[0], media.spans[-1]
    assert [first.is_read(*step) for step in ((0, 2), (0, 3), (4, 9), (5, 9))] == [False, True, True, False]
    assert last.is_read(5000, 5001)
