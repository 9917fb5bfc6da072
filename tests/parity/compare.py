"""Errors of tensors and runs: ||a - b|| / ||b|| by tensor, and what the parity tests hold against their bars.

    tests/parity/compare.py RUN REFERENCE [--step N]     prints the worst tensors of state/step-N and the worst loss

RUN and REFERENCE are folders with steps.jsonl and state/step-N/{master,moment1,moment2}; `oom export --state` makes
the latter. Masters are compared as their change since step 0, which REFERENCE holds in state/step-0.
"""

import argparse
import json
import pathlib

import torch
from safetensors import safe_open


def relative_error(a, b):
    """||a - b|| / ||b|| in double. Two zero tensors agree; a NaN or a different shape never does."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    difference, norm = torch.linalg.vector_norm(a - b).item(), torch.linalg.vector_norm(b).item()
    if difference == 0:
        return 0.0
    return difference / norm if norm > 0 and difference == difference else float("inf")


def relative_errors(run, reference, initial=None):
    """By tensor name, worst first. With `initial`, of the changes since then. Missing and surplus names: inf."""
    errors = {name: float("inf") for name in run.keys() ^ reference.keys()}
    for name in run.keys() & reference.keys():
        a, b = run[name], reference[name]
        if initial is not None and a.shape == b.shape:
            a, b = a.double() - initial[name].double(), b.double() - initial[name].double()
        errors[name] = relative_error(a, b)
    return dict(sorted(errors.items(), key=lambda item: (-item[1], item[0])))


def load_tensors(folder):
    """Every tensor of the *.safetensors files of a folder."""
    tensors = {}
    paths = sorted(pathlib.Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder}: holds no *.safetensors")
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensors[name] = file.get_tensor(name)
    return tensors


def load_steps(folder):
    """The objects of steps.jsonl, by step."""
    with open(pathlib.Path(folder) / "steps.jsonl", encoding="utf-8") as file:
        return {entry["step"]: entry for entry in map(json.loads, file)}


def worst_relative(run, reference, key="loss"):
    """The largest relative difference of a key over all steps of the reference; inf if a step is missing."""
    worst = 0.0
    for step, entry in reference.items():
        if step not in run or run[step].get(key) is None:
            return float("inf")
        difference = abs(run[step][key] - entry[key])
        # Not max(): a NaN must win.
        relative = difference / max(abs(entry[key]), 1e-300) if difference else 0.0
        worst = worst if worst >= relative else relative
    return worst


def state_errors(run, reference, initial):
    """Of two state folders: {"master": {name: error}, "moment1": ..., "moment2": ...}."""
    run, reference = pathlib.Path(run), pathlib.Path(reference)
    return {kind: relative_errors(load_tensors(run / kind), load_tensors(reference / kind),
                                  initial if kind == "master" else None)
            for kind in ("master", "moment1", "moment2")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("reference", type=pathlib.Path)
    parser.add_argument("--step", type=int, action="append", default=[])
    parser.add_argument("--worst", type=int, default=5)
    options = parser.parse_args()
    run, reference = load_steps(options.run), load_steps(options.reference)
    print(f"loss: {worst_relative(run, reference):.3g}")
    print(f"gradient_norm: {worst_relative(run, reference, 'gradient_norm'):.3g}")
    initial = load_tensors(options.reference / "state/step-0/master")
    for step in options.step:
        place = f"state/step-{step}"
        for kind, errors in state_errors(options.run / place, options.reference / place, initial).items():
            print(f"step {step} {kind}:")
            for name, error in list(errors.items())[:options.worst]:
                print(f"  {error:.3g}  {name}")


if __name__ == "__main__":
    main()
