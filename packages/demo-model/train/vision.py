"""The companion that sees, for training: a SigLIP tower and LLaVA's connector beside the demo model with an adapter.

Knows the network, and its checkpoint. Shapes: B pictures, P patches, W width of the tower, D hidden size of the demo.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from chat import CHECKPOINT, Chat
from pictures.drawing import SIDE
from pictures.labels import GRID, LABEL_SIZES, PATCH
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaModel, SiglipVisionConfig

HIDDEN_SIZE = 256
"""Of the demo model."""
IMAGE_TOKEN = "<image>"
EMBED_ID = 1280
"""Stands for an embedding of a picture: the first id beyond the vocabulary."""
NUM_EMBEDS = GRID * GRID
"""Embeddings of a picture."""
VISION = CHECKPOINT.with_name("vision")
"""Folder of the companion."""


def llava_config() -> LlavaConfig:
    """Sizes of the tower and the connector; there is no language model in it."""
    tower = SiglipVisionConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=5, num_attention_heads=4, image_size=SIDE,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    text = {"model_type": "llama", "vocab_size": 8, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 0}
    return LlavaConfig(
        vision_config=tower, text_config=text, vision_feature_layer=-1, vision_feature_select_strategy="full",
        image_seq_length=NUM_EMBEDS, attn_implementation="eager",
    )  # fmt: skip


class Seeing(nn.Module):
    """Tower and connector, and the head that says what each patch shows, which only training has."""

    def __init__(self) -> None:
        super().__init__()
        config = llava_config()
        model = LlavaModel(config)
        self.vision_tower = model.vision_tower
        self.multi_modal_projector = model.multi_modal_projector
        self.label_norm = nn.LayerNorm(config.vision_config.hidden_size)
        self.label_head = nn.Linear(config.vision_config.hidden_size, sum(LABEL_SIZES))

    def features(self, pixels: Tensor) -> Tensor:
        """[B, P, W] what the connector reads of pixels [B, 3, SIDE, SIDE]."""
        out = self.vision_tower(pixel_values=pixels, output_hidden_states=True)
        return out.hidden_states[-1]

    def embeds(self, features: Tensor) -> Tensor:
        """[B * P, D] what the demo model reads of features [B, P, W]."""
        embeds: Tensor = self.multi_modal_projector(features)
        return embeds.flatten(0, 1)

    def label_loss(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss per picture, and the share of right labels [len(LABEL_SIZES)] at patches that show something.

        Args:
            features: [B, P, W].
            labels: int64 [B, P, len(LABEL_SIZES)].
        """
        logits = self.label_head(self.label_norm(features)).float()
        shown = labels[..., 0] > 0
        weight = torch.where(shown, 1.0, 0.1)
        loss = logits.new_zeros(())
        shares = []
        for i, part in enumerate(logits.split(LABEL_SIZES, -1)):
            each = F.cross_entropy(part.flatten(0, 1), labels[..., i].flatten(), reduction="none")
            loss = loss + (each * weight.flatten()).sum()
            shares.append((part.argmax(-1) == labels[..., i])[shown].float().mean())
        return loss / len(labels), torch.stack(shares)


class VisionChat(Chat):
    """Renders and tokenizes conversations with pictures.

    Args:
        folder: The companion's, with its tokenizer and chat template.
    """

    def __init__(self, folder: Path = VISION) -> None:
        super().__init__(folder)
        self.image_id: int = self.tokenizer.token_to_id(IMAGE_TOKEN)

    def encode(self, text: str) -> list[int]:
        """The token ids of rendered text, with one beyond the vocabulary for each embedding of a picture."""
        ids = super().encode(text.replace(IMAGE_TOKEN, IMAGE_TOKEN * NUM_EMBEDS))
        return [EMBED_ID if token_id == self.image_id else token_id for token_id in ids]
