"""transformers' parameters, which fuse experts, under the names of published checkpoints, one tensor an expert."""

import re

_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)$")
_QWEN3 = {"gate": "mlp.experts.{}.gate_proj.weight", "up": "mlp.experts.{}.up_proj.weight",
          "down": "mlp.experts.{}.down_proj.weight", "block": "mlp."}
_MIXTRAL = {"gate": "block_sparse_moe.experts.{}.w1.weight", "up": "block_sparse_moe.experts.{}.w3.weight",
            "down": "block_sparse_moe.experts.{}.w2.weight", "block": "block_sparse_moe."}
_FAMILIES = {"qwen3_moe": _QWEN3, "mixtral": _MIXTRAL}
_AS_IN_TRANSFORMERS = ("qwen3_5_moe_text", "gemma4_text")


def published(model_type, tensors):
    """`tensors`: transformers' name to a tensor of the parameter's shape. Returns published name to a view."""
    if model_type in _AS_IN_TRANSFORMERS:
        return dict(tensors)
    family = _FAMILIES[model_type]
    result = {}
    for name, tensor in tensors.items():
        match = _EXPERTS.match(name)
        if not match:
            result[name.replace("mlp.", family["block"])] = tensor
            continue
        for expert, weight in enumerate(tensor):
            if match[2] == "down_proj":
                result[match[1] + family["down"].format(expert)] = weight
            else:
                half = weight.shape[0] // 2
                result[match[1] + family["gate"].format(expert)] = weight[:half]
                result[match[1] + family["up"].format(expert)] = weight[half:]
    return result


def is_decayed(name):
    """Weight decay by name: all but norms, biases, scales, convolutions, and Gated DeltaNet's A_log and dt_bias."""
    others = ("norm", "conv1d", "A_log", "dt_bias")
    return not any(part in name for part in others) and not name.endswith((".bias", "router.scale", "per_expert_scale"))
