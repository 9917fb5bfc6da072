"""Geometries with the real programs: whole published models are planned on a machine that could never train them."""

import json
import unittest

import harness

GIB = 1 << 30
PARAMETERS = {"qwen3-30b-a3b": 30_532_122_624, "mixtral-8x7b": 46_702_792_704, "qwen3.6-35b-a3b": 34_660_610_688,
              "qwen3.5-122b-a10b": 122_111_526_912, "gemma4-26b-a4b": 25_233_141_790}


class GeometryTest(harness.NodeTest):
    def plan(self, *arguments):
        return self.node.oom("plan", *arguments).stdout

    def test_a_whole_model_is_planned_for_the_budgets_that_it_is_given(self):
        for name, parameters in PARAMETERS.items():
            plan = json.loads(self.plan(name, "--devices", "cuda", "--gpu-memory", "80GiB", "--host-memory", "2TiB", "-o", "json"))
            estimate = plan["estimate"]
            # Weights, low bits and two moments, wherever they are.
            self.assertGreater(int(estimate["hostBytesPeak"]) + int(estimate["deviceBytesPeak"]), 12 * parameters)
            self.assertLess(int(estimate["deviceBytesPeak"]), 80 * GIB)
            self.assertGreater(estimate["stepSecondsLowerBound"], 0)
            self.assertIn(f"{parameters:,} parameters", self.plan(name))

    def test_any_number_of_layers(self):
        layers = len(json.loads(self.plan("mixtral-8x7b", "--layers", "3", "-o", "json"))["layers"])
        self.assertEqual(layers, 3)
        text = self.plan("qwen3-30b-a3b", "--layers", "64")
        self.assertIn(f"64 layers, {2 * 311_164_928 + 2_048 + 64 * 623_120_640:,} parameters", text)

    def test_what_cannot_be_is_refused_and_nothing_is_left(self):
        for option, value, word in (("--host-memory", "100GiB", "host_memory"), ("--layers", "0", "num_hidden_layers"),
                                    ("--layers", "5000", "num_hidden_layers"), ("--global-batch", "0", "global_batch")):
            result = self.node.oom("plan", "qwen3-30b-a3b", option, value, check=None)
            self.assertEqual(result.returncode, 6, result.stderr)
            self.assertIn(word, result.stderr)
        self.assertEqual(self.node.oom("ls", "-o", "name").stdout, "")


if __name__ == "__main__":
    unittest.main()
