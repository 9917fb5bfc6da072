"""What an end-to-end test needs: a private oomd, tiny models, tiny packed data, job files, and what a run left behind.

    class MyTest(harness.NodeTest):
        def test_trains(self):
            model = harness.write_model(self.folder / "model")
            data = harness.write_data(self.folder / "train")
            job = harness.write_job(self.folder / "job.yaml", model=model, train=data, output="run", steps=3)
            run = self.node.train(job)
            self.assertEqual(sorted(run.steps()), [1, 2, 3])

The environment names the programs' folder, OOM_BIN. Nothing that a test started outlives it: every process carries a mark
in its environment, and Node.close() ends whoever still carries it.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
import uuid

from safetensors.numpy import load_file

from tiny_inputs import (FAMILIES, model_config, parameter_count, random_weights, tensor_shapes,  # noqa: F401
                         write_data, write_model)

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "tests/parity"))
BIN = pathlib.Path(os.environ.get("OOM_BIN", SOURCE / "build/bin")).resolve()
MARK = "OOM_E2E_MARK"
DEADLINE_SECONDS = 60
FINAL_STATES = {"SUCCEEDED", "FAILED", "CANCELLED"}
# Of steps.jsonl: what a clock or a machine decides.
MEASURED = {"step_seconds", "tokens_per_second", "exposed_wait_seconds", "gpu_bytes_peak", "host_bytes_peak"}


def wait_until(condition, what, seconds=DEADLINE_SECONDS, interval=0.02):
    """Returns the first true value of condition(). A look that is dear (a program that runs) is taken less often, so that
    looking leaves the cores to what is looked at."""
    end = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(max(interval, 4 * (now - began)))


# Jobs.

def job_settings(model, train, output, held_out=None, **changes):
    """The keys of a job file. `changes` replace whole keys; None removes one."""
    settings = {
        "model": {"path": str(model)}, "data": {"train": str(train), "shuffle": False}, "sequence_length": 32,
        "global_batch": 4, "steps": 5, "optimizer": {"learning_rate": 1e-3}, "precision": "float32",
        "devices": {"kind": "cpu", "count": 1}, "checkpoint": {"every_steps": 0, "keep": 2}, "resume": "never",
        "trace": {"step_count": 0}, "output": str(output)}
    if held_out is not None:
        settings["data"]["evaluation"] = str(held_out)
        settings["evaluation"] = {"every_steps": 0, "sequences": 16}
    settings |= changes
    return {key: value for key, value in settings.items() if value is not None}


def write_job(path, **settings):
    """`settings` as of job_settings(). JSON is YAML."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(job_settings(**settings), indent=1))
    return path


def read_job(path):
    return json.loads(pathlib.Path(path).read_text())


class Run:
    """The output folder of a job."""

    def __init__(self, output):
        self.output = pathlib.Path(output)

    def lines(self):
        path = self.output / "steps.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self):
        """The objects of steps.jsonl by step."""
        return {entry["step"]: entry for entry in self.lines()}

    def exact_steps(self):
        """The same without what a clock or a machine decides."""
        return {step: {key: value for key, value in entry.items() if key not in MEASURED}
                for step, entry in self.steps().items()}

    def losses(self):
        return [entry["loss"] for entry in self.lines()]

    def checkpoints(self):
        """Steps of the complete ones."""
        return sorted(int(path.parent.name[5:]) for path in self.output.glob("checkpoints/step-*/manifest.json"))

    def export_state(self, step=None):
        """Folder with master/, moment1/, moment2/ as `oom export --state` writes it."""
        name = "newest" if step is None else f"step-{step}"
        folder = self.output / "state" / name
        if not folder.exists():
            options = [] if step is None else ["--step", str(step)]
            result = program("oom", "export", self.output, "--state", "--output", folder, *options)
            if result.returncode != 0:
                raise AssertionError(f"oom export --state: {result.returncode}\n{result.stderr}")
        return folder

    def state(self, step=None):
        """{"master": {name: array}, "moment1": ..., "moment2": ...} of a checkpoint."""
        folder = self.export_state(step)
        return {kind: load_tensors(folder / kind) for kind in ("master", "moment1", "moment2")}

    def log(self, name="jobhost", attempt=1):
        return (self.output / f"logs/attempt-{attempt}/{name}.log").read_text(errors="replace")

    def plan(self):
        return json.loads((self.output / "plan.json").read_text())


def load_tensors(folder):
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def different_tensors(a, b):
    """Names of two {name: array} whose bits differ, the missing ones too."""
    def same(x, y):
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name]))


# Processes.

def program(name, *arguments, env=None, timeout=300):
    """Runs one of the built programs to its end."""
    return subprocess.run([BIN / name, *map(str, arguments)], env=env, timeout=timeout, text=True, capture_output=True,
                          stdin=subprocess.DEVNULL)


def processes_with(text):
    """Processes whose environment or command line holds `text`: {pid: name of the program}."""
    found, needle = {}, text.encode()
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (place / "environ").read_bytes() or needle in (place / "cmdline").read_bytes():
                command = (place / "cmdline").read_bytes().split(b"\0")[0].decode()
                if command:  # A zombie has none.
                    found[int(place.name)] = pathlib.Path(command).name
    return found


class CommandFailed(AssertionError):
    def __init__(self, arguments, result):
        super().__init__(f"oom {' '.join(map(str, arguments))}: exit {result.returncode}\n{result.stdout}{result.stderr}")
        self.result = result


class Node:
    """A private oomd with its state in `folder`. `flags` of oomd: backoff_initial="1s" is --backoff-initial 1s."""

    def __init__(self, folder, **flags):
        self.folder = pathlib.Path(folder)
        self.state_dir, self.socket = self.folder / "oomd", self.folder / "oomd.sock"
        self.flags = {"backoff_initial": "0.1s", "backoff_max": "1s", "log_level": "info"} | flags
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        self.env = {key: text for key, text in os.environ.items() if not key.startswith(("OOMD_", "OOM_HOST", "XDG_"))}
        # OMP_NUM_THREADS=1: summation order, and two busy cores.
        self.env |= {name: value, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "OOM_HOST": str(self.socket),
                     "OMP_NUM_THREADS": "1"}
        self.process = None
        self.log_path = self.folder / "oomd.log"
        self.start()

    def start(self):
        """Starts oomd, and returns when it serves. Also after kill()."""
        flags = [part for key, value in self.flags.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [BIN / "oomd", "--foreground", "--state-dir", self.state_dir, "--socket", self.socket, *flags],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)
        wait_until(self._serves, "oomd serves", interval=0.05)

    def _serves(self):
        if self.process.poll() is not None:
            raise AssertionError(f"oomd ended with {self.process.returncode}:\n{self.log()}")
        return self.socket.exists() and self.oom("health", check=None).returncode == 0

    def log(self):
        return self.log_path.read_text(errors="replace")

    def kill(self):
        """kill -9 of oomd alone."""
        self.process.kill()
        self.process.wait()

    def processes(self, name=None):
        """Pids of this node's processes, or of those of one program ("oom-worker")."""
        return [pid for pid, program_name in sorted(processes_with(self.mark).items()) if name in (None, program_name)]

    def close(self):
        """Ends everything that this node has started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

        def ended():
            left = self.processes()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left
        wait_until(ended, "the node's processes end")

    def oom(self, *arguments, check=0, timeout=300):
        """Runs `oom`. Raises CommandFailed unless it exits with `check`; None: any."""
        result = program("oom", *arguments, env=self.env, timeout=timeout)
        if check is not None and result.returncode != check:
            raise CommandFailed(arguments, result)
        return result

    def get(self, name):
        """The job as an object of the API."""
        return json.loads(self.oom("get", name, "-o", "json").stdout)

    def state(self, name):
        return self.get(name)["state"].removeprefix("JOB_STATE_")

    def plan(self, job):
        """What `oom plan` makes of a job file: a plan to edit, without its estimate's bearing on anything."""
        return json.loads(self.oom("plan", job, "-o", "json").stdout)

    def write_plan(self, path, job, edit=None):
        """Writes the plan of `job`, edited, for `plan:` of a job. One LibTorch thread a worker."""
        plan = self.plan(job) | {"workerThreads": 1}
        if edit:
            edit(plan)
        path = pathlib.Path(path)
        path.write_text(json.dumps(plan))
        return path

    def submit(self, job, *options):
        """Returns the job's name."""
        name = self.oom("submit", job, "-q", "-o", "name", *options).stdout.strip()
        return name.removeprefix("jobs/")

    def wait(self, name, check=0, timeout=240):
        return self.oom("wait", name, "-q", check=check, timeout=timeout)

    def wait_for(self, name, condition, what, seconds=DEADLINE_SECONDS):
        """Polls the job until condition(job)."""
        def look():
            job = self.get(name)
            return job if condition(job) else None
        return wait_until(look, f"{name}: {what}", seconds, interval=0.1)

    def train(self, job, *options, check=0):
        """Submits, waits for the end (or the exit code `check`), returns the Run."""
        name = self.submit(job, *options)
        result = self.wait(name, check=None)
        if result.returncode != check:
            raise AssertionError(f"{name}: exit {result.returncode}\n{self.failure(name)}")
        return Run(self.output_of(name))

    def output_of(self, name):
        return pathlib.Path(self.get(name)["spec"]["output"])

    def failure(self, name):
        """For an assertion's text: the reason, and the ends of the logs."""
        job = self.get(name)
        text = [f"{job.get('state')} {job.get('reason', '')}: {job.get('message', '')}"]
        for path in sorted(pathlib.Path(job["spec"]["output"]).glob("logs/*/*.log")):
            text.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "\n".join(text)

    def metrics(self):
        """{series: value} of the Prometheus endpoint; a series is written with its labels."""
        address = re.findall(r"metrics on (\S+)", self.log())[-1]
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {series: float(value) for series, value in pairs}


class FolderTest(unittest.TestCase):
    """A temporary folder a test class, removed at its end; kept where OOM_E2E_KEEP is set."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="oom-e2e-"))
        if os.environ.get("OOM_E2E_KEEP"):
            print(f"{cls.__name__}: {cls.folder}", file=sys.stderr)
        else:
            cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)


class NodeTest(FolderTest):
    """One oomd a test class: `self.node`, with its files in `self.folder`."""

    node_flags = {}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.node = Node(cls.folder / "node", **cls.node_flags)
        cls.addClassCleanup(cls.node.close)


def main():
    unittest.main(verbosity=2)
