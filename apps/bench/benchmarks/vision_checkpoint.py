"""A random checkpoint that sees, with its processor, for `quire bench peers --task vision`.

    python vision_checkpoint.py qwen2.5-vl-3b FOLDER      # 6 of 36 layers, 8 of 32 of the tower
    python vision_checkpoint.py smolvlm-256m FOLDER

Sizes are those of the published models. Needs transformers, of the oldest version that has to read it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from quire_testkit.tokenizers import write_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def qwen(ids: dict[str, int]) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    """Configuration, class, and what the processor's files say."""
    text = {
        "model_type": "qwen2_5_vl_text", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000,
        "tie_word_embeddings": True, "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    vision = {
        "depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [3, 7],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    images = {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14,
        "temporal_patch_size": 2, "merge_size": 2, **CLIP,
    }  # fmt: skip
    return config, "Qwen2_5_VLForConditionalGeneration", images, {"processor_class": "Qwen2_5_VLProcessor"}


def smolvlm(ids: dict[str, int]) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    """Idefics 3's classes, which SmolVLM's are another name of."""
    text = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49280, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "head_dim": 64,
    }  # fmt: skip
    vision = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    config = transformers.Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=4, image_token_id=ids["<image>"], tie_word_embeddings=True
    )
    images = {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 2048}, "do_image_splitting": True,
        "max_image_size": {"longest_edge": 512}, **HALF,
    }  # fmt: skip
    return (
        config,
        "Idefics3ForConditionalGeneration",
        images,
        {"processor_class": "Idefics3Processor", "image_seq_len": 64},
    )


QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SMOL_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SMOL_TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
MODELS = {
    "qwen2.5-vl-3b": (qwen, 151936, QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>"),
    "smolvlm-256m": (smolvlm, 49280, SMOL_TOKENS, "<image>"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    describe, vocab_size, tokens, image = MODELS[args.model]
    args.folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.folder, vocab_size=vocab_size - len(tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    tokenizer.save_pretrained(args.folder)
    config, architecture, images, processor = describe(tokenizer.get_vocab())
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    network = getattr(transformers, architecture)(config)
    network.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    network.save_pretrained(args.folder)
    (args.folder / "preprocessor_config.json").write_text(json.dumps({**images, **processor}, indent=1))
    (args.folder / "processor_config.json").write_text(json.dumps(processor, indent=1))
    (args.folder / "chat_template.json").write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    print(f"wrote {args.model}, {sum(each.numel() for each in network.parameters()) / 1e6:.0f} M weights")


if __name__ == "__main__":
    main()
