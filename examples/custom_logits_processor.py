"""Your own rule for the next token: a processor that sets how an answer begins, chosen by some requests of a batch.

    uv run python examples/custom_logits_processor.py [BEGINNING]

Any function of (token ids so far, length of the prompt, logits) satisfies `quire_interfaces.LogitsProcessor`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from quire import LLM, SamplingParams
from quire_demo_model import checkpoint_path
from quire_renderers import load_tokenizer


class BeginWith:
    """Leaves one choice for each of the first tokens, and the model's own choice afterwards."""

    def __init__(self, beginning: Sequence[int]) -> None:
        self._beginning = beginning

    def __call__(self, token_ids: Sequence[int], num_prompt_tokens: int, logits: torch.Tensor) -> torch.Tensor:
        place = len(token_ids) - num_prompt_tokens
        if place < len(self._beginning):
            wanted = self._beginning[place]
            kept = logits[wanted].item()
            logits.fill_(float("-inf"))
            logits[wanted] = kept
        return logits


def main() -> None:
    beginning = sys.argv[1] if len(sys.argv) > 1 else "It is the KV cache that"
    token_ids = load_tokenizer(checkpoint_path()).encode(beginning, add_special_tokens=False)
    plain = SamplingParams(temperature=0, max_tokens=60)
    changed = SamplingParams(temperature=0, max_tokens=60, extra_args={"logits_processors": ["begin"]})
    question = [{"role": "user", "content": "What is Quire?"}]
    with LLM(logits_processors={"begin": BeginWith(token_ids)}, max_model_len=512) as llm:
        outputs = llm.chat([question, question], [plain, changed])
    print(f"its own answer: {outputs[0].outputs[0].text}")
    print(f"with a beginning: {outputs[1].outputs[0].text}")


if __name__ == "__main__":
    main()
