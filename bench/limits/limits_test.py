#!/usr/bin/env python3
"""Every measurement of limits.py runs and counts what it moves; the device's memory is the host's here, and copies are
not asynchronous, so the figures themselves say nothing.

    python3 bench/limits/limits_test.py
"""

import contextlib
import pathlib
import sys
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import limits  # noqa: E402
import torch  # noqa: E402

OPTIONS = limits.parse(["--size", "4096", "--host-size", "65536", "--product", "16", "--repeats", "1", "--seconds", "0.01",
                        "--device", "cpu"])


@contextlib.contextmanager
def without_a_gpu():
    ones = torch.ones
    with mock.patch.object(torch, "ones", lambda *size, pin_memory=False, **rest: ones(*size, **rest)), mock.patch.multiple(
            torch.cuda, Stream=mock.DEFAULT, stream=lambda stream: contextlib.nullcontext(), synchronize=lambda device: None):
        yield


class LimitsTest(unittest.TestCase):
    def test_every_measurement_has_a_key_of_its_own_and_a_rate(self):
        with without_a_gpu():
            found = list(limits.measure(OPTIONS))
            found += limits.measure_gpu(torch.device("cpu"), limits.Host(1 << 16), limits.Update(1 << 12), OPTIONS)
        keys = [key for key, *_ in found]
        self.assertEqual(len(keys), len(set(keys)))
        self.assertTrue({"update", "h2d_1", "d2h_1", "both_1", "dram_step", "dram_update_beside_both", "product"} <= set(keys))
        for key, _, value, _ in found:
            self.assertGreater(value, 0.0, key)

    def test_an_update_goes_over_all_of_its_memory_in_turn(self):
        update = limits.Update(limits.Update.PIECES * 1024)
        for _ in range(limits.Update.PIECES):
            update()
        # A gradient's element is added to one of six of the state's: 2 bytes a parameter against 12.
        self.assertEqual((update.state == 2.0).sum().item() * 6, update.state.numel())
        touched = 2 * update.state[0].nbytes + update.gradient[0].nbytes
        self.assertEqual((touched, update.bytes), (26 * 1024, 26 * 1024))

    def test_a_step_moves_six_bytes_a_parameter_from_places_in_turn(self):
        copied = []

        class Recorded:
            """The place of a tensor that counts what is copied to it."""
            def __init__(self, size):
                self.size = size

            def __len__(self):
                return self.size

            def __getitem__(self, piece):
                return types.SimpleNamespace(copy_=lambda source, non_blocking: copied.append((piece.start, piece.stop)))

        with without_a_gpu():
            gpu = limits.Gpu(torch.device("cpu"), 4096, 1)
            gpu.device_in, gpu.host_in = [Recorded(4096)], [Recorded(4096)]
            update = limits.Update(limits.Update.PIECES * 768)
            gpu.rate_of_step(update, repeats=1)
        moved = sum(stop - start for start, stop in copied)
        self.assertEqual(moved, 2 * limits.Update.PIECES * 768 * 6)  # Twice: the first time does not count.
        self.assertEqual(copied[:3], [(0, 3072), (0, 1536), (3072, 4096)])


if __name__ == "__main__":
    unittest.main()
