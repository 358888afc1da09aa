"""`LLM.sleep`: no request runs, the cache's memory comes back, and tokens are the same afterwards."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire_demo_model import adapter_paths
from quire_interfaces import QuireError, RequestError
from quire_testkit.checkpoints import checkpoint_config, make_checkpoint
from quire_testkit.tokenizers import write_tokenizer

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
        with pytest.raises(RequestError, match="level must be 0, 1 or 2, got 3"):
            llm.sleep(3)
        llm.wake_up()


def test_level_2_gives_the_memory_of_weights_back_and_loads_them_again(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
    config = checkpoint_config("llama", "tiny", "float32", **sizes)  # 100 MB of MLP
    write_tokenizer(tmp_path, vocab_size=config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, load_format="dummy", max_num_seqs=2, num_gpu_blocks_override=256) as llm:
        (first,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert _bytes_of_matrices(4096) > 90e6
        assert llm.sleep(2) > 100e6
        assert _bytes_of_matrices(4096) == 0
        with pytest.raises(RequestError, match="memory_usage: the engine sleeps without its weights"):
            llm.collective_rpc("memory_usage")
        with pytest.raises(RequestError, match="sleeps at level 2: wake it first"):
            llm.sleep(1)
        with pytest.raises(RequestError, match="weights were discarded"):
            llm.wake_up(["kv_cache"])
        llm.wake_up(["weights"])
        assert llm.engine.core.sleep_level == 1
        assert _bytes_of_matrices(4096) > 90e6
        with pytest.raises(RequestError, match=r"sleeps: call wake_up\(\) first"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
        llm.wake_up(["kv_cache"])
        (again,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.num_cached_tokens == 0
        assert llm.collective_rpc("memory_usage")[0]["rank"] == 0


def test_level_2_loads_the_checkpoint_as_it_is_when_it_wakes(tmp_path: Path) -> None:
    folder, aside = make_checkpoint(tmp_path / "model"), tmp_path / "aside"
    other = make_checkpoint(tmp_path / "other", seed=1)
    chances = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    with LLM(folder, max_num_seqs=2, num_gpu_blocks_override=256) as llm:
        (first,) = llm.generate(PROMPT, chances, use_tqdm=False)
        llm.sleep(2)
        folder.rename(aside)
        with pytest.raises(QuireError, match="does not exist"):
            llm.wake_up()
        assert llm.engine.core.sleep_level == 2
        other.rename(folder)
        llm.wake_up()
        (trained,) = llm.generate(PROMPT, chances, use_tqdm=False)
    with LLM(folder, max_num_seqs=2, num_gpu_blocks_override=256) as fresh:
        (expected,) = fresh.generate(PROMPT, chances, use_tqdm=False)
    sums = [each.outputs[0].cumulative_logprob for each in (first, trained, expected)]
    assert sums[0] != sums[1] == sums[2]


def test_adapters_and_grammars_outlive_level_2(tmp_path: Path) -> None:
    unread = shutil.copytree(adapter_paths()["demo-json"], tmp_path / "unread")
    with (unread / "adapter_config.json").open("a") as file:
        file.write("\n")  # another version than the one in memory
    pattern = SamplingParams(
        temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-c]{4}")
    )
    with LLM(max_num_seqs=4, num_gpu_blocks_override=256) as llm:

        def answers() -> list[str]:
            texts = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request="demo-capitals")
            texts += llm.generate("Hello", pattern, use_tqdm=False)
            return [each.outputs[0].text for each in texts]

        expected = answers()
        llm.sleep(2)
        with pytest.raises(RequestError, match="sleeps without its weights"):
            llm.load_adapter("unread", str(unread))
        llm.wake_up()
        assert answers() == expected
        llm.load_adapter("unread", str(unread))


def _bytes_of_matrices(width: int) -> int:
    """Memory of all matrices in this process that have a dimension of this size."""
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dim() > 1 and width in each.shape]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
    return sum(storages.values())


def test_a_cache_that_is_kept_on_disk_stays(tmp_path: Path) -> None:
    with LLM(num_gpu_blocks_override=256, kv_disk_path=str(tmp_path / "kv")) as llm:
        with pytest.raises(RequestError, match="cannot give the memory of its KV cache back"):
            llm.sleep(1)
        with pytest.raises(RequestError, match="cannot load its weights again"):
            llm.sleep(2)
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert llm.sleep(0) == 0
