"""Reads the files of runtime/trace as other programs do: JSON, JSON lines, and TensorBoard's records.

The records are parsed by the few lines below, from the published formats (TFRecord framing, protobuf wire
format), and by TensorBoard itself where it is installed.
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

STEP_KEYS = [
    "step", "loss", "auxiliary_loss", "tokens", "gradient_norm", "learning_rate", "step_seconds",
    "tokens_per_second", "exposed_wait_seconds", "gpu_bytes_peak", "host_bytes_peak"]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    at = 0
    while at < len(data):
        length, length_crc = struct.unpack_from("<QI", data, at)
        assert masked(data[at:at + 8]) == length_crc, "length CRC"
        payload = data[at + 12:at + 12 + length]
        (payload_crc,) = struct.unpack_from("<I", data, at + 12 + length)
        assert len(payload) == length and masked(payload) == payload_crc, "payload CRC"
        yield payload
        at += 16 + length


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data):
    """(field number, value) of a protobuf message: int, float or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire == 1:
            (value,), at = struct.unpack_from("<d", data, at), at + 8
        elif wire == 5:
            (value,), at = struct.unpack_from("<f", data, at), at + 4
        elif wire == 2:
            length, at = varint(data, at)
            value, at = data[at:at + length], at + length
        else:
            raise ValueError(f"wire type {wire}")
        yield number, value


class TraceFormatsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.temporary.name)
        subprocess.run([PROGRAM, str(cls.root)], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def test_trace_is_json_with_named_rows(self):
        trace = json.loads((self.root / "trace.json").read_text())
        events = trace["traceEvents"]
        rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        shown = {e["name"]: (processes[e["pid"]], rows[e["pid"], e["tid"]], e["ts"], e["dur"],
                             e.get("args", {}).get("bytes"))
                 for e in events if e["ph"] == "X"}
        self.assertEqual(shown, {
            'load "layers.0"': ("rank 0", "H2D", 1000.125, 10, 4096),
            "forward layers.0": ("rank 0", "compute", 1010.5, 20.25, None),
            "update 3": ("job host", "optimizer numa 0", 1005, 1, 26 * 4096)})

    def test_step_log_has_the_fixed_keys(self):
        lines = [json.loads(line) for line in (self.root / "steps.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], list(range(1, 301)))
        for line in lines:
            expected = STEP_KEYS + (["evaluation_loss"] if line["step"] % 100 == 0 else [])
            self.assertEqual(list(line), expected)
            self.assertEqual(line["loss"], 10.0 / line["step"])  # Every bit.
        self.assertEqual(lines[99]["evaluation_loss"], 1.0 / 3.0)

    def test_event_file_parses(self):
        (path,) = (self.root / "tensorboard").iterdir()
        self.assertIn("tfevents", path.name)
        events = [list(fields(payload)) for payload in records(path.read_bytes())]
        self.assertEqual(events[0], [(1, 1.7e9), (2, 0), (3, b"brain.Event:2")])
        self.assertEqual(events[1][:2], [(1, 1.7e9), (2, 1)])
        self.assertEqual(list(fields(events[1][2][1])), [(1, 1)])  # SessionLog START.
        self.assertEqual(len(events), 302)
        for step, event in enumerate(events[2:], start=1):
            self.assertEqual(event[:2], [(1, 1.7e9 + step), (2, step)])
            number, summary = event[2]
            self.assertEqual(number, 5)
            values = [dict(fields(value)) for _, value in fields(summary)]
            self.assertEqual([value[1] for value in values], [b"loss", b"learning_rate"])
            (expected,) = struct.unpack("<f", struct.pack("<f", 10.0 / step))
            self.assertEqual(values[0][2], expected)

    def test_tensorboard_reads_it(self):
        try:
            from tensorboard.backend.event_processing import event_accumulator
        except ImportError:
            self.skipTest("tensorboard is not installed")
        accumulator = event_accumulator.EventAccumulator(str(self.root / "tensorboard"))
        accumulator.Reload()
        scalars = accumulator.Scalars("loss")
        self.assertEqual([s.step for s in scalars], list(range(1, 301)))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
