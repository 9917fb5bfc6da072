"""Import, then export at learning rate 0: the same tensors, bit for bit, and every other file of the model."""

import json
import unittest

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file as save_torch

import harness

CARRIED = {"README.md": b"# A model\n", "tokenizer.json": b'{"version": "1.0"}\n', "tokenizer_config.json": b"{}\n",
           "generation_config.json": b'{"eos_token_id": 2}\n', "chat_template.jinja": b"{{ messages }}\n",
           "LICENSE": b"\x00\xffnot text\n", "assets/picture.png": bytes(range(256))}


def bits_of(folder, widened=False):
    """{name: (type, shape, bytes)} of a folder's safetensors. `widened`: as float32."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name).float() if widened else file.get_tensor(name)
                tensors[name] = (str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(dtype_of_bits(tensor))
                                 .numpy().tobytes())
    return tensors


def dtype_of_bits(tensor):
    import torch
    return {2: torch.int16, 4: torch.int32}[tensor.element_size()]


class ImportExportTest(harness.NodeTest):
    def weights(self, family):
        weights = harness.random_weights(harness.model_config(family), seed=31)
        for index, value in enumerate(weights.values()):  # Zeros of both signs, everywhere.
            flat = value.reshape(-1)
            flat[index % flat.size] = np.float32(-0.0)
            flat[(index + 1) % flat.size] = np.float32(0.0)
        return weights

    def hold(self, family, stored, precision, ranks=1):
        at = self.folder / f"{family}-{stored}-{precision}-{ranks}"
        weights = self.weights(family)
        model = harness.write_model(at / "model", family, weights=weights)
        if stored == "bfloat16":
            import torch
            save_torch({name: torch.from_numpy(value).bfloat16() for name, value in weights.items()},
                       model / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
            (model / "config.json").write_text(json.dumps(config))
        for name, content in CARRIED.items():
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_bytes(content)
        train = harness.write_data(at / "train", tokens=401, documents=6)
        job = harness.write_job(
            at / "job.yaml", name=at.name.replace("_", "-"), model=model, train=train, output=at / "run", steps=3,
            precision=precision, devices={"kind": "cpu", "count": ranks}, optimizer={"learning_rate": 0})
        run = self.node.train(job)
        # A float32 job writes what it has: its masters.
        before, after = bits_of(model, precision == "float32"), bits_of(run.output / "export")
        self.assertEqual(sorted(after), sorted(before))
        self.assertEqual([name for name in before if before[name] != after[name]], [])
        self.assertTrue(any(b"\x00\x80" in content for _, _, content in after.values()))
        for name, content in CARRIED.items():
            self.assertEqual((run.output / "export" / name).read_bytes(), content, name)
        exported = json.loads((run.output / "export/config.json").read_text())
        config = json.loads((model / "config.json").read_text())
        config["dtype"] = "float32" if precision == "float32" else stored
        self.assertEqual(exported, config)

    def write_multimodal(self, folder):
        """Qwen3.5 as published: the text model beside a vision tower and a head for further tokens, A_log and Gated
        DeltaNet's norm in float32."""
        import torch

        harness.write_model(folder, "qwen3_5_moe")
        text = json.loads((folder / "config.json").read_text())
        text.pop("architectures")
        (folder / "config.json").write_text(json.dumps({
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "image_token_id": 250,
            "vision_config": {"depth": 1, "hidden_size": 8}, "tie_word_embeddings": False,
            "text_config": text | {"dtype": "bfloat16", "mtp_num_hidden_layers": 1}}))
        tensors = {}
        for name, value in self.weights("qwen3_5_moe").items():
            kept_wide = name.endswith(("A_log", "linear_attn.norm.weight"))
            tensors[name.replace("model.", "model.language_model.", 1)] = torch.from_numpy(value).to(
                torch.float32 if kept_wide else torch.bfloat16)
        tensors |= {"model.visual.patch_embed.proj.bias": torch.randn(8), "mtp.fc.weight": torch.randn(6, 12).bfloat16(),
                    "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.randn(3, 5).bfloat16()}
        save_torch(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def test_multimodal_model_keeps_what_is_not_trained(self):
        at = self.folder / "multimodal"
        model = self.write_multimodal(at / "model")
        train = harness.write_data(at / "train", tokens=401, documents=6)
        job = harness.write_job(at / "job.yaml", name="multimodal", model=model, train=train, output=at / "run", steps=3,
                                precision="bfloat16", devices={"kind": "cpu", "count": 2}, optimizer={"learning_rate": 0})
        run = self.node.train(job)
        before, after = bits_of(model), bits_of(run.output / "export")
        self.assertEqual({kind for kind, _, _ in before.values()}, {"torch.float32", "torch.bfloat16"})
        self.assertEqual(sorted(after), sorted(before))
        self.assertEqual([name for name in before if before[name] != after[name]], [])
        self.assertEqual((run.output / "export/config.json").read_bytes(), (model / "config.json").read_bytes())

    def test_bfloat16_model_trained_in_bfloat16(self):
        self.hold("qwen3_moe", "bfloat16", "bfloat16", ranks=2)

    def test_float32_model_trained_in_float32(self):
        self.hold("mixtral", "float32", "float32")

    def test_float32_model_trained_in_bfloat16(self):
        self.hold("qwen3_moe", "float32", "bfloat16")

    def test_bfloat16_model_trained_in_float32(self):
        self.hold("mixtral", "bfloat16", "float32")


if __name__ == "__main__":
    unittest.main(verbosity=2)
