"""What drafts cost is measured before the first request, for as many requests as it may matter, and leaves no trace."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from runner_drafting import NUM_DRAFTS, Engine, requests, runner_of
from runner_harness import random_model

from quire_models import DecoderLM
from quire_spec_decode import DraftController


class Watched(DraftController):
    """Remembers what it was told, and what the runner's steps did meanwhile. Never has enough."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.told: dict[int, dict[int, float]] = {}

    def learn_costs(self, num_rows: int, seconds: Mapping[int, float]) -> bool:
        super().learn_costs(num_rows, seconds)
        self.told[num_rows] = dict(seconds)
        return True


@pytest.fixture(scope="module")
def target() -> DecoderLM:
    return random_model("llama")


@pytest.mark.parametrize(("depth", "topk"), [(0, 1), (1, 1), (0, 2)])
def test_costs_are_told_and_tokens_stay(depth: int, topk: int, target: DecoderLM) -> None:
    expected = Engine(target).run(*requests())
    controller = Watched(NUM_DRAFTS)
    engine = Engine(target, random_model("llama"), depth=depth, topk=topk, budget=100, controller=controller)
    assert list(controller.told) == [1, 2, 4, 8], "every size up to max_num_seqs"
    for costs in controller.told.values():
        assert set(costs) == set(controller.lengths)
        assert all(seconds > 0 for seconds in costs.values())
    rows = runner_of(engine).rows
    assert not rows.num_tokens.any()
    assert not any(table.num_blocks.any() for table in rows.block_tables)
    assert engine.run(*requests()) == expected
    engine.executor.close()


@pytest.mark.parametrize("more", [{"num_blocks": 24}, {"max_model_len": 20}, {"budget": 16}])
def test_no_more_than_there_is_room_for(more: dict[str, int], target: DecoderLM) -> None:
    controller = Watched(NUM_DRAFTS)
    engine = Engine(target, random_model("llama"), controller=controller, **more)
    assert len(controller.told) < 4
    assert engine.run(*requests((0.0,))).keys() == {"r0"}
    engine.executor.close()


def test_nothing_more_is_measured_where_no_draft_can_pay(target: DecoderLM) -> None:
    class Content(Watched):
        def learn_costs(self, num_rows: int, seconds: Mapping[int, float]) -> bool:
            return super().learn_costs(num_rows, seconds) and num_rows < 2

    controller = Content(NUM_DRAFTS)
    Engine(target, random_model("llama"), controller=controller).executor.close()
    assert list(controller.told) == [1, 2]
