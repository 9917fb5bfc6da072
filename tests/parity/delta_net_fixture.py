"""A Gated DeltaNet mixer and what transformers makes of it: the golden files of the DeltaNet parity test.

    tests/parity/delta_net_fixture.py OUTPUT

One safetensors file a case (float32): "x" [T, H] and "dy", "documents" (where they begin, and the end), "y",
"gradient.x", and by published name "weight.NAME" and "gradient.NAME" of Qwen3_5MoeGatedDeltaNet. Documents run one by
one and their gradients are added up. Does nothing if OUTPUT is up to date.
"""

import hashlib
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

# Two and four value heads a key head; hidden size != value width, key size != value size.
CASES = {
    "groups-of-2": dict(hidden_size=40, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                        linear_value_head_dim=24, linear_conv_kernel_dim=4),
    "groups-of-4": dict(hidden_size=72, linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=32,
                        linear_value_head_dim=16, linear_conv_kernel_dim=4),
}
# One longer than two chunks and no multiple of one, one of a single token, one of a whole chunk.
DOCUMENTS = [0, 150, 151, 215, 252]


def make_mixer(settings, generator):
    """Weights that make every branch matter; A from 0.02 to 16, the range that training starts from."""
    config = Qwen3_5MoeTextConfig(num_hidden_layers=4, **settings)
    mixer = Qwen3_5MoeGatedDeltaNet(config, 0).float()
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name == "A_log":
                values = torch.empty(parameter.shape).uniform_(-4, 2.7, generator=generator)
            elif name == "norm.weight":
                values = 1 + 0.1 * values
            elif name != "dt_bias":
                values = 0.2 * values
            parameter.copy_(values)
    return mixer


def write_case(path, settings, seed):
    generator = torch.Generator().manual_seed(seed)
    mixer = make_mixer(settings, generator)
    x = torch.randn(DOCUMENTS[-1], settings["hidden_size"], generator=generator).requires_grad_()
    dy = torch.randn(x.shape, generator=generator)
    y = torch.cat([mixer(x[None, first:end])[0] for first, end in zip(DOCUMENTS, DOCUMENTS[1:])])
    y.backward(dy)
    tensors = {"x": x, "dy": dy, "y": y, "gradient.x": x.grad, "documents": torch.tensor(DOCUMENTS).float()}
    for name, parameter in mixer.named_parameters():
        tensors[f"weight.{name}"] = parameter
        tensors[f"gradient.{name}"] = parameter.grad
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path)


def main():
    output = pathlib.Path(sys.argv[1])
    stamp = " ".join([hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest(), torch.__version__,
                      transformers.__version__])
    stamp_file = output / "stamp"
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        return
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    torch.set_num_threads(1)
    for seed, (name, settings) in enumerate(CASES.items()):
        write_case(output / f"{name}.safetensors", settings, 500 + seed)
    stamp_file.write_text(stamp)


if __name__ == "__main__":
    main()
