"""Runs of the plain PyTorch loop (tests/parity/reference_loop.py) for a job file, and what the tests hold them against."""

import pathlib

import torch

import harness  # noqa: F401  Puts tests/parity on the path.

import compare
import reference_loop

LOSS_BAR = 1e-5
MASTER_BAR = 1e-3
MOMENT_BAR = 1e-4


def run(job, output, threads=1, **options):
    """`options` of reference_loop.run. Returns its trainer."""
    torch.set_num_threads(threads)
    try:
        return reference_loop.run(reference_loop.load_job(job), output, **options)
    finally:
        torch.set_num_threads(1)


def initial(output):
    return compare.load_tensors(pathlib.Path(output) / "state/step-0/master")


def loss_error(run_output, output, key="loss"):
    """The worst relative difference over the steps of the reference."""
    return compare.worst_relative(compare.load_steps(run_output), compare.load_steps(output), key)


def state_errors(state_folder, output, step):
    """The worst tensor of each kind: {"master": (error, name), ...}; masters as change since the start."""
    errors = compare.state_errors(state_folder, pathlib.Path(output) / f"state/step-{step}", initial(output))
    return {kind: next((error, name) for name, error in by_name.items()) for kind, by_name in errors.items()}


def failures(run_output, states, output, share=1.0):
    """What of a run does not hold its bar. `states`: {step: folder}. `share` of the bars."""
    found = []
    error = loss_error(run_output, output)
    if not error <= share * LOSS_BAR:
        found.append(f"loss: {error:.3g}")
    for step, folder in states.items():
        for kind, (error, name) in state_errors(folder, output, step).items():
            if not error <= share * (MASTER_BAR if kind == "master" else MOMENT_BAR):
                found.append(f"step {step} {kind} of {name}: {error:.3g}")
    return found
