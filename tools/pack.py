#!/usr/bin/env python3
"""Packs text into a dataset for OOM: tokens in a row, with the places where documents begin.

    tools/pack.py --tokenizer DIR --output DIR INPUT...      JSON lines, Parquet, text files, or folders of them
    tools/pack.py info DIR [--entropy] [--verify]            what a dataset holds

A document is a line, a row or a text file. It ends with the tokenizer's end-of-text token. With
--messages-field a document is a conversation as the tokenizer's chat template renders it, and only what the
assistant wrote counts in the loss.
"""

import argparse
import collections
import concurrent.futures
import importlib.util
import json
import multiprocessing
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # One process a core; threads would get in their way.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_missing = [name for name in ("numpy", "tokenizers", "transformers", "pyarrow") if not importlib.util.find_spec(name)]
if _missing:  # Run by another Python: go on with the one of deploy/setup.sh.
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    python = pathlib.Path(os.environ.get("OOM_ENV", cache / "oom" / "env")) / "bin" / "python"
    if __name__ != "__main__" or not python.exists() or pathlib.Path(sys.prefix) == python.parent.parent:
        sys.exit(f"pack: needs {', '.join(_missing)}; deploy/setup.sh installs what is missing")
    os.execv(python, [str(python), *sys.argv])

import numpy  # noqa: E402

from packing.dataset import Dataset, DatasetWriter  # noqa: E402
from packing.encoding import Encoder, load_tokenizer  # noqa: E402
from packing.errors import PackError  # noqa: E402
from packing.sources import batches, find_files  # noqa: E402

_encoder = None


def _start_worker(*arguments):
    global _encoder
    _encoder = Encoder(*arguments)


def _encode(batch):
    return _encoder.encode(batch)


def encode_in_order(arguments, work, processes):
    """Yields the result of each batch, in order; at most four batches a process are in memory."""
    if processes == 1:
        encoder = Encoder(*arguments)
        yield from map(encoder.encode, work)
        return
    # Not fork: the tokenizers library has threads of its own.
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _start_worker, arguments)
    try:
        waiting = collections.deque()
        for batch in work:
            waiting.append(pool.submit(_encode, batch))
            if len(waiting) >= 4 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise PackError("a worker process died, probably for want of memory; try fewer --processes") from error
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """A bar on a terminal, elsewhere a line each ten seconds."""

    def __init__(self, total_bytes, quiet):
        self._total = max(1, total_bytes)
        self._start = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._quiet = quiet
        self._done = 0

    def update(self, input_bytes, tokens):
        self._done += input_bytes
        now = time.monotonic()
        if self._quiet or now - self._last < (0.2 if self._terminal else 10):
            return
        self._last = now
        share = min(1.0, self._done / self._total)
        rate = tokens / (now - self._start)
        left = (now - self._start) * (1 - share) / max(share, 1e-9)
        text = f"{share:4.0%}  {tokens:,} tokens  {rate:,.0f} tokens/s  {left:.0f} s left"
        if self._terminal:
            filled = round(30 * share)
            print(f"\rpack [{'#' * filled}{'.' * (30 - filled)}] {text}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(f"pack: {text}", file=sys.stderr, flush=True)

    def clear(self):
        if self._terminal and not self._quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def pack(options):
    inputs = list(options.inputs)
    if options.files_from:
        with (sys.stdin if options.files_from == "-" else open(options.files_from, encoding="utf-8")) as file:
            inputs += [line for line in file.read().splitlines() if line]
    files = find_files(inputs, options.glob, options.format)
    if not files:
        raise PackError("there is no input")
    if options.messages_field and any(kind == "text" for _, kind in files):
        raise PackError(f"{next(p for p, kind in files if kind == 'text')}: plain text has no messages")
    tokenizer = load_tokenizer(options.tokenizer, options.separator, bool(options.messages_field))
    arguments = (tokenizer, options.text_field, options.messages_field)
    work = batches(files, options.messages_field or options.text_field)
    progress = Progress(sum(path.stat().st_size for path, _ in files), options.quiet)
    skipped = 0
    with DatasetWriter(options.output, bool(options.messages_field), options.overwrite) as writer:
        try:
            for encoded in encode_in_order(arguments, work, options.processes):
                writer.append(encoded.tokens, encoded.lengths, encoded.mask)
                skipped += encoded.skipped
                progress.update(encoded.input_bytes, writer.tokens)
        finally:
            progress.clear()
        content = writer.finish(tokenizer.vocabulary_size, {
            "tokenizer": tokenizer.name,
            "separator": tokenizer.separator if not options.messages_field else None,
            "files": len(files),
            "skipped": skipped,
        })
    if not options.quiet:
        loss = f", {content['loss_tokens']:,} of them in the loss" if "loss_tokens" in content else ""
        what = "conversations without an assistant's turn" if options.messages_field else "documents without text"
        print(f"{options.output}: {content['tokens']:,} tokens{loss}, {content['documents']:,} documents, "
              f"vocabulary of {content['vocabulary_size']:,}" + (f"; {skipped:,} {what} left out" if skipped else ""))


def show(options):
    dataset = Dataset(options.dataset)
    if options.verify:
        dataset.verify()
    lengths = numpy.diff(dataset.documents)
    content = {key: dataset.description[key] for key in ("vocabulary_size", "tokens", "documents")}
    content["longest_document"] = int(lengths.max(initial=0))
    if dataset.mask is not None:
        content["loss_tokens"] = int(numpy.count_nonzero(dataset.mask))
    if options.entropy:
        content["unigram_entropy_nats"] = dataset.unigram_entropy()
    if options.verify:
        content["verified"] = True
    if options.json:
        print(json.dumps(content))
    else:
        for key, value in content.items():
            print(f"{key}: {value}")


def parse(arguments):
    if arguments[:1] == ["info"]:
        parser = argparse.ArgumentParser(prog="pack.py info", description="Says what a dataset holds.")
        parser.add_argument("dataset")
        parser.add_argument("--entropy", action="store_true", help="also the unigram entropy of its tokens, in nats")
        parser.add_argument("--verify", action="store_true", help="read everything and compare the checksums")
        parser.add_argument("--json", action="store_true")
        parser.set_defaults(command=show)
        return parser.parse_args(arguments[1:])
    parser = argparse.ArgumentParser(prog="pack.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", metavar="INPUT")
    parser.add_argument("--files-from", metavar="FILE", help="further inputs, one a line; - is standard input")
    parser.add_argument("--tokenizer", required=True, help="Hugging Face folder, or a tokenizer.json")
    parser.add_argument("--output", required=True, help="folder to make")
    fields = parser.add_mutually_exclusive_group()
    fields.add_argument("--text-field", default="text", help="field or column that holds the text (text)")
    fields.add_argument("--messages-field", help="field or column that holds a list of {role, content}")
    parser.add_argument("--format", choices=("auto", "jsonl", "parquet", "text"), default="auto",
                        help="what the inputs are; auto: by their names")
    parser.add_argument("--glob", help="which files of a folder, such as '**/*.py'")
    parser.add_argument("--separator", metavar="TOKEN",
                        help="ends a document in place of the tokenizer's end of text; '' for none")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")
    parser.add_argument("--quiet", action="store_true", help="errors only")
    parser.set_defaults(command=pack)
    options = parser.parse_args(arguments)
    if not options.inputs and not options.files_from:
        parser.error("name at least one INPUT, or --files-from")
    if options.processes < 1:
        parser.error("--processes must be at least 1")
    return options


def main(arguments=None):
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        options.command(options)
    except (PackError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
