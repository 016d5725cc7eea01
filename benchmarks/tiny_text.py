"""Tiny text models for the sweep over architectures: encoders, newer decoders, state spaces."""

from __future__ import annotations

from typing import Any

from tiny_models import ENCODER, HIDDEN, TEXT, VOCAB, Tiny, ids

TOKENS = 6
EXPERTS: dict[str, Any] = {**TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
WORDS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0}
MAMBA2: dict[str, Any] = {
    "mamba_d_ssm": 2 * HIDDEN,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}


def decoder(kind: str, sizes: dict[str, Any], group: str = "text", **others: Any) -> Tiny:
    """Return a model that goes on with a text."""
    return Tiny(group=group, kind=kind, sizes=sizes, inputs=ids(), tokens=TOKENS, **others)


def encoder(kind: str, sizes: dict[str, Any], **others: Any) -> Tiny:
    """Return a model that reads a text."""
    return Tiny(group="encoder", kind=kind, sizes=sizes, inputs=ids(16), **others)


def without(sizes: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return sizes but for these."""
    return {name: size for name, size in sizes.items() if name not in names}


DECODERS: dict[str, Tiny] = {
    "gpt_oss": decoder(
        "GptOssForCausalLM",
        {**TEXT, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 8},
    ),
    "jetmoe": decoder(
        "JetMoeForCausalLM",
        {**without(TEXT, "num_attention_heads"), "kv_channels": 16, "num_local_experts": 4},
    ),
    "olmo2": decoder("Olmo2ForCausalLM", TEXT),
    "olmoe": decoder("OlmoeForCausalLM", {**EXPERTS, "num_experts": 4}),
    "deepseek_v3": decoder(
        "DeepseekV3ForCausalLM",
        {**EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1},
    ),
    "deepseek_v2": decoder(
        "DeepseekV2ForCausalLM",
        {**EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1},
    ),
    "glm": decoder("GlmForCausalLM", {**TEXT, "head_dim": 16}),
    "glm4": decoder("Glm4ForCausalLM", {**TEXT, "head_dim": 16}),
    "cohere": decoder("CohereForCausalLM", TEXT),
    "cohere2": decoder("Cohere2ForCausalLM", {**TEXT, "sliding_window": 8}),
    "stablelm": decoder("StableLmForCausalLM", TEXT),
    "granite": decoder("GraniteForCausalLM", TEXT),
    "granite_moe": decoder(
        "GraniteMoeForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "phimoe": decoder(
        "PhimoeForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "starcoder2": decoder("Starcoder2ForCausalLM", TEXT),
    "gpt_j": decoder(
        "GPTJForCausalLM",
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128}
        | {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neo": decoder(
        "GPTNeoForCausalLM",
        {"hidden_size": HIDDEN, "num_layers": 2, "num_heads": 4, "window_size": 8}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128}
        | {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_bigcode": decoder(
        "GPTBigCodeForCausalLM",
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 128, **WORDS}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "mpt": decoder(
        "MptForCausalLM",
        {"d_model": HIDDEN, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": VOCAB},
    ),
    "codegen": decoder(
        "CodeGenForCausalLM",
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128}
        | {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "qwen2_moe": decoder(
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "smollm3": decoder("SmolLM3ForCausalLM", TEXT),
    "nemotron": decoder("NemotronForCausalLM", TEXT),
    "exaone4": decoder("Exaone4ForCausalLM", {**TEXT, "sliding_window": 8}),
    "ernie4_5": decoder("Ernie4_5ForCausalLM", {**TEXT, "head_dim": 16}),
    "hunyuan": decoder("HunYuanDenseV1ForCausalLM", {**TEXT, "head_dim": 16}),
    "llama4": decoder(
        "Llama4ForCausalLM",
        {**TEXT, "intermediate_size_mlp": 64, "head_dim": 16, "num_local_experts": 4}
        | {"attention_chunk_size": 8},
    ),
    "lfm2": decoder("Lfm2ForCausalLM", {**TEXT, "full_attn_idxs": [1]}, "state space"),
    "mbart": Tiny(
        group="text",
        kind="MBartForConditionalGeneration",
        sizes={
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            **{f"{half}_layers": 2 for half in ("encoder", "decoder")},
            **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder")},
            **{f"{half}_ffn_dim": 2 * HIDDEN for half in ("encoder", "decoder")},
            "max_position_embeddings": 128,
        },
        inputs=ids(),
        tokens=TOKENS,
    ),
}

STATE_SPACES: dict[str, Tiny] = {
    "mamba": decoder(
        "MambaForCausalLM",
        {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCAB},
        "state space",
    ),
    "mamba2": decoder(
        "Mamba2ForCausalLM",
        {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 16, "vocab_size": VOCAB}
        | {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
        "state space",
    ),
    "falcon_mamba": decoder(
        "FalconMambaForCausalLM",
        {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCAB},
        "state space",
    ),
    "rwkv": decoder(
        "RwkvForCausalLM",
        {"hidden_size": HIDDEN, "num_hidden_layers": 2, "attention_hidden_size": HIDDEN}
        | {"intermediate_size": 2 * HIDDEN, "vocab_size": VOCAB, "context_length": 128}
        | {"bos_token_id": 1, "eos_token_id": 2},
        "state space",
    ),
    "jamba": decoder(
        "JambaForCausalLM",
        {**TEXT, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2}
        | {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_d_state": 8, "use_mamba_kernels": False},
        "state space",
    ),
    "falcon_h1": decoder("FalconH1ForCausalLM", {**TEXT, **MAMBA2}, "state space"),
    "bamba": decoder(
        "BambaForCausalLM",
        {**TEXT, **without(MAMBA2, "mamba_d_ssm"), "attn_layer_indices": [1]},
        "state space",
    ),
    "zamba2": decoder(
        "Zamba2ForCausalLM",
        {**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 4, "mamba_d_state": 16}
        | {"n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8}
        | {"layers_block_type": ["mamba", "mamba", "hybrid"], "num_mem_blocks": 1}
        | {"use_mamba_kernels": False, "adapter_rank": 8},
        "state space",
    ),
    "recurrent_gemma": decoder(
        "RecurrentGemmaForCausalLM",
        {**TEXT, "num_hidden_layers": 3, "lru_width": HIDDEN, "head_dim": 16}
        | {"attention_window_size": 8},
        "state space",
    ),
    "granite_moe_hybrid": decoder(
        "GraniteMoeHybridForCausalLM",
        {**TEXT, **without(MAMBA2, "mamba_d_ssm"), "layer_types": ["mamba", "attention"]}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
        "state space",
    ),
    "qwen3_next": decoder(
        "Qwen3NextForCausalLM",
        {**EXPERTS, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32}
        | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        "state space",
    ),
}

ENCODERS: dict[str, Tiny] = {
    "roberta": encoder("RobertaForMaskedLM", {**ENCODER, "pad_token_id": 1}),
    "distilbert": encoder(
        "DistilBertForMaskedLM",
        {"dim": HIDDEN, "hidden_dim": 2 * HIDDEN, "n_layers": 2, "n_heads": 4, **WORDS},
    ),
    "electra": encoder("ElectraForPreTraining", {**ENCODER, "embedding_size": 32}),
    "deberta": encoder(
        "DebertaForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "deberta_v2": encoder(
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
        | {"position_buckets": 8, "share_att_key": True},
    ),
    "albert": encoder("AlbertForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "xlnet": encoder(
        "XLNetLMHeadModel",
        {"d_model": HIDDEN, "n_layer": 2, "n_head": 4, "d_inner": 2 * HIDDEN, "vocab_size": VOCAB},
    ),
    "longformer": encoder(
        "LongformerForMaskedLM",
        {**ENCODER, "attention_window": 8, "pad_token_id": 1},
    ),
    "bigbird": encoder(
        "BigBirdForMaskedLM", {**ENCODER, "attention_type": "original_full", "block_size": 4}
    ),
    "modernbert": encoder(
        "ModernBertForMaskedLM",
        {**ENCODER, "local_attention": 8, "global_attn_every_n_layers": 2}
        | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "nystromformer": encoder(
        "NystromformerForMaskedLM", {**ENCODER, "num_landmarks": 4, "segment_means_seq_len": 16}
    ),
    "fnet": encoder("FNetForMaskedLM", without(ENCODER, "num_attention_heads")),
    "mpnet": encoder("MPNetForMaskedLM", {**ENCODER, "pad_token_id": 1}),
    "convbert": encoder("ConvBertForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "squeezebert": encoder("SqueezeBertForMaskedLM", {**ENCODER, "embedding_size": HIDDEN}),
    "megatron_bert": encoder("MegatronBertForMaskedLM", ENCODER),
    "funnel": encoder(
        "FunnelForMaskedLM",
        {"vocab_size": VOCAB, "block_sizes": [1, 1], "d_model": HIDDEN, "n_head": 4}
        | {"d_head": 16, "d_inner": 2 * HIDDEN, "num_decoder_layers": 1},
    ),
    "xlm": encoder(
        "XLMWithLMHeadModel",
        {"emb_dim": HIDDEN, "n_layers": 2, "n_heads": 4, "n_words": VOCAB}
        | {"max_position_embeddings": 128, "pad_index": 0},
    ),
}
