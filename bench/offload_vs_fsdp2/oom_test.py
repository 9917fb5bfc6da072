#!/usr/bin/env python3
"""The benchmark's OOM side with the real programs, on the CPU device with a tiny geometry.

    OOM_BIN=build/release/bin python3 bench/offload_vs_fsdp2/oom_test.py
"""

import argparse
import collections
import gzip
import json
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "systems"), str(HERE.parent / "roofline")]

import numpy as np  # noqa: E402

import geometry  # noqa: E402
import oom  # noqa: E402
import roofline  # noqa: E402
import start  # noqa: E402
import weights  # noqa: E402

PACKAGE = pathlib.Path(os.environ.get("OOM_BIN", HERE.parents[1] / "build/release/bin")).resolve().parent
LENGTH = 32


class OomTest(unittest.TestCase):
    geometry = "tiny"

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="oom-bench-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        small = mock.patch.object(weights, "BLOCK_ELEMENTS", 1 << 16)
        self.addCleanup(small.stop)
        small.start()
        self.config = geometry.config_of(self.geometry)
        self.options = argparse.Namespace(
            model=geometry.write_config(self.folder / "model", self.config),
            data=geometry.write_random_dataset(self.folder / "data", 64, LENGTH, self.config["vocab_size"]),
            work=self.folder / "work", length=LENGTH, clip=0.0, gpus=1, device="cpu", budget="all", steps=3, warmup=2,
            traces=self.folder / "traces", trace_name="tiny")

    def measure(self, batch):
        """The result, and the names of the checkpoints that the output folder held at the end."""
        checkpoints = []
        leave = oom.Output.__exit__

        def look_and_leave(output, *error):
            checkpoints.extend(path.name for path in output.folder.glob("checkpoints/*"))
            leave(output, *error)
        with mock.patch.object(oom.Output, "__exit__", look_and_leave), mock.patch.object(oom, "say"), oom.Daemon(
                PACKAGE, self.options.work / "oomd") as daemon:
            return oom.measure(daemon, self.options, batch), checkpoints


class MeasureTest(OomTest):
    def test_a_measured_job_leaves_a_trace_of_two_steps_and_no_checkpoint(self):
        self.options.work /= "a-name-longer-than-any-socket-s-path-may-be-" * 2
        result, checkpoints = self.measure(batch=2)
        self.assertEqual(result["steps"], 3)
        self.assertGreater(result["step_seconds"], 0.0)
        self.assertEqual(checkpoints, [])
        self.assertEqual(list(self.options.work.glob("batch-2/*")), [])
        with gzip.open(self.folder / "traces" / result["trace"]) as file:
            names = collections.Counter(event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X")
        for layer in range(self.config["num_hidden_layers"]):
            self.assertEqual(names[f"forward mixer layer {layer}"], oom.TRACED_STEPS)
            self.assertEqual(names[f"backward mixer layer {layer}"], oom.TRACED_STEPS)


class MeasureHybridTest(MeasureTest):
    geometry = "tiny-hybrid"


class OutputTest(OomTest):
    def test_room_is_promised_only_where_the_disk_has_none(self):
        folder = self.folder / "output"
        with oom.Output(folder, 1 << 20) as output:
            self.assertFalse(output.mounted)
        promised = 1 << 50
        with oom.Output(folder, promised) as output:
            if not output.mounted:
                self.skipTest("may not mount")
            self.assertGreaterEqual(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize, promised)
        self.assertFalse(os.path.ismount(folder) or folder.exists())


class WeightsTest(OomTest):
    def test_files_hold_every_parameter_at_the_published_place(self):
        size = weights.write_weights(self.folder / "weights", self.config)
        self.assertEqual(size, 2 * geometry.parameter_count(self.config))
        index = json.loads((self.folder / "weights/model.safetensors.index.json").read_text())["weight_map"]
        tensors = {}
        for name in set(index.values()):
            data = (self.folder / "weights" / name).read_bytes()
            start_of_data = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start_of_data])
            del header["__metadata__"]
            self.assertEqual(len(data) - start_of_data, max(entry["data_offsets"][1] for entry in header.values()))
            for tensor, entry in header.items():
                self.assertEqual(index[tensor], name)
                first, end = entry["data_offsets"]
                bits = np.frombuffer(data[start_of_data + first:start_of_data + end], np.uint16)
                tensors[tensor] = (bits.astype(np.uint32) << 16).view(np.float32)
        self.check_values(tensors)

    def check_values(self, tensors):
        self.assertTrue((tensors["model.norm.weight"] == 1.0).all())
        experts = [tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in (0, 1)]
        self.assertAlmostEqual(float(experts[0].std()), 0.02, delta=0.002)
        self.assertFalse((experts[0] == experts[1]).all())


class HybridWeightsTest(WeightsTest):
    geometry = "tiny-hybrid"

    def check_values(self, tensors):
        self.assertTrue((tensors["model.norm.weight"] == 0.0).all())
        self.assertTrue((tensors["model.layers.0.linear_attn.norm.weight"] == 1.0).all())
        self.assertIn("model.layers.3.self_attn.q_proj.weight", tensors)
        self.assertAlmostEqual(float(tensors["model.layers.1.mlp.experts.gate_up_proj"].std()), 0.02, delta=0.002)


class RooflineTest(OomTest):
    def test_flops_of_a_plan_are_those_that_the_planner_counts(self):
        def plan_of(daemon, length, batch):
            self.options.length = length
            path = oom.write_job(self.folder / "job.yaml", self.options, batch, self.folder / "output")
            return json.loads(daemon.oom("plan", path, "-o", "json").stdout)
        with oom.Daemon(PACKAGE, self.folder / "oomd") as daemon:
            plans = {(length, batch): plan_of(daemon, length, batch) for length, batch in ((32, 2), (16, 2), (32, 4))}
        no_limits = dict.fromkeys(("product", "h2d_1", "d2h_1", "both_1", "update", "dram_update", "dram_step",
                                   "dram_update_beside_both"), 1.0)
        # The planner's seconds are at a rate of its own, one for all.
        rates = []
        for (length, _), plan in plans.items():
            rows = roofline.of_plan(plan, self.config, length, None, no_limits)[0]["bounds"]
            rates.append(rows[0]["amount"] / plan["estimate"]["resources"][0]["seconds"])
            memory = next(item for item in plan["estimate"]["resources"] if item["resource"] == "host memory")
            self.assertEqual(rows[-1]["amount"], int(memory["bytes"]))
        for rate in rates:
            self.assertAlmostEqual(rate / rates[0], 1.0, places=9)


class HybridRooflineTest(RooflineTest):
    geometry = "tiny-hybrid"


class StartTest(OomTest):
    def test_phases_of_a_start_from_both_sources_add_up(self):
        results = start.run(start.parse(["--tiny", "--device", "cpu", "--oom", str(PACKAGE), "--length", "32", "--batch", "2",
                                         "--output", str(self.folder), "--work", str(self.folder / "work")]))
        self.assertEqual([found["source"] for found in results["starts"]], ["safetensors", "random"])
        for found in results["starts"]:
            names = [phase["phase"] for phase in found["phases"]]
            self.assertEqual((names[0], names[-1]), ("planned and accepted", "first step"))
            self.assertIn("state in the pools", names)
            self.assertAlmostEqual(sum(phase["seconds"] for phase in found["phases"]), found["seconds"], places=3)
            # Stamps of three processes, in milliseconds.
            self.assertGreater(min(phase["seconds"] for phase in found["phases"]), -0.01)
        self.assertIn("| workers ready |", (self.folder / "start-tiny-4-layers.md").read_text())

    def test_a_start_that_fails_says_why(self):
        results = start.run(start.parse(["--tiny", "--device", "cpu", "--oom", str(PACKAGE), "--length", "32", "--batch", "2",
                                         "--budget", "64KiB", "--sources", "random", "--output", str(self.folder)]))
        self.assertIn("budgets.gpu_memory", results["starts"][0]["error"])


if __name__ == "__main__":
    unittest.main()
