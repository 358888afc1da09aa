"""Embeddings of a caller: torch's own files are read without torch, and nothing else in them is."""

from __future__ import annotations

import base64
import io
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire_interfaces import Modality
from quire_multimodal import MediaConfig, MediaError, MediaPreparer, read_features, split_prompt_embeds
from quire_multimodal.embeds import read_embeds


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_of_torch(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 8).to(dtype)
    for each in (tensor, tensor.T.contiguous().T, tensor[1:4], tensor[:, 2:6], torch.nn.Parameter(tensor).detach()):
        array = read_embeds(saved(each))
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, each.float().numpy())


def test_arrays_of_numpy() -> None:
    file = io.BytesIO()
    np.save(file, np.ones((2, 3), np.float16))
    assert read_embeds(file.getvalue(), 3).tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"must be \[N, 4\], not \[3\]"),
        (torch.ones(2, 3), r"must be \[N, 4\], not \[2, 3\]"),
        (torch.ones(0, 4), r"not \[0, 4\]"),
        (torch.ones(2, 4, dtype=torch.int64), "floating-point"),
        (torch.ones(2, 4, dtype=torch.int16), "torch.ShortStorage"),
        ({"a": torch.ones(2, 4)}, "one tensor"),
        ([torch.ones(2, 4)], "one tensor"),
        (torch.full((2, 4), float("nan")), "finite"),
        (torch.full((2, 4), float("inf")), "finite"),
        (torch.ones(1, 4).expand(100, 4), "more elements"),
        (Path("/etc/passwd"), "no embeddings"),
        (torch.nn.Linear(2, 2), "no embeddings"),
    ],
)
def test_what_is_no_tensor_of_embeddings(value: object, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        read_embeds(saved(value), 4)


class Evil:
    def __reduce__(self) -> object:
        return (Path.touch, (Path("touched"),))


def test_pickles_that_do_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for data in (saved(Evil()), saved([torch.ones(2, 2), Evil()]), pickle.dumps(Evil()), pickle.dumps(np.ones((2, 2)))):
        with pytest.raises(MediaError):
            read_embeds(data)
    objects = io.BytesIO()
    np.save(objects, np.array([[Evil()]], dtype=object), allow_pickle=True)
    with pytest.raises(MediaError):
        read_embeds(objects.getvalue())
    assert list(tmp_path.iterdir()) == []


def test_archives_that_burst() -> None:
    archive = zipfile.ZipFile(io.BytesIO(saved(torch.ones(2, 4))))
    contents = {name: archive.read(name) for name in archive.namelist()}
    (data,) = (name for name in contents if name.endswith("/data/0"))
    (code,) = (name for name in contents if name.endswith("/data.pkl"))
    for changes in ({data: bytes(100 << 20)}, {code: contents[code] + bytes(100 << 20)}, {code: b""}, {data: b""}):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
            for name, each in {**contents, **changes}.items():
                out.writestr(name, each)
        with pytest.raises(MediaError):
            read_embeds(file.getvalue())


def test_damaged_files() -> None:
    chooser, good = random.Random(0), saved(torch.randn(6, 8))
    for _ in range(500):
        data = bytearray(good[: chooser.randrange(len(good))] if chooser.random() < 0.2 else good)
        for _ in range(chooser.randrange(1, 6)):
            if data:
                data[chooser.randrange(len(data))] = chooser.randrange(256)
        try:
            assert read_embeds(bytes(data)).ndim == 2
        except MediaError:
            continue


async def test_prompts_of_embeddings_need_no_processor(tmp_path: Path) -> None:
    rows = torch.randn(1100, 4)
    sources = split_prompt_embeds(base64.b64encode(saved(rows.bfloat16())).decode(), 4, 6)
    assert [len(each.value) for each in sources] == [512, 512, 76]
    preparer = MediaPreparer(None, MediaConfig(enable_prompt_embeds=True), embeds_width=6, store_base=tmp_path)
    items = await preparer.prepare(sources)
    kept = np.concatenate([read_features(stored.item)["embeds"] for stored in items])
    np.testing.assert_array_equal(kept[:, :4], rows.bfloat16().float().numpy())
    assert not kept[:, 4:].any(), "further features of a network are none"
    media = preparer.place(items, [0] * 1100)
    assert [(span.start, span.length, span.item.modality) for span in media.spans] == [
        (0, 512, Modality.EMBEDS), (512, 512, Modality.EMBEDS), (1024, 76, Modality.EMBEDS)
    ]  # fmt: skip
    longer = await preparer.prepare(split_prompt_embeds(torch.cat((rows.bfloat16().float(), rows)).numpy(), 4, 6))
    assert [each.item.key for each in longer[:2]] == [each.item.key for each in items[:2]]
    assert longer[2].item.key != items[2].item.key
    preparer.release(items + longer)
    preparer.close()


@pytest.mark.parametrize(
    ("value", "message"), [("?", "base64"), ("AAAA", "read"), (np.ones((2, 3)), "must be"), (None, "one tensor")]
)
def test_prompts_that_are_no_embeddings_name_their_field(value: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message) as error:
        split_prompt_embeds(value, 4, param="prompt_embeds[1]")
    assert error.value.param == "prompt_embeds[1]"
