"""50 steps in float32 against the plain PyTorch loop: losses, masters, moments, held-out loss of the export."""

import unittest

import harness
import reference

import compare
import reference_loop
from packed_data import PackedData

STEPS = 50
STATE_STEPS = (10, 50)


class Float32ParityTest(harness.NodeTest):
    def hold(self, family):
        at = self.folder / family
        model = harness.write_model(at / "model", family, seed=3)
        train = harness.write_data(at / "train", tokens=32 * 4 * STEPS + 1, documents=200, seed=4)
        held_out = harness.write_data(at / "held-out", tokens=1025, documents=12, seed=5)
        job = harness.write_job(
            at / "job.yaml", name=family.replace("_", "-"), model=model, train=train, held_out=held_out, output=at / "run",
            steps=STEPS, optimizer={"learning_rate": 1e-3},
            schedule={"kind": "cosine", "warmup_steps": 5, "minimum_ratio": 0.1}, router={"auxiliary_loss": 0.01},
            checkpoint={"every_steps": 10, "keep": 6})
        run = self.node.train(job)

        # The fixture's own condition: the reference is not chaotic.
        for threads in (1, 2):
            reference.run(job, at / f"reference-{threads}", threads, state_steps=STATE_STEPS, steps=STEPS)
        states = {step: at / f"reference-2/state/step-{step}" for step in STATE_STEPS}
        self.assertEqual(reference.failures(at / "reference-2", states, at / "reference-1", share=0.1), [])

        first = at / "reference-1"
        states = {step: run.export_state(step) for step in STATE_STEPS}
        for step, folder in states.items():
            worst = reference.state_errors(folder, first, step)
            print(f"{family} step {step}:", {kind: f"{error:.2g} {name}" for kind, (error, name) in worst.items()})
        for key in ("loss", "auxiliary_loss", "gradient_norm", "learning_rate"):
            print(f"{family} {key}: {self.key_error(run, first, key):.2g}")
        self.assertEqual(reference.failures(run.output, states, first), [])
        self.assertLessEqual(reference.loss_error(run.output, first, "learning_rate"), 1e-12)
        self.assertLessEqual(self.key_error(run, first, "auxiliary_loss"), reference.LOSS_BAR)
        self.check_export(run, held_out)
        return run

    def key_error(self, run, reference_output, key):
        reference_steps = compare.load_steps(reference_output)
        if key == "auxiliary_loss":  # The step log has it after its coefficient.
            for entry in reference_steps.values():
                entry[key] *= 0.01
        return compare.worst_relative(compare.load_steps(run.output), reference_steps, key)

    def check_export(self, run, held_out):
        """transformers loads the export and gets OOM's evaluation loss."""
        import torch

        exported = reference_loop.load_model(run.output / "export", torch.float32)
        loss = reference_loop.evaluate(exported.eval(), PackedData(held_out, 32), 16)
        reported = run.lines()[-1]["evaluation_loss"]
        print(f"held-out loss: {reported} against {loss}")
        self.assertLessEqual(abs(reported - loss) / loss, 1e-5)

    def test_qwen3_moe_trains_as_pytorch_does(self):
        self.hold("qwen3_moe")

    def test_mixtral_trains_as_pytorch_does(self):
        self.hold("mixtral")

    def test_qwen3_5_moe_trains_as_pytorch_does(self):
        self.hold("qwen3_5_moe")

    def test_gemma4_trains_as_pytorch_does(self):
        self.hold("gemma4")


if __name__ == "__main__":
    unittest.main(verbosity=2)
