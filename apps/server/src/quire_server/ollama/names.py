"""Names of models as Ollama's clients write them: a name without a tag is that with the tag "latest"."""

from __future__ import annotations

from quire_server.context import ServerContext

__all__ = ["LATEST", "own_name"]

LATEST = ":latest"


def own_name(context: ServerContext, name: str | None) -> str | None:
    """The name under which this server knows the model.

    Args:
        context: Of the server.
        name: As the client writes it.
    """
    if not name:
        return None
    known = {*context.model_names, *context.adapters, context.pooling_model}
    if name in known:
        return name
    other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
    return other if other in known else name
