"""Tiny random models in published names, and tiny packed datasets: what end-to-end tests train."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

# Models. Every asymmetry: hidden size != heads * head size, fewer key/value heads, K < E, 2I != H.

_SHARED = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
           "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
           "rope_theta": 10000.0, "attention_bias": False, "initializer_range": 0.02, "use_cache": False}
FAMILIES = {
    "qwen3_moe": dict(_SHARED, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=3,
                      num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, intermediate_size=72,
                      norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1], use_sliding_window=False,
                      sliding_window=None),
    "mixtral": dict(_SHARED, model_type="mixtral", architectures=["MixtralForCausalLM"], num_hidden_layers=2,
                    num_local_experts=6, num_experts_per_tok=2, intermediate_size=56, sliding_window=None),
    # Gated DeltaNet twice, attention once; two value heads a key head.
    "qwen3_5_moe": dict(
        {key: value for key, value in _SHARED.items() if key != "rope_theta"}, model_type="qwen3_5_moe_text",
        architectures=["Qwen3_5MoeForCausalLM"], num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"], head_dim=32, num_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=24, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
    # Two layers of the window and one of wider heads. No padding token: transformers drops its gradient.
    "gemma4": dict({key: value for key, value in _SHARED.items() if key not in ("hidden_act", "rope_theta")},
                   model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], num_hidden_layers=3,
                   layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=12,
                   global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, num_kv_shared_layers=0,
                   hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=3,
                   moe_intermediate_size=40, intermediate_size=56, hidden_activation="gelu_pytorch_tanh",
                   final_logit_softcapping=2.0, pad_token_id=None, tie_word_embeddings=True,
                   rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                                    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
                                                       "partial_rotary_factor": 0.25}}),
}


def model_config(family="qwen3_moe", **changes):
    return FAMILIES[family] | changes


def _qwen3_5_shapes(config, prefix="model."):
    hidden, head, width = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts, shared = config["num_experts"], config["shared_expert_intermediate_size"]
    value_heads, value = config["linear_num_value_heads"], config["linear_value_head_dim"]
    value_width = value_heads * value
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + value_width
    shapes = {prefix + "embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer, kind in enumerate(config["layer_types"]):
        at = f"{prefix}layers.{layer}."
        if kind == "linear_attention":
            mixer = {"linear_attn.in_proj_qkv.weight": (channels, hidden), "linear_attn.in_proj_z.weight": (value_width, hidden),
                     "linear_attn.in_proj_b.weight": (value_heads, hidden),
                     "linear_attn.in_proj_a.weight": (value_heads, hidden),
                     "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
                     "linear_attn.A_log": (value_heads,), "linear_attn.dt_bias": (value_heads,),
                     "linear_attn.norm.weight": (value,), "linear_attn.out_proj.weight": (hidden, value_width)}
        else:
            mixer = {"self_attn.q_proj.weight": (2 * heads * head, hidden), "self_attn.k_proj.weight": (kv_heads * head, hidden),
                     "self_attn.v_proj.weight": (kv_heads * head, hidden), "self_attn.o_proj.weight": (hidden, heads * head),
                     "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        mixture = {"mlp.gate.weight": (experts, hidden), "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
                   "mlp.experts.down_proj": (experts, hidden, width), "mlp.shared_expert.gate_proj.weight": (shared, hidden),
                   "mlp.shared_expert.up_proj.weight": (shared, hidden), "mlp.shared_expert.down_proj.weight": (hidden, shared),
                   "mlp.shared_expert_gate.weight": (1, hidden)}
        norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        shapes |= {at + name: shape for name, shape in (norms | mixer | mixture).items()}
    return shapes | {prefix + "norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def _gemma4_shapes(config):
    hidden, experts, width = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    heads, dense = config["num_attention_heads"], config["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}."
        full = kind == "full_attention"
        head = config["global_head_dim" if full else "head_dim"]
        kv_heads = config["num_global_key_value_heads" if full else "num_key_value_heads"]
        shapes |= {at + f"{norm}_layernorm{suffix}.weight": (hidden,) for norm, suffix in (
            ("input", ""), ("post_attention", ""), ("pre_feedforward", ""), ("pre_feedforward", "_2"),
            ("post_feedforward", ""), ("post_feedforward", "_1"), ("post_feedforward", "_2"))}
        shapes |= {at + "self_attn.q_proj.weight": (heads * head, hidden),
                   at + "self_attn.k_proj.weight": (kv_heads * head, hidden),
                   at + "self_attn.o_proj.weight": (hidden, heads * head),
                   at + "self_attn.q_norm.weight": (head,), at + "self_attn.k_norm.weight": (head,),
                   at + "mlp.gate_proj.weight": (dense, hidden), at + "mlp.up_proj.weight": (dense, hidden),
                   at + "mlp.down_proj.weight": (hidden, dense), at + "router.proj.weight": (experts, hidden),
                   at + "router.scale": (hidden,), at + "router.per_expert_scale": (experts,),
                   at + "experts.gate_up_proj": (experts, 2 * width, hidden),
                   at + "experts.down_proj": (experts, hidden, width), at + "layer_scalar": (1,)}
        if not full:
            shapes[at + "self_attn.v_proj.weight"] = (kv_heads * head, hidden)
    return shapes


def tensor_shapes(config):
    """Published name to shape, of every tensor of the model."""
    if config["model_type"] == "qwen3_5_moe_text":
        return _qwen3_5_shapes(config)
    if config["model_type"] == "gemma4_text":
        return _gemma4_shapes(config)
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    qwen = config["model_type"] == "qwen3_moe"
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,),
                   at + "self_attn.q_proj.weight": (heads * head, hidden),
                   at + "self_attn.k_proj.weight": (kv_heads * head, hidden),
                   at + "self_attn.v_proj.weight": (kv_heads * head, hidden),
                   at + "self_attn.o_proj.weight": (hidden, heads * head)}
        if qwen:
            shapes |= {at + "self_attn.q_norm.weight": (head,), at + "self_attn.k_norm.weight": (head,)}
        experts = config["num_experts"] if qwen else config["num_local_experts"]
        width = config["moe_intermediate_size"] if qwen else config["intermediate_size"]
        block = at + ("mlp." if qwen else "block_sparse_moe.")
        names = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
        dense = qwen and (layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"] != 0)
        if dense:
            places, width = [block], config["intermediate_size"]
        else:
            places = [f"{block}experts.{expert}." for expert in range(experts)]
            shapes[block + "gate.weight"] = (experts, hidden)
        for place in places:
            shapes |= {place + names[0] + ".weight": (width, hidden), place + names[1] + ".weight": (width, hidden),
                       place + names[2] + ".weight": (hidden, width)}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_weights(config, seed=0):
    """Deviation 0.02, norms and scales around 1, of Gated DeltaNet's small tensors what makes them matter. Gemma 4's is
    larger: it norms what a branch gives, and the gradient of the norm of something small is so large that a rounding
    error decides over the next steps."""
    deviation = 0.2 if config["model_type"] == "gemma4_text" else 0.02
    generator = np.random.default_rng(seed)
    # Of a norm that multiplies by 1 + its weight.
    centre = 0 if config["model_type"] == "qwen3_5_moe_text" else 1
    weights = {}
    for name, shape in tensor_shapes(config).items():
        values = generator.standard_normal(shape, np.float32)
        if "norm" in name or "scal" in name:
            weights[name] = (1 if "linear_attn.norm" in name else centre) + np.float32(0.1) * values
        else:
            own = {"conv1d.weight": 0.3, "A_log": 0.5, "dt_bias": 0.5}.get(name.split("linear_attn.")[-1], deviation)
            weights[name] = np.float32(own) * values
    return weights


def parameter_count(config):
    return sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())


def write_model(folder, family="qwen3_moe", seed=0, weights=None, **changes):
    """A Hugging Face folder in float32. `changes` are of the configuration."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(family, dtype="float32", **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(random_weights(config, seed) if weights is None else weights, folder / "model.safetensors",
              metadata={"format": "pt"})
    return folder


# Data.

def write_data(folder, tokens=8001, documents=40, vocabulary=256, mask=True, seed=0):
    """A packed dataset whose next token can be learned; some documents have a single token."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 7, tokens)
    values = np.zeros(tokens, np.uint32)
    for i in range(1, tokens):
        values[i] = (int(values[i - 1]) * 5 + int(noise[i])) % vocabulary
    cuts = generator.choice(np.arange(2, tokens - 1), documents - 2, replace=False)
    offsets = np.unique(np.concatenate([[0, tokens], cuts, cuts[:1] + 1])).astype(np.int64)
    np.save(folder / "tokens.npy", values)
    np.save(folder / "documents.npy", offsets)
    if mask:
        np.save(folder / "loss_mask.npy", (generator.random(tokens) > 0.1).astype(np.uint8))
    (folder / "dataset.json").write_text(json.dumps(
        {"vocabulary_size": vocabulary, "tokens": tokens, "documents": len(offsets) - 1}))
    return folder
