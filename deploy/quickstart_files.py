"""Writes what the quick start trains: the model's config.json and the job.

    quickstart_files.py model DATASET FOLDER             config.json of a small Qwen3-MoE for that dataset's tokenizer
    quickstart_files.py job NAME MODEL DATA OUTPUT FILE  job.yaml: two CPU workers, DATA/train and DATA/held-out
"""

import json
import pathlib
import sys


def write_model(dataset, folder):
    description = json.loads((pathlib.Path(dataset) / "dataset.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": description["vocabulary_size"],
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": description["separator"],
        "torch_dtype": "float32",
    }
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# 240 steps of 1,024 tokens: about 1.6 nats below the unigram entropy, in a few minutes on two cores.
JOB = """\
name: {name}
model: {{config: {model}/config.json, initialize: random}}
data: {{train: {data}/train, evaluation: {data}/held-out, shuffle: true}}
sequence_length: 128
global_batch: 8
steps: 240
optimizer: {{learning_rate: 3e-3, betas: [0.9, 0.95], epsilon: 1e-8, weight_decay: 0.1, max_gradient_norm: 1.0}}
schedule: {{kind: cosine, warmup_steps: 20, minimum_ratio: 0.1}}
router: {{auxiliary_loss: 0.001}}
seed: 1
precision: float32
devices: {{kind: cpu, count: 2}}
checkpoint: {{every_steps: 120, keep: 2}}
evaluation: {{every_steps: 60, sequences: 32}}
output: {output}
"""


def write_job(name, model, data, output, file):
    places = {key: json.dumps(value)[1:-1] for key, value in (("model", model), ("data", data), ("output", output))}
    pathlib.Path(file).write_text(JOB.format(name=name, **places), encoding="utf-8")


if __name__ == "__main__":
    {"model": write_model, "job": write_job}[sys.argv[1]](*sys.argv[2:])
