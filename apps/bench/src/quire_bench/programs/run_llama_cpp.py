"""llama.cpp through llama-cpp-python's bindings of its C interface: one context, one sequence per request.

The high-level class runs one sequence at a time; llama.cpp itself batches, and so does this.
"""

from __future__ import annotations

from typing import Any

from program import Run, serve

MAX_STEP_TOKENS = 2048


class Context:
    """A model with a context for several sequences, and the batch that is filled for each step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        path = settings["file"].encode()
        self._model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {settings['file']}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = settings["max_num_seqs"]
        params.n_ctx = settings["num_kv_tokens"] + 256 * settings["max_num_seqs"]  # sequences are padded
        params.n_batch = MAX_STEP_TOKENS
        params.kv_unified = True  # one pool for all sequences: a long one may take more than its share
        if settings["num_threads"]:
            params.n_threads = params.n_threads_batch = settings["num_threads"]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._batch = llama_cpp.llama_batch_init(MAX_STEP_TOKENS, 0, 1)

    def clear(self) -> None:
        """Forget all sequences."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def step(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute tokens given as (sequence, position, token, whether its logits are wanted).

        Returns:
            The most likely next token of each wanted one.
        """
        import numpy

        batch, chosen = self._batch, []
        for first in range(0, len(entries), MAX_STEP_TOKENS):
            part = entries[first : first + MAX_STEP_TOKENS]
            batch.n_tokens = len(part)
            for index, (sequence, position, token, wanted) in enumerate(part):
                batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            if self._api.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for index, entry in enumerate(part):
                if entry[3]:
                    logits = self._api.llama_get_logits_ith(self._context, index)
                    chosen.append(int(numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax()))
        return chosen


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import llama_cpp

    context, batch_size = Context(settings), settings["max_num_seqs"]

    def generate(prompts: list[list[int]], output_lens: list[int]) -> None:
        context.clear()
        tokens = context.step(
            [
                (sequence, position, token, position == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
        )
        alive = list(range(len(prompts)))
        for count in range(1, max(output_lens)):
            left = [index for index, sequence in enumerate(alive) if output_lens[sequence] > count]
            alive, tokens = [alive[index] for index in left], [tokens[index] for index in left]
            positions = [len(prompts[sequence]) + count - 1 for sequence in alive]
            tokens = context.step([(*entry, True) for entry in zip(alive, positions, tokens, strict=True)])

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        for first in range(0, len(prompts), batch_size):
            generate(prompts[first : first + batch_size], output_lens[first : first + batch_size])

    return run, llama_cpp.__version__


if __name__ == "__main__":
    serve(load)
