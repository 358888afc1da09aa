"""Prompts of models that read texts and images apart (CLIP, SigLIP): each is one of the two. Free of torch."""

from __future__ import annotations

import dataclasses

from quire_interfaces import CheckpointError, PreparedMedia, RenderedPrompt, RequestError, Tokenizer
from quire_pooling.spec import DualEncoderSpec

__all__ = ["DualEncoderPrompts"]

_IMAGE_TOKEN_ID = 0
"""Stands for an image in a prompt that no network reads."""


class DualEncoderPrompts:
    """Fills texts up, and makes prompts of images.

    Args:
        spec: What the checkpoint says.
        tokenizer: The model's.

    Raises:
        CheckpointError: what texts are filled up with is no token of the tokenizer.
    """

    def __init__(self, spec: DualEncoderSpec, tokenizer: Tokenizer) -> None:
        self._text_length = spec.text_length or 0
        self._padding_ids: list[int] = []
        if spec.text_length is not None:
            self._padding_ids = tokenizer.encode(spec.padding_token, add_special_tokens=False)
            if len(self._padding_ids) != 1:
                raise CheckpointError(
                    f"tokenizer_config.json: pad_token {spec.padding_token!r} is {len(self._padding_ids)} tokens of "
                    "the tokenizer; it must be one"
                )

    def fill_up(self, prompt: RenderedPrompt) -> RenderedPrompt:
        """A text with as many tokens as the network was trained with."""
        num_missing = self._text_length - len(prompt.token_ids)
        if num_missing <= 0:
            return prompt
        return dataclasses.replace(prompt, token_ids=[*prompt.token_ids, *self._padding_ids * num_missing])

    def render_image(self, media: PreparedMedia, num_items: int, *, has_text: bool) -> RenderedPrompt:
        """A prompt that is an image.

        Args:
            media: What stands in the prompt.
            num_items: How many that are.
            has_text: Whether it has a text, too.

        Raises:
            RequestError: it is more than an image.
        """
        if has_text or num_items != 1:
            raise RequestError(
                "this model embeds a text or an image at a time, each by itself: send them as items of their own",
                param="prompt",
            )
        token_ids = [_IMAGE_TOKEN_ID]
        return RenderedPrompt(token_ids=token_ids, media=media.place(token_ids))
