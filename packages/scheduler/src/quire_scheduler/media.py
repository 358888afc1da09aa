"""`MediaRule`: which images, videos and sounds towers have to read before a step, and how far prompts get without.

The scheduler is the only owner of what the runner's encoder cache holds: it names the items that a step encodes and
those that are to be forgotten, and the runner does as it is told. Sizes are counted in embeddings, the rows that an
item takes in the input of the language model.
"""

from __future__ import annotations

from collections import OrderedDict

from quire_interfaces import (
    AdmissionRule,
    ConfigError,
    MediaItem,
    MediaSpan,
    ModelRunnerOutput,
    PromptMedia,
    Request,
    RequestError,
    SchedulerOutput,
    SchedulerStats,
)

__all__ = ["EncoderCache", "MediaRule"]


class EncoderCache:
    """What the runner's encoder cache holds. Items that no running request needs stay until room is wanted, and the one
    that was used longest ago goes first.

    Args:
        capacity: Most embeddings.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_embeds = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Key -> embeddings; those that were used last come last."""
        self._users: dict[str, set[str]] = {}
        """Key -> requests that still need it; no empty sets."""

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def add(self, key: str, num_embeds: int) -> list[str] | None:
        """Take in an item that is not there, at the cost of others that nobody needs.

        Returns:
            The keys that went; None, with nothing changed, where the items that are needed leave too little room.
        """
        num_needed = self.num_embeds + num_embeds - self.capacity
        victims = []
        for victim, size in self._sizes.items():
            if num_needed <= 0:
                break
            if victim not in self._users:
                victims.append(victim)
                num_needed -= size
        if num_needed > 0:
            return None
        for victim in victims:
            self.remove(victim)
        self._sizes[key] = num_embeds
        self.num_embeds += num_embeds
        return victims

    def remove(self, key: str) -> None:
        """Take out an item, whoever needs it."""
        self.num_embeds -= self._sizes.pop(key, 0)
        self._users.pop(key, None)

    def use(self, key: str, request_id: str) -> bool:
        """A request needs an item that is there. Returns whether it did not before."""
        self._sizes.move_to_end(key)
        users = self._users.setdefault(key, set())
        is_new = request_id not in users
        users.add(request_id)
        return is_new

    def leave(self, key: str, request_id: str) -> None:
        """A request does not need an item any more; fine where it never did."""
        users = self._users.get(key)
        if users is not None:
            users.discard(request_id)
            if not users:
                del self._users[key]

    def unused_keys(self) -> list[str]:
        """The items that no request needs."""
        return [key for key in self._sizes if key not in self._users]


class MediaRule(AdmissionRule):
    """The tokens of an item are computed in a step that encodes it, or later. Of all requests, the items of at most
    `max_step_embeds` embeddings are encoded in one step; a larger one goes alone.

    Args:
        max_step_embeds: Budget of a step.
        cache_size: Most embeddings that the runner keeps; no item may have more.
        max_num_batched_tokens: Most tokens of a step.
        keeps_spans_whole: The tokens of an item look at each other in both directions, so that all of them have to be
            computed in the same step (Gemma 3).

    Raises:
        ConfigError: A number below 1.
    """

    name = "media"
    holds_queue = True

    def __init__(
        self, max_step_embeds: int, cache_size: int, max_num_batched_tokens: int, *, keeps_spans_whole: bool = False
    ) -> None:
        if min(max_step_embeds, cache_size) < 1:
            raise ConfigError(f"the encoder budget must be at least 1, got {max_step_embeds} and {cache_size}")
        self._cache = EncoderCache(cache_size)
        self._max_step_embeds = max_step_embeds
        self._max_num_batched_tokens = max_num_batched_tokens
        self._keeps_spans_whole = keeps_spans_whole
        self._encode: list[MediaItem] = []
        """For the step that is being planned."""
        self._freed: list[str] = []
        self._num_step_embeds = 0
        self._pending: Request | None = None
        """The waiting request that was asked about last."""
        self._readers: dict[str, tuple[MediaSpan, ...]] = {}
        """Request -> its media, of those that may compute some of their tokens in the step that is being planned."""
        self._counters = SchedulerStats()

    def check(self, request: Request) -> None:
        """Let a request pass whose items can be encoded, and whose tokens can be computed in as few steps as they want.

        Raises:
            RequestError: An item, or the prompt, is too large for this engine.
        """
        if request.media is None:
            return
        for span in request.media.spans:
            if span.item.num_embeds > self._cache.capacity:
                raise RequestError(
                    f"the {span.item.modality} at token {span.start} of the prompt has {span.item.num_embeds} "
                    f"embeddings, but at most {self._cache.capacity} are kept; send it smaller, or start the server "
                    "with a larger --encoder-cache-size",
                    param="prompt",
                    code="media_too_large",
                )
            if self._keeps_spans_whole and span.length > self._max_num_batched_tokens:
                raise RequestError(
                    f"the {span.item.modality} at token {span.start} of the prompt has {span.length} tokens, which "
                    f"this model reads at once, but a step has at most {self._max_num_batched_tokens}; send it "
                    "smaller, or start the server with a larger --max-num-batched-tokens",
                    param="prompt",
                    code="media_too_large",
                )
        self._check_at_once(request.media)

    def _check_at_once(self, media: PromptMedia) -> None:
        """Raise where there is no room for what is read at the same time: by all tokens of a prefix, or by those that
        attend to media side by side."""
        groups = [media.spans] if media.prefix_len else [_group(media.spans, span) for span in media.spans]
        num_embeds = max((sum({s.item.key: s.item.num_embeds for s in group}.values()) for group in groups), default=0)
        if media.prefix_len > self._max_num_batched_tokens or num_embeds > self._cache.capacity:
            tokens = f"{media.prefix_len} tokens and " if media.prefix_len else ""
            raise RequestError(
                f"the prompt has {tokens}{num_embeds} embeddings which this model reads at once, but a step has at "
                f"most {self._max_num_batched_tokens} tokens, and at most {self._cache.capacity} embeddings are kept; "
                "shorten it, or start the server with a larger --max-num-batched-tokens or --encoder-cache-size",
                param="prompt",
                code="media_too_large",
            )

    def allowed_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """As many as there are before the first item that can neither be encoded in this step nor was before; none of a
        prompt whose tokens all see one another, where those are not all that it lacks."""
        self._drop_pending()
        if request.media is None:
            return num_tokens
        if request.row < 0:
            self._pending = request
        if start + num_tokens < request.media.prefix_len:
            return 0
        num_encoded = self._num_encoded(request, request.media, start, num_tokens)
        return num_encoded if start + num_encoded >= request.media.prefix_len else 0

    def _num_encoded(self, request: Request, media: PromptMedia, start: int, num_tokens: int) -> int:
        """Tokens, of `num_tokens` from `start` on, whose items are in the cache when the step is computed."""
        end = start + num_tokens
        if any(start < span.read_end for span in media.spans):
            self._readers[request.request_id] = media.spans
        for span in media.spans:
            if span.start >= end:
                break
            is_cut = self._keeps_spans_whole and start < span.end and end < span.end
            if is_cut or (span.is_read(start, end) and not self._has(span, request)):
                return self._num_before(_group(media.spans, span), request, media, start)
        return num_tokens

    def _num_before(self, group: list[MediaSpan], request: Request, media: PromptMedia, start: int) -> int:
        """Tokens from `start` on before items that are read together and are not all there. None of them is held while
        the others are waited for, or requests would wait for each other."""
        end = max(start, group[0].start)
        kept = {span.item.key for span in media.spans if span.is_read(start, end)}
        for span in group:
            if span.item.key not in kept:
                self._cache.leave(span.item.key, request.request_id)
        return end - start

    def admitted(self, request: Request) -> None:
        """The request that was asked about last computes what it was allowed."""
        if request is self._pending:
            self._pending = None

    def _drop_pending(self) -> None:
        """The waiting request that was asked about last was not admitted: items are not held for who waits."""
        if self._pending is not None:
            self.released(self._pending)
            self._pending = None

    def _has(self, span: MediaSpan, request: Request) -> bool:
        """Whether the item is, or is going to be, in the cache when the step is computed; then the request needs it."""
        key, num_embeds = span.item.key, span.item.num_embeds
        is_hit = key in self._cache
        if not is_hit:
            cost = 0 if span.item.is_encoded else num_embeds
            if self._num_step_embeds and self._num_step_embeds + cost > self._max_step_embeds:
                return False
            freed = self._cache.add(key, num_embeds)
            if freed is None:
                return False
            self._forget(freed)
            self._num_step_embeds += cost
            self._encode.append(span.item)
        if self._cache.use(key, request.request_id):
            self._counters.encoder_cache_queries_total += 1
            self._counters.encoder_cache_hits_total += is_hit
        return True

    def _forget(self, keys: list[str]) -> None:
        """Let the runner forget items, or not encode them at all."""
        planned = {item.key for item in self._encode}
        self._freed += [key for key in keys if key not in planned]
        self._encode = [item for item in self._encode if item.key not in keys]

    def released(self, request: Request) -> None:
        """The request needs nothing any more; its items stay while there is room."""
        for span in () if request.media is None else request.media.spans:
            self._cache.leave(span.item.key, request.request_id)

    def step_planned(self, output: SchedulerOutput, *, is_idle: bool) -> bool:
        """Send along what is to be encoded and forgotten. Such a step has to run, whatever else it computes."""
        self._drop_pending()
        if self._readers:
            self._leave_computed(output)
        output.encode, output.freed_media = self._encode, self._freed
        self._encode, self._freed, self._num_step_embeds = [], [], 0
        return bool(output.encode or output.freed_media)

    def _leave_computed(self, output: SchedulerOutput) -> None:
        """Requests do not need items beyond the step that computes the last of their tokens: others may take the room.
        One that comes again later in the prompt is held anew then, or no prompt could have more than are kept."""
        entries = zip(output.request_ids, output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
        for request_id, start, num_tokens in entries:
            spans = self._readers.get(request_id, ())
            needed = {span.item.key for span in spans if span.start < start + num_tokens < span.read_end}
            for key in {span.item.key for span in spans} - needed:
                self._cache.leave(key, request_id)
        self._readers.clear()

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Items that could not be encoded are not there; count the others, and their time."""
        seconds = self._counters.encode_seconds_total
        for modality, spent in result.encode_seconds.items():
            seconds[modality] = seconds.get(modality, 0.0) + spent
        for key in result.failed_media:
            self._cache.remove(key)
        items, embeds = self._counters.num_encoded_items_total, self._counters.num_encoded_embeds_total
        for item in result.encoded_media:
            items[item.modality] = items.get(item.modality, 0) + 1
            embeds[item.modality] = embeds.get(item.modality, 0) + item.num_embeds

    def step_discarded(self, output: SchedulerOutput) -> None:
        """Whether the step's items were encoded is not known: forget them, and encode them again for who needs them."""
        keys = [item.key for item in output.encode if item.key in self._cache]
        for key in keys:
            self._cache.remove(key)
        self._freed += keys + [key for key in output.freed_media if key not in self._cache]

    def reset_cache(self) -> bool:
        """Forget the items that no running request needs; the runner forgets them with the next step.

        Returns:
            Whether that was all of them.
        """
        keys = self._cache.unused_keys()
        for key in keys:
            self._cache.remove(key)
        self._forget(keys)
        return not self._cache.num_embeds

    def has_work(self, *, is_idle: bool) -> bool:
        """Whether the runner has to be told to forget something."""
        return bool(self._freed)

    def add_counters(self, stats: SchedulerStats) -> None:
        """Items looked for, found and encoded."""
        counters = self._counters
        stats.encoder_cache_usage = self._cache.num_embeds / self._cache.capacity
        stats.encoder_cache_queries_total = counters.encoder_cache_queries_total
        stats.encoder_cache_hits_total = counters.encoder_cache_hits_total
        stats.num_encoded_items_total = dict(counters.num_encoded_items_total)
        stats.num_encoded_embeds_total = dict(counters.num_encoded_embeds_total)
        stats.encode_seconds_total = dict(counters.encode_seconds_total)


def _group(spans: tuple[MediaSpan, ...], span: MediaSpan) -> list[MediaSpan]:
    """The items that are read together with one: those side by side with it, where tokens attend to them."""
    return [each for each in spans if each.cross_end == span.cross_end] if span.cross_end else [span]
