"""Tiny random models and what transformers makes of them: the golden files of the model parity test.

    tests/parity/model_fixture.py OUTPUT

One folder a case: a Hugging Face directory (float32), batch.json (documents, targets, coefficient of the auxiliary
loss, chosen experts), reference.safetensors: "logits", "loss", "auxiliary_loss" and, under published names,
"gradient.NAME" of eager transformers in float32. bf16-* cases have weights that BF16 holds, and "bf16.logits",
"bf16.loss", "bf16.gradient.NAME" of the same model run in BF16 as well. Does nothing if OUTPUT is up to date.

Documents run one by one and their losses are added up, so nothing depends on how a packed mask is built. In a bf16
case tokens are drawn so that no routing decision is close: an expert that flips is a step, not a rounding error.
"""

import hashlib
import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import published_names

VOCABULARY = 199
IGNORED = -1
# Of the router's logits; a BF16 run moves them by about 0.002, Gemma 4's by 0.01.
ROUTING_MARGIN = 0.02
GEMMA4_ROUTING_MARGIN = 0.05
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

# Every asymmetry: hidden size != heads * head size, fewer key/value heads, K < E, 2I != H.
SHARED = dict(hidden_size=64, num_attention_heads=6, num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY,
              max_position_embeddings=128, initializer_range=0.02, tie_word_embeddings=False,
              rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
QWEN3 = dict(SHARED, model_type="qwen3_moe", num_hidden_layers=4, num_experts=8, num_experts_per_tok=3,
             moe_intermediate_size=40, intermediate_size=96, norm_topk_prob=True, mlp_only_layers=[1])
MIXTRAL = dict(SHARED, model_type="mixtral", num_hidden_layers=3, num_local_experts=6, num_experts_per_tok=2,
               intermediate_size=56)
# The documents are longer than the shorter original context; of the eight pairs some are fast, some slow.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
CASES = {
    "qwen3": QWEN3,
    "qwen3-unnormalized": dict(QWEN3, norm_topk_prob=False, mlp_only_layers=[], decoder_sparse_step=2,
                               tie_word_embeddings=True),
    "mixtral": MIXTRAL,
    "mixtral-window": dict(MIXTRAL, sliding_window=16),
    "qwen3-yarn-2": dict(QWEN3, rope_parameters=dict(YARN, factor=2.0, original_max_position_embeddings=64)),
    "qwen3-yarn-4": dict(QWEN3, rope_parameters=dict(YARN, factor=4.0, original_max_position_embeddings=32)),
}
# Three Gated DeltaNet layers and one of attention; two value heads a key head, or four.
QWEN35 = dict(SHARED, model_type="qwen3_5_moe_text", num_hidden_layers=4, head_dim=32, num_experts=8,
              num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=24,
              linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
              rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25})
CASES |= {
    "qwen3-5": QWEN35,
    "qwen3-5-groups-of-4": dict(QWEN35, linear_num_value_heads=8, layer_types=["linear_attention", "full_attention"],
                                num_hidden_layers=2),
    "qwen3-5-yarn": dict(QWEN35, rope_parameters=dict(QWEN35["rope_parameters"], rope_type="yarn", factor=4.0,
                                                      original_max_position_embeddings=32)),
}
# Five layers with a window shorter than the documents, one of wider heads, fewer key/value heads, and keys for values.
# Without a padding token: transformers drops its row of the embedding's gradient.
GEMMA4 = dict(SHARED, model_type="gemma4_text", num_hidden_layers=6, num_key_value_heads=3, tie_word_embeddings=True,
              sliding_window=16, global_head_dim=32, num_global_key_value_heads=2, attention_k_eq_v=True,
              num_kv_shared_layers=0, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=3,
              moe_intermediate_size=40, intermediate_size=24, hidden_activation="gelu_pytorch_tanh",
              final_logit_softcapping=0.5, pad_token_id=None, rope_parameters={
                  "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                  "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
                                     "partial_rotary_factor": 0.25}})
GEMMA4_SHORT = dict(GEMMA4, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
CASES |= {
    "gemma4": GEMMA4,
    "gemma4-own-values": dict(GEMMA4_SHORT, attention_k_eq_v=False, final_logit_softcapping=None),
}
AUXILIARY_COEFFICIENT = {"gemma4-own-values": 0.01, "qwen3-unnormalized": 0.02, "mixtral-window": 0.01, "qwen3-5-groups-of-4": 0.01}
DOCUMENTS = [0, 37, 38, 91, 128]  # Odd lengths, one of a single token.
BF16_TOKENS = 48
CANDIDATES = 12  # About one in four is clear at every layer.
BF16_SEEDS = range(5)


def initial(model_type, name, values):
    """Normal `values` at the size that makes each parameter matter."""
    zero_centred = model_type == "qwen3_5_moe_text" and "linear_attn.norm" not in name
    if "norm" in name:
        return 0.1 * values if zero_centred else 1 + 0.1 * values
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return 1 + 0.2 * values
    if name.endswith("router.proj.weight"):
        return 0.15 * values  # Its input is scaled by hidden_size ** -0.5.
    if name.endswith("conv1d.weight"):
        return 0.3 * values
    if name.endswith(("A_log", "dt_bias")):
        return 0.5 * values
    return 0.02 * values


def frozen(model):
    """Of the saved tensors those that are not trained."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]


def make_model(settings, seed, representable):
    """Weights of deviation 0.02, norms around 1. `representable`: rounded to values that BF16 holds."""
    settings = dict(settings)
    settings_type = settings.pop("model_type")
    config = transformers.AutoConfig.for_model(settings_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *frozen(model)]:
            values = torch.randn(parameter.shape, generator=generator)
            values = initial(settings_type, name, values)
            parameter.copy_(values.bfloat16().float() if representable else values)
    return model


class RouterTap:
    """Keeps the router logits of every routed layer of the last forward."""

    def __init__(self, model):
        self.logits = []
        for layer in model.model.layers:
            if hasattr(layer, "router"):
                layer.router.proj.register_forward_hook(lambda module, inputs, output: self.logits.append(output))
            elif hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda module, inputs, output: self.logits.append(output[0]))

    def take(self):
        logits, self.logits = self.logits, []
        return logits


def experts_per_token(config):
    return getattr(config, "top_k_experts", None) or config.num_experts_per_tok


def draw_clear_tokens(model, count, generator):
    """Tokens such that the K-th and the next router logit differ by the margin at every token and layer."""
    margin = GEMMA4_ROUTING_MARGIN if model.config.model_type == "gemma4_text" else ROUTING_MARGIN
    tap = RouterTap(model)
    top_k = experts_per_token(model.config)
    tokens = torch.empty(0, dtype=torch.long)
    with torch.no_grad():
        while len(tokens) < count:
            candidates = torch.randperm(VOCABULARY, generator=generator)[:CANDIDATES]
            ids = torch.cat([tokens.expand(len(candidates), -1), candidates[:, None]], 1)
            model.model(ids, use_cache=False)
            clear = torch.ones(len(candidates), dtype=torch.bool)
            for logits in tap.take():
                best = logits.view(len(candidates), -1, logits.shape[-1])[:, -1].sort(1, descending=True).values
                clear &= best[:, top_k - 1] - best[:, top_k] > margin
            if clear.any():
                tokens = torch.cat([tokens, candidates[clear][:1]])
    return tokens


def reference(model, ids, targets, documents, coefficient):
    """Logits, loss, auxiliary loss, gradients by published name, and chosen experts by routed layer."""
    tap = RouterTap(model)
    logits, routers = [], []
    for first, end in zip(documents, documents[1:]):
        logits.append(model(ids[None, first:end], use_cache=False).logits[0])
        routers.append(tap.take())
    logits = torch.cat(logits)
    by_layer = tuple(torch.cat(layer) for layer in zip(*routers))
    valid = (targets != IGNORED).sum()
    loss = torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum") / valid
    config = model.config
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    auxiliary = load_balancing_loss_func(by_layer, experts, experts_per_token(config))
    (loss + coefficient * auxiliary).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    gradients |= {name: torch.zeros_like(buffer) for name, buffer in frozen(model)}
    chosen = [layer.topk(experts_per_token(config)).indices.sort(1).values for layer in by_layer]
    return {"logits": logits.detach(), "loss": loss.detach()[None], "auxiliary_loss": auxiliary.detach()[None],
            **{f"gradient.{name}": gradient
               for name, gradient in published_names.published(config.model_type, gradients).items()}}, chosen


def plain(tensors, prefix=""):
    return {prefix + name: tensor.float().contiguous().clone() for name, tensor in tensors.items()}


def write_case(folder, settings, seed, documents, coefficient, bf16):
    generator = torch.Generator().manual_seed(1000 + seed)
    model = make_model(settings, seed, representable=bf16)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    count = documents[-1]
    if bf16:
        ids = draw_clear_tokens(model, count, generator)
    else:
        ids = torch.randint(VOCABULARY, (count,), generator=generator)
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    targets[torch.rand(count, generator=generator) < 0.15] = IGNORED
    targets[documents[-2]:documents[-2] + 2] = torch.tensor([0, VOCABULARY - 1])
    tensors, chosen = reference(model, ids, targets, documents, coefficient)
    result = plain(tensors)
    if bf16:
        # from_pretrained, not .to(): the latter would round the rotary frequencies as well.
        narrow = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **EAGER)
        assert all(buffer.dtype == torch.float32 for name, buffer in narrow.named_buffers() if "inv_freq" in name)
        assert narrow.model.embed_tokens.weight.dtype == torch.bfloat16
        tensors, narrow_chosen = reference(narrow, ids, targets, documents, coefficient)
        assert all(torch.equal(a, b) for a, b in zip(chosen, narrow_chosen)), "a routing decision was close"
        result |= plain(tensors, "bf16.")
    save_file(result, folder / "reference.safetensors")
    batch = {"tokens": ids.tolist(), "targets": targets.tolist(), "documents": documents,
             "auxiliary_coefficient": coefficient, "chosen_experts": [layer.tolist() for layer in chosen]}
    (folder / "batch.json").write_text(json.dumps(batch))


def main():
    output = pathlib.Path(sys.argv[1])
    sources = [pathlib.Path(__file__), pathlib.Path(published_names.__file__)]
    stamp = " ".join([hashlib.sha256(path.read_bytes()).hexdigest() for path in sources]
                     + [torch.__version__, transformers.__version__])
    stamp_file = output / "stamp"
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        return
    shutil.rmtree(output, ignore_errors=True)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for seed, (name, settings) in enumerate(CASES.items()):
        write_case(output / name, settings, seed, DOCUMENTS, AUXILIARY_COEFFICIENT.get(name, 0.0), bf16=False)
    for family, settings in (("qwen3", QWEN3), ("mixtral", MIXTRAL), ("qwen3-5", QWEN35), ("gemma4", GEMMA4_SHORT)):
        for seed in BF16_SEEDS:
            write_case(output / f"bf16-{family}-{seed}", settings, 100 + seed, [0, BF16_TOKENS], 0.0, bf16=True)
    stamp_file.write_text(stamp)


if __name__ == "__main__":
    main()
