"""Write the demo model's hidden states on training conversations, for `companions.py eagle3 --hidden-states FOLDER`.

Run: python packages/demo-model/train/extract.py FOLDER [--conversations 400]

The engine does it (`--extract-hidden-states`): a conversation is a prompt, of which every token is computed, and each
has a file of token ids and states. With another model's folder and prompts the same makes data for its head.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from chat import Chat
from companions import FEATURE_LAYERS
from corpus.mix import conversation
from corpus.words import Source

from quire import LLM, SamplingParams


def main() -> None:
    """Write a file for each conversation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    chat, source = Chat(), Source(Random(args.seed))
    drawn = (conversation(source) for _ in range(args.conversations))
    prompts = [chat.encode(chat.render(c.messages, tools=c.tools, enable_thinking=c.enable_thinking)) for c in drawn]
    llm = LLM(
        num_threads=1,
        enable_prefix_caching=False,
        extract_hidden_states=str(args.folder),
        extract_hidden_states_layers=FEATURE_LAYERS,
    )
    llm.generate([ids for ids in prompts if len(ids) <= 1024], SamplingParams(temperature=0, max_tokens=1))
    llm.close()
    print(f"{len(list(args.folder.glob('*.safetensors')))} files in {args.folder}")


if __name__ == "__main__":
    main()
