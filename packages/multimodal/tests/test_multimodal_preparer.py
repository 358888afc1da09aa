"""Sources become items: once each, with the processor's own arrays, kept while they are used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from multimodal_samples import data_url, encoded, random_image, tone

from quire_interfaces import CheckpointError, FeatureArray, Modality, OverloadedError
from quire_multimodal import MediaConfig, MediaError, MediaPreparer, MediaSource, read_features
from quire_testkit.memory_encoder_cache import MemoryEncoderCache

IMAGE = Modality.IMAGE


@pytest.fixture(scope="module")
def folder(processor_folder: Callable[[str], Path]) -> Path:
    return processor_folder("llava")


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaPreparer]:
    base = tmp_path_factory.mktemp("store")
    config = MediaConfig(limit_mm_per_prompt={"image": 5}, enable_mm_embeds=True)
    preparer = MediaPreparer(folder, config, embeds_width=8, store_base=base)
    yield preparer
    preparer.close()
    assert list(base.iterdir()) == []


@pytest.fixture
def preparer(shared: MediaPreparer) -> Iterator[MediaPreparer]:
    """Without items; afterwards none is in use any more."""
    yield shared
    shared.reset()
    shared._store.check_integrity()
    assert shared.num_bytes == 0


async def test_an_item_is_what_the_processor_makes(preparer: MediaPreparer) -> None:
    image = random_image()
    (stored,) = await preparer.prepare([MediaSource(modality=IMAGE, url=data_url(encoded(image)))])
    assert preparer.placeholders == {"image": "<image>"}
    text, order = preparer.expand("this <image>, not <image>", [stored], [(12, 25)])
    assert text == "this " + "<image>" * 4 + ", not <image>"
    media = preparer.place(order, [1, *stored.embed_token_ids * 4, 2])
    assert (media.spans[0].start, media.spans[0].length, media.positions) == (1, 4, b"")
    assert stored.item.num_embeds == 4
    assert stored.text == "<image>" * 4
    pixels = read_features(stored.item)["pixel_values"]
    assert pixels.shape == (1, 3, 28, 28)
    assert pixels.dtype == np.float32
    assert not pixels.flags.writeable
    (raw,) = await preparer.prepare([MediaSource(modality=IMAGE, value=image)])
    np.testing.assert_array_equal(read_features(raw.item)["pixel_values"], pixels)
    preparer.release([stored, raw])


async def test_an_item_is_prepared_once(preparer: MediaPreparer) -> None:
    source = MediaSource(modality=IMAGE, url=data_url(encoded(random_image())))
    before = preparer.stats()["image"]
    items = await preparer.prepare([source] * 5)
    assert {each.item.key for each in items} == {items[0].item.key}
    preparer.release(items)
    (again,) = preparer.prepare_now([source])
    after = preparer.stats()["image"]
    counts = [getattr(after, name) - getattr(before, name) for name in ("num_queries", "num_hits", "num_items")]
    assert counts == [6, 5, 1]
    assert after.num_embeds - before.num_embeds == 4
    assert after.num_seconds > before.num_seconds
    preparer.reset()
    assert Path(again.item.path).exists(), "a request holds it"
    preparer.release([again])
    preparer.reset()
    assert not Path(again.item.path).exists()


async def test_the_caller_may_name_the_content(preparer: MediaPreparer) -> None:
    named = MediaSource(modality=IMAGE, uuid="picture of 5", param="messages[0].content[1]")
    with pytest.raises(MediaError, match=r"messages\[0\]\.content\[1\]: no image of this uuid") as failure:
        await preparer.prepare([named])
    assert failure.value.code == "media_not_cached"
    (sent,) = await preparer.prepare([MediaSource(modality=IMAGE, value=random_image(), uuid="picture of 5")])
    (found,) = await preparer.prepare([named])
    assert found.item == sent.item
    preparer.release([sent, found])


async def test_an_item_whose_embeddings_are_in_a_tier_is_not_prepared(preparer: MediaPreparer) -> None:
    cache = MemoryEncoderCache(dtype="bfloat16", width=2)
    preparer.encoder_connector = cache
    try:
        sources = [MediaSource(modality=IMAGE, value=random_image(seed=seed)) for seed in (6, 7)]
        one, two = await preparer.prepare(sources)
        preparer.release([one, two])
        preparer.reset()
        cache.save_embeds(one.item.key, memoryview(bytes(range(16))))
        before = preparer.stats()["image"]
        restored, anew = await preparer.prepare(sources)
        after = preparer.stats()["image"]
        assert (after.num_items - before.num_items, after.num_hits - before.num_hits) == (1, 1)
        assert (restored.item.key, restored.text, restored.facts) == (one.item.key, one.text, one.facts)
        assert restored.embed_token_ids == one.embed_token_ids
        assert restored.item.is_encoded
        assert restored.item.features == (FeatureArray("embeds", "bfloat16", (4, 2), 0),)
        assert Path(restored.item.path).read_bytes()[:16] == bytes(range(16))
        assert not anew.item.is_encoded
        assert anew.item == two.item
        _, order = preparer.expand("<image><image>", [restored, anew])
        media = preparer.place(order, [*one.embed_token_ids * 8])
        assert [(span.start, span.length) for span in media.spans] == [(0, 4), (4, 4)]
        preparer.release([restored, anew])
    finally:
        preparer.encoder_connector = None


async def test_arguments_and_content_make_the_key(preparer: MediaPreparer) -> None:
    sources = [MediaSource(modality=IMAGE, value=random_image(seed=seed)) for seed in (1, 2)]
    one, two = await preparer.prepare(sources)
    (other,) = await preparer.prepare(sources[:1], {"do_normalize": False})
    assert len({one.item.key, two.item.key, other.item.key}) == 3
    assert (read_features(one.item)["pixel_values"] != read_features(other.item)["pixel_values"]).any()
    preparer.release([one, two, other])


async def test_one_bad_item_fails_its_request_and_leaves_nothing(preparer: MediaPreparer) -> None:
    good = MediaSource(modality=IMAGE, value=random_image(seed=3))
    bad = MediaSource(modality=IMAGE, value=b"<svg/>", param="messages[0].content[2]")
    with pytest.raises(MediaError, match="no image that can be read") as failure:
        await preparer.prepare([good, bad])
    assert failure.value.param == "messages[0].content[2]"
    preparer.reset()
    assert preparer.num_bytes == 0
    with pytest.raises(MediaError, match="mm_processor_kwargs"):
        await preparer.prepare([good], {"do_resize": "perhaps"})
    with pytest.raises(MediaError, match="takes no audio"):
        await preparer.prepare([MediaSource(modality=Modality.AUDIO, value=b"RIFF")])
    preparer.release(await preparer.prepare([good]))


async def test_a_request_cannot_take_all_memory(preparer: MediaPreparer) -> None:
    before, side = preparer._workers.process_ids(), 10**6
    huge = {"size": {"height": side, "width": side}, "crop_size": {"height": side, "width": side}}
    with pytest.raises(MediaError, match="the processor refuses the image"):
        await preparer.prepare([MediaSource(modality=IMAGE, value=random_image())], huge)
    assert preparer._workers.process_ids() == before


async def test_a_process_that_dies_is_replaced(preparer: MediaPreparer) -> None:
    (first,) = preparer._workers.process_ids()
    os.kill(first, signal.SIGKILL)
    preparer.release(await preparer.prepare([MediaSource(modality=IMAGE, value=random_image(seed=4))]))
    (second,) = preparer._workers.process_ids()
    assert second != first


async def test_embeddings_of_a_caller(preparer: MediaPreparer) -> None:
    embeds = np.random.default_rng(0).random((3, 8), np.float32)
    grid = {"image_grid_thw": [[1, 2, 6]]}
    source = MediaSource(modality=IMAGE, value=embeds, is_embeds=True, facts=grid)
    (stored,) = await preparer.prepare([source])
    assert stored.item.is_encoded
    assert (stored.text, stored.item.num_embeds, stored.facts) == ("<image>" * 3, 3, grid)
    np.testing.assert_array_equal(read_features(stored.item)["embeds"], embeds)
    (other,) = await preparer.prepare([MediaSource(modality=IMAGE, value=embeds, is_embeds=True)])
    assert other.item.key != stored.item.key, "its positions are others"
    preparer.release([stored, other])
    with pytest.raises(MediaError, match=r"must be \[N, 8\]"):
        await preparer.prepare([MediaSource(modality=IMAGE, value=embeds[:, :7], is_embeds=True)])
    with pytest.raises(MediaError, match="--enable-prompt-embeds"):
        await preparer.prepare([MediaSource(modality=Modality.EMBEDS, value=embeds, is_embeds=True)])


async def test_a_request_that_is_cancelled_holds_nothing(preparer: MediaPreparer) -> None:
    for delay in (0, 0.002, 0.01, 0.05):
        sources = [MediaSource(modality=IMAGE, value=random_image(300, 300, seed)) for seed in range(5)]
        task = asyncio.create_task(preparer.prepare(sources))
        await asyncio.sleep(delay)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            preparer.release(await task)
    preparer.release(await preparer.prepare([MediaSource(modality=IMAGE, value=random_image(seed=9))]))
    while preparer._num_waiting:
        await asyncio.sleep(0.01)


async def test_too_many_that_wait_are_refused(preparer: MediaPreparer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_multimodal.preparer._MAX_WAITING", 4)
    sources = [MediaSource(modality=IMAGE, value=random_image(seed=seed)) for seed in range(4)]
    first = asyncio.create_task(preparer.prepare(sources))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="are waiting"):
        await preparer.prepare(sources[:1])
    preparer.release(await first)
    preparer.release(await preparer.prepare(sources[:1]))


async def test_limits_per_prompt(preparer: MediaPreparer) -> None:
    sources = [MediaSource(modality=IMAGE, value=random_image(), param=f"part {index}") for index in range(6)]
    with pytest.raises(MediaError, match="part 5: a prompt may hold at most 5 of image") as failure:
        await preparer.prepare(sources)
    assert failure.value.code == "too_many_media"


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of NumPy, for Transformers
def test_sounds_beside_images_are_items_of_their_own(processor_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Phi-4 multimodal hears them with another connector. The processor is Gemma 3n's, which starts without torch."""
    folder = tmp_path / "model"
    shutil.copytree(processor_folder("gemma3n"), folder)
    (folder / "config.json").write_text('{"model_type": "phi4_multimodal"}')
    sound = MediaSource(modality=Modality.AUDIO, value=(tone(1.0), 16_000.0))
    image = MediaSource(modality=IMAGE, value=random_image())
    preparer = MediaPreparer(folder, MediaConfig(media_processes=1), store_base=tmp_path)
    try:
        (alone,) = preparer.prepare_now([sound])
        beside, shown = preparer.prepare_now([sound, image])
        (again,) = preparer.prepare_now([image])
    finally:
        preparer.close()
    assert alone.item.key != beside.item.key
    names = {"input_features", "input_features_mask"}
    assert {each.name for each in alone.item.features} == names
    assert {each.name for each in beside.item.features} == {*names, "beside_images"}
    assert shown.item.key == again.item.key


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="processor"):
        MediaPreparer(tmp_path)


async def test_a_prompt_whose_tokens_see_one_another_is_framed_and_named(
    processor_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    preparer = MediaPreparer(processor_folder("paligemma"), MediaConfig(), is_prefix_lm=True, store_base=tmp_path)
    first, other = await preparer.prepare([MediaSource(modality=IMAGE, value=random_image(seed=n)) for n in (1, 2)])
    text, order = preparer.expand("<image> what<image> is it", [first, other])
    assert text == "<image>" * 4 + " what" + "<image>" * 4 + "<|im_start|> is it\n"
    assert preparer.expand("none", []) == ("none", [])
    token_ids = [*first.embed_token_ids * 4, 5, *other.embed_token_ids * 4, 6]
    prompts = [
        preparer.place(order, token_ids),
        preparer.place(order, token_ids),
        preparer.place(order, [*token_ids[:-1], 7]),
        preparer.place(order[::-1], token_ids),
    ]
    assert all(media.prefix_len == 10 and media.extra_keys[-1] == (0, 10, media.prefix_key) for media in prompts)
    assert prompts[0] == prompts[1]
    assert len({media.prefix_key for media in prompts}) == 3
    assert preparer.place([], [1, 2]).extra_keys == ()
    preparer.release([first, other])
    preparer.close()
