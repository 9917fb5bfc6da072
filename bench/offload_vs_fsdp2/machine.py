"""The machine in words: what a reader needs to judge a figure, and nothing that says whose machine it is."""

import datetime
import importlib.metadata
import os
import pathlib
import subprocess

from processes import GIB, Gpus


def _cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return None


def _memory_bytes():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def oom_version(package):
    try:
        answer = subprocess.run([pathlib.Path(package) / "bin/oom", "version"], capture_output=True, text=True, timeout=30)
        return answer.stdout.splitlines()[0].strip() if answer.stdout else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def describe(gpu_count):
    gpus = Gpus(gpu_count)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": gpus.name(), "gpu_count": len(gpus.handles), "gpu_memory_bytes": gpus.total_bytes(), "driver": gpus.driver(),
        "cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": _memory_bytes(),
        "torch": _version("torch"), "transformers": _version("transformers")}


def sentence(machine):
    gpu = "no GPU"
    if machine["gpu"]:
        gpu = f"{machine['gpu_count']} x {machine['gpu']} ({machine['gpu_memory_bytes'] / GIB:.0f} GiB, driver {machine['driver']})"
    return (f"{gpu}; {machine['cores']} cores of {machine['cpu']}, {machine['memory_bytes'] / GIB:.0f} GiB; "
            f"torch {machine['torch']}, transformers {machine['transformers']}; {machine['date']}")
