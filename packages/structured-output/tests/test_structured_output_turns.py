"""Whose constraint is compiled next: tenants in turn, usual ones first, and nothing waits for ever."""

from __future__ import annotations

import json
import threading

import pytest

from quire_interfaces import GrammarSpec, OverloadedError, SamplingParams, StructuredOutputsParams
from quire_structured_output import GrammarCompiler, GrammarGate, StructuredOutputConfig, compiler
from quire_structured_output.cost import MAX_COST, expected_cost
from quire_structured_output.turns import TurnQueue
from quire_testkit.conformance.scheduler import make_request

SCHEMA = GrammarSpec("json", '{"type":"object","properties":{"name":{"type":"integer"}}}')


def costly(index: int) -> GrammarSpec:
    return GrammarSpec("regex", f"(((a{{0,1000}}){{0,1000}}){{0,{900 + index}}})")


def usual(index: int) -> GrammarSpec:
    return GrammarSpec("regex", f"b{index}")


class HeldBackend:
    """A real backend whose work begins when it is let, and is written down."""

    def __init__(self, backend):
        self.name, self.kinds = backend.name, backend.kinds
        self.vocab_size, self.eos_token_ids = backend.vocab_size, backend.eos_token_ids
        self.go, self.has_begun = threading.Event(), threading.Event()
        self.order: list[GrammarSpec] = []
        self._backend = backend

    def compile(self, spec):
        self.has_begun.set()
        assert self.go.wait(30)
        self.order.append(spec)
        return self._backend.compile(GrammarSpec("regex", "a") if "{0,1000}" in spec.text else spec)


@pytest.fixture
def held(backend):
    made = HeldBackend(backend)
    yield made
    made.go.set()


def make(held: HeldBackend, **config: int) -> GrammarCompiler:
    """A compiler with one thread, which is busy until it is let."""
    made = GrammarCompiler(StructuredOutputConfig(num_workers=1, **config), lambda: held)
    made.submit(GrammarSpec("regex", "first"))
    assert held.has_begun.wait(30)
    return made


def results(held: HeldBackend, futures: list) -> list[GrammarSpec]:
    """The order in which all that waited was compiled."""
    held.go.set()
    for future in futures:
        future.result(200)
    return held.order[1:]


def test_however_many_costly_ones_wait_a_usual_one_is_next(held):
    made = make(held)
    futures = [made.submit(costly(index)) for index in range(100)]
    futures.append(made.submit(SCHEMA))
    assert results(held, futures)[0] == SCHEMA


def test_however_many_a_stranger_sends_one_s_own_is_next(held):
    made = make(held)
    futures = [made.submit(usual(index), "flood") for index in range(100)]  # as cheap as can be, by their looks
    futures.append(made.submit(SCHEMA, "other"))
    assert SCHEMA in results(held, futures)[:2]


def test_requests_wait_among_their_tenant_s(held):
    gate = GrammarGate(make(held))
    for index in range(20):
        gate.prepare(request_of(f"flood{index}", usual(index), tenant="flood"))
    gate.prepare(request_of("other", SCHEMA, tenant="other"))
    assert SCHEMA in results(held, [gate.compiler.submit(usual(19)), gate.compiler.submit(SCHEMA)])[:2]


def test_costly_ones_get_their_turn_beside_usual_ones(held):
    made = make(held)
    futures = [made.submit(costly(0)), *(made.submit(usual(index)) for index in range(100))]
    assert costly(0) in results(held, futures)[:4]


def test_a_flood_leaves_room_for_others(held, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_WAITING", 16)
    made = make(held)  # one waits for nobody
    for index in range(8):
        made.submit(usual(index), "flood")
    with pytest.raises(OverloadedError, match="8 of them wait already") as refused:
        made.submit(usual(8), "flood")
    assert refused.value.retry_after_s >= 1
    assert made.submit(usual(0), "flood") is made.submit(usual(0), "other")  # what is there already
    made.submit(SCHEMA, "other")


def request_of(name: str, spec: GrammarSpec, tenant: str | None = None):
    request = make_request(name, [1], tenant=tenant)
    wanted = {spec.kind: json.loads(spec.text) if spec.kind == "json" else spec.text}
    request.sampling_params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
    return request


def test_who_did_not_get_a_turn_is_told_so_and_not_that_it_is_slow(held):
    now_s = [0.0]
    gate = GrammarGate(make(held, timeout_s=5), clock=lambda: now_s[0])
    gate.prepare(request_of("first", GrammarSpec("regex", "first")))
    gate.prepare(request_of("waiting", usual(0)))
    now_s[0] = 5.0
    failed = dict(gate.take_failed())
    assert failed["first"].code == "grammar_timeout"
    assert isinstance(failed["waiting"], OverloadedError)
    assert "not enough time for this one within 5 s" in str(failed["waiting"])
    assert failed["waiting"].retry_after_s >= 1


@pytest.mark.parametrize("spec", [SCHEMA, costly(0)])
def test_in_a_crowd_a_usual_one_is_not_called_slow(held, spec):
    now_s = [0.0]
    made = GrammarCompiler(StructuredOutputConfig(num_workers=1, timeout_s=5), lambda: held)
    gate = GrammarGate(made, clock=lambda: now_s[0])
    gate.prepare(request_of("r", spec))
    assert held.has_begun.wait(30)
    for index in range(5):
        made.submit(usual(index))
    now_s[0] = 5.0
    [(_, error)] = gate.take_failed()
    assert isinstance(error, OverloadedError) == (spec == SCHEMA)


@pytest.mark.parametrize("leaves", ["forget", "deadline"])
def test_what_nobody_waits_for_any_more_is_not_compiled(held, leaves):
    now_s = [0.0]
    made = make(held)
    gate = GrammarGate(made, clock=lambda: now_s[0])
    for name, spec in (("a", usual(0)), ("b", usual(1)), ("c", usual(1)), ("d", usual(2))):
        gate.prepare(request_of(name, spec))
    if leaves == "forget":
        gate.forget(["a", "b", "d"])
    else:
        now_s[0] = 5.0
        assert len(gate.take_failed()) == 4
        gate.prepare(request_of("c", usual(1)))  # it comes again
    gate.prepare(request_of("d", usual(2)))
    last = made.submit(SCHEMA)
    assert sorted(results(held, [last, made.submit(usual(1)), made.submit(usual(2))])) == sorted(
        [usual(1), usual(2), SCHEMA]
    )
    assert not made._waiting  # nothing is counted for ever


def test_a_flood_pushes_no_compiled_constraint_of_others_out(held):
    held.go.set()
    made = make(held, cache_size=8)
    mine = made.submit(SCHEMA, "other")
    mine.result(200)
    for index in range(100):
        made.submit(usual(index), "flood").result(200)
    assert made.submit(SCHEMA, "other") is mine
    assert len(made._cache) == len(made._owners) <= 8


def test_what_failed_is_forgotten_before_what_works(held):
    held.go.set()
    made = make(held, cache_size=8)
    mine = made.submit(SCHEMA)
    mine.result(200)
    for index in range(100):
        assert made.submit(GrammarSpec("regex", f"({index}")).exception(200) is not None
    assert made.submit(SCHEMA) is mine


def test_turns_by_the_time_that_was_used():
    queue: TurnQueue[str] = TurnQueue()
    for index in range(3):
        queue.put(f"a{index}", tenant="a")
        queue.put(f"b{index}", tenant="b")
    taken = []
    while len(queue):
        tenant, item = queue.take()
        taken.append(item)
        queue.used(tenant, 2.0 if tenant == "a" else 1.0)
    assert taken == ["a0", "b0", "b1", "a1", "b2", "a2"]
    with pytest.raises(LookupError):
        queue.take()


def test_who_comes_later_has_saved_up_nothing():
    queue: TurnQueue[str] = TurnQueue()
    for index in range(9):
        queue.put(f"a{index}", tenant="a")
    for _ in range(3):
        queue.used(queue.take()[0], 1.0)
    for index in range(3):
        queue.put(f"b{index}", tenant="b")
    taken = []
    for _ in range(6):
        tenant, item = queue.take()
        taken.append(item[0])
        queue.used(tenant, 1.0)
    assert taken == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        (SCHEMA, costly(0)),
        (GrammarSpec("regex", r"\d{3}-\d{4}"), GrammarSpec("regex", "(a{1,100}){1,100}")),
        (GrammarSpec("json", '{"type":"array","maxItems":9}'), GrammarSpec("json", '{"minItems":1000000}')),
        (SCHEMA, GrammarSpec("json", json.dumps({"enum": list(range(999))}))),
    ],
)
def test_what_looks_costly(cheap, dear):
    assert expected_cost(cheap) < expected_cost(dear) <= MAX_COST


def test_looking_takes_linear_time_whatever_it_looks_at():
    for text in ("{9,9}" * 50_000, "{" * 250_000, "{999999999,999999999}" * 10_000, "9" * 250_000):
        assert expected_cost(GrammarSpec("regex", text)) <= MAX_COST
