"""How much the next turn of a long conversation costs, against its new text alone and against everything again.

    python packages/renderers/benchmarks/incremental_rendering.py [--tokens 100000] [--folder CHECKPOINT] [--json FILE]

Without a folder a byte-level tokenizer is trained here; ChatML template.
Medians of several turns, in CPU time of the thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from quire_renderers import ChatRenderer, IncrementalDetokenizer, load_tokenizer

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
SYLLABLES = "ba ke li mo nu ra se ti vo xa pre con ing tion er st and the of to".split()


def some_text(chooser: random.Random, num_words: int) -> str:
    """Words of a language of our own, so that the tokenizer has something to merge."""
    words = ("".join(chooser.choices(SYLLABLES, k=chooser.randrange(1, 4))) for _ in range(num_words))
    return " ".join(word + chooser.choice(["", "", "", "", ",", ".\n"]) for word in words)


def train(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with ChatML tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([some_text(random.Random(i), 200) for i in range(300)], trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))


def median_ms(times_s: list[float]) -> float:
    return round(statistics.median(times_s) * 1e3, 3)


def measure_turns(folder: Path, num_tokens: int, num_turns: int) -> dict[str, float]:
    """Grow a conversation to `num_tokens`, then time further turns."""
    tokenizer, chooser = load_tokenizer(folder), random.Random(1)
    renderer = ChatRenderer(tokenizer, TEMPLATE)
    messages: list[dict[str, str]] = []
    size = 0
    while size < num_tokens:
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": some_text(chooser, 150)})
            size += len(tokenizer.encode(messages[-1]["content"])) + 5
    messages.append({"role": "user", "content": "begin"})
    renderer.render_chat(messages)
    turn, template_only, new_only, whole = [], [], [], []
    num_new_tokens = 0
    for _ in range(num_turns):
        new = [
            {"role": "assistant", "content": some_text(chooser, 150)},
            {"role": "user", "content": some_text(chooser, 60)},
        ]
        messages += new
        start = time.thread_time()
        rendered = renderer.render_chat(messages)
        turn.append(time.thread_time() - start)
        num_new_tokens = len(rendered.token_ids) - rendered.num_reused_tokens
        start = time.thread_time()
        for message in new:
            tokenizer.encode(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n")
        new_only.append(time.thread_time() - start)
        start = time.thread_time()
        tokenizer.encode(rendered.text or "", add_special_tokens=False)
        whole.append(time.thread_time() - start)
        start = time.thread_time()
        ChatRenderer.render_chat(renderer, messages)  # everything known: template and look-ups only
        template_only.append(time.thread_time() - start)
    return {
        "conversation_tokens": len(rendered.token_ids),
        "messages": len(messages),
        "new_tokens": num_new_tokens,
        "next_turn_ms": median_ms(turn),
        "nothing_new_ms": median_ms(template_only),
        "tokenize_new_text_only_ms": median_ms(new_only),
        "tokenize_whole_ms": median_ms(whole),
        "cache_bytes": renderer.cache_stats.used_bytes,
    }


def measure_detokenizer(folder: Path) -> dict[str, float]:
    """Tokens per second, one token per call, as a stream arrives; best of five."""
    tokenizer = load_tokenizer(folder)
    token_ids = tokenizer.encode(some_text(random.Random(2), 30_000), add_special_tokens=False)
    figures = {}
    for name, stop in (("detokenize_tokens_per_s", ()), ("detokenize_with_stops_tokens_per_s", ("###", "\n\nUser:"))):
        best = 0.0
        for _ in range(5):
            detokenizer = IncrementalDetokenizer(tokenizer, stop=stop)
            start = time.thread_time()
            for token_id in token_ids:
                detokenizer.add([token_id])
            best = max(best, len(token_ids) / (time.thread_time() - start))
        figures[name] = round(best)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="length of the conversation before the timed turns")
    parser.add_argument("--turns", type=int, default=9, help="timed turns")
    parser.add_argument("--folder", type=Path, help="checkpoint folder with a tokenizer (ChatML tokens help)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if options.folder is None:
            train(folder)
        figures = {**measure_turns(folder, options.tokens, options.turns), **measure_detokenizer(folder)}
    for name, value in figures.items():
        print(f"{name:38} {value:>14,}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
