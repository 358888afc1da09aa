"""`--pipeline-parallel-size` over HTTP: the answers of one process, also where a stage is killed amid a stream."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import psutil

from quire import LLM, SamplingParams
from quire_demo_model import checkpoint_path

PROMPT = "one two three one two three"
FLAGS = ["--max-model-len", "256", "--num-gpu-blocks-override", "128", "--num-threads", "1"]
FIELDS: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 60}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def stages(server: Any) -> list[int]:
    """Processes of the stages behind the first one."""
    below = psutil.Process(server.popen.pid).children(recursive=True)
    return [each.pid for each in below if "quire_distributed.worker" in " ".join(each.cmdline())]


def test_stages_answer_over_http_and_outlive_one_of_them(quire_serve: Any) -> None:
    server = quire_serve(str(checkpoint_path()), "--pipeline-parallel-size", "2", *FLAGS)
    url = server.url()
    with LLM(max_model_len=256, num_gpu_blocks_override=128, num_threads=1) as llm:
        params = SamplingParams(logprobs=2, ignore_eos=True, **FIELDS)
        ((expected,),) = (output.outputs for output in llm.generate([PROMPT], params, use_tqdm=False))
    body = {"prompt": PROMPT, "logprobs": 2, "ignore_eos": True, **FIELDS}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["choices"][0]["text"] == expected.text
    told = [at[token].logprob for token, at in zip(expected.token_ids, expected.logprobs or [], strict=True)]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == told

    chat = {"messages": [{"role": "user", "content": "A number"}], "max_tokens": 100, "temperature": 0}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**chat, **form}, timeout=60).raise_for_status().json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"a"}

    (victim,) = stages(server)
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                if not text:  # one event may bring many tokens to a slow reader: there may be no second one
                    os.kill(victim, signal.SIGKILL)
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == expected.text
    again = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert again["choices"][0]["text"] == expected.text
    assert stages(server) not in ([], [victim])
    server.popen.terminate()
    assert server.end() == 0
    assert not psutil.pid_exists(victim)
