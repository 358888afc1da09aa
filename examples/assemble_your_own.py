"""An engine from its parts, without the `quire` package: run it as it stands, or give it a checkpoint folder.

    uv run python examples/assemble_your_own.py [MODEL_FOLDER] [PROMPT]

Each part can be replaced by your own: whatever satisfies the Protocol in `quire_interfaces` fits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire_demo_model import checkpoint_path
from quire_interfaces import Request, SamplingParams
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_models import ModelConfig, load_model
from quire_renderers import ChatRenderer, IncrementalDetokenizer, load_tokenizer
from quire_runner import ModelRunner, RunnerConfig
from quire_scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_SEQS = 16, 512, 1024, 8


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else checkpoint_path()
    question = sys.argv[2] if len(sys.argv) > 2 else "What is 27 + 35?"

    # Text to tokens.
    model = ModelConfig.from_path(folder)
    renderer = ChatRenderer(load_tokenizer(folder), vocab_size=model.vocab_size)
    prompt = renderer.render_chat([{"role": "user", "content": question}])

    # The device side: weights, paged cache, rows.
    network = load_model(model, folder, dtype="float32")
    specs = model.kv_cache_specs(BLOCK_SIZE, dtype="float32")
    plan = plan_kv_cache(specs, num_blocks=NUM_BLOCKS)
    config = RunnerConfig(dtype="float32", max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
    executor = ModelRunner.for_model(network, plan, config)  # runs each step in the caller

    # The policy side: integers only.
    cache = KVCacheManager(plan, KVCacheConfig(block_size=BLOCK_SIZE))
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN), cache)
    scheduler.add_request(
        Request(
            request_id="mine",
            prompt_token_ids=prompt.token_ids,
            sampling_params=SamplingParams(temperature=0),
            seed=0,
            stop_token_ids=frozenset(model.eos_token_ids),
            max_tokens=200,
        )
    )

    # The loop: plan, compute, take in.
    text = IncrementalDetokenizer(renderer.tokenizer, skip_special_tokens=True)
    while scheduler.has_requests():
        step = scheduler.schedule()
        if step is None:
            break
        for output in scheduler.update(step, executor.execute(step).result()):
            print(text.add(output.new_token_ids).text, end="", flush=True)
    print(text.finish().text)
    executor.close()


if __name__ == "__main__":
    main()
