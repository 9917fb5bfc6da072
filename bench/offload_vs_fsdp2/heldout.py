#!/usr/bin/env python3
"""Trains one checkpoint on real text in FSDP2 and in OOM, and lays their held-out losses side by side.

    bench/offload_vs_fsdp2/heldout.py --oom FOLDER [--steps 200] [--seeds 1,2,3]

The text is the Python sources of the installed torch, every twentieth file held out, packed with tools/pack.py (as plain
bytes where its needs are missing). Both systems start from the same safetensors, see the same sequences in the same
order, and have the same optimizer, schedule and clipping.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
for place in (HERE, HERE / "peers", HERE / "systems"):
    sys.path.insert(0, str(place))

import numpy as np  # noqa: E402

import geometry  # noqa: E402
import machine  # noqa: E402
from processes import Failed, Gpus, Program, say  # noqa: E402

TOOLS = HERE.parents[1] / "tools"
BAR = 0.0011
BYTE_END = 256
WARMUP_STEPS, MINIMUM_RATIO, WEIGHT_DECAY = 20, 0.1, 0.1


# Text.

def source_files():
    """(train, held out): Python files of the installed torch, in order."""
    folder = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    files = [path for path in sorted(folder.rglob("*.py")) if path.stat().st_size > 1000]
    return [path for i, path in enumerate(files) if i % 20], files[::20]


def enough(files, size):
    """The first of `files` that hold `size` bytes together."""
    chosen, total = [], 0
    for path in files:
        if total >= size:
            break
        chosen.append(path)
        total += path.stat().st_size
    return chosen


def as_bytes(files):
    """Tokens without a tokenizer: bytes, and an end after each file."""
    parts = []
    for path in files:
        parts += [np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint32), np.array([BYTE_END], np.uint32)]
    return np.concatenate(parts)


def packed(tokenizer, files, folder):
    listing = folder.with_name(folder.name + ".txt")
    listing.write_text("\n".join(map(str, files)) + "\n")
    subprocess.run([sys.executable, TOOLS / "pack.py", "--tokenizer", tokenizer, "--output", folder, "--files-from", listing,
                    "--format", "text", "--quiet"], check=True)
    return np.load(folder / "tokens.npy")


def has_tools():
    return (TOOLS / "pack.py").exists() and all(map(importlib.util.find_spec, ("tokenizers", "transformers", "pyarrow")))


def make_text(work, length, train_sequences, held_out_sequences, vocabulary):
    """Writes work/train and work/held-out. Returns the size of the vocabulary."""
    train_files, held_out_files = source_files()
    # At most six bytes a token; what is too much is cut off.
    train_files = enough(train_files, 6 * train_sequences * length)
    held_out_files = enough(held_out_files, 6 * held_out_sequences * length)
    if has_tools():
        listing = work / "tokenizer.txt"
        listing.write_text("\n".join(map(str, train_files[::4])) + "\n")
        tokenizer = work / "tokenizer"
        subprocess.run([sys.executable, TOOLS / "train_tokenizer.py", "--vocabulary", str(vocabulary), "--output", tokenizer,
                        "--files-from", listing], check=True, stdout=sys.stderr)
        tokens = [packed(tokenizer, files, work / name)
                  for files, name in ((train_files, "packed-train"), (held_out_files, "packed-held-out"))]
    else:
        vocabulary = BYTE_END + 1
        tokens = [as_bytes(train_files), as_bytes(held_out_files)]
    for name, values, most in (("train", tokens[0], train_sequences), ("held-out", tokens[1], held_out_sequences)):
        count = min(most, (len(values) - 1) // length)
        tokens_used = values[:count * length + 1]
        geometry.write_dataset(work / name, tokens_used, geometry.document_offsets(len(tokens_used), length), vocabulary)
    return vocabulary


def write_checkpoint(folder, vocabulary, scale, seed):
    """A Hugging Face folder with random weights in float32. `scale` divides the widths, for tests."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = geometry.config_of("qwen3-30b-a3b", 4) | {
        "vocab_size": vocabulary, "hidden_size": 512 // scale, "intermediate_size": 1024 // scale,
        "moe_intermediate_size": 256 // scale, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64 // scale,
        "num_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 4096}
    geometry.write_config(folder, config)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.save_pretrained(folder)
    return geometry.parameter_count(config)


# The two systems, each as a program of its own: `heldout.py --role fsdp2|oom`.

def learning_rate(options, step):
    """Linear warm-up, then a cosine; of the step from 0."""
    warmup = min(WARMUP_STEPS, options.steps)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    x = (step - warmup) / (options.steps - warmup)
    return options.learning_rate * (MINIMUM_RATIO + (1 - MINIMUM_RATIO) * (1 + math.cos(math.pi * x)) / 2)


def train_fsdp2(options):
    import fsdp2
    import torch

    fsdp2.start_ranks(1)
    device = fsdp2.join_group(options.device)
    with fsdp2.fastest_attention("cudnn"):
        model = fsdp2.build(options.work / "model", device)
        optimizer = fsdp2.optimizer_for(model, options.learning_rate, WEIGHT_DECAY)
        data, held_out = (geometry.Sequences(options.work / name, options.length) for name in ("train", "held-out"))
        trainer = fsdp2.Trainer(model, optimizer, data, device, options.clip)

        @torch.no_grad()
        def held_out_loss():
            total, count = 0.0, min(options.held_out, held_out.count)
            for first in range(0, count, options.batch):
                tokens = torch.from_numpy(held_out.read(first, min(options.batch, count - first))).to(device)
                total += model(tokens, fsdp2.targets_of(tokens), 1).item()
            return total / (count * (options.length - 1))

        losses, held_out_losses = [], {}
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)
            losses.append(trainer.step(options.batch, options.batch))
            if (step + 1) % options.every == 0:
                held_out_losses[step + 1] = held_out_loss()
                say("progress", step=step + 1, held_out_loss=held_out_losses[step + 1])
    say("result", losses=[loss.item() for loss in losses], held_out_losses=held_out_losses)


def train_oom(options):
    import oom

    output = options.work / "oom-output"
    shutil.rmtree(output, ignore_errors=True)  # Of the seed before.
    settings = {
        "model": {"path": str(options.work / "model")}, "sequence_length": options.length, "global_batch": options.batch,
        "data": {"train": str(options.work / "train"), "evaluation": str(options.work / "held-out"), "shuffle": False},
        "steps": options.steps, "precision": "bfloat16", "devices": {"kind": options.device, "count": 1},
        "optimizer": {"learning_rate": options.learning_rate, "betas": [0.9, 0.95], "epsilon": 1e-8,
                      "weight_decay": WEIGHT_DECAY, "max_gradient_norm": options.clip},
        "schedule": {"kind": "cosine", "warmup_steps": min(WARMUP_STEPS, options.steps), "minimum_ratio": MINIMUM_RATIO},
        "evaluation": {"every_steps": options.every, "sequences": options.held_out}, "retry": {"max_failures": 0},
        "checkpoint": {"every_steps": 0, "keep": 2}, "resume": "never", "trace": {"step_count": 0}, "output": str(output)}
    if options.budget != "all":
        settings["budgets"] = {"gpu_memory": options.budget}
    path = options.work / "oom.yaml"
    path.write_text(json.dumps(settings, indent=1))
    with oom.Daemon(options.oom, options.work / "oomd", options.host_memory) as daemon:
        job = oom.Job(daemon, path, output)
        try:
            for step in range(options.every, options.steps + 1, options.every):
                lines = job.wait_steps(step)
                say("progress", step=step, held_out_loss=lines[-1].get("evaluation_loss"))
            lines = job.wait_steps(options.steps)
        finally:
            daemon.cancel(job.name)
    say("result", losses=[line["loss"] for line in lines],
        held_out_losses={line["step"]: line["evaluation_loss"] for line in lines if "evaluation_loss" in line})


# Side by side.

def run_role(options, work, role, gpus):
    command = [sys.executable, __file__, "--role", role, "--work", work]
    for name in ("steps", "every", "batch", "length", "held_out", "learning_rate", "clip", "device", "budget"):
        command += ["--" + name.replace("_", "-"), getattr(options, name)]
    command += ["--oom", options.oom] + (["--host-memory", options.host_memory] if options.host_memory else [])
    start, result = time.monotonic(), None
    with Program(command, options.output / "logs" / f"held-out-{role}.log", gpus) as program:
        for event in program.events(lambda: options.limit):
            if event["event"] == "progress":
                print(f"[{time.monotonic() - start:4.0f} s] {role}: step {event['step']}, held-out loss "
                      f"{event['held_out_loss']:.5f}", flush=True)
            elif event["event"] == "result":
                result = event
    if result is None:
        raise Failed(f"{role} ended without a result")
    return {"losses": result["losses"], "held_out_losses": result["held_out_losses"], "seconds": time.monotonic() - start}


def difference(ours, theirs):
    """Relative differences of held-out losses by step."""
    ours, theirs = ours["held_out_losses"], theirs["held_out_losses"]
    return {step: (ours[step] - theirs[step]) / theirs[step] for step in theirs if step in ours}


def last(differences):
    return list(differences.values())[-1]


def compare(run):
    """Training of many steps forgets its last bits: two runs of one program, and two programs, drift apart alike. So what
    the peer differs from itself by stands beside what OOM differs from it by."""
    run["difference"] = difference(run["oom"], run["fsdp2"])
    run["peer_difference"] = difference(run["fsdp2_again"], run["fsdp2"])


def summarize(results):
    ends = [last(run["difference"]) for run in results["runs"]]
    results["mean_difference"] = sum(ends) / len(ends)
    results["within_bar"] = abs(results["mean_difference"]) <= BAR


def markdown(results):
    settings = results["settings"]
    lines = ["# Held-out loss on real text", "",
             f"{results['parameters'] / 1e6:.1f} million parameters from one checkpoint a seed, vocabulary "
             f"{results['vocabulary']:,}, batch {settings['batch']} of {settings['length']} tokens, {settings['steps']} steps, "
             f"clipped at {settings['clip'] or 'nothing'}.", "", machine.sentence(results["machine"]) + ".", ""]
    if results["errors"]:
        return "\n".join([*lines, *(f"{name}: {error}" for name, error in results["errors"].items())]) + "\n"
    lines += ["| seed | step | FSDP2 | FSDP2 again | OOM | again against FSDP2 | OOM against FSDP2 |",
              "| --- | --- | --- | --- | --- | --- | --- |"]
    for run in results["runs"]:
        for step in run["difference"]:
            losses = " | ".join(f"{run[name]['held_out_losses'][step]:.5f}" for name in ("fsdp2", "fsdp2_again", "oom"))
            lines.append(f"| {run['seed']} | {step} | {losses} | {run['peer_difference'][step]:+.3%} | "
                         f"{run['difference'][step]:+.3%} |")
    holds = "within" if results["within_bar"] else "beyond"
    return "\n".join([*lines, "", f"At the last step OOM differs by {results['mean_difference']:+.3%} in the mean: {holds} "
                                  f"{BAR:.2%}."]) + "\n"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oom", type=pathlib.Path, required=True, metavar="FOLDER", help="package of OOM")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, help="steps between held-out losses; default a quarter of --steps")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3],
                        help="of the checkpoint's weights, one training each (1,2,3)")
    parser.add_argument("--held-out", type=int, default=64, help="held-out sequences")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--budget", default="all", help="OOM's GPU memory, such as 2GiB")
    parser.add_argument("--host-memory", help="what oomd may give to jobs; default: its own rule")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results", metavar="FOLDER")
    parser.add_argument("--work", type=pathlib.Path, metavar="FOLDER", help="default: temporary")
    parser.add_argument("--limit", type=float, default=200, help="seconds between two held-out losses (200)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("fsdp2", "oom"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.every = options.every or max(1, options.steps // 4)
    if options.steps % options.every:
        parser.error("--every divides --steps")
    options.output, options.oom = options.output.resolve(), options.oom.resolve()
    return options


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.role:
        {"fsdp2": train_fsdp2, "oom": train_oom}[options.role](options)
        return 0
    work = pathlib.Path(options.work or tempfile.mkdtemp(prefix="oom-bench-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    gpus = Gpus(1)
    try:
        vocabulary = make_text(work, options.length, options.steps * options.batch, options.held_out, options.vocabulary)
        settings = {name: getattr(options, name) for name in (
            "steps", "every", "batch", "length", "held_out", "learning_rate", "clip", "budget", "seeds")}
        results = {"schema": 2, "machine": machine.describe(1), "settings": settings, "vocabulary": vocabulary, "errors": {},
                   "runs": []}
        for seed in options.seeds:
            results["parameters"] = write_checkpoint(work / "model", vocabulary, options.scale, seed)
            print(f"seed {seed}: text and checkpoint are made, vocabulary {vocabulary:,}", flush=True)
            run = {"seed": seed}
            for name, role in (("fsdp2", "fsdp2"), ("fsdp2_again", "fsdp2"), ("oom", "oom")):
                try:
                    run[name] = run_role(options, work, role, gpus)
                except Failed as error:
                    results["errors"][f"seed {seed}, {name}"] = str(error)
                    print(f"{name}: FAILED: {error}", flush=True)
            results["runs"].append(run)
            if not results["errors"]:
                compare(run)
        if not results["errors"]:
            summarize(results)
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "held-out.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.output / "held-out.md").write_text(markdown(results))
        print("\n" + markdown(results), flush=True)
        return 0 if results.get("within_bar") else 1
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
