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
sys.path[:0] = [str(HERE), str(HERE / "systems")]

import geometry  # noqa: E402
import oom  # noqa: E402

PACKAGE = pathlib.Path(os.environ.get("OOM_BIN", HERE.parents[1] / "build/release/bin")).resolve().parent
LENGTH = 32


class OomTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="oom-bench-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.config = geometry.config_of("tiny")
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
                PACKAGE, self.folder / "oomd") as daemon:
            return oom.measure(daemon, self.options, batch), checkpoints


class MeasureTest(OomTest):
    def test_a_measured_job_leaves_a_trace_of_two_steps_and_no_checkpoint(self):
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


if __name__ == "__main__":
    unittest.main()
