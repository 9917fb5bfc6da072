"""Kills of oomd, job hosts and workers, suspensions and resumes, at random moments over several jobs at once: each
job ends with the bits of an undisturbed run, and the events tell one story. OOM_CHAOS_SECONDS: how long (default 20);
OOM_CHAOS_SEED: which (default 1)."""

import collections
import os
import random
import time
import unittest

from fault_harness import FaultCase, Watcher, harness, poll, send

# What the state machine allows, by state (service rules).
FOLLOWS = {
    "QUEUED": {"STARTING", "SUSPENDED", "CANCELLED", "FAILED"},
    "SUSPENDED": {"QUEUED", "CANCELLED"},
    "STARTING": {"STARTING", "RUNNING", "STOPPING", "RECOVERING", "SUSPENDED", "SUCCEEDED", "FAILED", "CANCELLED"},
    "RUNNING": {"RUNNING", "STOPPING", "RECOVERING", "SUSPENDED", "SUCCEEDED", "FAILED", "CANCELLED"},
    "STOPPING": {"STOPPING", "RECOVERING", "SUSPENDED", "SUCCEEDED", "FAILED", "CANCELLED"},
    "RECOVERING": {"STARTING", "RUNNING", "STOPPING", "RECOVERING", "SUSPENDED", "SUCCEEDED", "FAILED", "CANCELLED"},
}


class Chaos(FaultCase):
    flags = {"cpu_devices": "3"}

    def test_jobs_survive_everything_at_random_moments(self):
        seconds = float(os.environ.get("OOM_CHAOS_SECONDS", "20"))
        chance = random.Random(int(os.environ.get("OOM_CHAOS_SEED", "1")))
        names = [f"job-{number}" for number in range(4)]  # One more than there are devices for.
        shape = {"devices": {"kind": "cpu", "count": 1}, "checkpoint": {"every_steps": 5, "keep": 2},
                 "retry": {"max_failures": 100_000}, "steps": 1_000_000}
        watcher = Watcher(self)
        token = watcher.token()
        uids = {name: self.submit(name, **shape)["uid"] for name in names}
        failed_at = dict.fromkeys(names, 0)
        done = collections.Counter()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.0, 0.3))
            action = chance.choice(["daemon", "host", "worker", "worker", "suspend"])
            name = chance.choice(names)
            if action == "daemon":
                self.node.kill()
                time.sleep(chance.uniform(0.0, 0.3))
                self.node.start()
                done[action] += 1
                continue
            job = self.node.get(name)
            state = job["state"].removeprefix("JOB_STATE_")
            if state == "SUSPENDED":
                self.node.oom("resume", name)
                done["resume"] += 1
            elif action == "suspend":
                # May come too late or too early: the state decides.
                done[action] += self.node.oom("suspend", name, check=None).returncode == 0
            elif state == "RUNNING" and int(job["durableStep"]) > failed_at[name]:
                # Two failures at one durable step would end the job, as they should.
                pid = self.node.host_of(uids[name])
                if action == "worker":
                    pid = next(iter(self.node.workers_of(uids[name]).values()), None)
                if pid is not None:
                    # No checkpoint comes between the look and the note: what it stands at when it fails counts.
                    send(pid)
                    done[action] += 1
                    failed_at[name] = self.settled_durable(name)
        self.assertGreater(min(done[action] for action in ("daemon", "host", "worker", "suspend", "resume")), 0, done)

        # Every job ends well, where it now stands; whoever is queued gets the devices of those that ended.
        left = set(names)

        def end_one():
            for name in sorted(left):
                job = self.node.get(name)
                state = job["state"].removeprefix("JOB_STATE_")
                self.assertNotIn(state, harness.FINAL_STATES, self.node.failure(name))
                if state == "SUSPENDED":
                    self.node.oom("resume", name)
                if state == "RUNNING" and int(job["step"]) > 0:
                    self.node.oom("cancel", name)
                    ended = self.wait_state(name, "CANCELLED")
                    self.assertEqual(ended["durableStep"], ended["step"])
                    left.remove(name)
                    return True
            return False
        for _ in names:
            poll(end_one, f"one of {left} runs")
        self.assert_nothing_left()

        stored = Watcher(self, "--resume-token", token)
        poll(lambda: stored.brief() and stored.brief()[-1] == watcher.brief()[-1], "both watchers see the end")
        self.assertEqual(watcher.brief(), stored.brief())
        numbers = [number for number, *_ in stored.brief()]
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))), "an event is lost or repeated")
        last = {}
        for _, name, state, _ in stored.brief():
            self.assertIn(state, FOLLOWS.get(last.get(name), {"QUEUED"}), f"{name}: {last.get(name)} -> {state}")
            last[name] = state
        longest = max(self.step_count(name) for name in names)
        control = self.control("control", **(shape | {"steps": longest}))
        for name in names:
            losses = self.losses(name)
            self.assertEqual(losses, control[:len(losses)], name)

    def settled_durable(self, name):
        """The durable step at which the job's failure was counted."""
        failures = self.failures.get(name, 0)

        def look():
            job = self.node.get(name)
            if job["failureCount"] > failures:
                self.failures[name] = job["failureCount"]
                return max(1, int(job["durableStep"]))
            # A suspension or an end that came first.
            return 1 if job["state"].endswith("SUSPENDED") else None
        return poll(look, f"the failure of {name} is counted")

    def setUp(self):
        super().setUp()
        self.failures = {}


if __name__ == "__main__":
    unittest.main()
