"""Which architectures there are, as a literal table; modules are imported when first used. Free of torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from quire_interfaces import CheckpointError, Fields
from quire_models.unsupported import unsupported_architecture

__all__ = ["ARCHITECTURES", "Architecture", "architecture_entry", "architecture_of", "model_class"]


class Architecture(NamedTuple):
    """Where the network of an architecture is."""

    model_type: str
    """Also the folder, whose `config.py` reads config.json."""
    module: str
    name: str


ARCHITECTURES: dict[str, Architecture] = {
    "ApertusForCausalLM": Architecture("apertus", "quire_models.apertus.model", "ApertusForCausalLM"),
    "ArceeForCausalLM": Architecture("arcee", "quire_models.arcee.model", "ArceeForCausalLM"),
    "BambaForCausalLM": Architecture("bamba", "quire_models.bamba.model", "BambaForCausalLM"),
    "BartForConditionalGeneration": Architecture("bart", "quire_models.bart.model", "BartForConditionalGeneration"),
    "BertModel": Architecture("bert", "quire_models.bert.model", "BertModel"),
    "BioGptForCausalLM": Architecture("biogpt", "quire_models.biogpt.model", "BioGptForCausalLM"),
    "BloomForCausalLM": Architecture("bloom", "quire_models.bloom.model", "BloomForCausalLM"),
    "CodeGenForCausalLM": Architecture("codegen", "quire_models.codegen.model", "CodeGenForCausalLM"),
    "Cohere2ForCausalLM": Architecture("cohere2", "quire_models.cohere2.model", "Cohere2ForCausalLM"),
    "CohereForCausalLM": Architecture("cohere", "quire_models.cohere.model", "CohereForCausalLM"),
    "DeepseekV2ForCausalLM": Architecture("deepseek_v2", "quire_models.deepseek_v2.model", "DeepseekV2ForCausalLM"),
    "DeepseekV3ForCausalLM": Architecture("deepseek_v3", "quire_models.deepseek_v3.model", "DeepseekV3ForCausalLM"),
    "DeepseekV32ForCausalLM": Architecture("deepseek_v32", "quire_models.deepseek_v32.model", "DeepseekV32ForCausalLM"),
    "Dots1ForCausalLM": Architecture("dots1", "quire_models.dots1.model", "Dots1ForCausalLM"),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4_5_moe", "quire_models.ernie4_5_moe.model", "Ernie4_5_MoeForCausalLM"
    ),
    "Exaone4ForCausalLM": Architecture("exaone4", "quire_models.exaone4.model", "Exaone4ForCausalLM"),
    "FalconForCausalLM": Architecture("falcon", "quire_models.falcon.model", "FalconForCausalLM"),
    "FalconH1ForCausalLM": Architecture("falcon_h1", "quire_models.falcon_h1.model", "FalconH1ForCausalLM"),
    "FalconMambaForCausalLM": Architecture("falcon_mamba", "quire_models.falcon_mamba.model", "FalconMambaForCausalLM"),
    "FlexOlmoForCausalLM": Architecture("flex_olmo", "quire_models.flex_olmo.model", "FlexOlmoForCausalLM"),
    "GPT2LMHeadModel": Architecture("gpt2", "quire_models.gpt2.model", "GPT2LMHeadModel"),
    "GPTBigCodeForCausalLM": Architecture("gpt_bigcode", "quire_models.gpt_bigcode.model", "GPTBigCodeForCausalLM"),
    "GPTJForCausalLM": Architecture("gptj", "quire_models.gptj.model", "GPTJForCausalLM"),
    "GPTNeoXForCausalLM": Architecture("gpt_neox", "quire_models.gpt_neox.model", "GPTNeoXForCausalLM"),
    "Gemma2ForCausalLM": Architecture("gemma2", "quire_models.gemma2.model", "Gemma2ForCausalLM"),
    "Gemma3ForCausalLM": Architecture("gemma3_text", "quire_models.gemma3_text.model", "Gemma3ForCausalLM"),
    "GemmaForCausalLM": Architecture("gemma", "quire_models.gemma.model", "GemmaForCausalLM"),
    "Glm4ForCausalLM": Architecture("glm4", "quire_models.glm4.model", "Glm4ForCausalLM"),
    "Glm4MoeForCausalLM": Architecture("glm4_moe", "quire_models.glm4_moe.model", "Glm4MoeForCausalLM"),
    "GlmForCausalLM": Architecture("glm", "quire_models.glm.model", "GlmForCausalLM"),
    "GlmMoeDsaForCausalLM": Architecture("glm_moe_dsa", "quire_models.glm_moe_dsa.model", "GlmMoeDsaForCausalLM"),
    "GptOssForCausalLM": Architecture("gpt_oss", "quire_models.gpt_oss.model", "GptOssForCausalLM"),
    "GraniteForCausalLM": Architecture("granite", "quire_models.granite.model", "GraniteForCausalLM"),
    "GraniteMoeForCausalLM": Architecture("granitemoe", "quire_models.granitemoe.model", "GraniteMoeForCausalLM"),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid", "quire_models.granitemoehybrid.model", "GraniteMoeHybridForCausalLM"
    ),
    "GraniteMoeSharedForCausalLM": Architecture(
        "granitemoeshared", "quire_models.granitemoeshared.model", "GraniteMoeSharedForCausalLM"
    ),
    "HeliumForCausalLM": Architecture("helium", "quire_models.helium.model", "HeliumForCausalLM"),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense", "quire_models.hunyuan_v1_dense.model", "HunYuanDenseV1ForCausalLM"
    ),
    "JambaForCausalLM": Architecture("jamba", "quire_models.jamba.model", "JambaForCausalLM"),
    "Lfm2ForCausalLM": Architecture("lfm2", "quire_models.lfm2.model", "Lfm2ForCausalLM"),
    "Llama4ForCausalLM": Architecture("llama4_text", "quire_models.llama4_text.model", "Llama4ForCausalLM"),
    "LlamaForCausalLM": Architecture("llama", "quire_models.llama.model", "LlamaForCausalLM"),
    "MBartForConditionalGeneration": Architecture("mbart", "quire_models.mbart.model", "MBartForConditionalGeneration"),
    "MT5ForConditionalGeneration": Architecture("mt5", "quire_models.mt5.model", "MT5ForConditionalGeneration"),
    "Mamba2ForCausalLM": Architecture("mamba2", "quire_models.mamba2.model", "Mamba2ForCausalLM"),
    "MambaForCausalLM": Architecture("mamba", "quire_models.mamba.model", "MambaForCausalLM"),
    "MiniMaxForCausalLM": Architecture("minimax", "quire_models.minimax.model", "MiniMaxForCausalLM"),
    "MiniMaxM2ForCausalLM": Architecture("minimax_m2", "quire_models.minimax_m2.model", "MiniMaxM2ForCausalLM"),
    "Ministral3ForCausalLM": Architecture("ministral3", "quire_models.ministral3.model", "Ministral3ForCausalLM"),
    "MinistralForCausalLM": Architecture("ministral", "quire_models.ministral.model", "MinistralForCausalLM"),
    "MistralForCausalLM": Architecture("mistral", "quire_models.mistral.model", "MistralForCausalLM"),
    "MixtralForCausalLM": Architecture("mixtral", "quire_models.mixtral.model", "MixtralForCausalLM"),
    "ModernBertModel": Architecture("modernbert", "quire_models.modernbert.model", "ModernBertModel"),
    "MptForCausalLM": Architecture("mpt", "quire_models.mpt.model", "MptForCausalLM"),
    "NemotronForCausalLM": Architecture("nemotron", "quire_models.nemotron.model", "NemotronForCausalLM"),
    "NemotronHForCausalLM": Architecture("nemotron_h", "quire_models.nemotron_h.model", "NemotronHForCausalLM"),
    "OPTForCausalLM": Architecture("opt", "quire_models.opt.model", "OPTForCausalLM"),
    "Olmo2ForCausalLM": Architecture("olmo2", "quire_models.olmo2.model", "Olmo2ForCausalLM"),
    "Olmo3ForCausalLM": Architecture("olmo3", "quire_models.olmo3.model", "Olmo3ForCausalLM"),
    "OlmoForCausalLM": Architecture("olmo", "quire_models.olmo.model", "OlmoForCausalLM"),
    "OlmoeForCausalLM": Architecture("olmoe", "quire_models.olmoe.model", "OlmoeForCausalLM"),
    "PersimmonForCausalLM": Architecture("persimmon", "quire_models.persimmon.model", "PersimmonForCausalLM"),
    "Phi3ForCausalLM": Architecture("phi3", "quire_models.phi3.model", "Phi3ForCausalLM"),
    "PhiForCausalLM": Architecture("phi", "quire_models.phi.model", "PhiForCausalLM"),
    "Qwen2ForCausalLM": Architecture("qwen2", "quire_models.qwen2.model", "Qwen2ForCausalLM"),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", "quire_models.qwen2_moe.model", "Qwen2MoeForCausalLM"),
    "Qwen3ForCausalLM": Architecture("qwen3", "quire_models.qwen3.model", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "quire_models.qwen3_moe.model", "Qwen3MoeForCausalLM"),
    "Qwen3NextForCausalLM": Architecture("qwen3_next", "quire_models.qwen3_next.model", "Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", "quire_models.qwen3_5_text.model", "Qwen3_5ForCausalLM"),
    "RobertaModel": Architecture("roberta", "quire_models.roberta.model", "RobertaModel"),
    "RwkvForCausalLM": Architecture("rwkv", "quire_models.rwkv.model", "RwkvForCausalLM"),
    "SeedOssForCausalLM": Architecture("seed_oss", "quire_models.seed_oss.model", "SeedOssForCausalLM"),
    "SmolLM3ForCausalLM": Architecture("smollm3", "quire_models.smollm3.model", "SmolLM3ForCausalLM"),
    "SolarOpenForCausalLM": Architecture("solar_open", "quire_models.solar_open.model", "SolarOpenForCausalLM"),
    "StableLmForCausalLM": Architecture("stablelm", "quire_models.stablelm.model", "StableLmForCausalLM"),
    "Starcoder2ForCausalLM": Architecture("starcoder2", "quire_models.starcoder2.model", "Starcoder2ForCausalLM"),
    "T5ForConditionalGeneration": Architecture("t5", "quire_models.t5.model", "T5ForConditionalGeneration"),
    "UMT5ForConditionalGeneration": Architecture("umt5", "quire_models.umt5.model", "UMT5ForConditionalGeneration"),
    "XGLMForCausalLM": Architecture("xglm", "quire_models.xglm.model", "XGLMForCausalLM"),
    "XLMRobertaModel": Architecture("xlm_roberta", "quire_models.xlm_roberta.model", "XLMRobertaModel"),
    "Zamba2ForCausalLM": Architecture("zamba2", "quire_models.zamba2.model", "Zamba2ForCausalLM"),
}


DRAFT_HEADS: dict[str, Architecture] = {
    "EagleHead": Architecture("eagle", "quire_models.eagle.model", "EagleHead"),
    "GatedMtpHead": Architecture("mtp", "quire_models.mtp.gated", "GatedMtpHead"),
    "MedusaHeads": Architecture("medusa", "quire_models.medusa.model", "MedusaHeads"),
    "MtpHead": Architecture("mtp", "quire_models.mtp.model", "MtpHead"),
}
"""Networks that draft for another one, and cannot be served by themselves."""

FALLBACK = Architecture("transformers_backend", "quire_models.transformers_backend.model", "TransformersLM")
"""For decoders that are not in the table."""


def architecture_entry(architecture: str) -> Architecture:
    """Where the network of an architecture is: in the table, or run through Transformers."""
    return ARCHITECTURES.get(architecture) or DRAFT_HEADS.get(architecture, FALLBACK)


def model_class(architecture: str) -> Any:
    """The class of a network; see `architecture_entry`."""
    entry = architecture_entry(architecture)
    return getattr(import_module(entry.module), entry.name)


def architecture_of(config: Fields) -> str:
    """The first architecture of a config.json that is in the table, or else that is a decoder.

    Raises:
        CheckpointError: There is none.
    """
    architectures = config.get("architectures")
    supported = {name: entry.model_type for name, entry in ARCHITECTURES.items()}
    if architectures is None:
        for name, model_type in supported.items():
            if model_type == config.get("model_type"):
                return name
        raise unsupported_architecture(config, [], supported)
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{config.source}: architectures must be a list of names, is {architectures!r}")
    for name in architectures:
        if name in ARCHITECTURES:
            return str(name)
    misspelt = {name.lower() for name in architectures} & {name.lower() for name in ARCHITECTURES}
    for name in architectures:
        if name.endswith(("ForCausalLM", "LMHeadModel", "GenerationDecoder")) and not misspelt:
            return str(name)
    raise unsupported_architecture(config, architectures, supported)
