"""kill -9 of oomd: running jobs lose no step, watchers lose no event, acknowledged jobs are there once."""

import json
import os
import random
import threading
import time
import unittest

from fault_harness import EXIT_NO_DAEMON, EXIT_TIMEOUT, FaultCase, Watcher, poll


class RunningJob(FaultCase):
    def test_a_kill_of_oomd_costs_a_running_job_no_step_and_a_watcher_no_event(self):
        shape = {"checkpoint": {"every_steps": 50, "keep": 2}}
        steps = self.steps_for(6.0, **shape)
        shape["steps"] = steps
        control = self.control("control", **shape)
        watcher = Watcher(self)
        token = watcher.token()
        uid = self.submit("tiny", **shape)["uid"]
        waiter = self.node.popen("wait", "tiny", "-q")
        self.addCleanup(waiter.kill)
        self.wait_steps("tiny", 5)
        host, workers = self.node.host_of(uid), self.node.workers_of(uid)
        self.assertEqual(sorted(workers), [0, 1])

        for round_number in range(3):
            self.node.kill()
            # It goes on with nobody there.
            before = self.step_count("tiny")
            self.assertLess(before, steps - 15, "the run was too short for the kills")
            self.wait_steps("tiny", before + 10)
            begin = time.monotonic()
            self.node.start()
            # Adopted: what was done in between is known.
            now = self.step_count("tiny")
            poll(lambda now=now: int(self.node.get("tiny")["step"]) >= now, "oomd hears of the job")
            self.assertLess(time.monotonic() - begin, 2.0, "seconds until the job was adopted")
            self.assertEqual(self.node.host_of(uid), host, f"round {round_number}: another job host")
            running = self.node.workers_of(uid)
            if self.step_count("tiny") < steps:
                self.assertEqual(running, workers, f"round {round_number}: other workers")

        self.assertEqual(waiter.wait(60), 0)
        self.assertEqual(self.node.get("tiny")["attempt"], 1)
        self.assertEqual(self.losses("tiny"), control)

        # What the store holds, read at once, against what the watcher saw across the kills.
        stored = Watcher(self, "tiny", "--resume-token", token)
        self.assertEqual(stored.process.wait(60), 0, stored.messages())
        poll(lambda: watcher.brief()[-1:] == stored.brief()[-1:], "the watcher sees the end")
        self.assertEqual(watcher.brief(), stored.brief())
        self.assertEqual([state for _, _, state, _ in stored.brief()],
                         ["QUEUED", "STARTING", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED"])
        # And from the middle.
        rest = Watcher(self, "tiny", "--resume-token", watcher.transitions()[1]["resumeToken"])
        self.assertEqual(rest.process.wait(60), 0, rest.messages())
        self.assertEqual(rest.brief(), stored.brief()[2:])
        self.assert_nothing_left()


class Submitters(FaultCase):
    """Rounds of kill -9 under eight submitters; OOM_KILL_ROUNDS of them."""

    flags = {"cpu_devices": "1"}
    environment = {"OOMD_MAX_QUEUED_JOBS": "100000"}

    def test_every_acknowledged_job_is_there_once(self):
        rounds = int(os.environ.get("OOM_KILL_ROUNDS", "10"))
        chance = random.Random(rounds)
        # Takes the only device, so that the others wait, and is not disturbed by any of this.
        one = {"devices": {"kind": "cpu", "count": 1}, "global_batch": 2}
        runner = self.submit("runner", **one, steps=10_000_000, priority=1000)
        self.wait_steps("runner", 1)
        host = self.node.host_of(runner["uid"])
        path = self.job_file("wave", **one)
        acknowledged = {}  # Request id -> uid.
        asked = set()
        problems = []
        lock = threading.Lock()
        over = threading.Event()

        def submitter(number):
            for count in range(1_000_000):
                request = f"{number}-{count}"
                with lock:
                    asked.add(request)
                # The same request until it is answered, over the kills.
                while not over.is_set():
                    answer = self.node.oom("submit", path, "--request-id", request, "-o", "json", check=None)
                    if answer.returncode == 0:
                        with lock:
                            acknowledged[request] = json.loads(answer.stdout)["uid"]
                        break
                    if answer.returncode not in (EXIT_NO_DAEMON, EXIT_TIMEOUT):
                        problems.append(answer)
                        return
                if over.is_set():
                    return

        threads = [threading.Thread(target=submitter, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(rounds):
                known = len(acknowledged)
                wanted = known + chance.randint(1, 12)
                poll(lambda wanted=wanted: len(acknowledged) >= wanted or problems, "acknowledgements")
                self.node.kill()
                self.node.start()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        self.assertEqual(problems, [])
        self.assertGreaterEqual(len(acknowledged), rounds)

        jobs = [json.loads(line) for line in self.node.oom("ls", "-o", "jsonl").stdout.splitlines()]
        jobs = [job for job in jobs if job["name"] != "jobs/runner"]
        uids = [job["uid"] for job in jobs]
        self.assertEqual(len(set(uids)), len(uids), "a uid was used twice")
        names = [job["name"] for job in jobs]
        self.assertEqual(len(set(names)), len(names), "a name was used twice")
        self.assertEqual(len(set(acknowledged.values())), len(acknowledged), "two requests share a job")
        self.assertEqual(set(acknowledged.values()) - set(uids), set(), "acknowledged jobs were lost")
        self.assertLessEqual(len(uids), len(asked), "more jobs than requests")
        # A repeated request gives the same job and makes none.
        for request in chance.sample(sorted(acknowledged), 5):
            answer = self.node.oom("submit", path, "--request-id", request, "-o", "json")
            self.assertEqual(json.loads(answer.stdout)["uid"], acknowledged[request])
        again = self.node.oom("ls", "-o", "jsonl").stdout.splitlines()
        self.assertEqual(len(again), len(jobs) + 1)
        self.assertEqual(self.node.host_of(runner["uid"]), host, "the running job was disturbed")
        self.assertEqual(self.node.get("runner")["attempt"], 1)
        self.losses("runner")


if __name__ == "__main__":
    unittest.main()
