#!/usr/bin/env python3
"""OOM under measurement: a private oomd from a package, one job a batch, its step log.

    oom.py --package FOLDER --model FOLDER --data FOLDER --work FOLDER --batches 4,8 [--budget 24GiB] [--clip 1.0]

One event a batch (processes.py). A job would go on for ever: it is cancelled, without a checkpoint, as soon as its timed
steps and the traced ones right behind them are over and OOM has written their trace.
"""

import argparse
import contextlib
import gzip
import importlib.util
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from geometry import parameter_count  # noqa: E402
from processes import say  # noqa: E402

FINAL_STATES = {"SUCCEEDED", "FAILED", "CANCELLED"}
TRACED_STEPS = 2
TRACE = "trace/steps.json"  # In the output folder; it appears whole.
TRACE_SECONDS = 30
ENDLESS_STEPS = 1_000_000
KEPT_CHECKPOINTS = 2  # The least that a job may ask for.
CHECKPOINT_BYTES_PER_PARAMETER = 12.25


class JobFailed(Exception):
    pass


def torch_libraries():
    """What the package's scripts would look for at each call."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    torch = pathlib.Path(spec.submodule_search_locations[0])
    return ":".join(map(str, [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]))


class Daemon:
    """A private oomd with its home and log in `folder`. Use as a context.

    Its state is in a temporary folder: sockets are in there, whose paths may have 107 characters."""

    def __init__(self, package, folder, host_memory=None, start_seconds=60):
        self.bin = pathlib.Path(package).resolve() / "bin"
        self.folder = pathlib.Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state = pathlib.Path(tempfile.mkdtemp(prefix="oomd-"))
        socket = self.state / "oomd.sock"
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("OOMD_", "XDG_"))}
        self.env |= {"OOM_HOST": str(socket), "HOME": str(self.folder)}
        self.env.setdefault("OOM_TORCH_LIBRARIES", torch_libraries())
        command = [self.bin / "oomd", "--foreground", "--state-dir", self.state, "--socket", socket]
        if host_memory:
            command += ["--pool-capacity", host_memory]
        self.log_path = self.folder / "oomd.log"
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + start_seconds
        while self.oom("health", check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise JobFailed("oomd does not serve\n" + self.log_path.read_text(errors="replace")[-1500:])
            time.sleep(0.1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.state, ignore_errors=True)

    def oom(self, *arguments, check=True, timeout=150):
        result = subprocess.run([self.bin / "oom", *map(str, arguments)], env=self.env, stdin=subprocess.DEVNULL,
                                capture_output=True, text=True, timeout=timeout)
        if check and result.returncode != 0:
            raise JobFailed(f"oom {arguments[0]}: exit {result.returncode}: {result.stderr.strip()[-1500:]}")
        return result

    def get(self, name):
        return json.loads(self.oom("get", name, "-o", "json").stdout)

    def submit(self, path):
        return self.oom("submit", path, "-q", "-o", "name").stdout.strip().removeprefix("jobs/")

    def cancel(self, name):
        self.oom("cancel", name, "--now", check=False)
        self.oom("wait", name, "-q", check=False)


def job_failure(daemon, job):
    """The reason, and the ends of the logs."""
    text = [f"{job['state'].removeprefix('JOB_STATE_')} {job.get('reason', '')}: {job.get('message', '')}"]
    logs = sorted(pathlib.Path(job["spec"]["output"]).glob("logs/*/*.log"))
    for path in logs or daemon.state.glob(f"jobs/{job['uid']}/host.log"):
        text.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:]))
    return "\n".join(text)[-3000:]


class StepLog:
    """Reads steps.jsonl as it grows."""

    def __init__(self, output):
        self.path = pathlib.Path(output) / "steps.jsonl"
        self.lines, self.offset, self.rest = [], 0, ""

    def read(self):
        if self.path.exists():
            with open(self.path, encoding="utf-8") as file:
                file.seek(self.offset)
                text = file.read()
                self.offset = file.tell()
            *whole, self.rest = (self.rest + text).split("\n")
            self.lines += [json.loads(line) for line in whole if line]
        return self.lines


class Job:
    """A submitted job whose progress is followed. Checks its state every two seconds only: it is being measured."""

    def __init__(self, daemon, path, output):
        self.daemon, self.log = daemon, StepLog(output)
        self.submit_seconds = time.monotonic()
        self.name = daemon.submit(path)
        self.first_step_seconds = None
        self.next_look = 0.0

    def wait_steps(self, count, limit_seconds=None):
        """Until so many steps are logged. Raises JobFailed if the job ends before, or the limit is over."""
        end = time.monotonic() + (limit_seconds or math.inf)
        while len(self.log.read()) < count:
            if time.monotonic() >= end:
                raise JobFailed(f"no step {count} within {limit_seconds:.0f} s\n"
                                + job_failure(self.daemon, self.daemon.get(self.name)))
            if time.monotonic() >= self.next_look:
                job = self.daemon.get(self.name)
                if self.ended(job) and len(self.log.read()) < count:
                    raise JobFailed(job_failure(self.daemon, job))
                self.next_look = time.monotonic() + 2.0
            time.sleep(0.02)
            self._note_first()
        self._note_first()
        return self.log.lines[:count]

    def _note_first(self):
        if self.log.lines and self.first_step_seconds is None:
            self.first_step_seconds = time.monotonic() - self.submit_seconds

    @staticmethod
    def ended(job):
        # RECOVERING: its attempt failed, and jobs here have one.
        return job["state"].removeprefix("JOB_STATE_") in FINAL_STATES | {"RECOVERING"}

    def wait_file(self, path, seconds):
        """Until there is such a file of the job. False: not in time, or the job ended without it."""
        end = time.monotonic() + seconds
        while not path.exists():
            if time.monotonic() >= end or self.ended(self.daemon.get(self.name)):
                return path.exists()
            time.sleep(0.1)
        return True


class Output:
    """The output folder of a job that is cancelled before it writes a checkpoint. Use as a context.

    OOM refuses a job whose checkpoints would not fit. Where the disk lacks the room and mounting is allowed, a tmpfs
    promises it; elsewhere OOM says what is missing."""

    def __init__(self, folder, promised_bytes):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mounted = shutil.disk_usage(self.folder).free < promised_bytes and self._mount(promised_bytes)

    def _mount(self, size):
        if os.geteuid() != 0:
            return False
        command = ["mount", "-t", "tmpfs", "-o", f"size={int(size)}", "tmpfs", self.folder]
        return subprocess.run(command, capture_output=True).returncode == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.mounted:
            subprocess.run(["umount", "-l", self.folder], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def promised_bytes(model):
    """Room that OOM wants: one checkpoint more than are kept, for a new one is whole before the oldest goes."""
    parameters = parameter_count(json.loads((model / "config.json").read_text()))
    return 1.1 * (KEPT_CHECKPOINTS + 1) * CHECKPOINT_BYTES_PER_PARAMETER * parameters


def plan_summary(plan):
    """What of a plan explains a measurement."""
    estimate, memory = plan.get("estimate", {}), {}
    for item in estimate.get("memory", []):
        memory.setdefault(item["space"], {})[item["item"]] = int(item["bytes"])
    return {
        "memory_bytes": memory, "device_bytes_peak": int(estimate.get("deviceBytesPeak", 0)),
        "host_bytes_peak": int(estimate.get("hostBytesPeak", 0)),
        "step_seconds_lower_bound": estimate.get("stepSecondsLowerBound"),
        "resource_seconds": {item["resource"]: item.get("seconds", 0.0) for item in estimate.get("resources", [])},
        "resource_bytes": {item["resource"]: int(item.get("bytes", 0)) for item in estimate.get("resources", [])},
        "retained_mixers": sum(layer.get("retainMixer", False) for layer in plan.get("layers", [])),
        "retained_mixtures": sum(layer.get("retainMixture", False) for layer in plan.get("layers", [])),
        "update_mode": plan.get("updateMode", "").removeprefix("UPDATE_MODE_").lower(),
        "unit_count": len(plan["units"]),
        "resident_units": [unit["unit"] for unit in plan["units"] if unit.get("home") == "STATE_HOME_RESIDENT"],
        "device_boundaries": sum(layer.get("boundary") == "BOUNDARY_HOME_DEVICE" for layer in plan.get("layers", []))}


def write_job(path, options, batch, output, **changes):
    """`changes` replace whole keys."""
    settings = {
        "model": {"config": str(options.model / "config.json"), "initialize": "random"},
        "data": {"train": str(options.data), "shuffle": False}, "sequence_length": options.length, "global_batch": batch,
        "steps": ENDLESS_STEPS, "optimizer": {"learning_rate": 1e-5, "max_gradient_norm": options.clip},
        "precision": "bfloat16", "devices": {"kind": options.device, "count": options.gpus},
        "checkpoint": {"every_steps": 0, "keep": KEPT_CHECKPOINTS}, "retry": {"max_failures": 0}, "resume": "never",
        "output": str(output)}
    if options.budget != "all":
        settings["budgets"] = {"gpu_memory": options.budget}
    path.write_text(json.dumps(settings | changes, indent=1))
    return path


def keep_trace(trace, path):
    """Compressed, for they are large and few read them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(trace, "rb") as source, gzip.open(path, "wb") as target:
        shutil.copyfileobj(source, target)


def measure(daemon, options, batch):
    name = f"batch-{batch}"
    last = options.warmup + options.steps
    with Output(options.work / name, promised_bytes(options.model)) as output:
        path = write_job(options.work / f"{name}.yaml", options, batch, output.folder,
                         trace={"first_step": last + 1, "step_count": TRACED_STEPS})
        job = Job(daemon, path, output.folder)
        try:
            job.wait_steps(options.warmup - 1)
            say("measuring")
            lines = job.wait_steps(last)
            described = daemon.get(job.name)
            job.wait_steps(last + TRACED_STEPS)
            traced = job.wait_file(output.folder / TRACE, TRACE_SECONDS)
            say("measured")  # Behind the trace: sampling memory holds a step up.
            timed = lines[options.warmup:]
            seconds = sum(line["step_seconds"] for line in timed) / len(timed)
            result = {
                "batch": batch, "step_seconds": seconds, "steps": len(timed), "loss": lines[-1]["loss"],
                "slowest_step_seconds": max(line["step_seconds"] for line in timed),
                "exposed_wait_seconds": sum(line["exposed_wait_seconds"] for line in timed) / len(timed),
                "reported_gpu_bytes": max(line["gpu_bytes_peak"] for line in lines),
                "reported_host_bytes": max(line["host_bytes_peak"] for line in lines),
                "first_step_seconds": job.first_step_seconds, "plan": plan_summary(described["plan"])}
        finally:
            daemon.cancel(job.name)
        result["trace"] = None
        if traced and options.traces is not None:
            result["trace"] = f"{options.trace_name}-{name}.json.gz"
            keep_trace(output.folder / TRACE, options.traces / result["trace"])
        return result


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True, type=pathlib.Path)
    parser.add_argument("--model", required=True, type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--data", required=True, type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--work", required=True, type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--traces", type=pathlib.Path, help="folder for the traces")
    parser.add_argument("--trace-name", default="oom")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 16, 32])
    parser.add_argument("--budget", default="all", help="GPU memory, such as 24GiB; all: what there is")
    parser.add_argument("--host-memory", help="what oomd may give to jobs, such as 110GiB; default: its own rule")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Contexts take down what they have set up.
    options.work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(options.package, options.work / "oomd", options.host_memory))
        say("ready")
        for batch in options.batches:
            try:
                say("result", **measure(daemon, options, batch))
            except (JobFailed, subprocess.TimeoutExpired) as error:
                say("failed", batch=batch, error=str(error))


if __name__ == "__main__":
    main()
