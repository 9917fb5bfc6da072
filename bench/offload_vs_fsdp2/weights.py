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


def tensor_shapes(config):
    """[{published name: shape}], a group a file: the embedding, each layer, the head."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    qwen = config["model_type"] == "qwen3_moe"
    experts = config["num_experts"] if qwen else config["num_local_experts"]
    width = config["moe_intermediate_size"] if qwen else config["intermediate_size"]
    gate, up, down = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
    groups = [{"model.embed_tokens.weight": (config["vocab_size"], hidden)}]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        mixture = at + ("mlp." if qwen else "block_sparse_moe.")
        group = {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,),
                 at + "self_attn.q_proj.weight": (queries, hidden), at + "self_attn.k_proj.weight": (keys, hidden),
                 at + "self_attn.v_proj.weight": (keys, hidden), at + "self_attn.o_proj.weight": (hidden, queries),
                 mixture + "gate.weight": (experts, hidden)}
        if qwen:
            group |= {at + "self_attn.q_norm.weight": (head,), at + "self_attn.k_norm.weight": (head,)}
        for expert in range(experts):
            place = f"{mixture}experts.{expert}."
            group |= {f"{place}{gate}.weight": (width, hidden), f"{place}{up}.weight": (width, hidden),
                      f"{place}{down}.weight": (hidden, width)}
        groups.append(group)
    return [*groups, {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}]


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


def _write_file(path, shapes, block, seed):
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
            if "norm" in name:
                file.write(np.full(shape, BFLOAT16_ONE, np.uint16))
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
        sizes = list(pool.map(lambda i: _write_file(folder / names[i], groups[i], block, i), range(len(groups))))
    index = {"metadata": {"total_size": sum(sizes)},
             "weight_map": {tensor: name for name, group in zip(names, groups) for tensor in group}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    return sum(sizes)
