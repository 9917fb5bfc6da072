"""Programs under measurement: each in a process tree of its own, with a limit, and what the tree holds while it runs.

A program talks by lines on its standard output, one JSON object each with an "event":
    {"event": "measuring"}                 warm, the timed steps begin: costly samples of memory pause. Answered by a line
    {"event": "measured"}                  they are over: memory is sampled. Answered by a line
    {"event": "result", "batch": 8, ...}   all of this batch
    {"event": "failed", "batch": 8, "error": "..."}
Everything else that it prints goes to its log. Every process of the tree carries a mark in its environment.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid

MARK = "OOM_BENCH_MARK"
GIB = 2**30


# What the tree holds.

def marked_processes(mark):
    """Processes with `mark` in their environment, zombies left out."""
    needle, found = f"{MARK}={mark}".encode(), []
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def _fields(path):
    """The "Name:  123 kB" lines of a file of /proc, in bytes."""
    fields = {}
    for line in pathlib.Path(path).read_text().splitlines():
        parts = line.split()
        if len(parts) == 3 and parts[2] == "kB":
            fields[parts[0].rstrip(":")] = fields.get(parts[0].rstrip(":"), 0) + int(parts[1]) * 1024
    return fields


def _shared_hugetlb(pid):
    """{file: bytes} of the mappings with shared hugetlb pages."""
    found, name = {}, None
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        parts = line.split()
        if not parts[0].endswith(":"):
            name = (parts[3], parts[4])  # Device and inode.
        elif parts[0] == "Shared_Hugetlb:" and parts[1] != "0":
            found[name] = found.get(name, 0) + int(parts[1]) * 1024
    return found


def tree_memory(mark):
    """PSS of the tree and its hugetlb pages, which the kernel counts in neither RSS nor PSS. Pages that several
    processes map count once: a file's largest mapper stands for all."""
    pss, private, shared = 0, 0, {}
    for pid in marked_processes(mark):
        with contextlib.suppress(OSError):
            fields = _fields(f"/proc/{pid}/smaps_rollup")
            pss += fields.get("Pss", 0)
            private += fields.get("Private_Hugetlb", 0)
            if fields.get("Shared_Hugetlb", 0):
                for name, size in _shared_hugetlb(pid).items():
                    shared[name] = max(shared.get(name, 0), size)
    return {"pss_bytes": pss, "hugetlb_bytes": private + sum(shared.values())}


def machine_memory_used():
    """Bytes of the whole machine that are in use; free hugetlb pages are not."""
    fields = _fields("/proc/meminfo")
    pages = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
                 if line.startswith("HugePages_"))
    free_hugetlb = int(pages.get("HugePages_Free", 0)) * fields.get("Hugepagesize", 0)
    return fields["MemTotal"] - fields["MemAvailable"] - free_hugetlb


class Gpus:
    """Memory of the GPUs by the driver's management library, idle when this is made. Without one every figure is None."""

    class _Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    def __init__(self, count):
        self.handles, self.library = [], None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self.library = library
        except OSError:
            pass
        for index in range(count if self.library else 0):
            handle = ctypes.c_void_p()
            if self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self.handles.append(handle)
        self.idle_bytes = self.used_bytes()

    def used_bytes(self):
        """Of the fullest GPU."""
        used = []
        for handle in self.handles:
            memory = self._Memory()
            if self.library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                used.append(memory.used)
        return max(used, default=None)

    def total_bytes(self):
        memory = self._Memory()
        if self.handles and self.library.nvmlDeviceGetMemoryInfo(self.handles[0], ctypes.byref(memory)) == 0:
            return memory.total
        return None

    def _text(self, call, *arguments):
        buffer = ctypes.create_string_buffer(128)
        return buffer.value.decode() if call(*arguments, buffer, 128) == 0 else None

    def name(self):
        return self._text(self.library.nvmlDeviceGetName, self.handles[0]) if self.handles else None

    def driver(self):
        return self._text(self.library.nvmlSystemGetDriverVersion) if self.library else None


class Sampler(threading.Thread):
    """Peaks of a tree's memory. GPU and machine figures are cheap and taken ten times a second. PSS walks every page
    (about a second at 100 GiB of small pages), so it is taken at most a tenth of the time, and not while paused."""

    def __init__(self, mark, gpus):
        super().__init__(daemon=True)
        self.mark, self.gpus = mark, gpus
        self.machine_start = machine_memory_used()
        self.lock = threading.Lock()
        self.tree_lock = threading.Lock()
        self.peaks = {}
        self.paused = False
        self.ended = threading.Event()

    def _raise(self, name, value):
        with self.lock:
            self.peaks[name] = max(self.peaks.get(name, 0), value)

    def sample_cheap(self):
        used = self.gpus.used_bytes()
        if used is not None:
            self._raise("gpu_bytes", used - self.gpus.idle_bytes)
        self._raise("machine_bytes", machine_memory_used() - self.machine_start)

    def pause(self):
        """Returns when no sample of the tree is under way."""
        self.paused = True
        with self.tree_lock:
            pass

    def sample_tree(self):
        with self.tree_lock:
            memory = tree_memory(self.mark)
        self._raise("host_bytes", memory["pss_bytes"] + memory["hugetlb_bytes"])
        self._raise("hugetlb_bytes", memory["hugetlb_bytes"])

    def run(self):
        next_tree = 0.0
        while not self.ended.wait(0.1):
            self.sample_cheap()
            start = time.monotonic()
            if not self.paused and start >= next_tree:
                self.sample_tree()
                next_tree = time.monotonic() + max(1.0, 9 * (time.monotonic() - start))

    def take(self):
        """The peaks since the last call."""
        with self.lock:
            peaks, self.peaks = self.peaks, {}
        return peaks

    def stop(self):
        self.ended.set()
        self.join()


# The program's side.

def say(event, **content):
    print(json.dumps({"event": event} | content), flush=True)
    if event in ("measuring", "measured"):
        sys.stdin.readline()  # At once where nobody answers.


# The measuring side.

class Failed(Exception):
    pass


class Program:
    """Runs `command` with its tree. Use as a context: at its end nothing of the tree is left."""

    def __init__(self, command, log_path, gpus, env=None):
        self.mark = uuid.uuid4().hex
        self.log_path = pathlib.Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(self.log_path, "a", encoding="utf-8", errors="replace")
        self.log_start = self.log_path.stat().st_size
        self.sampler = Sampler(self.mark, gpus)
        self.lines = queue.Queue()
        self.process = subprocess.Popen(
            list(map(str, command)), env=os.environ | (env or {}) | {MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, errors="replace",
            start_new_session=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.sampler.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def events(self, limit_seconds):
        """Yields its events, a result with the peaks of memory since the one before. Raises Failed when it ends with
        an error or is silent for longer than `limit_seconds()`, asked anew after each event."""
        limit = limit_seconds()
        deadline = time.monotonic() + limit
        while True:
            line = self._next_line(deadline)
            if line is None and self.process.poll() is None:
                raise Failed(f"not done within {limit:.0f} s\n{self.log_end()}")
            if line is None:
                if self.process.returncode != 0:
                    raise Failed(f"ended with {self.process.returncode}\n{self.log_end()}")
                return
            event = self._parse(line)
            if event is None:
                continue
            if event["event"] == "measuring":
                self.sampler.pause()
                self._answer()
            elif event["event"] == "measured":
                self.sampler.sample_tree()
                self.sampler.paused = False
                self._answer()
            else:
                self.sampler.paused = False
                if event["event"] == "result":
                    event["peaks"] = self.sampler.take()
                yield event
                limit = limit_seconds()
                deadline = time.monotonic() + limit

    def _next_line(self, deadline):
        """None: there is none before the deadline, or the program has ended. What it has started may keep the pipe open."""
        while True:
            ended = self.process.poll() is not None
            try:
                line = self.lines.get(timeout=max(0.0, min(0.2, deadline - time.monotonic())))
            except queue.Empty:
                if ended or time.monotonic() >= deadline:
                    return None
                continue
            if line is None:
                self.process.wait()
            return line

    def _answer(self):
        with contextlib.suppress(OSError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def _parse(self, line):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if "event" in event:
                    return event
        self.log.write(line)
        self.log.flush()
        return None

    def log_end(self, lines=12):
        self.log.flush()
        text = self.log_path.read_bytes()[self.log_start:].decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])[-3000:]

    def close(self):
        """First by asking, so that it can take down what it has started."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        end = time.monotonic() + 20
        while (left := marked_processes(self.mark)) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()
        self.sampler.stop()
        self.process.stdin.close()
        self.log.close()
