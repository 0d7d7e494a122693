"""Models of Hugging Face as a run meets them: what is refused, and in which words; folders of every architecture
(test/golden/zoo), whose losses and texts are as transformers computes them; with transformers, the same at larger
shapes, and checkpoints that it opens. Without transformers (pip install torch transformers) that part is skipped."""
import array
import glob
import importlib.util
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

from test_cli import Case, PROGRAM, ROOT, run, write_shard

sys.path.insert(0, os.path.join(ROOT, "test/golden"))
from config_forms import flat_form, nested_form

GOLDEN = os.path.join(ROOT, "test/golden/huggingface")
ZOO = os.path.join(ROOT, "test/golden/zoo")
FOLDERS = sorted(os.listdir(ZOO))
V, T, END = 257, 32, 256  # bytes and an end of text, so that --generate needs no tokenizer
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
# What several classes can express is written as the first of them (formats/huggingface.h).
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def read_safetensors(path):
    """Returns {name: [dtype, shape, bytes]}."""
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


def elements(dtype, data):
    """Returns the exact values of a tensor."""
    if dtype == "BF16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return array.array("f", struct.unpack("<%de" % (len(data) // 2), data)) if dtype == "F16" else array.array("f", data)


def read_model(folder):
    """Returns {name: [shape, values]} of all files of a folder."""
    tensors = {}
    for path in glob.glob(folder + "/model*.safetensors"):
        tensors.update(read_safetensors(path))
    return {name: [shape, elements(dtype, data)] for name, (dtype, shape, data) in tensors.items()}


def read_golden(path):
    """Returns {name: values} of an expected.golden, and its settings under their names (test/golden/README.md)."""
    with open(path, "rb") as f:
        data = f.read()
    at = 12 + struct.unpack_from("<I", data, 8)[0]
    found = dict(line.split("=", 1) for line in data[12:at].decode().splitlines())
    count, at = struct.unpack_from("<I", data, at)[0], at + 4
    for _ in range(count):
        length, at = struct.unpack_from("<I", data, at)[0], at + 4
        name, at = data[at : at + length].decode(), at + length
        is_int, dimensions = struct.unpack_from("<BI", data, at)
        shape = struct.unpack_from("<%dq" % dimensions, data, at + 5)
        at += 5 + 8 * dimensions
        at += -at % 8
        size = 1
        for n in shape:
            size *= n
        found[name] = list(struct.unpack_from("<%d%s" % (size, "i" if is_int else "f"), data, at))
        found.setdefault("order", []).append(name)
        at += 4 * size
    assert at == len(data), path
    return found


def escaped(text):
    """Returns text as train_gpt prints bytes, with the bytes of whole characters beyond ASCII escaped, too."""
    return "".join(chr(c) if 32 <= c < 127 or c in b"\n\t" else "\\x%02x" % c for c in text)


class Refusals(Case):
    """Copies of the golden folders, each changed in one place, are refused."""

    def copy(self, name="gpt2"):
        folder = tempfile.mkdtemp(dir=self.path)
        shutil.copytree(os.path.join(ZOO if name in FOLDERS else GOLDEN, name), folder, dirs_exist_ok=True)
        return folder

    def refused_from(self, folder, *words, options=()):
        self.refused("--init-from", folder, "--eval-only", "--val-data", self.path + "/t_val_000.bin", "--micro-batch-size", 1,
                     "--seq-length", 24, "--device", "cpu", *options, words=words)

    def with_config(self, name, **changes):
        folder = self.copy(name)
        with open(folder + "/config.json") as f:
            config = {**json.load(f), **changes}
        with open(folder + "/config.json", "w") as f:
            json.dump({key: value for key, value in config.items() if value is not ...}, f)
        return folder

    def with_tensors(self, change, name="gpt2"):
        folder = self.copy(name)
        path = folder + "/model.safetensors"
        tensors = read_safetensors(path)
        change(tensors)
        write_safetensors(path, tensors)
        return folder

    def test_settings(self):
        """A member that changes the result and is not supported is refused, in a config.json that is otherwise good."""
        for name, changes, words in [
            ("llama", {"model_type": "mixtral"}, ["model_type is 'mixtral'", "qwen3", "gemma3_text"]),
            ("llama", {"model_type": "deepseek_v3"}, ["model_type is 'deepseek_v3'"]),
            ("llama", {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}, ["'gemma3'", "270M", "1B"]),
            ("qwen2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config"]),
            ("gemma3", {"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantization_config"]),
            ("gpt2", {"activation_function": "relu"}, ["activation_function is 'relu'"]),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx is true"]),
            ("llama", {"hidden_act": "relu"}, ["hidden_act is 'relu'"]),
            ("gemma2", {"hidden_activation": "relu"}, ["hidden_activation is 'relu'"]),
            ("gpt_neox", {"hidden_act": "silu"}, ["hidden_act is 'silu'"]),
            ("qwen3", {"mlp_bias": True}, ["mlp_bias is true"]),
            ("olmo2", {"mlp_bias": True}, ["mlp_bias is true"]),
            ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
            ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention is true"]),
            ("gemma2", {"attn_logit_softcapping": 0}, ["attn_logit_softcapping is 0"]),
            ("gemma2", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar is 0"]),
            ("granite", {"residual_multiplier": "0.2"}, ["residual_multiplier"]),
            ("granite", {"logits_scaling": 0}, ["logits_scaling is 0"]),
            ("llama", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ]:
            with self.subTest(name=name, **changes):
                self.refused_from(self.with_config(name, **changes), "config.json", *words)

    def test_windows(self):
        for name, changes, words in [
            ("mistral_window", {"sliding_window": 0}, ["sliding_window is 0"]),
            ("gemma3", {"sliding_window": -1}, ["sliding_window is -1"]),
            ("qwen2", {"layer_types": ["full_attention"] * 2}, ["layer_types has 2", "expected 3"]),
            ("olmo3", {"layer_types": ["full_attention"] * 5}, ["layer_types has 5", "expected 4"]),
            ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "chunked_attention"]}, ["'chunked_attention'"]),
            ("ministral", {"layer_types": ["linear_attention", "full_attention"]}, ["'linear_attention'"]),
            ("ministral", {"sliding_window": None}, ["layer_types", "sliding_window"]),
            ("llama", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, ["sliding"]),
            ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers has 2", "expected 3"]),
            ("smollm3", {"no_rope_layers": [1, 2, 1]}, ["no_rope_layers"]),
            ("smollm3", {"no_rope_layer_interval": 0}, ["no_rope_layer_interval is 0"]),
        ]:
            with self.subTest(name=name, **changes):
                self.refused_from(self.with_config(name, **changes), "config.json", *words)

    def test_rotary_settings(self):
        rope = lambda kind, **more: {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}, "rope_theta": ...}
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
        for name, changes, words in [
            ("llama", rope("dynamic", factor=2.0), ["'dynamic'"]),
            ("llama", rope("proportional", factor=2.0), ["'proportional'"]),
            ("qwen2", rope("mrope", mrope_section=[1, 1, 2]), ["mrope"]),
            ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...}, ["'dynamic'"]),
            ("llama", rope("linear"), ["factor"]),
            ("llama", rope("linear", factor=0), ["factor is 0"]),
            ("llama", rope("llama3", factor=8.0, high_freq_factor=4.0, original_max_position_embeddings=16), ["low_freq_factor"]),
            ("llama", rope("default", angle=2), ["'angle'"]),
            ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": yarn}, ["rope_scaling", "rope_type"]),
            ("llama", {"rope_parameters": yarn, "rope_scaling": {**yarn, "factor": 2.0}}, ["rope_scaling", "factor"]),
            ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
            ("llama", {"rope_parameters": {"full_attention": yarn}}, ["full_attention"]),
            ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                                          "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0, 1.0]}}, ["short_factor has 2", "expected 3"]),
            ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                                          "short_factor": [1.0, 1.0, 1.0]}}, ["long_factor"]),
            ("phi3", {"original_max_position_embeddings": 17}, ["original_max_position_embeddings is 16", "17"]),
            ("gemma3", {"rope_parameters": {"sliding_attention": yarn, "full_attention": {"rope_type": "default"}}},
             ["sliding_attention has a scaling of its own"]),
        ]:  # fmt: skip
            with self.subTest(name=name, **changes):
                self.refused_from(self.with_config(name, **changes), "config.json", *words)
        frequencies = rope("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_position_embeddings=16)
        self.refused_from(self.with_config("llama", **frequencies), "--rope-low-freq-factor 4", "--rope-high-freq-factor 1")

    def test_a_head_that_is_tied_and_another(self):
        """lm_head.weight beside tie_word_embeddings must have the embedding's values, or the folder contradicts
        itself."""
        embedding = "model.embed_tokens.weight"

        def differs(tensors):
            dtype, shape, data = tensors[embedding]
            tensors["lm_head.weight"] = [dtype, shape, data[:-2] + bytes(2)]

        self.refused_from(self.with_tensors(differs, "gemma2"), "lm_head.weight")
        write_shard(self.path + "/same.bin", [i * 7 % 101 for i in range(200)])
        same = self.with_tensors(lambda t: t.update({"lm_head.weight": t[embedding]}), "gemma2")
        result = run("--init-from", same, "--eval-only", "--val-data", self.path + "/same.bin", "--micro-batch-size", 1,
                     "--seq-length", 24)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_an_architecture_that_is_not_known(self):
        self.refused_from(self.copy(), "--checkpoint-architecture 'gpt5' is not known", options=["--checkpoint-architecture", "gpt5"])

    def test_a_longer_context(self):
        """Rotary scaling and windows of a folder may be given anew; a checkpoint says the new ones."""
        write_shard(self.path + "/x_train_000.bin", [i * 7 % 101 for i in range(200)])
        folder = self.copy("llama")
        out = self.path + "/longer"
        result = run("--init-from", folder, "--rope-scaling-type", "yarn", "--rope-scaling-factor", 4,
                     "--rope-original-max-position-embeddings", 16, "--window-size", 20, "--seq-length", 48, "--train-steps", 1,
                     "--train-data", self.path + "/x_train_000.bin", "--micro-batch-size", 1, "--out", out)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(out + "/checkpoints/step_00000001/config.json") as f:
            config = json.load(f)
        self.assertEqual(config["rope_parameters"]["rope_type"], "yarn")
        self.assertEqual((config["model_type"], config["sliding_window"]), ("mistral", 20))

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
        """Masks of older GPT-2 files, frequencies of older Llamas, a tied head that was written, and names without a
        prefix may be there."""
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
        both = self.copy()  # from_pretrained, too, looks for the whole file first
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


class Runs(unittest.TestCase):
    """Runs of the program on a model's folder."""

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.path = cls.temporary.name

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def ours(self, *arguments):
        result = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300, check=False)
        self.assertEqual(result.returncode, 0, result.stderr.decode(errors="replace"))
        return result.stdout

    def shard(self, tokens, name="tokens.bin"):
        path = os.path.join(self.path, name)
        write_shard(path, tokens)
        return path

    def loss(self, folder, shard, seq_length, *options, precision="fp32"):
        printed = self.ours("--eval-only", "--init-from", folder, "--val-data", shard, "--seq-length", seq_length,
                            "--micro-batch-size", 2, "--precision", precision, "--device", "cpu", *options)  # fmt: skip
        return float(re.search(rb"validation loss (\S+),", printed)[1])

    def text(self, folder, prompt, tokens):
        return self.ours("--generate", prompt, "--init-from", folder, "--temperature", 0, "--sample-tokens", tokens,
                         "--precision", "fp32", "--device", "cpu")  # fmt: skip

    def with_config(self, folder, config):
        copy = tempfile.mkdtemp(dir=self.path)
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        with open(copy + "/config.json", "w") as f:
            json.dump(config, f)
        return copy

    def checkpoint(self, folder, shard, seq_length, *options):
        """Writes the model's own checkpoint, after a step that changes nothing."""
        out = tempfile.mkdtemp(dir=self.path)
        self.ours("--init-from", folder, "--train-data", shard, "--train-steps", 1, "--lr", 0, "--seq-length", seq_length,
                  "--micro-batch-size", 2, "--precision", "fp32", "--device", "cpu", "--out", out, *options)  # fmt: skip
        return out + "/checkpoints/step_00000001"

    def assert_near(self, ours, theirs, bound, what):
        self.assertLess(abs(ours / theirs - 1), bound, "%s: %.9g, and by transformers %.9g" % (what, ours, theirs))


class Zoo(Runs):
    """Each folder of test/golden/zoo against what transformers computed with it. test/op_zoo.c tests logits and
    gradients."""

    def each(self, check):
        """Calls check(folder, expected.golden, the shard of its tokens, T) for each folder."""
        for name in FOLDERS:
            with self.subTest(name):
                folder = os.path.join(ZOO, name)
                golden = read_golden(folder + "/expected.golden")
                shard = self.shard(golden["tokens"] + golden["targets"][-1:])
                check(folder, golden, shard, int(golden["seq_length"]))

    def test_every_architecture_is_here(self):
        types = set()
        for name in FOLDERS:
            with open(os.path.join(ZOO, name, "config.json")) as f:
                types.add(json.load(f)["model_type"])
        refused = run("--plan", "--init-from", self.with_config(os.path.join(ZOO, FOLDERS[0]), {"model_type": "nothing"}))
        known = set(re.findall(r"[a-z0-9_]+", refused.stderr.split("expected")[1])) - {"one", "of", "or", "and"}
        self.assertEqual(types, known)

    def test_losses(self):
        def check(folder, golden, shard, T):
            self.assert_near(self.loss(folder, shard, T), golden["loss"][0], 1e-6, folder)

        self.each(check)

    def test_losses_in_bf16(self):
        def check(folder, golden, shard, T):
            of_bf16 = golden["deviations"][golden["order"][-len(golden["deviations"]) :].index("loss")]
            self.assert_near(self.loss(folder, shard, T, precision="bf16"), golden["loss"][0], 3 * of_bf16, folder)

        self.each(check)

    def test_losses_of_separate_documents(self):
        """Each document is separate, and begins at the end of a text, as in a shard; all of its targets count."""
        models = []

        def check(folder, golden, shard, T):
            if "documents.loss" not in golden:
                return
            models.append(folder)
            ours = self.loss(folder, shard, T, "--separate-documents", "--eod-token", END)
            self.assert_near(ours, golden["documents.loss"][0], 1e-6, folder)
            self.assertGreater(abs(golden["documents.loss"][0] / golden["loss"][0] - 1), 1e-3)

        self.each(check)
        self.assertGreaterEqual(len(models), 3)

    def test_both_forms_of_rotary_settings(self):
        """rope_scaling and rope_theta, as transformers 4 wrote them, and rope_parameters give the same model, to the
        bit."""

        def check(folder, _golden, shard, T):
            with open(folder + "/config.json") as f:
                config = json.load(f)
            expected = self.loss(folder, shard, T)
            for form in (flat_form, nested_form):
                if form(config) != config:
                    self.assertEqual(self.loss(self.with_config(folder, form(config)), shard, T), expected, form)

        self.each(check)

    def test_greedy_texts(self):
        """The texts go beyond the window and beyond the positions before scaling, through prefill and KV cache."""

        def check(folder, golden, _shard, _T):
            prompt = int(golden["prompt_tokens"])
            ours = self.text(folder, bytes(golden["generated"][:prompt]).decode(), len(golden["generated"]) - prompt)
            self.assertEqual(escaped(ours), escaped(bytes(golden["generated"])) + "\n")

        self.each(check)

    def test_checkpoints_have_the_same_tensors(self):
        """Tensors have the same names, shapes and bits, and config.json describes the same model."""

        def check(folder, golden, shard, T):
            saved = self.checkpoint(folder, shard, T, "--checkpoint-dtype", "fp32")
            with open(saved + "/config.json") as f, open(folder + "/config.json") as g:
                written, read = json.load(f), json.load(g)
            ours, theirs = read_model(saved), read_model(folder)
            self.assertEqual(written["model_type"], read["model_type"])
            self.assertEqual(sorted(ours), sorted(theirs))
            for name in theirs:
                self.assertEqual(ours[name], theirs[name], name)
            self.assertEqual(self.loss(saved, shard, T), self.loss(folder, shard, T))
            prompt = bytes(golden["generated"][: int(golden["prompt_tokens"])]).decode()
            self.assertEqual(self.text(saved, prompt, 20), self.text(folder, prompt, 20))

        self.each(check)

    @unittest.skipUnless(HAS_TRANSFORMERS, "torch and transformers are not installed here")
    def test_transformers_opens_the_checkpoints(self):
        make_zoo, torch = zoo_maker()

        def check(folder, golden, shard, T):
            model = make_zoo.open_folder(self.checkpoint(folder, shard, T))
            tokens, targets = torch.tensor(golden["tokens"]).view(2, T), torch.tensor(golden["targets"])
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits.flatten(0, 1)
            self.assert_near(torch.nn.functional.cross_entropy(logits, targets).item(), golden["loss"][0], 1e-6, folder)

        self.each(check)


def zoo_maker():
    """Returns test/golden/make_zoo.py as a module, and torch."""
    import make_zoo
    import torch
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return make_zoo, torch


@unittest.skipUnless(HAS_TRANSFORMERS, "torch and transformers are not installed here")
class LiveZoo(Runs):
    """The zoo's models, and variants of them, are made here at larger shapes."""

    STEPS = 3
    # EPS: gradients that are only rounding noise move nothing
    LR, BETAS, EPS, DECAY, CLIP = 3e-3, (0.9, 0.95), 1e-5, 1.0, 1.0

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.make_zoo, cls.torch = zoo_maker()

    def each(self, check):
        """Calls check(name, transformers' model, folder, the shard of the tokens, tokens, targets) for each model."""
        size = self.make_zoo.LARGE
        for number, name in enumerate(self.make_zoo.ZOO):
            with self.subTest(name):
                folder = pathlib.Path(self.path) / name
                generator = self.torch.Generator().manual_seed(number)
                parameters = self.make_zoo.make_model(name, size, generator)
                self.make_zoo.save(folder, name, size, parameters)
                stream = self.make_zoo.random_stream(size.T, generator)
                tokens, targets = stream[:-1].view(2, size.T), stream[1:].view(2, size.T)
                check(name, self.make_zoo.open_folder(folder), folder, self.shard(stream.tolist()), tokens, targets)

    def kinds(self, name):
        """Returns how batches are computed: as whole rows, and as documents that do not see each other, with the
        options for that."""
        yield self.make_zoo.whole_logits, []
        config = self.make_zoo.ZOO[name]["config"](self.make_zoo.LARGE)
        if "longrope" not in json.dumps(config.to_dict()):  # transformers would choose the factors document by document
            yield self.make_zoo.document_logits, ["--separate-documents", "--eod-token", END]

    def test_losses(self):
        def check(name, model, folder, shard, tokens, targets):
            for logits_of, options in self.kinds(name):
                with self.torch.no_grad():
                    losses = self.make_zoo.token_losses(logits_of(model, tokens), targets)
                self.assert_near(self.loss(folder, shard, tokens.shape[1], *options), losses.double().mean().item(), 2e-6, name)

        self.each(check)

    def test_documents_that_end_in_their_delimiter(self):
        """The target after a delimiter does not count, unless it is a delimiter, too."""

        def check(name, model, folder, shard, tokens, targets):
            if name not in ("mistral_window", "gpt2_gelu"):
                return
            with self.torch.no_grad():
                losses = self.make_zoo.token_losses(self.make_zoo.document_logits(model, tokens, ends=True), targets).double()
            counts = (tokens != END) | (targets == END)
            self.assertLess(counts.sum(), counts.numel())
            options = ["--document-delimiter", "last", "--eod-token", END, "--reset-attention-mask", "--reset-position-ids"]
            ours = self.loss(folder, shard, tokens.shape[1], *options)
            self.assert_near(ours, losses.mean().item(), 2e-6, name + ", every target")
            ours = self.loss(folder, shard, tokens.shape[1], *options, "--eod-mask-loss")
            self.assert_near(ours, losses[counts].mean().item(), 2e-6, name)

        self.each(check)

    def test_trainings(self):
        """Losses and gradient norms of AdamW's steps test the gradients of all parameters, and which of these decay."""

        def check(name, _model, folder, shard, tokens, targets):
            for logits_of, options in self.kinds(name):
                out = tempfile.mkdtemp(dir=self.path)
                self.ours("--init-from", folder, "--train-data", shard, "--train-steps", self.STEPS, "--lr", self.LR, "--lr-decay-style",
                          "constant", "--adam-beta1", self.BETAS[0], "--adam-beta2", self.BETAS[1], "--adam-eps", self.EPS,
                          "--weight-decay", self.DECAY, "--clip-grad", self.CLIP, "--seq-length", tokens.shape[1],
                          "--micro-batch-size", 2, "--precision", "fp32", "--device", "cpu", "--out", out, "--log-every", 1,
                          "--checkpoint-every", 0, *options)  # fmt: skip
                with open(out + "/log.jsonl") as f:
                    steps = [line for line in map(json.loads, f) if "grad_norm" in line]
                self.assertEqual(len(steps), self.STEPS)
                for step, (loss, norm) in zip(steps, self.train(self.make_zoo.open_folder(folder), logits_of, tokens, targets)):
                    self.assert_near(step["loss"], loss, 1e-5, name + "'s loss")
                    self.assert_near(step["grad_norm"], norm, 1e-4, name + "'s gradient norm")

        self.each(check)

    def train(self, model, logits_of, tokens, targets):
        torch = self.torch
        groups = [dict(params=[p for p in model.parameters() if p.ndim == 2], weight_decay=self.DECAY),
                  dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0)]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=self.LR, betas=self.BETAS, eps=self.EPS, foreach=False)
        for _ in range(self.STEPS):
            optimizer.zero_grad()
            loss = self.make_zoo.token_losses(logits_of(model, tokens), targets).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.CLIP, foreach=False)
            optimizer.step()
            yield loss.item(), norm.item()

    def test_greedy_texts(self):
        """Texts are compared up to where two tokens are nearly equally likely, beyond the window and beyond the
        positions before scaling."""
        make_zoo, compared = self.make_zoo, []

        def check(_name, model, folder, *_):
            prompt = (make_zoo.LONG_PROMPT * 3)[: make_zoo.LARGE.T0 + 1]
            ids, gaps = make_zoo.generate(model, prompt)
            clear = [gap > 1e-3 and token != END for gap, token in zip(gaps, ids[len(prompt) :])] + [False]
            tokens = clear.index(False)
            compared.append(tokens)
            if tokens > 0:
                expected = escaped(bytes(ids[: len(prompt) + tokens])) + "\n"
                self.assertEqual(escaped(self.text(folder, prompt, tokens)), expected)

        self.each(check)
        self.assertGreater(sum(compared), 8 * len(FOLDERS))


@unittest.skipUnless(HAS_TRANSFORMERS, "torch and transformers are not installed here")
class Transformers(Runs):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["HF_HUB_OFFLINE"] = "1"
        cls.tokens = [(i * i * 31 + i // 3) % V for i in range(40 * T + 1)]
        write_shard(cls.path + "/t_train.bin", cls.tokens)
        write_shard(cls.path + "/t_val.bin", cls.tokens[: 8 * T + 1])

    def checkpoints(self):
        """Each model in each form is opened by transformers, with nothing missing, unexpected or made up, and no
        warning."""
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
