"""Layers that keep only their input for backward, in pinned host memory while forward goes on."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

OFFLOAD_ELEMENTS = 1 << 20  # Smaller tensors are not worth a copy.


class InputOffload:
    """Saved layer inputs travel to pinned memory on a stream of their own, and come back on another, one layer
    ahead of the backward that needs them."""

    def __init__(self, device):
        self.device = device
        self.leave, self.come = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.stack = []     # (pinned copy, event of its end) in forward order.
        self.arriving = {}  # Place in the stack to (tensor, event).

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        if not tensor.is_cuda or tensor.numel() < OFFLOAD_ELEMENTS:
            return tensor
        self.leave.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.leave):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.leave)
            self.stack.append((pinned, self.leave.record_event()))
        return len(self.stack) - 1

    def _fetch(self, place):
        pinned, left = self.stack[place]
        with torch.cuda.stream(self.come):
            self.come.wait_event(left)
            tensor = pinned.to(self.device, non_blocking=True)
            self.arriving[place] = (tensor, self.come.record_event())

    def unpack(self, place):
        if isinstance(place, torch.Tensor):
            return place
        if place not in self.arriving:
            self._fetch(place)
        tensor, arrived = self.arriving.pop(place)
        torch.cuda.current_stream().wait_event(arrived)
        tensor.record_stream(torch.cuda.current_stream())
        del self.stack[place:]
        if place > 0:
            self._fetch(place - 1)
        return tensor


def recompute_in_backward(layer, offload):
    inner = layer.forward

    @functools.wraps(inner)
    def forward(*inputs, **settings):
        run = functools.partial(checkpoint, inner, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)
        if offload is None:
            return run()
        with offload.hooks():
            return run()

    layer.forward = forward
