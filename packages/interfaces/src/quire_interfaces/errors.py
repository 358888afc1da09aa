"""The one error tree of Quire. Every error a user can meet says what was wrong, with which value, and what to do.

    QuireError
    ├── ConfigError              a setting, flag or combination of settings that cannot work (start-up)
    │   └── NotEnoughMemoryError the plan does not fit into the memory that is free now
    ├── CheckpointError          a model folder that is missing, incomplete or not understood (start-up)
    ├── RequestError             this one request is wrong; the engine is fine      -> HTTP 400
    │   ├── ContextLengthError   prompt (plus max_tokens) does not fit the context  -> HTTP 400
    │   └── ModelNotFoundError   no such model is served                            -> HTTP 404
    ├── OverloadedError          a bounded queue is full; try again later           -> HTTP 429
    ├── RequestAbortedError      the request was cancelled before it finished
    └── EngineDeadError          the engine process is gone; carries the cause      -> HTTP 503
        └── RankDeadError        one of its ranks is gone; carries rank and cause   -> HTTP 503

`assert` is for our own bugs only; bad input never reaches one.
"""

from __future__ import annotations

import reprlib
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "EngineDeadError",
    "ModelNotFoundError",
    "NotEnoughMemoryError",
    "OverloadedError",
    "QuireError",
    "RankDeadError",
    "RequestAbortedError",
    "RequestError",
    "wrong_value",
]


class QuireError(Exception):
    """Root of the tree; catch this to catch everything Quire raises on purpose."""


class ConfigError(QuireError):
    """A setting or a combination of settings cannot work.

    Args:
        message: What was wrong, with the value, and what to do.
        field: Name of the setting, if it is one setting.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotEnoughMemoryError(ConfigError):
    """The settings ask for more memory than is free now."""


class CheckpointError(QuireError):
    """A model folder is missing, incomplete or not understood."""


class RequestError(QuireError):
    """One request is wrong; the engine and all other requests are fine.

    Args:
        message: What was wrong, with the value, and what to do.
        param: The request field at fault, as the API names it ("temperature", "messages[2].content").
        code: A machine-readable reason in snake_case.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def wrong_value(param: str, value: Any, must: str) -> RequestError:
    """An error for a request whose field `param` has a wrong value; `must` ends the sentence "`param` must ..."."""
    return RequestError(f"{param} must {must}, got {reprlib.repr(value)}", param=param)


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, does not fit the model's context.

    Args:
        message: What was wrong, with the value, and what to do.
        param: The request field at fault.
        code: Where another bound than the context's was met.
        num_prompt_tokens: Tokens of the prompt; None where they were not counted.
        max_model_len: Tokens that the context holds; None where it was not asked.
        max_tokens: Tokens of output that were asked for; None for as many as fit.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = "prompt",
        code: str = "context_length_exceeded",
        num_prompt_tokens: int | None = None,
        max_model_len: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens


class ModelNotFoundError(RequestError):
    """The named model is not served here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class OverloadedError(QuireError):
    """A bounded queue is full.

    Args:
        message: Which queue, its bound, and what to do.
        retry_after_s: Honest estimate of when it is worth trying again, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAbortedError(QuireError):
    """The request was cancelled before it finished."""


class EngineDeadError(QuireError):
    """The engine process is gone; the message carries its own cause and remedy.

    Args:
        message: Cause and remedy.
        is_wrong_setting: The engine refused a setting when it started; starting it again changes nothing.
    """

    def __init__(self, message: str, *, is_wrong_setting: bool = False) -> None:
        super().__init__(message)
        self.is_wrong_setting = is_wrong_setting


class RankDeadError(EngineDeadError):
    """A rank of a group ended, failed or left, so that no collective of the group can be completed any more.

    Args:
        rank: The rank that is gone, by its number in the group.
        cause: What ended it, as part of a sentence ("its process ended").
        signal: Name of the signal that ended its process, e.g. "SIGKILL"; None where none did, or nobody knows.
    """

    def __init__(self, rank: int, cause: str, signal: str | None = None) -> None:
        super().__init__(f"rank {rank} is gone: {cause}; start the engine again")
        self.rank = rank
        self.cause = cause
        self.signal = signal
