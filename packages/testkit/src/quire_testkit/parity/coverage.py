"""What docs/models.md says of architectures that have no case: all causal classes of Transformers, and vLLM's.

Lists of names and reasons, and the text that is made of them; a test holds that no class is left out. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quire_models.registry import OWN_CODE, RENAMED, architecture_entry
from quire_testkit.parity.cases import CASES

__all__ = ["REFUSED", "VLLM_MISSING", "VLLM_TEXT", "coverage_text", "kind_of"]

_OWN_ATTENTION = "does not let its attention be exchanged"
_STATES = "keeps a state between tokens that is not a KV cache"
_ENCODED = "is one half of a network with an encoder"
_SPARSE = "chooses what it attends to (sparse attention)"

REFUSED: Mapping[str, str] = {
    "BigBirdForCausalLM": _OWN_ATTENTION,
    "BltForCausalLM": "reads bytes in patches, by a network of its own",
    "CpmAntForCausalLM": "has biases by distance that it learns, in both directions of a prompt",
    "DiffLlamaForCausalLM": "attends twice in a layer, and takes the difference",
    "DogeForCausalLM": "its attention has a mask of its own",
    "Dots3NoteForCausalLM": _SPARSE,
    "GPTNeoForCausalLM": _OWN_ATTENTION,
    "GPTNeoXJapaneseForCausalLM": _OWN_ATTENTION,
    "Gemma4AssistantForCausalLM": "drafts for another network, whose keys it reads",
    "Gemma4UnifiedAssistantForCausalLM": "drafts for another network, whose keys it reads",
    "Gemma4UnifiedForConditionalGeneration": "takes media without towers; its text is Gemma4UnifiedForCausalLM",
    "GitForCausalLM": "sees pictures, and attends to them in both directions",
    "MegatronBertForCausalLM": _OWN_ATTENTION,
    "MusicgenForCausalLM": "makes sound, several tokens at once",
    "MusicgenMelodyForCausalLM": "makes sound, several tokens at once",
    "MvpForCausalLM": _OWN_ATTENTION,
    "OpenAIGPTLMHeadModel": "keeps no cache",
    "ProphetNetForCausalLM": "predicts several tokens at once, by streams of their own",
    "RecurrentGemmaForCausalLM": _STATES,
    "ReformerModelWithLMHead": "sorts tokens into buckets, and attends within them",
    "RemBertForCausalLM": _OWN_ATTENTION,
    "RoFormerForCausalLM": _OWN_ATTENTION,
    "TrOCRForCausalLM": _ENCODED,
    "XLMWithLMHeadModel": _OWN_ATTENTION,
    "XLNetLMHeadModel": "predicts tokens in any order, by two streams",
    "xLSTMForCausalLM": _STATES,
}
"""Causal class of Transformers -> why it does not run."""

VLLM_TEXT = (
    "AXK1ForCausalLM", "AfmoeForCausalLM", "AliceAIForCausalLM", "ApertusForCausalLM", "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BeamForCausalLM",
    "BloomForCausalLM", "ChatGLMForConditionalGeneration", "ChatGLMModel", "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM", "CohereForCausalLM", "DbrxForCausalLM", "DeciLMForCausalLM", "DeepseekForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM",
    "DomynEdgeForCausalLM", "DoryForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM",
    "ExaoneForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM",
    "FalconMambaForCausalLM", "FlintForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm5NextForCausalLM", "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM",
    "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM", "HCXVisionV2ForCausalLM",
    "HYV3ForCausalLM", "HYV4ForCausalLM", "HrmTextForCausalLM", "HyperCLOVAXForCausalLM", "IQuestCoderForCausalLM",
    "IQuestLoopCoderForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration", "InternLM2ForCausalLM",
    "InternLM3ForCausalLM", "JambaForCausalLM", "K2HorizonForCausalLM", "KimiLinearForCausalLM", "LLaMAForCausalLM",
    "LagunaForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM",
    "LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM",
    "MiMoForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM",
    "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM",
    "MistralLarge3ForCausalLM", "MixtralForCausalLM", "MuseGlimmerForCausalLM", "NemotronForCausalLM",
    "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "OPTForCausalLM", "OlmoHybridForCausalLM",
    "OlmoeForCausalLM", "OrionForCausalLM", "PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM",
    "PanguUltraMoEForCausalLM", "Param2MoEForCausalLM", "Phi3ForCausalLM", "PhiMoEForCausalLM", "Plamo3ForCausalLM",
    "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "Rnj1ForCausalLM", "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM", "SolarForCausalLM", "StableLmForCausalLM", "Step1ForCausalLM", "Step3TextForCausalLM",
    "Step3p5ForCausalLM", "Step5ForCausalLM", "TeleChat2ForCausalLM", "TeleChat3ForCausalLM", "TeleFLMForCausalLM",
    "Zamba2ForCausalLM",
)  # fmt: skip
"""Architectures that vLLM 0.33 lists as text generation models (`_TEXT_GENERATION_MODELS` of its registry)."""

VLLM_MISSING: Mapping[str, str] = {
    "AliceAIForCausalLM": "weighs what all blocks before gave (attention residuals), and has Kimi's delta attention",
    "DoryForCausalLM": "runs layers again and again on a sphere (nGPT)",
    "K2HorizonForCausalLM": "has attention whose values are mixtures of experts (MoVA)",
    "Step5ForCausalLM": _SPARSE,
}
"""Those that do not run here -> why; others of them are in `REFUSED`."""

_BY_DIFFUSION = """\
## Texts by diffusion

Networks that write a block of tokens by refining all of it in many passes are refused by name: a step of the engine
ends with certain tokens, which scheduling, streaming, prefix caching and stop conditions build on. Of Transformers'
classes that is DiffusionGemmaForBlockDiffusion (an encoder for the context and a decoder for the block, with
conditions of its own on what it said before); of classes that come with code of their own LLaDAModelLM,
LLaDAMoEModelLM, DreamModel and SDARForCausalLM. Drafters that fill blocks do run
([Speculation](speculation.md#drafts-from-one-pass)).
"""


def kind_of(architecture: str) -> str:
    """ "native", "fallback" (verified), or empty for one that does not run."""
    name = RENAMED.get(architecture, architecture)
    if architecture_entry(name).is_native:
        return "native"
    return "fallback" if name in CASES else ""


def coverage_text() -> str:
    """The sections of docs/models.md behind the table."""
    return "\n".join([*_own_code(), *_refused(), _BY_DIFFUSION, *_vllm()]) + "\n"


def _own_code() -> Iterator[str]:
    yield "\n## Classes that came with code of their own\n"
    yield "Transformers has no class for these; their networks are native. Logits, computed in chunks, are those of a"
    yield "forward pass in float64 that tests write out from the paper or the published configuration, or of a class of"
    yield "Transformers with the same arithmetic under other names, to 1e-5 of the largest logit.\n"
    yield from _wrapped(sorted(OWN_CODE))
    yield "\nOther names of classes in the table: " + "; ".join(
        f"{ours} is {theirs}" for ours, theirs in RENAMED.items()
    )
    yield ""


def _refused() -> Iterator[str]:
    yield "## Causal classes of Transformers that do not run\n"
    yield "All others of its `AutoModelForCausalLM` are in the table. These are refused when they are read, by name.\n"
    yield "| class | why: it |"
    yield "|---|---|"
    yield from (f"| {name} | {reason} |" for name, reason in sorted(REFUSED.items()))
    yield ""


def _vllm() -> Iterator[str]:
    kinds = {name: kind_of(name) for name in VLLM_TEXT}
    native, fallback = (sorted(name for name, kind in kinds.items() if kind == one) for one in ("native", "fallback"))
    missing = sorted(name for name, kind in kinds.items() if not kind)
    yield "## vLLM's text architectures\n"
    runs = len(native) + len(fallback)
    yield f"Of the {len(kinds)} that vLLM 0.33 lists, {runs} run: {len(native)} native, {len(fallback)} fallbacks.\n"
    yield "Native:\n"
    yield from _wrapped(native)
    yield "\nThrough Transformers:\n"
    yield from _wrapped(fallback)
    yield "\n| not yet | why: it |"
    yield "|---|---|"
    yield from (f"| {name} | {VLLM_MISSING.get(name) or REFUSED[name]} |" for name in missing)


def _wrapped(names: list[str]) -> Iterator[str]:
    """Names in lines of at most 120 characters."""
    line = ""
    for number, name in enumerate(names):
        part = name + (", " if number < len(names) - 1 else ".")
        if len(line) + len(part) > 120:
            yield line.rstrip()
            line = ""
        line += part
    yield line.rstrip()
