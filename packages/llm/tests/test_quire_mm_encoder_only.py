"""An engine of towers alone: what it has encoded costs an engine of the whole model nothing; there is no language model
in it, and whoever needs one is told so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, ConfigError, RequestError, SamplingParams
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.seeing_models import SeeingModel, drawing, image_part, text_part

NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


def make_llm(model: SeeingModel, disk: Path, **settings: Any) -> LLM:
    own = {"dtype": "float32", "max_model_len": 256, "kv_disk_path": str(disk), "kv_disk_size": "50M"}
    return LLM(model.folder, **{"num_threads": 1, **own, **settings})


def conversation(text: str, *numbers: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text_part(text), *map(image_part, numbers)]}]


def test_the_whole_model_finds_what_towers_alone_have_encoded(model: SeeingModel, tmp_path: Path) -> None:
    conversations = [conversation("a ", 1, 2), conversation("b", 3), conversation("c ", 1, 1, 4)]
    params = SamplingParams(n=2, min_tokens=3, max_tokens=50, temperature=0.7, stop=["x"])
    with make_llm(model, tmp_path, mm_encoder_only=True, max_num_batched_tokens=16, encoder_cache_size=20) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
        assert len(outputs[2].prompt_token_ids) > 48
        for output in outputs:
            assert [(each.text, each.finish_reason) for each in output.outputs] == [("", "stop")] * 2
        assert llm.stats().num_encoded_items_total == {"image": 4}
        memory = llm.engine_info.memory_bytes
        assert list(memory) == ["weights: towers", "embeddings of media", "copies on their way to disk"]
        assert "language model" in llm.engine_info.choices["network"]
        assert llm.reset_prefix_cache()
    with make_llm(model, tmp_path, kv_cache_memory_bytes=1 << 24) as llm:
        assert "weights: MLP" in llm.engine_info.memory_bytes
        (output,) = llm.chat([conversation("d ", 4, 3, 2, 1)], PARAMS, use_tqdm=False)
        rendered = f"<|im_start|>user\nd {'<image>' * 4}<|im_end|>\n<|im_start|>assistant\n"
        expected = model.expected(rendered, [drawing(number) for number in (4, 3, 2, 1)], NUM_TOKENS)
        assert list(output.outputs[0].token_ids) == expected
        assert llm.media is not None
        assert llm.media.stats()["image"].num_items == 0
        assert not llm.stats().num_encoded_items_total.get("image")


def test_embeddings_of_towers_in_int8_are_others(model: SeeingModel, tmp_path: Path) -> None:
    """A folder that they share does not mix them up."""
    for quantization, num_encoded in ((None, 1), ("int8", 1), ("int8", 0), (None, 0)):
        with make_llm(model, tmp_path, mm_encoder_only=True, mm_encoder_quantization=quantization) as llm:
            llm.chat(conversation("a", 1), PARAMS, use_tqdm=False)
            assert sum(llm.stats().num_encoded_items_total.values()) == num_encoded
            assert ("int8" in llm.engine_info.choices["media"]) == (quantization == "int8")


def test_what_needs_a_language_model_is_refused_by_name(model: SeeingModel, tmp_path: Path) -> None:
    with make_llm(model, tmp_path, mm_encoder_only=True) as llm:
        for prompt in ("words", [5, 6, 7]):
            with pytest.raises(RequestError, match="encodes media only"):
                llm.generate(prompt, PARAMS, use_tqdm=False)
        for field in ("logprobs", "prompt_logprobs"):
            with pytest.raises(RequestError, match=f"leave {field} out"):
                llm.chat(conversation("a", 1), SamplingParams(**{field: 1}), use_tqdm=False)
        (output,) = llm.chat(conversation("a", 1), SamplingParams(max_tokens=0), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"


def test_embeddings_that_cannot_be_kept_fail_their_request(model: SeeingModel, tmp_path: Path) -> None:
    with make_llm(model, tmp_path, mm_encoder_only=True) as llm:
        llm.chat(conversation("a", 1), PARAMS, use_tqdm=False)
        (folder,) = {path.parent.parent for path in tmp_path.rglob("*-0.kv")}
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("no folder")
        (output,) = llm.chat(conversation("a", 2), PARAMS, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"


def test_settings_that_cannot_be(model: SeeingModel, tmp_path: Path) -> None:
    text = make_checkpoint(tmp_path / "text", like="qwen3")
    with pytest.raises(ConfigError, match="has none that are served"):
        LLM(text, kv_disk_path=str(tmp_path / "disk"), mm_encoder_only=True)
    with pytest.raises(ConfigError, match="--kv-disk-path"):
        LLM(model.folder, mm_encoder_only=True)
