"""Checkpoints that are damaged, that find no space, or whose writer is killed: training goes on from, or beside, the
last good one, and says so."""

import contextlib
import json
import os
import random
import subprocess
import time
import unittest

from fault_harness import FaultCase, Watcher, harness, poll, send

IS_ROOT = os.geteuid() == 0


class Damage(FaultCase):
    shape = {"steps": 200, "checkpoint": {"every_steps": 10, "keep": 3}}

    def suspended(self, name):
        """A job that waits with three checkpoints; their steps, the oldest first."""
        self.submit(name, **self.shape)
        self.wait_new_checkpoint(name)
        poll(lambda: len(self.checkpoints(name)) >= 2, "two checkpoints")
        self.node.oom("suspend", name)
        self.wait_state(name, "SUSPENDED")
        self.assert_nothing_left()
        return self.checkpoints(name)

    def checkpoint_files(self, name, step):
        folder = self.output(name) / f"checkpoints/step-{step:08d}"
        return sorted(folder.glob("*.safetensors")), folder

    def flip(self, name, step):
        files, _ = self.checkpoint_files(name, step)
        raw = bytearray(files[1].read_bytes())
        raw[len(raw) // 2] ^= 0x10
        files[1].write_bytes(raw)

    def truncate(self, name, step):
        files, _ = self.checkpoint_files(name, step)
        os.truncate(files[2], files[2].stat().st_size - 1)

    def swap(self, name, step):
        """Another checkpoint's file of the same size."""
        files, _ = self.checkpoint_files(name, step)
        older, _ = self.checkpoint_files(name, self.checkpoints(name)[-2])
        files[1].write_bytes(older[1].read_bytes())

    def cut_manifest(self, name, step):
        _, folder = self.checkpoint_files(name, step)
        manifest = folder / "manifest.json"
        os.truncate(manifest, manifest.stat().st_size // 2)

    def remove_manifest(self, name, step):
        _, folder = self.checkpoint_files(name, step)
        (folder / "manifest.json").unlink()

    def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before_and_the_bits_stay(self):
        control = self.control("control", **self.shape)
        damages = {"flip": self.flip, "truncate": self.truncate, "swap": self.swap, "cut-manifest": self.cut_manifest,
                   "remove-manifest": self.remove_manifest}
        for name, damage in damages.items():
            with self.subTest(name):
                steps = self.suspended(name)
                damage(name, steps[-1])
                self.node.oom("resume", name)
                self.wait_state(name, "SUCCEEDED")
                attempt = self.node.get(name)["attempt"]
                log = harness.Run(self.output(name)).log(attempt=attempt)
                self.assertIn(f"begins after {steps[-2]} steps", log)
                passed_over = [line for line in log.splitlines() if "passed over" in line]
                self.assertEqual(len(passed_over), 1, log)
                self.assertIn(f"step-{steps[-1]:08d}", passed_over[0])
                self.assertEqual(self.losses(name), control)

    def test_with_no_good_checkpoint_left_the_job_fails_and_never_begins_anew(self):
        steps = self.suspended("tiny")
        for step in steps:
            self.flip("tiny", step)
        self.node.oom("resume", "tiny")
        job = self.wait_state("tiny", "FAILED")
        self.assertEqual(job["reason"], "CHECKPOINT_CORRUPT")
        self.assertIn(f"step-{steps[-1]:08d}", job["message"])
        self.assertEqual(self.step_count("tiny"), steps[-1])
        self.assert_nothing_left()


@unittest.skipUnless(IS_ROOT, "needs to mount")
class NoSpace(FaultCase):
    def mount(self, place, size):
        place.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", place], check=True)

    def fill(self, place):
        """Somebody else fills the disk."""
        filler = place / "filler"
        with open(filler, "wb", buffering=0) as stream, contextlib.suppress(OSError):
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while stream.write(bytes(size)):
                        pass
        return filler

    def test_a_checkpoint_that_finds_no_space_is_given_up_and_training_goes_on(self):
        shape = {"steps": 300, "checkpoint": {"every_steps": 10, "keep": 2}}
        place = self.output("tiny") / "checkpoints"
        self.mount(place, "16m")
        self.submit("tiny", **shape)
        self.wait_new_checkpoint("tiny")
        filler = self.fill(place)
        log = self.output("tiny") / "logs/attempt-1/jobhost.log"
        poll(lambda: "No space left on device" in log.read_text(), "a failed checkpoint")
        kept = self.checkpoints("tiny")
        failed_at = self.step_count("tiny")
        self.wait_steps("tiny", failed_at + 5)
        self.assertEqual(self.checkpoints("tiny"), kept)
        self.assertEqual(list(place.glob("*.tmp.*")), [], "what was written of it is removed")
        poll(lambda: int(self.node.get("tiny")["durableStep"]) == kept[-1], f"durable is {kept[-1]}")
        # Space again: the next one is written, and the end is as if nothing had been.
        filler.unlink()
        job = self.wait_state("tiny", "SUCCEEDED")
        self.assertEqual((job["attempt"], int(job["durableStep"])), (1, 300))
        self.assertEqual(self.checkpoints("tiny")[-1], 300)
        self.assertEqual(self.losses("tiny"), self.control("control", **shape))

    def test_a_checkpoint_on_request_or_of_a_suspension_says_that_there_is_no_space_and_the_older_ones_stay(self):
        place = self.output("tiny") / "checkpoints"
        self.mount(place, "16m")
        self.submit("tiny", steps=1_000_000, checkpoint={"every_steps": 10, "keep": 2})
        self.wait_new_checkpoint("tiny")
        self.fill(place)
        log = self.output("tiny") / "logs/attempt-1/jobhost.log"
        poll(lambda: "No space left on device" in log.read_text(), "a failed checkpoint")
        kept = self.checkpoints("tiny")
        answer = self.node.oom("checkpoint", "tiny", check=None)
        self.assertNotEqual(answer.returncode, 0)
        self.assertIn("No space left on device", answer.stderr)
        self.node.oom("suspend", "tiny")
        job = self.wait_state("tiny", "SUSPENDED")
        self.assertEqual(int(job["durableStep"]), kept[-1])
        self.assertGreater(int(job["step"]), kept[-1])
        self.assertIn(f"the newest checkpoint is of step {kept[-1]}", job["message"])
        self.assertEqual(self.checkpoints("tiny"), kept)
        self.assert_nothing_left()


    def test_a_full_output_directory_ends_the_job_by_that_name_and_it_can_go_on_later(self):
        shape = {"steps": 400, "checkpoint": {"every_steps": 20, "keep": 2}}
        place = self.output("tiny")
        self.mount(place, "16m")
        self.submit("tiny", **shape)
        self.submit("other", steps=1_000_000)
        self.wait_new_checkpoint("tiny")
        filler = self.fill(place)
        job = self.wait_state("tiny", "FAILED")
        self.assertIn("STORAGE_FULL", job["reason"] + job["message"])
        self.assertIn("No space left on device", job["message"])
        kept = self.checkpoints("tiny")
        self.assertEqual(int(job["durableStep"]), kept[-1])
        self.wait_steps("other", self.step_count("other") + 5)
        self.assertEqual(self.node.get("other")["attempt"], 1)
        self.node.oom("cancel", "other", "--now")
        filler.unlink()
        self.node.wait(self.node.submit(self.job_file("again", name="tiny", output=str(place), **shape)))
        self.assertEqual(self.losses("tiny"), self.control("control", **shape))


class KilledWriter(FaultCase):
    def test_a_job_host_killed_while_it_writes_a_checkpoint_leaves_the_one_before_and_no_rest(self):
        chance = random.Random(7)
        # A model whose checkpoint takes some milliseconds to write: 6 million parameters.
        config = harness.model_config(vocab_size=16384, hidden_size=160)
        (self.folder / "wide.json").write_text(json.dumps(config))
        shape = {"steps": 80, "checkpoint": {"every_steps": 4, "keep": 2}, "retry": {"max_failures": 10},
                 "model": {"config": str(self.folder / "wide.json"), "initialize": "random"}}
        watcher = Watcher(self)
        watcher.token()
        uid = self.submit("tiny", **shape)["uid"]
        folder = self.output("tiny") / "checkpoints"
        kills = 4
        for attempt in range(1, kills + 1):
            poll(lambda attempt=attempt: (self.output("tiny") / f"logs/attempt-{attempt}/rank-1.log").exists(),
                 f"attempt {attempt}")
            # One whole checkpoint of this attempt, then the one that is being written.
            newest = self.wait_new_checkpoint("tiny")
            poll(lambda newest=newest: int(self.node.get("tiny")["durableStep"]) >= newest, "oomd knows it")
            host = self.node.host_of(uid)
            poll(lambda: any(".tmp." in name and f"{newest:08d}" not in name for name in os.listdir(folder)),
                 "a checkpoint is being written")
            time.sleep(chance.uniform(0.0, 0.01))
            send(host)
            poll(lambda: not self.node.processes("oom-worker"), "the workers die")
            for step in self.checkpoints("tiny"):
                result = self.node.oom("export", self.output("tiny"), "--step", step, "--output",
                                       self.folder / f"export-{attempt}-{step}", check=None)
                self.assertEqual(result.returncode, 0, f"step {step}: {result.stderr}")
        self.wait_state("tiny", "SUCCEEDED")
        self.assertEqual([name for name in os.listdir(folder) if ".tmp." in name], [])
        losses = self.losses("tiny")
        self.assertEqual(losses, self.control("control", **shape))


if __name__ == "__main__":
    unittest.main()
