"""From a checkpoint folder to a tokenizer: which file is there decides which library reads it.

Knows the order of preference; knows nothing of what the readers do.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

from quire_interfaces import CheckpointError, Tokenizer, read_json
from quire_renderers.fast_tokenizer import FastTokenizer
from quire_renderers.prompt_encodings import GROK_FILE
from quire_renderers.sentencepiece_tokenizer import SentencePieceTokenizer
from quire_renderers.tokenizer_classes import reads_sentencepiece_plainly
from quire_renderers.tokenizer_files import AddedTokenSpec, TokenizerFiles, read_tokenizer_files

__all__ = ["load_tokenizer"]

logger = logging.getLogger(__name__)

_SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_OTHER_NAMES = ("vocab.json", "vocab.txt", "tokenizer.tiktoken", "tokenizer_config.json")


def load_tokenizer(folder: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder in the Hugging Face format.

    tokenizer.json, tekken.json and tokenizer.tok.json are read by `tokenizers`, a sentencepiece model by
    `sentencepiece`; only what neither reads, or what the tokenizer's class numbers otherwise, goes to `transformers`,
    if it is installed, and a log line says so.

    Args:
        folder: The checkpoint folder.
        trust_remote_code: Code in it may be run, where `transformers` reads the tokenizer and has no class for it.

    Returns:
        A thread-safe tokenizer with eos_token_ids from generation_config.json (else config.json) and its own eos token.

    Raises:
        CheckpointError: nothing readable is there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds tokenizer.json")
    files = read_tokenizer_files(folder)
    if (folder / "tokenizer.json").is_file():
        return FastTokenizer.from_file(folder / "tokenizer.json", files)
    return _of_other_files(folder, files, trust_remote_code)


def _of_other_files(folder: Path, files: TokenizerFiles, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a folder without tokenizer.json."""
    if (folder / "tekken.json").is_file():
        return _tekken_tokenizer(folder / "tekken.json", files)
    if (folder / GROK_FILE).is_file():
        return _grok_tokenizer(folder / GROK_FILE, files)
    for name in _SENTENCEPIECE_NAMES:
        if (folder / name).is_file():
            if not reads_sentencepiece_plainly(files.settings):
                _check_protobuf(folder / name, files)
                return _through_transformers(folder, files, trust_remote_code)
            return SentencePieceTokenizer.from_file(folder / name, files)
    if any((folder / name).is_file() for name in _OTHER_NAMES):
        return _through_transformers(folder, files, trust_remote_code)
    raise CheckpointError(
        f"{folder} holds no tokenizer: expected tokenizer.json, tekken.json, {GROK_FILE} or one of "
        f"{', '.join(_SENTENCEPIECE_NAMES)}; fetch the tokenizer files of the checkpoint, or serve with token ids only"
    )


def _tekken_tokenizer(path: Path, files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a folder that has Mistral's own file of it alone, which names no tokens."""
    from quire_renderers.tekken_tokenizer import TEKKEN_BOS, TEKKEN_EOS, tekken_backend  # most starts do without

    named = {
        "bos_token": AddedTokenSpec(content=TEKKEN_BOS, special=True),
        "eos_token": AddedTokenSpec(content=TEKKEN_EOS, special=True),
    }
    return FastTokenizer(tekken_backend(path), replace(files, named_tokens=named | files.named_tokens))


def _grok_tokenizer(path: Path, files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a folder that has xAI's own file of it alone; answers end where turns do."""
    from quire_renderers.grok_tokenizer import GROK_NAMED, GROK_TURN_END, grok_backend  # most starts do without

    backend = grok_backend(path)
    known = ((name, text) for name, text in GROK_NAMED.items() if backend.token_to_id(text) is not None)
    named = {name: AddedTokenSpec(content=text) for name, text in known}
    turn_end = backend.token_to_id(GROK_TURN_END)
    ends = files.model_eos_token_ids if turn_end is None else (*files.model_eos_token_ids, turn_end)
    return FastTokenizer(backend, replace(files, named_tokens=named | files.named_tokens, model_eos_token_ids=ends))


def _check_protobuf(model: Path, files: TokenizerFiles) -> None:
    if importlib.util.find_spec("google") is None or importlib.util.find_spec("google.protobuf") is None:
        raise CheckpointError(
            f"{model}: {files.settings['tokenizer_class']} numbers the pieces of the model in its own way, which "
            "transformers knows and reads with the package protobuf. That is not installed: install it, or convert "
            "the tokenizer to tokenizer.json (save_pretrained of a fast tokenizer)"
        )


def _check_code(folder: Path) -> None:
    """CheckpointError: a file names code of another repository, which would be run."""
    for file in ("tokenizer_config.json", "config.json"):
        path = folder / file
        code = read_json(path).get("auto_map") if path.is_file() else None
        named = code.values() if isinstance(code, dict) else code if isinstance(code, list) else ()
        for name in (each for one in named for each in (one if isinstance(one, list) else [one])):
            if "--" in str(name):
                raise CheckpointError(
                    f"{path}: auto_map names code of another repository ({name}), which is not run; put the file into "
                    "the folder, read it, and name it as 'tokenization_x.XTokenizer'"
                )


def _through_transformers(folder: Path, files: TokenizerFiles, trust_remote_code: bool) -> Tokenizer:
    """The slow way, for formats that `transformers` alone can convert (vocab.json, tiktoken)."""
    remedy = "convert it to tokenizer.json (save_pretrained of a fast tokenizer) or install transformers"
    if trust_remote_code:
        _check_code(folder)
    try:
        from transformers import AutoTokenizer  # heavy: only this rare path pays for it
    except ImportError as error:
        raise CheckpointError(f"{folder} has a tokenizer that only transformers reads; {remedy}") from error
    logger.warning("%s has no tokenizer that is read without transformers: reading it through transformers", folder)
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
        backend = getattr(loaded, "backend_tokenizer", None)
    except Exception as error:  # every kind of error comes out of there
        raise CheckpointError(f"{folder}: transformers cannot read the tokenizer either: {error}; {remedy}") from error
    if backend is None:
        raise CheckpointError(
            f"{folder}: its tokenizer ({type(loaded).__name__}) is written in Python throughout "
            "(PreTrainedTokenizer), and only those that the library tokenizers runs (PreTrainedTokenizerFast) can be "
            "served: convert it to tokenizer.json, or serve with token ids only"
        )
    return FastTokenizer(backend, files)
