"""Bad input: each case is refused when it is submitted, with one clear error that names the field, the file or the
number, by the right exit code, and leaves the queue and the running job alone."""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

import numpy

from fault_harness import (BIN, EXIT_CONFLICT, EXIT_DENIED, EXIT_INVALID, FaultCase, harness)

IS_ROOT = os.geteuid() == 0
NOBODY = 65534


def read_safetensors(path):
    """(header, data)"""
    raw = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def write_safetensors(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


class BadInputCase(FaultCase):
    """Another job runs all the time; at the end it must not have noticed."""

    def setUp(self):
        super().setUp()
        self.runner = self.submit("runner", steps=1_000_000, checkpoint={"every_steps": 20, "keep": 2})
        self.wait_steps("runner", 1)
        self.own_jobs = []

    def tearDown(self):
        names = sorted(json.loads(line)["name"] for line in
                       self.node.oom("ls", "-o", "jsonl").stdout.splitlines())
        self.assertEqual(names, sorted(self.own_jobs + ["jobs/runner"]), "a refused job is in the queue")
        self.wait_steps("runner", self.step_count("runner") + 5)
        now = self.node.get("runner")
        self.assertEqual((now["state"], now["attempt"], now["failureCount"]), ("JOB_STATE_RUNNING", 1, 0))
        self.assertEqual(len(os.listdir(self.node.state_dir / "jobs")), 1 + len(self.own_jobs))
        super().tearDown()

    def refused(self, job_file, *words, code=EXIT_INVALID):
        """`oom submit` gives one error with these words, and makes nothing. So does `oom plan`."""
        for command in ("plan", "submit"):
            result = self.node.oom(command, job_file, check=None)
            print("\n", command, result.returncode, result.stderr.strip()) if os.environ.get("SHOW") else None
            self.assertEqual((result.returncode, result.stdout), (code, ""), result.stderr)
            for word in words:
                self.assertIn(word, result.stderr)
            self.assertEqual(len(result.stderr.strip().splitlines()), 1, f"more than one line: {result.stderr}")
        return result.stderr


class Models(BadInputCase):
    def model(self, name):
        return harness.write_model(self.folder / name)

    def refuse_model(self, folder, *words):
        self.refused(self.job_file("bad", model={"path": str(folder)}), "model.path", *words)
        self.assertFalse(self.output("bad").exists())

    def test_files_that_are_not_there_or_cut(self):
        folder = self.model("missing")
        (folder / "model.safetensors").unlink()
        self.refuse_model(folder, "model.safetensors")
        folder = self.model("cut")
        path = folder / "model.safetensors"
        size = path.stat().st_size
        os.truncate(path, size - 100)
        self.refuse_model(folder, "model.safetensors", "byte")
        os.truncate(path, 5)
        self.refuse_model(folder, "model.safetensors", "5 bytes")
        os.truncate(path, 0)
        self.refuse_model(folder, "model.safetensors")
        folder = self.model("shard")
        header, _ = read_safetensors(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        names = sorted(name for name in header if name != "__metadata__")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {
            name: "model-00001-of-00002.safetensors" for name in names} |
            {names[0]: "model-00002-of-00002.safetensors"}}))
        self.refuse_model(folder, "model-00002-of-00002.safetensors")
        self.refuse_model(self.folder / "nowhere", "nowhere")

    def test_headers_with_offsets_that_overlap_or_lie_outside_and_headers_that_are_none(self):
        folder = self.model("bad-header")
        path = folder / "model.safetensors"
        good, data = read_safetensors(path)
        order = sorted((name for name in good if name != "__metadata__"), key=lambda n: good[n]["data_offsets"][0])
        first, second, last = order[0], order[1], order[-1]

        def changed(name, offsets):
            header = json.loads(json.dumps(good))
            header[name]["data_offsets"] = offsets
            write_safetensors(path, header, data)

        begin, end = good[second]["data_offsets"]
        changed(second, [begin - 4, end - 4])
        self.refuse_model(folder, "model.safetensors", second)
        begin, end = good[last]["data_offsets"]
        changed(last, [begin + 4, end + 4])
        self.refuse_model(folder, "model.safetensors", last)
        changed(last, [begin, 2 ** 63])
        self.refuse_model(folder, "model.safetensors", last)
        changed(last, [end, begin])
        self.refuse_model(folder, "model.safetensors", last)
        changed(first, [-4, 4])
        self.refuse_model(folder, "model.safetensors", first)
        write_safetensors(path, b"{not json", data)
        self.refuse_model(folder, "model.safetensors", "header")
        path.write_bytes(struct.pack("<Q", 2 ** 62) + data)
        self.refuse_model(folder, "model.safetensors", "header")

    def test_tensors_of_another_shape_or_type_or_name(self):
        config = harness.model_config()
        good = harness.random_weights(config)
        name = "model.layers.0.self_attn.k_proj.weight"

        def written(weights):
            return harness.write_model(self.folder / "tensors", weights=weights)
        self.refuse_model(written(good | {name: numpy.ascontiguousarray(good[name].T)}), name, "[32, 48]", "[48, 32]")
        self.refuse_model(written(good | {name: good[name].astype(numpy.int32)}), name, "I32")
        self.refuse_model(written({key: value for key, value in good.items() if key != name}), name)

    def test_configurations_that_no_model_has(self):
        folder = self.model("config")
        path = folder / "config.json"
        good = json.loads(path.read_text())
        path.write_text(json.dumps(good | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
        self.refuse_model(folder, "llama")
        path.write_text("{")
        self.refuse_model(folder, "config.json")
        path.write_text(json.dumps(good | {"hidden_size": -48}))
        self.refuse_model(folder, "hidden_size")
        path.write_text(json.dumps(good | {"num_experts_per_tok": 9}))
        self.refuse_model(folder, "num_experts_per_tok")
        path.unlink()
        self.refuse_model(folder, "config.json")


class Data(BadInputCase):
    def refuse_data(self, folder, *words):
        self.refused(self.job_file("bad", data={"train": str(folder)}), "data.train", *words)
        self.refused(self.job_file("bad", data={"train": str(self.folder / "train"), "evaluation": str(folder)}),
                     "data.evaluation", *words)

    def data(self, name, **changes):
        return harness.write_data(self.folder / name, **changes)

    def test_tokens_beyond_the_vocabulary(self):
        folder = self.data("tokens")
        tokens = numpy.load(folder / "tokens.npy")
        tokens[1234] = 256
        numpy.save(folder / "tokens.npy", tokens)
        self.refuse_data(folder, "1234", "256")
        folder = self.data("vocabulary", vocabulary=300)
        self.refuse_data(folder, "256")

    def test_datasets_that_are_empty_or_too_short_or_cut(self):
        folder = self.data("empty")
        numpy.save(folder / "tokens.npy", numpy.zeros(0, numpy.uint32))
        self.refuse_data(folder, "tokens.npy")
        folder = self.data("short", tokens=30, documents=4)
        self.refuse_data(folder, "30")
        folder = self.data("cut")
        os.truncate(folder / "tokens.npy", 5000)
        self.refuse_data(folder, "tokens.npy")
        (folder / "tokens.npy").unlink()
        self.refuse_data(folder, "tokens.npy")
        folder = self.data("type")
        numpy.save(folder / "tokens.npy", numpy.load(folder / "tokens.npy").astype(numpy.int64))
        self.refuse_data(folder, "tokens.npy")

    def test_masks_and_documents_that_do_not_fit_the_tokens(self):
        folder = self.data("mask")
        numpy.save(folder / "loss_mask.npy", numpy.ones(8000, numpy.uint8))
        self.refuse_data(folder, "loss_mask.npy", "8000", "8001")
        folder = self.data("documents")
        offsets = numpy.load(folder / "documents.npy")
        offsets[3] = offsets[2] - 1
        numpy.save(folder / "documents.npy", offsets)
        self.refuse_data(folder, "documents.npy")
        folder = self.data("json")
        (folder / "dataset.json").write_text(json.dumps({"vocabulary_size": 256, "tokens": 7, "documents": 1}))
        self.refuse_data(folder, "dataset.json", "7")


class Resources(BadInputCase):
    def test_more_memory_than_the_budget_or_the_node_has(self):
        text = self.refused(self.job_file("bad", budgets={"host_memory": "3MiB"}),
                            "OUT_OF_HOST_MEMORY", "budgets.host_memory", "3.00 MiB")
        self.assertIn("needs", text)
        self.refused(self.job_file("bad", budgets={"host_memory": ["1GiB"] * 3}), "budgets.host_memory")
        self.refused(self.job_file("bad", budgets={"gpu_memory": "64KiB"}), "OUT_OF_GPU_MEMORY", "budgets.gpu_memory")
        # 12 bytes of each of 0.8 billion parameters; the node has 4 GiB.
        config = harness.model_config(vocab_size=400_000, hidden_size=1024)
        (self.folder / "large.json").write_text(json.dumps(config))
        model = {"config": str(self.folder / "large.json"), "initialize": "random"}
        self.refused(self.job_file("bad", model=model), "OUT_OF_HOST_MEMORY", "budgets.host_memory", "4.00 GiB")

    def test_more_devices_than_the_node_has(self):
        self.refused(self.job_file("bad", devices={"kind": "cpu", "count": 8}, global_batch=8), "devices.count",
                     "needs 8", "4 of 4")
        devices = json.loads(self.node.oom("node", "-o", "json").stdout)["devices"]
        if not any(device["kind"] == "cuda" for device in devices):
            self.refused(self.job_file("bad", devices={"kind": "cuda", "count": 1}), "devices.count",
                         "NOT_ENOUGH_DEVICES", "cuda devices: needs 1, 0 of 0")

    def test_more_disk_than_there_is(self):
        # 12 bytes of each of 0.1 billion parameters, a hundred thousand times.
        config = harness.model_config(vocab_size=100_000, hidden_size=512)
        (self.folder / "middle.json").write_text(json.dumps(config))
        model = {"config": str(self.folder / "middle.json"), "initialize": "random"}
        self.refused(self.job_file("bad", model=model, checkpoint={"every_steps": 1, "keep": 100_000}),
                     "STORAGE_FULL", "output", "100001 checkpoints", "free in")

    @unittest.skipUnless(IS_ROOT, "needs to mount")
    def test_a_full_disk_and_one_that_nobody_may_write_to(self):
        for name, options, words in (("full", "size=1m", ("STORAGE_FULL", "output", "free")),
                                     ("read-only", "ro", ("output", "Read-only file system"))):
            place = self.folder / name
            place.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
            try:
                self.refused(self.job_file("bad", output=str(place / "run")), *words, str(place))
                self.assertEqual(os.listdir(place), [])
            finally:
                subprocess.run(["umount", place], check=True)

    def test_an_output_that_cannot_be_a_directory(self):
        (self.folder / "file").write_text("")
        self.refused(self.job_file("bad", output=str(self.folder / "file")), "output", "not a directory")
        self.refused(self.job_file("bad", output=str(self.folder / "file/run")), "output", "not a directory")
        if not IS_ROOT:
            (self.folder / "closed").mkdir(mode=0o500)
            self.refused(self.job_file("bad", output=str(self.folder / "closed/run")), "output", "Permission denied")


class Files(BadInputCase):
    def text(self, text):
        path = self.folder / "text.yaml"
        path.write_text(text)
        return path

    def test_yaml_that_is_none_or_has_a_wrong_key_or_value(self):
        good = self.job_file("good").read_text()
        self.refused(self.text("model: {path: ["), "text.yaml")
        self.refused(self.text(good[:-1] + ', "sequence_lenght": 3}'), "sequence_lenght", "sequence_length")
        self.refused(self.text(good[:-1] + ', "optimizer": {"learning_rat": 1}}'), "optimizer")
        self.refused(self.job_file("bad", optimizer={"learning_rat": 1}), "learning_rat", "learning_rate")
        self.refused(self.job_file("bad", steps="many"), "steps", "many")
        self.refused(self.job_file("bad", steps=-1), "steps")
        self.refused(self.job_file("bad", precision="float16"), "precision", "float16")
        self.refused(self.job_file("bad", global_batch=3), "global_batch", "3")
        self.refused(self.job_file("bad", checkpoint={"every_steps": 5, "keep": 1}), "checkpoint.keep")
        self.refused(self.job_file("bad", schedule={"kind": "cosine", "warmup_steps": 99}), "schedule.warmup_steps")
        self.refused(self.text("name: x\n"), "model", "sequence_length", "global_batch", "output")
        self.refused(self.folder / "nowhere.yaml", "nowhere.yaml")
        self.refused(self.folder, str(self.folder))

    def test_a_file_that_is_too_large(self):
        self.refused(self.text("# " + "x" * (5 << 20)), "text.yaml", str((5 << 20) + 2), str(1 << 20))

    def test_a_name_that_is_taken(self):
        path = self.job_file("again", name="runner")
        result = self.node.oom("submit", path, "--name", "runner", check=EXIT_CONFLICT)
        self.assertIn("jobs/runner exists", result.stderr)
        result = self.node.oom("submit", path, "--name", "Not A Name", check=EXIT_INVALID)
        self.assertIn("job_id", result.stderr)

    def test_a_request_id_that_was_used_for_another_job(self):
        # The runner takes two of four devices; this one fits and ends.
        self.node.oom("submit", self.job_file("once"), "--request-id", "one")
        self.node.wait("once")
        result = self.node.oom("submit", self.job_file("other"), "--request-id", "one", check=EXIT_INVALID)
        self.assertIn("jobs/once", result.stderr)
        self.assertIn("request_id", result.stderr)
        self.own_jobs = ["jobs/once"]


class Sockets(FaultCase):
    """A socket that somebody else owns; as root, with another uid."""

    def setUp(self):
        super().setUp()
        if not IS_ROOT or shutil.which("setpriv") is None:
            self.skipTest("needs another uid")
        # Where the other uid reaches the programs.
        self.place = pathlib.Path(tempfile.mkdtemp(prefix="oom-other-"))
        self.addCleanup(shutil.rmtree, self.place)
        self.place.chmod(0o755)
        for name in ("oom", "oomd"):
            shutil.copy(BIN / name, self.place / name)

    def as_other(self, *arguments):
        words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *map(str, arguments)]
        environment = self.node.env | {"HOME": str(self.place), "XDG_CONFIG_HOME": str(self.place / "none")}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def test_a_daemon_does_not_take_the_socket_of_another_user(self):
        folder = self.place / "shared"
        folder.mkdir()
        folder.chmod(0o1777)
        state = self.place / "state"
        state.mkdir()
        os.chown(state, NOBODY, NOBODY)
        socket = folder / "oomd.sock"
        ours = subprocess.Popen([BIN / "oomd", "--state-dir", self.folder / "second", "--socket", socket],
                                env=self.node.env, stdout=subprocess.PIPE, text=True)
        self.addCleanup(ours.stdout.close)
        self.addCleanup(ours.wait)
        self.addCleanup(ours.kill)
        self.assertIn("oomd ready", ours.stdout.readline())
        for _ in range(2):  # Listened on, and left behind by a killed daemon.
            result = self.as_other(self.place / "oomd", "--state-dir", state, "--socket", socket)
            self.assertEqual(result.returncode, EXIT_DENIED, result.stderr)
            self.assertIn(f"{socket} belongs to uid 0", result.stderr)
            self.assertTrue(socket.is_socket())
            ours.kill()
            ours.wait()

    def test_a_client_may_not_use_the_socket_of_another_user(self):
        self.submit("tiny", steps=1_000_000)
        for folder in (self.folder, self.node.folder):
            folder.chmod(0o755)
        for command in (["ls"], ["cancel", "tiny"], ["submit", self.folder / "tiny.yaml"]):
            result = self.as_other(self.place / "oom", *command)
            self.assertEqual(result.returncode, EXIT_DENIED, result.stderr)
            self.assertIn(str(self.node.socket), result.stderr)
        # Even where the file lets it in.
        self.node.socket.chmod(0o666)
        result = self.as_other(self.place / "oom", "ls")
        self.assertEqual((result.returncode, result.stdout), (EXIT_DENIED, ""), result.stderr)
        self.wait_steps("tiny", self.step_count("tiny") + 5)


if __name__ == "__main__":
    unittest.main()
