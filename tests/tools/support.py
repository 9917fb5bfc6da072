"""A tiny tokenizer, and running the tools as their user does."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

# ChatML, and the same dropping the reasoning of earlier turns, as reasoning models' templates do.
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def make_tokenizer(folder, template=None, end_of_text="<|im_end|>"):
    """Byte-level with a few merges; special tokens for chat."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end_of_text:
        config["eos_token"] = end_of_text
    if template:
        config["chat_template"] = template
    config["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


class ToolCase(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    def run_tool(self, name, *arguments):
        """As run_program, in this process: loading the libraries takes longer than most tests."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = importlib.import_module(name.removesuffix(".py")).main(list(map(str, arguments)))
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    def run_program(self, name, *arguments):
        return subprocess.run([sys.executable, "-B", ROOT / "tools" / name, *map(str, arguments)], text=True,
                              capture_output=True, stdin=subprocess.DEVNULL, timeout=200, check=False)

    def write_lines(self, name, values):
        path = self.folder / name
        path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
        return path
