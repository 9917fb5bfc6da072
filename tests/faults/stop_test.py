"""Stops of every kind: cancel in every state and twice, suspend and resume, SIGTERM of a daemon, `oom train
--embedded`."""

import signal
import subprocess
import time
import unittest

from fault_harness import EXIT_CANCELLED, EXIT_CONFLICT, FaultCase, poll, send

ENDLESS = {"steps": 1_000_000, "checkpoint": {"every_steps": 0, "keep": 2}}


class Cancel(FaultCase):
    # One job at a time, so that a second one is queued.
    flags = {"cpu_devices": "2"}

    def assert_cancelled(self, name, durable=None):
        job = self.wait_state(name, "CANCELLED", seconds=30)
        self.assertEqual(job["reason"], "USER_CANCEL")
        if durable is not None:
            self.assertEqual(int(job["durableStep"]), durable)
        # Terminal is final: another cancel changes nothing.
        again = self.node.oom("cancel", name, check=EXIT_CONFLICT)
        self.assertIn("CANCELLED", again.stderr)
        self.assertEqual(self.node.get(name)["sequence"], job["sequence"])
        self.assertEqual(self.node.oom("wait", name, check=None).returncode, EXIT_CANCELLED)
        return job

    def test_a_running_job_stops_after_a_checkpoint_of_its_last_step(self):
        self.submit("tiny", **ENDLESS)
        self.wait_steps("tiny", 3)
        self.node.oom("cancel", "tiny")
        job = self.assert_cancelled("tiny")
        self.assertEqual(job["durableStep"], job["step"])
        self.assertEqual(self.checkpoints("tiny"), [int(job["step"])])
        self.assertEqual(self.step_count("tiny"), int(job["step"]))
        self.assert_nothing_left()

    def test_now_stops_without_a_checkpoint(self):
        self.submit("tiny", **ENDLESS)
        self.wait_steps("tiny", 3)
        self.node.oom("cancel", "tiny", "--now")
        self.assert_cancelled("tiny", durable=0)
        self.assertEqual(self.checkpoints("tiny"), [])
        self.assert_nothing_left()

    def test_a_queued_and_a_suspended_job_end_at_once_and_leave_the_running_one_alone(self):
        runner = self.submit("runner", **ENDLESS)
        self.submit("queued", **ENDLESS)
        self.submit("held", **ENDLESS)
        self.node.oom("suspend", "held")
        self.assertEqual(self.node.state("held"), "SUSPENDED")
        self.assertEqual(self.node.state("queued"), "QUEUED")
        before = self.step_count("runner")
        for name in ("queued", "held"):
            self.node.oom("cancel", name)
            self.assert_cancelled(name)
            self.assertFalse(self.output(name).exists(), "a job that never ran has no output")
        self.wait_steps("runner", before + 5)
        self.node.oom("cancel", "runner", "--now")
        self.assert_cancelled("runner")
        self.assertEqual(self.node.get("runner")["uid"], runner["uid"])
        self.assert_nothing_left()

    def test_a_starting_job_is_cancelled_with_and_without_checkpoint(self):
        for name, options in (("gentle", []), ("now", ["--now"])):
            self.submit(name, **ENDLESS)
            self.node.oom("cancel", name, *options)
            self.assert_cancelled(name)
            self.assert_nothing_left()

    def test_a_second_cancel_of_a_stopping_job_does_not_wait_for_the_checkpoint(self):
        uid = self.submit("tiny", **ENDLESS)["uid"]
        self.wait_steps("tiny", 3)
        # A worker that stands still: the last step never ends, and so there is no checkpoint.
        send(self.node.workers_of(uid)[0], signal.SIGSTOP)
        self.node.oom("cancel", "tiny", "--grace", "600s")
        self.assertEqual(self.node.state("tiny"), "STOPPING")
        begin = time.monotonic()
        self.node.oom("cancel", "tiny")
        self.assert_cancelled("tiny", durable=0)
        self.assertLess(time.monotonic() - begin, 20.0)
        self.assert_nothing_left()

    def test_the_grace_ends_a_stop_that_makes_no_checkpoint(self):
        uid = self.submit("tiny", **ENDLESS)["uid"]
        self.wait_steps("tiny", 3)
        send(self.node.workers_of(uid)[0], signal.SIGSTOP)
        self.node.oom("cancel", "tiny", "--grace", "1s")
        self.assert_cancelled("tiny", durable=0)
        self.assert_nothing_left()


class Recovering(FaultCase):
    # Drawn uniformly from nothing to this; a draw below a second would show as a failure to see RECOVERING.
    flags = {"backoff_initial": "1h", "backoff_max": "1h"}

    def recovering(self, name):
        uid = self.submit(name, **(ENDLESS | {"checkpoint": {"every_steps": 5, "keep": 2}}))["uid"]
        self.wait_new_checkpoint(name)
        return uid

    def test_a_job_that_waits_for_its_next_attempt_can_be_cancelled_and_suspended(self):
        for victim in ("worker", "host"):
            for verb, state in (("cancel", "CANCELLED"), ("suspend", "SUSPENDED")):
                name = f"{victim}-{verb}"
                with self.subTest(name):
                    uid = self.recovering(name)
                    send(self.node.workers_of(uid)[1] if victim == "worker" else self.node.host_of(uid))
                    job = self.wait_state(name, "RECOVERING")
                    self.assertEqual(job["reason"], "WORKER_CRASHED" if victim == "worker" else "JOB_HOST_LOST")
                    self.node.oom(verb, name)
                    self.wait_state(name, state, seconds=30)
                    self.assert_nothing_left()


class Suspend(FaultCase):
    def test_suspended_twice_and_resumed_it_has_the_bits_of_a_run_that_was_not(self):
        shape = {"checkpoint": {"every_steps": 0, "keep": 2}}
        shape["steps"] = self.steps_for(2.0, **shape)
        uid = self.submit("tiny", **shape)["uid"]
        for stop in (10, 40):
            self.wait_steps("tiny", stop)
            self.node.oom("suspend", "tiny")
            job = self.wait_state("tiny", "SUSPENDED")
            self.assertEqual(job["durableStep"], job["step"])
            self.assert_nothing_left()
            self.node.oom("suspend", "tiny", check=EXIT_CONFLICT)
            self.node.oom("resume", "tiny")
            self.wait_state("tiny", "RUNNING")
            self.node.oom("resume", "tiny", check=EXIT_CONFLICT)
        job = self.wait_state("tiny", "SUCCEEDED")
        self.assertEqual((job["uid"], job["failureCount"]), (uid, 0))
        self.assertEqual(self.losses("tiny"), self.control("control", **shape))


class Terminate(FaultCase):
    def test_sigterm_of_a_service_leaves_its_jobs_running(self):
        shape = {"checkpoint": {"every_steps": 50, "keep": 2}}
        shape["steps"] = self.steps_for(4.0, **shape)
        uid = self.submit("tiny", **shape)["uid"]
        self.wait_steps("tiny", 5)
        host, workers = self.node.host_of(uid), self.node.workers_of(uid)
        begin = time.monotonic()
        self.assertEqual(self.node.terminate(), 0)
        self.assertLess(time.monotonic() - begin, 5.0)
        self.assertFalse(self.node.socket.exists())
        self.wait_steps("tiny", self.step_count("tiny") + 10)
        self.assertEqual(self.node.host_of(uid), host)
        self.assertEqual(self.node.workers_of(uid), workers)
        self.node.start()
        self.assertEqual(self.wait_state("tiny", "SUCCEEDED")["attempt"], 1)
        self.assertEqual(self.losses("tiny"), self.control("control", **shape))


class EphemeralTerminate(FaultCase):
    environment = {"OOMD_EPHEMERAL": "true", "OOM_DAEMON_ABSENCE_SECONDS": "2"}

    def test_sigterm_of_an_ephemeral_daemon_checkpoints_its_jobs_and_the_next_one_goes_on(self):
        shape = {"checkpoint": {"every_steps": 0, "keep": 2}}
        shape["steps"] = self.steps_for(2.0, **shape)
        self.submit("tiny", **shape)
        self.wait_steps("tiny", 5)
        self.assertEqual(self.node.terminate(), 0)
        self.assertEqual(self.node.processes(), [])
        done = self.step_count("tiny")
        self.assertEqual(self.checkpoints("tiny"), [done])
        self.node.start()
        self.wait_state("tiny", "SUCCEEDED")
        self.assertEqual(self.losses("tiny"), self.control("control", **shape))

    def test_a_job_of_an_ephemeral_daemon_that_is_killed_checkpoints_and_ends_by_itself(self):
        self.submit("tiny", **ENDLESS)
        self.wait_steps("tiny", 5)
        self.node.kill()
        poll(lambda: not self.node.processes(), "the job ends")
        self.assertEqual(self.checkpoints("tiny"), [self.step_count("tiny")])


class Embedded(FaultCase):
    def setUp(self):
        super().setUp()
        self.node.terminate()  # An embedded daemon is its own.

    def train(self, *options):
        return self.node.popen("train", self.folder / "tiny.yaml", "--embedded", *options, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)

    def test_trains_from_start_to_end_and_leaves_no_process(self):
        self.job_file("tiny", steps=20)
        out, messages = self.train().communicate(timeout=60)
        self.assertIn("tiny SUCCEEDED after 20 steps", messages, out)
        self.assertTrue((self.output("tiny") / "export/model.safetensors").exists())
        self.assertEqual(self.checkpoints("tiny")[-1], 20)
        self.assertEqual(self.node.processes(), [])

    def test_ctrl_c_ends_it_after_a_checkpoint_and_the_next_run_goes_on_from_there(self):
        self.job_file("tiny", steps=1000, checkpoint={"every_steps": 0, "keep": 2})
        process = self.train()
        self.addCleanup(process.kill)
        self.wait_steps("tiny", 5)
        process.send_signal(signal.SIGINT)
        out, messages = process.communicate(timeout=60)
        self.assertEqual(process.returncode, EXIT_CANCELLED, out + messages)
        self.assertIn("Ctrl-C again stops at once", messages)
        done = self.step_count("tiny")
        self.assertLess(done, 1000)
        self.assertEqual(self.checkpoints("tiny"), [done])
        self.assertEqual(self.node.processes(), [])
        _, messages = (process := self.train()).communicate(timeout=60)
        self.assertEqual(process.returncode, 0, messages)
        losses = self.losses("tiny")
        self.node.start()
        self.assertEqual(losses, self.control("control", steps=1000, checkpoint={"every_steps": 0, "keep": 2}))

    def test_a_second_ctrl_c_ends_it_at_once(self):
        self.job_file("tiny", **ENDLESS)
        process = self.train()
        self.addCleanup(process.kill)
        self.wait_steps("tiny", 5)
        worker = self.node.processes("oom-worker")[0]
        send(worker, signal.SIGSTOP)  # So that the first one alone takes long.
        process.send_signal(signal.SIGINT)
        # Its message is behind the cancel that it announces.
        lines = iter(process.stderr.readline, "")
        self.assertTrue(any("stopping after a checkpoint" in line for line in lines))
        poll(lambda: "STOPPING" in next(lines), "the job stops")
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        process.communicate(timeout=60)
        self.assertLess(time.monotonic() - begin, 30.0)
        self.assertEqual(process.returncode, EXIT_CANCELLED)
        self.assertEqual(self.checkpoints("tiny"), [])
        self.assertEqual(self.node.processes(), [])


if __name__ == "__main__":
    unittest.main()
