"""A tokenizer.json, through the `tokenizers` library.

Knows the library and the settings of tokenizer_config.json that change what is encoded; the text side of decoding is
in token_pieces.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quire_interfaces import CheckpointError
from quire_renderers.literal_text import LiteralEncoder
from quire_renderers.pair_template import PairTemplate
from quire_renderers.part_of_text import PartOfText
from quire_renderers.segments import SegmentBorders
from quire_renderers.token_pieces import TokenPieces, pieces_from_decoder
from quire_renderers.tokenizer_classes import bert_normalizer, has_token_types, prefix_space, surrounding_tokens
from quire_renderers.tokenizer_files import AddedTokenSpec, TokenizerFiles

__all__ = ["FastTokenizer"]

logger = logging.getLogger(__name__)

LONG_TEXT_CHARS = 20_000
"""From this length on it pays to encode without holding the GIL."""


class FastTokenizer:
    """`quire_interfaces.Tokenizer` over a `tokenizers.Tokenizer`. Thread-safe; encoding long texts releases the GIL.

    Args:
        backend: The library's tokenizer; owned (and changed) by this object from now on.
        files: What the files beside it say.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        self.files = files
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        if files.settings.get("split_special_tokens"):
            backend.encode_special_tokens = True
        _replace_settings(backend, files)
        if getattr(backend.model, "dropout", None):  # which is for training: a text would have other ids each time
            backend.model.dropout = None
        # Once special, a token is left out of texts, whatever later flags say: so `tokenizers` has it.
        special_ids = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        _take_added_tokens(backend, files)
        added = backend.get_added_tokens_decoder()
        self.vocab_size = _vocab_size(backend, added)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_ids = _eos_token_ids(files, self._named_id("eos_token"))
        special_ids |= {token_id for token_id, token in added.items() if token.special}
        tokens = [backend.id_to_token(token_id) for token_id in range(self.vocab_size)]
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self.pieces: TokenPieces | None = pieces_from_decoder(tokens, special_ids, decoder)
        self.borders = SegmentBorders([] if backend.encode_special_tokens else map(_spec, added.values()))
        self.part_of_text = PartOfText(backend, self.encode_segment, [token.content for token in added.values()])
        self._prefix_ids, self._suffix_ids = self._special_ids_around()

    @classmethod
    def from_file(cls, path: Path, files: TokenizerFiles) -> FastTokenizer:
        """Load a tokenizer.json.

        Raises:
            CheckpointError: the library cannot read the file.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not a tokenizer this version of tokenizers reads: {error}") from error
        return cls(backend, files)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; added tokens written in the text are recognized."""
        token_ids = self.encode_segment(text)
        return self.wrap_special_tokens(token_ids) if add_special_tokens else token_ids

    def encode_segment(self, text: str) -> list[int]:
        """Token ids of a part of a text, without tokens around it; added tokens written in it are recognized."""
        if len(text) < LONG_TEXT_CHARS:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        else:  # this one releases the GIL while it works
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def wrap_special_tokens(self, token_ids: list[int]) -> list[int]:
        """The ids with the tokens that `add_special_tokens` puts around a text."""
        return [*self._prefix_ids, *token_ids, *self._suffix_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary add nothing."""
        if self.pieces is not None:
            return self.pieces.decode(token_ids, skip_special_tokens=skip_special_tokens)
        inside = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        text: str = self._backend.decode(inside, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to a text; empty outside the vocabulary."""
        if self.pieces is not None:
            return self.pieces.piece_bytes(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def id_to_token(self, token_id: int) -> str:
        """Token as the vocabulary spells it; empty outside the vocabulary."""
        return (self._backend.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def token_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """Per token of `encode`: where it stands in the text, as (begin, end) in characters; (0, 0) for tokens that
        were put around the text."""
        encoded: list[tuple[int, int]] = self._backend.encode(text, add_special_tokens=False).offsets
        if not add_special_tokens:
            return encoded
        return [*[(0, 0)] * len(self._prefix_ids), *encoded, *[(0, 0)] * len(self._suffix_ids)]

    @property
    def matched_tokens(self) -> list[AddedTokenSpec]:
        """Added tokens that are matched where a text holds their content."""
        splits = self._backend.encode_special_tokens
        added = self._backend.get_added_tokens_decoder().values()
        return [_spec(token) for token in added if not (splits and token.special)]

    def literal_normalizer(self, control_tokens: Collection[str]) -> Callable[[str], str] | None:
        """Normalization of texts before control tokens are looked for; None where none can make one appear."""
        if self._backend.normalizer is None:
            return None
        normalize: Callable[[str], str] = self._backend.normalizer.normalize_str
        for text in control_tokens:
            wide = "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text)
            known = {normalize(text), text}
            if any(variant != text and normalize(variant) in known for variant in (wide, text.upper(), text.lower())):
                return normalize
        return None

    def literal_encoder(self, control_tokens: Collection[str], mark: str) -> Callable[[str], list[int]]:
        """Encoder of texts in which control tokens that the mark breaks are ordinary text."""
        return LiteralEncoder(self._backend, control_tokens, mark).encode

    @functools.cached_property
    def pair_template(self) -> PairTemplate | None:
        """How the post-processor writes a pair, with token types where networks get them; None where it puts nothing
        between two texts."""
        encoding = self._backend.encode("a", "a", add_special_tokens=True)
        ids, types, mask = list(encoding.ids), list(encoding.type_ids), list(encoding.special_tokens_mask)
        inside = [place for place, special in enumerate(mask) if not special]
        num_own = len(self._backend.encode("a", add_special_tokens=False).ids)
        if len(inside) != 2 * num_own or num_own == 0 or len(inside) == len(ids):
            return None
        first_end, second_start = inside[num_own - 1] + 1, inside[num_own]
        has_types = 1 in types and has_token_types(self.files.settings)
        start = types.index(1) - first_end if has_types else None
        middle = tuple(ids[first_end:second_start])
        return PairTemplate(tuple(ids[: inside[0]]), middle, tuple(ids[inside[-1] + 1 :]), start)

    def _named_id(self, name: str) -> int | None:
        spec = self.files.named_tokens.get(name)
        if spec is None:
            return None
        token_id: int | None = self._backend.token_to_id(spec.content)
        return token_id

    def _special_ids_around(self) -> tuple[list[int], list[int]]:
        """What add_special_tokens puts before and after a text: what the post-processor of tokenizer.json does, unless
        the class is one that writes it anew (`quire_renderers.tokenizer_classes`)."""
        prefix, suffix = self._ids_of_post_processor()
        kind = surrounding_tokens(self.files.settings, str(self.files.folder / "tokenizer_config.json"))
        if kind is None:
            return prefix, suffix
        bos, eos = kind.bos, kind.eos
        if bos is None and kind.bos_by_default and not (prefix or suffix or self._has_template()):
            bos = True
        if bos is not None:
            prefix = self._ids_of("bos_token", kind.bos_token) if bos else []
        if eos is not None:
            suffix = self._ids_of("eos_token", kind.eos_token) if eos else []
        return prefix, suffix

    def _ids_of(self, name: str, default: str) -> list[int]:
        spec = self.files.named_tokens.get(name)
        if spec is None and name in self.files.settings:  # null: there is none
            return []
        token_id = self._backend.token_to_id(default if spec is None else spec.content)
        return [] if token_id is None else [token_id]

    def _ids_of_post_processor(self) -> tuple[list[int], list[int]]:
        encoding = self._backend.encode("a", add_special_tokens=True)
        mask: list[int] = encoding.special_tokens_mask
        inside = [i for i, special in enumerate(mask) if not special]
        if not inside:
            return list(encoding.ids), []
        return list(encoding.ids[: inside[0]]), list(encoding.ids[inside[-1] + 1 :])

    def _has_template(self) -> bool:
        """Whether the post-processor says which tokens there are, be it none; others know nothing of such tokens."""
        processor = self._backend.post_processor
        return processor is not None and '"TemplateProcessing"' in processor.__getstate__().decode()


def _spec(token: Any) -> AddedTokenSpec:
    """A token of the library, as a value."""
    return AddedTokenSpec(**{field.name: getattr(token, field.name) for field in dataclasses.fields(AddedTokenSpec)})


def _replace_settings(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Settings of the normalizer and the pre-tokenizer that are those of tokenizer_config.json for some classes."""
    replaced, normalizer = bert_normalizer(files.settings), backend.normalizer
    if replaced is not None and isinstance(normalizer, tokenizers.normalizers.BertNormalizer):
        clean_text = json.loads(normalizer.__getstate__())["clean_text"]
        backend.normalizer = tokenizers.normalizers.BertNormalizer(clean_text=clean_text, **replaced)
    space, pre_tokenizer = prefix_space(files.settings), backend.pre_tokenizer
    if space is not None and isinstance(pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel):
        pre_tokenizer.add_prefix_space = space
        backend.pre_tokenizer = pre_tokenizer


def _take_added_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Tokens of the files beside tokenizer.json, in the order of their ids: those that it lacks, and those that it has
    with other flags, which give way."""
    present = {token_id: _spec(token) for token_id, token in backend.get_added_tokens_decoder().items()}
    specs = dict(files.added_tokens)
    if "added_tokens_decoder" not in files.settings:  # what an old folder's files say does not outweigh tokenizer.json
        named = {spec.content for spec in files.named_tokens.values()}
        specs |= {
            token_id: dataclasses.replace(spec, special=spec.special or spec.content in named)
            for token_id, spec in present.items()
        }
    known = set(present.values())
    new = {token_id: spec for token_id, spec in sorted(specs.items()) if spec not in known}
    contents = {spec.content for spec in (*known, *specs.values())}
    more: list[AddedTokenSpec] = []
    for spec in (*files.named_tokens.values(), *files.extra_special_tokens):
        if spec.content not in contents:
            contents.add(spec.content)
            more.append(dataclasses.replace(spec, special=True))
    backend.add_tokens([tokenizers.AddedToken(**dataclasses.asdict(spec)) for spec in (*new.values(), *more)])
    for token_id, spec in new.items():
        actual_id = backend.token_to_id(spec.content)
        if token_id != actual_id:
            logger.warning(
                "%s gives %r the id %d, but with tokenizer.json it is %s; going on with the latter",
                files.folder / "tokenizer_config.json",
                spec.content,
                token_id,
                actual_id,
            )


def _vocab_size(backend: tokenizers.Tokenizer, added: dict[int, Any]) -> int:
    # Ids may have holes, so the count of tokens is only a lower bound.
    size = int(backend.get_vocab_size(with_added_tokens=True))
    if backend.id_to_token(size - 1) is None or backend.id_to_token(size) is not None:
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return max(size, max(added, default=-1) + 1)


def _eos_token_ids(files: TokenizerFiles, eos_token_id: int | None) -> tuple[int, ...]:
    ids = list(files.model_eos_token_ids)
    if eos_token_id is not None:
        ids.append(eos_token_id)
    return tuple(dict.fromkeys(ids))
