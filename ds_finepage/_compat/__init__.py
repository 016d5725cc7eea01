"""Names the private parts of torch, transformers and DeepSpeed that ds_finepage uses.

Such names can move or disappear in any release. Only this package imports them, and
``tests/unit/test_compat.py`` proves that each exists, as does each private attribute that the
product reads. It has four parts:

- this file: names as text, of methods and functions that the seams wrap;
- ``torch``: what the product imports from torch;
- ``deepspeed``: what the product imports from DeepSpeed;
- ``transformers``: names and behaviour that differ between its versions.
"""

from __future__ import annotations

ENGINE = "DeepSpeedEngine"
ENGINE_SANITY_CHECK = "_do_sanity_check"
ENGINE_CONFIGURE = "_configure_zero_optimizer"
ENGINE_TAKE_MODEL = "_configure_distributed_model"
ENGINE_CUT_MODEL = "_configure_tensor_parallel"
ENGINE_INPUT_CHECK = "first_dataloader_check"
"""The hook by which an engine with tensor parallelism compares the inputs of its first call."""

ENGINE_HOOKS = ("module_forward_pre_hook", "module_forward_post_hook")
"""The hooks of an engine on its model; versions before 0.19 have none."""

ENGINE_OFFLOAD = "DeepSpeedZeRoOffload"
"""The class that an engine builds for ZeRO stage 3 without an optimizer; looked up by name."""

MODEL = "PreTrainedModel"
MODEL_BUILD = "get_init_context"
MODEL_LOAD = "_load_pretrained_model"
MODEL_FINISH = "_finalize_model_loading"
MODEL_METHODS = (MODEL_BUILD, MODEL_LOAD, MODEL_FINISH)
MODEL_QUANTIZER = "get_hf_quantizer"
IS_ZERO3 = "is_deepspeed_zero3_enabled"
"""The function of transformers that tells whether it loads into ZeRO's partitions."""

MODEL_NEEDS = (MODEL, MODEL_QUANTIZER, "deepspeed_config", IS_ZERO3)
"""The names that loading into partitions needs in ``transformers.modeling_utils``."""

ACCELERATE_SET = "set_module_tensor_to_device"
"""The function in ``accelerate.hooks`` by which its hooks fetch a weight, and free it."""

BATCHING_MEMORY = "get_device_and_memory_breakdown"
"""The function by which continuous batching of transformers sizes its KV cache."""
