"""What is trained: the model shapes of geometries/, and packed datasets."""

import json
import pathlib

import numpy as np

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "geometries"
PUBLISHED = {path.parent.name: json.loads(path.read_text()) for path in sorted(_FOLDER.glob("*/config.json"))}
_TINY = dict(vocab_size=512, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, max_position_embeddings=4096)
_TINY_HYBRID = _TINY | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                            linear_value_head_dim=16, shared_expert_intermediate_size=32, rope_parameters={
                                "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.5,
                                "mrope_section": [3, 3, 2], "mrope_interleaved": True})
_RUN = {"use_cache": False, "dtype": "float32"}

# For tests, beside what is published: all attention, and Gated DeltaNet in three layers of four.
GEOMETRIES = PUBLISHED | {"tiny": PUBLISHED["qwen3-30b-a3b"] | _TINY | {"intermediate_size": 128},
                          "tiny-hybrid": PUBLISHED["qwen3.6-35b-a3b"] | _TINY_HYBRID}
# As many as one machine trains with its state in 128 GiB, or the period of the mixers.
_DEFAULT_LAYERS = {"mixtral": 2, "qwen3_moe": 8, "qwen3_5_moe_text": 4, "gemma4_text": 6}
_GEMMA4_PERIOD = 6  # Five layers with a window, one that sees all.


def default_layers(geometry):
    config = GEOMETRIES[geometry]
    return min(_DEFAULT_LAYERS[config["model_type"]], config["num_hidden_layers"])


def config_of(geometry, layers=None):
    return GEOMETRIES[geometry] | _RUN | {"num_hidden_layers": layers or default_layers(geometry)}


def write_config(folder, config):
    """A Hugging Face folder without weights."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def is_hybrid(config):
    """Qwen3.5 and 3.6: Gated DeltaNet in most layers, gated attention in the others, a shared expert in all."""
    return config["model_type"] == "qwen3_5_moe_text"


def is_linear_layer(config, layer):
    """Whether the mixer of this layer is Gated DeltaNet."""
    return is_hybrid(config) and (layer + 1) % config["full_attention_interval"] != 0


def mixture_of(config):
    """(experts, width of one)"""
    if config["model_type"] == "mixtral":
        return config["num_local_experts"], config["intermediate_size"]
    return config["num_experts"], config["moe_intermediate_size"]


def _attention_parameters(config, layer):
    hidden, head, key_heads = config["hidden_size"], config["head_dim"], config["num_key_value_heads"]
    projections = 2 * config["num_attention_heads"] + 2 * key_heads  # In heads: q, o; k, v.
    if config["model_type"] == "mixtral":
        return hidden * head * projections
    if is_hybrid(config):
        projections += config["num_attention_heads"]  # The output gate.
    last = config["num_hidden_layers"] - 1
    if config["model_type"] == "gemma4_text" and ((layer + 1) % _GEMMA4_PERIOD == 0 or layer == last):
        head = config["global_head_dim"]
        projections = 2 * config["num_attention_heads"] + config["num_global_key_value_heads"]  # Values are the keys.
    return hidden * head * projections + 2 * head


def delta_widths(config):
    """Of Gated DeltaNet: (all key heads, all value heads)"""
    return (config["linear_num_key_heads"] * config["linear_key_head_dim"],
            config["linear_num_value_heads"] * config["linear_value_head_dim"])


def _delta_parameters(config):
    keys, values = delta_widths(config)
    heads, channels = config["linear_num_value_heads"], 2 * keys + values
    projections = config["hidden_size"] * (channels + 2 * values + 2 * heads)  # In: mixed, z, b, a; out.
    return projections + channels * config["linear_conv_kernel_dim"] + 2 * heads + config["linear_value_head_dim"]


def _mixture_parameters(config):
    """Router, experts, and what all tokens go through beside them."""
    hidden = config["hidden_size"]
    experts, width = mixture_of(config)
    count = experts * hidden + experts * 3 * width * hidden
    if is_hybrid(config):
        count += 3 * config["shared_expert_intermediate_size"] * hidden + hidden  # And the gate of its output.
    if config["model_type"] == "gemma4_text":
        count += hidden + experts + 3 * config["intermediate_size"] * hidden  # The router's scales; the dense branch.
    return count


def parameter_count(config):
    """Of the text model. Raises ValueError for a family that is not counted here."""
    if config["model_type"] not in _DEFAULT_LAYERS:
        raise ValueError(f"the parameters of {config['model_type']} are not counted here")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    mixers = sum(_delta_parameters(config) if is_linear_layer(config, layer) else _attention_parameters(config, layer)
                 for layer in range(layers))
    norms = 7 * hidden + 1 if config["model_type"] == "gemma4_text" else 2 * hidden  # With the scale of the layer.
    vocabulary = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return mixers + layers * (_mixture_parameters(config) + norms) + vocabulary + hidden


def document_offsets(token_count, length):
    """Every document is one sequence; the last token, which is a target alone, is a document of its own."""
    return np.unique(np.append(np.arange(0, token_count, length), token_count)).astype(np.int64)


def random_document_offsets(token_count, mean, random):
    """Documents of geometrically distributed length, whose mean is `mean`; the last one ends with the tokens."""
    starts = np.concatenate([[0], np.cumsum(random.geometric(1 / mean, 2 * token_count // mean + 64))])
    if starts[-1] < token_count:
        raise ValueError("too few documents were drawn")
    return np.append(starts[starts < token_count], token_count).astype(np.int64)


def write_dataset(folder, tokens, documents, vocabulary):
    """`tokens`: uint32, one more than whole sequences. `documents`: where each starts, and the end."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.ascontiguousarray(tokens, np.uint32))
    np.save(folder / "documents.npy", documents)
    (folder / "dataset.json").write_text(json.dumps(
        {"vocabulary_size": vocabulary, "tokens": len(tokens), "documents": len(documents) - 1}) + "\n")
    return folder


def write_random_dataset(folder, sequences, length, vocabulary, document_tokens=None, seed=1):
    """`document_tokens`: mean length of the documents; None: each is one sequence. The tokens are the same."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocabulary, sequences * length + 1, np.uint32)
    documents = (random_document_offsets(len(tokens), document_tokens, random) if document_tokens
                 else document_offsets(len(tokens), length))
    return write_dataset(folder, tokens, documents, vocabulary)


class Sequences:
    """The sequences of such a dataset in order, and again from the start."""

    def __init__(self, folder, length):
        self.tokens = np.load(pathlib.Path(folder) / "tokens.npy", mmap_mode="r")
        self.length = length
        self.count = (len(self.tokens) - 1) // length

    def read(self, first, count):
        """[count, length] of int64: sequences `first`, `first` + 1, ..."""
        rows = [(first + i) % self.count * self.length for i in range(count)]
        return np.stack([np.asarray(self.tokens[row:row + self.length], np.int64) for row in rows])
