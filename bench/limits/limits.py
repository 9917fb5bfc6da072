#!/usr/bin/env python3
"""Measures this machine with torch alone: what a step can be held against.

    bench/limits/limits.py [--output FILE.json]

GPU: copies between pinned host memory and the device, each way, both at once, and while the host's cores copy memory;
copies within the device (bytes read + written); bf16 matrix products. Host: reading, copying and scaling in place with
all cores. GB/s are 10^9 bytes a second; of a host copy they count bytes read + written, though ordinary stores also read
what they overwrite. Prints a table, then JSON. About half a minute.
"""

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import statistics
import threading
import time

import torch

GIB = 2**30


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return None


def driver_version():
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        buffer = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(buffer, 96) == 0:
            return buffer.value.decode()
    except OSError:
        pass
    return None


def describe(device):
    memory = next(int(line.split()[1]) * 1024 for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
                  if line.startswith("MemTotal:"))
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "gpu": torch.cuda.get_device_name(device) if device is not None else None, "driver": driver_version(),
            "cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory, "torch": torch.__version__}


def median_seconds(work, repeats, wait=lambda: None):
    """Of one call of `work`, after one that does not count."""
    work()
    wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class HostCopier(threading.Thread):
    """Copies host memory with all cores until it is stopped; counts what it did."""

    def __init__(self, source, target):
        super().__init__(daemon=True)
        self.source, self.target = source, target
        self.copied_bytes = 0
        self.ending = False

    def run(self):
        while not self.ending:
            self.target.copy_(self.source)
            self.copied_bytes += 2 * self.source.nbytes

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ending = True
        self.join()


class Host:
    def __init__(self, size):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.source = torch.ones(size // 4, dtype=torch.float32)
        self.target = torch.zeros_like(self.source)

    def measure(self, repeats):
        size = self.source.nbytes
        yield "host read", size / median_seconds(self.source.sum, repeats)
        yield "host copy (read + written)", 2 * size / median_seconds(lambda: self.target.copy_(self.source), repeats)
        yield "host scale in place (read + written)", 2 * size / median_seconds(lambda: self.target.mul_(1.0), repeats)

    def copier(self):
        return HostCopier(self.source, self.target)


class Gpu:
    """Transfers of pinned buffers, each on `streams` streams a direction."""

    def __init__(self, device, size, streams):
        self.device = device
        part = size // streams
        self.host_out = [torch.ones(part, dtype=torch.uint8, pin_memory=True) for _ in range(streams)]
        self.host_in = [torch.ones(part, dtype=torch.uint8, pin_memory=True) for _ in range(streams)]
        self.device_in = [torch.zeros(part, dtype=torch.uint8, device=device) for _ in range(streams)]
        self.device_out = [torch.ones(part, dtype=torch.uint8, device=device) for _ in range(streams)]
        self.streams = [torch.cuda.Stream(device) for _ in range(2 * streams)]
        self.bytes = part * streams

    def copies(self, h2d, d2h, times=4):
        """The work of one measurement, and its bytes."""
        half = len(self.streams) // 2

        def work():
            for _ in range(times):
                for i in range(half):
                    if h2d:
                        with torch.cuda.stream(self.streams[i]):
                            self.device_in[i].copy_(self.host_out[i], non_blocking=True)
                    if d2h:
                        with torch.cuda.stream(self.streams[half + i]):
                            self.host_in[i].copy_(self.device_out[i], non_blocking=True)
        return work, (bool(h2d) + bool(d2h)) * times * self.bytes

    def rate(self, repeats, h2d=False, d2h=False):
        work, moved = self.copies(h2d, d2h)
        return moved / median_seconds(work, repeats, lambda: torch.cuda.synchronize(self.device))

    def rate_beside(self, host, seconds, h2d=False, d2h=False):
        """(GB/s of the transfers, GB/s of the host's copies), both going on all the time."""
        work, moved = self.copies(h2d, d2h)
        with host.copier() as copier:
            work()
            torch.cuda.synchronize(self.device)
            done, copied, start = 0, copier.copied_bytes, time.perf_counter()
            while time.perf_counter() - start < seconds:
                work()
                torch.cuda.synchronize(self.device)
                done += moved
            elapsed = time.perf_counter() - start
            return done / elapsed, (copier.copied_bytes - copied) / elapsed


def device_copy_rate(device, size, repeats):
    source, target = torch.ones(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)

    def work():
        for _ in range(8):
            target.copy_(source)
    return 8 * 2 * size / median_seconds(work, repeats, lambda: torch.cuda.synchronize(device))


def matrix_rate(device, size, repeats):
    """FLOP/s of square products. Random values: of zeros they would be faster."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    wait = lambda: torch.cuda.synchronize(device)  # noqa: E731

    def work():
        for _ in range(10):
            torch.mm(a, b, out=out)
    return 10 * 2 * size**3 / median_seconds(work, repeats, wait)


def measure(options):
    """Yields (what, value in 10^9 bytes or 10^12 operations a second, unit)."""
    host = Host(options.host_size)
    for what, value in host.measure(options.repeats):
        yield what, value / 1e9, "GB/s"
    if options.device == "cpu":
        return
    device = torch.device("cuda", options.gpu)
    torch.cuda.set_device(device)
    for streams in (1, 2, 4):
        gpu = Gpu(device, options.size, streams)
        of = f"{streams} stream{'s' if streams > 1 else ''} a direction"
        yield f"H2D, {of}", gpu.rate(options.repeats, h2d=True) / 1e9, "GB/s"
        yield f"D2H, {of}", gpu.rate(options.repeats, d2h=True) / 1e9, "GB/s"
        yield f"H2D + D2H at once, {of}", gpu.rate(options.repeats, h2d=True, d2h=True) / 1e9, "GB/s"
        if streams == 1:
            for name, ways in (("H2D", {"h2d": True}), ("D2H", {"d2h": True}), ("H2D + D2H", {"h2d": True, "d2h": True})):
                transfer, copy = gpu.rate_beside(host, options.seconds, **ways)
                yield f"{name} while the host copies", transfer / 1e9, "GB/s"
                yield f"host copy beside {name}", copy / 1e9, "GB/s"
        del gpu
    yield "device copy (read + written)", device_copy_rate(device, 4 * GIB, options.repeats) / 1e9, "GB/s"
    yield "bf16 matrix product, 8192^3", matrix_rate(device, 8192, options.repeats) / 1e12, "TFLOP/s"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement beside the host's copies")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="also for the JSON")
    parser.add_argument("--size", type=int, default=GIB, help=argparse.SUPPRESS)
    parser.add_argument("--host-size", type=int, default=2 * GIB, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("limits: no GPU here")
    machine = describe(None if options.device == "cpu" else options.gpu)
    print(f"{machine['gpu'] or 'no GPU'}, driver {machine['driver']}; {machine['cores']} cores of {machine['cpu']}, "
          f"{machine['memory_bytes'] / GIB:.0f} GiB; torch {machine['torch']}; {machine['date']}\n", flush=True)
    print("| what | measured |\n| --- | --- |", flush=True)
    values = []
    for what, value, unit in measure(options):
        values.append({"what": what, "value": value, "unit": unit})
        print(f"| {what} | {value:,.1f} {unit} |", flush=True)
    text = json.dumps({"schema": 1, "machine": machine, "limits": values}, indent=1)
    print("\n" + text, flush=True)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
