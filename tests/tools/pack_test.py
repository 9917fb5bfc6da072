"""tools/pack.py: what it writes is what the tokenizer says, whatever the input's form and the number of processes."""

import json
import pathlib
import sys
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from support import FORGETFUL_TEMPLATE, PLAIN_TEMPLATE, ToolCase, make_tokenizer  # noqa: E402

from packing.dataset import Dataset  # noqa: E402
from packing.encoding import Encoder, load_tokenizer  # noqa: E402
from packing.errors import PackError  # noqa: E402
from packing.sources import Batch  # noqa: E402

TEXTS = ["the quick brown fox", "größer als 🙂 jumps", "", "over the lazy dog\n\nagain", "x"]


class PackCase(ToolCase):
    template = None

    def setUp(self):
        super().setUp()
        self.tokenizer = make_tokenizer(self.folder / "tokenizer", self.template)
        self.output = self.folder / "data"

    def pack(self, *arguments, processes=1):
        return self.run_tool("pack.py", "--tokenizer", self.folder / "tokenizer", "--output", self.output,
                             "--processes", processes, *arguments)

    def packed(self, *arguments, processes=1):
        done = self.pack(*arguments, processes=processes)
        self.assertEqual(done.returncode, 0, done.stderr)
        return Dataset(self.output)

    def expect(self, dataset, texts):
        end = self.tokenizer.token_to_id("<|im_end|>")
        wanted = [self.tokenizer.encode(text).ids + [end] for text in texts if text]
        self.assertEqual(dataset.tokens.tolist(), sum(wanted, []))
        self.assertEqual(np.diff(dataset.documents).tolist(), [len(ids) for ids in wanted])
        self.assertEqual(dataset.description["vocabulary_size"], self.tokenizer.get_vocab_size())

    def refused(self, *arguments):
        """The one line that a refusal prints; no output and no remains are left."""
        before = sorted(p.name for p in self.folder.iterdir())
        done = self.pack(*arguments)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), before)
        return done.stderr


class TextTest(PackCase):
    def test_json_lines_are_documents_that_end_with_the_end_of_text(self):
        dataset = self.packed(self.write_lines("in.jsonl", [{"id": i, "text": t} for i, t in enumerate(TEXTS)]))
        self.expect(dataset, TEXTS)
        self.assertEqual(dataset.description["skipped"], 1)
        self.assertIsNone(dataset.mask)
        dataset.verify()

    def test_parquet_gives_what_json_lines_give(self):
        import pyarrow
        import pyarrow.parquet

        texts = TEXTS * 300  # More than one batch, and more than one row group.
        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), self.folder / "in.parquet", row_group_size=700)
        self.expect(self.packed("--text-field", "body", self.folder / "in.parquet"), texts)

    def test_a_folder_of_text_files_is_packed_in_the_order_of_names(self):
        for name, text in (("b/two.py", "brown"), ("a/one.py", "quick"), ("a/no.bin", "fox")):
            (self.folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "src" / name).write_text(text, encoding="utf-8")
        self.expect(self.packed("--glob", "**/*.py", self.folder / "src"), ["quick", "brown"])

    def test_the_number_of_processes_changes_no_byte(self):
        source = self.write_lines("in.jsonl", [{"text": f"{i} the lazy dog {'fox ' * (i % 50)}"} for i in range(12000)])
        self.assertGreater(source.stat().st_size, 1 << 20)  # More than one batch.
        folders = []
        for processes in (1, 3):
            self.output = self.folder / f"by-{processes}"
            self.packed(source, processes=processes)
            folders.append({p.name: p.read_bytes() for p in self.output.iterdir()})
        self.assertEqual(folders[0], folders[1])

    def test_the_program_does_what_its_help_says(self):
        source = self.write_lines("in.jsonl", [{"text": t} for t in TEXTS])
        done = self.run_program("pack.py", "--tokenizer", self.folder / "tokenizer", "--output", self.output, source)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("4 documents", done.stdout)
        self.expect(Dataset(self.output), TEXTS)
        self.assertEqual(self.run_program("pack.py", "info", self.folder / "absent").returncode, 1)
        self.assertEqual(self.run_program("pack.py").returncode, 2)

    def test_the_arrays_are_ordinary_npy_files_of_the_promised_types(self):
        self.packed(self.write_lines("in.jsonl", [{"text": "fox"}]))
        self.assertEqual(np.load(self.output / "tokens.npy").dtype, np.dtype("<u4"))
        self.assertEqual(np.load(self.output / "documents.npy").dtype, np.dtype("<i8"))

    def test_entropy_of_info_is_that_of_the_token_counts(self):
        dataset = self.packed(self.write_lines("in.jsonl", [{"text": t} for t in TEXTS]))
        shares = np.bincount(dataset.tokens) / dataset.tokens.size
        shares = shares[shares > 0]
        done = self.run_tool("pack.py", "info", self.output, "--entropy", "--verify", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertAlmostEqual(json.loads(done.stdout)["unigram_entropy_nats"], -(shares * np.log(shares)).sum(), 12)

    def test_info_sees_a_flipped_byte_and_a_cut_file(self):
        self.packed(self.write_lines("in.jsonl", [{"text": t} for t in TEXTS]))
        path = self.output / "tokens.npy"
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        done = self.run_tool("pack.py", "info", self.output, "--verify")
        self.assertEqual(done.returncode, 1)
        self.assertIn("tokens.npy", done.stderr)
        path.write_bytes(good[:-4])
        done = self.run_tool("pack.py", "info", self.output)
        self.assertEqual(done.returncode, 1)
        self.assertIn("tokens.npy", done.stderr)

    def test_a_dataset_is_replaced_only_on_request(self):
        source = self.write_lines("in.jsonl", [{"text": "fox"}])
        self.packed(source)
        self.assertIn("exists already", self.refused(source))
        other = self.write_lines("other.jsonl", [{"text": "dog"}])
        self.expect(self.packed("--overwrite", other), ["dog"])

    def test_a_folder_that_is_no_dataset_is_never_replaced(self):
        self.output.mkdir()
        (self.output / "thesis.txt").write_text("years of work", encoding="utf-8")
        self.assertIn("is no dataset", self.refused("--overwrite", self.write_lines("in.jsonl", [{"text": "fox"}])))
        self.assertTrue((self.output / "thesis.txt").exists())

    def test_errors_name_file_and_line(self):
        good = json.dumps({"text": "fox"}) + "\n"
        path = self.folder / "bad.jsonl"
        for line, says in (("{", "is not JSON"), ('{"txt": "a"}', "no field 'text'; its fields: txt"),
                           ('{"text": 7}', "is int, not text"), ("[1]", "is list, not an object")):
            path.write_text(good * 2 + "\n" + line + "\n", encoding="utf-8")
            message = self.refused(path)
            self.assertIn(f"{path}:4:", message)
            self.assertIn(says, message)

    def test_an_error_in_another_process_names_file_and_line_too(self):
        path = self.folder / "bad.jsonl"
        path.write_text((json.dumps({"text": "fox " * 100}) + "\n") * 8000 + "{\n", encoding="utf-8")
        done = self.pack(path, processes=2)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"{path}:8001:", done.stderr)

    def test_other_bad_inputs_are_refused_by_name(self):
        (self.folder / "latin.txt").write_bytes("first\nstra\xdfe".encode("latin-1"))
        (self.folder / "bad.parquet").write_bytes(b"PAR1 no")
        (self.folder / "empty.jsonl").write_text("", encoding="utf-8")
        for name, says in (("latin.txt", "latin.txt:2: is not UTF-8"), ("bad.parquet", "bad.parquet"),
                           ("empty.jsonl", "hold no text"), ("absent.jsonl", "absent.jsonl: no such file")):
            self.assertIn(says, self.refused(self.folder / name))

    def test_a_missing_column_lists_those_that_are_there(self):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"body": ["fox"]}), self.folder / "in.parquet")
        self.assertIn("no column 'text'; its columns: body", self.refused(self.folder / "in.parquet"))

    def test_a_tokenizer_without_end_of_text_adds_nothing(self):
        bare = self.folder / "bare"
        bare.mkdir()
        (self.folder / "tokenizer" / "tokenizer.json").rename(bare / "tokenizer.json")
        done = self.run_tool("pack.py", "--tokenizer", bare / "tokenizer.json", "--output", self.output, "--processes", 1,
                             self.write_lines("in.jsonl", [{"text": "fox"}, {"text": "dog"}]))
        self.assertEqual(done.returncode, 0, done.stderr)
        wanted = self.tokenizer.encode("fox").ids + self.tokenizer.encode("dog").ids
        self.assertEqual(Dataset(self.output).tokens.tolist(), wanted)


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the quick?"},
    {"role": "assistant", "content": "<think>a fox</think>brown fox"},
    {"role": "user", "content": "and the dog?"},
    {"role": "assistant", "content": "<think>a dog</think>lazy 🙂"},
]


class ChatTest(PackCase):
    template = PLAIN_TEMPLATE

    def parts(self, dataset, index):
        """The text of document `index`, and of what is in the loss, turn by turn."""
        start, end = dataset.documents[index], dataset.documents[index + 1]
        tokens, mask = dataset.tokens[start:end], dataset.mask[start:end]
        turns = np.split(tokens, np.flatnonzero(np.diff(mask)) + 1)
        kinds = [mask[0], *mask[1:][np.diff(mask) != 0]]
        decode = lambda ids: self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)  # noqa: E731
        return decode(tokens), [decode(turn) for turn, kind in zip(turns, kinds) if kind]

    def test_only_what_the_assistant_wrote_is_in_the_loss(self):
        dataset = self.packed("--messages-field", "messages", self.write_lines("in.jsonl", [{"messages": CHAT}]))
        text, turns = self.parts(dataset, 0)
        self.assertEqual(text, "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT))
        self.assertEqual(turns, [m["content"] + "<|im_end|>" for m in CHAT if m["role"] == "assistant"])
        self.assertEqual(dataset.mask.size, dataset.tokens.size)

    def test_parquet_conversations_give_what_json_lines_give(self):
        import pyarrow
        import pyarrow.parquet

        chats = [CHAT, CHAT[1:3]]
        pyarrow.parquet.write_table(pyarrow.table({"messages": chats}), self.folder / "in.parquet")
        one = self.packed("--messages-field", "messages", self.folder / "in.parquet")
        tokens, mask, documents = one.tokens.tolist(), one.mask.tolist(), one.documents.tolist()
        two = self.packed("--overwrite", "--messages-field", "messages",
                          self.write_lines("in.jsonl", [{"messages": chat} for chat in chats]))
        self.assertEqual((tokens, mask, documents), (two.tokens.tolist(), two.mask.tolist(), two.documents.tolist()))

    def test_a_conversation_without_an_assistant_is_left_out(self):
        dataset = self.packed("--messages-field", "messages",
                              self.write_lines("in.jsonl", [{"messages": CHAT[:2]}, {"messages": CHAT[:3]}]))
        self.assertEqual(dataset.description["documents"], 1)
        self.assertEqual(dataset.description["skipped"], 1)

    def test_bad_conversations_name_file_line_and_message(self):
        for chat, says in (([], "is no list of messages"), ("hello", "is no list of messages"),
                           ([{"content": "x"}], "message 0 has no 'role'")):
            path = self.write_lines("bad.jsonl", [{"messages": CHAT}, {"messages": chat}])
            message = self.refused("--messages-field", "messages", path)
            self.assertIn(f"{path}:2:", message)
            self.assertIn(says, message)


class ForgetfulChatTest(ChatTest):
    """The template drops the reasoning of earlier turns, so no turn's prompt begins with an earlier document."""

    template = FORGETFUL_TEMPLATE

    def test_only_what_the_assistant_wrote_is_in_the_loss(self):
        dataset = self.packed("--messages-field", "messages", self.write_lines("in.jsonl", [{"messages": CHAT}]))
        self.assertEqual(dataset.description["documents"], 2)
        first, turns = self.parts(dataset, 0)
        self.assertTrue(first.endswith("<think>a fox</think>brown fox<|im_end|>\n"))
        self.assertEqual(turns, ["<think>a fox</think>brown fox<|im_end|>"])
        second, turns = self.parts(dataset, 1)
        self.assertIn("<|im_start|>assistant\nbrown fox<|im_end|>", second)  # History as the model sees it then.
        self.assertEqual(turns, ["<think>a dog</think>lazy 🙂<|im_end|>"])


class TemplateTest(PackCase):
    template = "{{ raise_exception('no such role') }}"

    def test_an_error_of_the_template_names_the_message(self):
        encoder = Encoder(load_tokenizer(self.folder / "tokenizer", None, True), None, "messages")
        with self.assertRaisesRegex(PackError, "rows.parquet: row 7: 'messages': message 2: .*no such role"):
            encoder.encode(Batch("rows", "rows.parquet", 7, [CHAT]))

    def test_a_tokenizer_without_template_is_refused(self):
        make_tokenizer(self.folder / "plain")
        with self.assertRaisesRegex(PackError, "has no chat template"):
            load_tokenizer(self.folder / "plain", None, True)


if __name__ == "__main__":
    unittest.main()
