"""What a steady step calls of CUDA: nothing that allocates, frees, registers, calls a function of the host, or waits for the
device.

    OOM_BIN=FOLDER/bin OOM_API_CALLS_LIBRARY=liboom_api_calls.so python3 api_calls_test.py      on a machine with a GPU

The library (tests/gpu/api_calls; by default of build/release) counts the worker's calls from within, by function and
thread; two looks at its file while a job trains, divided by the steps between them, are the calls of a step. The first steps
do not count: the allocator and the libraries take what they need, which differs by the lengths of a batch's documents, so
the job first goes through its data twice.
Trains in bfloat16: float32's operators, the references of bfloat16's, ask the device for the rows of each expert.
"""

import os
import pathlib
import re
import shutil
import tempfile
import time
import unittest
import unittest.mock

from gpu_training_test import CUDA, GpuTest, harness, make_resident, make_streamed

LIBRARY = pathlib.Path(os.environ.get("OOM_API_CALLS_LIBRARY",
                                      harness.SOURCE / "build/release/tests/liboom_api_calls.so")).resolve()
SEQUENCES = 480
WARM_STEPS = 2 * SEQUENCES // 4 + 10
STEADY_STEPS = 300

# Names of the driver (cu...) and of the runtime (cuda..._v3020).
FORBIDDEN = {
    "allocates": re.compile(
        r"cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister|MemPoolCreate|MemPoolDestroy)|"
        r"cuMem(Alloc|Free|HostAlloc|HostRegister|HostUnregister|Create|Release|Map|Unmap|SetAccess|"
        r"AddressReserve|AddressFree|PoolCreate|PoolDestroy)|cuArray(3D)?(Create|Destroy)"),
    "calls the host": re.compile(r"cuda(LaunchHostFunc|StreamAddCallback)|cu(LaunchHostFunc|StreamAddCallback)"),
    "waits for the device": re.compile(
        r"cuda(Device|Stream|Event|Thread)Synchronize|cu(Ctx|Stream|Event|Device)Synchronize|"
        r"(cuda|cu)Mem(cpy|set)(?!.*Async)"),
}
# The timeline's thread enqueues nothing: it waits so that nobody else has to.
OBSERVER, OBSERVES = "timeline", re.compile(r"(cuda|cu)EventSynchronize")


def offence(function, thread):
    """What rule a call breaks, or None."""
    if thread == OBSERVER and OBSERVES.match(function):
        return None
    return next((rule for rule, pattern in FORBIDDEN.items() if pattern.match(function)), None)


class RulesTest(unittest.TestCase):
    def test_calls_are_judged_by_their_names(self):
        for rule, functions in {
                "allocates": ["cuMemAlloc_v2", "cuMemAllocAsync", "cudaMalloc_v3020", "cudaMallocAsync_v11020", "cuMemFree_v2",
                              "cudaFreeHost_v3020", "cuMemHostRegister_v2", "cudaHostUnregister_v4000", "cuMemCreate", "cuMemMap"],
                "calls the host": ["cuLaunchHostFunc", "cuStreamAddCallback_ptsz", "cudaLaunchHostFunc_v10000"],
                "waits for the device": ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cudaDeviceSynchronize_v3020",
                                         "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2", "cudaMemcpy_v3020", "cuMemsetD8_v2"],
                None: ["cuMemcpyDtoHAsync_v2", "cudaMemcpyAsync_v3020", "cuMemsetD8Async", "cuStreamWaitEvent", "cuEventQuery",
                       "cuEventRecord", "cuLaunchKernelEx", "cuStreamWriteValue64_v2", "cuMemGetInfo_v2"]}.items():
            for function in functions:
                self.assertEqual(offence(function, "compute"), rule, function)
        self.assertIsNone(offence("cuEventSynchronize", OBSERVER))
        self.assertEqual(offence("cuStreamSynchronize", OBSERVER), "waits for the device")


class SteadyStepTest(GpuTest):
    @classmethod
    def setUpClass(cls):
        if not LIBRARY.exists():
            raise unittest.SkipTest(f"no {LIBRARY}")
        cls.calls = pathlib.Path(tempfile.mkdtemp(prefix="oom-api-calls-"))
        cls.addClassCleanup(shutil.rmtree, cls.calls, ignore_errors=True)
        # The workers inherit them through oomd and their job host.
        variables = {"CUDA_INJECTION64_PATH": str(LIBRARY), "OOM_API_CALLS_FILE": str(cls.calls / "calls")}
        with unittest.mock.patch.dict(os.environ, variables):
            super().setUpClass()
        cls.data = harness.write_data(cls.folder / "short", tokens=32 * SEQUENCES + 1, documents=SEQUENCES, seed=3)

    def setUp(self):
        for path in self.calls.iterdir():
            path.unlink()

    def counts(self):
        """{(function, thread): calls} of the only worker so far."""
        def look():
            files = [path for path in self.calls.glob("calls.*") if path.suffix != ".next"]
            return files[0] if len(files) == 1 and files[0].stat().st_mtime > now else None
        now = time.time()
        lines = harness.wait_until(look, "the calls are counted").read_text().splitlines()
        return {(function, thread): int(count) for function, count, thread in (line.split(" ", 2) for line in lines)}

    def steady(self, name, edit, **settings):
        """Trains; returns the counts at the end and {(function, thread): calls a step}."""
        def edited(plan):
            edit(plan)
            plan["deterministic"] = False
        settings = {"name": name, "model": self.models["qwen3_moe"], "train": self.data, "precision": "bfloat16",
                    "output": self.folder / name, "devices": CUDA, "steps": 1_000_000} | settings
        job = harness.write_job(self.folder / f"{name}.yaml", **settings)
        plan = self.node.write_plan(self.folder / f"{name}.plan.json", job, edited)
        self.node.submit(harness.write_job(job, **settings, plan=str(plan)))
        run = harness.Run(self.folder / name)

        def steps():
            path = run.output / "steps.jsonl"
            return path.read_bytes().count(b"\n") if path.exists() else 0

        def reached(count):
            if self.node.state(name) in harness.FINAL_STATES:
                raise AssertionError(self.node.failure(name))
            return steps() >= count
        harness.wait_until(lambda: reached(WARM_STEPS), f"{WARM_STEPS} steps", seconds=240)
        before, first = self.counts(), steps()
        harness.wait_until(lambda: reached(first + STEADY_STEPS), f"{STEADY_STEPS} steps more", seconds=240)
        after, last = self.counts(), steps()
        self.node.oom("cancel", "--now", name)
        self.node.wait(name, check=11)
        return after, {key: (count - before.get(key, 0)) / (last - first) for key, count in after.items()}

    def check(self, name, edit, **settings):
        total, calls = self.steady(name, edit, **settings)
        print(f"\n{name}: calls of CUDA a step")
        for (function, thread), count in sorted(calls.items(), key=lambda item: -item[1]):
            if count > 0:
                print(f"  {count:10.2f}  {function:34} {thread:16} {offence(function, thread) or ''}")

        def of(counts, pattern):
            return sum(count for (function, _), count in counts.items() if re.match(pattern, function))
        # The watch works: what a step is made of is seen, and so is what only a start may do.
        self.assertGreater(of(calls, r"(cuda|cu)Launch"), 10)
        self.assertGreater(of(calls, r"(cuda|cu)Memcpy.*Async"), 2)
        for pattern in (r"cudaMalloc|cuMemAlloc", r"cudaHostRegister|cuMemHostRegister"):
            self.assertGreater(of(total, pattern), 0, pattern)
        broken = {f"{function} on {thread}": count for (function, thread), count in calls.items()
                  if count > 0 and offence(function, thread)}
        self.assertEqual(broken, {})

    def test_streamed_with_boundaries_on_the_host(self):
        self.check("streamed", make_streamed)

    def test_half_resident(self):
        def half(plan):
            make_streamed(plan)
            for unit in plan["units"][: len(plan["units"]) // 2]:
                unit["home"] = "STATE_HOME_RESIDENT"
        self.check("half", half)

    def test_resident_with_clipping_and_a_load_balancing_loss(self):
        self.check("resident", make_resident, router={"auxiliary_loss": 0.01},
                   optimizer={"learning_rate": 1e-3, "max_gradient_norm": 0.05})

    def test_documents_as_long_as_the_sequence(self):
        # Another attention: cuDNN's.
        model = harness.write_model(self.folder / "wide", head_dim=64)
        data = harness.write_data(self.folder / "long", tokens=128 * SEQUENCES + 1, documents=2, seed=3)
        self.check("long", make_streamed, model=model, train=data, sequence_length=128)


if __name__ == "__main__":
    harness.main()
