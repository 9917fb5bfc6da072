"""GPUs that are not there, too old, too few, lost, or somebody else's: a job that wants them is refused with the number and
with what to change, and the running job goes on. The driver's management library is a fake one (fake_nvml.cc); no GPU is
touched."""

import json
import os
import pathlib
import tempfile
import unittest

from bad_input_test import BadInputCase
from fault_harness import BIN, EXIT_FAILED

FAKE_LIBRARIES = pathlib.Path(os.environ["OOM_FAKE_NVML"]).parent
GIB = 1 << 30
# The machine's own.
os.environ.pop("CUDA_VISIBLE_DEVICES", None)


class GpuCase(BadInputCase):
    """`machine`: lines of the fake library's file."""

    machine = ()
    variables = {}

    def setUp(self):
        place = tempfile.TemporaryDirectory(prefix="oom-nvml-")
        self.addCleanup(place.cleanup)
        self.file = pathlib.Path(place.name) / "machine"
        self.describe(*self.machine)
        self.environment = {"LD_LIBRARY_PATH": self.libraries(place.name), "FAKE_NVML": str(self.file)} | self.variables
        super().setUp()

    def libraries(self, _place):
        return f"{FAKE_LIBRARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}"

    def describe(self, *lines):
        self.file.write_text("".join(f"{line}\n" for line in lines))

    def gpu_job(self, count=1, **changes):
        return self.job_file("gpu", **({"devices": {"kind": "cuda", "count": count}} | changes))

    def refuse(self, *words, count=1, **changes):
        return self.refused(self.gpu_job(count, **changes), *words)

    def gpu_message(self):
        """What `oom node` says beside its tables."""
        return self.node.oom("node").stderr


class NoDriver(GpuCase):
    def libraries(self, place):
        # Not a library: as if there were none.
        (pathlib.Path(place) / "libnvidia-ml.so.1").write_text("")
        return place + ":" + os.environ.get("LD_LIBRARY_PATH", "")

    def test_is_said(self):
        self.refuse("devices.count", "NOT_ENOUGH_DEVICES", "needs 1, 0 of 0 free", "no NVIDIA driver is installed", "580")
        # Who has no GPU is not told so at every look.
        self.assertNotIn("NVIDIA", self.gpu_message())


class DriverNotLoaded(GpuCase):
    machine = ("init_error 9",)

    def test_is_said(self):
        self.refuse("NOT_ENOUGH_DEVICES", "Driver Not Loaded (NVML error 9)", "modprobe nvidia")
        self.assertIn("modprobe nvidia", self.gpu_message())


class DriverMismatch(GpuCase):
    machine = ("init_error 18",)

    def test_is_said(self):
        self.refuse("NOT_ENOUGH_DEVICES", "NVML error 18", "reboot")


class OldDriver(GpuCase):
    machine = ("gpus 2", "driver 550.54.15", "cuda 12040")

    def test_is_said_with_both_versions(self):
        self.refuse("devices.count", "NOT_ENOUGH_DEVICES", "driver 550.54.15 offers CUDA 12.4", "needs CUDA 13.0", "580")
        self.assertIn("550.54.15", self.node.log())


class NoGpu(GpuCase):
    machine = ("gpus 0",)

    def test_is_said(self):
        self.refuse("NOT_ENOUGH_DEVICES", "the NVIDIA driver sees no GPU", "--gpus all")


class TooFew(GpuCase):
    machine = ("gpus 2",)

    def test_more_than_the_node_has(self):
        self.refuse("devices.count", "NOT_ENOUGH_DEVICES", "cuda devices: needs 4, 2 of 2 free", count=4)
        self.assertNotIn("NVIDIA driver", self.gpu_message())


class Hidden(GpuCase):
    machine = ("gpus 4",)
    variables = {"CUDA_VISIBLE_DEVICES": "2"}

    def test_more_than_oomd_may_see(self):
        self.refuse("NOT_ENOUGH_DEVICES", "needs 2, 1 of 1 free", 'CUDA_VISIBLE_DEVICES="2" leaves oomd 1 of 4 GPUs', count=2)


class Lost(GpuCase):
    machine = ("gpus 2", "gpu_error 1 15")

    def test_a_gpu_that_fell_off_the_bus_is_named(self):
        self.refuse("NOT_ENOUGH_DEVICES", "GPU 1 does not answer: GPU is lost (NVML error 15)", "XID",
                    "nvidia-smi --gpu-reset -i 1", count=2)
        self.assertIn("GPU 1 does not answer", self.gpu_message())
        self.node.oom("plan", self.gpu_job())  # The other one can be used.


class UsedByOthers(GpuCase):
    machine = ("gpus 1", f"memory {16 * GIB}", f"used 0 {16 * GIB - GIB // 2}")

    def test_what_others_hold_is_not_planned_with(self):
        self.refuse("budgets.gpu_memory", "OUT_OF_GPU_MEMORY", "needs at least", "512.0 MiB are free",
                    "other processes hold 15.5 GiB of GPU 0's 16.0 GiB", "nvidia-smi", "CUDA_VISIBLE_DEVICES")
        # Once they are gone, nothing has to be restarted.
        self.describe("gpus 1", f"memory {16 * GIB}", f"used 0 {GIB // 2}")
        plan = json.loads(self.node.oom("plan", self.gpu_job(), "-o", "json").stdout)
        self.assertGreater(int(plan["estimate"]["deviceBytesPeak"]), GIB // 2)


class Budget(GpuCase):
    machine = ("gpus 1", f"memory {16 * GIB}")

    def test_below_the_smallest_workset(self):
        self.refuse("budgets.gpu_memory", "OUT_OF_GPU_MEMORY", "needs at least", "64.0 MiB are allowed; raise it",
                    "sequence_length", "global_batch", budgets={"gpu_memory": "64MiB"})


class SmallGpu(GpuCase):
    machine = ("gpus 1", f"memory {GIB // 4}")

    def test_has_less_than_the_smallest_workset(self):
        self.refuse("budgets.gpu_memory", "OUT_OF_GPU_MEMORY", "needs at least", "256.0 MiB is what the GPU has")


@unittest.skipUnless((BIN / "oom-worker-cuda").exists(), "built without CUDA")
@unittest.skipIf(os.path.exists("/dev/nvidiactl"), "a GPU is there")
class CannotBeUsed(GpuCase):
    def test_a_job_whose_worker_finds_no_driver_ends_with_cudas_error(self):
        self.own_jobs = ["jobs/gpu"]
        self.node.submit(self.gpu_job())
        self.node.wait("gpu", check=EXIT_FAILED)
        job = self.node.get("gpu")
        self.assertEqual((job["state"], job["reason"]), ("JOB_STATE_FAILED", "RETRIES_EXHAUSTED"))
        for word in ("NOT_ENOUGH_DEVICES", "no GPU can be used", "cudaErrorInsufficientDriver, 35", "install"):
            self.assertIn(word, job["message"])


if __name__ == "__main__":
    unittest.main()
