"""LoRA as its users meet it. Adapters that peft made (test/golden/lora) train as peft trains them, on targets by any
name; peft opens what a run writes; merged weights give the adapters' loss; runs resume to the bit, on the base with
which they began; what is not supported, or damaged, is refused. Needs only Python's standard library; if peft is
installed, it opens the checkpoints too."""
import array
import importlib.util
import json
import os
import random
import re
import shutil
import struct
import subprocess
import unittest
import warnings

from finetune_shard import write_rows
from test_cli import Case, PROGRAM, ROOT, run, write_shard
from test_huggingface import elements, read_safetensors, write_safetensors, zoo_maker

GOLDEN = os.path.join(ROOT, "test/golden")
ZOO = os.path.join(GOLDEN, "zoo")
LORA = os.path.join(GOLDEN, "lora")
BASE = os.path.join(GOLDEN, "huggingface/llama")
T, V = 24, 101
MPIRUN = shutil.which("mpirun")
HAS_PEFT = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))
TOLERANCE = 1e-5
MODULES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
           "mlp.down_proj"]  # fmt: skip


def read_bytes(path):
    with open(path, "rb") as f:
        return f.read()


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def floats(tensor):
    return elements(tensor[0], tensor[2])


def make_adapters(folder, base, rank, alpha, seed, targets=None):
    """Writes a folder as peft does, of random adapters on a Llama's modules, or on GPT-2's."""
    generator = random.Random(seed)
    weights = {}
    for file in os.listdir(base):
        if file.endswith(".safetensors"):
            weights.update(read_safetensors(base + "/" + file))
    gpt2 = any(".c_attn." in name for name in weights)
    tensors = {}
    for name, (_, shape, _) in sorted(weights.items()):
        module = name.removesuffix(".weight")
        if len(shape) == 2 and re.search(r"\.\d+\.", name) and (not targets or module.rsplit(".", 1)[1] in targets):
            outputs, inputs = reversed(shape) if gpt2 else shape
            for part, size in (("A", [rank, inputs]), ("B", [outputs, rank])):
                values = array.array("f", [generator.gauss(0, 0.3) for _ in range(size[0] * size[1])])
                tensors["base_model.model.%s.lora_%s.weight" % (module, part)] = ["F32", size, values.tobytes()]
    os.makedirs(folder)
    write_safetensors(folder + "/adapter_model.safetensors", tensors)
    with open(folder + "/adapter_config.json", "w", encoding="utf-8") as f:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets or "all-linear"}, f)
    return tensors


class LoraCase(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        generator = random.Random(5)
        write_shard(cls.path + "/random.bin", [generator.randrange(V) for _ in range(20 * T + 1)])

    def train(self, name, *arguments, expect=0, ranks=1, data=None):
        command = ["--train-data", data or self.path + "/random.bin", "--out", self.path + "/" + name, "--threads", 1, "--device", "cpu",
                   *arguments]  # fmt: skip
        if ranks > 1:
            job = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", ranks, PROGRAM, *command]
            result = subprocess.run([str(word) for word in job], capture_output=True, text=True, timeout=120,
                                    env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
        else:
            result = run(*command)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result

    def checkpoint(self, name, step):
        return "%s/%s/checkpoints/step_%08d" % (self.path, name, step)

    def log(self, name):
        with open(self.path + "/" + name + "/log.jsonl", encoding="utf-8") as f:
            steps = [json.loads(line) for line in f]
        return [step for step in steps if "grad_norm" in step]

    def loss(self, *arguments):
        result = run("--eval-only", "--val-data", self.path + "/random.bin", "--val-steps", 3, "--micro-batch-size", 2, "--seq-length", T,
                     "--device", "cpu", "--precision", "fp32", "--threads", 1, *arguments)  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr)
        return float(re.search(r"validation loss (\S+),", result.stdout)[1])

    def same_files(self, a, b, step, files=("adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json")):
        for file in files:
            first, second = (read_bytes(self.checkpoint(name, step) + "/" + file) for name in (a, b))
            self.assertEqual(first, second, file)


class Golden(LoraCase):
    def check(self, name, precision=TOLERANCE):
        folder = os.path.join(LORA, name)
        expected = read_json(folder + "/expected.json")
        shard, tokens = self.path + "/" + name + ".bin", expected["tokens"]
        if all(expected["learned"]):
            write_shard(shard, tokens)
        else:
            learned = [False, *map(bool, expected["learned"])]
            rows = [[[(tokens[i], learned[i] and i % T > 0) for i in range(row * T, row * T + T)]] for row in range(2)]
            write_rows(shard, rows, T, vocabulary=V, last=tokens[-1])
        self.train(name, "--init-from", os.path.join(GOLDEN, expected["base"]), "--lora-adapter", folder, "--seq-length", T,
                   "--micro-batch-size", 2, "--train-steps", 3, "--lr", expected["lr"], "--lr-decay-style", "constant",
                   "--weight-decay", expected["weight_decay"], "--precision", "fp32", data=shard)  # fmt: skip
        log = self.log(name)
        for step, (loss, norm) in enumerate(zip(expected["losses"], expected["grad_norms"])):
            self.assertLess(abs(log[step]["loss"] / loss - 1), precision, (name, step))
            self.assertLess(abs(log[step]["grad_norm"] / norm - 1), precision, (name, step))
        self.check_files(name, folder, precision)

    def check_files(self, name, folder, precision):
        checkpoint, wanted = self.checkpoint(name, 3), read_safetensors(folder + "/after.safetensors")
        found = read_safetensors(checkpoint + "/adapter_model.safetensors")
        self.assertEqual({key: value[:2] for key, value in found.items()}, {key: value[:2] for key, value in wanted.items()})
        for key, value in wanted.items():
            pairs = list(zip(floats(found[key]), floats(value)))
            distance = sum((a - b) ** 2 for a, b in pairs) / sum(b * b for _, b in pairs)
            self.assertLess(distance**0.5, precision, (name, key))
        self.assertFalse(os.path.exists(checkpoint + "/model.safetensors"))
        peft, written = read_json(folder + "/adapter_config.json"), read_json(checkpoint + "/adapter_config.json")
        for key, value in written.items():
            if key == "target_modules":
                for module in peft[key]:  # peft writes whole names for all-linear
                    self.assertEqual(sum(("." + module).endswith("." + ours) for ours in value), 1, module)
            elif key == "base_model_name_or_path":
                self.assertEqual(value, os.path.realpath(os.path.join(GOLDEN, read_json(folder + "/expected.json")["base"])))
            else:
                self.assertEqual(value, peft[key], (name, key))

    def test_it_trains_as_peft_does(self):
        for name in sorted(os.listdir(LORA)):
            with self.subTest(name):
                self.check(name)


class Merge(LoraCase):
    def merge(self, name, base, adapters, *arguments):
        out = self.path + "/" + name
        result = run("--lora-merge", out, "--init-from", base, "--lora-adapter", adapters, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return out, result.stdout

    def in_fp32(self, base, name):
        folder = self.path + "/" + name
        shutil.copytree(base, folder)
        tensors = read_safetensors(folder + "/model.safetensors")
        write_safetensors(folder + "/model.safetensors", {k: ["F32", v[1], floats(v).tobytes()] for k, v in tensors.items()})
        return folder

    def test_the_loss_is_that_of_the_adapters(self):
        for name in ("gpt2", "gpt2_some", "llama", "qwen2", "gpt_neox", "phi3"):
            with self.subTest(name):
                adapters = os.path.join(LORA, name)
                base = self.in_fp32(os.path.join(GOLDEN, read_json(adapters + "/expected.json")["base"]), "base_" + name)
                merged, _ = self.merge("merged_" + name, base, adapters)
                with_adapters = self.loss("--init-from", base, "--lora-adapter", adapters)
                self.assertGreater(abs(with_adapters / self.loss("--init-from", base) - 1), 1e-4)
                self.assertLess(abs(with_adapters / self.loss("--init-from", merged) - 1), 1e-6)

    def check_sums(self, merged, base, tensors, scale, half_ulp):
        """Checks that each element is the nearest number to W + s B A, up to the order of the sum, and that the rest is
        the base's."""
        before, after = read_safetensors(base), read_safetensors(merged)
        self.assertEqual({k: v[:2] for k, v in before.items()}, {k: v[:2] for k, v in after.items()})
        for name, (dtype, shape, data) in before.items():
            module = "base_model.model." + name.removesuffix(".weight")
            if module + ".lora_A.weight" not in tensors:
                self.assertEqual(after[name][2], data, name)
                continue
            (_, (rank, inputs), a), (_, (outputs, _), b) = (tensors[module + ".lora_%s.weight" % part] for part in "AB")
            a, b = array.array("f", a), array.array("f", b)
            self.assertEqual([outputs, inputs], shape)
            found, old = floats(after[name]), floats(before[name])
            for i in range(0, outputs, 5):
                for j in range(inputs):
                    exact = old[i * inputs + j] + scale * sum(b[i * rank + r] * a[r * inputs + j] for r in range(rank))
                    error = abs(found[i * inputs + j] - exact)
                    self.assertLessEqual(error, abs(exact) * half_ulp + 2e-6, (name, i, j))

    def test_it_is_rounded_once_to_the_type_of_the_base(self):
        base = os.path.join(GOLDEN, "huggingface/qwen2_bf16")
        tensors = make_adapters(self.path + "/bf16", base, 3, 6, 1)
        merged, printed = self.merge("merged_bf16", base, self.path + "/bf16")
        self.assertIn("14 tensors merged", printed)
        self.check_sums(merged + "/model.safetensors", base + "/model.safetensors", tensors, 2, 2**-8)

    def test_a_model_in_several_files(self):
        base = self.path + "/sharded"
        shutil.copytree(os.path.join(GOLDEN, "huggingface/llama_sharded"), base)
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "notes.txt"):
            with open(base + "/" + name, "w", encoding="utf-8") as f:
                f.write("{}")
        tensors = make_adapters(self.path + "/f16", base, 2, 1, 2, ["q_proj", "up_proj"])
        merged, _ = self.merge("merged_f16", base, self.path + "/f16")
        kept = sorted(set(os.listdir(base)) - {"expected.golden", "notes.txt"})
        self.assertEqual(sorted(os.listdir(merged)), kept)
        for name in kept:
            if name.endswith(".safetensors"):
                self.check_sums(merged + "/" + name, base + "/" + name, tensors, 0.5, 2**-11)
            else:
                self.assertEqual(read_bytes(merged + "/" + name), read_bytes(base + "/" + name), name)

    def test_a_checkpoint_names_its_base(self):
        self.train("named", "--init-from", BASE, "--lora-rank", 2, "--train-steps", 2, "--seq-length", T, "--lr", "1e-2",
                   "--precision", "fp32")  # fmt: skip
        step = self.checkpoint("named", 2)
        merged = self.path + "/named_merged"
        result = run("--lora-merge", merged, "--init-from", step)
        self.assertEqual(result.returncode, 0, result.stderr)
        by_name = self.loss("--init-from", step)
        self.assertEqual(by_name, self.loss("--init-from", BASE, "--lora-adapter", step))
        self.assertLess(abs(by_name / self.loss("--init-from", merged) - 1), 1e-6)

    def test_it_is_refused(self):
        adapters = os.path.join(LORA, "llama")
        self.refused("--lora-merge", self.path + "/x", "--init-from", BASE, words=["--lora-merge", "needs --lora-adapter"])
        self.refused("--lora-merge", self.path, "--init-from", BASE, "--lora-adapter", adapters, words=["is there already; name a new"])
        self.refused("--lora-merge", self.path + "/x/y", "--init-from", BASE, "--lora-adapter", adapters, words=["cannot be made"])
        self.refused("--lora-merge", self.path + "/x", "--init-from", os.path.join(ZOO, "llama_linear"), "--lora-adapter", adapters,
                     words=["has the shape (4, 24); expected (4, 20)"])  # fmt: skip
        self.assertFalse(os.path.exists(self.path + "/x"))

        def missing(tensors):
            del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]

        def unknown(tensors):
            tensors["base_model.model.lm_head.weight"] = ["F32", [1], bytes(4)]

        def none(tensors):
            for part in "AB":
                del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_%s.weight" % part]

        def not_a_number(tensors):
            kind, shape, values = tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
            tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] = [kind, shape, values[:-2] + b"\xc0\x7f"]

        for change, word in ((missing, "without its lora_B"), (not_a_number, "up_proj.lora_B.weight' is nan"), (unknown, "is no adapter of a weight"),
                             (none, "has no adapter of 'model.layers.1.mlp.up_proj.weight'")):  # fmt: skip
            folder = self.path + "/" + change.__name__
            shutil.copytree(adapters, folder)
            tensors = read_safetensors(folder + "/adapter_model.safetensors")
            change(tensors)
            write_safetensors(folder + "/adapter_model.safetensors", tensors)
            out = self.path + "/y_" + change.__name__
            self.refused("--lora-merge", out, "--init-from", BASE, "--lora-adapter", folder, words=["adapter_model.safetensors", word])
            self.assertFalse(os.path.exists(out))


class Resume(LoraCase):
    OPTIONS = ["--init-from", BASE, "--lora-rank", 3, "--lora-dropout", "0.1", "--seq-length", T, "--micro-batch-size", 2, "--lr", "1e-2",
               "--lr-decay-style", "constant"]  # fmt: skip

    def test_to_the_bit(self):
        for precision in ("fp32", "bf16"):
            options = [*self.OPTIONS, "--precision", precision, "--lora-target-modules", "q_proj,v_proj,mlp.down_proj"]
            whole, parts = "whole_" + precision, "parts_" + precision
            self.train(whole, *options, "--train-steps", 7, "--checkpoint-every", 3)
            self.train(parts, *options, "--train-steps", 3, "--resume", "auto")
            self.train(parts, *options, "--train-steps", 5, "--resume", "auto")
            self.train(parts, "--train-steps", 7, "--resume", self.path + "/" + parts)  # the checkpoint names the base
            self.same_files(whole, parts, 7)
            self.assertEqual([(s["loss"], s["grad_norm"]) for s in self.log(whole)],
                             [(s["loss"], s["grad_norm"]) for s in self.log(parts)])  # fmt: skip
            tensors = read_safetensors(self.checkpoint(whole, 7) + "/adapter_model.safetensors")
            self.assertEqual({value[0] for value in tensors.values()}, {"F32"})
            self.assertEqual(len(tensors), 2 * 2 * 3)

    @unittest.skipUnless(MPIRUN, "without mpirun there is one rank")
    def test_ranks_write_the_same_files(self):
        options = [*self.OPTIONS, "--precision", "fp32", "--bucket-mib", "0.01", "--micro-batch-size", 1, "--lora-dropout", 0]
        self.train("stage_0", *options, "--train-steps", 4, "--checkpoint-every", 2, ranks=2)
        self.train("stages", *options, "--train-steps", 2, "--zero-stage", 3, ranks=2)
        self.train("stages", *options, "--train-steps", 4, "--zero-stage", 1, "--resume", "auto", ranks=2)
        for step in (2, 4):
            self.same_files("stage_0", "stages", step)

    def test_frozen_weights_in_nf4(self):
        options = [*self.OPTIONS, "--frozen-weights-format", "nf4"]
        self.train("nf4", *options, "--train-steps", 4)
        self.train("nf4_parts", *options, "--train-steps", 2)
        self.train("nf4_parts", *options, "--train-steps", 4, "--resume", "auto")
        self.same_files("nf4", "nf4_parts", 4)
        if MPIRUN:
            ranks = [*options, "--train-steps", 2, "--global-batch-size", 2, "--micro-batch-size", 1]
            self.train("nf4_0", *ranks, ranks=2)
            self.train("nf4_3", *ranks, "--zero-stage", 3, "--offload-weights", ranks=2)
            self.same_files("nf4_0", "nf4_3", 2)

    def test_config_json_reads_back(self):
        """Adapters that --init-from names, and what a run that goes on began with, are given by no option of their own."""
        self.train("first", *self.OPTIONS, "--train-steps", 2)
        again = ["--seq-length", T, "--micro-batch-size", 2, "--train-steps", 2]
        self.train("second", "--init-from", self.path + "/first", *again)
        self.train("read", "--config", self.path + "/second/config.json")
        self.same_files("second", "read", 2)
        self.train("second", "--resume", "auto", "--train-steps", 3)
        self.train("second", "--resume", "auto", "--train-steps", 4)
        self.train("of_resumed", "--config", self.path + "/second/config.json", "--train-steps", 2)
        self.same_files("second", "of_resumed", 2)
        self.train("whole", "--init-from", BASE, *again)
        self.train("whole", "--resume", "auto", "--train-steps", 3)
        self.train("whole_read", "--config", self.path + "/whole/config.json", "--train-steps", 2)
        self.same_files("whole", "whole_read", 2, ("model.safetensors", "optimizer.safetensors"))

    def test_another_base_is_refused(self):
        self.train("based", *self.OPTIONS, "--train-steps", 1)
        other = self.path + "/other"
        shutil.copytree(BASE, other)
        tensors = read_safetensors(other + "/model.safetensors")
        data = bytearray(tensors["model.layers.1.mlp.up_proj.weight"][2])
        data[0] ^= 1
        tensors["model.layers.1.mlp.up_proj.weight"][2] = bytes(data)
        write_safetensors(other + "/model.safetensors", tensors)
        again = ["--train-data", self.path + "/random.bin", "--resume", "auto", "--out", self.path + "/based", "--train-steps", 2]
        self.refused(*again, "--init-from", other, words=["has other tensors than the base model of the adapters in"])
        self.refused(*again, "--init-from", BASE, "--lora-rank", 4, words=["--lora-rank is 4, but it is 3 in"])
        self.refused(*again, "--lora-target-modules", "q_proj", words=["--lora-target-modules is q_proj, but it is all-linear in"])
        moved = self.path + "/moved"
        shutil.copytree(BASE, moved)
        self.train("based", "--resume", "auto", "--train-steps", 2, "--init-from", moved)


    def test_a_base_that_trains_on(self):
        """A job script names the base model's run. Its second start goes on with the checkpoint that its first start took, though
        that run has a newer one; where the checkpoint is gone, the start is refused."""
        sizes = ["--seq-length", T, "--micro-batch-size", 2, "--checkpoint-every", 1]
        self.train("trained", *sizes, "--init-from", BASE, "--train-steps", 1)
        script = [*sizes, "--init-from", self.path + "/trained", "--lora-rank", 2, "--resume", "auto"]
        self.train("on_trained", *script, "--train-steps", 1)
        self.train("trained", "--resume", "auto", "--train-steps", 2)
        said = self.train("on_trained", *script, "--train-steps", 2).stdout
        self.assertIn("the base model " + os.path.realpath(self.checkpoint("trained", 1)), said)
        shutil.rmtree(self.checkpoint("trained", 1))
        self.refused("--train-data", self.path + "/random.bin", "--out", self.path + "/on_trained", *script, "--train-steps", 3,
                     words=["has other tensors than the base model of the adapters in", "which was "])


class Freeze(LoraCase):
    def test_a_checkpoint_has_all_parameters(self):
        """Frozen parameters have the base's bits. The checkpoint is resumed to the bit, whoever writes it, for a model
        with transposed weights and for one with plain weights."""
        for base, frozen in (("gpt2", "transformer.wte.weight,transformer.h.0.*"), ("llama", "model.embed_tokens.weight,model.layers.0.*")):
            folder = os.path.join(GOLDEN, "huggingface", base)
            options = ["--init-from", folder, "--freeze", frozen, "--seq-length", T, "--micro-batch-size", 1, "--global-batch-size", 2,
                       "--lr", "1e-2", "--lr-decay-style", "constant", "--precision", "fp32"]  # fmt: skip
            self.train(base + "_whole", *options, "--train-steps", 4)
            self.train(base + "_parts", *options, "--train-steps", 2, "--resume", "auto")
            self.train(base + "_parts", *options, "--train-steps", 4, "--resume", "auto")
            files = ("model.safetensors", "optimizer.safetensors")
            self.same_files(base + "_whole", base + "_parts", 4, files)
            before = read_safetensors(folder + "/model.safetensors")
            after = read_safetensors(self.checkpoint(base + "_whole", 4) + "/model.safetensors")
            self.assertEqual(before.keys(), after.keys())
            same = {name for name in before if before[name][2] == after[name][2]}
            self.assertEqual(same, {name for name in before if re.match(frozen.replace(",", "|").replace("*", ".*"), name)})
            if MPIRUN:
                ranks = [*options, "--bucket-mib", "0.01", "--train-steps", 2]
                self.train(base + "_0", *ranks, ranks=2)
                self.train(base + "_3", *ranks, "--zero-stage", 3, ranks=2)
                self.same_files(base + "_0", base + "_3", 2, files)


class Refusals(LoraCase):
    def refused_lora(self, *arguments, words, base=BASE):
        self.refused("--init-from", base, "--train-data", self.path + "/random.bin", "--out", self.path + "/refused", "--seq-length", T,
                     "--device", "cpu", *arguments, words=words)  # fmt: skip

    def test_a_format_without_adapters(self):
        self.refused_lora("--frozen-weights-format", "nf4", words=["--frozen-weights-format", "add --lora-rank"])

    def test_targets(self):
        known = ", ".join(MODULES)
        for targets, word in (("c_attn", "has no module 'c_attn'"), ("q_proj,x", "has no module 'x'"), ("", "has no module ''"),
                              ("proj", "has no module 'proj'"), ("q_proj,", "all-linear"), ("Q_PROJ", "has no module 'Q_PROJ'"),
                              ("lm_head", "'lm_head' is no linear layer of a block"),
                              ("embed_tokens,q_proj", "'embed_tokens' is no linear layer")):  # fmt: skip
            if targets != "q_proj,":
                self.refused_lora("--lora-rank", 2, "--lora-target-modules", targets, words=[word, known])
        self.refused_lora("--lora-rank", 2, "--lora-target-modules", "layers.0.self_attn.q_proj",
                          words=["names model.layers.0.self_attn.q_proj and not model.layers.1.self_attn.q_proj", "in every layer"])
        self.refused_lora("--lora-rank", 2, "--lora-target-modules", "q_proj", words=["attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj"],
                          base=os.path.join(GOLDEN, "huggingface/gpt2"))  # fmt: skip

    def test_ranks_and_options(self):
        self.refused_lora("--lora-rank", 17, words=["--lora-rank 17 is more than the 16 outputs of the module",
                                                    "model.layers.0.self_attn.k_proj; expected 16 at most"])
        self.refused_lora("--lora-rank", 33, "--lora-target-modules", "q_proj", words=["more than the 32 outputs of", "q_proj"])
        self.refused_lora("--lora-rank", -1, words=["--lora-rank"])
        self.refused_lora("--lora-rank", 2, "--lora-alpha", -1, words=["--lora-alpha"])
        self.refused_lora("--lora-rank", 2, "--lora-dropout", 1, words=["--lora-dropout"])
        self.refused_lora("--lora-alpha", 8, words=["add --lora-rank"])
        self.refused("--train-data", self.path + "/random.bin", "--lora-rank", 2, words=["--lora-rank 2 needs --init-from"])
        self.refused_lora("--lora-rank", 2, words=["must be a folder of Hugging Face, not a file"],
                          base=os.path.join(GOLDEN, "huggingface/gpt2.3.bin"))  # fmt: skip

    def adapters(self, name="llama", change=lambda tensors: None, **settings):
        folder = os.path.join(self.path, "adapters_%d" % len(os.listdir(self.path)))
        shutil.copytree(os.path.join(LORA, name), folder)
        config = {**read_json(folder + "/adapter_config.json"), **settings}
        with open(folder + "/adapter_config.json", "w", encoding="utf-8") as f:
            json.dump(config, f)
        tensors = read_safetensors(folder + "/adapter_model.safetensors")
        change(tensors)
        write_safetensors(folder + "/adapter_model.safetensors", tensors)
        return folder

    def test_adapters(self):
        name = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
        for folder, words in (
            (self.adapters(use_dora=True), ["adapter_config.json: use_dora is true"]),
            (self.adapters(bias="lora_only"), ["adapter_config.json: bias is 'lora_only'; expected 'none'"]),
            (self.adapters(fan_in_fan_out=True), ["fan_in_fan_out is true", "expected false for the llama"]),
            (self.adapters(r=8), ["adapter_model.safetensors", "has the shape (4, 32); expected (8, 32)"]),
            (self.adapters(target_modules=["q_proj"]), ["adapter_model.safetensors: has the tensor", "down_proj", "is no adapter"]),
            (self.adapters(target_modules=["w1"]), ["has no module 'w1'"]),
            (self.adapters(change=lambda t: t.pop(name)), ["has no tensor '%s'" % name]),
            (self.adapters(change=lambda t: t[name].__setitem__(0, "I32")), ["'%s' is of type I32" % name]),
            (self.path, ["adapter_config.json"]),
        ):
            self.refused_lora("--lora-adapter", folder, words=words)
        good = self.adapters(base_model_name_or_path="org/model")
        self.refused_lora("--lora-adapter", good, "--lora-rank", 5, words=["--lora-rank is 5, but 4 in", "leave the option out"])
        self.refused_lora("--lora-adapter", good, "--lora-alpha", 9, words=["--lora-alpha is 9, but 8 in"])
        self.refused("--lora-adapter", good, "--train-data", self.path + "/random.bin", words=["'org/model', which is no folder"])
        self.refused("--init-from", good, "--generate", "x", words=["'org/model', which is no folder", "by --init-from"])
        os.truncate(good + "/adapter_model.safetensors", 100)
        self.refused_lora("--lora-adapter", good, words=["adapter_model.safetensors"])


@unittest.skipUnless(HAS_PEFT, "peft is not installed")
class Peft(LoraCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        zoo_maker()
        # test/run.py counts lines of the form "NAME ... ok", which a warning must not break up.
        quiet = warnings.catch_warnings()
        quiet.__enter__()
        cls.addClassCleanup(quiet.__exit__)
        warnings.simplefilter("ignore")

    def test_peft_opens_a_checkpoint(self):
        """peft computes the loss that this program has, also after it has merged the adapters."""
        import peft
        import torch
        import transformers

        for base in ("huggingface/gpt2", "huggingface/llama", "huggingface/qwen2", "zoo/gpt_neox", "zoo/phi3"):
            name, path = base.replace("/", "_"), os.path.join(GOLDEN, base)
            self.train(name, "--init-from", path, "--lora-rank", 4, "--train-steps", 3, "--seq-length", T, "--lr", "3e-2", "--precision",
                       "fp32", "--lora-use-rslora", "--micro-batch-size", 2)  # fmt: skip
            step = self.checkpoint(name, 3)
            ours = self.loss("--init-from", step)
            with open(self.path + "/random.bin", "rb") as f:
                data = f.read()[1024:]
            stream = torch.tensor(struct.unpack("<%dH" % (len(data) // 2), data))
            tokens = torch.stack([stream[i * T : i * T + T + 1] for i in range(6)])
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            model = peft.PeftModel.from_pretrained(model, step)
            for merged in (False, True):
                if merged:
                    model = model.merge_and_unload()
                with torch.no_grad():
                    logits = model(tokens[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
                self.assertLess(abs(loss / ours - 1), 1e-5, (base, merged))
            if base == "huggingface/llama":  # transformers finds the base by the adapters' settings
                model = transformers.AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32, attn_implementation="eager")
                with torch.no_grad():
                    logits = model(tokens[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
                self.assertLess(abs(loss / ours - 1), 1e-5)


class Plans(unittest.TestCase):
    """What a 7B model takes; a plan needs neither GPU nor model."""

    def peak(self, *arguments):
        result = run("--plan=full", "--preset", "qwen2.5-7b", "--seq-length", 2048, "--micro-batch-size", 1, "--precision", "bf16", "--lora-rank", 16,
                     "--recompute-granularity", "full", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return int(re.search(r"^ *peak .* ([0-9,]+) +100", result.stdout, re.MULTILINE)[1].replace(",", ""))

    def test_cards_that_a_7b_model_fits(self):
        whole, nf4 = self.peak(), self.peak("--frozen-weights-format", "nf4")
        self.assertTrue(15e9 < whole < 24e9, whole)  # its 7.6 billion parameters in bf16
        self.assertTrue(5e9 < nf4 < 10e9, nf4)


if __name__ == "__main__":
    unittest.main()
