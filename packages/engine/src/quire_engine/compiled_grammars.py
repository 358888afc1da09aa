"""`CompiledGrammars`: constraints that an engine has compiled, so that another one need not try them first."""

from __future__ import annotations

import msgspec

from quire_engine.messages import AddRequest
from quire_interfaces import GrammarSpec

__all__ = ["CompiledGrammars"]

MOST = 256


class CompiledGrammars:
    """Those of the last requests that got tokens by one, of one engine or of several with the same vocabulary."""

    def __init__(self) -> None:
        self._specs: dict[GrammarSpec, None] = {}

    def note(self, request: AddRequest) -> None:
        """A request has got a token."""
        params = request.sampling_params.structured_outputs
        if params is None:
            return
        spec = params.spec()
        self._specs.pop(spec, None)
        self._specs[spec] = None
        if len(self._specs) > MOST:
            del self._specs[next(iter(self._specs))]

    def marked(self, request: AddRequest) -> AddRequest:
        """The request as it is sent to an engine: it says whether its constraint was compiled before."""
        params = request.sampling_params.structured_outputs
        if params is None or params.spec() not in self._specs:
            return request
        return msgspec.structs.replace(request, grammar_was_compiled=True)
