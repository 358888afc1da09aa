"""`PipelineRule`: the requests of an engine of which several steps are on their way through stages at once."""

from __future__ import annotations

from quire_interfaces import AdmissionRule, ConfigError, Request, SchedulerOutput

__all__ = ["PipelineRule"]


class PipelineRule(AdmissionRule):
    """A request whose next token is on its way through the stages waits for it, so that no stage does; and a step takes
    no more decodes than leave as many for the steps beside it.

    Args:
        num_steps: Number of steps that may be on their way.

    Raises:
        ConfigError: `num_steps` is below 1.
    """

    name = "pipeline"
    holds_queue = False

    def __init__(self, num_steps: int) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, got {num_steps!r}", field="pipeline_parallel_size")
        self._num_steps = num_steps
        self._num_running = 0
        self._decoding: set[str] = set()
        """Requests that decode in the step that is planned."""

    def admitted(self, request: Request) -> None:
        """Count the request."""
        self._num_running += 1

    def released(self, request: Request) -> None:
        """Count it no longer."""
        self._num_running -= 1
        self._decoding.discard(request.request_id)

    @property
    def is_watching(self) -> bool:
        """Always: each request is asked about."""
        return True

    def defers(self, request: Request) -> bool:
        """Whether its last token is on its way, or the step has its share of decodes."""
        if request.num_in_flight_tokens:
            return True
        if not request.output_token_ids or request.request_id in self._decoding:
            return False
        if len(self._decoding) >= -(-self._num_running // self._num_steps):
            return True
        self._decoding.add(request.request_id)
        return False

    def step_planned(self, output: SchedulerOutput, *, is_idle: bool) -> bool:
        """The next step has a share of its own."""
        self._decoding.clear()
        return False
