"""N steps, a stop, a resume and N more steps are 2N steps: weights, moments and step log, bit for bit."""

import unittest

import harness

STEPS = 40


class ResumeTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Large enough that a stop lands in the middle: some 20 ms a step.
        cls.model = harness.write_model(cls.folder / "model", seed=41, hidden_size=96, vocab_size=512)
        cls.data = harness.write_data(cls.folder / "train", tokens=64 * 90 + 1, documents=60, vocabulary=512, seed=42)
        cls.held_out = harness.write_data(cls.folder / "held-out", tokens=900, documents=9, vocabulary=512, seed=43)
        cls.whole = {precision: cls.node.train(cls.job("whole", precision)) for precision in ("bfloat16", "float32")}

    @classmethod
    def job(cls, name, precision, file="job", **settings):
        """The same name and output whatever the file: another submission of the same job."""
        settings = dict(
            # Shuffled over 90 sequences of 8 a step: the stop and the end lie in different epochs.
            data={"train": str(cls.data), "evaluation": str(cls.held_out), "shuffle": True},
            evaluation={"every_steps": 10, "sequences": 8}, steps=STEPS, sequence_length=64, global_batch=8,
            schedule={"kind": "cosine", "warmup_steps": 4, "minimum_ratio": 0.1}, precision=precision, resume="auto",
            devices={"kind": "cpu", "count": 2}) | settings
        name = f"{name}-{precision}"
        return harness.write_job(cls.folder / f"{name}-{file}.yaml", name=name, model=cls.model, train=cls.data,
                                 output=cls.folder / name, **settings)

    def hold(self, run, precision):
        whole = self.whole[precision]
        self.assertEqual([entry["step"] for entry in run.lines()], list(range(1, STEPS + 1)))
        self.assertEqual(run.exact_steps(), whole.exact_steps())
        for kind, tensors in run.state().items():
            self.assertEqual(harness.different_tensors(tensors, whole.state()[kind]), [], kind)

    def wait_for_step(self, output, step):
        run = harness.Run(output)
        harness.wait_until(lambda: len(run.lines()) >= step, f"step {step}", interval=0.005)
        return run

    def suspend_and_resume(self, name, precision, **settings):
        job = self.node.submit(self.job(name, precision, **settings))
        run = self.wait_for_step(self.node.output_of(job), 8)
        self.node.oom("suspend", job)
        self.node.wait_for(job, lambda j: j["state"] == "JOB_STATE_SUSPENDED", "is suspended")
        stopped = len(run.lines())
        self.assertTrue(8 <= stopped < STEPS, f"stopped after {stopped} steps")
        self.assertEqual(self.node.processes("oom-worker"), [])
        self.node.oom("resume", job)
        self.node.wait(job)
        return run

    def test_suspended_and_resumed_in_bfloat16(self):
        self.hold(self.suspend_and_resume("suspend", "bfloat16"), "bfloat16")

    def test_suspended_and_resumed_in_float32(self):
        self.hold(self.suspend_and_resume("suspend", "float32"), "float32")

    def test_suspended_while_checkpoints_are_written(self):
        self.hold(self.suspend_and_resume("busy", "bfloat16", checkpoint={"every_steps": 1, "keep": 2}), "bfloat16")

    def test_cancelled_with_a_checkpoint_and_submitted_again(self):
        first = self.node.submit(self.job("cancel", "float32"))
        run = self.wait_for_step(self.node.output_of(first), 8)
        self.node.oom("cancel", first)
        self.node.wait(first, check=11)
        stopped = len(run.lines())
        self.assertTrue(8 <= stopped < STEPS, f"stopped after {stopped} steps")
        self.assertEqual(run.checkpoints()[-1], stopped)
        self.hold(self.node.train(self.job("cancel", "float32", "again")), "float32")

    def test_cancelled_at_once_goes_on_from_an_older_checkpoint(self):
        first = self.node.submit(self.job("now", "bfloat16", checkpoint={"every_steps": 3, "keep": 2}))
        run = self.wait_for_step(self.node.output_of(first), 11)
        self.node.oom("cancel", "--now", first)
        self.node.wait(first, check=11)
        stopped, durable = len(run.lines()), run.checkpoints()[-1]
        self.assertTrue(0 < durable <= stopped < STEPS, f"{durable} of {stopped}")
        log = run.exact_steps()
        self.hold(self.node.train(self.job("now", "bfloat16", "again")), "bfloat16")
        # The steps that were made twice came out the same.
        self.assertEqual(log, {step: entry for step, entry in run.exact_steps().items() if step in log})

    def test_a_partial_newest_checkpoint_is_passed_over(self):
        first = self.node.submit(self.job("partial", "float32", checkpoint={"every_steps": 4, "keep": 3}))
        run = self.wait_for_step(self.node.output_of(first), 10)
        self.node.oom("cancel", first)
        self.node.wait(first, check=11)
        newest = run.checkpoints()[-1]
        (run.output / f"checkpoints/step-{newest:08d}/manifest.json").unlink()
        self.assertTrue(run.checkpoints())
        self.hold(self.node.train(self.job("partial", "float32", "again")), "float32")


if __name__ == "__main__":
    unittest.main(verbosity=2)
