"""The trace's curve of device memory: what operators take and give back, and what comes back for the layer below."""

import json
import unittest

import harness

STEPS, BATCH, LENGTH = 4, 4, 512
# Attention between two layers of Gated DeltaNet.
LAYER_TYPES = ["linear_attention", "full_attention", "linear_attention"]
ATTENTION, BELOW = 1, 0


class MemoryTraceTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        config = harness.model_config("qwen3_5_moe", layer_types=LAYER_TYPES)
        cls.boundary_bytes = BATCH * LENGTH * config["hidden_size"] * 4
        cls.model = harness.write_model(cls.folder / "model", "qwen3_5_moe", seed=91, layer_types=LAYER_TYPES)
        cls.data = harness.write_data(cls.folder / "train", tokens=STEPS * BATCH * LENGTH + 1, documents=5, seed=92)
        cls.runs = {groups: cls.run_with(groups) for groups in (1, 2)}

    @classmethod
    def run_with(cls, groups):
        settings = dict(name=f"groups-{groups}", model=cls.model, train=cls.data, output=cls.folder / f"groups-{groups}",
                        steps=STEPS, global_batch=BATCH, sequence_length=LENGTH, trace={"first_step": 3, "step_count": 2})
        job = harness.write_job(cls.folder / f"groups-{groups}.yaml", **settings)

        def edit(plan):
            plan["partitions"]["attentionHeadGroupCount"] = groups
        plan = cls.node.write_plan(cls.folder / f"plan-{groups}.json", job, edit)
        return cls.node.train(harness.write_job(job, **settings, plan=str(plan)))

    def events(self, groups):
        return json.loads((self.runs[groups].output / "trace/steps.json").read_text())["traceEvents"]

    def nodes(self, groups, name):
        """(start, end) of the nodes of that name, one a traced step."""
        found = sorted((event["ts"], event["ts"] + event["dur"]) for event in self.events(groups)
                       if event["ph"] == "X" and event["name"] == name)
        self.assertEqual(len(found), 2, name)
        return found

    def curve(self, groups):
        """(time, bytes) of the only rank."""
        points = [(event["ts"], event["args"]["bytes"]) for event in self.events(groups) if event["ph"] == "C"]
        self.assertEqual(points, sorted(points, key=lambda point: point[0]))
        return points

    def at(self, groups, time):
        distance, value = min((abs(when - time), value) for when, value in self.curve(groups))
        self.assertLess(distance, 0.01)  # Microseconds: an end is a start and a duration.
        return value

    def test_every_operator_has_its_peak_and_what_it_leaves(self):
        points = self.curve(1)
        for event in self.events(1):
            if event["ph"] == "X" and event["name"].startswith(("forward", "replay", "backward", "head")):
                times = [when for when, _ in points]
                self.assertIn(event["ts"], times, event["name"])
        peak = max(value for _, value in points)
        reported = max(entry["gpu_bytes_peak"] for entry in self.runs[1].lines())
        # The reported one is of the whole run.
        self.assertLessEqual(peak, reported)
        self.assertGreater(peak, 0.9 * reported)

    def test_an_input_waits_for_the_head_groups(self):
        backward = self.nodes(2, f"backward mixer layer {ATTENTION}")
        for (_, end), (start, _) in zip(backward, self.nodes(2, f"load boundary layer {BELOW}")):
            self.assertGreaterEqual(start, end)

    def test_groups_and_the_waiting_input_make_the_peak_smaller(self):
        peaks = {groups: [self.at(groups, start) for start, _ in self.nodes(groups, f"backward mixer layer {ATTENTION}")]
                 for groups in (1, 2)}
        for whole, in_groups in zip(peaks[1], peaks[2]):
            # At least the input that is not there yet.
            self.assertLess(in_groups, whole - self.boundary_bytes)

    def test_nothing_of_a_layer_stays(self):
        for groups in (1, 2):
            lowest = min(value for _, value in self.curve(groups))
            for layer in range(len(LAYER_TYPES)):
                for (_, end) in self.nodes(groups, f"backward mixer layer {layer}"):
                    # The gradient on its way down, and inputs on their way back.
                    self.assertLessEqual(self.at(groups, end) - lowest, 3.1 * self.boundary_bytes)

    def test_the_plan_knows(self):
        items = {groups: {entry["item"]: int(entry["bytes"]) for entry in self.runs[groups].plan()["estimate"]["memory"]
                          if entry["space"] == "device 0"} for groups in (1, 2)}
        self.assertEqual(items[1]["boundary buffers"] - items[2].get("boundary buffers", 0), 2 * self.boundary_bytes)
        for groups in (1, 2):
            reported = max(entry["gpu_bytes_peak"] for entry in self.runs[groups].lines())
            self.assertLess(abs(sum(items[groups].values()) - reported), 0.1 * reported)


if __name__ == "__main__":
    unittest.main()
