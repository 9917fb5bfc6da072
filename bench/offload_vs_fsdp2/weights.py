"""Hugging Face folders with random bfloat16 weights, written as fast as memory takes them."""

import concurrent.futures
import json
import math
import os
import pathlib

import numpy as np

import geometry

BLOCK_ELEMENTS = 1 << 25  # All tensors are pieces of one block; places in it differ, so that no two experts are equal.
BFLOAT16_ONE = 0x3F80


def _attention(config, at):
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    gated = 2 if geometry.is_hybrid(config) else 1  # Each query head with its output gate.
    shapes = {at + "q_proj.weight": (gated * queries, hidden), at + "k_proj.weight": (keys, hidden),
              at + "v_proj.weight": (keys, hidden), at + "o_proj.weight": (hidden, queries)}
    if config["model_type"] != "mixtral":
        shapes |= {at + "q_norm.weight": (head,), at + "k_norm.weight": (head,)}
    return shapes


def _delta(config, at):
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys, values = geometry.delta_widths(config)
    channels = 2 * keys + values
    return {at + "in_proj_qkv.weight": (channels, hidden), at + "in_proj_z.weight": (values, hidden),
            at + "in_proj_b.weight": (heads, hidden), at + "in_proj_a.weight": (heads, hidden),
            at + "conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]), at + "A_log": (heads,),
            at + "dt_bias": (heads,), at + "norm.weight": (config["linear_value_head_dim"],),
            at + "out_proj.weight": (hidden, values)}


def _mixture(config, layer):
    hidden, mixtral = config["hidden_size"], config["model_type"] == "mixtral"
    experts, width = geometry.mixture_of(config)
    at = layer + ("block_sparse_moe." if mixtral else "mlp.")
    shapes = {at + "gate.weight": (experts, hidden)}
    if geometry.is_hybrid(config):
        shared = config["shared_expert_intermediate_size"]
        return shapes | {
            at + "experts.gate_up_proj": (experts, 2 * width, hidden), at + "experts.down_proj": (experts, hidden, width),
            at + "shared_expert.gate_proj.weight": (shared, hidden), at + "shared_expert.up_proj.weight": (shared, hidden),
            at + "shared_expert.down_proj.weight": (hidden, shared), at + "shared_expert_gate.weight": (1, hidden)}
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert in range(experts):
        place = f"{at}experts.{expert}."
        shapes |= {f"{place}{gate}.weight": (width, hidden), f"{place}{up}.weight": (width, hidden),
                   f"{place}{down}.weight": (hidden, width)}
    return shapes


def tensor_shapes(config):
    """[{published name: shape}], a group a file: the embedding, each layer, the head. Raises ValueError for Gemma 4."""
    if config["tie_word_embeddings"]:
        raise ValueError(f"weights of {config['model_type']} are not written here")
    hidden = config["hidden_size"]
    groups = [{"model.embed_tokens.weight": (config["vocab_size"], hidden)}]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        linear = geometry.is_linear_layer(config, layer)
        groups.append({at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
                      | (_delta(config, at + "linear_attn.") if linear else _attention(config, at + "self_attn."))
                      | _mixture(config, at))
    return [*groups, {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}]


def _constant(name, config):
    """bfloat16 bits that a tensor holds throughout, None: it is random. Norms scale by 1, those of hybrids by 1 + weight but
    for the one in Gated DeltaNet."""
    if "norm" in name:
        return 0 if geometry.is_hybrid(config) and ".linear_attn." not in name else BFLOAT16_ONE
    return BFLOAT16_ONE if name.endswith("dt_bias") else None


def _random_block(deviation):
    """bfloat16 bits of a normal distribution."""
    values = np.random.default_rng(1).standard_normal(BLOCK_ELEMENTS, np.float32) * np.float32(deviation)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _pieces(count, start, block):
    """Views of `block`, from `start` on and around, with `count` elements together."""
    while count > 0:
        piece = block[start:start + count]
        yield piece
        count -= len(piece)
        start = 0


def _write_file(path, shapes, config, block, seed):
    header, size = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = size + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    starts = np.random.default_rng(seed).integers(0, len(block), len(shapes))
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), start in zip(shapes.items(), starts):
            if (bits := _constant(name, config)) is not None:
                file.write(np.full(shape, bits, np.uint16))
                continue
            for piece in _pieces(math.prod(shape), int(start), block):
                written = 0
                while written < piece.nbytes:  # One call writes less than 2 GiB.
                    written += file.write(memoryview(piece).cast("B")[written:])
    return size


def write_weights(folder, config):
    """A whole folder. Returns the bytes of its tensors."""
    folder = pathlib.Path(folder)
    geometry.write_config(folder, config | {"dtype": "bfloat16"})
    block, groups = _random_block(config["initializer_range"]), tensor_shapes(config)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    # Threads, for a write holds no lock of the interpreter.
    with concurrent.futures.ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        sizes = list(pool.map(lambda i: _write_file(folder / names[i], groups[i], config, block, i), range(len(groups))))
    index = {"metadata": {"total_size": sum(sizes)},
             "weight_map": {tensor: name for name, group in zip(names, groups) for tensor in group}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    return sum(sizes)
