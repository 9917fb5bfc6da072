"""What the fault tests need beside tests/e2e/harness.py: a daemon that is killed and comes back, processes and memory
seen from outside, and a job of tiny steps that each test changes where it matters.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "tests/e2e"))

import harness  # noqa: E402
from harness import BIN, wait_until  # noqa: E402

EXIT_NO_DAEMON, EXIT_DENIED, EXIT_INVALID, EXIT_CONFLICT = 3, 5, 6, 7
EXIT_FAILED, EXIT_CANCELLED, EXIT_TIMEOUT, EXIT_DETACHED = 10, 11, 124, 130


def poll(condition, what, seconds=harness.DEADLINE_SECONDS):
    return wait_until(condition, what, seconds, interval=0.005)


def command_line(pid):
    try:
        return (pathlib.Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def children_of(pid):
    """Of its main thread, which is the one that starts the workers."""
    try:
        return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def memfds_of(pids):
    """Targets of the descriptors of anonymous files of these processes."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if "memfd:" in target:
                        found.append((pid, target))
    return found


def send(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class FaultNode(harness.Node):
    """`environment` is added to oomd's, and so to the job hosts'."""

    def __init__(self, folder, environment=None, **flags):
        self.extra = environment or {}
        super().__init__(folder, **({"backoff_initial": "20ms", "backoff_max": "50ms", "cpu_devices": "4",
                                     "pool_capacity": "4GiB"} | flags))

    def start(self):
        self.env |= self.extra
        super().start()

    def terminate(self, seconds=harness.DEADLINE_SECONDS):
        """SIGTERM of oomd; returns its exit code."""
        self.process.terminate()
        return self.process.wait(seconds)

    def host_of(self, uid):
        """The process number of a job's host, or None."""
        folder = self.state_dir / "jobs" / uid
        try:
            pid = int((folder / "host.pid").read_text().split()[0])
        except (OSError, IndexError):
            return None
        return pid if str(folder / "job.pb").encode() in command_line(pid) else None

    def workers_of(self, uid):
        """{rank: pid}"""
        ranks = {}
        for pid in children_of(self.host_of(uid)):
            words = command_line(pid)
            if b"--rank" in words:
                ranks[int(words[words.index(b"--rank") + 1])] = pid
        return ranks

    def popen(self, *arguments, **options):
        """`oom` in the background."""
        return subprocess.Popen([BIN / "oom", *map(str, arguments)], env=self.env, text=True,
                                stdin=subprocess.DEVNULL, **options)


class Watcher:
    """`oom watch -o jsonl` in the background, and its events so far."""

    def __init__(self, case, *arguments):
        self.path = case.folder / f"watch-{random.getrandbits(32):08x}.jsonl"
        with open(self.path, "wb") as out, open(f"{self.path}.messages", "wb") as messages:
            self.process = case.node.popen("watch", "-o", "jsonl", *arguments, stdout=out, stderr=messages)
        case.addCleanup(self.process.wait)
        case.addCleanup(self.process.kill)

    def events(self):
        text = self.path.read_text()
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def messages(self):
        return pathlib.Path(f"{self.path}.messages").read_text()

    def transitions(self):
        return [event for event in self.events() if event["kind"].endswith("TRANSITION")]

    def token(self):
        """Of the moment at which it was asked for."""
        return poll(lambda: next((event["resumeToken"] for event in self.events()
                                  if event["kind"].endswith("BOOKMARK")), None), "a bookmark")

    def brief(self):
        """(number of the event, job, state, reason)"""
        return [(int(event["sequence"]), event["job"]["name"].removeprefix("jobs/"),
                 event["job"]["state"].removeprefix("JOB_STATE_"), event["job"].get("reason", ""))
                for event in self.transitions()]


class FaultCase(unittest.TestCase):
    """A folder, a node and tiny jobs for each test."""

    flags = {}
    environment = {}

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oom-fault-"))
        if not os.environ.get("OOM_E2E_KEEP"):
            self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        harness.write_data(self.folder / "train")
        config = harness.model_config("qwen3_moe", dtype="float32")
        (self.folder / "config.json").write_text(json.dumps(config))
        self.node = FaultNode(self.folder / "node", self.environment, **self.flags)
        self.addCleanup(self.node.close)

    def job_file(self, name, /, **changes):
        """Two workers from random weights; `changes` replace whole keys, None removes one."""
        settings = harness.job_settings(
            model="", train=self.folder / "train", output=self.output(name), name=name, resume="auto",
            devices={"kind": "cpu", "count": 2}, checkpoint={"every_steps": 5, "keep": 2})
        settings["model"] = {"config": str(self.folder / "config.json"), "initialize": "random"}
        settings = {key: value for key, value in (settings | changes).items() if value is not None}
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(settings))
        return path

    def submit(self, name, /, **changes):
        """Returns what `oom get` says of it."""
        self.assertEqual(self.node.submit(self.job_file(name, **changes)), name)
        return self.node.get(name)

    def output(self, name):
        return self.folder / "runs" / name

    def steps(self, name):
        """The whole lines of the step log; a line may be half written."""
        path = self.output(name) / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def step_count(self, name):
        lines = self.steps(name)
        return lines[-1]["step"] if lines else 0

    def wait_steps(self, name, count, seconds=harness.DEADLINE_SECONDS):
        poll(lambda: self.step_count(name) >= count, f"step {count} of {name}", seconds)

    def wait_state(self, name, *states, seconds=harness.DEADLINE_SECONDS):
        def look():
            job = self.node.get(name)
            state = job["state"].removeprefix("JOB_STATE_")
            if state in harness.FINAL_STATES and state not in states:
                self.fail(f"{name} is not {states}: {self.node.failure(name)}")
            return job if state in states else None
        return wait_until(look, f"{name} is {' or '.join(states)}", seconds)

    def losses(self, name):
        lines = self.steps(name)
        self.assertEqual([line["step"] for line in lines], list(range(1, len(lines) + 1)),
                         "steps.jsonl has a gap or a repetition")
        return [line["loss"] for line in lines]

    def control(self, name, /, **changes):
        """The losses of an undisturbed run."""
        self.submit(name, **changes)
        self.node.wait(name, timeout=1200)
        return self.losses(name)

    def steps_for(self, seconds, **changes):
        """About how many steps of such a job take that long here and now: enough to be disturbed in."""
        self.control("measured", steps=40, **{key: value for key, value in changes.items() if key != "steps"})
        step_seconds = statistics.median(line["step_seconds"] for line in self.steps("measured")[10:])
        return max(100, min(5000, int(seconds / step_seconds)))

    def checkpoints(self, name):
        """Steps of those that have their name, the oldest first."""
        folder = self.output(name) / "checkpoints"
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(each[5:]) for each in names if each[5:].isdigit())

    def wait_new_checkpoint(self, name):
        """Until there is one that is newer than all of now; returns its step."""
        newest = max(self.checkpoints(name), default=0)
        return poll(lambda: max((step for step in self.checkpoints(name) if step > newest), default=0),
                    f"a checkpoint after step {newest}")

    def assert_nothing_left(self):
        """No process and no memory of any job, once all have ended."""
        wait_until(lambda: not self.node.processes("oom-jobhost") and not self.node.processes("oom-worker"),
                   "every process of the jobs ends")
        self.assertEqual(memfds_of(self.node.processes()), [])
