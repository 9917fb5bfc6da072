"""The plain PyTorch trainer that OOM is held against: transformers' model, autograd, torch.optim.AdamW.

    tests/parity/reference_loop.py JOB.yaml --output DIR [--state-steps 10,50] [--model DIR] [--fault NAME]

Reads the job that OOM reads (shuffle must be false) and does that training on one process. DIR then holds
    steps.jsonl            one object a step: step, loss, auxiliary_loss, tokens, gradient_norm, learning_rate
    state/step-N/          master, moment1, moment2: FP32 safetensors under published names; step 0: master alone
    gradients/step-N/      with --gradient-steps: the summed gradient before clipping
    export/                with --export: the weights as a Hugging Face folder

--fault plants one error, so that a test can show that it sees that error.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import sys

import torch
import yaml
from safetensors.torch import save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from packed_data import PackedData, attention_mask  # noqa: E402
from published_names import is_decayed, published  # noqa: E402

FAULTS = {
    "router-not-updated": "the routers keep their weights",
    "k-proj-not-updated": "the key projections keep their weights",
    "norms-not-updated": "the norms keep their weights",
    "expert-gradient-lost": "the gradient of one expert of the last layer is zero",
    "masters-in-bf16": "the masters are rounded to BF16 after every update",
    "no-decay": "no weight decays",
    "wrong-beta2": "1 - beta2 is half of what it should be",
    "gradients-scaled": "gradients are 1.1 times too large",
    "mean-of-rank-means": "the loss is the mean of the ranks' means, not of all targets",
    "stale-weights": "the last layer computes with the weights of the step before",
}


@dataclasses.dataclass
class Job:
    """What of a job.yaml the training depends on. Paths are resolved."""
    model: pathlib.Path | None
    train: pathlib.Path
    evaluation: pathlib.Path | None
    length: int
    global_batch: int
    accumulation: int
    ranks: int
    steps: int
    learning_rate: float
    betas: tuple
    epsilon: float
    decay: float
    max_norm: float
    schedule: dict
    auxiliary: float
    precision: str
    evaluation_every: int
    evaluation_sequences: int


def load_job(path, order_matters=True):
    path = pathlib.Path(path)
    text = yaml.safe_load(path.read_text(encoding="utf-8"))
    place = lambda name: path.parent / name if name else None  # noqa: E731
    if order_matters and text["data"].get("shuffle", True):
        raise ValueError("data.shuffle must be false: the order of a shuffled epoch is OOM's own")
    optimizer = text.get("optimizer", {})
    evaluation = text.get("evaluation") or {}
    return Job(
        model=place(text["model"].get("path")), train=place(text["data"]["train"]),
        evaluation=place(text["data"].get("evaluation")), length=text["sequence_length"],
        global_batch=text["global_batch"], accumulation=text.get("accumulation", 1),
        ranks=text.get("devices", {}).get("count", 1), steps=text["steps"],
        # float(): YAML 1.1 reads 3e-4 as text.
        learning_rate=float(optimizer.get("learning_rate", 3e-4)),
        betas=tuple(map(float, optimizer.get("betas", (0.9, 0.95)))),
        epsilon=float(optimizer.get("epsilon", 1e-8)), decay=float(optimizer.get("weight_decay", 0.1)),
        max_norm=float(optimizer.get("max_gradient_norm") or 0), schedule=text.get("schedule") or {"kind": "constant"},
        auxiliary=float((text.get("router") or {}).get("auxiliary_loss", 0)), precision=text.get("precision", "bfloat16"),
        evaluation_every=evaluation.get("every_steps", 0), evaluation_sequences=evaluation.get("sequences", 64))


def learning_rate(job, step):
    """At step `step` from 0."""
    peak, schedule = job.learning_rate, job.schedule
    warmup, kind = schedule.get("warmup_steps", 0), schedule.get("kind", "constant")
    if step < warmup:
        return peak * (step + 1) / warmup
    x = (step - warmup) / (job.steps - warmup)
    r = float(schedule.get("minimum_ratio", 0))
    if kind == "cosine":
        return peak * (r + (1 - r) * (1 + math.cos(math.pi * x)) / 2)
    if kind == "linear":
        return peak * (1 - (1 - r) * x)
    if kind == "warmup_stable_decay":
        decay = float(schedule.get("decay_fraction", 0.1))
        return peak if x <= 1 - decay else peak * (1 - (1 - r) * (x - (1 - decay)) / decay)
    if kind == "constant":
        return peak
    raise ValueError(f"schedule.kind: '{kind}' is unknown")


def load_model(folder, dtype):
    """Eager attention and the plain loop over experts: the code that the numeric specification was read from."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", local_files_only=True)


def round_to_bf16(master):
    """Half away from zero, as OOM derives a weight from its master."""
    bits = master.view(torch.int32)
    return ((bits + 0x8000) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def loss_sum(model, batch):
    """(sum of the token losses, the routers' logits by layer) of some sequences."""
    if model.config.model_type == "gemma4_text":
        return gemma4_loss_sum(model, batch)
    inputs, targets, positions, documents = batch
    config = model.config
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return loss_sum_by_document(model, batch)
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    out = model.model(input_ids=inputs, position_ids=positions, use_cache=False, output_router_logits=True,
                      attention_mask=attention_mask(documents, model.dtype, window))
    logits = model.lm_head(out.last_hidden_state).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, out.router_logits


def auxiliary_loss(model, parts):
    """transformers' load-balancing loss, before its coefficient, of sequences whose routers' logits come in parts."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    logits = tuple(torch.cat(layer) for layer in zip(*parts))
    chosen = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    return load_balancing_loss_func(logits, experts, chosen)


def loss_sum_by_document(model, batch):
    """The same where transformers' packing would let a document's state reach the next: each document by itself."""
    inputs, targets, positions, _ = batch
    hidden, routers = [], []
    for row, row_positions in zip(inputs, positions):
        starts = torch.nonzero(row_positions == 0).flatten().tolist()
        for first, end in zip(starts, starts[1:] + [len(row)]):
            out = model.model(input_ids=row[None, first:end], use_cache=False, output_router_logits=True)
            hidden.append(out.last_hidden_state[0])
            routers.append(out.router_logits)
    logits = model.lm_head(torch.cat(hidden)).float()
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, tuple(torch.cat(layer) for layer in zip(*routers))


def gemma4_loss_sum(model, batch):
    """The same where each kind of layer has its mask, logits are capped, and the routers give probabilities."""
    inputs, targets, positions, documents = batch
    config = model.config
    probabilities = []
    hooks = [layer.router.register_forward_hook(lambda module, inputs, output: probabilities.append(output[0]))
             for layer in model.model.layers]
    masks = {"full_attention": attention_mask(documents, model.dtype),
             "sliding_attention": attention_mask(documents, model.dtype, config.sliding_window)}
    logits = model(input_ids=inputs, position_ids=positions, use_cache=False, attention_mask=masks).logits.float()
    for hook in hooks:
        hook.remove()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, tuple(layer.log() for layer in probabilities)


def evaluate(model, data, sequences, at_once=4):
    """Mean loss over the valid targets of the first `sequences` sequences."""
    total, valid = 0.0, 0
    with torch.no_grad():
        for start in range(0, min(sequences, data.count), at_once):
            batch = data.sequences(range(start, min(start + at_once, sequences, data.count)))
            total += loss_sum(model, batch)[0].item()
            valid += int((batch[1] != -100).sum())
    return total / max(valid, 1)


class Trainer:
    def __init__(self, job, model_folder, fault=None):
        if fault is not None and fault not in FAULTS:
            raise ValueError(f"unknown fault '{fault}'; there are: {', '.join(FAULTS)}")
        self.job, self.fault = job, fault
        self.data = PackedData(job.train, job.length)
        # The weights as stored, and the model that computes; in float32 it holds the masters itself.
        self.model = load_model(model_folder, torch.float32)
        self.model_type = self.model.config.model_type
        self.masters = dict(self.model.named_parameters())
        if job.precision == "bfloat16":
            self.masters = {name: p.detach().clone().requires_grad_() for name, p in self.masters.items()}
            self.model.to(torch.bfloat16)
            self._derive_weights()
        elif job.precision != "float32":
            raise ValueError(f"precision: '{job.precision}' is unknown")
        self.model.train()
        self.weights = dict(self.model.named_parameters())
        decay = 0.0 if fault == "no-decay" else job.decay
        groups = [{"params": [p for n, p in self.masters.items() if is_decayed(n)], "weight_decay": decay},
                  {"params": [p for n, p in self.masters.items() if not is_decayed(n)], "weight_decay": 0.0}]
        betas = (job.betas[0], 1 - (1 - job.betas[1]) / 2) if fault == "wrong-beta2" else job.betas
        self.optimizer = torch.optim.AdamW(groups, lr=job.learning_rate, betas=betas, eps=job.epsilon, foreach=False)
        self.step_index = 0
        self.gradient = {}
        last = f"model.layers.{self.model.config.num_hidden_layers - 1}."
        self._last_layer = [name for name in self.masters if name.startswith(last)]
        self._stale = {name: self.masters[name].detach().clone() for name in self._last_layer}

    def step(self):
        """One step. Returns its line of steps.jsonl."""
        job = self.job
        fresh = self._take_stale_weights() if self.fault == "stale-weights" else None
        loss, auxiliary, valid = self._accumulate_gradient()
        if fresh is not None:
            self._restore(fresh)
        norm = math.sqrt(sum(g.double().square().sum().item() for g in self.gradient.values()))
        clip = min(1.0, job.max_norm / (norm + 1e-6)) if job.max_norm > 0 else 1.0
        for name, master in self.masters.items():
            master.grad = self.gradient[name] * clip if clip != 1.0 else self.gradient[name].clone()
        rate = learning_rate(job, self.step_index)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        kept = {n: p.detach().clone() for n, p in self.masters.items() if self._keeps(n)}
        self.optimizer.step()
        # In float32 the masters are the weights: what stays in .grad would be added to the next step's gradient.
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, value in kept.items():
                self.masters[name].copy_(value)
            if self.fault == "masters-in-bf16":
                for master in self.masters.values():
                    master.copy_(round_to_bf16(master.detach()).float())
        if job.precision == "bfloat16":
            self._derive_weights()
        self.step_index += 1
        return {"step": self.step_index, "loss": loss, "auxiliary_loss": auxiliary, "tokens": job.global_batch * job.length,
                "valid_targets": valid, "gradient_norm": norm, "learning_rate": rate}

    def _accumulate_gradient(self):
        """Sums the ranks' partials, each over its micro-batches in FP32; in bfloat16 each is rounded once to BF16."""
        job = self.job
        per_rank = job.global_batch // job.ranks
        micro = per_rank // job.accumulation
        first = self.step_index * job.global_batch
        batches = [[self.data.sequences(range(start := first + rank * per_rank + part * micro, start + micro))
                    for part in range(job.accumulation)] for rank in range(job.ranks)]
        counts = [sum(int((batch[1] != -100).sum()) for batch in rank) for rank in batches]
        valid = sum(counts)
        self.gradient = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.masters.items()}
        total, routing = 0.0, []
        others = None  # All logits of the step beforehand: the loss is no sum over batches.
        if job.auxiliary and job.ranks * job.accumulation > 1:
            with torch.no_grad():
                others = [loss_sum(self.model, batch)[1] for rank in batches for batch in rank]
        for rank, count in zip(batches, counts):
            divisor = max(valid, 1)
            if self.fault == "mean-of-rank-means":
                divisor = max(count, 1) * job.ranks
            partial = {name: torch.zeros_like(g) for name, g in self.gradient.items()}
            for batch in rank:
                loss, logits = loss_sum(self.model, batch)
                objective = loss / divisor
                if job.auxiliary:
                    parts = [logits]
                    if others:
                        parts = [*others[:len(routing)], logits, *others[len(routing) + 1:]]
                    objective = objective + job.auxiliary * auxiliary_loss(self.model, parts)
                objective.backward()
                total += loss.item() / divisor
                routing.append([layer.detach() for layer in logits])
                for name, weight in self.weights.items():
                    if weight.grad is not None:  # An expert without a token has none.
                        partial[name] += weight.grad.float()
                        weight.grad = None
            for name, value in partial.items():
                self.gradient[name] += value.bfloat16().float() if job.precision == "bfloat16" else value
        self._plant_gradient_fault()
        return total, auxiliary_loss(self.model, routing).item(), valid

    def _plant_gradient_fault(self):
        if self.fault == "gradients-scaled":
            for gradient in self.gradient.values():
                gradient *= 1.1
        elif self.fault == "expert-gradient-lost":
            for name in self._last_layer:
                if ".experts." in name:
                    self.gradient[name][1] = 0  # Fused over experts: all of expert 1.

    def _keeps(self, name):
        """Whether the planted fault leaves this parameter as it was."""
        return {"router-not-updated": name.endswith("mlp.gate.weight"), "k-proj-not-updated": "k_proj" in name,
                "norms-not-updated": "norm" in name}.get(self.fault, False)

    @torch.no_grad()
    def _derive_weights(self):
        for name, weight in self.model.named_parameters():
            weight.copy_(round_to_bf16(self.masters[name].detach()))

    @torch.no_grad()
    def _take_stale_weights(self):
        fresh = {}
        for name in self._last_layer:
            weight, master = self.weights[name], self.masters[name]
            fresh[name] = weight.detach().clone()
            stale, self._stale[name] = self._stale[name], master.detach().clone()
            weight.copy_(stale if self.job.precision == "float32" else round_to_bf16(stale))
        return fresh

    @torch.no_grad()
    def _restore(self, fresh):
        for name, value in fresh.items():
            self.weights[name].copy_(value)

    def state(self):
        """{"master": {published name: FP32 tensor}, "moment1": ..., "moment2": ...}; no moments before step 1."""
        frozen = {name: b for name, b in self.model.named_buffers() if name.endswith("layer_scalar")}
        kinds = {"master": {name: p.detach() for name, p in self.masters.items()} | frozen}
        if self.step_index > 0:
            for kind, key in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq")):
                kinds[kind] = {name: self.optimizer.state[p][key] for name, p in self.masters.items()}
                kinds[kind] |= {name: torch.zeros_like(buffer) for name, buffer in frozen.items()}
        return {kind: published(self.model_type, tensors) for kind, tensors in kinds.items()}

    def published_gradient(self):
        return published(self.model_type, self.gradient)


def save_tensors(folder, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})


def save_state(output, trainer):
    for kind, tensors in trainer.state().items():
        save_tensors(output / f"state/step-{trainer.step_index}" / kind, tensors)


def run(job, output, model_folder=None, state_steps=(), gradient_steps=(), fault=None, export=False, steps=None):
    """The whole training; what the command line does."""
    output = pathlib.Path(output)
    output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(job, model_folder or job.model, fault)
    held_out = PackedData(job.evaluation, job.length) if job.evaluation else None
    save_state(output, trainer)
    with open(output / "steps.jsonl", "w", encoding="utf-8") as log:
        for _ in range(steps or job.steps):
            entry = trainer.step()
            step = trainer.step_index
            due = job.evaluation_every and step % job.evaluation_every == 0
            if held_out and (due or step == job.steps):
                entry["evaluation_loss"] = evaluate(trainer.model, held_out, job.evaluation_sequences)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            if step in gradient_steps:
                save_tensors(output / f"gradients/step-{step}", trainer.published_gradient())
            if step in state_steps:
                save_state(output, trainer)
    if export:
        trainer.model.save_pretrained(output / "export")
        for path in pathlib.Path(model_folder or job.model).glob("*token*"):
            shutil.copy(path, output / "export")
    return trainer


def numbers(text):
    return {int(part) for part in text.split(",") if part}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job")
    parser.add_argument("--output", required=True)
    parser.add_argument("--model", help="Hugging Face folder to start from, when the job initialises at random")
    parser.add_argument("--state-steps", type=numbers, default=set(), metavar="N,N")
    parser.add_argument("--gradient-steps", type=numbers, default=set(), metavar="N,N")
    parser.add_argument("--steps", type=int, help="stop after so many; schedules stay those of the job")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fault", choices=FAULTS, metavar="NAME", help=f"plant an error: {', '.join(FAULTS)}")
    parser.add_argument("--export", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run(load_job(options.job), options.output, options.model, options.state_steps, options.gradient_steps, options.fault,
        options.export, options.steps)


if __name__ == "__main__":
    main()
