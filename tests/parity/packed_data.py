"""Sequences of a packed dataset as OOM reads them (engine rules, section 14), for the reference trainer."""

import json
import pathlib

import numpy as np
import torch


class PackedData:
    """Sequence i is tokens i*L to (i+1)*L. Everything is a torch tensor of shape [sequences, L]."""

    def __init__(self, folder, sequence_length):
        folder = pathlib.Path(folder)
        self.length = sequence_length
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.documents = np.load(folder / "documents.npy")
        mask = folder / "loss_mask.npy"
        self.mask = np.load(mask, mmap_mode="r") if mask.exists() else None
        self.vocabulary_size = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["vocabulary_size"]
        self.count = (len(self.tokens) - 1) // sequence_length

    def sequences(self, numbers):
        """Returns inputs, targets (-100: not in the loss), positions, documents of the given sequences."""
        rows = [self._sequence(int(number)) for number in numbers]
        return tuple(torch.from_numpy(np.stack(column)) for column in zip(*rows))

    def _sequence(self, number):
        start = number * self.length
        index = np.arange(start, start + self.length + 1)
        tokens = np.asarray(self.tokens[start:start + self.length + 1], np.int64)
        document = np.searchsorted(self.documents, index, side="right") - 1
        # A document that the start of the sequence cuts begins again at position 0.
        positions = index[:-1] - np.maximum(self.documents[document[:-1]], start)
        valid = document[1:] == document[:-1]
        if self.mask is not None:
            valid &= np.asarray(self.mask[start + 1:start + self.length + 1]) != 0
        targets = np.where(valid, tokens[1:], -100)
        return tokens[:-1], targets, positions, document[:-1]


def attention_mask(documents, dtype, window=None):
    """Additive [B, 1, L, L]: a token sees those before it in its own document (and within the window)."""
    length = documents.shape[1]
    i = torch.arange(length)
    allowed = (i[:, None] >= i[None, :]) & (documents[:, :, None] == documents[:, None, :])
    if window:
        allowed &= i[:, None] - i[None, :] < window
    return torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]
