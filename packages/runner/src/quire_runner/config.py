"""The runner's configuration. Free of torch: dtypes and devices are names here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces.settings import Settings, at_least, one_of, setting
from quire_runner.affinity import complaint_about
from quire_runner.profiler_config import complaint_about_profiler

__all__ = ["DTYPE_BYTES", "RunnerConfig"]

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of one element of each dtype that a network or a KV cache may have."""


MAX_GRAPH_SIZE = 512
MIXED_GRAPH_STEP = 64
"""Tokens from one graph of steps with prompts to the next."""
MAX_DRAFT_GRAPH_SIZE = 256
"""Tokens of a step up to which drafts alone ask for more sizes: each takes memory."""


def _sizes_complaint(sizes: Any) -> str | None:
    ok = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    return None if ok else "be numbers of tokens, each at least 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig(Settings):
    """What the runner needs to know besides the network and the KV cache plan."""

    device: str = setting(
        "cpu", help="Device that runs the steps: cpu, cuda, rocm or a plug-in's platform; cuda:1 is the second GPU."
    )
    dtype: str = setting(
        "auto",
        help="Type of activations; auto takes the network's own.",
        check=one_of("auto", *DTYPE_BYTES),
    )
    max_num_seqs: int = setting(
        256, help="Requests that may run at the same time: rows.", unit="requests", check=at_least(1)
    )
    max_model_len: int = setting(
        2048, help="Longest sequence, prompt and output together.", unit="tokens", check=at_least(1)
    )
    max_num_batched_tokens: int = setting(
        2048, help="Most tokens computed in one step.", unit="tokens", check=at_least(1)
    )
    num_speculative_tokens: int = setting(
        0, help="Most draft tokens proposed per request and step.", unit="tokens", check=at_least(0)
    )
    draft_depth: int = setting(
        0, help="How far drafts go ahead at most; 0 for as far as they have tokens.", unit="tokens", check=at_least(0)
    )
    draft_topk: int = setting(
        1, help="Guesses that go on at each depth of a draft tree; 1 drafts chains.", unit="tokens", check=at_least(1)
    )
    rotates_by_axes: bool = setting(
        False, help="Whether prompts bring positions of three axes (M-RoPE), as the model says."
    )
    num_threads: int | None = setting(
        None,
        help="Threads that torch's operators use on the CPU; None leaves torch's own choice.",
        unit="threads",
        check=at_least(1),
    )
    cpu_affinity: str = setting(
        "auto",
        help="Cores that the threads of a step are bound to, one each: a list such as 0-3,8; none; or auto, which "
        "binds them on machines with several NUMA nodes.",
        check=complaint_about,
    )
    enforce_eager: bool = setting(
        False, help="Launch every kernel of a decode step from the host, never a captured graph of them all."
    )
    cuda_graph_sizes: tuple[int, ...] = setting(
        (),
        help="Numbers of tokens whose decode steps are captured in graphs, one token of each request and its drafts; "
        "steps with others take the next larger one. Empty takes 1, 2, 4, and multiples of 8, of 16 from 256 on, up to "
        "512.",
        unit="tokens",
        check=_sizes_complaint,
    )
    cuda_graph_mixed_tokens: int = setting(
        1024,
        help="Most tokens of a step with prompts that is captured in a graph, where the attention backend allows it; "
        "larger ones are launched kernel by kernel. 0 captures none.",
        unit="tokens",
        check=at_least(0),
    )
    cuda_graph_capture_s: float = setting(
        30.0,
        help="Seconds of the start in which graphs are captured; those that are left are captured while no step waits, "
        "or when steps want them. Several ranks capture none at the start, and each graph when a second step wants it.",
        unit="seconds",
        check=at_least(0),
    )
    kernel_cache: str | None = setting(
        None, help="Folder of kernels compiled ahead of time (quire compile-kernels); what it lacks is compiled here."
    )
    kernel_tables: str | None = setting(
        None, help="Folder of configurations of GPU kernels that were measured (quire tune); they come before our own."
    )
    extract_hidden_states: str | None = setting(
        None,
        help="Folder in which the hidden states of each request are written, a safetensors file of token ids and "
        "states each, as training a drafter needs them; empty: none.",
    )
    extract_hidden_states_layers: tuple[int, ...] = setting(
        (),
        help="Layers whose input is written, e.g. 2 14 25 28; the number of layers stands for what comes out of the "
        "last one, before the final norm. Needed by extract_hidden_states.",
        unit="layers",
    )
    extract_hidden_states_gib: float = setting(
        16.0,
        help="Most hidden states that an engine writes; requests beyond get no file.",
        unit="GiB",
        check=at_least(0),
    )
    profiler_config: dict[str, Any] | None = setting(  # noqa: RUF009  (the default is None)
        None,
        help="What POST /start_profile records, as a JSON object in vLLM's form, e.g. "
        '{"profiler": "torch", "torch_profiler_dir": "/tmp/traces"}; empty: nothing.',
        check=complaint_about_profiler,
    )
    logits_chunk_tokens: int = setting(
        256,
        help="Prompt positions whose logits are computed at once for prompt_logprobs; bounds their memory.",
        unit="tokens",
        check=at_least(1),
    )

    @property
    def row_len(self) -> int:
        """Token slots of a row: the longest sequence, the token sampled at its end, and drafts beyond it."""
        return self.max_model_len + self.num_speculative_tokens + 1

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens whose decode steps are captured where the device can: none above the first that is enough
        for all rows with all of their drafts. Trees of drafts are not captured, and ask for no sizes; neither do chains
        beyond MAX_DRAFT_GRAPH_SIZE, unless sizes are named."""
        if self.enforce_eager:
            return ()
        drafts = self.num_speculative_tokens if self.draft_topk == 1 else 0
        most = min(self.max_num_seqs * (1 + drafts), max(self.max_num_seqs, self.max_num_batched_tokens))
        if not self.cuda_graph_sizes:
            most = min(most, max(self.max_num_seqs, MAX_DRAFT_GRAPH_SIZE))
        sizes = self.cuda_graph_sizes or (1, 2, 4, *range(8, 256, 8), *range(256, MAX_GRAPH_SIZE + 1, 16))
        return tuple(sorted({min(size, most) for size in sizes}))

    @property
    def mixed_graph_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens whose steps with prompts are captured where the device can. The row of padding may have to
        take all tokens of one."""
        if self.enforce_eager:
            return ()
        most = min(self.cuda_graph_mixed_tokens, self.max_num_batched_tokens + MIXED_GRAPH_STEP - 1, self.max_model_len)
        return tuple(range(MIXED_GRAPH_STEP, most + 1, MIXED_GRAPH_STEP))

    @property
    def mixed_logit_rows(self) -> int:
        """Most logit rows of a captured step with prompts: one of each row and of each of its drafts, but not more than
        MAX_DRAFT_GRAPH_SIZE because of drafts; 0 where none are captured."""
        if not self.mixed_graph_sizes:
            return 0
        drafts = self.num_speculative_tokens if self.draft_topk == 1 else 0
        most = min(self.max_num_seqs * (1 + drafts), max(self.max_num_seqs, MAX_DRAFT_GRAPH_SIZE))
        return min(most, max(self.mixed_graph_sizes))
