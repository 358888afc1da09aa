"""`LLM.sleep`: no request runs, the cache's memory comes back, and tokens are the same afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire_interfaces import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(5, 105))}


def test_sleep_forgets_the_cache_and_nothing_else() -> None:
    with LLM(num_gpu_blocks_override=256, max_num_seqs=4, enable_sleep_mode=True) as llm:
        (first,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        caches = llm.engine.core.parts.executor._layers.kv_caches  # type: ignore[attr-defined]
        assert any(cache.any() for cache in caches)
        size = llm.engine_info.memory_bytes["KV cache"]
        assert size * 0.98 <= llm.sleep() <= size
        with pytest.raises(RequestError, match=r"sleeps: call wake_up\(\) first"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
        llm.wake_up()
        (again,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.num_cached_tokens == 0
        assert llm.sleep(0) == 0
        llm.wake_up()
        (cached,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert cached.outputs[0].token_ids == first.outputs[0].token_ids
        assert cached.num_cached_tokens > 80
        with pytest.raises(RequestError, match="level must be 0 or 1, got 2: weights stay"):
            llm.sleep(2)
        llm.wake_up()


def test_a_cache_that_is_kept_on_disk_stays(tmp_path: Path) -> None:
    with LLM(num_gpu_blocks_override=256, kv_disk_path=str(tmp_path / "kv")) as llm:
        with pytest.raises(RequestError, match="cannot give the memory of its KV cache back"):
            llm.sleep(1)
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert llm.sleep(0) == 0
