"""The settings of vLLM's that Quire does not have: what they do here, and which of their values are accepted.

Data only, grouped by the answer; `quire.vllm_settings` reads it. The names are those of vLLM 0.33 and of versions
before it that command lines still carry. A setting that becomes one of Quire's own need not be taken out: its own
declaration wins.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OTHER_SPELLINGS", "VLLM_SETTINGS", "VLLMSetting"]


class VLLMSetting(NamedTuple):
    """How Quire answers one of them."""

    values: tuple[str, ...] | None
    """Values that ask for nothing else than what Quire does; None for any. A value of `None` is always one of them."""
    words: str
    """How it is here, and what to do about another value."""
    is_noted: bool = False
    """Whether to say so also for those values: whoever set it expects something to happen."""
    takes_several: bool = False
    """Whether its flag takes several values."""
    short: str | None = None
    """vLLM's short flag."""

    @property
    def is_switch(self) -> bool:
        return bool(self.values) and set(self.values or ()) <= {"true", "false"}


_SHORT_FLAGS = {
    "data_parallel_multi_port_external_lb": "-dpm",
    "diffusion_config": "-dc",
    "attention_config": "-ac",
    "prefill_context_parallel_size": "-pcp",
}

_NOTHING = ""
_ANY = "*"
_BOTH = "false|true"


def _answer(words: str, **accepted: str) -> dict[str, VLLMSetting]:
    """Settings with one answer.

    Args:
        words: The answer.
        accepted: Name -> accepted values with | between them. A + before them: the flag takes several values. A *: they
            are accepted with a warning that they have no effect; alone, it stands for all values.
    """
    settings = {}
    for name, text in accepted.items():
        marks = text[: len(text) - len(text.lstrip("+*"))]
        listed = text.removeprefix(marks)
        values = tuple(listed.split("|")) if listed else None if "*" in marks else ()
        settings[name] = VLLMSetting(
            values, words, is_noted="*" in marks, takes_several="+" in marks, short=_SHORT_FLAGS.get(name)
        )
    return settings


VLLM_SETTINGS: dict[str, VLLMSetting] = {
    # Devices and processes.
    **_answer(
        "the ranks of a model are processes of one host that share every layer (--tensor-parallel-size) or have some "
        "of them (--pipeline-parallel-size); start a server for each host or device, behind a load balancer",
        prefill_context_parallel_size="1",
        enable_dbo="false", ubatch_size="0", enable_hc_sp="false", enable_batch_sharded_sampling="false",
        dcp_q_replicate="false", fully_sharded_loras="false", mm_encoder_tp_mode="weights",
    ),
    **_answer(
        "start one server for each engine, with its --port and its --data-parallel-rank",
        data_parallel_multi_port_external_lb="false",
    ),
    **_answer("the number of engines has no bound of its own", elastic_ep_max_dp_size=_ANY),
    **_answer(
        "the ranks of a model find each other by themselves",
        cpu_distributed_timeout_seconds=_ANY,
        dcp_comm_backend=_ANY, dcp_kv_cache_interleave_size=_ANY, cp_kv_cache_interleave_size=_ANY,
        data_parallel_supervisor_port=_ANY, dp_supervisor_probe_interval_s=_ANY, dp_supervisor_probe_timeout_s=_ANY,
        dp_supervisor_probe_failure_threshold=_ANY, enable_ep_weight_filter=_BOTH,
        dbo_decode_token_threshold=_ANY, dbo_prefill_token_threshold=_ANY,
        dp_sync_interval=_ANY, disable_nccl_for_dp_synchronization=_BOTH,
        expert_placement_strategy=_ANY, ray_workers_use_nsight="false", disable_custom_all_reduce=_BOTH,
        enable_shm_tensor_arena=_BOTH, enable_nccl_comm_suspend=_BOTH, aggregate_engine_logging=_BOTH,
    ),
    **_answer("--device names the one device, e.g. --device cuda:1", device_ids=_NOTHING),
    **_answer(
        "--cpu-affinity binds threads to cores, by itself on machines with several NUMA nodes",
        numa_bind="false", numa_bind_nodes="+", numa_bind_cpus="+",
    ),
    **_answer("each of the processes of --api-server-count renders what it answers", renderer_num_workers="1"),
    **_answer("there are no classes to put in the place of its own", worker_cls="auto", worker_extension_cls=_NOTHING,
              scheduler_cls=_NOTHING),
    **_answer(
        "an engine process that dies is started again, --max-restarts times an hour at most",
        enable_fault_tolerance=_BOTH, fault_tolerance_config=_ANY, watchdog_config=_ANY,
    ),
    # The model and its files.
    **_answer(
        "--runner and --convert say what a model is for, requests which task they are",
        task="auto|generate",
        enable_flash_late_interaction=_BOTH, diffusion_config="{}", max_lora_cls_labels=_NOTHING,
    ),
    **_answer("the tokenizer's kind is recognised from its files", tokenizer_mode="auto|hf|slow|mistral|grok2"),
    **_answer("the server writes and reads text, and needs the tokenizer", skip_tokenizer_init="false"),
    **_answer("models are read from config.json, params.json or a GGUF file", config_format="auto|hf|mistral"),
    **_answer("config.json is read from the model's folder; --hf-overrides replaces fields of it",
              hf_config_path=_NOTHING),
    **_answer("--revision holds for a checkpoint's code, too", code_revision=_NOTHING),
    **_answer("the class of a network follows from its config.json", model_class_overrides="{}"),
    **_answer("--revision holds for the tokenizer, too; --tokenizer takes the folder of another one",
              tokenizer_revision=_NOTHING),
    **_answer("set HF_TOKEN in the environment", hf_token=_NOTHING),
    **_answer("the hub's cache is where HF_HUB_CACHE or HF_HOME in the environment says", download_dir=_NOTHING),
    **_answer("models that Quire has no network for run through Transformers by themselves", model_impl="auto|vllm"),
    **_answer("weights are read from their files as fast as these can be, in one way",
              safetensors_load_strategy=_ANY, safetensors_prefetch_num_threads=_ANY,
              safetensors_prefetch_block_size=_ANY, model_loader_extra_config="{}", ignore_patterns="+*",
              use_tqdm_on_load=_BOTH, pt_load_map_location=_ANY, max_parallel_loading_workers=_ANY),
    **_answer("--quantization names a form; what the checkpoint says is read from its config.json",
              quantization_config="{}", allow_deprecated_quantization=_BOTH),
    **_answer("weights are all on the device; --quantization makes them smaller",
              cpu_offload_gb="0", cpu_offload_params="+", offload_backend="auto", offload_group_size="0",
              offload_params="+"),
    **_answer("weights are all on the device, so that none are fetched", offload_num_in_group=_ANY,
              offload_prefetch_step=_ANY),
    **_answer("use --hf-overrides '{\"rope_scaling\": {...}}'", rope_scaling=_NOTHING),
    **_answer("use --hf-overrides '{\"rope_theta\": ...}'", rope_theta=_NOTHING),
    **_answer("a model's window of attention is part of it", disable_sliding_window="false"),
    # Images, video and audio.
    **_answer("adapters hold for the language model; one with weights for towers or connectors is refused",
              enable_tower_connector_lora="false"),
    **_answer("requests may say mm_processor_kwargs in any case", trust_request_mm_kwargs=_BOTH),
    **_answer("figures of media are at /metrics", enable_mm_processor_stats=_BOTH),
    **_answer("media stand in the prompt where they stand in the message", interleave_mm_strings=_BOTH),
    **_answer("prepared media lie in shared memory, once, under a hash of their content; --media-processes prepare "
              "them, on the CPU",
              mm_processor_cache_type=_ANY, mm_hasher_algorithm=_ANY, mm_shm_cache_max_object_size_mb=_ANY,
              mm_tensor_ipc=_ANY, mm_processor_device=_ANY, mm_ipc_gpu_memory_gb=_ANY, mm_device_do_normalize=_BOTH),
    **_answer("use --mm-processor-cache-gb 0", disable_mm_preprocessor_cache="false"),
    **_answer("towers run on the attention and in the data type of the model",
              mm_encoder_attn_backend=_ANY, mm_encoder_attn_dtype=_ANY, mm_encoder_fp8_scale_path=_ANY,
              mm_encoder_fp8_scale_save_path=_ANY, mm_encoder_fp8_scale_save_margin=_ANY),
    **_answer("the plan counts towers; nothing is encoded at the start", skip_mm_profiling=_BOTH),
    **_answer("videos are shown with all their tokens", video_pruning_rate="0", video_pruning_method=_ANY),
    **_answer("chunks of prompts end within an item where its model allows it", disable_chunked_mm_input="false"),
    **_answer("embeddings of media are kept by the engine, as many as its cache holds", ec_manager_config=_ANY),
    # The KV cache.
    **_answer("there is one block manager, which gives each kind of layer what it needs",
              use_v2_block_manager="true", disable_hybrid_kv_cache_manager="false"),
    **_answer("preempted requests are computed anew, never swapped out", swap_space=_ANY),
    **_answer("preempted requests are computed anew", preemption_mode="recompute"),
    **_answer("--kv-cache-dtype holds for all layers", kv_cache_dtype_skip_layers="+"),
    **_answer("blocks of --block-size tokens are what prefixes are found by", prefix_match_unit=_NOTHING,
              prefix_cache_retention_interval="0", swa_bounded_replay=_BOTH, kv_sharing_fast_prefill=_BOTH),
    **_answer("prompts are computed where they are answered; there is no other engine to get anything from",
              ec_transfer_config="{}", engram_config="{}", weight_transfer_config="{}"),
    **_answer("states of recurrent layers are kept in float32, each in a block",
              mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto|float32", mamba_block_size=_NOTHING,
              mamba_cache_mode=_ANY, enable_mamba_cache_stochastic_rounding="false",
              enable_mamba_shared_prefix_checkpoint=_BOTH, mamba_cache_philox_rounds=_ANY, use_replayssm=_BOTH,
              replayssm_buffer_len=_ANY),
    # Steps and kernels.
    **_answer("the next step is planned ahead with --async-scheduling", num_scheduler_steps="1"),
    **_answer("--max-num-batched-tokens bounds a step, drafts included", max_num_scheduled_tokens=_NOTHING),
    **_answer("use --max-num-seqs", max_num_active_seqs=_NOTHING),
    **_answer("use --max-requests-in-flight, --max-queued-requests and --max-prompt-chars",
              max_num_queued_tokens=_NOTHING),
    **_answer("--max-inter-token-latency sizes chunks of prompts by measured steps",
              long_prefill_token_threshold_adaptive="false", prefill_schedule_interval="1"),
    **_answer("a request starts when there are blocks for it, and one that finds none later is computed anew",
              scheduler_reserve_full_isl=_BOTH, watermark=_ANY),
    **_answer("--cuda-graph-sizes names the sizes, and --enforce-eager takes none", max_cudagraph_capture_size=_ANY,
              max_seq_len_to_capture=_ANY),
    **_answer("kernels are chosen by what was measured; `quire ops` and the report at the start name them",
              moe_backend="auto", linear_backend="auto", sparse_indexer_topk_backend="auto", mamba_backend="triton",
              mamba_ssu_algorithm=_NOTHING, gdn_prefill_backend=_NOTHING, kda_prefill_backend="auto",
              kda_decode_backend="auto", ir_op_priority="{}", kernel_config="{}", monokernel="false"),
    **_answer("`quire tune` measures kernels ahead of time, for --kernel-tables", enable_flashinfer_autotune=_BOTH),
    **_answer("use --attention-backend", attention_config="{}"),
    **_answer("there is no cascade attention", disable_cascade_attn=_BOTH),
    **_answer("one manner of running serves both ends; --max-num-seqs and --max-num-batched-tokens weigh them",
              performance_mode="balanced"),
    **_answer("there is nothing that reads it", additional_config="{}", aux_output_config="{}"),
    # Sampling and outputs.
    **_answer("log probabilities are those of the raw logits", logprobs_mode="raw_logprobs"),
    **_answer("requests are answered with text, tokens and log probabilities, nothing else of the network's",
              return_sampling_mask="false", enable_trace_replay="false"),
    **_answer("random numbers have 53 bits in any case", use_fp64_gumbel=_BOTH),
    **_answer("outputs are not marked", watermark_config="{}"),
    **_answer("use --structured-output-backend", structured_outputs_config="{}"),
    **_answer("use --reasoning-parser; thinking_token_budget of a request bounds its thinking", reasoning_config="{}"),
    # Adapters.
    **_answer("adapters are applied to every layer that they have weights for", lora_target_modules="+"),
    **_answer("adapters of experts and of other layers serve together in any case", specialize_active_lora=_BOTH,
              enable_mixed_moe_lora_format=_BOTH, enable_moe_shared_loras=_BOTH),
    # What is logged and measured.
    **_answer("texts are never logged; --access-log logs requests without them", enable_log_requests="false",
              disable_log_requests=_BOTH),
    **_answer("prompts and outputs are never logged", enable_log_outputs="false", enable_log_deltas=_BOTH,
              max_log_len=_ANY),
    **_answer("only `quire serve` logs figures, and it takes this setting", disable_log_stats=_BOTH),
    **_answer("a line of figures tells of all steps since the last one", enable_logging_iteration_details="false"),
    **_answer("all figures that there are stand at /metrics", show_hidden_metrics_for_version=_ANY,
              per_request_spec_decode_metrics="none", kv_cache_metrics=_BOTH, kv_cache_metrics_sample=_ANY,
              cudagraph_metrics=_BOTH, enable_mfu_metrics="false", custom_histogram_buckets="{}"),
    **_answer("traces show the phases of each request; figures are at /metrics",
              collect_detailed_traces="+", enable_layerwise_nvtx_tracing="false"),
    **_answer("kernels that are compiled after the start are counted at /metrics", jit_monitor_mode="warn",
              jit_monitor_verbose="false"),
    **_answer("--log-level and --log-format say what is logged", log_level=_ANY, logging_config="{}"),
    **_answer("the cause of an error of the server's is always logged, and never answered", log_error_stack="false"),
    **_answer("a variable that is not known is warned of", fail_on_environ_validation="false"),
    # The server.
    **_answer("the chat template says which form of content it takes", chat_template_content_format="auto"),
    **_answer("--tool-call-parser and --reasoning-parser name formats; others come as packages (docs/plugins.md)",
              tool_parser_plugin=_NOTHING, reasoning_parser_plugin=_NOTHING),
    **_answer("calls follow their tools' schemas where a tool is strict, or tool_choice demands one",
              tool_strict_level="auto"),
    **_answer("use --mcp-servers", tool_server=_NOTHING),
    **_answer("templates get a request's reasoning effort as it is", reasoning_effort_map="{}",
              anthropic_disabled_thinking_effort="auto"),
    **_answer("tools are left out of the prompt with tool_choice none", exclude_tools_when_tool_choice_none=_BOTH),
    **_answer("usage always tells the cached tokens of the prompt", enable_prompt_tokens_details=_BOTH),
    **_answer("answers always have the header X-Request-Id", enable_request_id_headers=_BOTH),
    **_answer("there are no pages of documentation but /openapi.json", enable_offline_docs="false"),
    **_answer("LLM.sleep can be called in any case", enable_sleep_mode=_BOTH),
    **_answer("a server that sleeps keeps its weights (level 1 on the CPU) or reads them again from the checkpoint",
              sleep_mode_backend=_ANY, sleep_mode_offload_cudagraph=_BOTH, sleep_preserve_parameter_names="+",
              enable_cumem_allocator=_BOTH),
    **_answer("GET /load always tells how many requests are being answered", enable_server_load_tracking=_BOTH),
    **_answer("rendering and token routes are always served; --tokens-only serves no others", enable_scale_out=_BOTH),
    **_answer("answers of /cohere/v2/chat have thinking as content of the type thinking, in one form for all models",
              cohere_is_reasoning_model=_BOTH, cohere_format=_ANY),
    **_answer("--grpc-port serves gRPC beside HTTP, which is always there", grpc="false"),
}  # fmt: skip
"""By name, as in files and calls; flags have dashes."""

OTHER_SPELLINGS = {
    "--cudagraph-capture-sizes": "--cuda-graph-sizes",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--disable-uvicorn-access-log": "--no-access-log",
    "--guided-decoding-backend": "--structured-output-backend",
    "--max-num-queued-reqs": "--max-requests-in-flight",
    "--optimization-level": "-O",
    "--shutdown-timeout": "--shutdown-timeout-s",
    "--spec-method": "--speculative-method",
    "--spec-model": "--speculative-model",
    "--spec-tokens": "--num-speculative-tokens",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-pp": "--pipeline-parallel-size",
    "-tp": "--tensor-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
}
"""vLLM's flags -> ours of the same meaning."""
