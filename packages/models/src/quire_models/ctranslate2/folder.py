"""A folder in the format of CTranslate2 opened as a checkpoint of Transformers. Free of torch.

Everything that reads checkpoints reads config.json and generation_config.json; so what the file's tensors and the
tokenizer say is written once as these, into the user's cache, beside links to weights and tokenizer, and found there by
the file's place, size and time.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, read_json
from quire_models.ctranslate2.header import BIN_NAME, BinHeader, read_header
from quire_models.made_folder import CTRANSLATE2, made_folder, write_made_folder

__all__ = ["ctranslate2_folder"]

_VERSION = "1"
"""Of what is written; another one makes a new folder."""
_ACTIVATIONS = {0: "relu", 1: "gelu_new", 2: "swish", 3: "gelu"}
_MULTILINGUAL_SIZE = 51865
"""From so many tokens on, a vocabulary has languages."""
_MAX_INITIAL_TIMESTAMP = 50
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


def ctranslate2_folder(folder: Path) -> Path:
    """The folder that stands for one of CTranslate2, written when there is none yet.

    Raises:
        CheckpointError: not a network or a file that can be read, no tokenizer, or no place to write to.
    """
    file = (folder / BIN_NAME).absolute()
    made = made_folder("ctranslate2", _VERSION, [file], folder.absolute().name or "model")
    if (made / CTRANSLATE2).exists():
        return made
    header = read_header(file)
    if header.kind != "WhisperSpec":
        raise CheckpointError(
            f"{file} is a {header.kind} of CTranslate2; of that format Whisper is read (WhisperSpec). Take the "
            "checkpoint that it was made from"
        )
    tokenizer = file.parent / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(
            f"{file.parent} has no tokenizer.json; put that of the checkpoint that it was made from (as openai/whisper-"
            "tiny) beside the weights"
        )
    stored = read_json(file.parent / "config.json") if (file.parent / "config.json").is_file() else {}
    token_ids = {token["content"]: int(token["id"]) for token in read_json(tokenizer).get("added_tokens", [])}
    contents = {
        "config.json": _config(header, file, token_ids),
        "generation_config.json": _generation(header, stored, token_ids, file),
    }
    links = {path.name: path for path in (tokenizer, file.parent / "preprocessor_config.json") if path.is_file()}
    write_made_folder(made, contents, {CTRANSLATE2: file, **links}, CTRANSLATE2)
    return made


def _config(header: BinHeader, file: Path, token_ids: dict[str, int]) -> dict[str, Any]:
    """The sizes of the network, from the shapes of its tensors."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in header.tensors:
            raise CheckpointError(f"{file} has no tensor {name}; convert the checkpoint again")
        return header.tensors[name].shape

    def layers(stack: str) -> int:
        return len(
            {name.split("/")[1] for name in header.tensors if name.startswith(f"{stack}/layer_")} - {"layer_norm"}
        )

    def scalar(name: str) -> int:
        tensor = header.tensors[name]
        with file.open("rb") as stream:
            stream.seek(tensor.offset)
            code = {"int8": "b", "int16": "h", "int32": "i"}[tensor.dtype]
            (value,) = struct.unpack(f"<{code}", stream.read(struct.calcsize(code)))
        return int(value)

    vocab_size, hidden = shape("decoder/embeddings/weight")
    act = scalar("decoder/activation") if "decoder/activation" in header.tensors else 3
    if act not in _ACTIVATIONS:
        raise CheckpointError(f"{file} has an activation of number {act}, which is not known")
    end = token_ids.get("<|endoftext|>")
    dtype = next(tensor.dtype for name, tensor in header.tensors.items() if name == "encoder/conv1/weight")
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "torch_dtype": dtype,
        "vocab_size": vocab_size,
        "d_model": hidden,
        "encoder_layers": layers("encoder"),
        "decoder_layers": layers("decoder"),
        "encoder_attention_heads": scalar("encoder/num_heads"),
        "decoder_attention_heads": scalar("decoder/num_heads"),
        "encoder_ffn_dim": shape("encoder/layer_0/ffn/linear_0/weight")[0],
        "decoder_ffn_dim": shape("decoder/layer_0/ffn/linear_0/weight")[0],
        "num_mel_bins": shape("encoder/conv1/weight")[1],
        "max_source_positions": shape("encoder/position_encodings/encodings")[0],
        "max_target_positions": shape("decoder/position_encodings/encodings")[0],
        "activation_function": _ACTIVATIONS[act],
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "decoder_start_token_id": token_ids.get("<|startoftranscript|>"),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _generation(header: BinHeader, stored: dict[str, Any], token_ids: dict[str, int], file: Path) -> dict[str, Any]:
    """What Whisper's generation_config.json says, from the file's own and the names of tokens."""
    end, start = token_ids.get("<|endoftext|>"), token_ids.get("<|startoftranscript|>")
    if end is None or start is None:
        raise CheckpointError(f"{file.parent}/tokenizer.json has no tokens <|endoftext|> and <|startoftranscript|>")
    vocab_size = header.tensors["decoder/embeddings/weight"].shape[0]
    is_multilingual = vocab_size >= _MULTILINGUAL_SIZE
    values: dict[str, Any] = {
        "decoder_start_token_id": start,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "is_multilingual": is_multilingual,
        "no_timestamps_token_id": token_ids.get("<|notimestamps|>"),
        "prev_sot_token_id": token_ids.get("<|startofprev|>"),
        "max_initial_timestamp_index": _MAX_INITIAL_TIMESTAMP,
        "max_length": header.tensors["decoder/position_encodings/encodings"].shape[0],
        "suppress_tokens": stored.get("suppress_ids", []),
        "begin_suppress_tokens": stored.get("suppress_ids_begin", []),
        "alignment_heads": stored.get("alignment_heads", []),
    }
    if is_multilingual:
        languages = {int(each) for each in stored.get("lang_ids", [])}
        values["lang_to_id"] = {
            token: number
            for token, number in token_ids.items()
            if _LANGUAGE.fullmatch(token) and (number in languages or not languages)
        }
        tasks = {"transcribe": "<|transcribe|>", "translate": "<|translate|>"}
        values["task_to_id"] = {task: token_ids[token] for task, token in tasks.items() if token in token_ids}
    return values
