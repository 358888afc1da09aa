"""What models that hear in conversations (Qwen2-Audio, Qwen3-ASR, GLM-ASR, ...) are asked so that they transcribe, and
how their answers are read. Those that hear alone (Moonshine, its streaming kind, Canary, Cohere ASR) get the sound.
Knows no engine.

Each family is asked as Transformers' processor of it does (`apply_transcription_request`), or as its model card says.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import quire_multimodal  # its names are loaded when they are used
from quire.media import MediaPart
from quire.speech.sounds import extractor_settings
from quire_interfaces import CheckpointError, Modality, RequestError, SamplingParams, Tokenizer, wrong_value
from quire_speech import LANGUAGES, Segment, TranscriptionOptions, language_code

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["RATE", "SpeechQuestion", "SpeechQuestions", "check_window", "compression_ratio", "is_unspaced"]

RATE = 16_000
"""Samples a second of what is asked about."""
_WINDOW_S = 30.0
_SHORTEST_S = 0.6
"""Shortest bound of a chunk: a little more than that of a turn (`VoiceSettings.max_speech_s`)."""
_MAX_TOKENS = 448
"""More than anybody says in half a minute."""
_QUESTION = "Transcribe the speech word for word. Answer with the text alone."
_QUESTIONS = {
    "audioflamingo3": "Transcribe the input speech.",
    "glmasr": "Please transcribe this audio into text",
    "granite_speech": "can you transcribe the speech into a written format?",
    "granite_speech_plus": "can you transcribe the speech into a written format?",
    "phi4_multimodal": "Transcribe the audio clip into text.",
}
"""model_type -> its own question."""
_TRANSLATION = "Translate the speech into {}. Answer with the translation alone."
_TRANSLATIONS = dict.fromkeys(("granite_speech", "granite_speech_plus"), "translate the speech to {}")
"""model_type -> its own question, with a place for the language."""
_SOUND_ALONE = frozenset({"moonshine", "moonshine_streaming", "canary", "cohere_asr"})
"""Types whose encoder reads the sound and whose decoder writes what is said: there is nothing to ask."""
_HEARS_ALONE = _SOUND_ALONE | {"voxtral_realtime"}
"""Types that nothing can be told beside the sound."""
_TOKEN_LANGUAGES = {
    "canary": frozenset("bg cs da de el en es et fi fr hr hu it lt lv mt nl pl pt ro ru sk sl sv uk".split()),
    "cohere_asr": frozenset("ar de el en es fr it ja ko nl pl pt vi zh".split()),
}
"""Types of them whose decoder begins with tokens that say what is to be done -> the languages that it knows."""
_CONTEXTS = {"moonshine": 512, "moonshine_streaming": 4096, "canary": 1024, "cohere_asr": 1024}
"""Type -> tokens of its decoder's context, where config.json does not say."""
_DEFAULT_LANGUAGE = "en"
"""Theirs, where none is given: they do not hear which it is."""
_SOUND_LAST = frozenset({"audioflamingo3"})
"""Types whose sound stands behind the question."""
_BY_TEMPLATE = frozenset({"fun_asr_nano", "moss_transcribe_diarize"})
"""Types whose chat template has the question, where a message holds nothing but a sound."""
_UNSPACED = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km"})
"""Codes of languages that write no spaces between sentences."""
_QWEN_TEXT = "<asr_text>"
"""Qwen3-ASR writes `language English<asr_text>` before the text."""
_FUN_ASR_LANGUAGES = {"zh": "中文", "en": "英文", "ja": "日文"}
"""Code -> what Fun-ASR's chat template is told, in a part of the message."""
_WITH_LANGUAGE = (
    "{%- set messages = [{'role': 'user', 'content': messages[0].content | list "
    "+ [{'type': 'language', 'language': language}]}] -%}"
)
"""In front of its template."""
_NO_CONTEXT = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in SentencePiece's spelling."""
_REQUEST_TEMPLATES = {
    "voxtral": (
        "{{ bos_token }}[INST]{% for part in messages[0].content %}"
        "{{ '[AUDIO]' if part.type == 'audio' else part.text }}{% endfor %}[/INST]"
        "{{ 'lang:' ~ language if language else '' }}[TRANSCRIBE]"
    ),
    "voxtral_realtime": "{{ bos_token }}[STREAMING_PAD]",
}
"""model_type -> chat template of a request to transcribe, which stands in the place of a question: mistral-common's
`TranscriptionRequest`. Voxtral's has room for a language, not for words that may come."""


class SpeechQuestion(NamedTuple):
    """What is asked about a chunk of speech."""

    messages: list[dict[str, Any]]
    is_begun: bool = False
    """Whether the conversation ends with the beginning of the answer."""
    chat_template: str | None = None
    """In the place of the model's own; None for that."""
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    """A prompt in the place of a conversation; None for that."""

    @property
    def render_options(self) -> dict[str, Any]:
        """Arguments with which the conversation is rendered."""
        return {
            "add_generation_prompt": not self.is_begun,
            "continue_final_message": self.is_begun,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class SpeechQuestions:
    """Questions for one model.

    Args:
        folder: Of the checkpoint, whose config.json says which model it is.
        tokenizer: Its tokenizer.
        longest_s: Seconds of the longest sound that the engine reads at once.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, longest_s: float = _WINDOW_S) -> None:
        config = _read_json(folder / "config.json")
        self._model_type, self._tokenizer = str(config.get("model_type")), tokenizer
        self._folder = folder
        self._max_tokens = _MAX_TOKENS
        """Of a window, where the request names no bound."""
        self._most_tokens: int | None = None
        """That a request may name; more become so many. None where a wrong one is refused."""
        chunk_s = float(extractor_settings(folder).get("chunk_length") or _WINDOW_S)
        self.window_s = min(_WINDOW_S, chunk_s, longest_s)
        """Longest chunk that one question is about."""
        if self._model_type in _SOUND_ALONE:  # its context is that of a window
            decoder = config.get("decoder_config") or config
            context = int(decoder.get("max_position_embeddings") or _CONTEXTS[self._model_type])
            self._most_tokens = context - len(self._request_tokens(TranscriptionOptions())) - 1

    @property
    def can_translate(self) -> bool:
        """Whether the model can be asked to write another language than that of the sound."""
        return self._model_type not in _HEARS_ALONE or self._model_type == "canary"

    def check(self, options: TranscriptionOptions, model: str) -> None:
        """Raises RequestError where options are for models of other kinds."""
        check_window(self.window_s, model)
        if self._model_type in _HEARS_ALONE:
            if options.task == "translate" and not self.can_translate:
                raise RequestError(f"{model} does not translate", param="task", code="unsupported")
            self._request_tokens(options)  # which refuses languages
            for name in ("prompt", "hotwords"):
                if getattr(options, name):
                    raise RequestError(
                        f"{model} reads nothing but sound; leave {name} out", param=name, code="unsupported"
                    )
        self._fun_asr_language(options)  # which refuses others
        if options.language and self._model_type in _REQUEST_TEMPLATES:
            language_code(options.language)  # which refuses unknown ones
        if options.word_timestamps:
            raise RequestError(
                f"{model} tells no times of words; leave timestamp_granularities at segment",
                param="timestamp_granularities",
                code="unsupported",
            )
        if options.logprobs:
            raise RequestError(
                f"{model} tells no log probabilities; leave include out", param="include", code="unsupported"
            )
        if options.beam_size > 1:
            raise RequestError("beams are for models of Whisper's kind; leave them out", param="n", code="unsupported")

    def ask(self, samples: NDArray[np.float32], options: TranscriptionOptions) -> SpeechQuestion:
        """The question about samples [S]. Raises RequestError where the language is not known."""
        if self._model_type in _SOUND_ALONE:
            prompt: dict[str, Any] = {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (samples, RATE)}}}
            if tokens := self._request_tokens(options):
                prompt["decoder_prompt"] = {"prompt_token_ids": [self._token_id(each) for each in tokens]}
            return SpeechQuestion([], prompt=prompt)
        source = quire_multimodal.MediaSource(modality=Modality.AUDIO, value=(samples, RATE), param="file")
        sound = {"type": "audio", "source": MediaPart(source)}
        language = _name(options.language or "")
        context = " ".join(each for each in (options.prompt, options.hotwords) if each)
        if self._model_type == "qwen3_asr" and options.task == "transcribe":
            messages: list[dict[str, Any]] = [{"role": "system", "content": context}] if context else []
            messages.append({"role": "user", "content": [sound]})
            if language:
                messages.append({"role": "assistant", "content": f"language {language}{_QWEN_TEXT}"})
            return SpeechQuestion(messages, is_begun=bool(language))
        template = _REQUEST_TEMPLATES.get(self._model_type)
        if template is not None and options.task == "transcribe" and not context:
            code = language_code(options.language) if options.language else ""
            return SpeechQuestion(
                [{"role": "user", "content": [sound]}],
                chat_template=template,
                chat_template_kwargs={"language": code},
            )
        told = self._fun_asr_language(options)
        question = "" if self._model_type in _BY_TEMPLATE else _QUESTIONS.get(self._model_type, _QUESTION)
        if options.task == "translate":
            question = _TRANSLATIONS.get(self._model_type, _TRANSLATION).format(LANGUAGES[options.to_language].title())
        if language and question:
            question += f"{'' if question[-1] in '.?' else '.'} The speech is in {language}."
        if context:
            question = f"{question} These words may occur in it: {context}" if question else context
        content = [sound, {"type": "text", "text": question}] if question else [sound]
        return SpeechQuestion(
            [{"role": "user", "content": content[::-1] if self._model_type in _SOUND_LAST else content}],
            chat_template=_WITH_LANGUAGE + _chat_template(self._folder) if told else None,
            chat_template_kwargs={"language": told} if told else None,
        )

    def _fun_asr_language(self, options: TranscriptionOptions) -> str:
        """What the template of Fun-ASR is told of the language; empty for other models and where none is given. Raises
        RequestError for one that it does not know."""
        if self._model_type != "fun_asr_nano" or not options.language or options.task == "translate":
            return ""
        told = _FUN_ASR_LANGUAGES.get(language_code(options.language))
        if told is None:
            known = ", ".join(_FUN_ASR_LANGUAGES)
            raise wrong_value("language", options.language, f"be one of those that the model is told: {known}")
        return told

    def _request_tokens(self, options: TranscriptionOptions) -> list[str]:
        """What the decoder begins with: NeMo's prompt "canary2" with a feeling that is not known, punctuation, and
        neither times nor speakers; empty for the start token alone. Raises RequestError for a language that the model
        does not know."""
        known = _TOKEN_LANGUAGES.get(self._model_type)
        if known is None:
            return []
        code = language_code(options.language or _DEFAULT_LANGUAGE)
        written = options.to_language if options.task == "translate" else code
        for name, each in (("language", code), ("to_language", written)):
            if each not in known:
                rule = f"be one of those that the model knows: {', '.join(sorted(known))}"
                raise wrong_value(name, each, rule)
        return [
            *([_NO_CONTEXT] if self._model_type == "cohere_asr" else []), "<|startofcontext|>", "<|startoftranscript|>",
            "<|emo:undefined|>", f"<|{code}|>", f"<|{written}|>", "<|pnc|>", "<|noitn|>", "<|notimestamp|>",
            "<|nodiarize|>",
        ]  # fmt: skip

    def _token_id(self, text: str) -> int:
        """Id of the token that the vocabulary spells so."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and tokenizer.id_to_token(ids[0]) == text:
            return ids[0]
        found = next((each for each in range(tokenizer.vocab_size) if tokenizer.id_to_token(each) == text), None)
        if found is None:
            raise CheckpointError(
                f"the tokenizer has no token {text!r}, with which a request to transcribe begins; take the tokenizer "
                "of the model's makers"
            )
        return found

    def params(self, options: TranscriptionOptions) -> SamplingParams:
        """How answers are written."""
        max_tokens = options.max_tokens or self._max_tokens
        if self._most_tokens is not None:
            max_tokens = min(max_tokens, self._most_tokens)
        return SamplingParams(
            temperature=options.temperatures[0],
            max_tokens=max_tokens,
            seed=options.seed,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logprobs=0,
        )

    def read(self, text: str) -> tuple[str, str]:
        """The text of an answer, and its language where the request gave none; empty where it is not known."""
        language = ""
        if self._model_type == "qwen3_asr" and _QWEN_TEXT in text:
            named, _, text = text.partition(_QWEN_TEXT)
            language = named.removeprefix("language").strip()
        if self._model_type in _TOKEN_LANGUAGES:
            language = _DEFAULT_LANGUAGE
        return text.strip(), language

    def segment(
        self,
        index: int,
        start_s: float,
        num_samples: int,
        text: str,
        token_ids: tuple[int, ...],
        logprob: float,
        options: TranscriptionOptions,
        language: str,
    ) -> Segment:
        """A chunk of so many samples with its text, `index`th of its recording.

        Args:
            logprob: Of all tokens.
            language: Code or name of what is spoken; empty where it is not known.
        """
        written = options.to_language if options.task == "translate" else options.language or language
        space = "" if is_unspaced(written) else " "
        return Segment(
            index=index,
            seek_s=start_s,
            start_s=start_s,
            end_s=start_s + num_samples / RATE,
            text=f"{space}{text}" if text else "",
            token_ids=token_ids,
            temperature=options.temperatures[0],
            avg_logprob=logprob / max(len(token_ids), 1),
            compression_ratio=compression_ratio(text),
            no_speech_prob=0.0,
        )


def check_window(window_s: float, model: str) -> None:
    """Raises RequestError where the longest chunk of a request is too short for speech."""
    if window_s < _SHORTEST_S:
        raise RequestError(
            f"{model} reads at most {window_s:.3g} s of sound at once here, and speech takes at least {_SHORTEST_S:g} "
            "s: start it with a larger --max-num-batched-tokens or --max-model-len",
            param="model",
            code="unsupported",
        )


def is_unspaced(language: str) -> bool:
    """Whether a language, by its code or English name, writes no spaces between sentences."""
    return _known_code(language) in _UNSPACED


def _name(language: str) -> str:
    """The English name of a language that is given by it or by its code; any other as it is, with a capital letter."""
    return LANGUAGES.get(_known_code(language), language).title()


def _known_code(language: str) -> str:
    """The code of a language; empty where Whisper does not know it."""
    with contextlib.suppress(RequestError):
        return language_code(language)
    return ""


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _chat_template(folder: Path) -> str:
    """Of a checkpoint; empty where it has none."""
    single = folder / "chat_template.jinja"
    if single.is_file():
        return single.read_text(encoding="utf-8")
    return str(_read_json(folder / "tokenizer_config.json").get("chat_template") or "")


def compression_ratio(text: str) -> float:
    """Bytes of a text divided by those after zlib; 0 for no text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
