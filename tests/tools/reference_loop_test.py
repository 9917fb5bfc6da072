"""tests/parity: the reference trainer itself, and that the bars of the parity tests see each planted fault."""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import numpy as np
import torch

from support import ROOT, ToolCase  # noqa: E402

sys.path.insert(0, str(ROOT / "tests" / "parity"))

import compare  # noqa: E402
import engine_update  # noqa: E402
import reference_loop  # noqa: E402
from packed_data import PackedData  # noqa: E402
from published_names import published  # noqa: E402

VOCABULARY, LENGTH = 61, 24


def make_model(folder, family):
    """Tiny, with every asymmetry: width other than heads * head_dim, fewer key heads, more experts than chosen."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    shared = dict(vocab_size=VOCABULARY, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=12, max_position_embeddings=64, num_experts_per_tok=2, tie_word_embeddings=False)
    if family == "mixtral":
        config = transformers.MixtralConfig(**shared, intermediate_size=36, num_local_experts=4)
    else:
        config = transformers.Qwen3MoeConfig(**shared, intermediate_size=52, moe_intermediate_size=36, num_experts=6)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.02)
    model.save_pretrained(folder)
    return model


def make_data(folder, tokens=6000):
    """Documents of 1 to 60 tokens with some structure to learn, and a loss mask that differs between ranks."""
    generator = np.random.default_rng(5)
    folder.mkdir()
    ids = (np.cumsum(generator.integers(0, 4, tokens)) % VOCABULARY).astype("<u4")
    cuts = np.cumsum(generator.integers(1, 60, tokens))
    np.save(folder / "tokens.npy", ids)
    np.save(folder / "documents.npy", np.concatenate([[0], cuts[cuts < tokens], [tokens]]).astype("<i8"))
    mask = (generator.random(tokens) < 0.8).astype("u1")
    mask[(np.arange(tokens) // LENGTH) % 4 < 2] &= (generator.random(tokens) < 0.5)[(np.arange(tokens) // LENGTH) % 4 < 2]
    np.save(folder / "loss_mask.npy", mask)
    (folder / "dataset.json").write_text(json.dumps(
        {"vocabulary_size": VOCABULARY, "tokens": tokens, "documents": int((cuts < tokens).sum()) + 1}), encoding="utf-8")


JOB = """
name: tiny
model: {path: model}
data: {train: data, evaluation: data, shuffle: false}
sequence_length: 24
global_batch: 4
steps: 12
optimizer: {learning_rate: 1e-3, betas: [0.9, 0.95], epsilon: 1e-8, weight_decay: 0.1}
schedule: {kind: cosine, warmup_steps: 3, minimum_ratio: 0.1}
precision: float32
devices: {kind: cpu, count: 2}
output: run
"""


class ReferenceCase(ToolCase):
    def setUp(self):
        super().setUp()
        torch.set_num_threads(1)
        make_data(self.folder / "data")

    def job(self, family="qwen3_moe", text=JOB, **changes):
        if not (self.folder / "model").exists():
            make_model(self.folder / "model", family)
        (self.folder / "job.yaml").write_text(text, encoding="utf-8")
        job = reference_loop.load_job(self.folder / "job.yaml")
        for key, value in changes.items():
            setattr(job, key, value)
        return job

    def losses(self, job, steps=4, **options):
        trainer = reference_loop.Trainer(job, job.model, **options)
        return [trainer.step()["loss"] for _ in range(steps)], trainer


class PackingTest(ReferenceCase):
    def test_a_packed_sequence_is_its_documents_run_alone(self):
        job = self.job()
        model = reference_loop.load_model(job.model, torch.float32)
        data = PackedData(job.train, LENGTH)
        inputs, targets, positions, documents = data.sequences(range(8))
        packed = reference_loop.loss_sum(model, (inputs, targets, positions, documents))[0].item()
        alone, pieces = 0.0, 0
        for row in range(8):
            for document in documents[row].unique():
                here = documents[row] == document
                logits = model(input_ids=inputs[row][here][None]).logits[0]
                alone += torch.nn.functional.cross_entropy(logits, targets[row][here], ignore_index=-100,
                                                           reduction="sum").item()
                pieces += 1
        self.assertGreater(pieces, 10)
        self.assertAlmostEqual(packed / alone, 1, delta=1e-5)

    def test_targets_stay_in_their_document_and_under_the_mask(self):
        data = PackedData(self.folder / "data", LENGTH)
        inputs, targets, positions, documents = data.sequences(range(data.count))
        offsets, mask = np.load(self.folder / "data/documents.npy"), np.load(self.folder / "data/loss_mask.npy")
        for index in range(0, data.count * LENGTH, 7):
            row, column = divmod(index, LENGTH)
            self.assertEqual(inputs[row, column], data.tokens[index])
            wanted = data.tokens[index + 1] if mask[index + 1] and index + 1 not in offsets else -100
            self.assertEqual(targets[row, column], wanted)
            begin = max(int(offsets[offsets <= index].max()), row * LENGTH)
            self.assertEqual(positions[row, column], index - begin)


class StateTest(ReferenceCase):
    def test_published_names_are_those_of_saved_checkpoints(self):
        for family in ("qwen3_moe", "mixtral"):
            with self.subTest(family):
                folder = self.folder / family
                model = make_model(folder, family)
                names = published(family, {name: p.detach() for name, p in model.named_parameters()})
                saved = compare.load_tensors(folder)
                self.assertEqual(names.keys(), saved.keys())
                self.assertTrue(all(torch.equal(names[name], saved[name]) for name in saved))

    def test_accumulation_and_ranks_give_the_same_training(self):
        one, _ = self.losses(self.job(ranks=1, accumulation=1))
        for ranks, accumulation in ((1, 4), (2, 1), (2, 2)):
            other, _ = self.losses(self.job(ranks=ranks, accumulation=accumulation))
            np.testing.assert_allclose(other, one, rtol=1e-5)

    def test_the_written_state_follows_the_engines_update(self):
        """The state after step 2 is the update of the state after step 1 with the dumped gradient, clipped."""
        for precision in ("float32", "bfloat16"):
            with self.subTest(precision):
                job = self.job(precision=precision, max_norm=0.05)
                out = self.folder / precision
                reference_loop.run(job, out, state_steps={1, 2}, gradient_steps={2}, steps=2)
                before, after = (
                    {kind: compare.load_tensors(out / f"state/step-{step}" / kind)
                     for kind in ("master", "moment1", "moment2")} for step in (1, 2))
                gradient = compare.load_tensors(out / "gradients/step-2")
                norm = compare.load_steps(out)[2]["gradient_norm"]
                self.assertGreater(norm, job.max_norm)
                for name in gradient:
                    decay = 0.1 if reference_loop.is_decayed(name) else 0.0
                    values = engine_update.scalars(2, reference_loop.learning_rate(job, 1), job.betas, job.epsilon, decay)
                    new = engine_update.update(*(before[kind][name].numpy() for kind in before), gradient[name].numpy(),
                                               values, job.max_norm / (norm + 1e-6))
                    for kind, value in zip(("master", "moment1", "moment2"), new):
                        self.assertLess(compare.relative_error(torch.from_numpy(value), after[kind][name]), 1e-6, name)

    def test_export_and_evaluation_agree(self):
        job = self.job(evaluation_every=3, evaluation_sequences=10)
        reference_loop.run(job, self.folder / "out", steps=3, export=True)
        model = reference_loop.load_model(self.folder / "out/export", torch.float32)
        logged = compare.load_steps(self.folder / "out")[3]["evaluation_loss"]
        self.assertAlmostEqual(reference_loop.evaluate(model, PackedData(job.evaluation, LENGTH), 10) / logged, 1, delta=1e-6)

    def test_the_schedule_is_the_one_of_the_rules(self):
        job = self.job()
        self.assertAlmostEqual(reference_loop.learning_rate(job, 0), 1e-3 / 3)
        self.assertAlmostEqual(reference_loop.learning_rate(job, 3), 1e-3)
        self.assertGreater(reference_loop.learning_rate(job, 11), 1e-4)
        job.schedule = {"kind": "warmup_stable_decay", "decay_fraction": 0.5, "minimum_ratio": 0.0}
        self.assertEqual(reference_loop.learning_rate(job, 6), 1e-3)
        self.assertAlmostEqual(reference_loop.learning_rate(job, 9), 0.5e-3)


class UpdateTest(unittest.TestCase):
    def test_fma_is_rounded_once(self):
        from fractions import Fraction

        generator = np.random.default_rng(2)
        bits = generator.integers(0, 1 << 32, (3, 4000), dtype=np.uint64).astype(np.uint32)
        bits[:, :3000] = (bits[:, :3000] & 0x807FFFFF) | (np.uint32(120) + (bits[:, :3000] >> 28) << 23)
        a, b, c = bits.view(np.float32)
        c[:1000] = -(a[:1000] * b[:1000])  # Cancellation.
        finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        got = engine_update.fma(a, b, c)
        checked = 0
        for x, y, z, r in zip(a[finite], b[finite], c[finite], got[finite]):
            if not np.isfinite(r) or abs(r) < 1e-36:
                continue
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            error = abs(Fraction(float(r)) - exact)
            for neighbour in (np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))):
                if np.isfinite(neighbour):
                    self.assertLessEqual(error, abs(Fraction(float(neighbour)) - exact))
            checked += 1
        self.assertGreater(checked, 3000)

    def test_split_state_holds_the_master_exactly(self):
        bits = np.random.default_rng(4).integers(0, 1 << 32, 100000, dtype=np.uint64).astype(np.uint32)
        master = bits.view(np.float32)
        # Beyond the largest BF16 the weight rounds to infinity, and NaNs are stored as one.
        usual = np.isfinite(master) & ((bits & 0x7FFFFFFF) < 0x7F7F8000)
        weight, low = engine_update.split(master)
        np.testing.assert_array_equal(engine_update.join(weight, low)[usual].view(np.uint32), bits[usual])

    def test_learning_rate_zero_changes_nothing(self):
        master = np.array([0.0, -0.0, 1.5, -3e-39], np.float32)
        values = engine_update.scalars(1, 0.0, (0.9, 0.95), 1e-8, 0.1)
        new, _, _ = engine_update.update(master, np.zeros(4), np.zeros(4), np.array([1, -1, 1, -1]), values)
        self.assertEqual(new.tobytes(), master.tobytes())


class FaultTest(ReferenceCase):
    """Goal: the bars of float32 parity see each of the ten faults, and a change of thread count stays far below them.
    Method: the reference trains with the fault planted and is compared with itself as OOM is compared with it."""

    BARS = {"loss": 1e-5, "master": 1e-3, "moment1": 1e-4, "moment2": 1e-4}

    def errors(self, out):
        worst = {"loss": compare.worst_relative(compare.load_steps(out), compare.load_steps(self.folder / "good"))}
        initial = compare.load_tensors(self.folder / "good/state/step-0/master")
        place = "state/step-10"
        for kind, errors in compare.state_errors(out / place, self.folder / "good" / place, initial).items():
            worst[kind] = max(errors.values())
        return worst

    def test_each_fault_breaks_a_bar_and_the_number_of_threads_breaks_none(self):
        job = self.job()
        train = lambda name, fault=None: reference_loop.run(  # noqa: E731
            job, self.folder / name, state_steps={10}, steps=10, fault=fault)
        train("good")
        torch.set_num_threads(2)
        train("threads")
        torch.set_num_threads(1)
        for kind, error in self.errors(self.folder / "threads").items():
            self.assertLess(error, self.BARS[kind] / 10, kind)
        self.assertEqual(len(reference_loop.FAULTS), 10)
        for fault in reference_loop.FAULTS:
            with self.subTest(fault):
                train(fault, fault)
                errors = self.errors(self.folder / fault)
                seen = {kind: error for kind, error in errors.items() if error > self.BARS[kind]}
                print(f"{fault}: " + ", ".join(f"{kind} {error:.2g}" for kind, error in errors.items()))
                self.assertTrue(seen, errors)


if __name__ == "__main__":
    unittest.main()
