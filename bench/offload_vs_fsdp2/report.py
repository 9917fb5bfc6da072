"""Results on disk: JSON for programs, Markdown for people. Ratios are between measurements of one run."""

import json
import math
import os
import pathlib

from machine import sentence
from processes import GIB

MEANING = {
    "fsdp2": "FSDP2 with CPU offload", "gpu": "FSDP2, everything on the GPU", "oom-all": "OOM, the whole GPU"}


def meaning(system):
    whole, _, packed = system.partition("-packed-")
    if packed:
        return f"{meaning(whole)}, documents of {packed}"
    return MEANING.get(system) or f"OOM, gpu_memory {system.removeprefix('oom-')}"


def host_bytes(entry):
    return entry["peaks"].get("host_bytes")


def gpu_bytes(entry):
    return entry["peaks"].get("gpu_bytes", entry.get("reported_gpu_bytes"))


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _by_batch(measurements, system):
    return {entry["batch"]: entry for entry in measurements if entry["system"] == system and "step_seconds" in entry}


def ratios(measurements):
    """{system: {"speed_over_fsdp2": {"4": 3.1, ..., "geometric_mean": 3.0}, "step_over_gpu": ..., "host_over_fsdp2": ...}}"""
    found = {}
    offloaded, resident = _by_batch(measurements, "fsdp2"), _by_batch(measurements, "gpu")
    for system in dict.fromkeys(entry["system"] for entry in measurements):
        own = _by_batch(measurements, system)
        rows = {}
        if system != "fsdp2":
            rows["speed_over_fsdp2"] = {b: offloaded[b]["step_seconds"] / own[b]["step_seconds"] for b in own if b in offloaded}
            rows["host_over_fsdp2"] = {b: host_bytes(own[b]) / host_bytes(offloaded[b]) for b in own if b in offloaded
                                       and host_bytes(own[b]) and host_bytes(offloaded[b])}
        if system not in ("fsdp2", "gpu"):
            rows["step_over_gpu"] = {b: own[b]["step_seconds"] / resident[b]["step_seconds"] for b in own if b in resident}
        if "-packed-" in system:
            whole = _by_batch(measurements, system.partition("-packed-")[0])
            rows["step_over_whole_sequences"] = {
                b: own[b]["step_seconds"] / whole[b]["step_seconds"] for b in own if b in whole}
        found[system] = {
            name: {str(batch): value for batch, value in values.items()} | {"geometric_mean": geometric_mean(values.values())}
            for name, values in rows.items() if values}
    return {system: rows for system, rows in found.items() if rows}


def _number(value, digits):
    return "-" if value is None else f"{value:,.{digits}f}"


def _gib(value):
    return _number(None if value is None else value / GIB, 1)


def _measurement_row(entry):
    if "error" in entry:
        return f"| {entry['batch']} | {meaning(entry['system'])} | failed: {entry['error'].splitlines()[0][:160]} | | | | |"
    note = f" ({entry['micro_batch']} at a time)" if entry.get("micro_batch", entry["batch"]) < entry["batch"] else ""
    return (f"| {entry['batch']} | {meaning(entry['system'])}{note} | {_number(entry['step_seconds'], 3)} "
            f"| {_number(entry.get('single_step_seconds'), 3)} | {_number(entry['tokens_per_second'], 0)} "
            f"| {_gib(gpu_bytes(entry))} | {_gib(host_bytes(entry))} |")


def _kernels(measurements):
    """Lines that name the kernels of FSDP2 which are not torch's or transformers' own."""
    names = dict.fromkeys(entry["delta_kernels"] for entry in measurements if "delta_kernels" in entry)
    return [f"Gated DeltaNet of FSDP2: {'; '.join(names)}.", ""] if names else []


def markdown(results):
    settings = results["settings"]
    clip = f"clipped at {settings['clip']}" if settings["clip"] else "not clipped"
    lines = [
        f"# {settings['geometry']}, {settings['layers']} layers, sequences of {settings['length']}", "",
        f"{results['parameters'] / 1e9:.2f} billion parameters, {settings['gpus']} GPU(s), gradient {clip}; step time over "
        f"{settings['steps']} steps after {settings['warmup']}.", "", sentence(results["machine"]) + ".", "",
        *_kernels(results["measurements"]),
        "| batch | system | step, s | single drained step, s | tokens/s | GPU peak, GiB | host peak, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [_measurement_row(entry) for entry in results["measurements"]]
    titles = {"speed_over_fsdp2": "speed over offloaded FSDP2", "step_over_gpu": "step time against everything on the GPU",
              "host_over_fsdp2": "host memory against offloaded FSDP2",
              "step_over_whole_sequences": "step time against whole sequences"}
    batches = list(map(str, sorted({entry["batch"] for entry in results["measurements"]})))
    if results["ratios"]:
        lines += ["", "| system | ratio | " + " | ".join(f"batch {batch}" for batch in batches) + " | geometric mean |",
                  "| --- | --- |" + " --- |" * (len(batches) + 1)]
    for system, rows in results["ratios"].items():
        for name, values in rows.items():
            cells = [_number(values.get(batch), 2) for batch in [*batches, "geometric_mean"]]
            lines.append(f"| {meaning(system)} | {titles[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _replace(path, text):
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write(folder, name, results):
    """`results` gets its ratios."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    results["ratios"] = ratios(results["measurements"])
    _replace(folder / f"{name}.json", json.dumps(results, indent=1) + "\n")
    _replace(folder / f"{name}.md", markdown(results))
