"""The companion's checkpoint: written by training, read by the evaluation. LLaVA's layout, without a language model."""

from __future__ import annotations

import json
from pathlib import Path

from chat import CHECKPOINT
from model import Llama, LlamaConfig
from pictures.drawing import SIDE
from pictures.labels import PATCH
from safetensors.torch import load_file, save_file
from train import write_manifest
from train_adapters import Adapter
from vision import IMAGE_TOKEN, VISION, Seeing, llava_config

ADAPTER = VISION / "demo-vision"
UNUSED_TOKEN = "ÿ"
"""Token of the byte 255, which no text in UTF-8 has: its id stands for pictures."""


def write_processor(folder: Path) -> None:
    """Write tokenizer, processor and config.json; the chat template is there already."""
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    image_id = vocabulary.pop(UNUSED_TOKEN)
    vocabulary[IMAGE_TOKEN] = image_id
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "content": IMAGE_TOKEN, "id": image_id})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")))
    settings = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {"image_token": IMAGE_TOKEN}
    _write(folder / "tokenizer_config.json", settings)
    size, half = {"height": SIDE, "width": SIDE}, [0.5, 0.5, 0.5]
    images = {
        "image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": size, "resample": 3,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": half, "image_std": half,
    }  # fmt: skip
    _write(folder / "preprocessor_config.json", images)
    processor = {
        "processor_class": "LlavaProcessor", "patch_size": PATCH, "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0, "image_token": IMAGE_TOKEN,
    }  # fmt: skip
    _write(folder / "processor_config.json", processor)
    tower = llava_config().vision_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    vision = {name: getattr(tower, name) for name in names}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": image_id,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "image_seq_length": (SIDE // PATCH) ** 2,
        "torch_dtype": "bfloat16",
        "text_config": json.loads((CHECKPOINT / "config.json").read_text()),
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
    }
    _write(folder / "config.json", config)


def write_weights(seeing: Seeing, adapter: Adapter, folder: Path) -> None:
    """Write the tower with its connector, and the adapter, in bf16; and the list of hashes."""
    tensors = {
        f"model.{name}": each.detach().bfloat16().contiguous()
        for name, each in seeing.state_dict().items()
        if not name.startswith("label_") and each.is_floating_point()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    adapter.save(folder / ADAPTER.name)
    write_manifest(folder)


def load_seeing(folder: Path = VISION) -> Seeing:
    """The tower with its connector, float32."""
    seeing = Seeing()
    tensors = load_file(folder / "model.safetensors")
    missing, unexpected = seeing.load_state_dict(
        {name.removeprefix("model."): each.float() for name, each in tensors.items()}, strict=False
    )
    assert not unexpected
    assert all(name.startswith("label_") or "position_ids" in name for name in missing), missing
    return seeing.eval()


def load_reader(model: Llama, folder: Path = ADAPTER) -> Llama:
    """The demo model with the adapter in its weights, float32."""
    adapter = Adapter(model, 0)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, pair in adapter.pairs.items():
        for which, each in zip("AB", pair, strict=True):
            each.data.copy_(tensors[f"base_model.model.model.layers.{name}.lora_{which}.weight"])
    reader = Llama(LlamaConfig.from_json(json.loads((CHECKPOINT / "config.json").read_text())))
    reader.load_state_dict({name: each.detach() for name, each in adapter.merged().items()})
    return reader


def _write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
