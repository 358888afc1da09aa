"""The names that other engines give to formats: vLLM's and SGLang's, where they are not ours."""

from __future__ import annotations

__all__ = ["REASONING_ALIASES", "TOOL_ALIASES"]

TOOL_ALIASES = {
    # Names of vLLM.
    "cohere_command3": "cohere_command4",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "mimo": "qwen3_coder",
    "minimax": "minimax_m1",
    "openai": "gpt_oss",
    "phi4_mini_json": "phi4_mini",
    "poolside_v1": "glm45",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    # Names of SGLang.
    "apertus2509": "apertus",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41",
    "glm": "glm45",
    "gpt-oss": "gpt_oss",
    "hunyuan": "hy_v3",
    "interns1": "internlm",
    "ling3": "glm45",
    "llama3": "llama3_json",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "nanbeige": "hermes",
    "qwen": "hermes",
    "qwen25": "hermes",
    "spark25": "glm45",
    "trinity": "hermes",
    # Others in use.
    "glm4_moe": "glm45",
    "llama4": "llama4_pythonic",
    "nemotron_v3": "qwen3_coder",
    "openai_gptoss": "gpt_oss",
    "qwen3": "hermes",
}
"""Other name of a tool format -> ours."""

REASONING_ALIASES = {
    # Names of vLLM.
    "deepseek_v4": "deepseek_v3",
    "glm47": "glm45",
    "mimo": "qwen3",
    "openai_gptoss": "gpt_oss",
    "poolside_v1": "qwen3",
    "step3p5": "step3",
    # Names of SGLang.
    "apertus2509": "apertus",
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v4": "deepseek_v3",
    "deepseek-v41": "deepseek_v3",
    "dots": "qwen3",
    "gigachat35": "qwen3",
    "gpt-oss": "gpt_oss",
    "granite_thinking_parser": "nemotron_v3",
    "hunyuan": "hy_v3",
    "interns1": "qwen3",
    "iquest_q1": "qwen3",
    "ling3": "qwen3",
    "minimax": "minimax_m2",
    "minimax-append-think": "minimax_m2_append_think",
    "minimax-m3": "minimax_m3",
    "nanbeige": "deepseek_r1",
    "nemotron_3": "nemotron_v3",
    "qwen3-thinking": "deepseek_r1",
    "telechat4": "glm45",
}
"""Other name of a reasoning format -> ours."""
