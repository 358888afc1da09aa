"""IO-processor plug-ins: requests and answers of other shapes for POST /pooling, by packages of their own.

A plug-in is a class in the entry-point group `quire.io_processors`; `--io-processor-plugin NAME` starts it. Of a body
{"task": "plugin", "data": ...} it makes prompts, and of what the model pools of them the answer's `data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire_engine import EngineInfo
from quire_interfaces import PoolingParams
from quire_interfaces.plugins import named_plugin

__all__ = ["ENTRY_POINT_GROUP", "IOProcessor", "load_io_processor"]

ENTRY_POINT_GROUP = "quire.io_processors"


class IOProcessor(Protocol):
    """What a plug-in does. It is made once, as `Class(info)`; its methods run in worker threads, several at a time.

    ValueError and TypeError that `parse_data` or `pre_process` raise are answered with 400 and their text.
    """

    def __init__(self, info: EngineInfo) -> None: ...

    def parse_data(self, data: Any) -> Any:
        """The `data` of a request, checked; whatever the other methods read.

        Args:
            data: As it is in the body's JSON.
        """

    def pre_process(self, data: Any) -> Sequence[str | list[int] | tuple[str, str]]:
        """What the model reads: texts, token ids or pairs of texts, at least one.

        Args:
            data: What `parse_data` gave.
        """

    def pooling_params(self, data: Any, params: PoolingParams) -> PoolingParams:
        """What to pool of each prompt.

        Args:
            data: What `parse_data` gave.
            params: Of the body's fields, without a task, which is then the model's first.
        """

    def post_process(self, data: Any, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> Any:
        """The answer's `data`, as values that JSON has.

        Args:
            data: What `parse_data` gave.
            outputs: One per prompt, in their order.
        """


def load_io_processor(name: str) -> type[IOProcessor]:
    """The class of an installed plug-in.

    Raises:
        ConfigError: none of this name is installed, or it cannot be imported; field `io_processor_plugin`.
    """
    plugin = named_plugin(ENTRY_POINT_GROUP, name, field="io_processor_plugin")
    processor: type[IOProcessor] = plugin.load(type, field="io_processor_plugin")
    return processor
