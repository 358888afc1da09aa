"""Why a model cannot be run: what kind of network it is, and what is nearest to it.

For messages only: nothing here decides what is supported. Free of torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, Fields, read_json

__all__ = ["DIFFUSION", "nearest_path_hint", "no_config_error", "unsupported_architecture"]

DIFFUSION = re.compile(r"LLaDA|Dream|SDAR|BlockDiffusion|DiffusionGemma|DiffuCoder|DiffuLlama|WeDLM")
"""Names of architectures that write blocks of tokens by diffusion."""

KINDS: tuple[tuple[str, str], ...] = (
    (r"ForMaskedLM|ForPreTraining|ForMaskedDiffusion", "fills gaps in texts and writes none"),
    (r"RewardModel|ForReward|ForScore|ValueHead", "gives texts a reward"),
    (r"For(Sequence|Token)Classification|ForMultipleChoice|ForNextSentence|CrossEncoder", "classifies texts"),
    (r"ForQuestionAnswering", "marks answers in texts"),
    (r"ForImageClassification|ForObjectDetection|Segmentation|DepthEstimation|ForMaskedImage", "looks at pictures"),
    (
        DIFFUSION.pattern,
        "writes by diffusion: it refines a block of tokens in many passes before any is certain, and a step of this "
        "engine ends with certain tokens",
    ),
    (r"Diffusion|Transformer2D|DiT(?![a-z])|Flux|UNet", "makes pictures, sound or video by diffusion"),
    (
        r"Moonshine|Parakeet|Asr(?![a-z])|ASR|Speech(To|2)Text|Transcribe|ForCTC",
        "transcribes speech, as Whisper, Qwen3-ASR and others of docs/speech.md do here",
    ),
    (r"Whisper|Wav2Vec|Hubert|Speech|Audio|Voxtral|TTS|Seamless", "hears or speaks"),
    (r"VL(?![a-z])|Vision|Llava|LLaVA|Pixtral|Idefics|PaliGemma|Clip|CLIP|Siglip|Mllama|OCR", "sees pictures"),
    (r"Image|Video", "sees or makes pictures"),
    (r"TimeS|Chronos|PatchTS|Informer|Autoformer", "continues series of numbers"),
    (r"Esm|Protein|Evo", "reads proteins"),
    (r"EncoderModel|Embedding|Reranker", "makes embeddings of texts"),
)  # fmt: skip
"""Pattern of an architecture's name -> what such a network does."""

FIELDS_OF_KINDS = {
    "vision_config": "sees pictures",
    "vision_tower": "sees pictures",
    "mm_vision_tower": "sees pictures",
    "audio_config": "hears sound",
    "speech_config": "hears sound",
    "thinker_config": "sees, hears and speaks",
}
"""Field of config.json -> what a network that has it does."""

OTHER_FORMATS: tuple[tuple[str, str], ...] = (
    ("model_index.json", "is a pipeline of the Diffusers library, which makes pictures, sound or video"),
    (
        "params.json",
        "is in the format of its makers (params.json): Mistral's, with consolidated.safetensors beside, is read with "
        "load_format auto or mistral (`resolve_model`); of others, download the files for Transformers",
    ),
    ("*.gguf", "has GGUF files; give the path of one of them"),
    ("*.safetensors", "has weights but no config.json; download that file from where they come from, too"),
    ("*.bin", "has weights but no config.json; download that file from where they come from, too"),
    ("*.onnx", "has an ONNX network, which is not read; download the checkpoint that it was made from"),
    ("tokenizer.json", "has a tokenizer only"),
)
"""Pattern of a file -> what a folder is that has one, and no config.json."""


def unsupported_architecture(config: Fields, names: list[str], supported: Mapping[str, str]) -> CheckpointError:
    """The error for a config.json whose architecture is not run.

    Args:
        config: The file.
        names: Its architectures; empty where it says none.
        supported: Architecture -> model_type, of all that are run.
    """
    said = f"architecture {', '.join(names)} is not supported" if names else "it names no architecture"
    if not names and config.get("model_type") is not None:
        said = f"architectures is missing, and no architecture has the model_type {config.get('model_type')!r}"
    parts = [said]
    if (kind := _kind(config, names, supported)) is not None:
        parts[0] += f": it {kind}, and Quire has no network of this kind for it"
    nearest = _nearest(names, str(config.get("model_type") or ""), supported)
    if nearest:
        parts.append(f"nearest to it are {', '.join(nearest)}")
    return CheckpointError(f"{config.source}: {'; '.join(parts)}; docs/models.md lists all {len(supported)}")


def _kind(config: Fields, names: Iterable[str], supported: Mapping[str, str]) -> str | None:
    for field, kind in FIELDS_OF_KINDS.items():
        if config.get(field) is not None:
            return kind
    for name in names:
        for pattern, kind in KINDS:
            if re.search(pattern, name):
                return kind
    return None


def _nearest(names: list[str], model_type: str, supported: Mapping[str, str]) -> list[str]:
    """The three that are most alike, without what most names end in; those of the same family first."""
    stems: dict[str, list[str]] = {}
    for name in supported:
        stems.setdefault(_stem(name), []).append(name)
    by_type = difflib.get_close_matches(model_type, sorted(set(supported.values())), n=3, cutoff=0.7)
    found = [name for name, its_type in supported.items() if its_type == model_type]
    for name in names:
        for stem in difflib.get_close_matches(_stem(name), stems, n=3, cutoff=0.7):
            found += stems[stem]
    found += [name for each in by_type for name, its_type in supported.items() if its_type == each]
    return list(dict.fromkeys(found))[:3]


def _stem(name: str) -> str:
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|ModelLM|EncoderModel|Model|GenerationDecoder)$", "", name).lower()


def no_config_error(folder: Path) -> CheckpointError:
    """The error for a folder without config.json: what it seems to be instead."""
    start = f"{str(folder)!r} has no config.json, so it is not a model folder in HF format"
    if (folder / "adapter_config.json").is_file():
        return CheckpointError(_adapter(folder))
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))[:3]
    snapshots = sorted(folder.glob("snapshots/*/config.json"))
    if snapshots:
        return CheckpointError(f"{start}; it is a folder of the hub's cache: give {str(snapshots[0].parent)!r}")
    if inner:
        return CheckpointError(f"{start}; the folder {', '.join(map(repr, inner))} in it has one: give that path")
    if not any(folder.iterdir()):
        return CheckpointError(f"{start}; it is empty")
    for pattern, text in OTHER_FORMATS:
        if any(folder.glob(pattern)):
            return CheckpointError(f"{start}; it {text}")
    return CheckpointError(f"{start}; it has {', '.join(sorted(path.name for path in folder.iterdir())[:5])}")


def _adapter(folder: Path) -> str:
    try:
        base: Any = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    except CheckpointError:
        base = None
    model = f"its base model {base!r}" if base else "the model that it was trained on"
    return (
        f"{str(folder)!r} holds an adapter (adapter_config.json), not a model: serve {model}, and give the adapter as "
        f"--lora-modules NAME={folder}"
    )


def nearest_path_hint(path: Path) -> str:
    """A sentence with a folder that is spelled alike, beside where there is none; empty where there is nothing like."""
    there = path
    while not there.parent.is_dir() and there != there.parent:
        there = there.parent
    if there == there.parent or not there.name or not there.parent.is_dir():
        return ""
    try:
        beside = [each.name for each in there.parent.iterdir()]
    except OSError:
        return ""
    nearest = difflib.get_close_matches(there.name, beside, n=1, cutoff=0.7)
    return f"; did you mean {str(there.parent / nearest[0])!r}?" if nearest else ""
