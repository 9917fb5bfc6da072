#!/usr/bin/env python3
"""Measures this machine with torch alone: what a step can be held against.

    bench/limits/limits.py [--output FILE.json]

GPU: copies between pinned host memory and the device, each way, both at once, and while the host copies memory; copies
within the device (bytes read + written); bf16 matrix products. Host: reading, copying and scaling in place with all
cores; and the traffic of an AdamW update (26 bytes a parameter) alone, beside transfers as fast as they go, and beside
as many as a step has for each parameter. What goes on beside transfers leaves two cores free. GB/s are 10^9 bytes a
second; of a host copy they count bytes read + written, though ordinary stores also read what they overwrite. Prints a
table, then JSON, whose keys bench/roofline reads. About half a minute.
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

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # Hugepages, as the pools of OOM have.

import torch  # noqa: E402

GIB = 2**30
# Of a streamed parameter in a step: the update reads weight, low bits, moments and gradient and writes all but the
# gradient; its weight goes to the device in the forward and in the backward, its gradient comes back.
UPDATE_BYTES, H2D_BYTES, D2H_BYTES = 26, 4, 2


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


class HostWork(threading.Thread):
    """Repeats `work`, which uses host memory, until it is stopped; counts the bytes."""

    def __init__(self, work, work_bytes):
        super().__init__(daemon=True)
        self.work, self.work_bytes = work, work_bytes
        self.done_bytes = 0
        self.ending = False

    def run(self):
        while not self.ending:
            self.work()
            self.done_bytes += self.work_bytes

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ending = True
        self.join()


class Host:
    """Plain passes with all cores."""

    def __init__(self, size):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.source = torch.ones(size // 4, dtype=torch.float32)
        self.target = torch.zeros_like(self.source)

    def measure(self, repeats):
        size = self.source.nbytes
        yield "host_read", "host read", size / median_seconds(self.source.sum, repeats)
        yield ("host_copy", "host copy (read + written)",
               2 * size / median_seconds(lambda: self.target.copy_(self.source), repeats))
        yield ("host_scale", "host scale in place (read + written)",
               2 * size / median_seconds(lambda: self.target.mul_(1.0), repeats))

    def copying(self):
        return HostWork(lambda: self.target.copy_(self.source), 2 * self.source.nbytes)


class Update:
    """The bytes of an AdamW update, without its arithmetic: 12 a parameter of state in place, a gradient of 2 read. On
    all cores but two, as OOM's optimizer."""

    PIECES = 4  # Passes go through them in turn: a piece is larger than any cache.

    def __init__(self, parameters):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 2))
        self.piece_parameters = parameters // self.PIECES
        self.state = torch.ones(self.PIECES, 3 * self.piece_parameters)
        self.gradient = torch.ones(self.PIECES, self.piece_parameters // 2)
        self.bytes = UPDATE_BYTES * self.piece_parameters
        self.next = 0

    def __call__(self):
        """One piece."""
        state, gradient = self.state[self.next], self.gradient[self.next]
        state[:len(gradient)].add_(gradient)
        state[len(gradient):].mul_(1.0)
        self.next = (self.next + 1) % self.PIECES

    def rate(self, repeats):
        """Parameters a second."""
        def work():
            for _ in range(self.PIECES):
                self()
        return self.PIECES * self.piece_parameters / median_seconds(work, repeats)

    def working(self):
        return HostWork(self, self.bytes)


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

    def rate_beside(self, host_work, seconds, h2d=False, d2h=False):
        """Bytes a second of (the transfers, the host's work), both going on all the time."""
        work, moved = self.copies(h2d, d2h)
        with host_work:
            work()
            torch.cuda.synchronize(self.device)
            done, host_done, start = 0, host_work.done_bytes, time.perf_counter()
            # At least one pass of the host's, however long it takes.
            while time.perf_counter() - start < seconds or host_work.done_bytes == host_done:
                work()
                torch.cuda.synchronize(self.device)
                done += moved
            elapsed = time.perf_counter() - start
            return done / elapsed, (host_work.done_bytes - host_done) / elapsed

    def rate_of_step(self, update, repeats):
        """Parameters a second when each is updated, goes to the device twice and comes back once. One stream a
        direction; transfers of a piece run beside its update."""
        at = [0, 0]

        def copy(direction, size):
            source, target = ((self.host_out[0], self.device_in[0]), (self.device_out[0], self.host_in[0]))[direction]
            with torch.cuda.stream(self.streams[direction]):
                while size > 0:
                    part = min(size, len(source) - at[direction])
                    piece = slice(at[direction], at[direction] + part)
                    target[piece].copy_(source[piece], non_blocking=True)
                    at[direction] = (at[direction] + part) % len(source)
                    size -= part

        def work():
            for _ in range(update.PIECES):
                copy(0, H2D_BYTES * update.piece_parameters)
                copy(1, D2H_BYTES * update.piece_parameters)
                update()
                torch.cuda.synchronize(self.device)
        return update.PIECES * update.piece_parameters / median_seconds(work, repeats)


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


def measure_contention(gpu, host, update, options):
    both = {"h2d": True, "d2h": True}
    for key, name, ways in (("h2d", "H2D", {"h2d": True}), ("d2h", "D2H", {"d2h": True}), ("both", "H2D + D2H", both)):
        transfer, copy = gpu.rate_beside(host.copying(), options.seconds, **ways)
        yield f"{key}_beside_host_copy", f"{name} while the host copies", transfer / 1e9, "GB/s"
        yield f"host_copy_beside_{key}", f"host copy beside {name}", copy / 1e9, "GB/s"
    transfer, updated = gpu.rate_beside(update.working(), options.seconds, **both)
    yield "both_beside_update", "H2D + D2H while the host updates", transfer / 1e9, "GB/s"
    yield "update_beside_both", "update beside H2D + D2H", updated / UPDATE_BYTES / 1e9, "Gparam/s"
    yield "dram_update_beside_both", "DRAM, the two together", (transfer + updated) / 1e9, "GB/s"
    step = gpu.rate_of_step(update, options.repeats)
    yield "step_update", "update beside the transfers of a step", step / 1e9, "Gparam/s"
    yield "dram_step", "DRAM, the same", step * (UPDATE_BYTES + H2D_BYTES + D2H_BYTES) / 1e9, "GB/s"


def measure_gpu(device, host, update, options):
    for streams in (1, 2, 4):
        gpu = Gpu(device, options.size, streams)
        of = f"{streams} stream{'s' if streams > 1 else ''} a direction"
        for key, name, ways in (("h2d", "H2D", {"h2d": True}), ("d2h", "D2H", {"d2h": True}),
                                ("both", "H2D + D2H at once", {"h2d": True, "d2h": True})):
            yield f"{key}_{streams}", f"{name}, {of}", gpu.rate(options.repeats, **ways) / 1e9, "GB/s"
        if streams == 1:
            yield from measure_contention(gpu, host, update, options)
        del gpu
    rate = device_copy_rate(device, 4 * options.size, options.repeats)
    yield "device_copy", "device copy (read + written)", rate / 1e9, "GB/s"
    rate = matrix_rate(device, options.product, options.repeats)
    yield "product", f"bf16 matrix product, {options.product}^3", rate / 1e12, "TFLOP/s"


def measure(options):
    """Yields (key, what, value in 10^9 bytes or parameters or 10^12 operations a second, unit)."""
    host = Host(options.host_size)
    for key, what, value in host.measure(options.repeats):
        yield key, what, value / 1e9, "GB/s"
    update = Update(options.host_size // 8)
    alone = update.rate(options.repeats)
    yield "update", "update, 26 bytes a parameter", alone / 1e9, "Gparam/s"
    yield "dram_update", "DRAM, the same", alone * UPDATE_BYTES / 1e9, "GB/s"
    if options.device == "cuda":
        device = torch.device("cuda", options.gpu)
        torch.cuda.set_device(device)
        yield from measure_gpu(device, host, update, options)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement beside the host's work")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="also for the JSON")
    parser.add_argument("--product", type=int, default=8192, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=GIB, help=argparse.SUPPRESS)
    parser.add_argument("--host-size", type=int, default=2 * GIB, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main():
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("limits: no GPU here")
    machine = describe(None if options.device == "cpu" else options.gpu)
    print(f"{machine['gpu'] or 'no GPU'}, driver {machine['driver']}; {machine['cores']} cores of {machine['cpu']}, "
          f"{machine['memory_bytes'] / GIB:.0f} GiB; torch {machine['torch']}; {machine['date']}\n", flush=True)
    print("| what | measured |\n| --- | --- |", flush=True)
    values = []
    for key, what, value, unit in measure(options):
        values.append({"key": key, "what": what, "value": value, "unit": unit})
        print(f"| {what} | {value:,.1f} {unit} |", flush=True)
    text = json.dumps({"schema": 1, "machine": machine, "limits": values}, indent=1)
    print("\n" + text, flush=True)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
