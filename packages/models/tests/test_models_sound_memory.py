"""What is planned for reading a sound, beside torch's own log of allocations."""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quire_attention import EncoderBatch
from quire_models import ModelConfig, load_model
from quire_models.spec import max_sound_samples, num_sound_tokens
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint

WIDE: dict[str, dict[str, Any]] = {
    "Moonshine": {"hidden_size": 208},
    "MoonshineStreaming": {"encoder_config": {"hidden_size": 128}},
    "CohereAsr": {"encoder_config": {"subsampling_conv_channels": 256, "num_mel_bins": 128}},
}
"""Fields with which the first convolutions are as wide, beside the others, as in real checkpoints."""


NUM_TOKENS = 600
"""Of a sound: beside them, the weights of convolutions, which are laid out anew, are few."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WIDE)
def test_a_sound_takes_no_more_than_is_planned(name: str, dtype: str, tmp_path: Path) -> None:
    architecture = f"{name}ForConditionalGeneration"
    case = ENCODER_CASES[architecture]
    fields = {field: {**case.fields[field], **value} if isinstance(value, dict) else value
              for field, value in WIDE[name].items()}  # fmt: skip
    write_checkpoint(tmp_path, architecture, dataclasses.replace(case, fields={**case.fields, **fields}))
    model: Any = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype=dtype)
    network = model.config.network
    length = max_sound_samples(network.sound_convolutions, NUM_TOKENS)
    shape = (length, network.sound_bins) if network.sound_bins else (1, length)
    num_tokens = num_sound_tokens(network.sound_convolutions, length)
    nothing = torch.zeros(num_tokens, dtype=torch.int64)
    features = (torch.randn(shape),)
    inputs = EncoderBatch(input_ids=nothing, positions=nothing, lens=[num_tokens], features=features)
    with torch.inference_mode():
        model.encoder_input(inputs)  # what is made once, of the weights
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            model.encoder_input(inputs)
    events = [e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    planned = num_tokens * (network.sound_width + network.hidden_size) * (4 if dtype == "float32" else 2)
    assert peak <= planned < 1.5 * peak
