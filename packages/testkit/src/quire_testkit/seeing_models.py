"""Tiny models that see, with their processors, and images for them."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import torch

from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

LISTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that reads lists of parts alone."""


class SeeingModel:
    """A random LLaVA with its processor, in a folder.

    Args:
        folder: Where it is written.
        chat_template: Of its processor.
        image_size: Pixels of a side of what the tower reads, in patches of 8.
        text_config: Fields of the language model, over those of a tiny one.
        vision_config: Fields of the tower, over those of a tiny one.
    """

    def __init__(
        self,
        folder: Path,
        chat_template: str = LISTS,
        *,
        image_size: int = 32,
        text_config: Mapping[str, Any] | None = None,
        vision_config: Mapping[str, Any] | None = None,
    ) -> None:
        import transformers

        self.folder = folder
        write_tokenizer(folder, vocab_size=600)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, extra_special_tokens={"image_token": "<image>"}, bos_token="<|im_start|>"
        )
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        case = MEDIA_CASES["LlavaForConditionalGeneration"]
        text = {**case.fields["text_config"], **(text_config or {}), "vocab_size": 608, "eos_token_id": None}
        vision = {**case.fields["vision_config"], **(vision_config or {}), "image_size": image_size, "patch_size": 8}
        token_id = tokenizer.convert_tokens_to_ids("<image>")
        fields = {**case.fields, "text_config": text, "vision_config": vision, "image_token_index": token_id}
        self.network = write_checkpoint(
            folder, "LlavaForConditionalGeneration", dataclasses.replace(case, fields=fields)
        )
        square = {"height": image_size, "width": image_size}
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": image_size}, crop_size=square)
        self.processor: Any = transformers.LlavaProcessor(  # type: ignore[no-untyped-call]
            image_processor=images,
            tokenizer=tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=chat_template,
        )
        self.processor.save_pretrained(folder)

    def expected(self, text: str, images: list[PIL.Image.Image], num_tokens: int) -> list[int]:
        """Greedy tokens of Transformers after the joint call of the processor."""
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            ids = self.network.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        tokens: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def drawing(number: int, size: tuple[int, int] = (40, 40)) -> PIL.Image.Image:
    """An image; those of different numbers differ."""
    image = PIL.Image.new("RGB", size, (40 * number % 255, 90, 200 - 50 * number % 200))
    PIL.ImageDraw.Draw(image).ellipse((4, 4 + number, 30, 20 + 3 * number), fill=(250, 30 * number % 255, 10))
    return image


def png(image: PIL.Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def data_url(image: PIL.Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def image_part(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(drawing(number))}, **more}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
