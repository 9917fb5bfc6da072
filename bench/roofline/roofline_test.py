#!/usr/bin/env python3
"""The roofline's numbers against ones computed by hand.

    python3 bench/roofline/roofline_test.py
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "offload_vs_fsdp2")]

import geometry  # noqa: E402
import roofline  # noqa: E402

CONFIG = {"model_type": "qwen3_moe", "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
          "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 3, "num_hidden_layers": 2, "vocab_size": 16}
LIMITS = {"product": 100, "h2d_1": 50, "d2h_1": 60, "both_1": 80, "update": 5, "dram_update": 130, "dram_step": 136,
          "dram_update_beside_both": 170}
MOVED = {"compute of each device": 0, "H2D of each device": int(20e9), "D2H of each device": int(10e9),
         "boundary out of each device": int(5e9), "boundary in of each device": int(5e9),
         "optimizer of numa 0": int(65e9), "optimizer of numa 1": int(65e9), "host memory": int(170e9)}


class FlopsTest(unittest.TestCase):
    def test_a_step_is_forward_backward_and_replay(self):
        # A layer and token: linears 2*4*(2*4 + 2*2) = 96, attention 4*4*5 = 80, mixture 2*4*(3*3*2 + 8) = 208; backward
        # 2*(96 + 208) + 2.5*80 = 808; replay 96 + 80 + 208*2/3. The head: 6*4*16 = 384.
        self.assertAlmostEqual(roofline.step_flops(CONFIG, 10, keys=5), 10 * (2 * (384 + 808 + 176 + 416 / 3) + 384))
        self.assertAlmostEqual(roofline.step_flops(CONFIG, 10, 5, retained_mixers=1, retained_mixtures=2),
                               10 * (2 * (384 + 808) + 176 + 384))

    def test_without_attention_and_replay_it_is_six_for_each_active_parameter(self):
        config = geometry.config_of("mixtral-8x7b", 2)
        active = geometry.parameter_count(config | {"num_local_experts": 2}) + 2 * 6 * config["hidden_size"]
        norms_and_embedding = 5 * config["hidden_size"] + config["vocab_size"] * config["hidden_size"]
        self.assertEqual(roofline.step_flops(config, 1, 0, 2, 2), 6 * (active - norms_and_embedding))

    def test_a_hybrid_layer_counts_its_linears_and_the_delta_rule(self):
        config = geometry.config_of("qwen3.6-35b-a3b")
        linear, full = (roofline.mixer_flops(config, layer, 2048.5) for layer in (2, 3))
        # From its widths: in 2048 -> 8192 + 4096 + 32 + 32, out 4096 -> 2048, 4 taps of 8192 channels; the rule of 32 heads.
        self.assertEqual(linear, (2 * 2048 * (8192 + 4096 + 64 + 4096) + 2 * 8192 * 4, 32 * 163_840, 3 * 32 * 163_840))
        # Queries and gates, keys and values, output.
        self.assertEqual(full[:2], (2 * 2048 * (8192 + 1024 + 4096), 4 * 4096 * 2048.5))

    def test_documents_shorten_what_a_query_sees(self):
        self.assertEqual(roofline.mean_keys(4096), 2048.5)
        self.assertEqual(roofline.mean_keys(4096, 512), 512)
        self.assertEqual(roofline.mean_keys(4096, 4096), 2048.5)


class BoundsTest(unittest.TestCase):
    def seconds(self, gpus=1):
        return {row["resource"]: (row["seconds"], row["contended_seconds"])
                for row in roofline.bounds(90e12, MOVED, gpus, LIMITS)}

    def test_each_resource_is_its_bytes_over_its_rate(self):
        found = self.seconds()
        expected = {"compute": 0.9, "weights to the device": 0.4, "gradients from the device": 1 / 6,
                    "boundaries to the device": 0.1, "boundaries from the device": 1 / 12, "all to the device": 0.5,
                    "all from the device": 0.25, "both ways": 0.5, "optimizer threads": 1.0}
        for resource, seconds in expected.items():
            self.assertAlmostEqual(found[resource][0], seconds, msg=resource)
            self.assertEqual(*found[resource])
        self.assertAlmostEqual(found["host memory"][0], (130 + 40) / 170)
        self.assertAlmostEqual(found["host memory"][1], (130 + 40) / 136)

    def test_devices_share_the_host_s_memory_alone(self):
        one, two = self.seconds(1), self.seconds(2)
        self.assertAlmostEqual(two["host memory"][0], (130 + 2 * 40) / 170)
        self.assertEqual({name: found for name, found in one.items() if name != "host memory"},
                         {name: found for name, found in two.items() if name != "host memory"})

    def test_a_step_is_judged_by_the_slowest_resource(self):
        found = roofline.judged(roofline.bounds(90e12, MOVED, 1, LIMITS), step_seconds=2.0)
        self.assertEqual((found["limit_resource"], found["contended_resource"]), ("optimizer threads", "host memory"))
        self.assertAlmostEqual(found["share_of_limit"], 0.5)
        self.assertAlmostEqual(found["exposed_share"], (2.0 - 1.25) / 2.0)


class FilesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="oom-roofline-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.limits = self.write("limits.json", {"limits": [{"key": key, "value": value} for key, value in LIMITS.items()]})

    def write(self, name, content):
        path = self.folder / name
        path.write_text(json.dumps(content))
        return str(path)

    def entries(self, *arguments):
        output = self.folder / "roofline.json"
        with contextlib.redirect_stdout(io.StringIO()) as text:
            roofline.main([*arguments, "--limits", self.limits, "--output", str(output)])
        return json.loads(output.read_text())["entries"], text.getvalue()

    def test_every_measurement_of_oom_is_judged(self):
        plan = {"resource_bytes": MOVED, "retained_mixers": 0, "retained_mixtures": 0}
        row = lambda system, **more: {"system": system, "batch": 2, "step_seconds": 2.0} | more  # noqa: E731
        entries, text = self.entries(self.write("results.json", {
            "settings": {"geometry": "qwen3-30b-a3b", "layers": 8, "length": 4096, "gpus": 1},
            "measurements": [row("fsdp2"), row("oom-24GiB", plan=plan), row("oom-24GiB-packed-512", plan=plan),
                             {"system": "oom-all", "batch": 8, "error": "broke"}]}))
        self.assertEqual([entry["name"] for entry in entries], ["batch 2, oom-24GiB", "batch 2, oom-24GiB-packed-512"])
        self.assertGreater(entries[0]["bounds"][0]["amount"], entries[1]["bounds"][0]["amount"])
        self.assertIn("Step 2.000 s: 50% of the limit, 38% exposed.", text)

    def test_a_plan_is_read_as_oom_prints_it(self):
        plan = {"layers": [{"retainMixer": True}, {}], "microBatchTokens": "5", "accumulation": 2, "rankCount": 1, "estimate": {
            "resources": [{"resource": name, "bytes": str(count)} for name, count in MOVED.items()]}}
        entries, _ = self.entries(self.write("plan.json", plan), "--config", self.write("config.json", CONFIG), "--length", "9")
        self.assertEqual(entries[0]["bounds"][0]["amount"], roofline.step_flops(CONFIG, 10, 5, retained_mixers=1))
        self.assertEqual(entries[0]["limit_resource"], "optimizer threads")


if __name__ == "__main__":
    unittest.main()
