"""Text and times by Quire beside those by faster-whisper or by Transformers, for the same weights in float32.

    python apps/bench/benchmarks/spoken_texts.py SOUNDS --long 300 1800
    python apps/bench/benchmarks/equal_transcripts.py faster-whisper MODEL SOUNDS peer.json
    python apps/bench/benchmarks/equal_transcripts.py transformers MODEL SOUNDS peer.json
    python apps/bench/benchmarks/equal_transcripts.py quire MODEL SOUNDS peer.json

MODEL is a folder in the format of CTranslate2; `faster-whisper` needs that package, and the others run without it.
`quire` compares with what one of the other two has written. All decode greedily, with one thread; beside each recording
stand the processor seconds of both, and the resident memory of this process at its highest. Transformers reads no text
of before (condition_on_prev_tokens), and so does Quire beside it.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEAR_S = 0.021
"""faster-whisper gives times as multiples of 0.02 s."""
RATE = 16_000


def by_faster_whisper(model: str, sounds: Path, found: Path) -> None:
    """What faster-whisper writes."""
    from faster_whisper import WhisperModel  # type: ignore[import-not-found]
    from faster_whisper.audio import decode_audio  # type: ignore[import-not-found]

    whisper, texts = WhisperModel(model, compute_type="float32", cpu_threads=1), {}
    for file in sorted(sounds.glob("*.flac")):
        samples, begin = decode_audio(str(file)), time.process_time()
        segments = [
            (each.start, each.end, each.text, each.avg_logprob)
            for each in whisper.transcribe(samples, beam_size=1, temperature=0)[0]
        ]
        texts[file.name] = {"segments": segments, "cpu_s": time.process_time() - begin}
        found.write_text(json.dumps({"peer": "faster-whisper", "texts": texts}))


def by_transformers(model: str, sounds: Path, found: Path) -> None:
    """What Transformers' long-form generation writes."""
    import soundfile
    import torch
    import transformers

    from quire_bench.speech_files import SPEECH_FORMATS, write_speech_files
    from quire_models.hub import resolve_model

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        write_speech_files(resolve_model(model), Path(scratch))
        folder = Path(scratch) / SPEECH_FORMATS["transformers"]
        whisper = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=whisper.config.num_mel_bins)
    end, texts = whisper.generation_config.eos_token_id, {}
    num_frames = 2 * whisper.config.max_source_positions
    for file in sorted(sounds.glob("*.flac")):
        samples, begin = soundfile.read(file, dtype="float32")[0], time.process_time()
        heard = extractor(
            samples,
            sampling_rate=RATE,
            return_tensors="pt",
            return_attention_mask=True,
            truncation=False,
            padding="longest",
        )
        missing = (0, max(0, num_frames - heard.input_features.shape[-1]))
        for name in heard:  # a short recording as the last window of a long one: its processor would add silence
            heard[name] = torch.nn.functional.pad(heard[name], missing)
        with torch.inference_mode():
            output = whisper.generate(
                **heard, return_timestamps=True, return_segments=True, condition_on_prev_tokens=False,
                temperature=0.0, num_beams=1, do_sample=False,
            )  # fmt: skip
        segments = []
        for each in output["segments"][0]:
            text = tokenizer.decode([token for token in each["tokens"].tolist() if token < end])
            if text.strip():
                segments.append((float(each["start"]), float(each["end"]), text, None))
        texts[file.name] = {"segments": segments, "cpu_s": time.process_time() - begin}
        found.write_text(json.dumps({"peer": "transformers", "texts": texts}))


def by_quire(model: str, sounds: Path, found: Path) -> None:
    """The same by Quire, compared."""
    import soundfile

    from quire import LLM
    from quire_speech import TranscriptionOptions

    told = json.loads(found.read_text())
    texts: dict[str, Any] = told["texts"]
    options = TranscriptionOptions(temperatures=(0.0,))
    if told["peer"] == "transformers":
        options = TranscriptionOptions(
            temperatures=(0.0,), condition_on_previous_text=False, no_speech_threshold=None, language="en"
        )
    llm = LLM(model, dtype="float32", num_threads=1)
    num_equal = 0
    for name, other in texts.items():
        samples, rate = soundfile.read(sounds / name, dtype="float32")
        begin = time.process_time()
        (transcription,) = llm.transcribe(samples, options)
        spent_s = time.process_time() - begin
        pairs = list(zip(transcription.segments, other["segments"], strict=False))
        apart = [
            index
            for index, (mine, (start, end, text, _)) in enumerate(pairs)
            if mine.text != text or abs(mine.start_s - start) > NEAR_S or abs(mine.end_s - end) > NEAR_S
        ]
        is_equal = not apart and len(transcription.segments) == len(other["segments"])
        num_equal += is_equal
        logprobs = [abs(mine.avg_logprob - logprob) for mine, (*_, logprob) in pairs if logprob is not None]
        state = (
            f"equal, {len(pairs)} segments" if is_equal else f"DIFFERENT from segment {min(apart, default=len(pairs))}"
        )
        near = f"; log probability within {max(logprobs):.1e}" if logprobs else ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name}: {state}{near}; {len(samples) / rate:.1f} s of sound in {spent_s:.2f} s, {told['peer']} "
              f"{other['cpu_s']:.2f} s; {peak:.0f} MiB", flush=True)  # fmt: skip
        if not is_equal:
            index = min(apart, default=len(pairs))
            for who, segments in (("quire", [(each.start_s, each.end_s, each.text) for each in transcription.segments]),
                                  (told["peer"], [tuple(each[:3]) for each in other["segments"]])):  # fmt: skip
                print(f"    {who}: {segments[index : index + 2]}")
    print(f"{num_equal} of {len(texts)} equal")


if __name__ == "__main__":
    programs = {"faster-whisper": by_faster_whisper, "transformers": by_transformers, "quire": by_quire}
    programs[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
