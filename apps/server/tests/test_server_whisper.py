"""A served Whisper: what its server says to those who want text of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def server(make_live: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=300, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=100,
        max_target_positions=64, decoder_start_token_id=5, eos_token_id=2, bos_token_id=2, pad_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder, vocab_size=300)
    own = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
    engine = QuireConfig.of(model=str(folder), **own).to_dict()
    return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=own)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_routes_of_text_name_the_route_of_sound(server: Any, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert "/v1/audio/transcriptions" in response.text


def test_it_does_not_say_that_it_generates(server: Any) -> None:
    assert "generate" not in server.client.get("/v1/models").json()["data"][0]["tasks"]
