"""Training from files of hidden states: what they tell is what the teacher tells when it computes the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batches import MicroBatch, Row, pack
from companions import ask
from evaluate import load_model
from extracted import ExtractedBatch, extracted
from safetensors.torch import save_file


def test_files_tell_what_the_teacher_tells(tmp_path: Path) -> None:
    teacher = load_model()
    for i in range(6):
        ids = [(7 * i + 3 * j) % 1200 + 5 for j in range(12 + 5 * i)]
        told = ask(teacher, pack([Row(ids, [True] * len(ids))], 64, pad_id=0))
        states = told.features[0, : len(ids)].unflatten(-1, (3, -1)).contiguous()
        save_file({"token_ids": torch.tensor(ids), "hidden_states": states}, tmp_path / f"{i}.safetensors")
    steps = extracted(tmp_path, seed=0, num_tokens=128, micro_batches=4, pad_id=0)
    seen = 0
    for m in next(steps):
        assert isinstance(m, ExtractedBatch)
        plain = MicroBatch(ids=m.ids, rows=m.rows, row_len=m.row_len, chosen=m.chosen, labels=m.labels, is_new=m.is_new)
        found, expected = ask(teacher, m), ask(teacher, plain)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
        places = torch.from_numpy(m.chosen)
        flat = (each.features.flatten(0, 1)[places] for each in (found, expected))
        torch.testing.assert_close(*flat, rtol=1e-3, atol=1e-3)
        seen += len(m.chosen)
    assert seen == sum(12 + 5 * i - 1 for i in range(6))
    with pytest.raises(ValueError, match="a step takes 9"):
        next(extracted(tmp_path, seed=0, num_tokens=128, micro_batches=9, pad_id=0))
