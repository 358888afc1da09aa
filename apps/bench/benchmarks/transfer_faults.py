"""Hand requests from a prefill engine to a decode engine over a bad link, and compare every output with that of one
engine alone.

    python apps/bench/benchmarks/transfer_faults.py --faults 1000 [--connector NixlConnector] [--seed 0]

Each request meets one fault: a slow, cutting, damaging or silent link, nobody at the other end, blocks that were let
go or are those of another prompt, an abort in the middle; or its blocks come from a block store over such a link. Ends
with status 1 when an output differs, when a request waits longer than --most-wait seconds for its first token beyond
what computing it takes, or when blocks are not given back. What else the machine does counts as waiting.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from quire import LLM, OutputKind, RequestOptions, SamplingParams
from quire_kv_transfer import BlockStore, BlockStoreServer, StoreTenant
from quire_testkit.faulty_link import FaultyLink
from quire_testkit.faulty_tier import Faults

KINDS = ("none", "slow", "cut", "damaged", "silent", "nobody", "let go", "another prompt", "aborted", "store")
NUM_PROMPTS = 6
PROMPT_LEN = 200
NUM_TOKENS = 6
DELTAS = RequestOptions(output_kind=OutputKind.DELTA)


@dataclass(slots=True)
class Answer:
    """What came of a request."""

    tokens: list[int]
    first_s: float
    num_cached_tokens: int


def params_with(max_tokens: int, transfer: dict[str, Any] | None) -> SamplingParams:
    """Sampled tokens of a fixed seed: a wrong key or value changes them."""
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(temperature=1.0, seed=3, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def run(llm: LLM, prompt: list[int], transfer: dict[str, Any] | None = None, abort_after_s: float = 60.0) -> Answer:
    """One request, of which nothing is in memory."""
    llm.reset_prefix_cache()
    answer, begin_s = Answer([], 0.0, 0), time.perf_counter()
    request_id = llm.engine.add_request(prompt, params_with(NUM_TOKENS, transfer), DELTAS)
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            answer.first_s = answer.first_s or time.perf_counter() - begin_s
            answer.tokens += output.outputs[0].token_ids
            answer.num_cached_tokens = output.num_cached_tokens
        if time.perf_counter() - begin_s > abort_after_s:
            llm.engine.abort(request_id)
    return answer


class Rig:
    """Two engines with a connector, one with a block store, and a bad link to each source of blocks.

    Args:
        connector: Name of the connector.
        model: Folder or name; None for the demo model.
        seed: Of prompts and faults.
    """

    # Many attributes: engines, links, faults and what is expected.

    def __init__(self, connector: str, model: str | None, seed: int) -> None:
        self.rng = random.Random(seed)
        self.faults, self.store_faults = Faults(seed), Faults(seed + 1)
        store = BlockStore([StoreTenant(name="all", api_key="", memory_bytes=200 << 20)])
        self.store = BlockStoreServer(store, ["tcp://127.0.0.1:0"])
        self.store.start()
        store_port = int(self.store.addresses[0].rpartition(":")[2])
        self.store_link = FaultyLink(("127.0.0.1", store_port), self.store_faults)
        self._model = [] if model is None else [model]
        connected = {"kv_connector": connector, "kv_connector_extra_config": {"abort_request_timeout": 3.0}}
        producer, consumer = connected | {"kv_role": "kv_producer"}, connected | {"kv_role": "kv_consumer"}
        self.prefill = self._llm(kv_transfer_config=producer, kv_tier=self.store.addresses[0])
        self.decode = self._llm(kv_transfer_config=consumer)
        self.reader = self._llm(kv_tier=f"tcp://127.0.0.1:{self.store_link.port}")
        largest = min(300, self.prefill.engine_info.vocab_size)
        self.prompts = [self.rng.choices(range(3, largest), k=PROMPT_LEN) for _ in range(NUM_PROMPTS)]
        self.expected = [run(self.decode, prompt).tokens for prompt in self.prompts]
        self.computing_s = max(run(self.decode, prompt).first_s for prompt in self.prompts)
        transfer = self.hand_over(0)
        self.link = FaultyLink((transfer["remote_host"], transfer["remote_port"]), self.faults)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.free_port = int(sock.getsockname()[1])

    def _llm(self, **settings: Any) -> LLM:
        return LLM(*self._model, max_model_len=320, max_num_seqs=4, num_gpu_blocks_override=2000, **settings)

    def hand_over(self, number: int) -> dict[str, Any]:
        """Have the prefill engine compute a prompt. Returns where it says the blocks are."""
        params = params_with(1, {"do_remote_decode": True})
        (output,) = self.prefill.generate([{"prompt_token_ids": self.prompts[number]}], params, use_tqdm=False)
        assert output.kv_transfer_params is not None
        return output.kv_transfer_params

    def meet(self, kind: str, number: int) -> Answer:
        """One request that meets one fault."""
        prompt, rng = self.prompts[number], self.rng
        faults = self.store_faults if kind == "store" else self.faults
        trouble = rng.choice(("slow", "cut", "damaged", "silent")) if kind == "store" else kind
        faults.delay_s = rng.choice((0.001, 0.01, 0.1)) * (trouble == "slow")
        faults.loss = rng.choice((0.01, 0.3)) * (trouble == "cut")
        faults.corruption = rng.choice((0.01, 0.3)) * (trouble == "damaged")
        faults.is_dead = trouble == "silent"
        if kind == "store":
            return run(self.reader, prompt)
        transfer = {**self.hand_over(number), "remote_port": self.link.port}
        if kind == "nobody":
            transfer["remote_port"] = self.free_port
        elif kind == "let go":
            transfer["remote_request_id"] += "0"
        elif kind == "another prompt":
            transfer["remote_request_id"] = self.hand_over((number + 1) % NUM_PROMPTS)["remote_request_id"]
        elif kind == "aborted":
            faults.delay_s = 0.01
            run(self.decode, prompt, transfer, abort_after_s=rng.uniform(0, 0.1))
            faults.delay_s = 0.0
            transfer = {**self.hand_over(number), "remote_port": self.link.port}
        return run(self.decode, prompt, transfer)

    def blocks_left(self) -> float:
        """Share of the caches that is still in use when everything that is held has run out of time."""
        end_s, used = time.monotonic() + 60.0, 1.0
        while used and time.monotonic() < end_s:
            for llm in (self.prefill, self.decode, self.reader):
                llm.generate([{"prompt_token_ids": [5, 6]}], params_with(1, None), use_tqdm=False)
            used = max(llm.engine.core.stats().kv_cache_usage for llm in (self.prefill, self.decode, self.reader))
            time.sleep(0.2)
        for llm in (self.prefill, self.decode, self.reader):
            assert llm.engine.core.parts.check_integrity is not None
            llm.engine.core.parts.check_integrity()
        return used

    def close(self) -> None:
        """End everything."""
        for each in (self.link, self.store_link, self.prefill, self.decode, self.reader, self.store):
            each.close()


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="requests that meet one each")
    parser.add_argument("--connector", default="SocketConnector", help="NixlConnector or SocketConnector")
    parser.add_argument("--model", default=None, help="folder or name; the demo model without")
    parser.add_argument("--most-wait", type=float, default=2.0, help="seconds for a first token, beyond computing it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rig = Rig(arguments.connector, arguments.model, arguments.seed)
    met, fetched = Counter[str](), Counter[str]()
    longest_s = dict.fromkeys(KINDS, 0.0)
    num_wrong = num_hangs = 0
    for index in range(arguments.faults):
        kind, number = KINDS[index % len(KINDS)], rig.rng.randrange(NUM_PROMPTS)
        answer = rig.meet(kind, number)
        waited_s = max(0.0, answer.first_s - rig.computing_s)
        met[kind] += 1
        fetched[kind] += answer.num_cached_tokens > 0
        longest_s[kind] = max(longest_s[kind], waited_s)
        if answer.tokens != rig.expected[number]:
            num_wrong += 1
            print(f"WRONG: fault {index} ({kind}): {answer.tokens}, not {rig.expected[number]}")
        if waited_s > arguments.most_wait:
            num_hangs += 1
            print(f"LATE: fault {index} ({kind}): {waited_s:.2f} s")
    rig.faults.is_dead = rig.store_faults.is_dead = False
    left = rig.blocks_left()
    print(f"{arguments.connector}: a prompt is computed in {rig.computing_s:.3f} s at most")
    print(f"{'fault':>15} {'requests':>8} {'fetched':>8} {'longest wait, s':>16}")
    for kind in KINDS:
        print(f"{kind:>15} {met[kind]:8} {fetched[kind]:8} {longest_s[kind]:16.2f}")
    print(
        f"{arguments.faults} faults: {num_wrong} wrong outputs, {num_hangs} waits over {arguments.most_wait:g} s, ",
        end="",
    )
    print(f"{left:.1%} of blocks not given back")
    rig.close()
    return int(bool(num_wrong or num_hangs or left or not fetched["none"]))


if __name__ == "__main__":
    sys.exit(main())
