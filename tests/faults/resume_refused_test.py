"""Outputs and checkpoints that belong to something else: refused by name, and nothing in them changes."""

import hashlib
import json
import unittest

from fault_harness import EXIT_FAILED, EXIT_INVALID, FaultCase, harness


def fingerprint(folder):
    """Every file of a job's output but its logs, by content."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file() and "logs" not in path.parts}


class Refused(FaultCase):
    def setUp(self):
        super().setUp()
        self.control("first", steps=6, checkpoint={"every_steps": 3, "keep": 2})
        self.before = fingerprint(self.output("first"))

    def refuse(self, job_file, *words):
        """At submission."""
        result = self.node.oom("submit", job_file, check=None)
        self.assertEqual(result.returncode, EXIT_INVALID, result)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
        self.assertEqual(self.node.oom("ls", "-o", "name").stdout.split(), ["first"])
        self.assertEqual(fingerprint(self.output("first")), self.before)

    def test_another_jobs_output_is_refused_by_name(self):
        for resume in ("auto", "never"):
            self.refuse(self.job_file("second", output=str(self.output("first")), resume=resume),
                        "output", "'first'", "'second'", str(self.output("first")))

    def test_another_precision_is_refused_by_name(self):
        self.refuse(self.job_file("again", name="first", output=str(self.output("first")), precision="bfloat16"),
                    "precision", "float32", "bfloat16")
        checkpoint = str(self.output("first") / "checkpoints/step-00000003")
        self.refuse(self.job_file("again", precision="bfloat16", resume=checkpoint),
                    "precision", "float32", "bfloat16")

    def test_another_model_is_refused_by_name(self):
        config = harness.model_config(num_experts=4)
        (self.folder / "other.json").write_text(json.dumps(config))
        model = {"config": str(self.folder / "other.json"), "initialize": "random"}
        self.refuse(self.job_file("again", name="first", output=str(self.output("first")), model=model), "model")

    def test_a_checkpoint_that_is_not_there_is_refused(self):
        missing = self.output("first") / "checkpoints/step-00000099"
        self.refuse(self.job_file("again", resume=str(missing)), "resume", str(missing))
        (self.output("first") / "checkpoints/step-00000003/manifest.json").write_text("{}")
        self.before = fingerprint(self.output("first"))
        self.refuse(self.job_file("again", resume=str(self.output("first") / "checkpoints/step-00000003")), "resume",
                    "manifest.json")

    def test_two_running_jobs_never_share_an_output(self):
        self.submit("runner", steps=1_000_000)
        self.wait_steps("runner", 3)
        path = self.job_file("again", name="runner", output=str(self.output("runner")))
        name = self.node.submit(path)
        self.assertEqual(name, "runner-2")
        self.node.wait(name, check=EXIT_FAILED)
        job = self.node.get(name)
        self.assertEqual((job["reason"], job["attempt"]), ("INVALID_INPUT", 1))
        self.assertIn(str(self.output("runner")), job["message"])
        self.assertIn("another running job", job["message"])
        self.wait_steps("runner", self.step_count("runner") + 3)
        self.losses("runner")
        self.node.oom("cancel", "runner")
        self.node.wait("runner", check=11)

    def test_the_same_job_submitted_again_goes_on(self):
        name = self.node.submit(self.job_file("again", name="first", output=str(self.output("first")), steps=12,
                                              checkpoint={"every_steps": 3, "keep": 2}))
        self.node.wait(name)
        losses = self.losses("first")
        self.assertEqual(len(losses), 12)
        self.assertEqual(losses, self.control("control", steps=12, checkpoint={"every_steps": 3, "keep": 2}))


if __name__ == "__main__":
    unittest.main()
