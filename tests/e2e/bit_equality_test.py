"""What must not change a bit (engine rules, section 12, first list): losses, masters and moments over edited plans.

The environment's OOM_RANKS says how many workers, OOM_FAMILY which model's family; both precisions run.
"""

import os
import unittest

import harness

RANKS = int(os.environ.get("OOM_RANKS", "1"))
FAMILY = os.environ.get("OOM_FAMILY", "qwen3_moe")
STEPS = 6
RESIDENT, HOST, DEVICE = "STATE_HOME_RESIDENT", "BOUNDARY_HOME_HOST", "BOUNDARY_HOME_DEVICE"


def residents(*chosen):
    """Makes the units resident whose name `chosen` has; all of them without."""
    def edit(plan):
        for unit in plan["units"]:
            if not chosen or unit["unit"] in chosen:
                unit["home"] = RESIDENT
    return edit


def layers(**values):
    """Sets a field of every layer; a list is dealt out layer by layer."""
    def edit(plan):
        for field, value in values.items():
            for index, layer in enumerate(plan["layers"]):
                layer[field] = value[index % len(value)] if isinstance(value, list) else value
    return edit


def units(**values):
    """Sets fields of every unit."""
    def edit(plan):
        for unit in plan["units"]:
            unit.update(values)
    return edit


def fields(**values):
    return lambda plan: plan.update(values)


def together(*edits):
    def edit(plan):
        for one in edits:
            one(plan)
    return edit


PLANS = {
    "embedding-and-head-resident": residents("embedding", "head"),
    "a-layer-and-its-experts-resident": residents("layers.2", "layers.2.experts"),
    "all-resident": residents(),
    "boundaries-on-the-device": layers(boundary=DEVICE),
    "boundaries-mixed-mixers-retained": layers(boundary=[DEVICE, HOST], retainMixer=True),
    "mixtures-retained": layers(retainMixture=True),
    "all-retained": layers(retainMixer=True, retainMixture=True),
    "retention-mixed": layers(retainMixer=[True, False], retainMixture=[False, True, True], boundary=[HOST, DEVICE]),
    "small-chunks-smallest-backlog": fields(chunkBytes="16384", backlogBytes="0"),
    "large-chunks-one-window": fields(chunkBytes="67108864", windowCount=1, gradientBufferCount=1, boundaryBufferCount=1),
    "many-buffers-three-threads": fields(windowCount=4, gradientBufferCount=3, boundaryBufferCount=4, optimizerThreads=[3]),
    "sharded-delivery": units(delivery="PARAMETER_DELIVERY_SHARD"),
    "sharded-delivery-one-window-some-resident": together(
        units(delivery="PARAMETER_DELIVERY_SHARD"), residents("layers.1.experts"), fields(windowCount=1)),
    "deferred": fields(updateMode="UPDATE_MODE_DEFERRED"),
    "deferred-small-chunks-half-resident": together(
        fields(updateMode="UPDATE_MODE_DEFERRED", chunkBytes="32768", windowCount=3, optimizerThreads=[2]),
        residents("layers.0", "layers.0.experts", "head"), layers(retainMixer=True)),
    "everything-at-once": together(
        residents("embedding", "layers.1"), layers(boundary=[DEVICE, HOST, HOST], retainMixture=[False, True]),
        fields(chunkBytes="20480", backlogBytes="100000", windowCount=3, gradientBufferCount=1, boundaryBufferCount=1,
               optimizerThreads=[2])),
}


class BitEqualityTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = harness.write_model(cls.folder / "model", FAMILY, seed=21)
        cls.data = harness.write_data(cls.folder / "train", tokens=32 * 4 * STEPS + 1, documents=40, seed=22)
        cls.held_out = harness.write_data(cls.folder / "held-out", tokens=700, documents=8, seed=23)
        cls.base = {}
        for precision in ("float32", "bfloat16"):
            name = f"base-{precision}"
            base = cls.job(name, precision)
            plan = cls.node.write_plan(cls.folder / f"{name}.json", base)
            run = cls.node.train(cls.job(name, precision, plan=str(plan)))
            cls.base[precision] = (run.exact_steps(), run.state())

    @classmethod
    def job(cls, name, precision, **settings):
        return harness.write_job(
            cls.folder / f"{name}.yaml", **(dict(
                name=name, model=cls.model, train=cls.data, output=cls.folder / name, steps=STEPS, precision=precision,
                devices={"kind": "cpu", "count": RANKS}, router={"auxiliary_loss": 0.01}) | settings))

    def hold(self, name, edit, **settings):
        for precision, (steps, state) in self.base.items():
            job_name = f"{name}-{precision}"
            with self.subTest(precision):
                plan = self.node.write_plan(self.folder / f"{job_name}.json", self.job(job_name, precision, **settings), edit)
                run = self.node.train(self.job(job_name, precision, plan=str(plan), **settings))
                got = {step: {key: value for key, value in entry.items() if key != "evaluation_loss"}
                       for step, entry in run.exact_steps().items()}
                self.assertEqual(got, steps)
                for kind, tensors in run.state().items():
                    self.assertEqual(harness.different_tensors(tensors, state[kind]), [], kind)
                if edit:  # The plan that ran is the edited one.
                    self.assertNotEqual(self.plan_of(job_name), self.plan_of(f"base-{precision}"))

    def plan_of(self, job_name):
        plan = harness.Run(self.folder / job_name).plan()
        plan.pop("estimate")
        return plan

    def test_training_changes_the_state(self):
        start = harness.load_tensors(self.model)
        trained = sorted(name for name in start if not name.endswith("layer_scalar"))
        for precision, (_, state) in self.base.items():
            self.assertEqual(harness.different_tensors(start, state["master"]), trained, precision)

    def test_checkpoints_and_evaluations_change_nothing(self):
        self.hold("with-checkpoints", None, checkpoint={"every_steps": 1, "keep": 2}, held_out=self.held_out,
                  evaluation={"every_steps": 2, "sequences": 7})

    def test_checkpoints_of_resident_units_change_nothing(self):
        self.hold("resident-with-checkpoints", residents("layers.0", "layers.2.experts"),
                  checkpoint={"every_steps": 2, "keep": 2})


def add_test(name, edit):
    setattr(BitEqualityTest, f"test_{name.replace('-', '_')}", lambda self: self.hold(name, edit))


for plan_name, plan_edit in PLANS.items():
    add_test(plan_name, plan_edit)

if __name__ == "__main__":
    unittest.main(verbosity=2)
