"""The routers' load-balancing loss is transformers', over the whole global batch, however many workers share it."""

import unittest

import harness
import reference

import compare
import reference_loop
import torch
from packed_data import PackedData

STEPS = 20
GLOBAL_BATCH = 8
COEFFICIENT = 0.02
BAR = 1e-5
EXIT_INVALID = 6


class AuxiliaryLossTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = harness.write_model(cls.folder / "model", seed=31)
        cls.data = harness.write_data(cls.folder / "train", tokens=32 * GLOBAL_BATCH * STEPS + 1, documents=150,
                                      seed=32)
        cls.held_out = harness.write_data(cls.folder / "held-out", tokens=32 * 6 + 1, documents=9, seed=33)

    @classmethod
    def job(cls, name, ranks=1, **settings):
        return harness.write_job(
            cls.folder / f"{name}.yaml", **(dict(
                name=name, model=cls.model, train=cls.data, output=cls.folder / name, steps=STEPS,
                global_batch=GLOBAL_BATCH, schedule={"kind": "linear", "warmup_steps": 2},
                devices={"kind": "cpu", "count": ranks}, router={"auxiliary_loss": COEFFICIENT}) | settings))

    def test_one_two_and_four_workers_have_transformers_loss_of_the_whole_batch(self):
        # The reference splits nothing: one batch a step.
        job = self.job("workers-1")
        output = self.folder / "reference"
        reference.run(job, output)
        wanted = compare.load_steps(output)
        for entry in wanted.values():
            entry["auxiliary_loss"] *= COEFFICIENT
        runs = [compare.load_steps(self.node.train(job).output)]
        runs += [compare.load_steps(self.node.train(self.job(f"workers-{ranks}", ranks)).output) for ranks in (2, 4)]
        for run, ranks in zip(runs, (1, 2, 4)):
            self.assertEqual(len(run), STEPS)
            for key in ("loss", "auxiliary_loss"):
                errors = [compare.worst_relative(run, other, key) for other in (wanted, runs[0])]
                print(f"{ranks} workers, {key}: {errors[0]:.2g} from PyTorch, {errors[1]:.2g} from one worker")
                self.assertLessEqual(max(errors), BAR, f"{key} of {ranks} workers")

    def test_a_mean_over_workers_would_be_seen(self):
        # What each of four workers would have of its own tokens alone, at the first step: the loss, and its gradient.
        model = reference_loop.load_model(self.model, torch.float32)
        data = PackedData(self.data, 32)
        routers = [weight for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")]

        def loss_and_gradient(sequences):
            loss = reference_loop.auxiliary_loss(model, [reference_loop.loss_sum(model, data.sequences(sequences))[1]])
            return loss.item(), torch.cat([part.flatten() for part in torch.autograd.grad(loss, routers)])

        whole, gradient = loss_and_gradient(range(GLOBAL_BATCH))
        share = GLOBAL_BATCH // 4
        parts = [loss_and_gradient(range(first, first + share)) for first in range(0, GLOBAL_BATCH, share)]
        mean = sum(loss for loss, _ in parts) / 4
        error = (sum(of_part for _, of_part in parts) / 4 - gradient).norm() / gradient.norm()
        print(f"the whole batch's {whole:.6g}, the mean of four parts {mean:.6g}, its gradient {error:.2g} off")
        self.assertGreater(abs(mean - whole) / whole, 100 * BAR)
        self.assertGreater(error, 100 * reference.MOMENT_BAR)

    def test_the_gradient_is_that_of_the_whole_batch(self):
        # After one step the first moment is the gradient, times a constant. The coefficient makes this loss count.
        settings = dict(router={"auxiliary_loss": 1.0}, steps=1, schedule=None,
                        checkpoint={"every_steps": 1, "keep": 2})
        output = self.folder / "strong-reference"
        reference.run(self.job("strong-1", **settings), output, state_steps=(1,))
        for ranks in (1, 2, 4):
            run = self.node.train(self.job(f"strong-{ranks}", ranks, **settings))
            error, name = reference.state_errors(run.export_state(1), output, 1)["moment1"]
            print(f"{ranks} workers: {error:.2g} {name}")
            self.assertLessEqual(error, reference.MOMENT_BAR)

    def test_evaluation_leaves_it_out(self):
        evaluation = dict(held_out=self.held_out, evaluation={"every_steps": 1, "sequences": 6}, steps=1, schedule=None,
                          optimizer={"learning_rate": 0.0})
        with_it, without = (self.node.train(self.job(f"evaluated-{name}", 2, router=router, **evaluation)).lines()[0]
                            for name, router in (("with", {"auxiliary_loss": 1.0}), ("without", None)))
        self.assertEqual(with_it["evaluation_loss"], without["evaluation_loss"])
        self.assertEqual(with_it["loss"], without["loss"])
        self.assertGreater(with_it["auxiliary_loss"], 1.0)
        self.assertEqual(without["auxiliary_loss"], 0.0)

    def test_accumulation_is_refused_by_name(self):
        job = self.job("accumulated", accumulation=2)
        for command in ("submit", "plan"):
            refusal = self.node.oom(command, job, check=EXIT_INVALID)
            self.assertIn("router.auxiliary_loss: must be 0 with accumulation over 1", refusal.stderr)
            self.assertIn("micro-batches", refusal.stderr)
        self.node.train(self.job("accumulated-without", accumulation=2, steps=1, schedule=None, router=None))


if __name__ == "__main__":
    unittest.main(verbosity=2)
