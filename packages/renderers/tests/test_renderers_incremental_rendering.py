"""The segment cache: the same ids as tokenizing whole, for a price that follows what is new, within its memory."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire_renderers import ChatRenderer, RendererConfig, load_tokenizer
from quire_renderers.segment_cache import CachingEncoder

thorough = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
BITS = [
    "the fox",
    " jumps",
    "  ",
    "\n",
    "é",
    "e\u0301",
    "你好",
    "Ａ",
    "x=1",
    "<",
    "|im_end|>",
    "[INST]",
    "<mask>",
    "fox jumps",
]
BITS += ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<think>", "</think>", "<unk>"]

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def random_text(chooser: random.Random) -> str:
    return "".join(chooser.choice(BITS) for _ in range(chooser.randrange(12)))


@thorough
@given(seed=st.integers(0, 2**32), add_special_tokens=st.booleans(), max_bytes=st.sampled_from([400, 2000, 10**6]))
def test_cached_encoding_equals_whole_encoding(any_folder, tokenizers_by_folder, seed, add_special_tokens, max_bytes):
    tokenizer = tokenizers_by_folder(any_folder)
    encoder = CachingEncoder(tokenizer, max_bytes=max_bytes)
    chooser = random.Random(seed)
    text = ""
    for _ in range(6):
        # Mostly growing, sometimes cut back, sometimes new: what conversations do.
        keep = chooser.choice([len(text), len(text), len(text) // 2, 0])
        text = text[:keep] + random_text(chooser)
        encoded = encoder.encode(text, add_special_tokens=add_special_tokens)
        assert encoded.token_ids == tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert encoder.stats.used_bytes <= max_bytes


@pytest.fixture(scope="module")
def tokenizers_by_folder():
    loaded = {}

    def tokenizer_of(folder):
        if folder not in loaded:
            loaded[folder] = load_tokenizer(folder)
        return loaded[folder]

    return tokenizer_of


@pytest.fixture
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder("byte_level"))


def turns(count: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"message {i}: the quick brown fox"} for i in range(count)]


def test_next_turn_reuses_every_earlier_token(tokenizer):
    renderer = ChatRenderer(tokenizer, CHATML)
    for count in range(1, 12, 2):
        before = renderer.cache_stats
        rendered = renderer.render_chat(turns(count))
        known = tokenizer.encode("".join(chatml_text(m) for m in turns(count)[:-2]))
        assert rendered.num_reused_tokens >= len(known)
        assert renderer.cache_stats.num_misses - before.num_misses <= 4
        assert rendered.token_ids == tokenizer.encode(rendered.text, add_special_tokens=False)


def chatml_text(message: dict[str, str]) -> str:
    return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"


def test_an_edited_message_costs_only_itself(tokenizer):
    renderer = ChatRenderer(tokenizer, CHATML)
    messages = turns(20)
    renderer.render_chat(messages)
    before = renderer.cache_stats.num_misses
    messages[3] = {"role": "assistant", "content": "something else"}
    rendered = renderer.render_chat(messages)
    assert renderer.cache_stats.num_misses == before + 1
    assert 0 < rendered.num_reused_tokens < len(rendered.token_ids) / 2


def test_memory_is_bounded_and_the_oldest_goes_first(tokenizer):
    renderer = ChatRenderer(tokenizer, CHATML, RendererConfig(segment_cache_bytes=4000))
    for i in range(50):
        renderer.render_chat([{"role": "user", "content": f"{i} " + "fox " * 20}])
        assert renderer.cache_stats.used_bytes <= 4000
    assert renderer.render_chat([{"role": "user", "content": "49 " + "fox " * 20}]).num_reused_tokens > 20
    assert renderer.render_chat([{"role": "user", "content": "0 " + "fox " * 20}]).num_reused_tokens == 0


def test_a_part_larger_than_the_cache_is_not_kept(tokenizer):
    renderer = ChatRenderer(tokenizer, CHATML, RendererConfig(segment_cache_bytes=1000))
    rendered = renderer.render_chat([{"role": "user", "content": "fox " * 5000}])
    assert rendered.token_ids == tokenizer.encode(rendered.text, add_special_tokens=False)
    assert renderer.cache_stats.used_bytes <= 1000


def test_without_a_cache_everything_is_tokenized(tokenizer):
    renderer = ChatRenderer(tokenizer, CHATML, RendererConfig(segment_cache_bytes=0))
    for _ in range(2):
        rendered = renderer.render_chat(turns(3))
        assert rendered.num_reused_tokens == 0
        assert rendered.token_ids == tokenizer.encode(rendered.text, add_special_tokens=False)


def test_many_threads_share_one_renderer(tokenizer):
    renderer = ChatRenderer(tokenizer, CHATML, RendererConfig(segment_cache_bytes=3000))
    wrong: list[int] = []

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        for _ in range(40):
            rendered = renderer.render_chat(turns(chooser.randrange(1, 15)))
            if rendered.token_ids != tokenizer.encode(rendered.text or "", add_special_tokens=False):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < renderer.cache_stats.used_bytes <= 3000
