"""A sentencepiece tokenizer.model without a tokenizer.json, through the `sentencepiece` library.

Knows the library, added tokens around it, and the dummy prefix. The pieces, scores and normalization are the model
file's own business, so the ids are those of the model's makers: a text that begins with a space keeps it besides the
dummy prefix (recent `transformers` releases fold the two into one).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from quire_interfaces import CheckpointError
from quire_renderers.segments import SegmentBorders
from quire_renderers.token_pieces import SPACE_MARK, LeadingSpace, TokenPieces
from quire_renderers.tokenizer_files import AddedTokenSpec, TokenizerFiles

__all__ = ["SentencePieceTokenizer"]

# ModelProto.normalizer_spec (3) { add_dummy_prefix (3): false }, to be appended to a serialized ModelProto: parsers
# merge a repeated embedded message into the first one (protobuf encoding guide, "Last One Wins").
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer:
    """`quire_interfaces.Tokenizer` over a sentencepiece model. Thread-safe.

    The dummy prefix (a space before the first word) is put at the start of the text and after each added token; with
    `"legacy": false` in tokenizer_config.json, which files have since `transformers` 4.31, at the start of the text
    only; with `"add_prefix_space": false` nowhere.

    Args:
        model: Content of the tokenizer.model file.
        files: What the files beside it say.

    Raises:
        CheckpointError: the library does not understand the model.
    """

    def __init__(self, model: bytes, files: TokenizerFiles) -> None:
        import sentencepiece  # 45 ms of every start, and few models need it

        self.files = files
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=model + _NO_DUMMY_PREFIX)
        except RuntimeError as error:
            raise CheckpointError(f"{files.folder} holds no sentencepiece model that can be read: {error}") from error
        if files.settings.get("add_prefix_space") is False:
            self._processor = self._inner
        self._legacy = files.settings.get("legacy") is not False
        self._added = self._all_added_tokens()
        self._added_id = {spec.content: token_id for token_id, spec in self._added.items()}
        self.borders = SegmentBorders(self._added.values())
        # Every added token is matched on the raw text here; a longer one wins.
        self._matcher = SegmentBorders(AddedTokenSpec(content=text) for text in self._added_id)
        self.vocab_size = max(self._processor.get_piece_size(), max(self._added, default=-1) + 1)
        self.pieces = self._build_pieces()
        self.bos_token_id = self._model_id("bos_token", self._processor.bos_id())
        eos_token_id = self._model_id("eos_token", self._processor.eos_id())
        self.eos_token_ids = tuple(
            dict.fromkeys([*files.model_eos_token_ids, *([] if eos_token_id is None else [eos_token_id])])
        )
        bos = self.bos_token_id if files.settings.get("add_bos_token", True) else None
        eos = eos_token_id if files.settings.get("add_eos_token", False) else None
        self._prefix_ids = [] if bos is None else [bos]
        self._suffix_ids = [] if eos is None else [eos]

    @classmethod
    def from_file(cls, path: Path, files: TokenizerFiles) -> SentencePieceTokenizer:
        """Load a tokenizer.model.

        Raises:
            CheckpointError: the file is not a sentencepiece model.
        """
        return cls(path.read_bytes(), files)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; added tokens written in the text are recognized."""
        token_ids = self.encode_segment(text)
        return self.wrap_special_tokens(token_ids) if add_special_tokens else token_ids

    def encode_segment(self, text: str) -> list[int]:
        """Token ids of a part of a text, without tokens around it; added tokens written in it are recognized."""
        return self._encode_parts(text, self._encode_plain)

    @property
    def matched_tokens(self) -> list[AddedTokenSpec]:
        """Added tokens that are matched where a text holds their content."""
        return list(self._added.values())

    def literal_normalizer(self, control_tokens: Collection[str]) -> Callable[[str], str] | None:
        """None: added tokens are matched in texts as they are."""
        return None

    def literal_encoder(self, control_tokens: Collection[str], mark: str) -> Callable[[str], list[int]]:
        """Encoder of texts in which control tokens that the mark breaks are ordinary text."""
        control_ids = {self._added_id[text] for text in control_tokens} - {self._processor.unk_id()}

        def encode_plain(text: str, *, first: bool) -> list[int]:
            ids = self._encode_plain(text.replace(mark, ""), first=first)
            if control_ids.isdisjoint(ids):
                return ids
            # The model matches some by itself: they are kept apart, at the price of other pieces around them.
            head, *rest = text.split(mark)
            return self._encode_plain(head, first=first) + [
                i for part in rest for i in self._encode_plain(part, first=False)
            ]

        return lambda text: self._encode_parts(text, encode_plain)

    def _encode_parts(self, text: str, encode_plain: Callable[..., list[int]]) -> list[int]:
        """What lies between added tokens goes through `encode_plain`."""
        token_ids: list[int] = []
        parts = self._matcher.split(text)
        tokens = [self._leading_added_token(part) for part in parts]
        for index, (part, token) in enumerate(zip(parts, tokens, strict=True)):
            plain = part
            if token is not None:
                token_ids.append(self._added_id[token.content])
                plain = part[len(token.content) :]
                plain = plain.lstrip() if token.rstrip else plain
            follower = tokens[index + 1] if index + 1 < len(parts) else None
            if follower is not None and follower.lstrip:
                plain = plain.rstrip()
            token_ids += encode_plain(plain, first=token is None or self._legacy)
        return token_ids

    def wrap_special_tokens(self, token_ids: list[int]) -> list[int]:
        """The ids with the tokens that `add_special_tokens` puts around a text."""
        return [*self._prefix_ids, *token_ids, *self._suffix_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary add nothing."""
        return self.pieces.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token, U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to a text; empty outside the vocabulary."""
        return self.pieces.piece_bytes(token_id)

    def id_to_token(self, token_id: int) -> str:
        """Token as the vocabulary spells it; empty outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].content
        piece: str = self._processor.id_to_piece(token_id) if 0 <= token_id < self._processor.get_piece_size() else ""
        return piece

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        if not text:
            return []
        ids: list[int] = (self._processor if first else self._inner).encode(text)
        return ids

    def _leading_added_token(self, part: str) -> AddedTokenSpec | None:
        content = self._matcher.leading(part)
        return None if content is None else self._added[self._added_id[content]]

    def _all_added_tokens(self) -> dict[int, AddedTokenSpec]:
        """Added tokens of the files, and the model's own control tokens."""
        processor, size = self._processor, self._processor.get_piece_size()
        added: dict[int, AddedTokenSpec] = {}
        for token_id in (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()):
            if token_id >= 0:
                added[token_id] = AddedTokenSpec(content=processor.id_to_piece(token_id))
        added.update(self.files.added_tokens)
        known = {spec.content for spec in added.values()}
        for spec in (*self.files.named_tokens.values(), *self.files.extra_special_tokens):
            if spec.content in known:
                continue
            known.add(spec.content)
            token_id = processor.piece_to_id(spec.content)
            if processor.id_to_piece(token_id) != spec.content:
                token_id = max(size, max(added, default=-1) + 1)
            added[token_id] = spec
        return added

    def _model_id(self, name: str, from_model: int) -> int | None:
        spec = self.files.named_tokens.get(name)
        if spec is not None:
            return self._added_id.get(spec.content)
        return from_model if from_model >= 0 else None

    def _build_pieces(self) -> TokenPieces:
        processor, size = self._processor, self._processor.get_piece_size()
        pieces: list[str | bytes] = [""] * self.vocab_size
        special = {token_id for token_id, spec in self._added.items() if spec.special}
        for token_id in range(size):
            text = processor.id_to_piece(token_id)
            if processor.is_byte(token_id):
                byte = bytes([int(text[3:5], 16)])
                pieces[token_id] = byte.decode() if byte < b"\x80" else byte
            else:
                pieces[token_id] = text.replace(SPACE_MARK, " ")
                if processor.is_control(token_id):
                    special.add(token_id)
        for token_id, spec in self._added.items():
            pieces[token_id] = spec.content
        adds_prefix = self._processor.encode("a") != self._inner.encode("a")
        return TokenPieces(pieces, frozenset(special), LeadingSpace.STRIP_ONE if adds_prefix else LeadingSpace.KEEP)
