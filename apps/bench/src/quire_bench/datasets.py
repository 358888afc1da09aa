"""What a server is asked: requests read from local files, or made, the same for the same seed. Nothing is downloaded.

Data sets have vLLM's names: random, prefix_repetition, sharegpt, sonnet, custom, multi-turn, random-mm, custom-mm.
Token counts need a tokenizer, except where prompts are token ids. Knows no server.
"""

from __future__ import annotations

import base64
import itertools
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire_bench.workload import BenchRequest, length_bounds
from quire_interfaces import ConfigError, QuireError

__all__ = [
    "Conversation",
    "TextRequest",
    "TextTokenizer",
    "custom_requests",
    "image_file_requests",
    "multi_turn_requests",
    "prefix_repetition_requests",
    "random_image_requests",
    "random_png",
    "sharegpt_requests",
    "sonnet_requests",
    "text_of_length",
    "texts_of_ids",
]

MAX_TRIES = 50
IMAGE_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".bmp": "bmp"}


class TextTokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One request that is text, or a message."""

    prompt: str
    output_len: int | None = None
    """Tokens to generate, exactly; None lets the model end."""
    num_input_tokens: int | None = None
    """Of the prompt, where they were counted; None leaves that to the server."""
    parts: tuple[dict[str, Any], ...] = ()
    """Of the message, before the prompt: images."""
    history: tuple[dict[str, Any], ...] = ()
    """Messages before it."""

    def messages(self) -> list[dict[str, Any]]:
        """As chat takes it."""
        content = [*self.parts, {"type": "text", "text": self.prompt}] if self.parts else self.prompt
        return [*self.history, {"role": "user", "content": content}]


class Conversation(NamedTuple):
    """Requests that follow one another, each with what was said before it."""

    turns: tuple[TextRequest, ...]


def text_of_length(tokenizer: TextTokenizer, length: int, chooser: random.Random, words: Sequence[int]) -> str:
    """A text of exactly so many tokens, of randomly chosen ones.

    Args:
        tokenizer: Of the model.
        length: Tokens, without special ones.
        chooser: Chooses them.
        words: Token ids to choose from.

    Raises:
        QuireError: the tokenizer joins tokens in every text that was tried.
    """
    for _ in range(MAX_TRIES):
        ids = chooser.choices(words, k=length)
        for _ in range(MAX_TRIES):
            text = tokenizer.decode(ids)
            again = tokenizer.encode(text, add_special_tokens=False)
            if len(again) == length:
                return text
            # Neighbours were joined, or bytes parted: go on from what the text really is.
            ids = again[:length] + chooser.choices(words, k=max(0, length - len(again)))
    raise QuireError(f"no text of exactly {length} tokens was found with this tokenizer; take another length")


def word_ids(tokenizer: TextTokenizer, low: int, high: int) -> list[int]:
    """Token ids of a range that are letters, with or without a space before them, and stay one token.

    Raises:
        ConfigError: there are none.
    """
    ids = []
    for token_id in range(low, high):
        text = tokenizer.decode([token_id])
        if text.strip().isalpha() and tokenizer.encode(text, add_special_tokens=False) == [token_id]:
            ids.append(token_id)
    if not ids:
        raise ConfigError(
            f"no token of {low}:{high} is a word of this tokenizer; give another --token-range", field="token_range"
        )
    return ids


def texts_of_ids(requests: Sequence[BenchRequest], tokenizer: TextTokenizer, seed: int) -> list[TextRequest]:
    """Requests of as many tokens as others have, as text: a chat takes no token ids. What those share at their heads is
    shared here, too.

    Raises:
        QuireError: the tokenizer has no texts of such lengths.
    """
    ids = [each.prompt_token_ids for each in requests]
    words = word_ids(tokenizer, 0, min(20_000, 1 + max(4000, max((max(each) for each in ids), default=0))))
    chooser = random.Random(seed)
    heads: dict[tuple[int, ...], str] = {}
    num_shared = _shared_lengths(ids)
    result = []
    for request, shared in zip(requests, num_shared, strict=True):
        head = tuple(request.prompt_token_ids[:shared])
        if head and head not in heads:
            heads[head] = text_of_length(tokenizer, shared, chooser, words)
        text = _continued(tokenizer, heads.get(head, ""), shared, len(request.prompt_token_ids), chooser, words)
        result.append(
            TextRequest(prompt=text, output_len=request.output_len, num_input_tokens=len(request.prompt_token_ids))
        )
    return result


def _shared_lengths(prompts: Sequence[list[int]]) -> list[int]:
    """How many ids at its head each prompt has in common with another one."""
    order = sorted(range(len(prompts)), key=lambda index: prompts[index])
    shared = [0] * len(prompts)
    for one, other in itertools.pairwise(order):
        length = 0
        for left, right in zip(prompts[one], prompts[other], strict=False):
            if left != right:
                break
            length += 1
        shared[one], shared[other] = max(shared[one], length), max(shared[other], length)
    least = [length for length in shared if length > 1]  # one id in common may be chance
    return [min(length, min(least)) if least and length > 1 else 0 for length in shared]


def _continued(
    tokenizer: TextTokenizer, head: str, shared: int, length: int, chooser: random.Random, words: Sequence[int]
) -> str:
    """A text of `length` tokens that begins with `head`, of `shared` tokens."""
    head_ids = tokenizer.encode(head, add_special_tokens=False) if head else []
    for _ in range(MAX_TRIES):
        text = head + (text_of_length(tokenizer, length - shared, chooser, words) if length > shared else "")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == length and ids[:shared] == head_ids:
            return text
    raise QuireError(
        f"no text of {length} tokens with a shared head of {shared} was found with this tokenizer; take other lengths"
    )


def prefix_repetition_requests(
    *,
    num_requests: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    seed: int,
    token_range: tuple[int, int],
) -> list[BenchRequest]:
    """Requests of a few prefixes, each as often as the others, with suffixes of their own, in random order.

    Raises:
        ConfigError: a length or number that cannot work.
    """
    for name, value, least in (
        ("num_prompts", num_requests, 1),
        ("prefix_repetition_num_prefixes", num_prefixes, 1),
        ("prefix_repetition_prefix_len", prefix_len, 1),
        ("prefix_repetition_suffix_len", suffix_len, 0),
        ("prefix_repetition_output_len", output_len, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}", field=name)
    if num_requests < num_prefixes:
        raise ConfigError(
            f"--num-prompts {num_requests} is less than the {num_prefixes} prefixes; ask for more", field="num_prompts"
        )
    chooser, ids = random.Random(seed), range(*token_range)
    prefixes = [chooser.choices(ids, k=prefix_len) for _ in range(num_prefixes)]
    requests = [
        BenchRequest(prefixes[number % num_prefixes] + chooser.choices(ids, k=suffix_len), output_len)
        for number in range(num_requests)
    ]
    chooser.shuffle(requests)
    return requests


def _read_text(path: str | None, dataset: str) -> str:
    if path is None:
        raise ConfigError(f"--dataset-name {dataset} reads a local file: give --dataset-path", field="dataset_path")
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="dataset_path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8", field="dataset_path") from None


def _read_objects(path: str | None, dataset: str) -> Iterator[dict[str, Any]]:
    """Objects of a JSON list, or of lines of JSON."""
    text = _read_text(path, dataset)
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}", field="dataset_path") from None
        places = ((f"element {number}", value) for number, value in enumerate(values))
    else:
        places = (
            (f"line {number}", _line(path, number, line))
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        )
    for place, value in places:
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, {place}: not a JSON object", field="dataset_path")
        yield value


def _line(path: str | None, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: no JSON ({error})", field="dataset_path") from None


def _sampled(requests: list[Any], count: int, seed: int, path: str | None, *, oversample: bool = True) -> list[Any]:
    """So many of them, in random order; where there are fewer, again and again.

    Raises:
        ConfigError: there are none.
    """
    if count < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {count}", field="num_prompts")
    if not requests:
        raise ConfigError(f"{path} holds no request that can be sent", field="dataset_path")
    chooser = random.Random(seed)
    chooser.shuffle(requests)
    while oversample and len(requests) < count:
        requests = requests + requests[: count - len(requests)]
    return requests[:count]


def _count(tokenizer: TextTokenizer | None, text: str) -> int | None:
    return None if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))


def sharegpt_requests(
    path: str | None, *, count: int, seed: int, output_len: int | None, tokenizer: TextTokenizer | None
) -> list[TextRequest]:
    """The first question of each conversation of a ShareGPT file, and as many output tokens as its answer has.

    Very short and very long ones are left out, as vLLM does: prompts or answers of less than 4 tokens, prompts of more
    than 1024, both together of more than 2048.

    Args:
        path: JSON: a list of {"conversations": [{"from": "human", "value": ...}, ...]}.
        count: How many.
        seed: Of their order.
        output_len: Tokens of every answer instead.
        tokenizer: Counts; without one nothing is left out, and `output_len` is needed.

    Raises:
        ConfigError: the file is none.
    """
    if tokenizer is None and output_len is None:
        raise ConfigError(
            "answers of sharegpt have lengths in tokens: give --tokenizer, or --sharegpt-output-len", field="tokenizer"
        )
    requests = []
    for value in _read_objects(path, "sharegpt"):
        turns = _said(value, path)
        if len(turns) < 2:
            continue
        prompt, answer = turns[0][1], turns[1][1]
        num_input, num_output = _count(tokenizer, prompt), output_len or _count(tokenizer, answer)
        assert num_output is not None
        is_odd = num_input is not None and (num_input < 4 or num_input > 1024 or num_input + num_output > 2048)
        if not is_odd and not (output_len is None and num_output < 4):
            requests.append(TextRequest(prompt=prompt, output_len=num_output, num_input_tokens=num_input))
    return _sampled(requests, count, seed, path)


def _said(value: dict[str, Any], path: str | None) -> list[tuple[str, str]]:
    """Role and text of each message: of ShareGPT's `conversations` or of `messages`."""
    turns = value.get("conversations", value.get("messages"))
    if not isinstance(turns, list):
        raise ConfigError(f"{path}: an element has neither conversations nor messages", field="dataset_path")
    roles = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
    try:
        return [
            (
                roles.get(role := str(turn.get("from", turn.get("role")))) or role,
                str(turn.get("value", turn.get("content"))),
            )
            for turn in turns
        ]
    except AttributeError:
        raise ConfigError(f"{path}: a message is no JSON object", field="dataset_path") from None


def sonnet_requests(
    path: str | None,
    *,
    count: int,
    seed: int,
    input_len: int,
    output_len: int,
    prefix_len: int,
    tokenizer: TextTokenizer | None,
) -> list[TextRequest]:
    """Prompts of lines of a text: the first ones shared by all, the rest chosen for each, up to `input_len` tokens.

    Raises:
        ConfigError: no file, no tokenizer, or lengths that cannot work.
    """
    if tokenizer is None:
        raise ConfigError("the lengths of sonnet are in tokens: give --tokenizer", field="tokenizer")
    if not 0 <= prefix_len <= input_len:
        raise ConfigError(
            f"--sonnet-prefix-len must be from 0 to --sonnet-input-len ({input_len}), got {prefix_len}",
            field="sonnet_prefix_len",
        )
    lines = [f"{line}\n" for line in _read_text(path, "sonnet").splitlines() if line.strip()]
    head = "Pick as many lines as you can from these poem lines:\n"
    sizes = {line: len(tokenizer.encode(line, add_special_tokens=False)) for line in lines}
    head_len = len(tokenizer.encode(head, add_special_tokens=False))
    if not lines or head_len + min(sizes.values()) > input_len:
        raise ConfigError(f"--sonnet-input-len {input_len} has room for no line", field="sonnet_input_len")
    shared = head + "".join(_fitting(lines, sizes, prefix_len - head_len))
    shared_len = len(tokenizer.encode(shared, add_special_tokens=False))
    chooser, requests = random.Random(seed), []
    for _ in range(count):
        chosen = _fitting(chooser.choices(lines, k=1 + input_len // min(sizes.values())), sizes, input_len - shared_len)
        prompt = shared + "".join(chosen)
        requests.append(TextRequest(prompt=prompt, output_len=output_len, num_input_tokens=_count(tokenizer, prompt)))
    return _sampled(requests, count, seed, path)


def _fitting(lines: Sequence[str], sizes: dict[str, int], room: int) -> list[str]:
    """The first lines that have room together."""
    chosen = []
    for line in lines:
        room -= sizes[line]
        if room < 0:
            break
        chosen.append(line)
    return chosen


def custom_requests(
    path: str | None, *, count: int, seed: int, output_len: int | None, tokenizer: TextTokenizer | None
) -> list[TextRequest]:
    """Requests of a JSONL file: {"prompt": TEXT} or {"messages": [...]}, with output_tokens where it says them.

    Args:
        path: The file.
        count: How many.
        seed: Of their order.
        output_len: Tokens of every answer; None or -1 for `output_tokens` of each line, or until the model ends.
        tokenizer: Counts the prompts' tokens; None leaves that to the server.

    Raises:
        ConfigError: the file is none.
    """
    requests = []
    for value in _read_objects(path, "custom"):
        own = value.get("output_tokens")
        if own is not None and (not isinstance(own, int) or own < 1):
            raise ConfigError(f"{path}: output_tokens must be a number above 0, got {own!r}", field="dataset_path")
        wanted = own if output_len in (None, -1) else output_len
        messages = value.get("messages")
        prompt = value.get("prompt")
        if isinstance(messages, list) and messages and isinstance(messages[-1].get("content"), str):
            *history, last = messages
            requests.append(TextRequest(prompt=last["content"], output_len=wanted, history=tuple(history)))
        elif isinstance(prompt, str):
            requests.append(TextRequest(prompt=prompt, output_len=wanted, num_input_tokens=_count(tokenizer, prompt)))
        else:
            raise ConfigError(f"{path}: a line has neither prompt (text) nor messages", field="dataset_path")
    return _sampled(requests, count, seed, path)


def multi_turn_requests(
    path: str | None, *, count: int, seed: int, output_len: int | None, max_turns: int | None = None
) -> list[Conversation]:
    """Conversations of a ShareGPT file, or of one with `messages`: what the user said, turn by turn. The answers are
    those of the model that is measured.

    Raises:
        ConfigError: the file is none.
    """
    conversations = []
    for value in _read_objects(path, "multi-turn"):
        said = [text for role, text in _said(value, path) if role == "user" and text.strip()][:max_turns]
        if said:
            turns = tuple(TextRequest(prompt=text, output_len=output_len) for text in said)
            conversations.append(Conversation(turns))
    return _sampled(conversations, count, seed, path)


def random_png(width: int, height: int, chooser: random.Random) -> bytes:
    """A PNG of random pixels, so that nothing has seen it before."""
    rows = b"".join(b"\0" + chooser.randbytes(3 * width) for _ in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def _image_part(kind: str, data: bytes) -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def random_image_requests(
    *,
    count: int,
    seed: int,
    images: int,
    size: tuple[int, int],
    spread: float,
    output_len: int,
    prompt_of: Callable[[random.Random], str],
) -> list[TextRequest]:
    """Messages with random pictures.

    Args:
        count: How many.
        seed: Of everything.
        images: Pictures in each.
        size: Width and height, pixels.
        spread: 0.5 draws both from 50 % to 150 %.
        output_len: Tokens of every answer.
        prompt_of: Makes the text beside them.

    Raises:
        ConfigError: a number that cannot work.
    """
    if images < 1 or min(size) < 1 or not 0 <= spread < 1:
        raise ConfigError("images, their width and height must be at least 1, and their spread in [0, 1)", field="size")
    chooser, requests = random.Random(seed), []
    for _ in range(count):
        parts = []
        for _ in range(images):
            width, height = (chooser.randint(*length_bounds(side, spread)) for side in size)
            parts.append(_image_part("png", random_png(width, height, chooser)))
        requests.append(TextRequest(prompt=prompt_of(chooser), output_len=output_len, parts=tuple(parts)))
    return requests


def image_file_requests(
    path: str | None, *, count: int, seed: int, output_len: int | None, prompt: str
) -> list[TextRequest]:
    """Messages with local images: of a folder, each with `prompt`; or of a JSONL file with {"image": FILE or
    "images": [FILE, ...], "prompt": TEXT}, whose files lie beside it.

    Raises:
        ConfigError: there are none.
    """
    if path is not None and Path(path).expanduser().is_dir():
        files = sorted(each for each in Path(path).expanduser().iterdir() if each.suffix.lower() in IMAGE_TYPES)
        lines: list[dict[str, Any]] = [{"images": [str(each)]} for each in files]
        folder = Path()
    else:
        lines, folder = list(_read_objects(path, "custom-mm")), Path(str(path)).expanduser().parent
    requests = []
    for line in lines:
        named = line.get("images", [line["image"]] if "image" in line else [])
        parts = tuple(_file_part(folder / str(each)) for each in named)
        text = str(line.get("prompt", prompt))
        requests.append(TextRequest(prompt=text, output_len=line.get("output_tokens", output_len), parts=parts))
    return _sampled(requests, count, seed, path)


def _file_part(path: Path) -> dict[str, Any]:
    kind = IMAGE_TYPES.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"{path} is no image that is known here ({' '.join(IMAGE_TYPES)})", field="dataset_path")
    try:
        return _image_part(kind, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="dataset_path") from None
