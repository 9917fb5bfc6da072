#!/usr/bin/env python3
"""The benchmark without a GPU, OOM or torch: data, memory of a process tree, limits, failures, results on disk.

    python3 bench/offload_vs_fsdp2/bench_test.py
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import textwrap
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402

import geometry  # noqa: E402
import machine  # noqa: E402
import processes  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402

# A program that acts out its options: what each batch does is in the model's name's place.
PEER = """
    import json, os, subprocess, sys, time
    batches = [int(b) for b in sys.argv[sys.argv.index("--batches") + 1].split(",")]
    resident = "--resident" in sys.argv
    say = lambda event, **more: print(json.dumps({"event": event} | more), flush=True)
    if resident and batches[0] == 64:
        sys.exit("cannot start")
    say("ready")
    child = subprocess.Popen([sys.executable, "-c", "import time; x = bytes(range(256)) * (1 << 19); time.sleep(60)"])
    for batch in batches:
        if resident and batch == 2:
            os.abort()
        if resident and batch == 4:
            time.sleep(60)
        if resident and batch == 8:
            say("failed", batch=batch, error="GPU out of memory")
            continue
        say("measuring")
        sys.stdin.readline()
        time.sleep(0.5)
        say("measured")
        sys.stdin.readline()
        say("result", batch=batch, step_seconds=0.5 if resident else 1.0, steps=3, loss=2.0, micro_batch=batch)
    child.kill()
"""


class FolderTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="oom-bench-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.peer = self.folder / "peer.py"
        self.peer.write_text(textwrap.dedent(PEER))


class GeometryTest(FolderTest):
    def test_parameters_are_the_published_number(self):
        for name, layers, parameters in (("qwen3-30b-a3b", 48, 30_532_122_624), ("mixtral-8x7b", 32, 46_702_792_704),
                                         ("qwen3.6-35b-a3b", 40, 34_660_610_688), ("qwen3.5-122b-a10b", 48, 122_111_526_912)):
            self.assertEqual(geometry.GEOMETRIES[name]["num_hidden_layers"], layers)
            self.assertEqual(geometry.parameter_count(geometry.config_of(name, layers)), parameters)

    def test_parameters_of_gemma_4_are_the_published_number(self):
        config = dict(model_type="gemma4_text", vocab_size=262144, hidden_size=2816, intermediate_size=2112,
                      moe_intermediate_size=704, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8,
                      num_global_key_value_heads=2, head_dim=256, global_head_dim=512, num_experts=128,
                      tie_word_embeddings=True)
        self.assertEqual(geometry.parameter_count(config), 25_233_141_790)

    def test_each_geometry_of_the_repository_can_be_asked_for_and_tiny_ones_cannot(self):
        folders = {path.name for path in (HERE.parents[1] / "geometries").iterdir()}
        self.assertEqual(set(geometry.PUBLISHED), folders)
        for name in folders:
            self.assertEqual(run.parse(["--systems", "fsdp2", "--geometry", name]).geometry, name)
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            run.parse(["--systems", "fsdp2", "--geometry", "tiny-hybrid"])

    def test_hybrids_train_one_period_of_their_mixers_unless_told(self):
        config = geometry.config_of("qwen3.6-35b-a3b")
        self.assertEqual([geometry.is_linear_layer(config, layer) for layer in range(config["num_hidden_layers"])],
                         [True, True, True, False])

    def test_a_family_that_is_not_counted_is_refused(self):
        with self.assertRaisesRegex(ValueError, "another"):
            geometry.parameter_count(geometry.config_of("tiny") | {"model_type": "another"})

    def test_every_document_is_one_sequence(self):
        geometry.write_random_dataset(self.folder, sequences=5, length=16, vocabulary=100)
        tokens, documents = np.load(self.folder / "tokens.npy"), np.load(self.folder / "documents.npy")
        self.assertEqual((tokens.dtype, documents.dtype, len(tokens)), (np.uint32, np.int64, 81))
        self.assertEqual(documents.tolist(), [0, 16, 32, 48, 64, 80, 81])
        self.assertEqual(json.loads((self.folder / "dataset.json").read_text())["documents"], 6)

    def test_packed_documents_have_the_mean_length_and_the_same_tokens(self):
        geometry.write_random_dataset(self.folder / "whole", 64, 4096, vocabulary=100)
        geometry.write_random_dataset(self.folder / "packed", 64, 4096, vocabulary=100, document_tokens=512)
        tokens = [np.load(self.folder / name / "tokens.npy") for name in ("whole", "packed")]
        self.assertTrue((tokens[0] == tokens[1]).all())
        documents = np.load(self.folder / "packed/documents.npy")
        self.assertEqual((documents[0], documents[-1]), (0, 64 * 4096 + 1))
        lengths = np.diff(documents)
        self.assertGreater(lengths.min(), 0)
        self.assertAlmostEqual(lengths.mean() / 512, 1.0, delta=0.15)  # Three deviations of a mean of 512 draws.

    def test_sequences_begin_again_at_the_end(self):
        geometry.write_random_dataset(self.folder, sequences=5, length=16, vocabulary=100)
        data = geometry.Sequences(self.folder, 16)
        self.assertTrue((data.read(4, 3) == data.read(9, 3)).all())
        self.assertTrue((data.read(3, 2)[1] == np.load(self.folder / "tokens.npy")[64:80]).all())


class ProgramTest(FolderTest):
    def start(self, *arguments):
        return processes.Program([sys.executable, self.peer, *arguments], self.folder / "log", processes.Gpus(0))

    def test_memory_is_that_of_the_whole_tree(self):
        with self.start("--batches", "1") as program:
            results = [event for event in program.events(lambda: 30) if event["event"] == "result"]
        self.assertGreater(results[0]["peaks"]["host_bytes"], 128 << 20)  # The child holds them.
        self.assertLess(results[0]["peaks"]["host_bytes"], 256 << 20)

    def test_nothing_is_left_after_a_limit(self):
        with self.assertRaisesRegex(processes.Failed, "not done within 1 s"), self.start(
                "--batches", "4", "--resident") as program:
            list(program.events(lambda: 1))
        self.assertEqual(processes.marked_processes(program.mark), [])


class RunTest(FolderTest):
    def test_what_fails_is_recorded_and_the_rest_goes_on(self):
        for grouped in ([], ["--grouped"]):
            options = run.parse(["--tiny", "--peer", str(self.peer), "--systems", "fsdp2,gpu", "--batches", "1,2,4,8,16",
                                 "--length", "32", "--limit", "2", "--output", str(self.folder / "results"), *grouped])
            options.start = 0
            work = self.folder / "work"
            run.Run(options, work).run()
            written = json.loads((self.folder / "results/tiny-4-layers.json").read_text())
            rows = {(row["system"], row["batch"]): row for row in written["measurements"]}
            self.assertEqual(len(rows), 10)
            self.assertEqual(rows["gpu", 16]["tokens_per_second"], 16 * 32 / 0.5)
            for batch, error in ((2, "ended with -6"), (4, "not done within 2 s"), (8, "GPU out of memory")):
                self.assertIn(error, rows["gpu", batch]["error"])
            self.assertEqual(written["ratios"]["gpu"]["speed_over_fsdp2"], {"1": 2.0, "16": 2.0, "geometric_mean": 2.0})
            text = (self.folder / "results/tiny-4-layers.md").read_text()
            self.assertIn("| 16 | FSDP2, everything on the GPU | 0.500 |", text)
            self.assertIn("failed: GPU out of memory", text)

    def test_a_system_that_cannot_start_is_not_tried_for_every_batch(self):
        options = run.parse(["--tiny", "--peer", str(self.peer), "--systems", "gpu", "--batches", "64,1", "--grouped",
                             "--length", "32", "--output", str(self.folder / "results")])
        options.start = 0
        bench = run.Run(options, self.folder / "work")
        bench.run()
        self.assertEqual([row["error"] for row in bench.results["measurements"]], ["ended with 1\ncannot start"] * 2)


    def test_packed_documents_are_a_column_of_their_own(self):
        (self.folder / "bin").mkdir()
        (self.folder / "bin/oomd").touch()
        options = ["--tiny", "--oom", str(self.folder), "--budgets", "all,24GiB", "--document-tokens", "8", "--length", "32"]
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            run.parse(options)  # The peer is asked for too.
        bench = run.Run(run.parse([*options, "--systems", "oom"]), self.folder / "work")
        self.assertEqual(bench.name, "tiny-4-layers-packed-8")
        self.assertEqual(list(bench.columns()), ["oom-all", "oom-all-packed-8", "oom-24GiB", "oom-24GiB-packed-8"])
        for system, data in (("oom-24GiB", "data"), ("oom-24GiB-packed-8", "packed")):
            command = bench.command(system, [4])
            self.assertEqual(command[command.index("--data") + 1], self.folder / "work" / data)
            self.assertEqual(command[command.index("--budget") + 1], "24GiB")


class ReportTest(unittest.TestCase):
    def test_packed_documents_are_compared_with_whole_sequences(self):
        rows = [{"system": "oom-all", "batch": 4, "step_seconds": 1.0, "peaks": {}},
                {"system": "oom-all-packed-512", "batch": 4, "step_seconds": 1.1, "peaks": {}}]
        self.assertEqual(report.ratios(rows)["oom-all-packed-512"]["step_over_whole_sequences"]["4"], 1.1)
        self.assertEqual(report.meaning("oom-all-packed-512"), "OOM, the whole GPU, documents of 512")


    def test_kernels_that_are_not_torchs_own_are_named_once(self):
        results = {"settings": {"geometry": "tiny-hybrid", "layers": 4, "length": 32, "clip": 0, "gpus": 0, "steps": 3,
                                "warmup": 2}, "parameters": 1, "machine": machine.describe(0), "ratios": {},
                   "measurements": [{"system": "fsdp2", "batch": batch, "error": "?", "delta_kernels": "fla 1, triton 2"}
                                    for batch in (4, 8)]}
        self.assertEqual(report.markdown(results).count("Gated DeltaNet of FSDP2: fla 1, triton 2."), 1)

    def test_ratios_are_of_batches_that_both_have(self):
        row = lambda system, batch, seconds, host: {  # noqa: E731
            "system": system, "batch": batch, "step_seconds": seconds, "peaks": {"host_bytes": host}}
        found = report.ratios([row("fsdp2", 4, 3.0, 100), row("fsdp2", 8, 4.0, 100), row("gpu", 8, 1.0, 10),
                               row("oom-all", 4, 1.0, 50), row("oom-all", 8, 0.5, 80), row("oom-all", 16, 2.0, 80)])["oom-all"]
        self.assertEqual(found["speed_over_fsdp2"]["4"], 3.0)
        self.assertAlmostEqual(found["speed_over_fsdp2"]["geometric_mean"], 24**0.5)
        self.assertEqual(found["step_over_gpu"], {"8": 0.5, "geometric_mean": 0.5})
        self.assertEqual(found["host_over_fsdp2"]["8"], 0.8)


if __name__ == "__main__":
    unittest.main()
