"""The official OpenAI client against a Quire server. It starts nothing: run `uv run quire serve` in another terminal.

    uv run python examples/openai_client.py [BASE_URL]      (default http://127.0.0.1:8000)

Needs `pip install openai`. A server with --api-key wants OPENAI_API_KEY in the environment.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with OpenAI(base_url=f"{base_url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        question = {"role": "user", "content": "What is 27 + 35?"}

        # A whole answer, with the tokens' probabilities and with a field of Quire's own.
        answer = client.chat.completions.create(
            model=model, messages=[question], temperature=0, logprobs=True, top_logprobs=2, extra_body={"top_k": 20}
        )
        choice = answer.choices[0]
        print(f"{model}: {choice.message.content} ({choice.finish_reason}, {answer.usage.completion_tokens} tokens)")
        print(f"least sure of: {min(choice.logprobs.content, key=lambda token: token.logprob).token!r}")

        # The same, streamed.
        stream = client.chat.completions.create(
            model=model, messages=[question], temperature=0, stream=True, stream_options={"include_usage": True}
        )
        print("streamed: ", end="")
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage is not None:
                print(f" ({chunk.usage.total_tokens} tokens in all)")

        # Plain completion, two alternatives of a seeded request.
        completion = client.completions.create(model=model, prompt="Quire is", max_tokens=16, n=2, seed=7)
        for choice in completion.choices:
            print(f"completion {choice.index}: {choice.text!r}")


if __name__ == "__main__":
    main()
