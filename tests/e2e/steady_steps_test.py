"""20 steady steps: nothing passes the worker's control socket, and nothing asks for gradients."""

import os
import re
import shutil
import subprocess
import unittest

import harness

CONTROL_FD = 3
STEADY = 20


class SteadyStepsTest(harness.NodeTest):
    def start(self, ranks):
        model = harness.write_model(self.folder / "model", hidden_size=96)
        train = harness.write_data(self.folder / "train", tokens=64 * 8 * 40 + 1, documents=60)
        return self.node.submit(harness.write_job(
            self.folder / "job.yaml", name="steady", model=model, train=train, output=self.folder / "run", steps=100000,
            sequence_length=64, global_batch=8, devices={"kind": "cpu", "count": ranks}))

    @unittest.skipUnless(shutil.which("strace"), "needs strace: the kernel counts no bytes by socket")
    def test_no_message_passes_the_control_socket(self):
        name = self.start(ranks=2)
        run = harness.Run(self.folder / "run")
        harness.wait_until(lambda: len(run.lines()) >= 5, "warm")
        workers = self.node.processes("oom-worker")
        self.assertEqual(len(workers), 2)
        for pid in workers:
            self.assertTrue(os.readlink(f"/proc/{pid}/fd/{CONTROL_FD}").startswith("socket:"))
        calls = self.watch(workers, run)
        # The watch itself works: the workers were seen at their futexes.
        self.assertTrue(any("futex(" in line for line in calls))
        messages = [line for line in calls if re.search(
            rf"\b(sendmsg|recvmsg|sendto|recvfrom|read|write|readv|writev|sendmmsg|recvmmsg)\({CONTROL_FD}[,)]", line)]
        # A worker's main thread may stand in a read of its socket the whole time; returning is what would be a message.
        self.assertEqual([line for line in messages if "unfinished" not in line], [])
        sockets = [line for line in calls if re.search(r"\b(sendmsg|sendto|connect|sendmmsg)\(", line)]
        self.assertEqual(sockets, [])
        self.node.oom("cancel", "--now", name)
        self.node.wait(name, check=11)

    def watch(self, pids, run):
        """System calls of all threads of the processes over STEADY steps."""
        log = self.folder / "strace.log"
        options = [part for pid in pids for part in ("-p", str(pid))]
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-e", "trace=futex,%network,read,write,readv,writev", "-o", str(log), *options])
        try:
            harness.wait_until(lambda: tracer.poll() is not None or log.exists() and log.stat().st_size > 0, "strace attaches")
            self.assertIsNone(tracer.poll(), "strace ended")
            first = len(run.lines())
            harness.wait_until(lambda: len(run.lines()) >= first + STEADY, f"{STEADY} steps")
        finally:
            tracer.terminate()
            tracer.wait()
        return log.read_text().splitlines()


class SourceTest(unittest.TestCase):
    def test_nothing_asks_for_gradients(self):
        found = []
        for folder in ("runtime", "worker"):
            for path in sorted((harness.SOURCE / folder).rglob("*")):
                if path.suffix in (".cc", ".h", ".cu", ".cuh") and "requires_grad" in path.read_text():
                    found.append(str(path))
        self.assertEqual(found, [])

    def test_the_workers_turn_gradients_off(self):
        for device in ("cpu", "cuda"):
            text = (harness.SOURCE / f"worker/{device}_device.cc").read_text()
            self.assertTrue("GradMode::set_enabled(false)" in text, device)
            self.assertTrue("OOM_CHECK(!at::GradMode::is_enabled())" in text, device)


if __name__ == "__main__":
    unittest.main(verbosity=2)
