"""Encoding media with classes of Transformers that have no function for it, or one that stops before the connector.

Each encodes one item, under the names of its processor's outputs, as the class's own `forward` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import CheckpointError, Modality

__all__ = ["CLASS_ENCODERS"]


def _llama4_image(model: Any) -> Callable[..., Tensor]:
    def encode(pixel_values: Tensor) -> Tensor:
        """[tiles, 3, H, W] -> [N, W], tile by tile."""
        tiles = model.get_image_features(pixel_values=pixel_values, return_dict=True).last_hidden_state
        projected: Tensor = model.multi_modal_projector(tiles.flatten(0, -2))
        return projected

    return encode


def _qwen2_audio(model: Any) -> Callable[..., Tensor]:
    def encode(input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
        """[1, mel bins, frames], and which frames are sound, [1, frames] -> [N, W]."""
        from transformers.masking_utils import create_bidirectional_mask

        inner = getattr(model, "model", model)
        tower = inner.audio_tower
        frames, num_embeds = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
        seq_len = (input_features.shape[-1] - 2) // 2 + 1
        heard = (torch.arange(seq_len, device=frames.device)[None] < frames[:, None]).long()
        blank = torch.zeros(*heard.shape, 1, dtype=input_features.dtype, device=input_features.device)
        mask = create_bidirectional_mask(config=tower.config, inputs_embeds=blank, attention_mask=heard)
        features: Tensor = inner.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
        return features[0, : int(num_embeds[0])]

    return encode


def _ovis2_image(model: Any) -> Callable[..., Tensor]:
    def encode(pixel_values: Tensor, embed_token_ids: Tensor) -> Tensor:
        """[tiles, 3, H, W], and the tokens that take embeddings, [N] -> [N, W]: patches, and the marks around them."""
        features = model.get_image_features(pixel_values=pixel_values, return_dict=True)
        patches, marks = features.pooler_output.flatten(0, 1), features.visual_indicator_features
        embeds: Tensor = patches.new_empty(len(embed_token_ids), patches.shape[-1])
        embeds[embed_token_ids == model.config.image_token_id] = patches
        for mark, token_id in zip(marks, model.config.visual_indicator_token_ids, strict=True):
            embeds[embed_token_ids == token_id] = mark
        return embeds

    return encode


def _granite4_vision_image(model: Any) -> Callable[..., Tensor]:
    def encode(pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        """[1, tiles, 3, H, W] -> [N, W]: nothing for the embeddings, then the features of each layer."""
        features = model.get_image_features(pixel_values=pixel_values, image_sizes=image_sizes, return_dict=True)
        parts = [torch.cat(list(each)) for _, each in features.deepstack_features]
        return torch.cat([torch.zeros_like(parts[0]), *parts], dim=-1)

    return encode


def _gemma4_audio(model: Any) -> Callable[..., Tensor]:
    def encode(input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        """[1, frames, mel bins], and which frames are sound, [1, frames] -> [N, W]."""
        out = model.model.get_audio_features(input_features, input_features_mask, return_dict=True)
        embeds: Tensor = out.pooler_output[out.attention_mask]
        return embeds

    return encode


def _gemma3n_audio(model: Any) -> Callable[..., Tensor]:
    def encode(input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        """[1, frames, mel bins], and which frames are sound, [1, frames] -> [N, W], N the same for all sounds: behind
        the sound, embeddings of the last token of the vocabulary."""
        inner = model.model
        out = inner.get_audio_features(input_features, ~input_features_mask.bool(), return_dict=True)
        last_token = torch.tensor([inner.vocab_size - 1], device=input_features.device)
        embeds: Tensor = inner.embed_audio(input_ids=last_token).repeat(model.config.audio_soft_tokens_per_image, 1)
        heard = ~out.audio_mel_mask[0]
        embeds[: len(heard)][heard] = out.pooler_output[0][heard]
        return embeds

    return encode


def _musicflamingo_audio(model: Any) -> Callable[..., Tensor]:
    def encode(input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        """[windows, mel bins, frames], and which frames are sound, [windows, frames] -> [N, W]; times are counted along
        the tokens of the sound."""
        inner = model.model
        _, num_embeds = inner.audio_tower._get_feat_extract_output_lengths(input_features_mask.sum(-1).long())
        token_ids = input_features_mask.new_full((1, int(num_embeds.sum())), model.config.audio_token_id)
        embeds: Tensor = inner.get_audio_features(input_features, input_features_mask, token_ids).pooler_output
        return embeds

    return encode


def _perception_lm_video(model: Any) -> Callable[..., Tensor]:
    def encode(pixel_values_videos: Tensor) -> Tensor:
        """[1, frames, 3, H, W] -> [frames, patches, W], frame by frame."""
        embeds: Tensor = model.model.get_image_features(pixel_values=pixel_values_videos).pooler_output
        return embeds

    return encode


def _phi4_multimodal_image(model: Any) -> Callable[..., Tensor]:
    tower = model.model.embed_tokens_extend.image_embed
    for module in tower.modules():
        if hasattr(module, "is_causal"):  # which holds in one of Transformers' attentions, for images without padding
            module.is_causal = False

    def encode(image_pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor) -> Tensor:
        """[1, 1 + crops, 3, C, C], pixels by height and width [1, 2], and which patches are of the image,
        [1, 1 + crops, P, P] -> [N, W]: rows of patches of all crops, each with a mark behind it, a mark, and those of
        the overview."""
        height, width = (int(pixels) // model.config.vision_config.crop_size for pixels in image_sizes[0])
        present = image_attention_mask[0, 1 : 1 + height * width, ::2, ::2]
        side = present.shape[-1]
        num_rows, num_columns = int(present[::width, :, 0].sum()), int(present[:width, 0].sum())
        num_embeds = num_rows * (num_columns + 1) + 1 + side * (side + 1)
        token_ids = image_sizes.new_full((1, num_embeds), model.config.vision_config.image_token_id)
        blank = image_pixel_values.new_zeros(1, num_embeds, model.config.hidden_size)
        embeds: Tensor = tower(token_ids, blank, image_pixel_values, image_sizes, image_attention_mask)
        return embeds

    return encode


def _phi4_multimodal_audio(model: Any) -> Callable[..., Tensor]:
    tower = model.model.embed_tokens_extend.audio_embed

    def encode(audio_input_features: Tensor, audio_embed_sizes: Tensor, beside_images: Tensor | None = None) -> Tensor:
        """[1, frames, mel bins], and the number of embeddings, [1] -> [N, W], by a connector of its own where the
        prompt has images."""
        num_embeds = int(audio_embed_sizes.sum())
        token_ids = audio_embed_sizes.new_full((1, num_embeds), model.config.audio_config.audio_token_id)
        blank = audio_input_features.new_zeros(1, num_embeds, model.config.hidden_size)
        mode = "speech" if beside_images is None else "vision"
        embeds: Tensor = tower(token_ids, blank, audio_input_features, audio_embed_sizes, audio_projection_mode=mode)
        return embeds

    return encode


def _mllama_image(model: Any) -> Callable[..., Tensor]:
    inner = model.model
    layers = getattr(inner.language_model, "layers", None)
    if layers is None:
        raise CheckpointError("layers of its language model make what is kept of its images: its towers are not alone")

    def encode(pixel_values: Tensor, aspect_ratio_ids: Tensor, aspect_ratio_mask: Tensor) -> Tensor:
        """[1, 1, tiles, 3, H, W], how the tiles lie, [1, 1], and which ones are there, [1, 1, tiles] -> [N, W]: keys
        and values of each layer with cross attention."""
        patches = inner.vision_model(pixel_values, aspect_ratio_ids, aspect_ratio_mask).last_hidden_state[0, 0]
        states = inner.multi_modal_projector(patches[: int(aspect_ratio_mask.sum())].flatten(0, 1))
        parts = []
        for index in inner.language_model.cross_attention_layers:
            if index < len(layers):
                cross = layers[index].cross_attn
                keys = cross.k_norm(cross.k_proj(states).unflatten(-1, (-1, cross.head_dim)))
                parts += [keys.flatten(1), cross.v_proj(states)]
        return torch.cat(parts, dim=-1)

    return encode


CLASS_ENCODERS: dict[tuple[str, Modality], Callable[[Any], Callable[..., Tensor]]] = {
    ("Gemma3nForConditionalGeneration", Modality.AUDIO): _gemma3n_audio,
    ("Gemma4ForConditionalGeneration", Modality.AUDIO): _gemma4_audio,
    ("Granite4VisionForConditionalGeneration", Modality.IMAGE): _granite4_vision_image,
    ("Llama4ForConditionalGeneration", Modality.IMAGE): _llama4_image,
    ("MllamaForConditionalGeneration", Modality.IMAGE): _mllama_image,
    ("Ovis2ForConditionalGeneration", Modality.IMAGE): _ovis2_image,
    ("MusicFlamingoForConditionalGeneration", Modality.AUDIO): _musicflamingo_audio,
    ("PerceptionLMForConditionalGeneration", Modality.VIDEO): _perception_lm_video,
    ("Phi4MultimodalForCausalLM", Modality.AUDIO): _phi4_multimodal_audio,
    ("Phi4MultimodalForCausalLM", Modality.IMAGE): _phi4_multimodal_image,
    ("Qwen2AudioForConditionalGeneration", Modality.AUDIO): _qwen2_audio,
}
"""(class, modality) -> network of that class -> function that encodes one item."""
