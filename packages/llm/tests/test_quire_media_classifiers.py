"""Classifiers that see: probabilities are those of Transformers' class after its processor's joint call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from quire import LLM
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.seeing_models import drawing
from quire_testkit.tokenizers import write_tokenizer

LABELS = ("circle", "square", "nothing")


TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}


class SeeingClassifier:
    """A random Gemma 3 with classes and its processor, in a folder. Tokens of an image see one another."""

    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder, vocab_size=600)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, extra_special_tokens=TOKENS, bos_token="<|im_start|>"
        )
        images = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
        self.processor: Any = transformers.Gemma3Processor(
            image_processor=images, tokenizer=tokenizer, image_seq_length=4
        )
        fields = MEDIA_CASES["Gemma3ForConditionalGeneration"].fields
        ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
        config = transformers.Gemma3Config(
            **{**fields, **ids, "text_config": {**fields["text_config"], "vocab_size": len(tokenizer)}},
            id2label=dict(enumerate(LABELS)),
        )
        config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = transformers.Gemma3ForSequenceClassification(config).float().eval()
            with torch.no_grad():
                for parameter in self.network.parameters():
                    parameter.normal_(0.0, 0.1)
        self.network.save_pretrained(folder)
        self.processor.save_pretrained(folder)

    def expected(self, text: str, images: list[Any]) -> Tensor:
        """Probabilities by Transformers, [classes]."""
        inputs = self.processor(text=[text], images=[images] if images else None, return_tensors="pt")
        with torch.no_grad():
            return self.network(**inputs).logits[0].softmax(-1)


def test_classes_are_those_of_transformers(tmp_path: Path) -> None:
    model, images, token = SeeingClassifier(tmp_path), [drawing(1), drawing(2, (60, 30))], TOKENS["boi_token"]
    prompts = [(f"{token} so", images[:1]), (f"{token} or {token}", images), ("no image", [])]
    with LLM(tmp_path, dtype="float32", num_threads=1, max_model_len=256, kv_cache_memory_bytes=1 << 24) as llm:
        assert llm.engine_info.pooling_tasks == ("classify",)
        assert llm.model_config.labels == LABELS
        given = [{"prompt": text, "multi_modal_data": {"image": seen} if seen else None} for text, seen in prompts]
        outputs = llm.classify(given, use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert (torch.tensor(output.outputs.probs) - model.expected(*prompt)).abs().max() <= 2e-6
    assert not torch.allclose(model.expected(*prompts[0]), model.expected(*prompts[1]), atol=1e-3)
