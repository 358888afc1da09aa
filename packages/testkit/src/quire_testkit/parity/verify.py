"""The verdict about one architecture: the whole engine beside Transformers, in every situation. Imports torch."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import PoolingParams, PoolingTask, PromptMedia
from quire_models import ModelConfig, load_model
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.network import Network
from quire_models.ledger import num_parameters
from quire_ops import SampleTable, ops
from quire_pooling.pooler import Pooler
from quire_pooling.spec import PoolerSpec
from quire_sampling.state import inv_temperature_of
from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.encoder_prompts import EncoderInput, encoder_input
from quire_testkit.parity.media_prompts import MediaPrompt, media_continuation, media_prompt
from quire_testkit.parity.oracle import (
    Continuation,
    greedy_continuation,
    load_oracle,
    logits_along,
    write_checkpoint,
)
from quire_testkit.parity.situations import SEED, SEEDED, SITUATIONS, Situation, Watched, serve
from quire_testkit.parity.sounds import oracle_tokens, random_frames, sound_states, tell_apart

__all__ = ["BF16", "INT8", "NUM_TOKENS", "Verdict", "compare", "verify_architecture", "verify_checkpoint"]

NUM_PROMPT, NUM_TOKENS = 70, 64
NUM_ITEMS, NUM_MEDIA_TOKENS = (0, 1, 2, 5), 40
"""Items of the prompts of a network with towers, and how many tokens follow them."""
BF16, INT8 = "bfloat16", "int8 weights"
NUM_BF16_PROMPTS, NUM_BF16_TOKENS = 5, 4
_HEAD_TASKS: tuple[PoolingTask, ...] = ("classify", "token_classify", "embed")
"""Tasks of heads of classes, of classes of tokens, and of masked language models."""
BF16_ERRORS = 2.0
"""Quire in bfloat16 may be as many times as far from float32 as Transformers in bfloat16 is."""


@dataclass(slots=True)
class Verdict:
    """How one architecture did."""

    architecture: str
    errors: dict[str, float] = field(default_factory=dict)
    """Situation -> largest error of a logit, as a share of the largest logit."""
    failures: dict[str, str] = field(default_factory=dict)
    """Situation -> what was wrong."""

    def add(self, situation: str, error: float, problem: str | None) -> None:
        """Take in the result of one situation."""
        self.errors[situation] = error
        if problem is not None:
            self.failures[situation] = problem


def verify_architecture(architecture: str, case: ParityCase | None = None) -> Verdict:
    """Verify an architecture on a tiny random checkpoint.

    Args:
        case: How the checkpoint is made; None takes the architecture's own.
    """
    case = case or CASES[architecture]
    with tempfile.TemporaryDirectory() as folder:
        oracle = write_checkpoint(folder, architecture, case)
        return compare(folder, oracle, case)


def verify_checkpoint(folder: str | Path, *, tolerance: float = 1e-4, int8_tolerance: float = 0.15) -> Verdict:
    """Verify a checkpoint of your own, in float32."""
    case = ParityCase(config="", tolerance=tolerance, int8_tolerance=int8_tolerance)
    return compare(folder, load_oracle(folder), case)


def compare(folder: str | Path, oracle: Any, case: ParityCase) -> Verdict:
    """Verify the checkpoint in `folder` against a transformers model of the same weights."""
    config = ModelConfig.from_path(folder).within(NUM_PROMPT + NUM_TOKENS)
    if config.is_encoder and config.encoder_takes_audio:
        return compare_sounds(folder, config, oracle, case)
    if config.is_encoder:
        return compare_hidden(folder, config, oracle, case)
    if config.media is not None:
        return compare_media(folder, config, oracle, case)
    with tempfile.TemporaryDirectory() as store:
        return _compare_decoder(folder, config, oracle, case, Path(store))


def _compare_decoder(folder: str | Path, config: ModelConfig, oracle: Any, case: ParityCase, store: Path) -> Verdict:
    """Verify a network that writes, by a prompt of its own or, behind an encoder, of its decoder."""
    verdict = Verdict(config.architecture)
    prompt = random.Random(config.architecture).choices(range(3, config.vocab_size), k=NUM_PROMPT)
    encoder = encoder_input(config, 0, store)
    expected = greedy_continuation(oracle, prompt, NUM_TOKENS, uses_cache=case.uses_cache, encoder=encoder)
    network = load_model(config, folder, dtype="float32")
    planned, loaded = num_parameters(config), sum(p.numel() for p in oracle.parameters()) - case.num_unused
    if config.is_native and config.language_names is None and planned != loaded:
        verdict.failures["plan"] = f"the planner counts {planned} parameters, the checkpoint has {loaded}"
    _add_situations(verdict, network, prompt, expected, case, lambda situation: serve(
        network, situation, prompt, NUM_TOKENS, encoder
    ))  # fmt: skip
    bf16, allowed = _bfloat16_errors(config, folder, oracle, case, store)
    verdict.add(BF16, bf16, _problem([], [], bf16, allowed))
    if not config.is_native:
        verdict.errors[INT8] = float("nan")
        return verdict
    int8 = _rounded_error(
        load_model(config, folder, dtype="float32", linear_method="int8"), prompt, expected, 8, encoder
    )
    verdict.add(INT8, int8, _problem([], [], int8, case.int8_tolerance))
    return verdict


def compare_media(folder: str | Path, config: ModelConfig, oracle: Any, case: ParityCase) -> Verdict:
    """Verify a network with towers, by prompts with none, one, two and five items, or with one where it takes no other:
    the largest errors of all. What has to do with rounding is NaN: towers are not rounded."""
    verdict = Verdict(config.architecture, dict.fromkeys((*SITUATIONS, BF16, INT8), float("nan")))
    network = load_model(config, folder, dtype="float32")
    with tempfile.TemporaryDirectory() as store:
        others = [
            media_prompt(network, oracle, [number], Path(store)) for number in (7, 8)
        ]  # of items that no prompt has
        assert config.media is not None
        for num_items in (1,) if config.media.is_added else NUM_ITEMS:
            prompt = media_prompt(network, oracle, list(range(num_items)), Path(store))
            expected = media_continuation(oracle, prompt, NUM_MEDIA_TOKENS)
            strangers = [(other.token_ids, other.media) for other in others if other.media is not None]
            _add_situations(verdict, network, prompt.token_ids, expected, case, partial(
                _serve_media, network, prompt, strangers
            ), prompt.longest_span)  # fmt: skip
    return verdict


def _serve_media(
    network: Any, prompt: MediaPrompt, strangers: list[tuple[list[int], PromptMedia]], situation: Situation
) -> dict[str, Watched]:
    return serve(network, situation, prompt.token_ids, NUM_MEDIA_TOKENS, (), prompt.media, strangers)


def _add_situations(
    verdict: Verdict,
    network: Any,
    prompt: Sequence[int],
    expected: Continuation,
    case: ParityCase,
    run: Callable[[Situation], dict[str, Watched]],
    longest_span: int = 0,
) -> None:
    """Take in the result of every situation, where another prompt has not had a larger error.

    Args:
        run: Serves the prompt in a situation.
        longest_span: Tokens of the prompt that have to be computed in one step; shorter chunks do not apply.
    """
    num_prompt, num_tokens = len(prompt), len(expected.token_ids)
    seeded: Watched | None = None
    for name, situation in SITUATIONS.items():
        if 0 < situation.chunk < longest_span:
            continue
        seen = run(situation)
        error = _largest_error(seen["greedy"], expected, num_prompt, num_tokens)
        problem = _problem(seen["greedy"].token_ids[:num_tokens], expected.token_ids, error, case.tolerance)
        if (seen["greedy"].num_cached_tokens > 0) != situation.is_warm:
            problem = problem or f"{seen['greedy'].num_cached_tokens} tokens came from the prefix cache"
        if seen["greedy"].num_preemptions != len(situation.preempt_after):
            problem = problem or f"preempted {seen['greedy'].num_preemptions} times"
        seeded = seeded or seen["seeded"]
        tolerance = 0.0 if network.batch_invariant else case.tolerance
        problem = problem or _seeded_problem(seen["seeded"], seeded, tolerance, num_prompt)
        before = verdict.errors.get(name, 0.0)
        verdict.add(name, error if before != before else max(error, before), problem)


def compare_hidden(folder: str | Path, config: ModelConfig, oracle: Any, case: ParityCase) -> Verdict:
    """Verify an encoder alone by its hidden states, or by what its head makes of them: of a text by itself, and of the
    same text beside others. What has to do with generation is NaN."""
    verdict = Verdict(config.architecture, dict.fromkeys((*SITUATIONS, BF16, INT8), float("nan")))
    unused = "pooler." if config.network.pooler is None else " "  # a body's, which nobody reads
    own = sum(p.numel() for name, p in oracle.named_parameters() if not name.startswith(unused))
    if num_parameters(config) != own:
        verdict.failures["plan"] = f"the planner counts {num_parameters(config)} parameters, the checkpoint has {own}"
    choose = random.Random(config.architecture).choices
    texts = [choose(range(3, config.vocab_size), k=length) for length in (NUM_PROMPT, 1, 33, NUM_PROMPT, 8)]
    expected = _oracle_outputs(oracle, texts, config.network.pooler)
    theirs = _oracle_outputs(copy.deepcopy(oracle).bfloat16(), texts, config.network.pooler)
    _compare_states(verdict, folder, config, case, texts, expected, theirs, _outputs)
    return verdict


def compare_sounds(folder: str | Path, config: ModelConfig, oracle: Any, case: ParityCase) -> Verdict:
    """Verify an encoder of sounds that knows what is said: hidden states and tokens, as in `compare_hidden`."""
    verdict = Verdict(config.architecture, dict.fromkeys((*SITUATIONS, BF16, INT8), float("nan")))
    planned, loaded = num_parameters(config), sum(p.numel() for p in oracle.parameters())
    if planned != loaded:
        verdict.failures["plan"] = f"the planner counts {planned} parameters, the checkpoint has {loaded}"
    sounds = random_frames(config, case.seed)
    theirs = sound_states(copy.deepcopy(oracle).bfloat16(), sounds)
    expected = sound_states(oracle, sounds)
    _compare_states(verdict, folder, config, case, sounds, expected, theirs, lambda net, some: net.read(some))
    tell_apart(oracle, sounds)
    with tempfile.TemporaryDirectory() as changed:
        oracle.save_pretrained(changed)
        network: Any = load_model(config, changed, dtype="float32")
    states = network.read(sounds)
    told = network.hear(torch.cat(states), [len(each) for each in states])
    for number, (tokens, sound) in enumerate(zip(told, sounds, strict=True)):
        if tokens[:, 0].long().tolist() != oracle_tokens(oracle, sound):
            verdict.failures["with strangers"] = f"the tokens of sound {number} differ"
    return verdict


def _compare_states(
    verdict: Verdict,
    folder: str | Path,
    config: ModelConfig,
    case: ParityCase,
    inputs: Sequence[Any],
    expected: Sequence[Tensor],
    theirs: Sequence[Tensor],
    run: Callable[[Any, Sequence[Any]], list[Tensor]],
) -> None:
    """Take in the errors of hidden states: of an input by itself, beside others, in bfloat16 and in int8.

    Args:
        expected: What Transformers has of each input in float32.
        theirs: And in bfloat16.
        run: (network, inputs) -> what it has of each.
    """
    network = load_model(config, folder, dtype="float32")
    networks = {
        BF16: (load_model(config, folder, dtype="bfloat16"), BF16_ERRORS * _hidden_error(theirs, expected)),
        INT8: (load_model(config, folder, dtype="float32", linear_method="int8"), case.int8_tolerance),
    }
    alone = [run(network, [each])[0] for each in inputs]
    found = {"whole prefill": (alone, case.tolerance), "with strangers": (run(network, inputs), case.tolerance)}
    for name, (other, allowed) in networks.items():
        found[name] = (run(other, inputs), allowed)
    for name, (outputs, allowed) in found.items():
        error = _hidden_error(outputs, expected)
        verdict.add(name, error, _problem([], [], error, allowed))


@torch.inference_mode()
def _oracle_outputs(oracle: Any, texts: Sequence[Sequence[int]], pooler: PoolerSpec | None) -> list[Tensor]:
    """Of each text: hidden states, logits of classes, or weights of words as SPLADE makes them of logits."""
    outputs = [oracle(input_ids=torch.tensor([list(text)])) for text in texts]
    if pooler is None:
        return [each.last_hidden_state[0].float() for each in outputs]
    logits = [each.logits[0].float() for each in outputs]
    return logits if pooler.labels else [torch.log1p(torch.relu(each)).amax(0) for each in logits]


def _outputs(network: Network, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """What `_oracle_outputs` gives, of Quire's network, the texts side by side."""
    assert isinstance(network, EncoderOnly)
    hidden, pooler = network.read(texts), network.config.network.pooler
    if pooler is None:
        return hidden
    task = next(task for task in _HEAD_TASKS if task in pooler.tasks)
    params = PoolingParams(task=task, use_activation=False)
    token_ids = torch.tensor([token for text in texts for token in text])
    lens = [len(text) for text in texts]
    return Pooler(pooler, network.head_weights).pool(torch.cat(hidden), lens, [params] * len(texts), token_ids)


def _hidden_error(hidden: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error as a share of the largest number."""
    return max(
        float((ours.float() - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(hidden, expected, strict=True)
    )


def _bfloat16_errors(
    config: ModelConfig, folder: str | Path, oracle: Any, case: ParityCase, store: Path
) -> tuple[float, float]:
    """The error in bfloat16, and the allowed one: medians over prompts, since a router that rounding turns to another
    expert is far off at once, with Transformers as with us."""
    network, rounded = load_model(config, folder, dtype="bfloat16"), copy.deepcopy(oracle).bfloat16()
    for name, parameter in rounded.named_parameters():
        if any(part in name for part in case.wide):
            parameter.data = parameter.data.float()
    ours, theirs = [], []
    for number in range(NUM_BF16_PROMPTS):
        prompt = random.Random(number).choices(range(3, config.vocab_size), k=NUM_PROMPT)
        encoder = encoder_input(config, number, store)
        expected = greedy_continuation(oracle, prompt, NUM_BF16_TOKENS, uses_cache=case.uses_cache, encoder=encoder)
        ours.append(_rounded_error(network, prompt, expected, NUM_BF16_TOKENS, encoder))
        theirs.append(_largest_difference(logits_along(rounded, prompt, expected, encoder), expected))
    return median(ours), BF16_ERRORS * median(theirs)


def _rounded_error(
    network: Any, prompt: Sequence[int], expected: Continuation, num_tokens: int, encoder: EncoderInput
) -> float:
    seen = serve(network, SITUATIONS["whole prefill"], prompt, num_tokens, encoder)["greedy"]
    return _largest_error(seen, expected, len(prompt), num_tokens)


def _largest_difference(logits: Tensor, expected: Continuation) -> float:
    return float((logits - expected.logits).abs().max()) / float(expected.logits.abs().max())


def _largest_error(seen: Watched, expected: Continuation, num_prompt: int, num_tokens: int) -> float:
    allowed = expected.logits > torch.finfo(torch.float32).min / 2  # the others are never chosen, as their class says
    scale = float(expected.logits[allowed].abs().max())
    same = _first_difference(seen.token_ids, expected.token_ids)
    # Behind the first other token the contexts differ, and so do the logits.
    errors = [
        float((seen.logits[num_prompt - 1 + offset] - expected.logits[offset]).abs().max()) / scale
        for offset in range(min(num_tokens, same + 1, len(seen.token_ids)))
    ]
    return max(errors, default=float("inf"))


def _first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(tokens, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(expected)))


def _seeded_problem(seen: Watched, whole: Watched, tolerance: float, num_prompt: int) -> str | None:
    """What is wrong with a seeded request, beside the same one after a whole prefill.

    Every token must be the one that its logits and the seed give. Where the network does not promise the same bits in
    every situation, rounding may turn a sampled token: up to there the logits must agree within the tolerance.
    """
    wrong = _first_difference(seen.token_ids, _sampled_again(seen, num_prompt))
    if wrong < len(seen.token_ids):
        return f"token {wrong} of a seeded request is not what its logits and the seed give"
    if not tolerance and seen.token_ids != whole.token_ids:
        return "the tokens of a seeded request are others than after a whole prefill"
    same = _first_difference(seen.token_ids, whole.token_ids)
    positions = range(num_prompt - 1, num_prompt + min(same, len(seen.token_ids) - 1))
    ours, theirs = (torch.stack([each.logits[position] for position in positions]) for each in (seen, whole))
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if error > tolerance:
        return f"logits of a seeded request are off by {error:.1e} from those after a whole prefill"
    return None


def _sampled_again(seen: Watched, num_prompt: int) -> list[int]:
    """The tokens of the seeded request as the reference of op `sample` samples them from its logits."""
    positions = torch.arange(num_prompt - 1, num_prompt - 1 + len(seen.token_ids))
    logits = torch.stack([seen.logits[position] for position in positions.tolist()])
    table = SampleTable.greedy(1, logits.shape[1])
    table.do_sample[0], table.seeds[0], table.num_prompt_tokens[0] = True, SEED, num_prompt
    table.inv_temperature[0] = inv_temperature_of(torch.tensor(SEEDED.temperature, dtype=torch.float64)).item()
    table.top_p[0] = SEEDED.top_p
    return ops.sample(logits, torch.zeros_like(positions), positions, table)[0].tolist()


def _problem(tokens: Sequence[int], expected: Sequence[int], error: float, tolerance: float) -> str | None:
    if not error <= tolerance:  # NaN is an error, too
        return f"logits are off by {error:.1e} of the largest; at most {tolerance} is allowed"
    if list(tokens) != list(expected):
        return f"token {_first_difference(tokens, expected)} differs"
    return None
