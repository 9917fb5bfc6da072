"""bfloat16: 50 losses against the plain PyTorch loop, and the update bit for bit.

With beta1 = 0 the first moment after a step is the gradient that the update saw: m = fma(0, m, 1*g). So checkpoints of
every step hold what the rule needs, and tests/parity/engine_update.py says what it must give.
"""

import unittest

import numpy as np

import harness
import reference

import engine_update
import reference_loop
from published_names import is_decayed

LOSS_BAR = 1e-3


class Bfloat16ParityTest(harness.NodeTest):
    def job(self, name, family="qwen3_moe", steps=3, **settings):
        at = self.folder / name
        model = harness.write_model(at / "model", family, seed=7)
        train = harness.write_data(at / "train", tokens=32 * 4 * steps + 1, documents=4 * steps, seed=8)
        return harness.write_job(at / "job.yaml", name=name, model=model, train=train, output=at / "run", steps=steps,
                                 **({"precision": "bfloat16"} | settings))

    def hold_losses(self, family):
        name = family.replace("_", "-")
        job = self.job(name, family, steps=50, schedule={"kind": "cosine", "warmup_steps": 5, "minimum_ratio": 0.1})
        run = self.node.train(job)
        reference.run(job, self.folder / name / "reference")
        error = reference.loss_error(run.output, self.folder / name / "reference")
        print(f"{family} loss: {error:.2g}")
        self.assertLessEqual(error, LOSS_BAR)

    def test_qwen3_moe_trains_as_pytorch_does(self):
        self.hold_losses("qwen3_moe")

    def test_mixtral_trains_as_pytorch_does(self):
        self.hold_losses("mixtral")

    def check_update(self, job, before, after, step, gradient):
        """`gradient`: {name: FP32 array} that the update of `step` (from 1) has seen. Returns how many tensors."""
        settings = reference_loop.load_job(job)
        rate = reference_loop.learning_rate(settings, step - 1)
        for name, master in after["master"].items():
            decay = settings.decay if is_decayed(name) else 0.0
            values = engine_update.scalars(step, rate, settings.betas, settings.epsilon, decay)
            wanted = engine_update.update(*(before[kind][name] for kind in before), gradient[name], values)
            for kind, want in zip(("master", "moment1", "moment2"), wanted):
                differ = np.count_nonzero(after[kind][name].view(np.uint32) != want.view(np.uint32))
                self.assertEqual(differ, 0, f"step {step}: {kind} of {name}")
            self.assertTrue(np.any(master != before["master"][name]), name)
        return len(after["master"])

    def start(self, job):
        masters = harness.load_tensors(harness.read_job(job)["model"]["path"])
        zero = {name: np.zeros_like(value) for name, value in masters.items()}
        return {"master": masters, "moment1": zero, "moment2": zero}

    def check_revealed(self, name, ranks):
        job = self.job(name, devices={"kind": "cpu", "count": ranks}, checkpoint={"every_steps": 1, "keep": 4},
                       optimizer={"learning_rate": 1e-3, "betas": [0.0, 0.95]})
        run = self.node.train(job)
        before = self.start(job)
        for step in (1, 2, 3):
            after = run.state(step)
            gradient = after["moment1"]
            count = self.check_update(job, before, after, step, gradient)
            self.assertEqual(count, len(before["master"]))
            if ranks == 1:  # Rounded once to BF16.
                for tensor, value in gradient.items():
                    self.assertFalse(np.any(value.view(np.uint32) & 0xFFFF), tensor)
            before = after
        return run

    def test_three_updates_follow_the_rule_bit_for_bit(self):
        run = self.check_revealed("one-rank", 1)
        # Usual betas: the first step's gradient is the same.
        job = self.job("usual-betas", steps=3, checkpoint={"every_steps": 1, "keep": 4})
        usual = self.node.train(job)
        self.check_update(job, self.start(job), usual.state(1), 1, run.state(1)["moment1"])

    def test_three_updates_of_two_ranks_follow_the_rule_bit_for_bit(self):
        self.check_revealed("two-ranks", 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
