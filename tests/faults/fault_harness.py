"""A private oomd with tiny jobs, and looks at processes and files from outside.

Everything lives in one temporary folder. `Node` keeps the daemon; whatever of a test still runs at its end is killed by
process number: oomd, the job hosts of its state folder and their workers. The programs are those of OOM_BIN.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import numpy

BIN = pathlib.Path(os.environ.get("OOM_BIN", "build/bin")).resolve()
VOCABULARY = 256
# Generous: it only bounds how long a failing test takes.
LONG_SECONDS = 60.0

EXIT_FAILED = 10
EXIT_CANCELLED = 11

MODEL_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "hidden_act": "silu", "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY, "max_position_embeddings": 512, "tie_word_embeddings": False, "attention_bias": False,
    "use_sliding_window": False, "sliding_window": None,
}


def poll(condition, seconds=LONG_SECONDS, what="the condition", interval=0.005):
    """Returns the first true value of condition(), or fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(interval)


def write_dataset(folder, token_count=20001, vocabulary=VOCABULARY, seed=0, mask=True):
    """A packed dataset with some structure to learn."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    generator = numpy.random.default_rng(seed)
    steps = generator.integers(0, 7, token_count)
    tokens = numpy.zeros(token_count, numpy.uint32)
    value = 1
    for i in range(token_count):
        value = (value * 5 + int(steps[i])) % VOCABULARY
        tokens[i] = value
    cuts = numpy.sort(generator.choice(numpy.arange(1, token_count), token_count // 300, replace=False))
    documents = numpy.concatenate([[0], cuts, [token_count]]).astype(numpy.int64)
    numpy.save(folder / "tokens.npy", tokens)
    numpy.save(folder / "documents.npy", documents)
    if mask:
        numpy.save(folder / "loss_mask.npy", (generator.random(token_count) > 0.1).astype(numpy.uint8))
    (folder / "dataset.json").write_text(json.dumps(
        {"vocabulary_size": vocabulary, "tokens": token_count, "documents": len(documents) - 1}))


# ---- processes, read from /proc

def command_line(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def process_state(pid):
    """(state letter, parent) of a process, or None when it is gone."""
    try:
        rest = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return rest[0], int(rest[1])


def is_alive(pid):
    state = process_state(pid)
    return state is not None and state[0] not in "ZX"


def all_processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_of(parent):
    found = []
    for pid in all_processes():
        state = process_state(pid)
        if state is not None and state[1] == parent and state[0] not in "ZX":
            found.append(pid)
    return found


def memfd_holders(name_part):
    """(pid, target) of every descriptor of a memfd whose name holds `name_part`, in any process."""
    found = []
    for pid in all_processes():
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if "memfd:" in target and name_part in target:
                        found.append((pid, target))
    return found


def kill(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Answer:
    """What a run of `oom` gave."""

    def __init__(self, completed):
        self.code = completed.returncode
        self.out = completed.stdout
        self.error = completed.stderr

    def __repr__(self):
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.error}"


class Follower:
    """`oom watch -o jsonl` in the background; its events so far."""

    def __init__(self, node, arguments):
        self.path = node.folder / f"watch-{random.getrandbits(32):08x}.jsonl"
        with open(self.path, "wb") as out, open(str(self.path) + ".err", "wb") as error:
            self.process = subprocess.Popen([str(BIN / "oom"), "watch", "-o", "jsonl", *arguments],
                                            stdout=out, stderr=error, env=node.environment)

    def events(self):
        text = self.path.read_text()
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def transitions(self):
        return [event for event in self.events() if event["kind"].endswith("TRANSITION")]

    def wait(self, seconds=LONG_SECONDS):
        return self.process.wait(seconds)


class Node:
    """One oomd, which may die and come back, over one state folder."""

    def __init__(self, folder, settings=None, environment=None):
        self.folder = pathlib.Path(folder)
        self.state = self.folder / "state"
        self.socket = self.folder / "oomd.sock"
        self.settings = {"backoff-initial": "20ms", "backoff-max": "50ms", "cpu-devices": "4",
                         "pool-capacity": "4GiB", "metrics-port": "-1", **(settings or {})}
        self.environment = {**os.environ, "OOM_HOST": str(self.socket), "HOME": str(self.folder),
                            "OMP_WAIT_POLICY": "passive", **(environment or {})}
        self.daemon = None
        self.seen = set()

    def start(self, ephemeral=False):
        """Starts oomd and returns when it says that it is ready."""
        flags = [f"--{key}={value}" for key, value in self.settings.items()]
        if ephemeral:
            flags.append("--ephemeral")
        with open(self.folder / "oomd.log", "ab") as log:
            self.daemon = subprocess.Popen(
                [str(BIN / "oomd"), f"--state-dir={self.state}", f"--socket={self.socket}", *flags],
                stdout=subprocess.PIPE, stderr=log, env=self.environment, start_new_session=True)
        line = self.daemon.stdout.readline().decode()
        if not line.startswith("oomd ready"):
            raise AssertionError("oomd does not start:\n" + self.log()[-3000:])

    def log(self):
        return (self.folder / "oomd.log").read_text(errors="replace")

    def kill_daemon(self):
        self.daemon.kill()
        self.daemon.wait()
        self.daemon.stdout.close()

    def stop_daemon(self, seconds=LONG_SECONDS):
        self.daemon.terminate()
        code = self.daemon.wait(seconds)
        self.daemon.stdout.close()
        return code

    def oom(self, *arguments, seconds=LONG_SECONDS, **options):
        return Answer(subprocess.run([str(BIN / "oom"), *map(str, arguments)], capture_output=True, text=True,
                                     timeout=seconds, env=self.environment, check=False, **options))

    def get(self, job):
        answer = self.oom("get", job, "-o", "json")
        if answer.code != 0:
            raise AssertionError(f"get {job}: {answer}")
        return json.loads(answer.out)

    def state_of(self, job):
        return self.get(job)["state"].removeprefix("JOB_STATE_")

    def wait_state(self, job, *states, seconds=LONG_SECONDS):
        last = {}

        def reached():
            last.update(self.get(job))
            return last["state"].removeprefix("JOB_STATE_") in states
        try:
            poll(reached, seconds, f"{job} is {' or '.join(states)}", interval=0.02)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last.get('state')} {last.get('reason')} {last.get('message')}")
        return last

    def host_of(self, uid):
        """The process number of a job's host, or None."""
        for pid in all_processes():
            if str(self.state / "jobs" / uid / "job.pb").encode() in command_line(pid) and is_alive(pid):
                self.seen.add(pid)
                return pid
        return None

    def workers_of(self, uid):
        """{rank: pid} of the workers that live."""
        host = self.host_of(uid)
        ranks = {}
        for pid in children_of(host) if host else []:
            words = command_line(pid)
            if b"--rank" in words:
                ranks[int(words[words.index(b"--rank") + 1])] = pid
                self.seen.add(pid)
        return ranks

    def processes(self):
        """Job hosts of this state folder, and everything that they started, as far as it was seen."""
        root = str(self.state).encode()
        found = {pid for pid in self.seen if is_alive(pid) and
                 any(b"oom-" in word for word in command_line(pid)[:1])}
        for pid in all_processes():
            words = command_line(pid)
            if words and words[0].endswith(b"oom-jobhost") and any(root in word for word in words):
                found.add(pid)
                found.update(children_of(pid))
        return found

    def close(self):
        if self.daemon is not None and self.daemon.poll() is None:
            self.kill_daemon()
        for _ in range(3):
            for pid in self.processes():
                kill(pid)


class FaultCase(unittest.TestCase):
    """A node and tiny jobs for one test."""

    settings = {}
    environment = {}

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oom-fault-", dir=os.environ.get("OOM_TEST_TMP")))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
        write_dataset(self.folder / "train")
        self.node = self.new_node()

    def new_node(self, start=True):
        node = Node(self.folder, self.settings, self.environment)
        self.addCleanup(node.close)
        if start:
            node.start()
        return node

    def job_file(self, name, **changes):
        """Writes <name>.yaml: a float32 job of two workers. Nested changes as dictionaries replace a key."""
        spec = {
            "name": name, "model": {"config": "config.json", "initialize": "random"},
            "data": {"train": "train"}, "sequence_length": 32, "global_batch": 4, "steps": 10,
            "optimizer": {"learning_rate": 1e-3}, "schedule": {"kind": "constant"}, "precision": "float32",
            "devices": {"kind": "cpu", "count": 2}, "checkpoint": {"every_steps": 5, "keep": 2},
            "output": f"runs/{name}", **changes}
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps({key: value for key, value in spec.items() if value is not None}))
        return path

    def submit(self, name, **changes):
        """Submits a job; returns what `oom get` says of it."""
        answer = self.node.oom("submit", self.job_file(name, **changes))
        self.assertEqual(answer.code, 0, answer)
        return self.node.get(name)

    def output(self, name):
        return self.folder / "runs" / name

    def steps(self, name):
        """The whole lines of a job's step log."""
        try:
            text = (self.output(name) / "steps.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def step_count(self, name):
        return len(self.steps(name))

    def wait_steps(self, name, count, seconds=LONG_SECONDS):
        poll(lambda: self.step_count(name) >= count, seconds, f"step {count} of {name}")

    def checkpoints(self, name):
        """The steps of a job's checkpoints, the oldest first."""
        folder = self.output(name) / "checkpoints"
        if not folder.is_dir():
            return []
        return sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit())

    def control(self, name, **changes):
        """The losses of an undisturbed run."""
        self.submit(name, **changes)
        self.node.wait_state(name, "SUCCEEDED", "FAILED")
        self.assertEqual(self.node.state_of(name), "SUCCEEDED", self.node.get(name).get("message"))
        return self.losses(name)

    def losses(self, name):
        lines = self.steps(name)
        self.assertEqual([line["step"] for line in lines], list(range(1, len(lines) + 1)),
                         "steps.jsonl has a gap or a repetition")
        return [line["loss"] for line in lines]

    def assert_nothing_left(self, job, message=""):
        """No process and no memory of a job that has ended."""
        poll(lambda: self.node.host_of(job["uid"]) is None, what=f"the job host of {job['name']} ends")
        poll(lambda: not self.node.processes(), what=f"no process is left {message}")
        name = "oom-" + job["name"].removeprefix("jobs/") + "-"
        left = memfd_holders(name)
        mine = [(pid, target) for pid, target in left
                if pid == self.node.daemon.pid or str(self.node.state).encode() in b" ".join(command_line(pid))]
        self.assertEqual(mine, [], "memory of the job is still held")
