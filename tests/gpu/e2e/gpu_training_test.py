"""Training on a GPU, the whole chain through the daemon, against the CPU device and against itself.

    OOM_BIN=FOLDER/bin python3 gpu_training_test.py     on a machine with a GPU, from a package (deploy/package.sh)
"""

import pathlib
import sys
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "e2e"))

import harness  # noqa: E402

CUDA = {"kind": "cuda", "count": 1}


class GpuTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not any(device["kind"] == "cuda" for device in cls.devices()):
            raise unittest.SkipTest("no GPU")
        cls.data = harness.write_data(cls.folder / "train", tokens=32 * 4 * 120 + 1, documents=150, seed=3)
        cls.models = {family: harness.write_model(cls.folder / family, family, seed=7) for family in harness.FAMILIES}

    @classmethod
    def devices(cls):
        import json
        return json.loads(cls.node.oom("node", "-o", "json").stdout).get("devices", [])

    def run_job(self, name, family="qwen3_moe", edit=None, **settings):
        settings = dict(name=name, model=self.models[family], train=self.data, output=self.folder / name,
                        devices=CUDA) | settings
        job = harness.write_job(self.folder / f"{name}.yaml", **settings)
        if edit is not None:
            plan = self.node.write_plan(self.folder / f"{name}.plan.json", job, edit)
            job = harness.write_job(job, **settings, plan=str(plan))
        return self.node.train(job)


def make_deterministic(plan):
    plan["deterministic"] = True


def make_streamed(plan):
    make_deterministic(plan)
    for unit in plan["units"]:
        unit["home"] = "STATE_HOME_STREAMED"
    for layer in plan["layers"]:
        layer["boundary"] = "BOUNDARY_HOME_HOST"


def make_resident(plan):
    make_deterministic(plan)
    for unit in plan["units"]:
        unit["home"] = "STATE_HOME_RESIDENT"


class Float32(GpuTest):
    def test_a_gpu_trains_as_the_cpu_device_does(self):
        for family in harness.FAMILIES:
            with self.subTest(family):
                shape = {"steps": 100, "optimizer": {"learning_rate": 3e-4}}
                gpu = self.run_job(f"{family}-gpu", family, make_streamed, **shape).losses()
                cpu = self.run_job(f"{family}-cpu", family, devices={"kind": "cpu", "count": 1}, **shape).losses()
                difference = np.max(np.abs(np.array(gpu) - cpu) / np.abs(cpu))
                print(f"{family}: losses differ by {difference:.2e}")
                self.assertLess(difference, 1e-5)
                # It learns something; logits capped at 2 learn slowly.
                self.assertLess(np.mean(cpu[-5:]), np.mean(cpu[:5]) - (0.05 if family == "gemma4" else 0.1))

    def test_micro_batches_add_up(self):
        shape = {"steps": 30, "optimizer": {"learning_rate": 3e-4}}
        whole, parts = (self.run_job(f"accumulation-{count}", edit=make_streamed, accumulation=count, **shape).losses()
                        for count in (1, 4))
        self.assertLess(np.max(np.abs(np.array(parts) - whole) / np.abs(whole)), 1e-5)


class Plans(GpuTest):
    def compare(self, precision, **settings):
        shape = {"steps": 12, "precision": precision} | settings
        name = "-".join([precision, *(settings[key] if key == "family" else key for key in sorted(settings))])
        streamed = self.run_job(f"{name}-streamed", edit=make_streamed, **shape)
        for variant, edit in (("resident", make_resident), ("mixed", self.mix)):
            other = self.run_job(f"{name}-{variant}", edit=edit, **shape)
            self.assertEqual(other.exact_steps(), streamed.exact_steps(), variant)
            for kind, tensors in streamed.state().items():
                self.assertEqual(harness.different_tensors(other.state()[kind], tensors), [], f"{variant} {kind}")

    @staticmethod
    def mix(plan):
        make_streamed(plan)
        for unit in plan["units"][::2]:
            unit["home"] = "STATE_HOME_RESIDENT"
        plan["layers"][1]["boundary"] = "BOUNDARY_HOME_DEVICE"
        plan["layers"][2]["retainMixer"] = True

    def test_bfloat16(self):
        self.compare("bfloat16")

    def test_float32(self):
        self.compare("float32")

    def test_accumulation(self):
        self.compare("bfloat16", accumulation=4)

    def test_layers_that_no_kernel_serves(self):
        # Gated DeltaNet with heads of 16 and 24: the composite operators, in between others' kernels.
        self.compare("bfloat16", family="qwen3_5_moe")

    def test_branch_norms_and_capped_logits(self):
        self.compare("bfloat16", family="gemma4")

    def test_clipping(self):
        self.compare("bfloat16", optimizer={"learning_rate": 1e-3, "max_gradient_norm": 0.05})


class SeveralGpus(GpuTest):
    SHAPE = {"steps": 12, "precision": "float32", "devices": {"kind": "cuda", "count": 2}}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        count = sum(device["kind"] == "cuda" for device in cls.devices())
        if count < 2:
            raise unittest.SkipTest(f"{count} GPU")

    @staticmethod
    def exchange(plan, reduction, delivery):
        make_streamed(plan)
        plan["reduction"] = f"GRADIENT_REDUCTION_{reduction}"
        for unit in plan["units"]:
            unit["delivery"] = f"PARAMETER_DELIVERY_{delivery}"

    @classmethod
    def host(cls, plan):
        cls.exchange(plan, "HOST", "FULL")

    @classmethod
    def between(cls, plan):
        cls.exchange(plan, "DEVICE_FLOAT32", "SHARD")

    @classmethod
    def between_resident(cls, plan):
        cls.between(plan)
        for unit in plan["units"][1::2]:
            unit["home"] = "STATE_HOME_RESIDENT"

    def test_gpus_that_sum_between_each_other_get_the_hosts_sums(self):
        # With two ranks an FP32 sum has one order, wherever it is taken.
        host = self.run_job("gpus-host", edit=self.host, **self.SHAPE)
        for name, edit in (("between", self.between), ("resident", self.between_resident)):
            other = self.run_job(f"gpus-{name}", edit=edit, **self.SHAPE)
            self.assertEqual(other.exact_steps(), host.exact_steps(), name)

    def test_two_gpus_train_as_one_does(self):
        shape = self.SHAPE | {"router": {"auxiliary_loss": 0.02}}
        one = self.run_job("gpus-1", edit=make_streamed, **(shape | {"devices": CUDA})).lines()
        two = self.run_job("gpus-2", **shape).lines()
        for key in ("loss", "auxiliary_loss"):
            of_one, of_two = (np.array([entry[key] for entry in lines]) for lines in (one, two))
            self.assertLess(np.max(np.abs(of_two - of_one) / np.abs(of_one)), 1e-5, key)


class Resume(GpuTest):
    def test_a_stop_changes_nothing(self):
        shape = {"steps": 12, "precision": "bfloat16", "checkpoint": {"every_steps": 5, "keep": 2}}
        whole = self.run_job("whole", edit=self.half_resident, **shape)
        first = self.run_job("parts", edit=self.half_resident, **(shape | {"steps": 5}))
        self.assertEqual(first.checkpoints(), [5])
        both = self.run_job("parts", edit=self.half_resident, **shape, resume="auto")
        self.assertEqual(both.exact_steps(), whole.exact_steps())
        for kind, tensors in whole.state().items():
            self.assertEqual(harness.different_tensors(both.state()[kind], tensors), [], kind)

    @staticmethod
    def half_resident(plan):
        make_streamed(plan)
        for unit in plan["units"][: len(plan["units"]) // 2]:
            unit["home"] = "STATE_HOME_RESIDENT"


if __name__ == "__main__":
    harness.main()
