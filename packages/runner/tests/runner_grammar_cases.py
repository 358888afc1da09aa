"""A grammar of numbers, requests that follow it, and the tokens that a dense pass gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from runner_harness import VOCAB_SIZE, TinyNetwork, make_request

from quire_interfaces import Request, RequestError, StructuredOutputsParams
from quire_sampling import Sampler, SamplingState, TokenMasks

EOS = 1
NUM_WORDS = -(-VOCAB_SIZE // 32)


class Digits:
    """A grammar over the numbers "period,length": token t may follow n accepted ones if t % period == n % period, and
    an end token from `length` tokens on. Runs of multiples of five are fixed, two tokens each time."""

    allows_all = False

    def __init__(self, text: str, jumps: bool) -> None:
        period, length = map(int, text.split(","))
        self.period, self.length, self.jumps = period, length, jumps
        self.tokens: list[int] = []

    @property
    def is_terminated(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == EOS

    def _allowed(self) -> set[int]:
        num = len(self.tokens)
        if self.jumps and num % 5 in (2, 3) and num < self.length:
            return {7 + num % 5}
        allowed = {t for t in range(2, VOCAB_SIZE) if t % self.period == num % self.period}
        return allowed | {EOS} if num >= self.length else allowed

    def fill_bitmask(self, bitmask: memoryview) -> None:
        if len(self.tokens) == 13 and self.period == 6:
            raise RequestError("too complex from here on")
        words = bitmask.cast("B").cast("I")
        assert len(words) == NUM_WORDS
        for place in range(NUM_WORDS):
            words[place] = sum(1 << t % 32 for t in self._allowed() if t // 32 == place)

    def accept(self, token_id: int) -> bool:
        if self.is_terminated or token_id not in self._allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]

    def forced_token_ids(self) -> list[int]:
        num = len(self.tokens)
        if not self.jumps or num >= self.length or num % 5 not in (2, 3):
            return []
        return [9, 10][: self.length - num] if num % 5 == 2 else [10]


class DigitsSource:
    def __init__(self, jumps: bool = True) -> None:
        self.jumps = jumps
        self.num_made = 0

    def new_matcher(self, params: StructuredOutputsParams) -> Digits:
        self.num_made += 1
        return Digits(str(params.regex), self.jumps)


def constrained(name: str, prompt: Sequence[int], text: str, **params: Any) -> Request:
    constraint = StructuredOutputsParams(regex=text)
    return make_request(name, prompt, stop=[EOS], structured_outputs=constraint, **{"max_tokens": 24, **params})


def reference(network: TinyNetwork, request: Request, jumps: bool = True) -> list[int]:
    """The request alone, every token from a fresh dense pass over the whole sequence."""
    wanted = request.sampling_params.structured_outputs
    matcher = None if wanted is None else Digits(str(wanted.regex), jumps)
    state = SamplingState(1, VOCAB_SIZE)
    state.set_row(0, request.sampling_params, seed=request.seed, num_prompt_tokens=request.num_prompt_tokens)
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.num_prompt_tokens + request.max_tokens and tokens[-1] != EOS:
        masks = None
        if matcher is not None:
            bitmask = torch.zeros(1, NUM_WORDS, dtype=torch.int32)
            matcher.fill_bitmask(memoryview(bitmask[0].numpy()))
            masks = TokenMasks([0], bitmask)
        logits = network.dense_logits(tokens)[-1:].clone()
        positions = torch.tensor([len(tokens) - 1])
        sampled = Sampler(state).sample(logits, [0], positions, torch.tensor([tokens]), masks)
        tokens.append(int(sampled.token_ids[0]))
        if matcher is not None:
            assert matcher.accept(tokens[-1])
    return tokens[request.num_prompt_tokens :]
