#!/usr/bin/env python3
"""Holds a plan, and steps measured under it, against the limits of a machine.

    bench/limits/limits.py --output limits.json                       the machine, once
    bench/roofline/roofline.py RESULTS.json --limits limits.json      of run.py: each measurement of OOM
    bench/roofline/roofline.py PLAN.json --limits limits.json --config MODEL/config.json --length 4096
                                                                      of `oom plan -o json`; --step 1.19 if it was measured

For each resource: what a step asks of it (FLOPs; bytes as the plan counts them) over the rate that was measured, in
seconds. No step is shorter than the longest of them: the limit. Host memory has two rates, its best and the one under a
step's own contention (update and transfers at once, in a step's proportions). share of limit = limit at the best rates
/ step. exposed = (step - longest under contention) / step: what overlap left over.
"""

import argparse
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "offload_vs_fsdp2"))

import geometry  # noqa: E402

UPDATE_BYTES = 26
EXPERT_REPLAY = 2 / 3  # The replay of a mixture ends at its gate and up products.
ATTENTION_BACKWARD = 2.5
DELTA_BACKWARD = 3.0  # Its chunk states are computed again.
DELTA_CHUNK = 64


def mean_keys(length, document_tokens=None):
    """Keys that a query sees, mean: of one document a sequence, or of documents of random length with that mean (of
    which a token's own is twice as long in the mean, and the token half way through it)."""
    whole = (length + 1) / 2
    return whole if document_tokens is None else min(document_tokens, whole)


def mixer_flops(config, layer, keys):
    """(linears, core, backward of the core) of a token: two for each active parameter; attention twice two for each key."""
    hidden = config["hidden_size"]
    if geometry.is_linear_layer(config, layer):
        heads, key, value = (config[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
        key_width, value_width = geometry.delta_widths(config)
        channels = 2 * key_width + value_width
        rule = heads * (DELTA_CHUNK * (5 * key + 3 * value) + 6 * key * value)
        linears = 2 * hidden * (channels + 2 * value_width + 2 * heads) + 2 * channels * config["linear_conv_kernel_dim"]
        return linears, rule, DELTA_BACKWARD * rule
    queries = config["num_attention_heads"] * config["head_dim"]
    key_values = config["num_key_value_heads"] * config["head_dim"]
    attention = 4 * queries * keys
    linears = 2 * hidden * ((3 if geometry.is_hybrid(config) else 2) * queries + 2 * key_values)
    return linears, attention, ATTENTION_BACKWARD * attention


def step_flops(config, tokens, keys, retained_mixers=0, retained_mixtures=0):
    """Of the matrix products, attention and delta rule of one step: forward, backward, and the replay of what was not kept;
    a hybrid's mixers that were are taken to be like the mean of all. Raises ValueError for Gemma 4."""
    if config["model_type"] == "gemma4_text":
        raise ValueError("the products of Gemma 4 are not counted here")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts, width = geometry.mixture_of(config)
    used_width = width * config["num_experts_per_tok"] + config.get("shared_expert_intermediate_size", 0)
    mixture = 2 * hidden * (3 * used_width + experts)
    linears, core, core_backward = map(sum, zip(*(mixer_flops(config, layer, keys) for layer in range(layers)), strict=True))
    forward = linears + core + layers * mixture
    backward = 2 * (linears + layers * mixture) + core_backward
    replay = (1 - retained_mixers / layers) * (linears + core) + (layers - retained_mixtures) * EXPERT_REPLAY * mixture
    head = 3 * 2 * hidden * config["vocab_size"]
    return tokens * (forward + backward + replay + head)


def bytes_of(moved, pattern):
    return sum(count for resource, count in moved.items() if re.match(pattern, resource))


def bounds(flops, moved, gpus, limits):
    """[(resource, what it is asked for, seconds at its best rate, seconds under contention)]. `moved`: bytes by the
    plan's resource, `flops` and transfers each of one device. `limits`: {key: value} as of limits.py."""
    rate = {key: value * 1e9 for key, value in limits.items()}
    to_device = bytes_of(moved, "H2D|boundary in")
    from_device = bytes_of(moved, "D2H|boundary out")
    update = bytes_of(moved, "optimizer")
    host = update + gpus * (to_device + from_device)
    best_memory = max(rate[key] for key in ("dram_update", "dram_step", "dram_update_beside_both"))
    rows = [("compute", flops, "FLOP", flops / (limits["product"] * 1e12))]
    rows += [(name, count, "B", count / rate[key]) for name, count, key in (
        ("weights to the device", bytes_of(moved, "H2D"), "h2d_1"),
        ("gradients from the device", bytes_of(moved, "D2H"), "d2h_1"),
        ("boundaries to the device", bytes_of(moved, "boundary in"), "h2d_1"),
        ("boundaries from the device", bytes_of(moved, "boundary out"), "d2h_1"),
        ("all to the device", to_device, "h2d_1"),
        ("all from the device", from_device, "d2h_1"),
        ("both ways", to_device + from_device, "both_1"))]
    rows.append(("optimizer threads", update, "B", update / UPDATE_BYTES / rate["update"]))
    rows.append(("host memory", host, "B", host / best_memory))
    return [{"resource": name, "amount": amount, "unit": unit, "seconds": seconds,
             "contended_seconds": host / rate["dram_step"] if name == "host memory" else seconds}
            for name, amount, unit, seconds in rows]


def judged(rows, step_seconds=None):
    """The limit of a step, and what of it a measured step reached."""
    slowest = max(rows, key=lambda row: row["seconds"])
    contended = max(rows, key=lambda row: row["contended_seconds"])
    found = {"bounds": rows, "limit_seconds": slowest["seconds"], "limit_resource": slowest["resource"],
             "contended_seconds": contended["contended_seconds"], "contended_resource": contended["resource"]}
    if step_seconds is not None:
        found |= {"step_seconds": step_seconds, "share_of_limit": slowest["seconds"] / step_seconds,
                  "exposed_share": (step_seconds - contended["contended_seconds"]) / step_seconds}
    return found


def of_results(results, limits):
    """One entry for each measurement of OOM that has what this needs."""
    settings = results["settings"]
    config = geometry.config_of(settings["geometry"], settings["layers"])
    entries = []
    for entry in results["measurements"]:
        plan = entry.get("plan", {})
        if "resource_bytes" not in plan:
            continue
        packed = entry["system"].partition("-packed-")[2]
        flops = step_flops(config, entry["batch"] * settings["length"] / settings["gpus"],
                           mean_keys(settings["length"], int(packed) if packed else None),
                           plan["retained_mixers"], plan["retained_mixtures"])
        rows = bounds(flops, plan["resource_bytes"], settings["gpus"], limits)
        entries.append({"name": f"batch {entry['batch']}, {entry['system']}"} | judged(rows, entry["step_seconds"]))
    return entries


def of_plan(plan, config, length, step_seconds, limits):
    moved = {item["resource"]: int(item.get("bytes", 0)) for item in plan["estimate"]["resources"]}
    kept = [sum(layer.get(name, False) for layer in plan["layers"]) for name in ("retainMixer", "retainMixture")]
    tokens = int(plan["microBatchTokens"]) * int(plan.get("accumulation", 1))
    rows = bounds(step_flops(config, tokens, mean_keys(length), *kept), moved, plan.get("rankCount", 1), limits)
    return [{"name": "plan"} | judged(rows, step_seconds)]


def markdown(entries):
    lines = []
    for entry in entries:
        lines += [f"## {entry['name']}", "", "| resource | of a step | seconds | under contention |", "| --- | --- | --- | --- |"]
        for row in entry["bounds"]:
            if row["amount"]:
                amount = f"{row['amount'] / 1e12:,.1f} TFLOP" if row["unit"] == "FLOP" else f"{row['amount'] / 1e9:,.2f} GB"
                lines.append(f"| {row['resource']} | {amount} | {row['seconds']:.3f} | {row['contended_seconds']:.3f} |")
        text = (f"Limit {entry['limit_seconds']:.3f} s by {entry['limit_resource']}; under contention "
                f"{entry['contended_seconds']:.3f} s by {entry['contended_resource']}.")
        if "step_seconds" in entry:
            text += (f" Step {entry['step_seconds']:.3f} s: {entry['share_of_limit']:.0%} of the limit, "
                     f"{entry['exposed_share']:.0%} exposed.")
        lines += ["", text, ""]
    return "\n".join(lines)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=pathlib.Path, metavar="RESULTS.json|PLAN.json")
    parser.add_argument("--limits", type=pathlib.Path, required=True, help="as limits.py --output wrote them")
    parser.add_argument("--config", type=pathlib.Path, help="of a plan: the model's config.json")
    parser.add_argument("--length", type=int, help="of a plan: tokens a sequence")
    parser.add_argument("--step", type=float, help="of a plan: seconds of a measured step")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="also for JSON")
    return parser, parser.parse_args(arguments)


def main(arguments=None):
    parser, options = parse(arguments)
    limits = {item["key"]: item["value"] for item in json.loads(options.limits.read_text())["limits"]}
    if "product" not in limits:
        parser.error("--limits: those of a machine without a GPU")
    given = json.loads(options.input.read_text())
    if "measurements" in given:
        entries = of_results(given, limits)
        if not entries:
            parser.error(f"{options.input}: has no measurement of OOM with its bytes by resource")
    else:
        if options.config is None or options.length is None:
            parser.error("a plan needs --config and --length")
        entries = of_plan(given, json.loads(options.config.read_text()), options.length, options.step, limits)
    print(markdown(entries))
    if options.output:
        options.output.write_text(json.dumps({"schema": 1, "entries": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
