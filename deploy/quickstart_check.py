"""Holds a finished quick-start run against what it promises, and prints the numbers.

    quickstart_check.py RUN DATA

transformers must load RUN/export and find OOM's held-out loss; the model must be at least 1 nat better than the best
model without context (the unigram entropy of the text).
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
root = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(root / "tools"), str(root / "tests" / "parity")]

import torch  # noqa: E402

from packed_data import PackedData  # noqa: E402
from packing.dataset import Dataset  # noqa: E402
from reference_loop import evaluate, load_job, load_model  # noqa: E402


def main():
    run, data = map(pathlib.Path, sys.argv[1:])
    job = load_job(run.with_suffix(".yaml"), order_matters=False)
    with open(run / "steps.jsonl", encoding="utf-8") as file:
        steps = [json.loads(line) for line in file]
    last = steps[-10:]
    training = sum(entry["loss"] for entry in last) / len(last)
    logged = next(e["evaluation_loss"] for e in reversed(steps) if e.get("evaluation_loss") is not None)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = load_model(run / "export", torch.float32).eval()
    measured = evaluate(model, PackedData(data / "held-out", job.length), job.evaluation_sequences)
    entropy = Dataset(data / "train").unigram_entropy()
    print(f"  training loss, mean of the last {len(last)} steps  {training:.4f} nats")
    print(f"  unigram entropy of the text             {entropy:.4f} nats")
    print(f"  held-out loss: OOM {logged:.5f}, transformers on the export {measured:.5f}")
    failures = []
    if not training <= entropy - 1:
        failures.append("the training loss is not 1 nat below the unigram entropy")
    if not abs(measured - logged) <= 1e-4 * logged:
        failures.append("transformers finds another held-out loss than OOM")
    for failure in failures:
        print(f"quick start: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
