"""The tap sees the raw logits of every sampled position."""

from __future__ import annotations

import torch
from runner_harness import Engine, TinyNetwork, make_request


def test_tap_sees_raw_logits_with_their_rows_and_positions() -> None:
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def tap(rows: list[int], positions: list[int], logits: torch.Tensor) -> None:
        for row, position, line in zip(rows, positions, logits, strict=True):
            seen[row, position] = line.clone()

    network = TinyNetwork()
    engine = Engine(network, on_logits=tap, max_num_batched_tokens=7)
    requests = [make_request("a", range(9), logit_bias={3: 50}), make_request("b", range(4), max_tokens=3)]
    outcomes = engine.run(*requests)
    engine.close()
    for row, request in enumerate(requests):
        tokens = request.prompt_token_ids + outcomes[request.request_id].token_ids
        dense = network.dense_logits(tokens)
        positions = [position for r, position in seen if r == row]
        assert positions == list(range(request.num_prompt_tokens - 1, len(tokens) - 1))
        for position in positions:
            torch.testing.assert_close(seen[row, position], dense[position])
