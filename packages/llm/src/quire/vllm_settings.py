"""vLLM's settings that are no settings here: what they say is so anyway, or there is nothing like it.

A command line, a file or a call that was written for vLLM then runs, or is told what to do instead; nothing that would
make a difference is passed over in silence. Knows names and values; what Quire can set is a setting of its own.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from quire_interfaces import ConfigError

__all__ = ["OTHER_SPELLINGS", "VLLM_SETTINGS", "VLLMSetting", "hint_for", "is_settled"]


class VLLMSetting(NamedTuple):
    """One of them."""

    values: tuple[str, ...] | None
    """Values that ask for nothing else than what Quire does; None for any."""
    words: str
    """How it is here, and what to do about another value."""
    is_noted: bool = False
    """Whether to say so also for those values: whoever set it expects something to happen."""
    short: str | None = None
    """vLLM's short flag."""

    @property
    def is_switch(self) -> bool:
        return self.values is not None and set(self.values) <= {"true", "false"}


_ONE_DEVICE = "a server runs its model on one device; start one for each device, behind a load balancer"
_SWITCH = ("true", "false")

VLLM_SETTINGS = {
    "tensor_parallel_size": VLLMSetting(("1",), _ONE_DEVICE, short="-tp"),
    "pipeline_parallel_size": VLLMSetting(("1",), _ONE_DEVICE, short="-pp"),
    "data_parallel_size": VLLMSetting(("1",), _ONE_DEVICE, short="-dp"),
    "data_parallel_size_local": VLLMSetting(("1",), _ONE_DEVICE),
    "enable_expert_parallel": VLLMSetting(("false",), _ONE_DEVICE),
    "api_server_count": VLLMSetting(("1",), "one process answers HTTP; start several servers, behind a load balancer"),
    "distributed_executor_backend": VLLMSetting(("mp", "uni"), "the engine is one process of its own"),
    "task": VLLMSetting(("auto", "generate"), "it serves generated text; no embeddings, scores or classes"),
    "runner": VLLMSetting(("auto", "generate"), "it serves generated text; no embeddings, scores or classes"),
    "convert": VLLMSetting(("auto", "none"), "it serves generated text; no embeddings, scores or classes"),
    "tokenizer_mode": VLLMSetting(("auto", "hf"), "the tokenizer's kind is recognised from its files"),
    "config_format": VLLMSetting(("auto", "hf"), "models are read from config.json or a GGUF file"),
    "response_role": VLLMSetting(("assistant",), "answers have the role assistant"),
    "logprobs_mode": VLLMSetting(("raw_logprobs",), "log probabilities are those of the raw logits"),
    "chat_template_content_format": VLLMSetting(("auto",), "the chat template says which form of content it takes"),
    "preemption_mode": VLLMSetting(("recompute",), "preempted requests are computed anew"),
    "num_scheduler_steps": VLLMSetting(("1",), "the next step is planned ahead with --async-scheduling"),
    "cpu_offload_gb": VLLMSetting(("0", "0.0"), "weights are all on the device; --quantization makes them smaller"),
    "swap_space": VLLMSetting(None, "preempted requests are computed anew, never swapped out", is_noted=True),
    "max_log_len": VLLMSetting(None, "prompts and outputs are never logged"),
    "max_seq_len_to_capture": VLLMSetting(None, "graphs of decode steps serve sequences of any length"),
    "trust_remote_code": VLLMSetting(_SWITCH, "no code of a checkpoint is ever run", is_noted=True),
    "enable_log_requests": VLLMSetting(("false",), "prompts and outputs are never logged; see --access-log"),
    "disable_log_requests": VLLMSetting(_SWITCH, "prompts and outputs are never logged; see --access-log"),
    "enable_log_outputs": VLLMSetting(("false",), "prompts and outputs are never logged"),
    "disable_log_stats": VLLMSetting(_SWITCH, "figures are at /metrics, and not logged"),
    "enable_prompt_tokens_details": VLLMSetting(("true",), "usage always tells the cached tokens of the prompt"),
    "enable_request_id_headers": VLLMSetting(("true",), "answers always have the header X-Request-Id"),
    "disable_fastapi_docs": VLLMSetting(("true",), "there are no pages of documentation but /openapi.json"),
    "disable_cascade_attn": VLLMSetting(("true",), "there is no cascade attention"),
    "enable_sleep_mode": VLLMSetting(_SWITCH, "LLM.sleep and AsyncLLM.sleep can be called in any case"),
    "enable_server_load_tracking": VLLMSetting(_SWITCH, "GET /load always tells how many requests are being answered"),
    "use_v2_block_manager": VLLMSetting(("true",), "there is one block manager"),
}
"""By name, as in files and calls; flags have dashes."""

OTHER_SPELLINGS = {
    "--disable-uvicorn-access-log": "--no-access-log",
    "--guided-decoding-backend": "--structured-output-backend",
    "--shutdown-timeout": "--shutdown-timeout-s",
}
"""vLLM's flags -> ours of the same meaning."""

_HINTS = {
    "download_dir": "the hub's cache is where HF_HUB_CACHE or HF_HOME says",
    "hf_token": "set HF_TOKEN in the environment",
    "kv_transfer_config": "--kv-disk-path keeps the KV cache of prefixes on disk",
    "limit_mm_per_prompt": "models take text only",
    "middleware": "put a proxy before the server",
    "mm_processor_kwargs": "models take text only",
    "otlp_traces_endpoint": "there are no traces; figures are at /metrics",
    "rope_scaling": "use --hf-overrides '{\"rope_scaling\": {...}}'",
    "rope_theta": "use --hf-overrides '{\"rope_theta\": ...}'",
    "structured_outputs_config": "use --structured-output-backend",
    "tool_parser_plugin": "--tool-call-parser names the known formats",
}


def is_settled(name: str, value: Any) -> bool:
    """Whether `name` is one of them and `value` needs nothing done; says so where someone may expect more.

    Raises:
        ConfigError: one of them with a value that Quire cannot follow.
    """
    setting = VLLM_SETTINGS.get(name)
    if setting is None:
        return False
    if setting.values is not None and str(value).lower() not in setting.values:
        raise ConfigError(f"{name} cannot be {value!r} here: {setting.words}", field=name)
    if setting.is_noted and value is not False:
        logging.getLogger("quire").warning("quire: %s has no effect: %s", name, setting.words)
    return True


def hint_for(name: str) -> str | None:
    """What to do instead of a setting of vLLM's that has no likeness here; None for other names."""
    return _HINTS.get(name)
