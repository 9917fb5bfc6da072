#!/usr/bin/env python3
"""The peer: transformers' model under PyTorch's FSDP2 with CPU offload, as fast as its own means allow.

    fsdp2.py --model FOLDER --data FOLDER --length 4096 --batches 4,8 [--resident] [--clip 1.0]
    fsdp2.py --gpus 2 ...      the same on two GPUs; torchrun --nproc-per-node 2 fsdp2.py ... does that too

FOLDER is a Hugging Face folder; without safetensors the weights are random. One event a batch (processes.py).
Layers are sharded one by one: BF16 parameters from FP32 masters, FP32 reduction, fused AdamW on the CPU (with --resident
all of it on the GPU). Each layer is recomputed in backward from its input, which waits in pinned memory. Experts are
grouped products, attention is what SDPA has fastest, Gated DeltaNet is flash-linear-attention's Triton kernels
(gated_delta.py), and the loss never holds all logits.
"""

import argparse
import contextlib
import functools
import math
import os
import pathlib
import socket
import subprocess
import sys
import time

for place in (0, 1):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[place]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import gated_delta  # noqa: E402
from geometry import Sequences  # noqa: E402
from processes import say  # noqa: E402
from recompute import InputOffload, recompute_in_backward  # noqa: E402

IGNORED = -100


# The loss.

class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the token losses by chunks of tokens. Gradients are made with the loss, so each chunk's logits live once."""

    @staticmethod
    def forward(context, hidden, weight, targets, chunk_tokens):
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            valid = (targets[rows] != IGNORED).unsqueeze(1)
            place = targets[rows].clamp(min=0).unsqueeze(1)
            log_odds = torch.log_softmax(hidden[rows] @ weight.t(), 1, dtype=torch.float32)
            wanted = log_odds.gather(1, place)
            total -= (wanted * valid).sum()
            slope = torch.exp(log_odds, out=torch.empty_like(log_odds, dtype=hidden.dtype))
            del log_odds
            slope.scatter_(1, place, wanted.exp_().sub_(1).to(slope.dtype))
            torch.mul(slope @ weight, valid, out=d_hidden[rows])
            d_weight += slope.t() @ (hidden[rows] * valid)
        context.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(context, d_total):
        d_hidden, d_weight = context.saved_tensors
        return d_hidden * d_total.to(d_hidden.dtype), d_weight * d_total.to(d_weight.dtype), None, None


class Head(torch.nn.Module):
    """The output projection with the loss, one FSDP unit: the gathered weight is there when the loss needs it."""

    def __init__(self, projection, chunk_tokens):
        super().__init__()
        self.projection, self.chunk_tokens = projection, chunk_tokens

    def forward(self, hidden, targets, divisor):
        hidden = hidden.reshape(-1, hidden.shape[-1])
        weight = self.projection.weight
        if torch.is_grad_enabled():
            return _ChunkedCrossEntropy.apply(hidden, weight, targets.reshape(-1), self.chunk_tokens) / divisor
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, wanted in zip(hidden.split(self.chunk_tokens), targets.reshape(-1).split(self.chunk_tokens)):
            logits = (rows @ weight.t()).float()
            total += torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        return total / divisor


class CausalLoss(torch.nn.Module):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head
        self.delta_kernels = None  # gated_delta.Chosen, of a model with Gated DeltaNet.

    def forward(self, tokens, targets, divisor):
        """Sum of the token losses over `divisor`. The backbone's own forward would wait for the GPU to look for padding."""
        hidden = self.backbone.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        # Rows of time, height and width are one for text.
        has_rows = hasattr(self.backbone.rotary_emb, "mrope_section")
        rotary = self.backbone.rotary_emb(hidden, positions.expand(3, 1, -1) if has_rows else positions)
        for layer in self.backbone.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return self.head(self.backbone.norm(hidden), targets, divisor)


# The model.

def start_ranks(count):
    """Makes this process rank 0 of `count` and starts the others. Returns them. Under torchrun there is nothing to do."""
    if "RANK" in os.environ:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                             stdin=subprocess.DEVNULL) for rank in range(1, count)]


def join_group(device_kind):
    device = torch.device("cpu")
    if device_kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_kind == "cuda" else "gloo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    return device


def _fill(name, parameter, device, config):
    """As the family starts it. Random on the device by pieces, which is faster than on the CPU; norms scale by 1."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if name.endswith("A_log"):
        local.uniform_(0.01, 16.0).log_()
        return
    if parameter.ndim == 1:
        # Those of Qwen3.5 scale by 1 + weight, but for the one in Gated DeltaNet.
        is_offset = config.model_type == "qwen3_5_moe_text" and ".linear_attn." not in name
        local.fill_(0.0 if is_offset else 1.0)
        return
    flat = local.view(-1)
    piece = torch.empty(min(flat.numel(), 1 << 26), device=device)
    for start in range(0, flat.numel(), piece.numel()):
        part = flat[start:start + piece.numel()]
        part.copy_(piece.normal_(0.0, config.initializer_range)[:part.numel()])


def _shard(model, device, resident, prefetch_layers):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    offload = OffloadPolicy() if resident else CPUOffloadPolicy(pin_memory=device.type == "cuda")
    shard = functools.partial(
        fully_shard, mesh=mesh, offload_policy=offload,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    layers = list(model.backbone.layers)
    # Of the last layer and the head backward needs the weights at once.
    for layer in layers:
        shard(layer, reshard_after_forward=layer is not layers[-1])
    shard(model.backbone.embed_tokens, reshard_after_forward=True)
    shard(model.head, reshard_after_forward=False)
    shard(model)
    if prefetch_layers > 0:
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1:i + 1 + prefetch_layers])
            layer.set_modules_to_backward_prefetch(layers[max(0, i - prefetch_layers):i][::-1])


def build(folder, device, resident=False, chunk_tokens=8192, prefetch_layers=0, delta_kernels=None):
    """Returns the sharded CausalLoss with weights in it. `delta_kernels`: fla or torch; None: what is for the device.
    Raises gated_delta.Missing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm", "dtype": torch.float32}
    has_weights = any(pathlib.Path(folder).glob("*.safetensors"))
    if has_weights:
        whole = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **settings)
    else:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True), **settings)
    if whole.config.tie_word_embeddings:
        raise ValueError("tied embeddings are not covered here")
    if whole.config._experts_implementation != "grouped_mm" or whole.config._attn_implementation != "sdpa":
        raise ValueError("this transformers has no grouped experts or no SDPA")
    model = CausalLoss(whole.model, Head(whole.lm_head, chunk_tokens))
    model.delta_kernels = gated_delta.choose(model.backbone.layers, whole.config, delta_kernels, device)
    offload = InputOffload(device) if device.type == "cuda" and not resident else None
    last = model.backbone.layers[-1]
    for layer in model.backbone.layers:
        recompute_in_backward(layer, offload if layer is not last else None)  # Backward begins with the last.
    _shard(model, device, resident, prefetch_layers)
    if not has_weights:
        model.to_empty(device=device if resident else "cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter, device, whole.config)
    # Its frequencies are computed, not stored.
    model.backbone.rotary_emb = type(model.backbone.rotary_emb)(config=whole.config).to(device)
    return model.train()


def optimizer_for(model, learning_rate, weight_decay=0.1):
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


# Steps.

def fastest_attention(name):
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *order] if name == "cudnn" else order, set_priority=True)


def targets_of(tokens):
    """Of whole-sequence documents: the next token, and none for the last."""
    targets = torch.roll(tokens, -1, 1)
    targets[:, -1] = IGNORED
    return targets


class Trainer:
    def __init__(self, model, optimizer, data, device, clip=0.0):
        self.model, self.optimizer, self.data, self.device, self.clip = model, optimizer, data, device, clip
        self.next_sequence = 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def drain(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world > 1:
            dist.barrier()

    def step(self, batch, micro):
        """One step on `batch` sequences, `micro` at a time on each device. Returns its loss, not waited for."""
        own = batch // self.world
        tokens = torch.from_numpy(self.data.read(self.next_sequence + self.rank * own, own)).to(self.device)
        self.next_sequence += batch
        targets = targets_of(tokens)
        divisor = own * (tokens.shape[1] - 1)  # FSDP takes the mean over devices.
        loss = torch.zeros((), device=self.device)
        for start in range(0, own, micro):
            part = self.model(tokens[start:start + micro], targets[start:start + micro], divisor)
            part.backward()
            loss += part.detach()
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def measure(trainer, batch, micro, warmup, steps):
    for _ in range(warmup):
        trainer.step(batch, micro)
    if trainer.model.delta_kernels is not None:
        trainer.model.delta_kernels.check()
    trainer.drain()
    if trainer.rank == 0:
        say("measuring")
    trainer.drain()
    start = time.perf_counter()
    for _ in range(steps):
        loss = trainer.step(batch, micro)
    trainer.drain()
    seconds = (time.perf_counter() - start) / steps
    start = time.perf_counter()
    trainer.step(batch, micro)
    trainer.drain()
    single = time.perf_counter() - start
    if trainer.rank == 0:
        say("measured")
    if not math.isfinite(loss.item()):
        raise ValueError(f"the loss is {loss.item()}")
    result = {"batch": batch, "step_seconds": seconds, "single_step_seconds": single, "steps": steps, "loss": loss.item(),
              "micro_batch": micro}
    if trainer.model.delta_kernels is not None:
        result["delta_kernels"] = trainer.model.delta_kernels.words
    if trainer.device.type == "cuda":
        result["reported_gpu_bytes"] = torch.cuda.max_memory_allocated()
        result["reserved_gpu_bytes"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    return result


def start_again(batches, micro):
    """In place of this process, with nothing of it left: FSDP cannot be used on after a step that broke off."""
    arguments = [sys.executable, *sys.argv, "--batches", ",".join(map(str, batches)), "--micro", str(micro)]
    sys.stdout.flush()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(entry) > 2:
                os.set_inheritable(int(entry), False)
    os.execv(sys.executable, arguments)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 16, 32])
    parser.add_argument("--resident", action="store_true", help="everything on the GPU")
    parser.add_argument("--clip", type=float, default=0.0, help="largest global norm of the gradient; 0: not clipped")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--micro", type=int, default=0, help="sequences at a time of the first batch; 0: all, then halves")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--head-chunk", type=int, default=8192, help="tokens whose logits exist at a time")
    parser.add_argument("--prefetch", type=int, default=0, help="layers asked for ahead; 0: FSDP's own way")
    parser.add_argument("--attention", choices=("cudnn", "flash"), default="cudnn", help="tried first")
    parser.add_argument("--delta-kernels", choices=("fla", "torch"), help="of Gated DeltaNet; default fla, on the CPU torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse()
    start = time.perf_counter()
    ranks = start_ranks(options.gpus)
    device = join_group(options.device)
    model = build(options.model, device, options.resident, options.head_chunk, options.prefetch, options.delta_kernels)
    trainer = Trainer(model, optimizer_for(model, 1e-5), Sequences(options.data, options.length), device, options.clip)
    if trainer.rank == 0:
        say("ready", seconds=time.perf_counter() - start)
    for place, batch in enumerate(options.batches):
        own = batch // trainer.world
        micro = min(options.micro or own, own) if place == 0 else own
        try:
            with fastest_attention(options.attention):
                result = measure(trainer, batch, micro, options.warmup, options.steps)
        except torch.OutOfMemoryError as error:
            if trainer.world > 1:
                raise
            if micro > 1:
                print(f"batch {batch}: {micro} sequences at a time do not fit, next {micro // 2}", flush=True)
                start_again(options.batches[place:], micro // 2)
            say("failed", batch=batch, error=f"GPU out of memory at {micro} sequences at a time: {error}"[:600])
            if place + 1 < len(options.batches):
                start_again(options.batches[place + 1:], 0)
            return
        if trainer.rank == 0:
            say("result", **result)
    dist.destroy_process_group()
    for rank in ranks:
        rank.wait()


if __name__ == "__main__":
    try:
        main()
    except gated_delta.Missing as missing:
        sys.exit(str(missing))
