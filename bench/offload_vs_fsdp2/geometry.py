"""What is trained: the model shapes of geometries/, and packed datasets."""

import json
import pathlib

import numpy as np

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "geometries"
_PUBLISHED = {name: json.loads((_FOLDER / name / "config.json").read_text())
              for name in ("qwen3-30b-a3b", "mixtral-8x7b")}
_TINY = dict(_PUBLISHED["qwen3-30b-a3b"], vocab_size=512, hidden_size=64, intermediate_size=128,
             moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             num_experts=8, num_experts_per_tok=2, max_position_embeddings=4096)
_RUN = {"use_cache": False, "dtype": "float32"}

GEOMETRIES = _PUBLISHED | {"tiny": _TINY}
DEFAULT_LAYERS = {"qwen3-30b-a3b": 8, "mixtral-8x7b": 2, "tiny": 4}


def config_of(geometry, layers=None):
    return GEOMETRIES[geometry] | _RUN | {"num_hidden_layers": layers or DEFAULT_LAYERS[geometry]}


def write_config(folder, config):
    """A Hugging Face folder without weights."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def parameter_count(config):
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    qwen = config["model_type"] == "qwen3_moe"
    experts = config["num_experts"] if qwen else config["num_local_experts"]
    width = config["moe_intermediate_size"] if qwen else config["intermediate_size"]
    attention = hidden * head * (2 * heads + 2 * kv_heads) + (2 * head if qwen else 0)
    layer = attention + 2 * hidden + experts * hidden + experts * 3 * width * hidden
    return config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden + hidden


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
