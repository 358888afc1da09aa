"""A checkpoint none of whose layers a scheme fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.quantize import quantize_checkpoint
from quire_interfaces import CheckpointError
from quire_testkit.checkpoints import make_checkpoint


@pytest.mark.parametrize("calibration", [(), [[1, 2, 3]]])
def test_nothing_to_quantize_says_why_and_what_fits(calibration: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    words = (
        r"nothing to quantize as int4-g128: .* inputs in whole groups of 128 \(they have 64, 176\); take one of int8, "
    )
    with pytest.raises(CheckpointError, match=words):
        quantize_checkpoint(folder, tmp_path / "out", "int4-g128", calibration=calibration)
    assert not (tmp_path / "out").exists()
