"""The dataset folder: written as a stream, read memory-mapped.

    tokens.npy      uint32 [n]              documents.npy  int64 [count + 1], first 0, last n
    loss_mask.npy   uint8 [n], optional     dataset.json   vocabulary_size, tokens, documents, and more

A folder appears whole or not at all: it is written beside its place and renamed.
"""

import hashlib
import json
import os
import pathlib
import shutil
import tempfile

import numpy as np

from packing.errors import PackError

_HEADER_BYTES = 128  # Room for a shape of any length; the data starts aligned to 64 bytes, as the format wants.
_CHUNK_ELEMENTS = 1 << 22


class _ArrayWriter:
    """One-dimensional .npy file whose length is known only at its end."""

    def __init__(self, path, dtype):
        self.path = path
        self.count = 0
        self._dtype = np.dtype(dtype)
        self._file = open(path, "wb")
        self._file.write(bytes(_HEADER_BYTES))

    def append(self, values):
        values = np.ascontiguousarray(values, self._dtype)
        self._file.write(values.data)
        self.count += values.size

    def finish(self):
        fields = f"{{'descr': '{self._dtype.str}', 'fortran_order': False, 'shape': ({self.count},), }}"
        length = _HEADER_BYTES - 10
        header = b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + fields.encode().ljust(length - 1) + b"\n"
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self):
        self._file.close()


class DatasetWriter:
    """Context manager: leaving it without finish() leaves nothing behind."""

    def __init__(self, folder, with_mask, overwrite=False):
        self.folder = pathlib.Path(folder)
        if self.folder.exists() and not overwrite:
            raise PackError(f"{folder}: exists already (--overwrite replaces it)")
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / "dataset.json").exists():
            raise PackError(f"{folder}: is no dataset, so it is not replaced")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._work = pathlib.Path(
            tempfile.mkdtemp(prefix=f".{self.folder.name}.tmp-", dir=self.folder.parent))
        self._tokens = _ArrayWriter(self._work / "tokens.npy", "<u4")
        self._documents = _ArrayWriter(self._work / "documents.npy", "<i8")
        self._mask = _ArrayWriter(self._work / "loss_mask.npy", "u1") if with_mask else None
        self._documents.append([0])
        self._largest = -1
        self._targets = 0

    @property
    def tokens(self):
        return self._tokens.count

    def append(self, tokens, lengths, mask=None):
        """Adds documents of `lengths` tokens each; `tokens` (and `mask`) hold all of them."""
        if tokens.size == 0:
            return
        self._documents.append(self._tokens.count + np.cumsum(lengths, dtype=np.int64))
        self._tokens.append(tokens)
        self._largest = max(self._largest, int(tokens.max()))
        if self._mask is not None:
            self._mask.append(mask)
            self._targets += int(np.count_nonzero(mask))

    def finish(self, vocabulary_size, description):
        """`description`: further keys of dataset.json. Returns what that file holds."""
        if self._tokens.count == 0:
            raise PackError(f"{self.folder}: the inputs hold no text, so there is no dataset")
        if self._largest >= vocabulary_size:
            raise PackError(f"the tokenizer made id {self._largest}, beyond its {vocabulary_size} entries")
        for array in self._arrays():
            array.finish()
        content = {
            "vocabulary_size": vocabulary_size,
            "tokens": self._tokens.count,
            "documents": self._documents.count - 1,
            **({"loss_tokens": self._targets} if self._mask else {}),
            **description,
            "checksums": {array.path.name: checksum(array.path) for array in self._arrays()},
        }
        with open(self._work / "dataset.json", "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        self._work.chmod(0o777 & ~_umask())
        if self.folder.exists():
            old = self._work.with_name(self._work.name + "-old")
            os.rename(self.folder, old)
            os.rename(self._work, self.folder)
            shutil.rmtree(old)
        else:
            os.rename(self._work, self.folder)
        return content

    def _arrays(self):
        return [array for array in (self._tokens, self._documents, self._mask) if array]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for array in self._arrays():
            array.close()
        shutil.rmtree(self._work, ignore_errors=True)  # Gone already after finish().


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def checksum(path):
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


class Dataset:
    """A dataset folder, checked and memory-mapped: tokens, documents, mask (or None), description."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        try:
            self.description = json.loads((self.folder / "dataset.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PackError(f"{self.folder / 'dataset.json'}: {error}") from error
        self.tokens = self._load("tokens.npy", np.uint32)
        self.documents = self._load("documents.npy", np.int64)
        has_mask = (self.folder / "loss_mask.npy").exists()
        self.mask = self._load("loss_mask.npy", np.uint8) if has_mask else None
        self._check()

    def _load(self, name, dtype):
        try:
            array = np.load(self.folder / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise PackError(f"{self.folder / name}: {error}") from error
        if array.ndim != 1 or array.dtype != dtype:
            raise PackError(f"{self.folder / name}: is {array.dtype} {array.shape}, not one row of {dtype.__name__}")
        return array

    def _check(self):
        n = self.tokens.size
        for key in ("vocabulary_size", "tokens", "documents"):
            if not isinstance(self.description.get(key), int):
                raise PackError(f"{self.folder / 'dataset.json'}: {key} is missing or no integer")
        if self.description["tokens"] != n:
            raise PackError(f"{self.folder}: dataset.json names {self.description['tokens']} tokens, tokens.npy has {n}")
        if self.documents.size != self.description["documents"] + 1:
            raise PackError(f"{self.folder}: documents.npy has {self.documents.size} offsets for "
                            f"{self.description['documents']} documents")
        if self.documents[0] != 0 or self.documents[-1] != n or np.any(np.diff(self.documents) < 0):
            raise PackError(f"{self.folder / 'documents.npy'}: offsets must rise from 0 to {n}")
        if self.mask is not None and self.mask.size != n:
            raise PackError(f"{self.folder / 'loss_mask.npy'}: has {self.mask.size} entries for {n} tokens")

    def verify(self):
        """Reads everything: the checksums, and that every id is in the vocabulary."""
        for name, wanted in self.description.get("checksums", {}).items():
            if checksum(self.folder / name) != wanted:
                raise PackError(f"{self.folder / name}: does not match its checksum in dataset.json")
        largest = max(int(chunk.max()) for chunk in self.chunks())
        if largest >= self.description["vocabulary_size"]:
            raise PackError(f"{self.folder / 'tokens.npy'}: id {largest} is beyond the vocabulary of "
                            f"{self.description['vocabulary_size']}")

    def chunks(self):
        for start in range(0, self.tokens.size, _CHUNK_ELEMENTS):
            yield self.tokens[start:start + _CHUNK_ELEMENTS]

    def unigram_entropy(self):
        """Nats a token: the loss of the best model that sees no context."""
        counts = np.zeros(self.description["vocabulary_size"], np.int64)
        for chunk in self.chunks():
            counts += np.bincount(chunk, minlength=counts.size)
        shares = counts[counts > 0] / self.tokens.size
        return float(-(shares * np.log(shares)).sum())
