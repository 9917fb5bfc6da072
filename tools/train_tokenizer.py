#!/usr/bin/env python3
"""Trains a byte-level BPE tokenizer on text files and writes it as a Hugging Face folder.

    tools/train_tokenizer.py --vocabulary 2048 --output DIR INPUT...
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from packing.errors import PackError  # noqa: E402
from packing.sources import find_files  # noqa: E402

END_OF_TEXT = "<|endoftext|>"


def train(texts, vocabulary_size):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The alphabet of all bytes: any text can be encoded, so there is no unknown token.
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer, folder):
    """Makes the folder whole or not at all."""
    folder = pathlib.Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        tokenizer.save(str(work / "tokenizer.json"))
        (work / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }, indent=2) + "\n", encoding="utf-8")
        work.chmod(0o755)
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="text files, or folders of them")
    parser.add_argument("--files-from", metavar="FILE", help="further inputs, one a line; - is standard input")
    parser.add_argument("--glob", help="which files of a folder, such as '**/*.py'")
    parser.add_argument("--vocabulary", type=int, required=True, help="number of tokens; at least 257")
    parser.add_argument("--output", required=True, help="folder to make; must not exist")
    options = parser.parse_args(arguments)
    try:
        if options.vocabulary < 257:
            raise PackError("--vocabulary must be at least 257: every byte, and the end of text")
        if pathlib.Path(options.output).exists():
            raise PackError(f"{options.output}: exists already")
        inputs = list(options.inputs)
        if options.files_from:
            with (sys.stdin if options.files_from == "-" else open(options.files_from, encoding="utf-8")) as file:
                inputs += [line for line in file.read().splitlines() if line]
        files = find_files(inputs, options.glob, "text")
        if not files:
            raise PackError("there is no input")
        tokenizer = train((path.read_text(encoding="utf-8") for path, _ in files), options.vocabulary)
        write(tokenizer, options.output)
    except (PackError, OSError, UnicodeDecodeError) as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {tokenizer.get_vocab_size()} tokens from {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
