"""tools/train_tokenizer.py: the folder that it writes is a Hugging Face tokenizer that loses no text."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from support import ToolCase  # noqa: E402


class TrainTokenizerTest(ToolCase):
    def setUp(self):
        super().setUp()
        self.source = self.folder / "source"
        self.source.mkdir()
        for index in range(5):
            (self.source / f"{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * 20, encoding="utf-8")
        self.output = self.folder / "tokenizer"

    def train(self, vocabulary=300, output=None):
        return self.run_tool("train_tokenizer.py", "--vocabulary", vocabulary, "--output", output or self.output,
                             "--glob", "*.py", self.source)

    def test_transformers_loads_it_and_any_text_comes_back(self):
        import transformers

        done = self.train()
        self.assertEqual(done.returncode, 0, done.stderr)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.output)
        self.assertEqual(tokenizer.eos_token, "<|endoftext|>")
        for text in ("def f(x):\n    return x\n", " größer 🙂\t\0\n  ", "<b> it 's , here .", "plain"):
            self.assertEqual(tokenizer.decode(tokenizer.encode(text)), text)
        self.assertLess(len(tokenizer.encode("    return x")), 6)  # Merges were learned.

    def test_the_same_text_gives_the_same_tokenizer(self):
        self.train()
        self.train(output=self.folder / "again")
        self.assertEqual((self.output / "tokenizer.json").read_bytes(),
                         (self.folder / "again" / "tokenizer.json").read_bytes())

    def test_an_existing_folder_and_a_vocabulary_below_the_bytes_are_refused(self):
        done = self.train(vocabulary=256)
        self.assertEqual(done.returncode, 1)
        self.assertIn("at least 257", done.stderr)
        self.output.mkdir()
        done = self.train()
        self.assertEqual(done.returncode, 1)
        self.assertIn("exists already", done.stderr)


if __name__ == "__main__":
    unittest.main()
