"""Which architectures there are, as a literal table; families are imported when first used. Free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from quire_interfaces import CheckpointError, Fields
from quire_interfaces.plugins import Plugin, installed_plugins
from quire_models.bidirectional import as_encoder, is_bidirectional
from quire_models.pooling_decoder import as_pooling_decoder
from quire_models.pooling_heads import DECODER_HEADS, HeadKind
from quire_models.spec import NetworkSpec
from quire_models.unsupported import DIFFUSION, unsupported_architecture
from quire_pooling.spec import PoolerSpec

__all__ = [
    "ARCHITECTURES",
    "DUAL_ENCODERS",
    "NATIVE_TYPES",
    "OWN_CODE",
    "Architecture",
    "architecture_entry",
    "architecture_of",
]


class Architecture(NamedTuple):
    """Where the description of an architecture's network is."""

    model_type: str
    family: str = ""
    """Module of `quire_models.families`; empty for one that is called as the model type."""
    function: str = "spec"
    """Function of that module: config.json -> the network. What stands behind an encoder in place of an LM head says
    that of the same name with `pooler` for `spec`."""
    head: HeadKind | None = None
    """What its class has in place of the network's LM head; None where it is the class of `ARCHITECTURES`."""
    is_bidirectional: bool = False
    """Its class makes an encoder of the decoder's layers whatever config.json says."""
    plugin: Plugin | None = None
    """What brings the function, of another package; `family` and `function` are not read then."""

    @property
    def is_native(self) -> bool:
        """Quire has a network of its own for it."""
        return self.model_type != FALLBACK.model_type

    def spec(self, config: Fields, *, trust_remote_code: bool = False) -> NetworkSpec:
        """The network of a config.json.

        Args:
            trust_remote_code: Code that the checkpoint brings may be run, where Quire has no network of its own.

        Raises:
            CheckpointError: A field that is missing or wrong.
        """
        if not self.is_native:
            return self._backend_spec(config, trust_remote_code)
        if self.plugin is not None:
            return _network_of(self.plugin, config)
        module = import_module(f"quire_models.families.{self.family or self.model_type}")
        network: NetworkSpec = getattr(module, self.function)(config)
        if not network.is_encoder and not network.max_encoder_len:
            as_pooled = self.is_bidirectional or is_bidirectional(config)
            if self.head is not None or as_pooled:
                network = as_pooling_decoder(network, config, self.head or "none")
            return as_encoder(network, config) if as_pooled else network
        if self.head is None:
            return network
        pooler = None
        if self.head != "none":
            own: Callable[..., PoolerSpec] = getattr(module, self.function.replace("spec", "pooler"))
            pooler = own(config, self.head, network)
        return dataclasses.replace(network, pooler=pooler)

    def _backend_spec(self, config: Fields, trust_remote_code: bool) -> NetworkSpec:
        """The same of one that Transformers runs."""
        make: Callable[..., NetworkSpec] = import_module("quire_models.transformers_backend.kinds").backend_spec
        is_renamed = bool(RENAMED.keys() & (config.get("architectures") or ()))
        return make(config, self.head, is_renamed=is_renamed, trust_remote_code=trust_remote_code)


def _network_of(plugin: Plugin, config: Fields) -> NetworkSpec:
    """What a plug-in's function makes of a config.json."""
    spec: Callable[[Fields], NetworkSpec] = plugin.load()
    network = spec(config)
    if not isinstance(network, NetworkSpec):
        raise plugin.error(f"must return a NetworkSpec, and returned one of type {type(network).__name__}")
    return network


ARCHITECTURES: dict[str, Architecture] = {
    "AlbertModel": Architecture("albert"),
    "AXK2ForCausalLM": Architecture("axk2"),
    "ApertusForCausalLM": Architecture("apertus"),
    "ArceeForCausalLM": Architecture("arcee"),
    "BailingHybridForCausalLM": Architecture("bailing_hybrid", "kimi_linear", "spec_of_bailing"),
    "BambaForCausalLM": Architecture("bamba"),
    "BartForConditionalGeneration": Architecture("bart"),
    "BertModel": Architecture("bert"),
    "BioGptForCausalLM": Architecture("biogpt"),
    "BloomForCausalLM": Architecture("bloom"),
    "CamembertModel": Architecture("camembert", "bert", "spec_of_roberta"),
    "CanaryForConditionalGeneration": Architecture("canary"),
    "CodeGenForCausalLM": Architecture("codegen", "gptj", "spec_of_codegen"),
    "Cohere2ForCausalLM": Architecture("cohere2", "cohere", "spec_of_cohere2"),
    "Cohere2MoeForCausalLM": Architecture("cohere2_moe"),
    "CohereAsrForConditionalGeneration": Architecture("cohere_asr"),
    "CohereForCausalLM": Architecture("cohere"),
    "DbrxForCausalLM": Architecture("dbrx"),
    "DebertaV2Model": Architecture("deberta_v2"),
    "DeepseekV2ForCausalLM": Architecture("deepseek_v2"),
    "DeepseekV32ForCausalLM": Architecture("deepseek_v32"),
    "DeepseekV4ForCausalLM": Architecture("deepseek_v4"),
    "DeepseekV3ForCausalLM": Architecture("deepseek_v3", "deepseek_v2", "spec_of_v3"),
    "DistilBertModel": Architecture("distilbert"),
    "Dots1ForCausalLM": Architecture("dots1", "glm4_moe", "spec_of_dots1"),
    "ElectraModel": Architecture("electra"),
    "Ernie4_5_MoeForCausalLM": Architecture("ernie4_5_moe"),
    "EuroBertModel": Architecture("eurobert"),
    "Exaone4ForCausalLM": Architecture("exaone4"),
    "ExaoneMoeForCausalLM": Architecture("exaone_moe"),
    "FalconForCausalLM": Architecture("falcon"),
    "FalconH1ForCausalLM": Architecture("falcon_h1"),
    "FalconMambaForCausalLM": Architecture("falcon_mamba", "mamba", "spec_of_falcon"),
    "FlexOlmoForCausalLM": Architecture("flex_olmo", "olmoe", "spec_of_flex_olmo"),
    "GPT2LMHeadModel": Architecture("gpt2"),
    "GPTBigCodeForCausalLM": Architecture("gpt_bigcode", "gpt2", "spec_of_bigcode"),
    "GPTJForCausalLM": Architecture("gptj"),
    "GPTNeoXForCausalLM": Architecture("gpt_neox"),
    "Gemma2ForCausalLM": Architecture("gemma2"),
    "Gemma3ForCausalLM": Architecture("gemma3_text", "gemma2", "spec_of_gemma3"),
    "GemmaForCausalLM": Architecture("gemma"),
    "Glm4ForCausalLM": Architecture("glm4", "glm", "spec_of_glm4"),
    "Glm4MoeForCausalLM": Architecture("glm4_moe"),
    "Glm4MoeLiteForCausalLM": Architecture("glm4_moe_lite"),
    "GlmForCausalLM": Architecture("glm"),
    "GlmMoeDsaForCausalLM": Architecture("glm_moe_dsa", "deepseek_v32", "spec_of_glm5"),
    "GptOssForCausalLM": Architecture("gpt_oss"),
    "GraniteForCausalLM": Architecture("granite"),
    "GraniteMoeForCausalLM": Architecture("granitemoe", "granite", "spec_of_moe"),
    "GraniteMoeHybridForCausalLM": Architecture("granitemoehybrid"),
    "GraniteMoeSWAForCausalLM": Architecture("granitemoe_swa", "granite", "spec_of_moe_swa"),
    "GraniteMoeSharedForCausalLM": Architecture("granitemoeshared", "granite", "spec_of_moe"),
    "GraniteSWAForCausalLM": Architecture("granite_swa", "granite", "spec_of_swa"),
    "GteModel": Architecture("gte"),
    "HYV3ForCausalLM": Architecture("hy_v3"),
    "HYV4ForCausalLM": Architecture("hy_v4"),
    "HeliumForCausalLM": Architecture("helium"),
    "HunYuanDenseV1ForCausalLM": Architecture("hunyuan_v1_dense"),
    "HyperCLOVAXForCausalLM": Architecture("hyperclovax"),
    "Inkling2ForCausalLM": Architecture("inkling2_text", "inkling2"),
    "InklingForCausalLM": Architecture("inkling_text", "inkling"),
    "JambaForCausalLM": Architecture("jamba"),
    "JinaEmbeddingsV3Model": Architecture("jina_embeddings_v3"),
    "KimiLinearForCausalLM": Architecture("kimi_linear"),
    "Lfm2ForCausalLM": Architecture("lfm2"),
    "Lfm2MoeForCausalLM": Architecture("lfm2_moe"),
    "Llama4ForCausalLM": Architecture("llama4_text"),
    "LlamaForCausalLM": Architecture("llama"),
    "MBartForConditionalGeneration": Architecture("mbart", "bart", "spec_of_mbart"),
    "MPNetModel": Architecture("mpnet"),
    "MT5EncoderModel": Architecture("mt5", "t5", "spec_of_mt5_encoder"),
    "MT5ForConditionalGeneration": Architecture("mt5", "t5", "spec_of_mt5"),
    "Mamba2ForCausalLM": Architecture("mamba2", "mamba", "spec_of_mamba2"),
    "LongcatFlashForCausalLM": Architecture("longcat_flash"),
    "MambaForCausalLM": Architecture("mamba"),
    "MiMoV2FlashForCausalLM": Architecture("mimo_v2_flash"),
    "MiniCPM3ForCausalLM": Architecture("minicpm3"),
    "MiniMaxForCausalLM": Architecture("minimax"),
    "MiniMaxM2ForCausalLM": Architecture("minimax_m2"),
    "Ministral3ForCausalLM": Architecture("ministral3"),
    "MinistralForCausalLM": Architecture("ministral", "mistral"),
    "Mistral4ForCausalLM": Architecture("mistral4"),
    "MistralForCausalLM": Architecture("mistral"),
    "MixtralForCausalLM": Architecture("mixtral"),
    "ModernBertModel": Architecture("modernbert"),
    "MoonshineForConditionalGeneration": Architecture("moonshine"),
    "MoonshineStreamingForConditionalGeneration": Architecture("moonshine_streaming"),
    "MptForCausalLM": Architecture("mpt"),
    "NemotronForCausalLM": Architecture("nemotron"),
    "NemotronHForCausalLM": Architecture("nemotron_h"),
    "NomicBertModel": Architecture("nomic_bert"),
    "OPTForCausalLM": Architecture("opt"),
    "Olmo2ForCausalLM": Architecture("olmo2"),
    "Olmo3ForCausalLM": Architecture("olmo3", "olmo2", "spec_of_olmo3"),
    "OlmoForCausalLM": Architecture("olmo"),
    "OlmoHybridForCausalLM": Architecture("olmo_hybrid"),
    "OlmoeForCausalLM": Architecture("olmoe"),
    "ParakeetForCTC": Architecture("parakeet_ctc", "parakeet"),
    "ParakeetForRNNT": Architecture("parakeet_rnnt", "parakeet", "spec_of_rnnt"),
    "ParakeetForTDT": Architecture("parakeet_tdt", "parakeet", "spec_of_tdt"),
    "PersimmonForCausalLM": Architecture("persimmon"),
    "Phi3ForCausalLM": Architecture("phi3"),
    "PhiForCausalLM": Architecture("phi"),
    "PhimoeForCausalLM": Architecture("phimoe"),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe"),
    "Qwen3ForCausalLM": Architecture("qwen3", "qwen2", "spec_of_qwen3"),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "qwen2_moe", "spec_of_qwen3_moe"),
    "Qwen3NextForCausalLM": Architecture("qwen3_next"),
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", "qwen3_next", "spec_of_qwen3_5"),
    "Qwen3_5MoeForCausalLM": Architecture("qwen3_5_moe_text", "qwen3_next", "spec_of_qwen3_5_moe"),
    "Qwen4ExpForCausalLM": Architecture("qwen4_exp_text", "qwen4_exp"),
    "RobertaModel": Architecture("roberta", "bert", "spec_of_roberta"),
    "RwkvForCausalLM": Architecture("rwkv"),
    "SeedOssForCausalLM": Architecture("seed_oss"),
    "SmolLM3ForCausalLM": Architecture("smollm3"),
    "SolarOpenForCausalLM": Architecture("solar_open", "glm4_moe", "spec_of_solar_open"),
    "StableLmForCausalLM": Architecture("stablelm"),
    "Starcoder2ForCausalLM": Architecture("starcoder2"),
    "T5EncoderModel": Architecture("t5", "t5", "spec_of_encoder"),
    "T5ForConditionalGeneration": Architecture("t5"),
    "UMT5EncoderModel": Architecture("umt5", "t5", "spec_of_umt5_encoder"),
    "UMT5ForConditionalGeneration": Architecture("umt5", "t5", "spec_of_umt5"),
    "WhisperForConditionalGeneration": Architecture("whisper"),
    "XGLMForCausalLM": Architecture("xglm"),
    "XLMRobertaModel": Architecture("xlm_roberta", "bert", "spec_of_roberta"),
    "Zamba2ForCausalLM": Architecture("zamba2"),
}

_OF_TEXTS = ("ForCausalLM", "LMHeadModel", "GenerationDecoder")
"""Ends of the names of classes that may run through Transformers."""
PLUGINS = "quire.models"
"""Group of the entry points of other packages' networks: name of an architecture -> function `spec`."""

NATIVE_TYPES: dict[str, str] = {
    **{name: entry.model_type for name, entry in ARCHITECTURES.items()},
    "Glm5NextForCausalLM": "glm5_next_text",
    "MuseGlimmerForCausalLM": "muse_glimmer_text",
}
"""Architecture -> its model_type; of `OWN_CODE`, language models that Transformers has in a larger class alone."""

FALLBACK = Architecture("transformers_backend")
"""For decoders that are not in the table: they run through Transformers."""


HEADS: dict[str, HeadKind] = {
    "Model": "none",
    "ForSequenceClassification": "text_classifier",
    "ForTokenClassification": "token_classifier",
    "ForMaskedLM": "masked_lm",
    "ForRewardModel": "reward",
    "ForProcessRewardModel": "process_reward",
}
"""End of an architecture's name -> what its class has in place of an LM head."""

_BODIES: tuple[tuple[str, frozenset[HeadKind]], ...] = (
    ("Model", frozenset({"none", "text_classifier", "token_classifier", "masked_lm"})),
    ("ForCausalLM", DECODER_HEADS),
    ("LMHeadModel", DECODER_HEADS),
)
"""End of a name in `ARCHITECTURES` -> heads that there are behind its body, of an encoder or of a decoder."""


_ALIASES = {"New": "Gte"}
"""What classes that came with code of their own are called -> Transformers' classes of the same network."""

OWN_CODE: dict[str, Architecture] = {
    "AquilaForCausalLM": Architecture("llama"),
    "AquilaModel": Architecture("llama"),
    "BailingMoeForCausalLM": Architecture("bailing_moe"),
    "BailingMoeV2ForCausalLM": Architecture("bailing_moe_v2", "bailing_moe", "spec_of_v2"),
    "BailingMoeV2_5ForCausalLM": Architecture("bailing_moe_v2_5"),
    "ChatGLMForConditionalGeneration": Architecture("chatglm"),
    "ChatGLMModel": Architecture("chatglm"),
    "DeciLMForCausalLM": Architecture("decilm"),
    "DeepseekForCausalLM": Architecture("deepseek"),
    "DomynEdgeForCausalLM": Architecture("domyn_edge"),
    "ExaoneForCausalLM": Architecture("exaone"),
    "Glm5NextForCausalLM": Architecture("glm5_next_text", "glm5_next"),
    "GritLM": Architecture("mistral", head="none", is_bidirectional=True),
    "Grok1ForCausalLM": Architecture("grok"),
    "Grok1ModelForCausalLM": Architecture("grok"),
    "HCXVisionV2ForCausalLM": Architecture("hyperclovax"),
    "IQuestCoderForCausalLM": Architecture("llama"),
    "IQuestLoopCoderForCausalLM": Architecture("iquest_loop_coder"),
    "InternLM2ForCausalLM": Architecture("internlm2"),
    "InternLM2ForRewardModel": Architecture("internlm2", head="value_head"),
    "InternLM3ForCausalLM": Architecture("internlm3", "internlm", "spec_of_internlm3"),
    "InternLMForCausalLM": Architecture("internlm"),
    "LLaMAForCausalLM": Architecture("llama", "llama_names", "spec_of_first"),
    "LongcatFlashNgramForCausalLM": Architecture("longcat_flash", "longcat_flash", "spec_of_ngram"),
    "MiMoForCausalLM": Architecture("mimo"),
    "MiMoV2ForCausalLM": Architecture("mimo_v2_flash"),
    "MiniCPMForCausalLM": Architecture("minicpm"),
    "MistralLarge3ForCausalLM": Architecture("mistral4"),
    "MuseGlimmerForCausalLM": Architecture("muse_glimmer"),
    "NemotronHPuzzleForCausalLM": Architecture("nemotron_h_puzzle"),
    "OrionForCausalLM": Architecture("orion"),
    "PanguEmbeddedForCausalLM": Architecture("pangu", "internlm", "spec_of_pangu"),
    "PanguProMoEV2ForCausalLM": Architecture("pangu_pro_moe"),
    "PanguUltraMoEForCausalLM": Architecture("pangu_ultra_moe"),
    "Param2MoEForCausalLM": Architecture("param2_moe", "bailing_moe", "spec_of_param2"),
    "Plamo3ForCausalLM": Architecture("plamo3"),
    "SarvamMLAForCausalLM": Architecture("sarvam"),
    "SarvamMoEForCausalLM": Architecture("sarvam_moe", "bailing_moe", "spec_of_v2"),
    "SolarForCausalLM": Architecture("solar"),
    "Step1ForCausalLM": Architecture("step1"),
    "Step3TextForCausalLM": Architecture("step3_text"),
    "Step3p5ForCausalLM": Architecture("step3p5"),
    "TeleChat2ForCausalLM": Architecture("telechat2"),
    "TeleChat3ForCausalLM": Architecture("llama"),
    "TeleChatForCausalLM": Architecture("telechat2"),
    "TeleFLMForCausalLM": Architecture("teleflm", "minicpm", "spec_of_teleflm"),
    "TelechatForCausalLM": Architecture("telechat2"),
    "XverseForCausalLM": Architecture("llama"),
    "YiForCausalLM": Architecture("yi", "llama_names", "spec_of_yi"),
}
"""Classes that came with code of their own, and of which Transformers has none to be held to."""


RENAMED = {
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3VLForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Rnj1ForCausalLM": "Gemma3ForCausalLM",
}
"""What the makers of a decoder call its class -> Transformers' class of the same network. Code that such a checkpoint
brings is not run."""


DUAL_ENCODERS: dict[str, Architecture] = {
    "CLIPModel": Architecture("clip"),
    "SiglipModel": Architecture("siglip", "clip", "spec_of_siglip"),
}
"""Networks that read texts and images apart: what reads their texts (`quire_models.dual_encoder`)."""


_FALLBACK_BODIES = frozenset({"HunYuanMoEV1", "JetMoe"})
"""Decoders that run through Transformers, and whose classes with classes of texts or tokens do, too: a layer `score` in
place of the LM head."""


def with_head(architecture: str) -> Architecture | None:
    """A class of a native network with another head than that of `ARCHITECTURES`, or whose attention is bidirectional:
    BertForSequenceClassification, Qwen3Model, LlamaBidirectionalModel; one that Transformers has not; None for a class
    that is none of these."""
    end = max((end for end in HEADS if architecture.endswith(end)), key=len, default="")
    stem, head = architecture.removesuffix(end), HEADS.get(end)
    stem = _ALIASES.get(stem, stem)
    if (own := OWN_CODE.get(architecture) or DUAL_ENCODERS.get(architecture)) is not None:
        return own
    if stem in _FALLBACK_BODIES and head in ("text_classifier", "token_classifier"):
        return FALLBACK._replace(head=head)
    if (
        stem.endswith("Bidirectional")
        and (entry := with_head(f"{stem.removesuffix('Bidirectional')}{end}")) is not None
    ):
        return entry._replace(is_bidirectional=True)
    for body, heads in _BODIES if head is not None else ():
        for name in (stem, stem.removesuffix("Text")):  # Gemma3TextModel is the body of Gemma3ForCausalLM
            entry = ARCHITECTURES.get(name + body)
            if entry is not None and head in heads and not entry.function.endswith("encoder"):
                return entry._replace(head=head)
    return None


def architecture_entry(architecture: str) -> Architecture:
    """Where the network of an architecture is: in the table, there with another head, another package's, or run
    through Transformers."""
    if (own := ARCHITECTURES.get(architecture) or with_head(architecture)) is not None:
        return own
    plugin = installed_plugins(PLUGINS).get(architecture)
    return FALLBACK if plugin is None else Architecture(plugin.name, plugin=plugin)


def architecture_of(config: Fields) -> str:
    """The first architecture of a config.json that is in the table, or else that is a decoder.

    Raises:
        CheckpointError: There is none.
    """
    architectures = config.get("architectures")
    supported = NATIVE_TYPES
    if architectures is None:
        for name, model_type in supported.items():
            if model_type == config.get("model_type"):
                return name
        raise unsupported_architecture(config, [], supported)
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{config.source}: architectures must be a list of names, is {architectures!r}")
    names = [RENAMED.get(name, name) for name in map(str, architectures)]
    for name in names:
        if name in ARCHITECTURES or with_head(name) is not None:
            return name
    for name in installed_plugins(PLUGINS).keys() & set(architectures):
        return str(name)
    misspelt = {name.lower() for name in architectures} & {name.lower() for name in ARCHITECTURES}
    for name in names:
        if name.endswith(_OF_TEXTS) and not (misspelt or DIFFUSION.search(name)):
            return str(name)
    raise unsupported_architecture(config, architectures, supported)
