"""Bytes as counted in a run against the plan's account: transfers exactly; memory of a model of 50 million parameters."""

import json
import pathlib
import re
import unittest

import numpy as np

import harness

STEPS = 7
# Of a device, to the metric's direction.
DIRECTIONS = {"H2D": "host_to_device", "D2H": "device_to_host", "boundary out": "boundary", "boundary in": "boundary",
              "collective": "collective"}


def megabytes(count):
    return f"{count / 2**20:.1f} MiB"


class TransferTest(harness.NodeTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = harness.write_model(cls.folder / "model", seed=51)
        cls.data = harness.write_data(cls.folder / "train", tokens=32 * 8 * STEPS + 1, documents=30, seed=52)

    def account(self, plan, resource):
        """The plan's bytes of a resource and step, by unit."""
        units = {}
        for entry in plan["estimate"]["resources"]:
            if entry["resource"] == resource:
                units = {unit["unit"]: int(unit["bytes"]) for unit in entry.get("units", [])}
                self.assertEqual(sum(units.values()), int(entry.get("bytes", 0)))
        return units

    def hold(self, name, edit=None, **settings):
        job = harness.write_job(self.folder / f"{name}.yaml", **(dict(
            name=name, model=self.model, train=self.data, output=self.folder / name, steps=STEPS, global_batch=8) | settings))
        path = self.node.write_plan(self.folder / f"{name}.json", job, edit)
        job = harness.write_job(job, **(dict(
            name=name, model=self.model, train=self.data, output=self.folder / name, steps=STEPS, global_batch=8,
            plan=str(path)) | settings))
        before = self.counted()
        run = self.node.train(job)
        ranks = settings.get("devices", {"count": 1})["count"]
        plan = run.plan()
        wanted = {}
        for resource in DIRECTIONS:
            units = self.account(plan, f"{resource} of each device")
            wanted[resource] = {unit: STEPS * ranks * count for unit, count in units.items()}
        wanted["optimizer"] = {unit: STEPS * count for unit, count in self.account(plan, "optimizer of numa 0").items()}
        if plan["units"][0]["home"] != "STATE_HOME_RESIDENT":
            # The embedding's gradient returns as distinct rows: their number is the data's, not the plan's.
            wanted["D2H"]["embedding"] = self.row_bytes(ranks, 2 if plan["precision"] == "PRECISION_BFLOAT16" else 4)
        report = json.loads((self.folder / name / "trace/transfers.json").read_text())
        self.assertEqual((report["steps"], report["ranks"]), (STEPS, ranks))
        self.assertEqual(report["bytes"], {resource: units for resource, units in wanted.items() if units})
        # The metrics know directions, not units.
        after = self.counted()
        for direction in set(DIRECTIONS.values()):
            total = sum(sum(wanted[resource].values()) for resource in DIRECTIONS if DIRECTIONS[resource] == direction)
            self.assertEqual(after[direction] - before[direction], total, direction)
        return plan

    def row_bytes(self, ranks, value_bytes):
        tokens = np.load(self.data / "tokens.npy")
        share = 8 // ranks * 32
        rows = sum(len(np.unique(tokens[part * share:(part + 1) * share])) for part in range(STEPS * ranks))
        return rows * harness.model_config()["hidden_size"] * value_bytes

    def counted(self):
        """Bytes of every job of the node so far, by direction."""
        total = {}
        for direction in set(DIRECTIONS.values()):
            series = f'oomd_transfer_bytes_total{{direction="{direction}"}}'
            total[direction] = int(self.node.metrics().get(series, 0))
        return total

    def test_everything_streamed(self):
        plan = self.hold("streamed")
        self.assertTrue(self.account(plan, "H2D of each device"))

    def test_two_ranks_in_bfloat16(self):
        self.hold("two-ranks", precision="bfloat16", devices={"kind": "cpu", "count": 2})

    def test_accumulation(self):
        self.hold("accumulation", accumulation=2)

    def test_a_resident_unit_moves_nothing(self):
        def resident(plan):
            for unit in plan["units"]:
                if unit["unit"] != "layers.0.experts":
                    unit["home"] = "STATE_HOME_RESIDENT"
        plan = self.hold("resident", resident)
        self.assertTrue(self.account(plan, "H2D of each device"))

        def all_resident(plan):
            for unit in plan["units"]:
                unit["home"] = "STATE_HOME_RESIDENT"
        plan = self.hold("all-resident", all_resident)
        for resource in ("H2D", "D2H"):
            self.assertEqual(self.account(plan, f"{resource} of each device"), {})


class MemoryTest(harness.NodeTest):
    """A model of 50 million parameters, streamed, in both precisions."""

    MODEL = dict(hidden_size=512, num_hidden_layers=6, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=320,
                 intermediate_size=1024, mlp_only_layers=[1], vocab_size=4608, num_attention_heads=8,
                 num_key_value_heads=4, head_dim=64)

    QWEN3_5 = dict(hidden_size=512, num_hidden_layers=6, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=320,
                   shared_expert_intermediate_size=320, vocab_size=4608, num_attention_heads=8, num_key_value_heads=4,
                   head_dim=64, layer_types=3 * ["linear_attention", "full_attention"], linear_num_key_heads=4,
                   linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64)

    def hold(self, precision, family="qwen3_moe", model=MODEL):
        config = harness.model_config(family, **model)
        parameters = harness.parameter_count(config)
        self.assertGreaterEqual(parameters, 50e6)
        at = self.folder / f"{family}-{precision}"
        at.mkdir()
        (at / "config.json").write_text(json.dumps(config))
        train = harness.write_data(at / "train", tokens=4001, documents=20, vocabulary=4608)
        job = harness.write_job(
            at / "job.yaml", name=at.name.replace("_", "-"), model=at, train=train, output=at / "run", steps=1000, precision=precision,
            sequence_length=64, global_batch=2, devices={"kind": "cpu", "count": 2})
        settings = harness.read_job(job)
        settings["model"] = {"config": str(at / "config.json"), "initialize": "random"}
        job.write_text(json.dumps(settings))
        estimate = self.node.plan(job)["estimate"]
        planned, device_planned = int(estimate["hostBytesPeak"]), int(estimate["deviceBytesPeak"])
        name = self.node.submit(job)
        run = harness.Run(at / "run")
        harness.wait_until(lambda: len(run.lines()) >= 4, "four steps", seconds=120)

        pools = self.pools()
        state = sum(size for pool, size in pools.items() if pool.split("-")[-1].startswith(("weights.", "rest.")))
        print(f"{precision}: {parameters / 1e6:.1f} million parameters, {state / parameters:.4f} bytes a parameter")
        self.assertTrue(12.0 <= state / parameters <= 12.06, state / parameters)

        used = self.resident_bytes(self.node.processes("oom-jobhost") + self.node.processes("oom-worker"))
        print(f"{precision}: {megabytes(used)} used, {megabytes(planned)} planned")
        self.assertLessEqual(abs(used - planned), 0.05 * planned + 0.3 * 2**30)
        reported = run.lines()[-1]["host_bytes_peak"]
        self.assertLessEqual(abs(reported - planned), 0.05 * planned + 0.3 * 2**30)
        device = run.lines()[-1]["gpu_bytes_peak"]
        print(f"{precision}: device {megabytes(device)} used, {megabytes(device_planned)} planned")
        self.assertLessEqual(abs(device - device_planned), 0.03 * device_planned)
        self.node.oom("cancel", "--now", name)
        self.node.wait(name, check=11)

    def pools(self):
        """Sizes of the memfds that the job host holds, by name; each once."""
        pid = self.node.processes("oom-jobhost")[0]
        found = {}
        for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            match = re.fullmatch(r"/memfd:(\S+) \(deleted\)", str(link.readlink()))
            if match:
                found[match[1]] = link.stat().st_size
        return found

    def resident_bytes(self, pids):
        """PSS of the processes, and hugetlb pages, which PSS does not count."""
        self.assertEqual(len(pids), 3)
        total, shared_hugetlb = 0, 0
        for pid in pids:
            values = dict(re.findall(r"^(\w+): +(\d+) kB$", pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M))
            total += int(values["Pss"]) * 1024 + int(values.get("Private_Hugetlb", 0)) * 1024
            shared_hugetlb = max(shared_hugetlb, int(values.get("Shared_Hugetlb", 0)) * 1024)
        return total + shared_hugetlb

    def test_bfloat16(self):
        self.hold("bfloat16")

    def test_float32(self):
        self.hold("float32")

    def test_qwen3_5(self):
        self.hold("bfloat16", "qwen3_5_moe", self.QWEN3_5)


if __name__ == "__main__":
    unittest.main(verbosity=2)
