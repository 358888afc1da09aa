"""Media in prompts of Python: tokens are those of Transformers after its processor's joint call."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, RequestError, SamplingParams
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
