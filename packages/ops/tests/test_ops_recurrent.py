"""Recurrent ops against the reference: sequences cut into steps anyhow, unwritten states NaN, blocks left out."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from ops_layouts import Layout
from ops_recurrent_cases import CASES, LENS, TOLERANCE, Steps, close

from quire_ops import OpBackend, OpRequest, op_table, ops
from quire_ops import ops as ref

CHUNKS = {"whole": (1000, 1000), "random": (1, 90), "decode": (1, 1)}
"""Fewest and most tokens of a step."""
BACKENDS = [
    backend
    for op in ops.OPS
    if op.token_args
    for backend in op_table().backends(op)
    if backend.name != "reference" and backend.unavailable is None
]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: f"{backend.op.name}-{backend.name}")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_equals_reference(backend: OpBackend, dtype: torch.dtype, chunks: str) -> None:
    if backend.refusal(OpRequest(dtype=dtype)) is not None:
        assert dtype not in (backend.dtypes or ())
        return
    for name, make in CASES.items():
        torch.manual_seed(3)
        case = make(dtype)
        if case.name != backend.op.name:
            continue
        rng = random.Random(name + chunks)
        size = rng.choice([1, 4, 16, 64])
        wanted = Steps(case, 512, random.Random(1))
        wanted.run(getattr(ref, case.name), lambda: 1000)
        got = Steps(case, size, rng)
        got.run(backend.function, partial(rng.randint, *CHUNKS[chunks]))
        for i in range(len(LENS)):
            result, expected = torch.cat(got.results[i]), torch.cat(wanted.results[i])
            assert result.dtype == expected.dtype == dtype
            assert close(result, expected, dtype), (name, LENS[i])
            # States are float32 where results are not.
            assert close(got.last_states()[i], wanted.last_states()[i], case.state_dtype, 2.0), (name, LENS[i])


@pytest.mark.parametrize(
    "backend", [b for b in BACKENDS if b.batch_invariant], ids=lambda backend: f"{backend.op.name}-{backend.name}"
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_invariant_backend_gives_the_same_bits_in_any_chunks(backend: OpBackend, dtype: torch.dtype) -> None:
    if backend.refusal(OpRequest(dtype=dtype)) is not None:
        return
    for make in CASES.values():
        torch.manual_seed(3)
        case = make(dtype)
        if case.name != backend.op.name:
            continue
        first = Steps(case, 512, random.Random(1))
        wanted = first.run(backend.function, lambda: 1000)
        for seed in range(4):
            rng = random.Random(seed)
            again = Steps(case, rng.choice([1, 4, 16, 64]), rng)
            got = again.run(backend.function, partial(rng.choice, [1, 1, 3, 40, 100]))
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(again.last_states(), first.last_states(), strict=True))


def test_the_delta_rule_forgets_what_a_key_held_before() -> None:
    """With no decay and full strength, reading a key gives the value last written under it."""
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    value = torch.tensor([[3.0], [4.0], [5.0]])
    layout = Layout(
        block_table=torch.tensor([[1]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        slot_mapping=torch.arange(3),
        block_size=4,
        query_lens=[3],
        kv_lens=[3],
    )
    state = torch.zeros(2, 1, 2, 1)
    strong = torch.full((3, 1), 30.0)
    out = ref.gated_delta_rule(
        key[:, None], key[:, None], value[:, None], -strong, strong, torch.zeros(1), torch.zeros(1), state, layout
    )
    assert torch.allclose(out.flatten() * 2**0.5, value.flatten(), atol=1e-4)
    assert torch.allclose(state[1, 0, :, 0], torch.tensor([5.0, 4.0]), atol=1e-4)
