"""Recurrent ops against the reference: sequences cut into steps anyhow, long runs too, unwritten states NaN."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernels_cuda_support import DTYPES, here, poison
from ops_recurrent_cases import CASES, Steps, close

from quire_kernels_cuda.triton import recurrent
from quire_ops import ops as ref


def on_device(function):
    """The op with its arguments moved to where kernels run, and what it changes moved back."""

    def run(*arguments, **options):
        *tensors, state, layout = arguments
        moved = here(state)
        fields = ("block_table", "query_start_loc", "seq_lens", "slot_mapping")
        there = replace(layout)
        for name in fields:
            setattr(there, name, here(getattr(layout, name)))
        out = function(*here(tuple(tensors)), moved, there, **options)
        state.copy_(moved)
        return out.cpu()

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if hasattr(recurrent, CASES[name](torch.float32).name)])
def test_equals_reference(monkeypatch, name, dtype):
    poison(monkeypatch)
    monkeypatch.setattr(recurrent, "LONG_RUN", 20)
    torch.manual_seed(3)
    case = CASES[name](dtype)
    case.inputs = [case.inputs[2][:3], case.inputs[3][:9], case.inputs[6][:34]]
    wanted = Steps(case, 512, random.Random(1))
    wanted.run(getattr(ref, case.name), lambda: 1000)
    rng = random.Random(name)
    got = Steps(case, rng.choice([1, 4, 16]), rng)
    got.run(on_device(getattr(recurrent, case.name)), partial(rng.choice, [1, 3, 30]))
    for i in range(len(case.inputs)):
        assert close(torch.cat(got.results[i]), torch.cat(wanted.results[i]), dtype)
        assert close(got.last_states()[i], wanted.last_states()[i], torch.float32, 2.0)
