"""YaRN by job setting: training uses it, the export's configuration has it, and transformers gets the same loss from it."""

import json
import unittest

import harness

import reference_loop
from packed_data import PackedData

BAR = 1e-5
ORIGINAL = 8


class YarnTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        weights = harness.random_weights(harness.model_config(), seed=71)
        for name, value in weights.items():  # Attention that looks at positions, and that the loss depends on.
            if "q_norm" in name or "k_norm" in name:
                value *= 2
            elif "v_proj" in name or "o_proj" in name:
                value *= 5
        cls.weights = weights
        cls.model = harness.write_model(cls.folder / "model", weights=weights)
        cls.train = harness.write_data(cls.folder / "train", tokens=32 * 4 * 3 + 1, documents=6, seed=72)
        cls.held_out = harness.write_data(cls.folder / "held-out", tokens=513, documents=8, seed=73)

    def run_job(self, name, model, scaling=None):
        job = harness.write_job(self.folder / f"{name}.yaml", name=name, model=model, train=self.train,
                                held_out=self.held_out, output=self.folder / name, steps=3)
        if scaling is not None:
            settings = harness.read_job(job)
            settings["model"]["rope_scaling"] = scaling
            job.write_text(json.dumps(settings))
        return self.node.train(job)

    def loss_of_export(self, run):
        import torch

        model = reference_loop.load_model(run.output / "export", torch.float32).eval()
        return reference_loop.evaluate(model, PackedData(self.held_out, 32), 16), model.config.rope_parameters

    def test_transformers_gets_the_loss_of_training_from_the_export(self):
        losses = {}
        for factor in (1, 2, 4):
            scaling = {"kind": "yarn", "factor": factor, "original_max_position_embeddings": ORIGINAL}
            run = self.run_job(f"yarn-{factor}", self.model, scaling if factor > 1 else None)
            reported = run.lines()[-1]["evaluation_loss"]
            loss, parameters = self.loss_of_export(run)
            print(f"factor {factor}: {reported} against {loss}")
            self.assertLessEqual(abs(reported - loss) / loss, BAR)
            losses[factor] = reported
            if factor == 1:
                self.assertEqual(parameters["rope_type"], "default")
                continue
            self.assertEqual((parameters["rope_type"], parameters["factor"]), ("yarn", factor))
            self.assertEqual(parameters["original_max_position_embeddings"], ORIGINAL)
            self.assertEqual(self.node.get(f"yarn-{factor}")["model"]["ropeScaling"]["factor"], factor)
        # Otherwise nothing above could have failed.
        self.assertGreater(abs(losses[1] - losses[2]) / losses[1], 10 * BAR)
        self.assertGreater(abs(losses[2] - losses[4]) / losses[1], 10 * BAR)

    def test_the_setting_is_the_configurations_own_scaling_bit_by_bit(self):
        scaled = harness.write_model(
            self.folder / "scaled", weights=self.weights,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL})
        own = self.run_job("own", scaled)
        by_job = self.run_job("by-job", self.model,
                              {"kind": "yarn", "factor": 4, "original_max_position_embeddings": ORIGINAL})
        self.assertEqual(own.exact_steps(), by_job.exact_steps())
        # What the file says stays as it was; what the job says is written in the same form.
        exported = [json.loads((run.output / "export/config.json").read_text()) for run in (own, by_job)]
        self.assertEqual(exported[0], json.loads((scaled / "config.json").read_text()))
        self.assertEqual(exported[1]["rope_scaling"], exported[0]["rope_scaling"])


if __name__ == "__main__":
    unittest.main()
