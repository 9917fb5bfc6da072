"""Each planted fault of the reference loop makes the parity comparison fail, and without one it holds."""

import unittest

import harness
import reference
import reference_loop

STEPS = 5


class PlantedFaultsTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        at = cls.folder
        model = harness.write_model(at / "model", seed=3)
        # Ranks with unequal numbers of targets: otherwise the mean of their means is the mean.
        train = harness.write_data(at / "train", tokens=32 * 4 * STEPS + 1, documents=60, seed=4)
        cls.job = harness.write_job(
            at / "job.yaml", name="faults", model=model, train=train, output=at / "run", steps=STEPS,
            devices={"kind": "cpu", "count": 2}, schedule={"kind": "cosine", "warmup_steps": 2})
        cls.trained = cls.node.train(cls.job)
        cls.states = {STEPS: cls.trained.export_state(STEPS)}

    def failures(self, fault):
        output = self.folder / f"reference-{fault}"
        reference.run(self.job, output, state_steps=(STEPS,), fault=fault)
        return reference.failures(self.trained.output, self.states, output)

    def test_without_a_fault_the_comparison_holds(self):
        self.assertEqual(self.failures(None), [])

    def test_there_are_ten(self):
        self.assertEqual(len(reference_loop.FAULTS), 10)


def add_test(fault):
    def test(self):
        found = self.failures(fault)
        print(f"{fault}: {found[:3]}")
        self.assertNotEqual(found, [])
    setattr(PlantedFaultsTest, f"test_sees_{fault.replace('-', '_')}", test)


for planted in reference_loop.FAULTS:
    add_test(planted)

if __name__ == "__main__":
    unittest.main(verbosity=2)
