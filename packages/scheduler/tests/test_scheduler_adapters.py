"""Adapter slots: who runs, who waits, who passes whom; and that the books balance whatever happens."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from quire_interfaces import AdapterInfo, ModelNotFoundError, Request, RequestError, RequestOptions, SchedulerStats
from quire_scheduler import AdapterGate
from quire_testkit.conformance.scheduler import make_request


class Store:
    """An `AdapterStore` whose files are read when a test says so."""

    def __init__(self, *names: str, is_read: bool = True) -> None:
        self.versions = {name: f"{name}-1" for name in names}
        self.holds: dict[str, int] = {}
        self.reading: dict[str, Future[None]] = {}
        self.is_read = is_read

    def load(self, name: str, path: str, *, replace: bool = False) -> Future[AdapterInfo]:
        raise NotImplementedError

    def unload(self, name: str) -> None:
        del self.versions[name]

    def loaded(self) -> list[AdapterInfo]:
        return [AdapterInfo(name=name, path="", version=version) for name, version in self.versions.items()]

    def resolve(self, name: str) -> str:
        if name not in self.versions:
            raise ModelNotFoundError(f"no adapter {name!r}")
        return self.versions[name]

    def hold(self, version: str) -> None:
        self.holds[version] = self.holds.get(version, 0) + 1

    def drop(self, version: str) -> None:
        self.holds[version] -= 1
        assert self.holds[version] >= 0

    def fetch(self, version: str) -> Future[None]:
        future = self.reading.setdefault(version, Future())
        if self.is_read and not future.done():
            future.set_result(None)
        return future

    def close(self) -> None:
        """Nothing is being read."""


def request_with(name: str, adapter: str | None, num_tokens: int = 3, max_tokens: int = 4) -> Request:
    request = make_request(name, list(range(1, num_tokens + 1)), max_tokens=max_tokens)
    request.options = RequestOptions(adapter=adapter)
    return request


def add(driver, gate: AdapterGate, *requests: Request) -> None:
    for request in requests:
        gate.prepare(request)
    driver.add(*requests)


def test_who_has_a_slot_passes_who_waits_for_one(make_driver) -> None:
    gate = AdapterGate(Store("a", "b", "c"), 2)
    driver = make_driver(rules=(gate,))
    names = [("a0", "a"), ("b0", "b"), ("c0", "c"), ("a1", "a"), ("base", None), ("c1", "c"), ("b1", "b")]
    add(driver, gate, *[request_with(*name) for name in names])
    driver.step()
    assert driver.steps[0].request_ids == ["a0", "b0", "a1", "base", "b1"]
    slots = {new.request_id: (new.adapter_slot, new.adapter_version) for new in driver.steps[0].new_rows}
    assert slots == {"a0": (0, "a-1"), "b0": (1, "b-1"), "a1": (0, "a-1"), "base": (-1, ""), "b1": (1, "b-1")}
    assert driver.scheduler.waiting_reasons() == {"adapter_slots": 2}
    stats = SchedulerStats()
    gate.add_stats(stats)
    assert (stats.num_adapters_running, stats.num_adapter_slots) == (2, 2)
    assert stats.adapter_requests_running == {"a": 2, "b": 2}
    assert stats.adapter_requests_waiting == {"c": 2}
    driver.run()
    assert all(transcript.finish_reason == "length" for transcript in driver.transcripts.values())
    gate.check_integrity()


def test_a_request_that_others_pass_for_ever_gets_its_turn(make_driver) -> None:
    gate = AdapterGate(Store("a", "b"), 1, max_passes=3)
    driver = make_driver(rules=(gate,), max_num_seqs=2)
    others = [request_with(f"a{i}", "a", max_tokens=3 + 2 * (i % 2)) for i in range(12)]  # one is always running
    add(driver, gate, others[0], request_with("b0", "b"), *others[1:])
    while driver.scheduler.has_requests():
        driver.step()
        gate.forget(
            [name for name, transcript in driver.transcripts.items() if transcript.finish_reason]
        )  # as the engine does
    order = [new.request_id for step in driver.steps for new in step.new_rows]
    assert len(order) == 13
    assert order.index("b0") == 3  # of 12 others, as many as may pass


def test_slots_of_nobody_are_taken_in_the_order_of_their_use(make_driver) -> None:
    gate = AdapterGate(Store("a", "b", "c"), 2)
    driver = make_driver(rules=(gate,))
    taken = []
    for name in ("a", "b", "a", "c", "a", "b"):
        add(driver, gate, request_with(f"{name}{len(taken)}", name))
        driver.run()
        gate.forget([f"{name}{len(taken)}"])
        taken.append(driver.steps[-1].new_rows or [new for step in driver.steps for new in step.new_rows])
    slots = [new.adapter_slot for step in driver.steps for new in step.new_rows]
    assert slots == [0, 1, 0, 1, 0, 1]
    stats = SchedulerStats()
    gate.add_stats(stats)
    assert stats.num_adapter_placements_total == 4  # a stayed


def test_a_running_request_keeps_its_version(make_driver) -> None:
    store = Store("a")
    gate = AdapterGate(store, 2)
    driver = make_driver(rules=(gate,))
    add(driver, gate, request_with("old", "a"))
    driver.step()
    store.versions["a"] = "a-2"
    add(driver, gate, request_with("new", "a"))
    driver.run()
    rows = {new.request_id: new for step in driver.steps for new in step.new_rows}
    assert (rows["old"].adapter_version, rows["new"].adapter_version) == ("a-1", "a-2")
    assert rows["old"].adapter_slot != rows["new"].adapter_slot
    gate.forget(["old", "new"])
    assert store.holds == {"a-1": 0, "a-2": 0}


def test_versions_share_no_cached_prefix(make_driver) -> None:
    gate = AdapterGate(Store("a", "b"), 2)
    driver = make_driver(rules=(gate,), prefix_cache=True)
    for name, adapter in (("base", None), ("a0", "a"), ("b0", "b"), ("a1", "a"), ("again", None)):
        add(driver, gate, request_with(name, adapter, num_tokens=20))
        driver.run()
    hits = {new.request_id: new.num_computed_tokens for step in driver.steps for new in step.new_rows}
    assert hits["base"] == hits["a0"] == hits["b0"] == 0
    assert hits["a1"] == hits["again"] > 0


def test_files_are_waited_for_and_their_errors_told(make_driver) -> None:
    store = Store("a", "b", is_read=False)
    gate = AdapterGate(store, 2)
    driver = make_driver(rules=(gate,))
    add(driver, gate, request_with("a0", "a"), request_with("b0", "b"), request_with("base", None))
    driver.step()
    assert driver.steps[0].request_ids == ["base"]
    assert gate.is_preparing
    store.reading["a-1"].set_result(None)
    store.reading["b-1"].set_exception(OSError("gone"))
    [(request_id, error)] = gate.take_failed()
    assert request_id == "b0"
    assert isinstance(error, RequestError)
    assert "the adapter 'b' could not be read: OSError: gone" in str(error)
    driver.scheduler.abort_requests(["b0"])
    driver.run()
    assert driver.transcripts["a0"].finish_reason == "length"
    with pytest.raises(ModelNotFoundError, match="no adapter 'x'"):
        gate.prepare(request_with("x0", "x"))
    with pytest.raises(ModelNotFoundError, match="serves none"):
        AdapterGate(None).prepare(request_with("x1", "a"))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [0, 1])
def test_the_books_balance_whatever_happens(make_driver, depth: int, seed: int) -> None:
    chooser = random.Random(seed)
    store = Store(*"abcde")
    gate = AdapterGate(store, 2, max_passes=chooser.choice([1, 5, 100]))
    driver = make_driver(rules=(gate,), num_blocks=14, depth=depth, max_num_seqs=4)
    names = []
    for turn in range(60):
        if chooser.random() < 0.6:
            name = f"r{turn}"
            names.append(name)
            add(driver, gate, request_with(name, chooser.choice([None, *"abcde"]), chooser.randint(1, 12)))
        if names and chooser.random() < 0.15:
            gone = [chooser.choice(names)]
            driver.scheduler.abort_requests(gone)
            gate.forget(gone)
        driver.step()
        gate.check_integrity()
        used = {new.adapter_slot for step in driver.steps for new in step.new_rows}
        assert used <= {-1, 0, 1}
    driver.run()
    gate.forget(names)
    gate.check_integrity()
    assert not any(store.holds.values())


def test_a_slot_whose_adapter_runs_is_not_given_away(make_driver) -> None:
    """However long ago it was placed: the idle one goes, though it was used later."""
    gate = AdapterGate(Store("a", "b", "c"), 2)
    driver = make_driver(rules=(gate,))
    add(driver, gate, request_with("a0", "a", max_tokens=30), request_with("b0", "b", max_tokens=2))
    while driver.transcripts["b0"].finish_reason is None:
        driver.step()
    gate.forget(["b0"])
    add(driver, gate, request_with("c0", "c"))
    driver.run()
    slots = {new.request_id: new.adapter_slot for step in driver.steps for new in step.new_rows}
    assert slots == {"a0": 0, "b0": 1, "c0": 1}
