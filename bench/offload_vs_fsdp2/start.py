#!/usr/bin/env python3
"""How long OOM takes from a job's submission to its first step, by phase.

    bench/offload_vs_fsdp2/start.py --oom FOLDER                    FOLDER: as deploy/package.sh makes it

A job from bfloat16 safetensors in the page cache (made here, of random numbers, in /dev/shm where it has room), then the
same from random weights; each with an oomd of its own, which has no pool to hand on. Phases end with what the job host
writes to its log, the last one with the line of the first step in the step log.
"""

import argparse
import datetime
import json
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "systems")]

import geometry  # noqa: E402
import machine  # noqa: E402
import oom  # noqa: E402
import weights  # noqa: E402
from processes import GIB  # noqa: E402

SHARED_MEMORY = pathlib.Path("/dev/shm")
SOURCES = ("safetensors", "random")
# (what a phase is, the line of the job host's log that ends it). A line that is not there leaves its time to the next.
LOGGED_PHASES = (
    ("job host started", r"attempt 1 begins"),
    ("worker processes started", r"rank \d+ runs as process"),
    ("pools touched", r"pools are touched"),
    ("state in the pools", r"state after 0 steps is in the pools"),
    ("workers ready", r"JOB_STATE_RUNNING"))


def seconds_since_1970(text):
    """Of a time as logs and JSON have it; Python reads at most six digits of a second."""
    return datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00")).timestamp()


def log_times(text):
    """[(phase, its end in seconds since 1970)] of the job host's log; of several lines the last one counts."""
    found = []
    for phase, pattern in LOGGED_PHASES:
        lines = [line for line in text.splitlines() if re.search(pattern, line)]
        if lines:
            found.append((phase, seconds_since_1970(lines[-1].split()[0])))
    return found


def phases_of(submitted, accepted, logged, first_step):
    """[{"phase", "seconds"}] from one end to the next."""
    ends = [("planned and accepted", accepted), *logged, ("first step", first_step)]
    starts = [submitted, *(end for _, end in ends)]
    return [{"phase": phase, "seconds": end - start} for (phase, end), start in zip(ends, starts)]


def measure(options, source, model):
    """`model`: of the job. Raises JobFailed."""
    folder = options.work / source
    folder.mkdir(parents=True, exist_ok=True)
    with oom.Output(folder / "output", oom.promised_bytes(options.model)) as output, oom.Daemon(
            options.oom, folder / "oomd", options.host_memory) as daemon:
        path = oom.write_job(folder / "job.yaml", options, options.batch, output.folder, model=model,
                             trace={"step_count": 0})
        submitted = time.time()
        job = oom.Job(daemon, path, output.folder)
        try:
            line = job.wait_steps(1, options.limit)[0]
            logged = log_times((output.folder / "logs/attempt-1/jobhost.log").read_text())
            described = daemon.get(job.name)
        finally:
            daemon.cancel(job.name)
    accepted, first_step = seconds_since_1970(described["createTime"]), submitted + job.first_step_seconds
    return {"source": source, "seconds": first_step - submitted, "accepted_to_first_step_seconds": first_step - accepted,
            "phases": phases_of(submitted, accepted, logged, first_step), "step_seconds": line["step_seconds"],
            "plan": oom.plan_summary(described["plan"])}


def markdown(results):
    settings, starts = results["settings"], [start for start in results["starts"] if "error" not in start]
    lines = [f"# Start of a job: {settings['geometry']}, {settings['layers']} layers", "",
             f"{results['parameters'] / 1e9:.2f} billion parameters, {results['safetensors_bytes'] / GIB:.1f} GiB of "
             f"safetensors in page cache, batch {settings['batch']} of {settings['length']}, gpu_memory "
             f"{settings['budget']}.", "", machine.sentence(results["machine"]) + ".", ""]
    lines += [f"{start['source']}: failed: {start['error'].splitlines()[0]}\n" for start in results["starts"]
              if "error" in start]
    if not starts:
        return "\n".join(lines)
    lines += ["| until, s | " + " | ".join(start["source"] for start in starts) + " |", "| --- |" + " --- |" * len(starts)]
    seconds = [{phase["phase"]: phase["seconds"] for phase in start["phases"]} for start in starts]
    for phase in dict.fromkeys(name for of_start in seconds for name in of_start):
        cells = [f"{of_start[phase]:.2f}" if phase in of_start else "-" for of_start in seconds]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    for name, key in (("submission to first step", "seconds"), ("accepted to first step", "accepted_to_first_step_seconds")):
        lines.append(f"| {name} | " + " | ".join(f"{start[key]:.2f}" for start in starts) + " |")
    return "\n".join(lines) + "\n"


def folder_for(size):
    """In memory where there is room twice over: the job needs its own."""
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    return pathlib.Path(tempfile.mkdtemp(prefix="oom-bench-", dir=SHARED_MEMORY if in_memory else None))


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oom", type=pathlib.Path, required=True, metavar="FOLDER", help="package of OOM")
    parser.add_argument("--geometry", choices=sorted(geometry.PUBLISHED), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="default 8, of mixtral 2, of hybrids a period of their mixers")
    parser.add_argument("--sources", type=lambda text: text.split(","), default=list(SOURCES),
                        help=f"some of {','.join(SOURCES)}, with commas")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budget", default="all", help="GPU memory, such as 24GiB; all: what there is")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--host-memory", help="what oomd may give to jobs, such as 110GiB; default: its own rule")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a start may take (120)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results", metavar="FOLDER")
    parser.add_argument("--work", type=pathlib.Path, metavar="FOLDER",
                        help="kept, and weights that are there used again; default: temporary, in /dev/shm if it has room")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_const", const="tiny", dest="geometry", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not set(options.sources) <= set(SOURCES):
        parser.error(f"--sources: some of {','.join(SOURCES)}, with commas")
    options.clip = 0.0
    return options


def make_weights(folder, config):
    """The bytes of the weights, which are made unless they are there."""
    index = folder / "model.safetensors.index.json"  # Written last.
    if index.exists() and json.loads((folder / "config.json").read_text()) == config | {"dtype": "bfloat16"}:
        return json.loads(index.read_text())["metadata"]["total_size"]
    start = time.monotonic()
    size = weights.write_weights(folder, config)
    seconds = time.monotonic() - start
    print(f"{size / GIB:.1f} GiB of weights written in {seconds:.1f} s", flush=True)
    return size


def run(options):
    config = geometry.config_of(options.geometry, options.layers)
    parameters = geometry.parameter_count(config)
    is_temporary = options.work is None
    options.work = work = (options.work or folder_for(2 * parameters)).resolve()
    try:
        # Its config.json serves both sources.
        options.model = geometry.write_config(work / "config", config)
        options.data = geometry.write_random_dataset(work / "data", max(64, options.batch), options.length,
                                                     config["vocab_size"])
        settings = {name: getattr(options, name) for name in ("geometry", "batch", "length", "budget", "gpus")}
        results = {"schema": 1, "machine": machine.describe(options.gpus), "oom": machine.oom_version(options.oom),
                   "parameters": parameters, "settings": settings | {"layers": config["num_hidden_layers"]},
                   "safetensors_bytes": 2 * parameters, "starts": []}
        models = {"random": {"config": str(options.model / "config.json"), "initialize": "random"},
                  "safetensors": {"path": str(work / "weights")}}
        if "safetensors" in options.sources:
            results["safetensors_bytes"] = make_weights(work / "weights", config)
        for source in options.sources:
            try:
                results["starts"].append(measure(options, source, models[source]))
            except oom.JobFailed as error:
                results["starts"].append({"source": source, "error": str(error)})
                print(f"{source}: FAILED: {error}", flush=True)
        name = f"start-{options.geometry}-{config['num_hidden_layers']}-layers"
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.output / f"{name}.md").write_text(markdown(results))
        print("\n" + markdown(results), flush=True)
        return results
    finally:
        if is_temporary:
            shutil.rmtree(work, ignore_errors=True)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Contexts end what they have started.
    results = run(parse())
    return 1 if any("error" in start for start in results["starts"]) else 0


if __name__ == "__main__":
    sys.exit(main())
