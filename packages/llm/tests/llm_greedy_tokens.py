"""Greedy answers of an engine to prompts that are rendered already."""

from __future__ import annotations

from quire import SamplingParams
from quire_engine import LLMEngine
from quire_interfaces import RenderedPrompt

__all__ = ["greedy_tokens"]


def greedy_tokens(engine: LLMEngine, prompts: list[RenderedPrompt], num_tokens: int) -> list[list[int]]:
    """Tokens of the answers to all prompts in one batch, of this many tokens each, end tokens like any other."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.outputs[0].error is None, output.outputs[0].error
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    return [tokens[name] for name in names]
