"""A batch of conversations in this process, without a server: the same scheduler and KV cache as behind one.

    uv run python examples/offline_batch.py [MODEL_FOLDER_OR_HUB_NAME]

All conversations run together. The second round continues each of them, and computes only what is new: the prefix cache
still has the rest.
"""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams

QUESTIONS = ["What is 27 + 35?", "Spell the word quire.", "Reverse the word paper.", "What is 90 - 14?", "Hello!"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the embedded demo model
    params = SamplingParams(temperature=0, max_tokens=120)
    with LLM(model, max_model_len=1024, max_num_seqs=8) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for follow_up in ("What is 8 + 5?", None):
            outputs = llm.chat(conversations, params)
            for conversation, output in zip(conversations, outputs, strict=True):
                answer = output.outputs[0]
                print(f"{conversation[-1]['content']!r} -> {answer.text!r} ({answer.finish_reason})")
                if follow_up is not None:
                    conversation.append({"role": "assistant", "content": answer.text})
                    conversation.append({"role": "user", "content": follow_up})
        stats = llm.stats()
    hits, asked = stats.prefix_cache_hit_tokens_total, stats.prefix_cache_query_tokens_total
    print(f"{hits} of {asked} prompt tokens came from the prefix cache")


if __name__ == "__main__":
    main()
