"""Tiny models of images, sound, time series and several of them, for the sweep."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import (
    ENCODER,
    HIDDEN,
    IMAGE,
    SPEECH,
    TEXT,
    VISION,
    VOCAB,
    Tiny,
    fixed,
    floats,
    ids,
    image_prompt,
    pixels,
    several,
)

TOKENS = 6
IMAGE_TOKEN = VOCAB - 1
HALVES: dict[str, Any] = {
    **{f"{half}_layers": 2 for half in ("encoder", "decoder")},
    **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 2 * HIDDEN for half in ("encoder", "decoder")},
}
TOWER: dict[str, Any] = {**ENCODER, "eos_token_id": 2}


def image(kind: str, sizes: dict[str, Any], size: int = IMAGE) -> Tiny:
    """Return a model that looks at one image."""
    return Tiny(group="vision", kind=kind, sizes=sizes, inputs=pixels(size))


def sound(kind: str, sizes: dict[str, Any]) -> Tiny:
    """Return a model that hears a wave."""
    return Tiny(group="speech", kind=kind, sizes=sizes, inputs=floats("input_values", 1, 3200))


def seeing(kind: str, sizes: dict[str, Any], num_image_tokens: int, **others: Any) -> Tiny:
    """Return a model that reads a text with an image in it."""
    inputs = several(image_prompt(IMAGE_TOKEN, num_image_tokens), pixels())
    return Tiny(
        group="multimodal",
        kind=kind,
        sizes=sizes,
        inputs=others.pop("inputs", inputs),
        tokens=TOKENS,
        **others,
    )


def diffusion(kind: str, sizes: dict[str, Any], inputs: Any) -> Tiny:
    """Return a model of diffusers."""
    return Tiny(group="diffusion", library="diffusers", kind=kind, sizes=sizes, inputs=inputs)


STAGES: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48]}

IMAGES: dict[str, Tiny] = {
    "vit": image("ViTForImageClassification", VISION),
    "deit": image("DeiTForImageClassification", VISION),
    "beit": image("BeitForImageClassification", {**VISION, "vocab_size": VOCAB}),
    "dinov2": image("Dinov2Model", VISION),
    "swin": image(
        "SwinForImageClassification",
        {"image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]}
        | {"num_heads": [2, 4], "window_size": 4},
    ),
    "swinv2": image(
        "Swinv2ForImageClassification",
        {"image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]}
        | {"num_heads": [2, 4], "window_size": 4},
    ),
    "convnext": image("ConvNextForImageClassification", STAGES),
    "convnextv2": image("ConvNextV2ForImageClassification", STAGES),
    "resnet": image(
        "ResNetForImageClassification",
        {**STAGES, "embedding_size": 16, "layer_type": "basic"},
    ),
    "regnet": image(
        "RegNetForImageClassification", {**STAGES, "embedding_size": 16, "groups_width": 8}
    ),
    "mobilenet_v1": image("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25}),
    "mobilenet_v2": image("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}),
    "mobilevit": image(
        "MobileViTForImageClassification",
        {"image_size": IMAGE, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8] * 7}
        | {"num_attention_heads": 4},
    ),
    "efficientnet": image(
        "EfficientNetForImageClassification",
        {"image_size": IMAGE, "width_coefficient": 0.25, "depth_coefficient": 0.25}
        | {"hidden_dim": 320},
    ),
    "segformer": image(
        "SegformerForSemanticSegmentation",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "decoder_hidden_size": 32}
        | {"num_attention_heads": [1, 1, 2, 2]},
    ),
    "yolos": image(
        "YolosForObjectDetection",
        {**VISION, "image_size": [IMAGE, IMAGE], "num_detection_tokens": 5},
    ),
    "detr": image(
        "DetrForObjectDetection",
        {**HALVES, "d_model": HIDDEN, "num_queries": 6, "use_timm_backbone": False}
        | {"use_pretrained_backbone": False, "backbone": None}
        | {"backbone_config": {"model_type": "resnet", "layer_type": "basic"} | STAGES}
        | {},
        64,
    ),
    "pvt": image(
        "PvtForImageClassification",
        {"image_size": IMAGE, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]}
        | {"num_attention_heads": [1, 1, 2, 2]},
    ),
    "poolformer": image("PoolFormerForImageClassification", {**STAGES}),
    "vit_msn": image("ViTMSNForImageClassification", VISION),
    "dpt": image(
        "DPTForDepthEstimation",
        {**VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
        | {"neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16, "is_hybrid": False},
    ),
}

TIME = floats("past_values", 1, 32, 3)
FUTURE: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 16,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "d_model": HIDDEN,
    **HALVES,
}
PAST = several(
    floats("past_values", 1, 19),
    floats("past_time_features", 1, 19, 2),
    fixed("past_observed_mask", lambda: torch.ones(1, 19)),
    floats("future_values", 1, 4),
    floats("future_time_features", 1, 4, 2),
)


def series(kind: str, sizes: dict[str, Any], inputs: Any = TIME) -> Tiny:
    """Return a model of time series."""
    return Tiny(group="time series", kind=kind, sizes=sizes, inputs=inputs)


PATCHES: dict[str, Any] = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": HIDDEN,
    "prediction_length": 8,
}

TIME_SERIES: dict[str, Tiny] = {
    "patchtst": series(
        "PatchTSTForPrediction",
        {**PATCHES, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 2 * HIDDEN},
    ),
    "patchtsmixer": series("PatchTSMixerForPrediction", {**PATCHES, "num_layers": 2}),
    "time_series_transformer": series("TimeSeriesTransformerForPrediction", FUTURE, PAST),
    "autoformer": series(
        "AutoformerForPrediction", {**FUTURE, "label_length": 4, "moving_average": 5}, PAST
    ),
    "informer": series("InformerForPrediction", FUTURE, PAST),
}

ENCODEC: dict[str, Any] = {
    "target_bandwidths": [36.0],
    "sampling_rate": 24000,
    "num_filters": 8,
    "hidden_size": 16,
    "num_residual_layers": 1,
    "upsampling_ratios": [4, 2],
    "codebook_size": 64,
    "codebook_dim": 16,
    "num_lstm_layers": 1,
}

SOUNDS: dict[str, Tiny] = {
    "wav2vec2": sound("Wav2Vec2ForCTC", SPEECH),
    "hubert": sound("HubertForCTC", SPEECH),
    "wavlm": sound("WavLMForCTC", SPEECH),
    "unispeech": sound("UniSpeechForCTC", SPEECH),
    "sew": sound("SEWForCTC", {**SPEECH, "squeeze_factor": 2}),
    "data2vec_audio": sound("Data2VecAudioForCTC", {**SPEECH, "num_conv_pos_embeddings": 4}),
    "speech_to_text": Tiny(
        group="speech",
        kind="Speech2TextForConditionalGeneration",
        sizes={**HALVES, "d_model": HIDDEN, "vocab_size": VOCAB, "input_feat_per_channel": 16}
        | {"conv_channels": 32, "max_source_positions": 64, "max_target_positions": 64},
        inputs=several(floats("input_features", 1, 40, 16), ids(4, name="decoder_input_ids")),
        tokens=TOKENS,
    ),
    "audio_spectrogram": Tiny(
        group="speech",
        kind="ASTForAudioClassification",
        sizes={**VISION, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
        inputs=floats("input_values", 1, 32, 16),
    ),
    "speecht5": Tiny(
        group="speech",
        kind="SpeechT5ForTextToSpeech",
        sizes={**HALVES, "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_mel_bins": 20}
        | {"speech_decoder_prenet_units": 32, "speaker_embedding_dim": 16}
        | {"speech_decoder_postnet_units": 32, "speech_decoder_postnet_layers": 2}
        | {"max_text_positions": 64, "max_speech_positions": 64}
        | {"speech_decoder_prenet_dropout": 0.0},
        inputs=several(
            ids(), floats("decoder_input_values", 1, 6, 20), floats("speaker_embeddings", 1, 16)
        ),
    ),
    "encodec": Tiny(
        group="speech",
        kind="EncodecModel",
        sizes=ENCODEC,
        inputs=floats("input_values", 1, 1, 3200),
    ),
    "musicgen": Tiny(
        group="speech",
        kind="MusicgenForConditionalGeneration",
        sizes={
            "text_encoder": {"model_type": "t5", "vocab_size": VOCAB, "d_model": HIDDEN}
            | {"d_kv": 16, "d_ff": 2 * HIDDEN, "num_layers": 2, "num_heads": 4},
            "audio_encoder": {"model_type": "encodec", **ENCODEC},
            "decoder": {"model_type": "musicgen_decoder", "vocab_size": 64, "num_codebooks": 2}
            | {"num_hidden_layers": 2, "ffn_dim": 2 * HIDDEN, "num_attention_heads": 4}
            | {"hidden_size": HIDDEN, "pad_token_id": 64, "bos_token_id": 64}
            | {"max_position_embeddings": 64},
        },
        inputs=several(ids(), fixed("decoder_input_ids", lambda: torch.full((2, 1), 64))),
        tokens=TOKENS,
    ),
    "hifi_gan": Tiny(
        group="speech",
        kind="SpeechT5HifiGan",
        sizes={"model_in_dim": 20, "upsample_initial_channel": 16}
        | {"upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4]},
        inputs=floats("spectrogram", 6, 20),
    ),
}

TWO_TOWERS = several(ids(8), pixels())
LANGUAGE: dict[str, Any] = {"model_type": "llama", **TEXT}
SIGHT: dict[str, Any] = {"model_type": "clip_vision_model", **VISION}


def rope_vision(**sizes: Any) -> dict[str, Any]:
    """Return sizes of a vision tower that flattens its patches itself."""
    return {"depth": 2, "embed_dim": HIDDEN, "num_heads": 4, "patch_size": 4, **sizes}


FLAT = several(
    image_prompt(IMAGE_TOKEN, 4),
    floats("pixel_values", 16, 3 * 2 * 4 * 4),
    fixed("image_grid_thw", lambda: torch.tensor([[1, 4, 4]])),
    fixed("mm_token_type_ids", lambda: torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]])),
)

MULTIMODAL: dict[str, Tiny] = {
    "clip": Tiny(
        group="multimodal",
        kind="CLIPModel",
        sizes={"text_config": TOWER, "vision_config": VISION, "projection_dim": 32},
        inputs=TWO_TOWERS,
    ),
    "siglip": Tiny(
        group="multimodal",
        kind="SiglipModel",
        sizes={"text_config": TOWER, "vision_config": VISION},
        inputs=TWO_TOWERS,
    ),
    "chinese_clip": Tiny(
        group="multimodal",
        kind="ChineseCLIPModel",
        sizes={"text_config": TOWER, "vision_config": VISION, "projection_dim": 32},
        inputs=TWO_TOWERS,
    ),
    "blip": Tiny(
        group="multimodal",
        kind="BlipForConditionalGeneration",
        sizes={
            "text_config": {**TOWER, "encoder_hidden_size": HIDDEN, "sep_token_id": 2},
            "vision_config": VISION,
        },
        inputs=TWO_TOWERS,
        tokens=TOKENS,
    ),
    "blip2": seeing(
        "Blip2ForConditionalGeneration",
        {
            "vision_config": VISION,
            "qformer_config": {**ENCODER, "encoder_hidden_size": HIDDEN},
            "text_config": {"model_type": "opt", **ENCODER, "ffn_dim": 2 * HIDDEN}
            | {"word_embed_proj_dim": HIDDEN},
            "num_query_tokens": 4,
            "image_token_index": IMAGE_TOKEN,
        },
        4,
    ),
    "llava": seeing(
        "LlavaForConditionalGeneration",
        {"text_config": LANGUAGE, "vision_config": SIGHT, "image_token_index": IMAGE_TOKEN}
        | {"image_seq_length": 16, "vision_feature_layer": -1},
        16,
    ),
    "paligemma": seeing(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **TEXT, "head_dim": 16},
            "vision_config": {"model_type": "siglip_vision_model", **VISION}
            | {"projection_dim": HIDDEN, "vision_use_head": False},
            "image_token_index": IMAGE_TOKEN,
            "projection_dim": HIDDEN,
        },
        16,
        # As its processor makes them. Without these, transformers' compiled form has another mask.
        inputs=several(
            image_prompt(IMAGE_TOKEN, 16),
            fixed("token_type_ids", lambda: torch.zeros(1, 22, dtype=torch.long)),
            pixels(),
        ),
    ),
    "qwen2_vl": seeing(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            "vision_config": rope_vision(hidden_size=HIDDEN, mlp_ratio=2),
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": IMAGE_TOKEN - 1,
            "vision_start_token_id": IMAGE_TOKEN - 2,
            "vision_end_token_id": IMAGE_TOKEN - 3,
        },
        4,
        inputs=FLAT,
    ),
    "idefics3": seeing(
        "Idefics3ForConditionalGeneration",
        {"text_config": LANGUAGE, "vision_config": VISION, "image_token_id": IMAGE_TOKEN}
        | {"scale_factor": 2},
        4,
        inputs=several(image_prompt(IMAGE_TOKEN, 4), floats("pixel_values", 1, 1, 3, IMAGE, IMAGE)),
    ),
    "gemma3_vision": seeing(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "head_dim": 16, "sliding_window": 8},
            "vision_config": {**VISION, "vision_use_head": False},
            "image_token_index": IMAGE_TOKEN,
            "mm_tokens_per_image": 4,
        },
        4,
    ),
    "internvl": seeing(
        "InternVLForConditionalGeneration",
        {"text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": IMAGE_TOKEN}
        | {"vision_config": {**VISION, "image_size": [IMAGE, IMAGE], "patch_size": [8, 8]}}
        | {"image_seq_length": 4},
        4,
    ),
    "git": Tiny(
        group="multimodal",
        kind="GitForCausalLM",
        sizes={**ENCODER, "vision_config": VISION},
        inputs=TWO_TOWERS,
        tokens=TOKENS,
    ),
    "vilt": Tiny(
        group="multimodal",
        kind="ViltForMaskedLM",
        sizes={**VISION, **ENCODER, "max_position_embeddings": 40},
        inputs=TWO_TOWERS,
    ),
    "flava_text": Tiny(
        group="multimodal",
        kind="FlavaTextModel",
        sizes=ENCODER,
        inputs=ids(8),
    ),
}

BLOCKS: dict[str, Any] = {"layers_per_block": 1, "norm_num_groups": 8}
CHANNELS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
STEP = fixed("timestep", lambda: torch.tensor([3]))

DIFFUSION: dict[str, Tiny] = {
    "autoencoder_kl": diffusion(
        "AutoencoderKL",
        {**BLOCKS, "block_out_channels": (32, 64), "latent_channels": 4, "sample_size": IMAGE}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2},
        floats("sample", 1, 3, IMAGE, IMAGE),
    ),
    "vq_model": diffusion(
        "VQModel",
        {**BLOCKS, "block_out_channels": (32, 64), "latent_channels": 4, "num_vq_embeddings": 32}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2},
        floats("sample", 1, 3, IMAGE, IMAGE),
    ),
    "unet_2d": diffusion(
        "UNet2DModel",
        {**BLOCKS, "block_out_channels": (32, 64), "sample_size": 16, "attention_head_dim": 8}
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        several(floats("sample", 1, 3, 16, 16), STEP),
    ),
    "unet_2d_condition": diffusion(
        "UNet2DConditionModel",
        {**BLOCKS, "block_out_channels": (32, 64), "sample_size": 16, "attention_head_dim": 8}
        | {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
        | {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32},
        several(floats("sample", 1, 4, 16, 16), STEP, floats("encoder_hidden_states", 1, 7, 32)),
    ),
    "dit": diffusion(
        "DiTTransformer2DModel",
        {**CHANNELS, "in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2}
        | {"norm_num_groups": 8, "num_embeds_ada_norm": 16},
        several(
            floats("hidden_states", 1, 4, 8, 8),
            STEP,
            fixed("class_labels", lambda: torch.tensor([1])),
        ),
    ),
    "sd3": diffusion(
        "SD3Transformer2DModel",
        {**CHANNELS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4}
        | {"num_layers": 2, "joint_attention_dim": 32, "caption_projection_dim": 64}
        | {"pooled_projection_dim": 32, "pos_embed_max_size": 8},
        several(
            floats("hidden_states", 1, 4, 8, 8),
            STEP,
            floats("encoder_hidden_states", 1, 7, 32),
            floats("pooled_projections", 1, 32),
        ),
    ),
    "flux": diffusion(
        "FluxTransformer2DModel",
        {**CHANNELS, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}
        | {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        several(
            floats("hidden_states", 1, 16, 4),
            STEP,
            floats("encoder_hidden_states", 1, 7, 32),
            floats("pooled_projections", 1, 32),
            fixed("img_ids", lambda: torch.arange(48).reshape(16, 3) % 4),
            fixed("txt_ids", lambda: torch.zeros(7, 3, dtype=torch.int64)),
        ),
    ),
    "pixart": diffusion(
        "PixArtTransformer2DModel",
        {**CHANNELS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 8}
        | {"num_layers": 2, "cross_attention_dim": 64, "caption_channels": 32}
        | {"norm_num_groups": 8, "use_additional_conditions": False},
        several(
            floats("hidden_states", 1, 4, 8, 8), STEP, floats("encoder_hidden_states", 1, 7, 32)
        ),
    ),
}
