"""Media in prompts of Python: tokens are those of Transformers after its processor's joint call."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, AsyncLLM, BeamSearchParams, QuireConfig, RequestError, SamplingParams
from quire_testkit.seeing_models import SeeingModel, drawing, image_part, png, text_part

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_prompts_and_conversations_take_images(tmp_path: Path) -> None:
    model = SeeingModel(tmp_path)
    with LLM(tmp_path, dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 24, num_threads=1) as llm:
        text = "one <image> two <image>"
        seen = [drawing(1), drawing(2)]
        prompts = [
            {"prompt": text, "multi_modal_data": {"image": seen}},
            {"prompt": text, "multi_modal_data": {"image": [png(each) for each in seen[::-1]]}},
            "words",
        ]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        tokens = [list(each.outputs[0].token_ids) for each in outputs]
        assert tokens[0] == model.expected(text, seen, 6)
        assert tokens[1] == model.expected(text, seen[::-1], 6)
        conversation = [
            {"role": "user", "content": [text_part("a "), {"type": "image_pil", "image_pil": seen[0]}, image_part(2)]}
        ]
        (answer,) = llm.chat(conversation, PARAMS, use_tqdm=False)
        rendered = "<|im_start|>user\na <image><image><|im_end|>\n<|im_start|>assistant\n"
        assert list(answer.outputs[0].token_ids) == model.expected(rendered, seen, 6)
        for data, complaint in (({"image": seen[:1]}, "placeholders"), ({"smell": 1}, "smell"), ({"image": 3}, "int")):
            with pytest.raises(RequestError, match=complaint):
                llm.generate({"prompt": text, "multi_modal_data": data}, PARAMS, use_tqdm=False)
        assert llm.media is not None
        llm.media.reset()
        assert llm.media.preparer.num_bytes == 0


def test_beams_hold_images_as_long_as_they_run(tmp_path: Path) -> None:
    model = SeeingModel(tmp_path)
    with LLM(tmp_path, dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 24, num_threads=1) as llm:
        prompts = [
            {"prompt": "one <image>", "multi_modal_data": {"image": drawing(each)}, "mm_processor_kwargs": None}
            for each in (1, 2)
        ]
        first, second = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
        assert first.outputs[0].token_ids != second.outputs[0].token_ids, "they see the same"
        (alone,) = llm.beam_search(prompts[1], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
        assert [each.token_ids for each in alone.outputs] == [each.token_ids for each in second.outputs]
        (greedy,) = llm.beam_search(prompts[0], BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
        assert list(greedy.outputs[0].token_ids)[-4:] == model.expected("one <image>", [drawing(1)], 4)
        with pytest.raises(RequestError):
            llm.beam_search(prompts[0], BeamSearchParams(beam_width=2, max_tokens=400))
        assert llm.media is not None
        llm.media.reset()
        assert llm.media.preparer.num_bytes == 0


async def test_async_prompts_are_those_of_generate(tmp_path: Path) -> None:
    model = SeeingModel(tmp_path)
    settings = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
    llm = AsyncLLM.start(QuireConfig.of(model=str(tmp_path), enable_prompt_embeds=True, **settings))

    async def tokens(prompt: Any) -> list[int]:
        return [token async for output in llm.generate(prompt, PARAMS) for token in output.outputs[0].token_ids]

    try:
        await llm.ready()
        text, seen = "one <image> two <image>", [drawing(1), drawing(2)]
        ids = llm.renderer.render_prompt("some words").token_ids
        rows = model.network.get_input_embeddings()(torch.tensor(ids)).detach()
        embedded, words, by_ids, *images = await asyncio.gather(
            tokens({"prompt_embeds": rows, "cache_salt": "mine"}),
            tokens("some words"),
            tokens({"prompt_token_ids": ids}),
            *(tokens({"prompt": text, "multi_modal_data": {"image": each}}) for each in (seen, seen[::-1])),
        )
        assert embedded == words == by_ids
        assert images == [model.expected(text, seen, 6), model.expected(text, seen[::-1], 6)]
        for wrong in ({"prompt": text, "multi_modal_data": {"image": seen[:1]}}, {"prompt_embeds": rows[:, 1:]}, {}):
            with pytest.raises(RequestError):
                await tokens(wrong)
        unfinished = llm.generate({"prompt": text, "multi_modal_data": {"image": seen}}, PARAMS)
        await anext(unfinished)
        await unfinished.aclose()
        assert llm.media is not None
        gc.collect()
        llm.media.reset()
        assert llm.media.preparer.num_bytes == 0
    finally:
        await llm.shutdown()
