"""Models that read the prompt with an encoder, over HTTP and with the engine in a process of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from quire import QuireConfig
from quire.assemble import FACTORY as REAL_FACTORY
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer


def test_completions_and_chat_are_transformers(make_live: Any, tmp_path: Path) -> None:
    case = ENCODER_CASES["T5ForConditionalGeneration"]
    case = dataclasses.replace(case, fields={**case.fields, "vocab_size": 320})
    oracle = write_checkpoint(tmp_path, "T5ForConditionalGeneration", case)
    write_tokenizer(tmp_path, vocab_size=320)
    settings = QuireConfig.of(model=str(tmp_path), num_gpu_blocks_override=200)
    live = make_live(folder=tmp_path, factory=REAL_FACTORY, engine=settings.to_dict())
    prompt = [5, 90, 41, 121, 17, 8, 33]
    tokens = oracle.generate(input_ids=torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    body["return_token_ids"] = True
    answer = live.post("/v1/completions", body).json()
    assert answer["choices"][0]["token_ids"] == tokens[0, 1:].tolist()
    assert answer["usage"]["prompt_tokens"] == 7
    streamed = live.events("/v1/completions", {**body, "stream": True})
    assert "".join(each["choices"][0]["text"] for each in streamed if each["choices"]) == answer["choices"][0]["text"]
    refused = live.post("/v1/completions", {**body, "prompt": [5] * 513})
    assert refused.status_code == 400
    assert "encoder reads at most 512" in refused.json()["error"]["message"]

    messages = [
        {"role": "system", "content": "fold"},
        {"role": "user", "content": [{"type": "text", "text": "the pages"}]},
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    flat = [{**message, "content": text} for message, text in zip(messages, ("fold", "the pages"), strict=True)]
    prompt = tokenizer.apply_chat_template(flat, add_generation_prompt=True, return_dict=False)
    tokens = oracle.generate(input_ids=torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None)
    body = {"model": "tiny", "messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer = live.post("/v1/chat/completions", body).json()
    text = tokenizer.decode(tokens[0, 1:], skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 60
    streamed = live.events("/v1/chat/completions", {**body, "stream": True})
    deltas = [each["choices"][0]["delta"].get("content") or "" for each in streamed if each["choices"]]
    assert "".join(deltas) == text
    assert len(deltas) > 3
