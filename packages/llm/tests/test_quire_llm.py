"""`LLM` and `AsyncLLM` on a tiny random checkpoint: what a caller sees."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    QuireConfig,
    RequestError,
    SamplingParams,
)
from quire.config import ModelSettings
from quire.generation_config import generation_defaults, read_generation_defaults
from quire_interfaces import EngineDeadError
from quire_testkit.checkpoints import make_checkpoint

README = Path(__file__).resolve().parents[1] / "README.md"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_model_len=128, max_num_seqs=8, num_threads=1, max_queued_requests=4) as made:
        yield made


def test_one_and_many_prompts_of_every_kind(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the quire gathers")
    (alone,) = llm.generate("the quire gathers", GREEDY, use_tqdm=False)
    outputs = llm.generate(
        ["the quire gathers", ids, {"prompt": "the quire gathers"}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False
    )
    assert [output.outputs[0].token_ids for output in outputs] == [alone.outputs[0].token_ids] * 4
    assert alone.outputs[0].text == llm.tokenizer.decode(alone.outputs[0].token_ids)


def test_more_prompts_than_the_queue_holds_come_back_in_order(llm: LLM) -> None:
    prompts = [[number + 3, number + 4] for number in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 5, ignore_eos=True) for number in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=True)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + number % 5 for number in range(40)]


def test_seed_fixes_the_tokens_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    crowd = llm.generate([[9], [5, 6, 7], [8] * 40, [1, 2]], params, use_tqdm=False)
    assert crowd[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_n_completions_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([[5, 6]], params, use_tqdm=False)[0] for _ in range(2))
    tokens = [tuple(completion.token_ids) for completion in first.outputs]
    assert len(set(tokens)) == 3
    assert tokens == [tuple(completion.token_ids) for completion in second.outputs]


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_speculation_changes_nothing(llm: LLM, folder: Path) -> None:
    prompts = [[7, 8, 9] * 6, [4] * 20, list(range(30, 50))]
    mixed = [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True), GREEDY]
    plain = llm.generate(prompts, mixed, use_tqdm=False)
    with LLM(
        folder,
        max_model_len=128,
        speculative_method="ngram",
        speculative_adaptive=False,
        prompt_lookup_min=1,
        num_threads=1,
    ) as drafting:
        drafted = drafting.generate(prompts, mixed, use_tqdm=False)
        assert drafting.stats().num_accepted_tokens_total > 0
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.parametrize("method", ["int8", "int4", "int4-g32"])
def test_quantized_weights_serve(folder: Path, method: str) -> None:
    with LLM(folder, max_model_len=128, quantization=method, num_threads=1) as small:
        (output,) = small.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        op = "int8_linear" if method == "int8" else "grouped_linear"
        choice = small.engine.info.choices["weights"]
        assert choice.split("(")[0] == f"{method}; by {op} for 14 "


def test_custom_logits_processor(folder: Path) -> None:
    def only_77(token_ids: object, num_prompt_tokens: int, logits: object) -> object:
        logits[:77] = float("-inf")  # type: ignore[index]
        logits[78:] = float("-inf")  # type: ignore[index]
        return logits

    with LLM(folder, max_model_len=64, logits_processors={"only_77": only_77}, num_threads=1) as llm:  # type: ignore[dict-item]
        params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args={"logits_processors": ["only_77"]})
        (output,) = llm.generate([[5]], params, use_tqdm=False)
        assert output.outputs[0].token_ids == [77, 77, 77]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5000], GREEDY, "5000"),
        ([], GREEDY, "at least one token"),
        ({}, GREEDY, "'prompt', 'prompt_token_ids', 'prompt_embeds' or 'encoder_prompt'"),
        (
            {"text": "x"},
            GREEDY,
            "prompts[1]: a prompt dictionary has no key 'text'; there are prompt, prompt_token_ids",
        ),
        ({"prompt": "x", "cache_salt": ""}, GREEDY, "cache_salt must be a non-empty text"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, GREEDY, "leave multi_modal_data out"),
        ({"prompt": "x", "encoder_prompt": "y"}, GREEDY, "prompt cannot come with encoder_prompt"),
        ({"prompt": "x", "decoder_prompt": "y"}, GREEDY, "with an encoder_prompt only"),
        ([1] * 125, GREEDY, "prompts[1]: the prompt has 125 tokens"),
        ([1], SamplingParams(logprobs=21), "at most 20"),
        ([1], SamplingParams(logit_bias={4000: 1.0}), "4000"),
    ],
)
def test_bad_requests_name_the_fault_and_leave_the_engine_usable(
    llm: LLM, prompt: object, params: SamplingParams, message: str
) -> None:
    with pytest.raises((RequestError, ContextLengthError), match=re.escape(message)):
        llm.generate([[1, 2], prompt], params, use_tqdm=False)  # type: ignore[list-item]
    assert not llm.engine.has_unfinished_requests()
    assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


async def test_async_llm_streams_without_torch_here(folder: Path) -> None:
    llm = AsyncLLM.start(QuireConfig.of(model=str(folder), max_model_len=128, num_threads=1))
    try:
        info = await llm.ready()
        assert info.max_model_len == 128

        async def collect(prompt: list[int]) -> list[int]:
            outputs = [output async for output in llm.engine.generate(prompt, GREEDY)]
            assert outputs[-1].finished
            return [token for output in outputs for token in output.outputs[0].token_ids]

        alone = await collect([5, 6, 7])
        together = await asyncio.gather(*(collect([5, 6, 7]) for _ in range(5)), collect([9] * 30))
        assert together[:5] == [alone] * 5
        assert await llm.client.check_integrity() is None
    finally:
        await llm.client.shutdown()
    with pytest.raises(EngineDeadError):
        llm.client.check_health()


async def test_engine_that_cannot_start_says_why(folder: Path) -> None:
    llm = AsyncLLM.start(QuireConfig.of(model=str(folder), max_model_len=128, attention_backend="abacus"))
    with pytest.raises(EngineDeadError, match="there is no attention backend 'abacus'"):
        await llm.ready()


def test_the_front_loads_no_torch() -> None:
    code = (
        "import sys, quire; quire.AsyncLLM, quire.QuireConfig, quire.make_plan; "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_readme_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}', '{"top_p": 7}'])
def test_wrong_generation_config_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_generation_defaults(tmp_path)
    path.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": 1}')
    assert read_generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}


def test_settings_come_before_generation_config(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for path, text in ((model, '{"temperature": 0.6, "top_k": 20}'), (other, '{"top_p": 0.9}')):
        path.mkdir()
        (path / "generation_config.json").write_text(text)

    def defaults(**settings: object) -> dict[str, object]:
        return generation_defaults(ModelSettings(**settings), model)  # type: ignore[arg-type]

    assert defaults() == {"temperature": 0.6, "top_k": 20}
    assert defaults(generation_config="vllm") == {}
    assert defaults(generation_config=str(other)) == {"top_p": 0.9}
    assert defaults(override_generation_config={"top_k": None, "min_p": 0.1}) == {"temperature": 0.6, "min_p": 0.1}
    assert defaults(generation_config="vllm", override_generation_config={"top_k": 3}) == {"top_k": 3}
    with pytest.raises(CheckpointError, match="name its folder"):
        defaults(generation_config=str(tmp_path))
    for wrong in ({"temperature": "hot"}, {"max_new_tokens": 5}):
        with pytest.raises(ConfigError, match="override_generation_config"):
            defaults(override_generation_config=wrong)


def test_the_seed_of_the_engine(folder: Path) -> None:
    def tokens(seed: int) -> list[list[int]]:
        with LLM(folder, max_model_len=64, num_threads=1, seed=seed) as llm:
            outputs = llm.generate([[5], [5]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    first = tokens(0)
    assert first[0] != first[1]
    assert tokens(0) == first
    assert tokens(1) != first


@pytest.mark.parametrize("prompts", [None, 5, [None], [5.5], [["a"]], [{"prompt": 3}]])
def test_what_is_no_prompt_is_said_so(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_what_is_no_parameters_is_said_so(llm: LLM) -> None:
    for wrong in ({"temperature": 0}, [{"temperature": 0}], 5, BeamSearchParams(beam_width=2, max_tokens=2)):
        with pytest.raises(RequestError, match="SamplingParams"):
            llm.generate(["x"], wrong, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="BeamSearchParams"):
        llm.beam_search("x", GREEDY)  # type: ignore[arg-type]


def test_a_closed_engine_says_so(folder: Path) -> None:
    llm = LLM(folder, max_model_len=64, num_threads=1)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([[5]], GREEDY, use_tqdm=False)
