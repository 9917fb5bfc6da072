"""float32: the split of a global batch over micro-batches and workers, and clipping, leave the losses as they were.

The environment's OOM_FAMILY names the model's family.
"""

import os
import unittest

import harness
import reference

FAMILY = os.environ.get("OOM_FAMILY", "qwen3_moe")
STEPS = 20
LOSS_BAR = 1e-5
NORM_BAR = 1e-6


class BatchSplitTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = harness.write_model(cls.folder / "model", FAMILY, seed=11)
        cls.data = harness.write_data(cls.folder / "train", tokens=32 * 8 * STEPS + 1, documents=150, seed=12)
        cls.plain = cls.node.train(cls.job("plain"))

    @classmethod
    def job(cls, name, **settings):
        return harness.write_job(
            cls.folder / f"{name}.yaml", name=name, model=cls.model, train=cls.data, output=cls.folder / name,
            steps=STEPS, global_batch=8, schedule={"kind": "linear", "warmup_steps": 2}, **settings)

    def hold(self, run):
        error = reference.loss_error(run.output, self.plain.output)
        print(f"{run.output.name}: {error:.2g}")
        self.assertEqual(len(run.lines()), STEPS)
        self.assertLessEqual(error, LOSS_BAR)

    def test_accumulation_over_four_micro_batches(self):
        self.hold(self.node.train(self.job("accumulation-4", accumulation=4)))

    def test_two_workers(self):
        self.hold(self.node.train(self.job("ranks-2", devices={"kind": "cpu", "count": 2})))

    def test_workers_that_sum_between_each_other_get_the_hosts_sums(self):
        # With two ranks an FP32 sum has one order, wherever it is taken. Five sequences: one rank has fewer than the other.
        evaluation = harness.write_data(self.folder / "held-out", tokens=32 * 5 + 1, documents=9, seed=13)
        settings = dict(devices={"kind": "cpu", "count": 2}, held_out=evaluation,
                        evaluation={"every_steps": 10, "sequences": 5})

        def between(plan):
            plan["reduction"] = "GRADIENT_REDUCTION_DEVICE_FLOAT32"
            for unit in plan["units"]:
                unit["delivery"] = "PARAMETER_DELIVERY_SHARD"

        def between_resident(plan):
            between(plan)
            for unit in plan["units"][1::2]:
                unit["home"] = "STATE_HOME_RESIDENT"

        host = self.node.train(self.job("reduced-host", **settings))
        self.hold(host)
        for name, edit in (("streamed", between), ("half-resident", between_resident)):
            job = self.job(f"reduced-{name}", **settings)
            plan = self.node.write_plan(self.folder / f"reduced-{name}.plan.json", job, edit)
            other = self.node.train(self.job(f"reduced-{name}", plan=str(plan), **settings))
            self.assertEqual(other.exact_steps(), host.exact_steps(), name)

    def test_two_workers_with_accumulation(self):
        self.hold(self.node.train(self.job("ranks-2-accumulation-4", accumulation=4,
                                           devices={"kind": "cpu", "count": 2})))

    def test_clipping_that_always_acts_is_pytorchs(self):
        job = self.job("clipped", optimizer={"learning_rate": 1e-3, "max_gradient_norm": 0.05})
        run = self.node.train(job)
        output = self.folder / "clipped-reference"
        reference.run(job, output)
        norms = [entry["gradient_norm"] for entry in run.lines()]
        self.assertGreater(min(norms), 0.05)
        loss, norm = (reference.loss_error(run.output, output, key) for key in ("loss", "gradient_norm"))
        print(f"clipped: loss {loss:.2g}, norm {norm:.2g}, norms {min(norms):.3g} to {max(norms):.3g}")
        self.assertLessEqual(loss, LOSS_BAR)
        self.assertLessEqual(norm, NORM_BAR)
        self.assertNotEqual(run.losses(), self.plain.losses())


if __name__ == "__main__":
    unittest.main(verbosity=2)
