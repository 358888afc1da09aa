"""What is wrong with a medium, said before anybody knows where in the request it stands."""

from __future__ import annotations

from quire_interfaces import RequestError

__all__ = ["MediaError"]


class MediaError(RequestError):
    """One image, video or sound cannot be used; the request that holds it fails, and nothing else.

    Args:
        message: What is wrong, as a sentence without its beginning: the medium.
        param: Part of the request, as the API names it ("messages[1].content[0]").
        code: Machine-readable reason: "invalid_media", "media_too_large", "too_many_media", "unsupported_media",
            "media_not_allowed", "media_fetch_failed", "media_processing_failed", "media_not_cached".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_media") -> None:
        super().__init__(message, param=param, code=code)

    def at(self, param: str | None) -> MediaError:
        """The error with the name of the part of the request."""
        message = str(self) if param is None else f"{param}: {self}"
        return MediaError(message, param=param, code=self.code)
