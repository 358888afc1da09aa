"""An image costs once: in whatever conversation it comes again, after a preemption and after a restart, it is neither
prepared nor encoded again; and a file that is not what it should be makes it cost twice, never another image.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire import LLM, SamplingParams
from quire_testkit.seeing_models import SeeingModel, drawing, image_part, text_part

NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Costs(NamedTuple):
    prepared: int
    encoded: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def make_llm(model: SeeingModel, disk: Path, **settings: Any) -> LLM:
    own = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
    return LLM(model.folder, kv_disk_path=str(disk), kv_disk_size="50M", **{**own, **settings})


def answer(llm: LLM, text: str, *numbers: int) -> list[int]:
    """Tokens of an answer to a text with images behind it."""
    content = [text_part(text), *map(image_part, numbers)]
    (output,) = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def expected(model: SeeingModel, text: str, *numbers: int) -> list[int]:
    rendered = f"<|im_start|>user\n{text}{'<image>' * len(numbers)}<|im_end|>\n<|im_start|>assistant\n"
    return model.expected(rendered, [drawing(number) for number in numbers], NUM_TOKENS)


def costs(llm: LLM) -> Costs:
    assert llm.media is not None
    return Costs(llm.media.stats()["image"].num_items, llm.stats().num_encoded_items_total.get("image", 0))


def embeds_files(disk: Path) -> list[Path]:
    """The files of embeddings: those whose folder has descriptions of items beside them."""
    items = {path.parent.parent for path in disk.rglob("*-1.kv")}
    return sorted(path for folder in items for path in folder.rglob("*-0.kv"))


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"dtype": "bfloat16"}], ids=str)
def test_an_image_costs_once(model: SeeingModel, disk: Path, settings: dict[str, Any]) -> None:
    with make_llm(model, disk, **settings) as llm:
        first, second = answer(llm, "a ", 1, 2), answer(llm, "b ", 2, 1)
        if not settings.get("dtype"):
            assert first == expected(model, "a ", 1, 2)
            assert second == expected(model, "b ", 2, 1)
        assert costs(llm) == (2, 2)
    with make_llm(model, disk, **settings) as llm:
        assert answer(llm, "b ", 2, 1) == second
        assert answer(llm, "a ", 1, 2) == first
        if not settings.get("dtype"):
            assert answer(llm, "c ", 1) == expected(model, "c ", 1)
        else:
            answer(llm, "c ", 1)
        assert costs(llm) == (0, 0)
        assert llm.media is not None
        assert llm.media.stats()["image"].num_hits == 5
        answer(llm, "d ", 3)
        assert costs(llm) == (1, 1)


def test_embeddings_that_memory_forgot_are_read_again(model: SeeingModel, disk: Path) -> None:
    """Prepared images are there, and the encoder cache holds one of them only: a preemption forgets no less."""
    with make_llm(model, disk, encoder_cache_size=16, max_num_batched_tokens=16, max_num_seqs=1) as llm:
        for text in ("a ", "b ", "c "):
            for number in (1, 2):
                assert answer(llm, text, number) == expected(model, text, number)
        assert costs(llm) == (2, 2)
        assert llm.stats().encoder_cache_hits_total == 0


def test_a_preemption_costs_nothing(model: SeeingModel, disk: Path) -> None:
    """Too few blocks for all requests at once, and an encoder cache with room for one image: who comes back to a row
    finds its image again."""
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    few = {"num_gpu_blocks_override": 14, "kv_cache_memory_bytes": None, "max_num_seqs": 3, "max_model_len": 128}
    conversations = [
        [{"role": "user", "content": [text_part(text), image_part(number)]}]
        for text, number in (("a ", 1), ("b ", 2), ("c ", 3))
    ]
    with make_llm(model, disk, encoder_cache_size=16, max_num_batched_tokens=16, **few) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
        assert llm.stats().num_preemptions_total > 0
        assert costs(llm) == (3, 3)
        llm.reset_prefix_cache()
    for output, (text, number) in zip(outputs, (("a ", 1), ("b ", 2), ("c ", 3)), strict=True):
        assert list(output.outputs[0].token_ids[:NUM_TOKENS]) == expected(model, text, number)


def test_a_damaged_file_is_no_image(model: SeeingModel, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_llm(model, disk) as llm:
        answer(llm, "a ", 1, 2)
    one, two = embeds_files(disk)
    swapped, damaged = one.read_bytes(), bytearray(one.read_bytes())
    two.write_bytes(swapped)
    damaged[200] ^= 1
    one.write_bytes(bytes(damaged))
    with caplog.at_level(logging.WARNING), make_llm(model, disk) as llm:
        assert answer(llm, "b ", 2, 1) == expected(model, "b ", 2, 1)
        assert costs(llm) == (2, 2)
    assert "checksum" in caplog.text
    assert "another block" in caplog.text
    with make_llm(model, disk) as llm:
        assert answer(llm, "c ", 2, 1) == expected(model, "c ", 2, 1)
        assert costs(llm) == (0, 0)


def test_embeddings_of_other_settings_are_not_taken(model: SeeingModel, disk: Path) -> None:
    with make_llm(model, disk) as llm:
        answer(llm, "a ", 1)
    with make_llm(model, disk, dtype="bfloat16") as llm:
        answer(llm, "a ", 1)
        assert costs(llm) == (1, 1)
    with make_llm(model, disk, mm_processor_kwargs={"do_resize": False}) as llm:
        answer(llm, "a ", 1)
        assert costs(llm) == (1, 1)


def test_a_uuid_names_what_was_sent_before_the_restart(model: SeeingModel, disk: Path) -> None:
    with make_llm(model, disk) as llm:
        llm.chat([{"role": "user", "content": [image_part(1, uuid="one")]}], PARAMS, use_tqdm=False)
    with make_llm(model, disk) as llm:
        part = {"type": "image_url", "uuid": "one"}
        (output,) = llm.chat([{"role": "user", "content": [text_part("a "), part]}], PARAMS, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected(model, "a ", 1)
        assert costs(llm) == (0, 0)
