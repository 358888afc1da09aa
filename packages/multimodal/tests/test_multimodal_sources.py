"""Where bytes come from: data URLs, files below a folder, decoded values; and the names that content gets."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from multimodal_samples import data_url, encoded, random_image, tone

from quire_interfaces import Modality
from quire_multimodal import MediaConfig, MediaError, MediaSource
from quire_multimodal.sources import load

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
NONE = MediaConfig()


def of(url: str, config: MediaConfig = NONE) -> bytes:
    return load(MediaSource(modality=IMAGE, url=url), config).data


def test_data_urls() -> None:
    assert of(data_url(b"hello")) == b"hello"
    assert of("DATA:;base64,aGVsbG8=") == b"hello"
    assert of("data:image/png;name=x;base64,aGVsbG8%3D") == b"hello"
    assert of("data:text/plain,a%20b") == b"a b"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "not complete"),
        ("data:image/png;base64,aGVsbG8", "no base64"),
        ("data:image/png;base64,aGV\nsbG8=", "no base64"),
        ("data:image/png;base64,ä", "no base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:" + "x" * 1000 + ",", "not complete"),
        ("ftp://example.com/x.png", "must begin with"),
        ("/etc/passwd", "must begin with"),
        ("", "must begin with"),
        ("javascript:alert(1)", "must begin with"),
    ],
)
def test_urls_that_are_none(url: str, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        of(url)


def test_sizes_are_bounded_before_anything_is_decoded() -> None:
    small = MediaConfig(media_max_bytes=100)
    assert len(of(data_url(bytes(100)), small)) == 100
    for source in (
        MediaSource(modality=IMAGE, url=data_url(bytes(101))),
        MediaSource(modality=IMAGE, url=data_url(bytes(10_000))),
        MediaSource(modality=IMAGE, value=bytes(101)),
    ):
        with pytest.raises(MediaError, match="100 bytes allowed") as failure:
            load(source, small)
        assert failure.value.code == "media_too_large"


def test_files_below_the_folder_that_is_allowed(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    config = MediaConfig(allowed_local_media_path=str(allowed), media_max_bytes=10)
    assert of(f"file://{allowed}/a%20b.png", config) == b"picture"
    assert of(f"file://localhost{allowed}/a b.png", config) == b"picture"
    with pytest.raises(MediaError, match="reads no local files"):
        of(f"file://{allowed}/a%20b.png")
    for path in (f"{tmp_path}/secret", f"{allowed}/../secret", f"{allowed}/%2e%2e/secret", f"{allowed}/link"):
        with pytest.raises(MediaError, match="not below") as failure:
            of(f"file://{path}", config)
        assert failure.value.code == "media_not_allowed"
    with pytest.raises(MediaError, match="not below"):
        of(f"file://elsewhere{allowed}/a b.png", config)
    with pytest.raises(MediaError, match="no such file"):
        of(f"file://{allowed}", config)
    with pytest.raises(MediaError, match="cannot be read"):
        of(f"file://{allowed}/%00", config)
    (allowed / "large").write_bytes(bytes(11))
    with pytest.raises(MediaError, match="10 bytes"):
        of(f"file://{allowed}/large", config)


def test_values_that_are_decoded_already() -> None:
    image = random_image(8, 6)
    assert load(MediaSource(modality=IMAGE, value=image), NONE).fields == {"shape": [6, 8, 3]}
    pixels = np.asarray(image)
    assert load(MediaSource(modality=IMAGE, value=pixels), NONE).data == pixels.tobytes()
    assert load(MediaSource(modality=IMAGE, value=image.convert("RGBA")), NONE).fields == {"shape": [6, 8, 3]}
    frames = load(MediaSource(modality=VIDEO, value=[image, image]), NONE)
    assert frames.fields["shape"] == [2, 6, 8, 3]
    assert load(MediaSource(modality=AUDIO, value=tone(0.1).astype(np.float64)), NONE).data == tone(0.1).tobytes()
    wrong = (
        (IMAGE, pixels[..., :2]),
        (IMAGE, pixels.astype(float)),
        (AUDIO, pixels),
        (VIDEO, pixels),
        (IMAGE, object()),
    )
    for modality, value in wrong:
        with pytest.raises(MediaError, match=r"no (image|video|audio) that is read"):
            load(MediaSource(modality=modality, value=value), NONE)


def test_arrays_with_what_they_do_not_say() -> None:
    frames = np.stack([np.asarray(random_image(8, 6, seed)) for seed in range(2)])
    plain = load(MediaSource(modality=VIDEO, value=frames), NONE)
    assert plain.fields == {"shape": [2, 6, 8, 3], "frame_indices": [0, 1], "num_frames": 2, "fps": 24.0}
    metadata = {"fps": 3, "frames_indices": np.array([4, 7]), "total_num_frames": 9, "duration": 3.0}
    timed = load(MediaSource(modality=VIDEO, value=(frames, metadata)), NONE)
    assert timed.fields == {"shape": [2, 6, 8, 3], "frame_indices": [4, 7], "num_frames": 9, "fps": 3.0}
    assert timed.digest() != plain.digest()
    sound, stereo = tone(0.1), np.stack([tone(0.1), tone(0.1, hertz=300)], axis=1)
    assert load(MediaSource(modality=AUDIO, value=(sound, 8000)), NONE).fields == {"rate": 8000}
    for given in (stereo, stereo.T):  # soundfile's, and torchaudio's
        assert load(MediaSource(modality=AUDIO, value=given), NONE).data == stereo.mean(axis=1).tobytes()
    wrong = (
        (VIDEO, (frames, {"fps": 3, "frames_indices": [1]}), "2 frames"),
        (VIDEO, (frames, {"fps": -1}), "2 frames"),
        (VIDEO, (frames, {"total_num_frames": 1}), "2 frames"),
        (VIDEO, (frames, {"fps": "fast"}), "cannot be read"),
        (AUDIO, (sound, 0), "above 0"),
        (AUDIO, (sound, "8k"), "above 0"),
        (AUDIO, sound[:0], "no audio"),
        (AUDIO, [0.1, 0.2], "no audio"),
    )
    for modality, value, message in wrong:
        with pytest.raises(MediaError, match=message):
            load(MediaSource(modality=modality, value=value), NONE)


def test_ten_thousand_pairs_that_differ_by_one_pixel_share_no_name() -> None:
    generator, digests = np.random.default_rng(0), set()
    for _ in range(10_000):
        height, width = generator.integers(1, 12, 2)
        pixels = generator.integers(0, 256, (height, width, 3), np.uint8)
        other = pixels.copy()
        other[generator.integers(height), generator.integers(width), generator.integers(3)] ^= 1 << generator.integers(
            8
        )
        pair = [load(MediaSource(modality=IMAGE, value=each), NONE).digest() for each in (pixels, other)]
        assert pair[0] != pair[1]
        digests.update(pair)
    encoded_pair = {encoded(random_image(4, 4)), encoded(random_image(4, 4, 1))}
    assert len({base64.b64encode(each) for each in encoded_pair}) == 2


def test_the_shape_is_part_of_the_name() -> None:
    pixels = np.arange(24, dtype=np.uint8)
    shapes = ((2, 4, 3), (4, 2, 3), (8, 1, 3), (1, 8, 3))
    assert len({load(MediaSource(modality=IMAGE, value=pixels.reshape(shape)), NONE).digest() for shape in shapes}) == 4
    raw = load(MediaSource(modality=IMAGE, value=pixels.tobytes()), NONE).digest()
    assert raw != load(MediaSource(modality=IMAGE, value=pixels.reshape(2, 4, 3)), NONE).digest()
