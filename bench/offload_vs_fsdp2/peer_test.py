#!/usr/bin/env python3
"""The peer's hybrid model on the CPU: its loss and gradients are transformers' own, and so are Gated DeltaNet's formulas.

    python3 bench/offload_vs_fsdp2/peer_test.py
"""

import copy
import importlib.util
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

import fsdp2  # noqa: E402  First: it says that nothing is to be downloaded.
import gated_delta  # noqa: E402
import geometry  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

LENGTH = 100  # A chunk of the delta rule and a part of one.


def transformers_model(folder):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # So that nothing stays 0 or 1.
    return model


# It would take the place of transformers' own functions, and has no kernels for a CPU.
@unittest.skipIf(importlib.util.find_spec("fla"), "flash-linear-attention is installed")
class HybridTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="oom-bench-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        geometry.write_config(self.folder, geometry.config_of("tiny-hybrid"))
        self.model = transformers_model(self.folder)

    def tokens(self):
        return torch.randint(0, self.model.config.vocab_size, (2, LENGTH))

    def test_the_loss_of_the_sharded_model_is_that_of_transformers(self):
        self.model.save_pretrained(self.folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        peer = fsdp2.build(self.folder, torch.device("cpu"), chunk_tokens=64)
        self.assertEqual(peer.delta_kernels.words, "torch")
        tokens = self.tokens()
        loss = peer(tokens, fsdp2.targets_of(tokens), 2 * (LENGTH - 1))
        # The peer computes in bfloat16, its rotary frequencies stay float32.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16()
        self.model.set_experts_implementation("grouped_mm")
        self.assertAlmostEqual(loss.item() / self.model(tokens, labels=tokens).loss.item(), 1.0, delta=1e-5)

    def test_loss_and_gradients_in_float32_are_those_of_transformers(self):
        tokens, parameters = self.tokens(), list(self.model.parameters())
        wanted = self.model(tokens, labels=tokens).loss
        peer = fsdp2.CausalLoss(self.model.model, fsdp2.Head(self.model.lm_head, chunk_tokens=64))
        loss = peer(tokens, fsdp2.targets_of(tokens), 2 * (LENGTH - 1))
        self.assertAlmostEqual(loss.item() / wanted.item(), 1.0, delta=1e-6)
        for one, another in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters), strict=True):
            self.assertLess((torch.linalg.norm(one - another) / torch.linalg.norm(another)).item(), 1e-4)

    def test_gated_delta_net_without_transformers_forward_gives_the_same(self):
        mixer = self.model.model.layers[0].linear_attn
        hidden, slope = torch.randn(2, 2, LENGTH, self.model.config.hidden_size)
        other = copy.deepcopy(mixer)
        results = []
        for module in (mixer, other):
            if module is other:
                gated_delta.use(other, gated_delta.REFERENCE)
            given = hidden.clone().requires_grad_()
            output = module(given)
            results.append((output, *torch.autograd.grad(output, (given, *module.parameters()), slope)))
        for one, another in zip(*results, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-4)

    def test_wrong_kernels_are_told_by_output_or_gradient(self):
        mixer = self.model.model.layers[0].linear_attn
        hidden, slope = torch.randn(2, 2, LENGTH, self.model.config.hidden_size)
        right = gated_delta.difference(mixer, gated_delta.REFERENCE, (mixer, gated_delta.REFERENCE), hidden, slope)
        self.assertEqual(set(right.values()), {0.0})

        def halved(query, key, value, a, b, A_log, dt_bias):
            """The right output with half the gradient for the decay."""
            return gated_delta.REFERENCE.delta_rule(query, key, value, (a + a.detach()) / 2, b, A_log, dt_bias)
        wrong = gated_delta.difference(mixer, gated_delta.REFERENCE._replace(delta_rule=halved),
                                       (mixer, gated_delta.REFERENCE), hidden, slope)
        self.assertLess(wrong["output"], 1e-6)
        self.assertAlmostEqual(wrong["in_proj_a.weight"], 0.5, delta=1e-3)


if __name__ == "__main__":
    unittest.main()
