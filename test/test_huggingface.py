"""Models of Hugging Face as a run meets them: what is refused, and by what words; with transformers, checkpoints that it opens,
losses and texts that are the same. Without transformers (pip install torch transformers) that part is skipped."""
import glob
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import unittest

from test_cli import Case, PROGRAM, ROOT, run, write_shard

GOLDEN = os.path.join(ROOT, "test/golden/huggingface")
V, T = 257, 32  # bytes and the end of a text, so that --generate needs no tokenizer
SMALL = ["--vocab-size", V, "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--seq-length", T,
         "--max-position-embeddings", 64, "--micro-batch-size", 4, "--train-steps", 2, "--lr", "3e-2", "--init-method-std", "0.2",
         "--threads", 1, "--precision", "fp32", "--val-every", 2, "--val-steps", 2]  # fmt: skip
LLAMA = ["--normalization", "RMSNorm", "--position-embedding-type", "rope", "--activation", "swiglu", "--rotary-base", "500",
         "--num-query-groups", 2, "--no-add-bias-linear"]  # fmt: skip
MODELS = {
    "gpt2": [],
    "gpt2 with 2 KV heads": ["--num-query-groups", 2],
    "gpt2 without biases, untied": ["--no-add-bias-linear", "--untie-embeddings-and-output-weights"],
    "llama": [*LLAMA, "--kv-channels", 16, "--untie-embeddings-and-output-weights"],
    "qwen2": [*LLAMA, "--add-qkv-bias"],
}
FILES = {"fp32": [], "bf16": ["--checkpoint-dtype", "bf16"], "shards": ["--max-shard-gib", "2e-5"]}
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def read_safetensors(path):
    """{name: [dtype, shape, bytes]}"""
    with open(path, "rb") as f:
        data = f.read()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    return {name: [t["dtype"], t["shape"], data[end + t["data_offsets"][0] : end + t["data_offsets"][1]]]
            for name, t in header.items()}  # fmt: skip


def write_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, value) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def escaped(text):
    """As train_gpt prints bytes, with those of whole characters beyond ASCII escaped too."""
    return "".join(chr(c) if 32 <= c < 127 or c in b"\n\t" else "\\x%02x" % c for c in text)


class Refusals(Case):
    """On copies of the golden folders, each changed in one place."""

    def copy(self, name="gpt2"):
        folder = tempfile.mkdtemp(dir=self.path)
        shutil.copytree(os.path.join(GOLDEN, name), folder, dirs_exist_ok=True)
        return folder

    def refused_from(self, folder, *words, options=()):
        self.refused("--init-from", folder, "--eval-only", "--val-data", self.path + "/t_val_000.bin", "--micro-batch-size", 1,
                     "--seq-length", 24, "--device", "cpu", *options, words=words)

    def with_config(self, name, **changes):
        folder = self.copy(name)
        with open(folder + "/config.json") as f:
            config = {**json.load(f), **changes}
        with open(folder + "/config.json", "w") as f:
            json.dump(config, f)
        return folder

    def with_tensors(self, change, name="gpt2"):
        folder = self.copy(name)
        path = folder + "/model.safetensors"
        tensors = read_safetensors(path)
        change(tensors)
        write_safetensors(path, tensors)
        return folder

    def test_settings(self):
        for name, changes, words in [
            ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is set"),
            ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "rope_type is 'llama3'"),
            ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type is 'yarn'"),
            ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is true"),
            ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
            ("qwen2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is set"),
            ("llama", {"model_type": "mistral"}, "model_type is 'mistral'"),
            ("llama", {"model_type": "phi3"}, "model_type is 'phi3'"),
            ("gpt2", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
            ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
            ("llama", {"attention_bias": True}, "attention_bias is true and mlp_bias false"),
        ]:
            folder = self.with_config(name, **changes)
            self.refused_from(folder, "config.json", words)

    def test_options_that_contradict(self):
        folder = self.copy()
        self.refused_from(folder, "--preset", "--init-from", options=["--preset", "gpt2-124m"])
        self.refused_from(folder, "--num-layers is 3, but 2", "leave the option out", options=["--num-layers", 3])
        self.refused_from(folder, "--num-query-groups is 1, but 2", options=["--num-query-groups", 1])
        self.refused_from(folder, "--kv-channels is 32, but 8", options=["--kv-channels", 32])
        self.refused_from(folder, "--vocab-size is 50257, but 101", options=["--vocab-size", 50257])
        self.refused_from(self.copy("llama"), "--rotary-base is 10000, but 300", options=["--rotary-base", 10000])
        self.refused_from(os.path.join(GOLDEN, "gpt2.3.bin"), "--num-layers is 3, but 2", options=["--num-layers", 3])

    def test_the_same_options_again(self):
        write_shard(self.path + "/small.bin", [i * 7 % 101 for i in range(200)])
        result = run("--init-from", os.path.join(GOLDEN, "gpt2"), "--num-layers", 2, "--norm-epsilon", "0.0001", "--eval-only",
                     "--val-data", self.path + "/small.bin", "--micro-batch-size", 1, "--seq-length", 24)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_tensors(self):
        name = "transformer.h.1.attn.c_attn.weight"
        self.refused_from(self.with_tensors(lambda t: t.pop(name)), "has no tensor '%s'" % name)
        self.refused_from(self.with_tensors(lambda t: t.pop("transformer.h.0.ln_1.bias")), "has no tensor 'transformer.h.0.ln_1.bias'")
        extra = ["F32", [1], bytes(4)]
        self.refused_from(self.with_tensors(lambda t: t.update({"score.weight": extra})), "tensor 'score.weight'", "no place")
        self.refused_from(self.with_tensors(lambda t: t.update({"transformer.h.2.ln_1.bias": extra})), "'transformer.h.2.ln_1.bias'")
        self.refused_from(self.with_tensors(lambda t: t[name].__setitem__(1, [48, 16])), "shape (48, 16); expected (16, 48)")
        self.refused_from(self.with_tensors(lambda t: t[name].__setitem__(1, [768])), "shape (768); expected (16, 48)")
        self.refused_from(self.with_tensors(lambda t: t[name].__setitem__(0, "I32")), name, "is of type I32; expected F32")
        norm = "model.norm.weight"
        self.refused_from(self.with_tensors(lambda t: t.pop("lm_head.weight"), "llama"), "has no tensor 'lm_head.weight'")
        self.refused_from(self.with_tensors(lambda t: t.update({norm: ["U8", [32], bytes(32)]}), "llama"), norm, "type U8")

    def test_what_may_be_there(self):
        """Masks of older GPT-2 files, frequencies of older Llamas, a tied head that was written, names without a prefix."""
        write_shard(self.path + "/small.bin", [i * 7 % 101 for i in range(200)])

        def loss(folder):
            result = run("--init-from", folder, "--eval-only", "--val-data", self.path + "/small.bin", "--micro-batch-size", 1,
                         "--seq-length", 24, "--precision", "fp32")
            self.assertEqual(result.returncode, 0, result.stderr)
            return re.search(r"validation loss \S+", result.stdout)[0]

        def masks(tensors):
            for name in list(tensors):
                tensors[name.removeprefix("transformer.")] = tensors.pop(name)
            tensors["h.0.attn.bias"] = ["U8", [1, 1, 2, 2], bytes(4)]
            tensors["h.0.attn.masked_bias"] = ["F32", [], bytes(4)]
            tensors["lm_head.weight"] = tensors["wte.weight"]

        self.assertEqual(loss(self.with_tensors(masks)), loss(self.copy()))
        both = self.copy()  # from_pretrained looks for the whole file first, too
        with open(both + "/model.safetensors.index.json", "w") as f:
            json.dump({"weight_map": {"transformer.wte.weight": "gone.safetensors"}}, f)
        self.assertEqual(loss(both), loss(self.copy()))
        frequencies = lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": ["F32", [4], bytes(16)]})
        self.assertEqual(loss(self.with_tensors(frequencies, "llama")), loss(self.copy("llama")))

    def test_files(self):
        folder = self.copy()
        path = folder + "/model.safetensors"
        for cut in [os.path.getsize(path) - 1, 4000, 5, 0]:
            os.truncate(path, cut)
            self.refused_from(folder, "model.safetensors")
        os.remove(path)
        self.refused_from(folder, "model.safetensors", "can't be opened")
        folder = self.copy("llama_sharded")
        shard = "model-00003-of-00009.safetensors"
        os.remove(os.path.join(folder, shard))
        self.refused_from(folder, shard, "can't be opened")
        folder, norm = self.copy("llama_sharded"), "model.norm.weight"
        first = folder + "/model-00001-of-00009.safetensors"
        write_safetensors(first, {**read_safetensors(first), norm: ["F16", [32], bytes(64)]})
        self.refused_from(folder, norm, "model-00001-of-00009.safetensors has too")
        index = folder + "/model.safetensors.index.json"
        with open(index, "w") as f:
            json.dump({"weight_map": {"a": "../" + shard}}, f)
        self.refused_from(folder, "index.json", "'../" + shard)
        os.truncate(index, 10)
        self.refused_from(folder, "index.json", "is not valid JSON")
        os.remove(folder + "/config.json")
        self.refused_from(folder, "config.json", "can't be opened")
        self.refused_from(self.path + "/nowhere", "nowhere")
        self.refused_from(self.path + "/t_val_000.bin", "begins with 20240520", "llm.c")


@unittest.skipUnless(HAS_TRANSFORMERS, "torch and transformers are not installed here")
class Transformers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.environ["HF_HUB_OFFLINE"] = "1"
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = cls.folder.name
        cls.tokens = [(i * i * 31 + i // 3) % V for i in range(40 * T + 1)]
        write_shard(cls.path + "/t_train.bin", cls.tokens)
        write_shard(cls.path + "/t_val.bin", cls.tokens[: 8 * T + 1])

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def ours(self, *arguments):
        result = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def checkpoints(self):
        """Each model in each form, opened by transformers with nothing missing, unexpected or made up, and no warning."""
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        for name, shape in MODELS.items():
            for form, options in FILES.items():
                out = os.path.join(self.path, name.replace(" ", "_") + "_" + form)
                if not os.path.exists(out):
                    self.ours(*SMALL, *shape, *options, "--train-data", self.path + "/t_train.bin", "--val-data",
                              self.path + "/t_val.bin", "--out", out)
                folder = out + "/checkpoints/step_00000002"
                self.assertEqual(len(glob.glob(folder + "/model*.safetensors")) > 1, form == "shards")
                with self.assertNoLogs("transformers", "WARNING"):
                    model, info = transformers.AutoModelForCausalLM.from_pretrained(
                        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
                self.assertFalse(any(info.values()), info)
                as_saved = transformers.AutoModelForCausalLM.from_pretrained(folder)
                self.assertEqual(as_saved.dtype, torch.bfloat16 if form == "bf16" else torch.float32)
                self.assertIn(name.split()[0], type(model).__name__.lower())
                yield model.eval(), folder

    def test_losses_are_equal(self):
        import torch

        tokens = torch.tensor(self.tokens[: 8 * T + 1])
        for model, folder in self.checkpoints():
            with self.subTest(folder):
                with torch.no_grad():
                    logits = model(tokens[:-1].view(8, T)).logits.double()
                theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()
                printed = self.ours("--eval-only", "--init-from", folder, "--val-data", self.path + "/t_val.bin", "--seq-length", T,
                                    "--micro-batch-size", 2, "--precision", "fp32")  # fmt: skip
                ours = float(re.search(rb"validation loss (\S+),", printed)[1])
                self.assertLess(abs(ours / theirs - 1), 1e-6)
                if "_bf16/" not in folder:  # the model as it was in training, before anything was written
                    with open(folder.split("/checkpoints/")[0] + "/log.jsonl") as f:
                        trained = json.loads(f.readlines()[-1])["val_loss"]
                    self.assertLess(abs(trained / theirs - 1), 1e-6)

    def test_greedy_texts_are_equal(self):
        import torch

        prompt = "for (int i"
        for model, folder in self.checkpoints():
            with self.subTest(folder):
                ids = torch.tensor([list(prompt.encode())])
                theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=256)
                printed = self.ours("--generate", prompt, "--init-from", folder, "--temperature", 0, "--sample-tokens", 20,
                                    "--precision", "fp32")  # fmt: skip
                self.assertEqual(escaped(printed), escaped(bytes(t for t in theirs[0].tolist() if t < 256)) + "\n")


if __name__ == "__main__":
    unittest.main()
