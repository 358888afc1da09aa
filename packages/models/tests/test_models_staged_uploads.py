"""Weights through two buffers that take turns: every byte arrives, whatever the sizes, dtypes and strides."""

from __future__ import annotations

import pytest
import torch

from quire_models.staged_uploads import StagedUploads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.int32, torch.int32),
    ],
    ids=str,
)
def test_tensors_arrive_whole(dtype: torch.dtype, wanted: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(), (0, 3), (7,), (16,), (33, 5), (4, 3, 9), (1000,)]  # below, at and above a buffer of 64 bytes
    sources = [(torch.randn(shape) * 100).to(dtype) for shape in shapes]
    sources += [sources[4].t(), sources[4][1:, 1:3]]  # other orders, and parts
    uploads = StagedUploads(DEVICE, buffer_bytes=64)
    kept = [source.clone() for source in sources]
    found = []
    for source in sources[:-2]:
        found.append(uploads.upload(source, wanted))
        source.zero_()  # taken already
    found += [uploads.upload(view, wanted) for view in (kept[4].t(), kept[4][1:, 1:3])]
    uploads.finish()
    for got, source in zip(found, kept, strict=True):
        assert got.device.type == DEVICE.type
        assert got.is_contiguous()
        assert got.dtype == wanted
        assert torch.equal(got.cpu().float(), source.to(wanted).float())


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_arrive_where_they_are_wanted(wanted: torch.dtype) -> None:
    """And nothing beside."""
    torch.manual_seed(0)
    sources = [torch.randn(3, 7), torch.randn(5, 7)]
    whole = torch.full((10, 7), 9.0, dtype=wanted, device=DEVICE)
    uploads = StagedUploads(DEVICE, buffer_bytes=64)
    for source, place in zip(sources, whole[1:9].split((3, 5)), strict=True):
        assert uploads.upload(source, wanted, place) is place
    uploads.finish()
    assert torch.equal(whole[1:9].cpu(), torch.cat(sources).to(wanted))
    assert (whole[[0, 9]] == 9).all()
