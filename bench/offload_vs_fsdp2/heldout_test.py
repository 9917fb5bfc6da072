#!/usr/bin/env python3
"""The comparison of held-out losses, both systems for real, on the CPU with a tiny model.

    OOM_BIN=build/release/bin python3 bench/offload_vs_fsdp2/heldout_test.py
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import heldout  # noqa: E402

PACKAGE = pathlib.Path(os.environ.get("OOM_BIN", HERE.parents[1] / "build/release/bin")).resolve().parent


def run_of(seed, fsdp2, again, ours):
    return {"seed": seed} | {name: {"held_out_losses": {"2": loss / 2, "4": loss}}
                             for name, loss in (("fsdp2", fsdp2), ("fsdp2_again", again), ("oom", ours))}


class SummaryTest(unittest.TestCase):
    def summary(self, *runs):
        results = {"runs": list(runs)}
        for run in runs:
            heldout.compare(run)
        heldout.summarize(results)
        return results

    def test_the_mean_of_the_last_differences_is_held_against_the_bar(self):
        results = self.summary(run_of(1, 4.0, 4.01, 4.008), run_of(2, 5.0, 4.99, 4.99))
        self.assertAlmostEqual(results["runs"][0]["difference"]["2"], 0.002)
        self.assertAlmostEqual(results["runs"][0]["peer_difference"]["4"], 0.0025)
        self.assertAlmostEqual(results["mean_difference"], 0.0)
        self.assertTrue(results["within_bar"])

    def test_a_loss_that_is_always_worse_is_beyond_it(self):
        self.assertFalse(self.summary(run_of(1, 4.0, 4.0, 4.005), run_of(2, 5.0, 5.0, 5.007))["within_bar"])


class HeldOutTest(unittest.TestCase):
    def test_both_systems_go_the_same_first_steps(self):
        with tempfile.TemporaryDirectory(prefix="oom-bench-test-") as folder:
            done = subprocess.run(
                [sys.executable, HERE / "heldout.py", "--oom", PACKAGE, "--steps", "4", "--every", "2", "--batch", "4",
                 "--length", "64", "--held-out", "4", "--seeds", "1", "--vocabulary", "512", "--scale", "8", "--device", "cpu",
                 "--output", folder], capture_output=True, text=True, timeout=280)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            results = json.loads((pathlib.Path(folder) / "held-out.json").read_text())
            text = (pathlib.Path(folder) / "held-out.md").read_text()
        self.assertEqual(results["errors"], {})
        run = results["runs"][0]
        for ours, theirs in zip(run["oom"]["losses"], run["fsdp2"]["losses"], strict=True):
            self.assertAlmostEqual(ours / theirs, 1.0, delta=5e-4)
        self.assertEqual(list(run["difference"]), ["2", "4"])
        self.assertIn("| 1 | 4 |", text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
