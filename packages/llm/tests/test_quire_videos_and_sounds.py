"""Videos and sounds in prompts of Python: tokens are those of Transformers after its processor's joint call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestError, SamplingParams
from quire_testkit.media_files import RATE, clip, media_url, read_clip, tone, video_file, wav_file
from quire_testkit.media_models import MediaModel

NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def llm_of(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, dtype="float32", max_model_len=1024, kv_cache_memory_bytes=1 << 25, num_threads=1, **settings)


def tokens_of(llm: LLM, text: str, data: dict[str, Any]) -> list[int]:
    (output,) = llm.generate({"prompt": text, "multi_modal_data": data}, PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_files_arrays_and_lists_of_frames_are_the_same_video(tmp_path: Path) -> None:
    model = MediaModel(tmp_path, "Qwen2_5_VLForConditionalGeneration")
    data = video_file(clip(1, num_frames=20))
    (tmp_path / "clip.mp4").write_bytes(data)
    video, token = read_clip(data), model.family.placeholders["video"]
    text = f"look: {token} so"
    sampled = model.expected(text, NUM_TOKENS, videos=[video], do_sample_frames=True, num_frames=4)
    everything = model.expected(text, NUM_TOKENS, videos=[video], do_sample_frames=False)
    assert sampled != everything
    arguments = {"do_sample_frames": True, "num_frames": 4}
    with llm_of(tmp_path, allowed_local_media_path=str(tmp_path), mm_processor_kwargs=arguments) as llm:
        for value in (data, media_url(data, "video/mp4"), f"file://{tmp_path}/clip.mp4"):
            assert tokens_of(llm, text, {"video": value}) == sampled
        frames = list(video.frames)
        for value in ((video.frames, {"fps": 2.0}), (frames, {"fps": 2.0})):
            assert tokens_of(llm, text, {"video": value}) == everything
        assert tokens_of(llm, text, {"video": frames}) == tokens_of(llm, text, {"video": video.frames})
        conversation = [{"role": "user", "content": [{"type": "video", "video": data}, {"type": "text", "text": "so"}]}]
        (answer,) = llm.chat(conversation, PARAMS, use_tqdm=False)
        chat = f"<|im_start|>user\n{token}so<|im_end|>\n<|im_start|>assistant\n"
        expected = model.expected(chat, NUM_TOKENS, videos=[video], do_sample_frames=True, num_frames=4)
        assert list(answer.outputs[0].token_ids) == expected
        with pytest.raises(RequestError, match="metadata") as failure:
            llm.generate({"prompt": text, "multi_modal_data": {"video": (frames, {"fps": 0})}}, PARAMS, use_tqdm=False)
        assert failure.value.param == "multi_modal_data.video[0]"


def test_files_and_arrays_are_the_same_sound(tmp_path: Path) -> None:
    model = MediaModel(tmp_path, "Qwen2AudioForConditionalGeneration")
    sound, text = tone(3), f"hear: {model.family.placeholders['audio']} so"
    expected = model.expected(text, NUM_TOKENS, audio=[sound])
    (tmp_path / "tone.wav").write_bytes(wav_file(sound))
    with llm_of(tmp_path, allowed_local_media_path=str(tmp_path)) as llm:
        url = media_url(wav_file(sound), "audio/wav")
        for value in (sound, (sound, RATE), wav_file(sound), url, f"file://{tmp_path}/tone.wav"):
            assert tokens_of(llm, text, {"audio": value}) == expected
        slow = tone(3, rate=8000)
        resampled = tokens_of(llm, text, {"audio": (slow, 8000)})
        assert resampled == tokens_of(llm, text, {"audio": wav_file(slow, 8000)})
        assert resampled != tokens_of(llm, text, {"audio": slow})
        part = {"type": "input_audio", "input_audio": {"data": url.partition(",")[2], "format": "wav"}}
        (answer,) = llm.chat([{"role": "user", "content": [part]}], PARAMS, use_tqdm=False)
        chat = f"<|im_start|>user\n{model.family.placeholders['audio']}<|im_end|>\n<|im_start|>assistant\n"
        assert list(answer.outputs[0].token_ids) == model.expected(chat, NUM_TOKENS, audio=[sound])
