#!/usr/bin/env python3
"""Trains one geometry with FSDP2 and with OOM on this machine, and writes step times, memory and their ratios.

    bench/offload_vs_fsdp2/run.py --oom FOLDER                    FOLDER: as deploy/package.sh makes it
    bench/offload_vs_fsdp2/run.py --oom FOLDER --systems oom --budgets 24GiB --batches 8      one measurement

Systems: fsdp2 (offloaded to the CPU), gpu (FSDP2, everything on the GPU), oom (once for each budget). Each runs in a process
tree of its own. What fails is recorded with its error, and the rest goes on; results are on disk after every measurement.
"""

import argparse
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import geometry  # noqa: E402
import machine  # noqa: E402
import report  # noqa: E402
from processes import GIB, Failed, Gpus, Program  # noqa: E402

# Segments that grow save GPU memory; registering pinned memory takes a tenth of the time of allocating it.
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def say(*words):
    print(*words, flush=True)


class Run:
    def __init__(self, options, work):
        self.options, self.work = options, work
        self.config = geometry.config_of(options.geometry, options.layers)
        self.model = geometry.write_config(work / "model", self.config)
        shape = (max(64, 2 * max(options.batches)), options.length, self.config["vocab_size"])
        self.data = geometry.write_random_dataset(work / "data", *shape)
        self.packed_data = options.document_tokens and geometry.write_random_dataset(
            work / "packed", *shape, options.document_tokens)
        self.end = time.monotonic() + options.total if options.total else None
        self.gpus = Gpus(options.gpus)
        settings = {name: getattr(options, name) for name in (
            "geometry", "length", "gpus", "clip", "steps", "warmup", "document_tokens")}
        self.results = {
            "schema": 1, "machine": machine.describe(options.gpus), "parameters": geometry.parameter_count(self.config),
            "settings": settings | {"layers": self.config["num_hidden_layers"], "allocator": options.allocator,
                                    "peer_options": options.peer_options}, "measurements": []}
        if "oom" in options.systems:
            self.results["oom"] = machine.oom_version(options.oom)
        self.name = f"{options.geometry}-{self.config['num_hidden_layers']}-layers" + (
            f"-{options.gpus}-gpus" if options.gpus > 1 else "") + ("-clipped" if options.clip else "") + (
            f"-packed-{options.document_tokens}" if options.document_tokens else "")

    def columns(self):
        """The systems, OOM once for each budget, and again with packed documents."""
        for system in self.options.systems:
            if system != "oom":
                yield system
                continue
            for budget in self.options.budgets:
                yield f"oom-{budget}"
                if self.packed_data:
                    yield f"oom-{budget}-packed-{self.options.document_tokens}"

    def command(self, system, batches):
        options = self.options
        budget, _, packed = system.removeprefix("oom-").partition("-packed-")
        shared = ["--model", self.model, "--data", self.packed_data if packed else self.data, "--length", options.length,
                  "--clip", options.clip, "--steps", options.steps, "--warmup", options.warmup, "--batches", ",".join(map(str, batches)),
                  "--gpus", options.gpus, "--device", options.device]
        if not system.startswith("oom-"):
            resident = ["--resident"] if system == "gpu" else []
            return [sys.executable, options.peer, *shared, *resident, *options.peer_options.split()]
        place = self.work / f"{system}-{batches[0]}"
        host_memory = ["--host-memory", options.host_memory] if options.host_memory else []
        return [sys.executable, HERE / "systems/oom.py", *shared, "--package", options.oom, "--work", place, "--budget",
                budget, "--traces", options.output / "traces", "--trace-name", f"{self.name}-{system}", *host_memory]

    def limit(self):
        """Seconds that the next event may take."""
        left = self.end - time.monotonic() if self.end else self.options.limit
        return max(0.0, min(self.options.limit, left))

    def measure(self, system, batches):
        """One process tree for `batches`, and another one for what is left when it breaks."""
        env = {"PYTORCH_CUDA_ALLOC_CONF": self.options.allocator} if self.options.allocator else {}
        left = list(batches)
        while left:
            if self.limit() == 0:
                for batch in left:
                    self.record({"system": system, "batch": batch, "error": "not run: --total was used up"})
                return
            ready = False
            log = self.options.output / "logs" / f"{self.name}-{system}.log"
            try:
                with Program(self.command(system, left), log, self.gpus, env) as program:
                    for event in program.events(self.limit):
                        ready = ready or event["event"] == "ready"
                        if event["event"] in ("result", "failed"):
                            left.remove(event["batch"])
                            self.record({"system": system} | {k: v for k, v in event.items() if k != "event"})
                if not left:
                    return
                raise Failed(f"ended without a result\n{program.log_end()}" if not ready else "ended without a result")
            except Failed as error:
                # What does not even start will not start for the next batch.
                for batch in left[:1] if ready else list(left):
                    left.remove(batch)
                    self.record({"system": system, "batch": batch, "error": str(error)})

    def record(self, entry):
        if "step_seconds" in entry:
            entry["tokens_per_second"] = entry["batch"] * self.options.length / entry["step_seconds"]
        self.results["measurements"].append(entry)
        self.results["machine"]["memory_bytes"] = machine.describe(0)["memory_bytes"]  # Some machines grow with use.
        report.write(self.options.output, self.name, self.results)
        head = f"[{time.monotonic() - self.options.start:4.0f} s] batch {entry['batch']:3d} {entry['system']}: "
        if "error" in entry:
            say(head + "FAILED: " + entry["error"])
            return
        gib = lambda value: "-" if value is None else f"{value / GIB:.1f}"  # noqa: E731
        say(head + f"{entry['step_seconds']:.3f} s a step, {entry['tokens_per_second']:,.0f} tokens/s, GPU "
            f"{gib(report.gpu_bytes(entry))} GiB, host {gib(report.host_bytes(entry))} GiB (whole machine "
            f"{gib(entry['peaks'].get('machine_bytes'))}), loss {entry['loss']:.3f}")

    def run(self):
        say(machine.sentence(self.results["machine"]))
        say(f"{self.name}: {self.results['parameters'] / 1e9:.2f} billion parameters, batches {self.options.batches}, "
            f"systems {', '.join(self.columns())}")
        if self.options.grouped:
            for system in self.columns():
                self.measure(system, self.options.batches)
        else:
            for batch in self.options.batches:
                for system in self.columns():
                    self.measure(system, [batch])
        say("\n" + report.markdown(self.results) + f"\n{self.options.output / self.name}.json, .md")


def some_of(choices):
    def read(text):
        parts = [part for part in text.split(",") if part]
        if not parts or any(part not in choices for part in parts):
            raise argparse.ArgumentTypeError(f"some of {','.join(choices)}, with commas")
        return parts
    return read


def counts(text):
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise argparse.ArgumentTypeError("different numbers from 1, with commas")
    return numbers


def budgets(text):
    parts = text.split(",")
    if any(not re.fullmatch(r"all|\d+(\.\d+)?(GiB|MiB|GB|MB)", part) for part in parts):
        raise argparse.ArgumentTypeError("such as all,24GiB")
    return parts


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oom", type=pathlib.Path, metavar="FOLDER", help="package of OOM; needed by the system oom")
    parser.add_argument("--geometry", choices=sorted(geometry.PUBLISHED), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="default 8, of mixtral 2, of hybrids a period of their mixers")
    parser.add_argument("--length", type=int, default=4096, help="tokens a sequence (4096)")
    parser.add_argument("--document-tokens", type=int, metavar="N",
                        help="OOM alone: also with packed documents of mean length N; default: a document a sequence")
    parser.add_argument("--batches", type=counts, default=[4, 8, 16, 32], help="sequences a step (4,8,16,32)")
    parser.add_argument("--budgets", type=budgets, default=["all", "24GiB"], help="of OOM's GPU memory (all,24GiB)")
    parser.add_argument("--systems", type=some_of(("fsdp2", "gpu", "oom")), default=["fsdp2", "gpu", "oom"])
    parser.add_argument("--clip", type=float, default=0.0, help="global norm to clip at in all systems; 0: none")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (3)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results", metavar="FOLDER")
    parser.add_argument("--work", type=pathlib.Path, metavar="FOLDER", help="for model, data, jobs; default: temporary")
    parser.add_argument("--grouped", action="store_true",
                        help="one process tree a system for all batches: fewer starts, not interleaved")
    parser.add_argument("--limit", type=float, default=240, help="seconds that a start or a measurement may take (240)")
    parser.add_argument("--total", type=float, default=0, help="seconds after which nothing more is measured; 0: none")
    parser.add_argument("--host-memory", help="what oomd may give to jobs, such as 110GiB; default: its own rule")
    parser.add_argument("--allocator", default=ALLOCATOR, help="PYTORCH_CUDA_ALLOC_CONF of the peer; '' for none")
    parser.add_argument("--peer-options", default="", help="more options of peers/fsdp2.py, in one text")
    parser.add_argument("--peer", type=pathlib.Path, default=HERE / "peers/fsdp2.py", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_const", const="tiny", dest="geometry", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if "oom" in options.systems and (options.oom is None or not (options.oom / "bin/oomd").exists()):
        parser.error("--oom: names the folder of a package, with bin/oomd and bin/oom in it")
    if options.document_tokens is not None and (options.document_tokens < 2 or options.systems != ["oom"]):
        parser.error("--document-tokens: at least 2, and with --systems oom, for the peer knows no documents")
    if options.warmup < 2 or options.steps < 1:
        parser.error("--warmup is at least 2, --steps at least 1")
    if any(batch % options.gpus for batch in options.batches):
        parser.error("--batches: each is divided by the number of GPUs")
    options.output = options.output.resolve()
    return options


def main():
    options = parse()
    options.start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Contexts end what they have started.
    work = pathlib.Path(options.work or tempfile.mkdtemp(prefix="oom-bench-")).resolve()
    try:
        run = Run(options, work)
        run.run()
    finally:
        # Of a program that was killed.
        for line in pathlib.Path("/proc/mounts").read_text().splitlines()[::-1]:
            if line.split()[1].startswith(f"{work}/"):
                subprocess.run(["umount", "-l", line.split()[1]], capture_output=True)
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    return 0 if any("step_seconds" in entry for entry in run.results["measurements"]) else 1


if __name__ == "__main__":
    sys.exit(main())
