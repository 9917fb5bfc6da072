"""Workers and job hosts that are killed or stand still: a clear reason, a restart from the durable step with the same
bits, and nothing left behind. OOM_WORKER_KILLS: how many kills (default 20)."""

import json
import os
import random
import signal
import time
import unittest

from fault_harness import EXIT_FAILED, FaultCase, Watcher, harness, memfds_of, poll, send

SHAPE = {"sequence_length": 64, "global_batch": 8}


class Kills(FaultCase):
    def check_recoveries(self, watcher, name, count, reason):
        """Every failure is one RECOVERING with its reason, and the attempts count up."""
        events = [event["job"] for event in watcher.transitions() if event["job"]["name"] == f"jobs/{name}"]
        recovering = [job for job in events if job["state"].endswith("RECOVERING")]
        self.assertEqual([job["reason"] for job in recovering], [reason] * count)
        running = [job for job in events if job["state"].endswith("RUNNING")]
        self.assertEqual([job["attempt"] for job in running], list(range(1, count + 2)))
        return recovering

    def wait_attempt(self, name, attempt):
        poll(lambda: (self.output(name) / f"logs/attempt-{attempt}/rank-1.log").exists(), f"attempt {attempt}")

    def test_a_killed_worker_costs_nothing_but_time_wherever_in_a_step_it_dies(self):
        kills = int(os.environ.get("OOM_WORKER_KILLS", "20"))
        chance = random.Random(kills)
        # A kill takes about six steps: up to the next checkpoint, and on. With a load-balancing loss ranks wait for each
        # other within a step, too.
        shape = SHAPE | {"steps": 15 * kills, "retry": {"max_failures": kills}, "router": {"auxiliary_loss": 0.01},
                         "checkpoint": {"every_steps": 4, "keep": 2}}
        watcher = Watcher(self)
        watcher.token()
        uid = self.submit("tiny", **shape)["uid"]
        killed = []
        for attempt in range(1, kills + 1):
            self.wait_attempt("tiny", attempt)
            self.wait_new_checkpoint("tiny")
            step_seconds = self.steps("tiny")[-1]["step_seconds"]
            workers = self.node.workers_of(uid)
            self.assertEqual(sorted(workers), [0, 1])
            time.sleep(chance.uniform(0.0, 2.0 * step_seconds))  # The point of the step.
            rank = chance.randrange(2)
            send(workers[rank])
            killed.append((rank, workers))
        job = self.wait_state("tiny", "SUCCEEDED", seconds=600)
        self.assertEqual(job["attempt"], kills + 1)
        self.assertEqual(job["failureCount"], kills)
        poll(lambda: watcher.brief()[-1][2] == "SUCCEEDED", "the watcher sees the end")
        recovering = self.check_recoveries(watcher, "tiny", kills, "WORKER_CRASHED")
        for attempt, (event, (rank, workers)) in enumerate(zip(recovering, killed), 1):
            self.assertIn(f"rank {rank}", event["message"])
            self.assertIn("signal 9 (Killed)", event["message"])
            self.assertTrue(event["failedLogPath"].endswith(f"logs/attempt-{attempt}/rank-{rank}.log"), event)
        losses = self.losses("tiny")
        self.assert_nothing_left()
        self.assertEqual(losses, self.control("control", **shape))
        self.assertEqual(harness.different_tensors(harness.Run(self.output("tiny")).state()["master"],
                                                   harness.Run(self.output("control")).state()["master"]), [])

    def test_a_killed_job_host_takes_its_workers_along_and_the_job_goes_on(self):
        kills = 3
        shape = SHAPE | {"steps": 240, "checkpoint": {"every_steps": 10, "keep": 2}, "retry": {"max_failures": kills}}
        watcher = Watcher(self)
        watcher.token()
        uid = self.submit("tiny", **shape)["uid"]
        for attempt in range(1, kills + 1):
            self.wait_attempt("tiny", attempt)
            durable = self.wait_new_checkpoint("tiny")
            host, workers = self.node.host_of(uid), self.node.workers_of(uid)
            # oomd must know of the checkpoint, or it counts a second failure at one durable step.
            poll(lambda wanted=durable: int(self.node.get("tiny")["durableStep"]) >= wanted, "oomd knows it")
            send(host)
            poll(lambda: not set(workers.values()) & set(self.node.processes("oom-worker")), "the workers die", 10)
        job = self.wait_state("tiny", "SUCCEEDED")
        self.assertEqual(job["failureCount"], kills)
        poll(lambda: watcher.brief()[-1][2] == "SUCCEEDED", "the watcher sees the end")
        for event in self.check_recoveries(watcher, "tiny", kills, "JOB_HOST_LOST"):
            self.assertIn("the job host died at step", event["message"])
        losses = self.losses("tiny")
        self.assert_nothing_left()
        self.assertEqual(losses, self.control("control", **shape))

    def test_a_job_host_killed_while_nobody_looks_is_started_again_by_the_next_oomd(self):
        shape = SHAPE | {"steps": 150, "checkpoint": {"every_steps": 10, "keep": 2}}
        uid = self.submit("tiny", **shape)["uid"]
        self.wait_new_checkpoint("tiny")
        host = self.node.host_of(uid)
        self.node.kill()
        send(host)
        poll(lambda: not self.node.processes("oom-worker"), "the workers die", 10)
        self.node.start()
        job = self.wait_state("tiny", "SUCCEEDED")
        self.assertEqual(job["attempt"], 2)
        losses = self.losses("tiny")
        self.assert_nothing_left()
        self.assertEqual(losses, self.control("control", **shape))


class Edges(FaultCase):
    """The beginning and the end of a job."""

    def test_a_kill_while_a_job_starts_is_a_failure_like_any_other(self):
        shape = SHAPE | {"steps": 10}
        control = self.control("control", **shape)
        for victim, reason in (("host", "JOB_HOST_LOST"), ("worker", "WORKER_CRASHED")):
            with self.subTest(victim):
                watcher = Watcher(self)
                watcher.token()
                uid = self.submit(victim, **shape)["uid"]
                find = self.node.host_of if victim == "host" else lambda uid: self.node.workers_of(uid).get(1)
                send(poll(lambda: find(uid), f"the {victim} of {uid}"))
                job = self.wait_state(victim, "SUCCEEDED")
                self.assertEqual((job["attempt"], job["failureCount"]), (2, 1))
                poll(lambda: watcher.brief()[-1][2] == "SUCCEEDED", "the watcher sees the end")
                self.assertIn((victim, "RECOVERING", reason), [event[1:] for event in watcher.brief()])
                self.assertEqual(self.losses(victim), control)

    def test_a_job_host_killed_in_its_last_checkpoint_or_export_is_followed_by_one_that_finishes(self):
        chance = random.Random(5)
        # Some megabytes, so that there is time to be killed in.
        config = harness.model_config(vocab_size=8192, hidden_size=128, dtype="float32")
        (self.folder / "wide.json").write_text(json.dumps(config))
        shape = {"steps": 4, "checkpoint": {"every_steps": 0, "keep": 2},
                 "model": {"config": str(self.folder / "wide.json"), "initialize": "random"}}
        control = self.control("control", **shape)
        export = harness.load_tensors(self.output("control") / "export")
        attempts = []
        for number in range(3):
            name = f"tiny-{number}"
            uid = self.submit(name, **shape)["uid"]
            log = self.output(name) / "logs/attempt-1/jobhost.log"
            poll(lambda log=log: log.exists() and "JOB_STATE_STOPPING" in log.read_text(), f"{name} stops")
            host = self.node.host_of(uid)
            time.sleep(chance.uniform(0.0, 0.06))
            if host:
                send(host)
            job = self.wait_state(name, "SUCCEEDED")
            attempts.append(job["attempt"])
            self.assertEqual(self.losses(name), control)
            self.assertEqual(harness.different_tensors(harness.load_tensors(self.output(name) / "export"), export), [])
            self.assertEqual(sorted(path.name for path in self.output(name).iterdir()),
                             sorted(path.name for path in self.output("control").iterdir()))
        self.assertIn(2, attempts, "no kill came in time")
        self.assert_nothing_left()


class FailedJob(FaultCase):
    def test_two_failures_at_one_durable_step_end_the_job_and_show_the_end_of_the_first_failing_log(self):
        uid = self.submit("tiny", steps=1_000_000, checkpoint={"every_steps": 0, "keep": 2})["uid"]
        follower = self.node.popen("watch", "tiny", stdout=-1, stderr=-1)
        self.addCleanup(follower.kill)
        log = self.output("tiny") / "logs/attempt-2/rank-1.log"
        for attempt in (1, 2):
            poll(lambda attempt=attempt: self.node.get("tiny")["attempt"] == attempt and
                 self.node.state("tiny") == "RUNNING", f"attempt {attempt} runs")
            worker = self.node.workers_of(uid)[1]
            if attempt == 2:
                # What the worker printed: through its own standard error, as a library's last words would come.
                with open(f"/proc/{worker}/fd/2", "w", encoding="utf-8") as stream:
                    stream.writelines(f"word {number}\n" for number in range(1, 31))
                poll(lambda: log.exists() and "word 30" in log.read_text(), "the log has the words")
            send(worker)
        out, messages = follower.communicate(timeout=60)
        self.assertEqual(follower.returncode, EXIT_FAILED, out + messages)
        self.assertIn("RETRIES_EXHAUSTED", messages)
        self.assertIn("rank 1", messages)
        self.assertIn("durable step 0", messages)
        shown = [line[4:] for line in messages.splitlines() if line.startswith("  | ")]
        self.assertEqual(shown, [f"word {number}" for number in range(11, 31)])
        self.assertIn(f"log: {log}", messages)
        self.assertEqual(self.node.oom("wait", "tiny", check=None).returncode, EXIT_FAILED)
        self.assert_nothing_left()

    def test_no_retry_is_made_where_none_is_allowed(self):
        uid = self.submit("tiny", steps=1_000_000, retry={"max_failures": 0})["uid"]
        self.wait_steps("tiny", 6)
        send(self.node.workers_of(uid)[0], signal.SIGABRT)
        job = self.wait_state("tiny", "FAILED")
        self.assertEqual((job["reason"], job["attempt"]), ("WORKER_CRASHED", 1))
        self.assertIn("signal 6", job["message"])
        self.assert_nothing_left()


class Hung(FaultCase):
    # Long enough for a worker that starts on a busy machine.
    limit_seconds = 6.0
    environment = {"OOM_WORKER_SILENCE_SECONDS": str(limit_seconds)}

    def test_a_worker_that_stands_still_is_found_and_replaced(self):
        shape = SHAPE | {"steps": 150, "checkpoint": {"every_steps": 10, "keep": 2}}
        watcher = Watcher(self)
        watcher.token()
        uid = self.submit("tiny", **shape)["uid"]
        self.wait_steps("tiny", 12)
        workers = self.node.workers_of(uid)
        stopped_at = time.monotonic()
        send(workers[1], signal.SIGSTOP)
        poll(lambda: any(state == "RECOVERING" for _, _, state, _ in watcher.brief()), "it is found")
        waited = time.monotonic() - stopped_at
        self.assertGreater(waited, 0.9 * self.limit_seconds)
        self.assertLess(waited, 2.0 * self.limit_seconds)
        job = self.wait_state("tiny", "SUCCEEDED")
        self.assertEqual(job["attempt"], 2)
        hung = next(event["job"] for event in watcher.transitions() if event["job"]["state"].endswith("RECOVERING"))
        self.assertEqual(hung["reason"], "WORKER_HUNG")
        self.assertIn("rank 1", hung["message"])
        self.assertIn(f"{self.limit_seconds:g} s", hung["message"])
        losses = self.losses("tiny")
        self.assert_nothing_left()
        self.assertEqual(losses, self.control("control", **shape))


class Memory(FaultCase):
    def test_the_look_for_memory_sees_a_running_jobs_memory(self):
        """The proof that assert_nothing_left can fail."""
        uid = self.submit("tiny", steps=1_000_000)["uid"]
        self.wait_steps("tiny", 1)
        names = {target for _, target in memfds_of([self.node.host_of(uid), *self.node.workers_of(uid).values()])}
        self.assertTrue(any("oom-control" in name for name in names), names)
        self.assertTrue(any("oom-tiny-" in name for name in names), names)
        self.node.oom("cancel", "tiny", "--now")
        self.wait_state("tiny", "CANCELLED")
        self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()
