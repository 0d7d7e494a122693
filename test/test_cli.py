"""The program as its users meet it: options, messages, files, whole small runs. Needs only Python's standard
library."""
import fcntl
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from environment import ROOT, skip_under_address_sanitizer

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
without_address_sanitizer = skip_under_address_sanitizer(PROGRAM)
SMALL = ["--vocab-size", "257", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--num-query-groups",
         "2", "--seq-length", "32", "--micro-batch-size", "4", "--normalization", "RMSNorm", "--position-embedding-type",
         "rope", "--activation", "swiglu", "--no-add-bias-linear", "--lr", "3e-3"]


def run(*arguments, environment=None, limit_bytes=None, cwd=None, seconds=300, program=PROGRAM):
    def limit():
        if limit_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=seconds, cwd=cwd,
                          env={**os.environ, **(environment or {})}, preexec_fn=limit)


def write_shard(path, tokens, count=None, magic=20240520, version=1, width="H"):
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253))
        f.write(struct.pack("<%d%s" % (len(tokens), width), *tokens))


def write_megatron(prefix, documents):
    """Writes a dataset of Megatron's, each document a sequence of uint16."""
    lengths = [len(document) for document in documents]
    with open(prefix + ".bin", "wb") as f:
        f.write(struct.pack("<%dH" % sum(lengths), *[token for document in documents for token in document]))
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(documents), len(documents) + 1))
        f.write(struct.pack("<%di" % len(lengths), *lengths))
        f.write(struct.pack("<%dq" % len(lengths), *[2 * sum(lengths[:i]) for i in range(len(lengths))]))
        f.write(struct.pack("<%dq" % (len(documents) + 1), *range(len(documents) + 1)))

LONG_PLAN = ["--plan=full", "--preset", "gemma3-1b", "--fp8-format", "hybrid", "--optimizer", "muon", "--zero-stage", "3", "--world-size", "4"]


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = cls.folder.name
        text = ("for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\nreturn sum;\n" * 300).encode()
        write_shard(cls.path + "/t_train_000.bin", list(text))
        write_shard(cls.path + "/t_val_000.bin", list(text[:4000]))
        cls.data = ["--train-data", cls.path + "/t_train_*.bin", "--val-data", cls.path + "/t_val_*.bin"]

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def train(self, name, *arguments, **keywords):
        """Makes a small run, which must succeed. Returns its output, and its log as a list of objects."""
        out = os.path.join(self.path, name)
        result = run(*SMALL, *self.data, "--out", out, *arguments, **keywords)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(out + "/log.jsonl") as f:
            return result, [json.loads(line) for line in f]

    def refused(self, *arguments, words, **keywords):
        """Checks that a run ends with status 2 and one message on stderr that holds the words, and that nothing is
        trained."""
        result = run(*arguments, **keywords)
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertTrue(result.stderr.startswith("train_gpt: "), result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        return result


class Options(Case):
    def test_help_on_stdout(self):
        result = run("--help", "all")
        self.assertEqual(result.returncode, 0)
        self.assertEqual(result.stderr, "")
        for name in ["--num-query-groups", "--recompute-granularity", "--memory-budget", "--plan-picture", "--preset",
                     "NVTE_FLASH_ATTN=0", "NVTE_FUSED_ATTN=0", "NVTE_UNFUSED_ATTN=0", "NVTE_FP8_DPA_BWD=0"]:
            self.assertIn(name, result.stdout)

    def test_an_option_without_a_name_lists_what_there_is(self):
        for option, words in (("--preset", ["gpt2-124m", "demo"]), ("--plan-gpu", ["GeForce RTX 3060", "T4", "B300", "24564 MiB"])):
            result = run("--plan", option)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            for word in words:
                self.assertRegex(result.stdout, r"(?m)(^|[ ])%s " % word)
        self.refused("--plan-gpu", "--plan", words=["--plan-gpu needs a value"])
        self.refused("--eval-tasks", "x.jsonl", words=["--eval-tasks needs --init-from", "--train-data"])
        self.refused("--perplexity", "x.txt", words=["--perplexity needs --init-from"])

    def test_a_result_that_nobody_can_read_is_an_error(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            # The last has more bytes than stdio's buffer, so that an earlier write fails.
            for arguments, reason in ((["--plan", "--preset", "demo"], "No space left on device"), (["--help"], None), (["--version"], None),
                                      (LONG_PLAN, "an earlier write failed")):
                result = subprocess.run([PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
                self.assertNotEqual(result.returncode, 0, arguments)
                if reason:
                    self.assertEqual(result.stderr, "train_gpt: the standard output cannot be written: %s\n" % reason)
        for arguments in (["--plan=full", "--preset", "gpt2-124m"], LONG_PLAN):
            reader = subprocess.run("'%s' %s | true; echo ${PIPESTATUS[0]}" % (PROGRAM, " ".join(arguments)), shell=True, text=True,
                                    executable="/bin/bash", capture_output=True, timeout=60, check=False)
            self.assertEqual((reader.stdout, reader.stderr), ("0\n", ""))

    def test_version_is_enough_for_a_report(self):
        """The version, the commit, the compiler, the targets and each library have a line each, which are the same
        whatever the machine runs."""
        result = run("--version")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        first, *lines = result.stdout.splitlines()
        self.assertRegex(first, r"^train_gpt \d+\.\d+\.\d+ \(commit ([0-9a-f]{7,}(-dirty)?|unknown)\)$")
        rows = dict(line.split(maxsplit=1) for line in lines)
        self.assertRegex(rows["compiler"], r"(gcc|[Cc]lang) .*\d+\.\d+")
        self.assertRegex(rows["cpu"], "^fp32 and bf16, for ")
        self.assertRegex(rows["cuda"], "^(fp32 and bf16, for (sm_|compute_|the emulator)|this train_gpt was built without it)")
        number = r"^\d+\.\d+"
        for name in ("jansson", "xxHash", "PCRE2", "glibc"):
            self.assertRegex(rows[name], number)
        for name, shown in (("oneDNN", number), ("OpenBLAS", r"\d+\.\d+"), ("MPI", r"\d+\.\d+")):
            self.assertRegex(rows[name], shown + "|^none: built where")
        if "built without" not in rows["cuda"]:
            self.assertRegex(rows["CUDA"], number)
            self.assertRegex(rows["cuBLASLt"], number)
            self.assertRegex(rows["NCCL"], number + "|^none")
            self.assertRegex(rows["GPU driver"], "none|for CUDA")
        loaded = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=False).stdout
        for name, library in (("oneDNN", "libdnnl"), ("MPI", "libmpi")):
            self.assertEqual(rows[name].startswith("none"), library not in loaded)

    def test_version_names_the_commit(self):
        """--version names the tree's commit, if the tree is a repository of its own; the program may be older than the
        last change of a file."""
        if not os.path.exists(ROOT + "/.git"):
            self.skipTest("no repository")
        commits = subprocess.run(["git", "-C", ROOT, "rev-list", "HEAD"], capture_output=True, text=True, check=False).stdout.split()
        commit = re.search(r"\(commit ([0-9a-f]+)(-dirty)?\)$", run("--version").stdout, re.M)
        self.assertTrue([full for full in commits if full.startswith(commit.group(1))], commit)

    def test_a_typo_names_the_nearest(self):
        self.refused("--num-layer-s", 3, words=["--num-layers"])
        self.refused("--recompute", "full", words=["--recompute-granularity", "--recompute-method"])

    def test_query_groups_must_divide(self):
        self.refused("--plan", "--num-attention-heads", 12, "--num-query-groups", 5, words=["--num-query-groups", "1, 2, 3, 4, 6"])

    def test_contradictory_shapes(self):
        self.refused("--plan", "--hidden-size", 100, "--num-attention-heads", 12, words=["--hidden-size"])
        self.refused("--plan", "--micro-batch-size", 4, "--global-batch-size", 6, words=["--global-batch-size"])
        self.refused("--plan", "--lr", "nan", words=["--lr"])

    def test_fp8_is_of_bf16_and_of_sizes_that_its_products_have(self):
        fp8 = ["--plan", "--preset", "gpt2-124m", "--fp8-format", "hybrid"]
        self.refused(*fp8, "--precision", "fp32", words=["--fp8-format", "--precision bf16"])
        self.refused(*fp8, "--fp8-recipe", "mxfp8", words=["--fp8-recipe", "tensorwise, delayed or blockwise"])
        self.refused(*fp8, "--ffn-hidden-size", 3080, words=["--ffn-hidden-size", "3080", "16"])
        self.refused(*fp8, "--fp8-recipe", "blockwise", "--ffn-hidden-size", 3088, words=["--ffn-hidden-size", "128", "tensorwise"])
        self.refused("--plan", "--fp8-recipe", "delayed", words=["--fp8-recipe delayed", "add --fp8-format"])

    def test_attention_in_fp8_names_what_it_does_not_have(self):
        fp8 = ["--plan", "--preset", "gpt2-124m", "--fp8-format", "hybrid", "--fp8-dot-product-attention"]
        self.refused(*fp8[:3], "--fp8-dot-product-attention", "full", words=["needs --fp8-format", "leave it out"])
        self.refused(*fp8, "full", "--attention-dropout", 0.1, words=["--attention-dropout", "set it to 0"])
        self.refused(*fp8, "full", "--kv-channels", 24, "--num-attention-heads", 16, words=["multiples of 16", "--kv-channels"])
        self.refused(*fp8, "full", "--plan-gpu", "RTX4090", words=["compute capability 9.0 or 10.x", "8.9", "leave"])
        self.refused(*fp8, "forward", "--plan-gpu", "H200", words=["--fp8-recipe delayed"])
        self.refused(*fp8, "full", "--plan-gpu", "H200", "--fp8-recipe", "delayed", words=["heads of 128, not 64", "take forward"])
        self.refused(*fp8, "full", "--plan-gpu", "H200", "--fp8-recipe", "delayed", "--kv-channels", 128,
                     words=["--deterministic-mode=false"])

    def test_attention_in_fp8_saves_the_bytes_of_the_page(self):
        """A byte an element of q, k, v and the output; but for the scales, and blocks that begin at multiples of 256 bytes."""
        shape = ["--plan=full", "--plan-gpu", "H200", "--preset", "llama3-8b", "--micro-batch-size", 1, "--global-batch-size", 1,
                 "--seq-length", 8192, "--fp8-format", "hybrid", "--fp8-recipe", "delayed"]
        forward = ["--fp8-dot-product-attention", "forward"]
        plans = [run(*shape, *more).stdout for more in ([], forward, ["--fp8-dot-product-attention", "full", "--deterministic-mode=false"])]
        peaks = [int(re.search(r"^  peak .* ([0-9,]+) 100\.0 %$", plan, re.M).group(1).replace(",", "")) for plan in plans]
        self.assertNotIn("; FP8", re.search(r"^attention .*", plans[0], re.M).group())
        self.assertRegex(plans[1], r"(?m)^attention +flash, .*; FP8 forward by cuDNN$")
        self.assertRegex(plans[2], r"(?m)^attention +flash, .*; FP8 forward and backward by cuDNN$")
        self.assertRegex(run("--plan", *shape[1:], *forward).stdout, r"(?m)^computed by +flash attention, FP8 forward; recomputation ")
        for peak in peaks[1:]:
            self.assertLess(abs(peaks[0] - peak - 32 * 8192 * (4096 + 2 * 1024 + 4096)), 1 << 16)
        scratch = [round(float(re.search(r"^  workspace .* ([0-9.]+) MiB$", plan, re.M).group(1))) for plan in plans]
        activations = [int(re.search(r"^  activations  .* ([0-9,]+)  ", plan, re.M).group(1).replace(",", "")) for plan in plans]
        with open(os.path.join(ROOT, "docs/fp8.md"), encoding="utf-8") as page:
            said = re.search(r"With attention `full`, off by default, llama3-8b keeps ([0-9.]+) GB less \(([0-9.]+) % of its activations\), but takes (\d+) MiB of scratch in place of "
                             r"(\d+)", page.read()).groups()
        less = activations[0] - activations[2]
        self.assertEqual(said, (f"{less / 1e9:.2f}", f"{100 * less / activations[0]:.1f}", str(scratch[2]), str(scratch[0])))

    def test_fp8_chooses_bf16_and_the_report_says_what_it_is_of(self):
        plain, fp8 = (run("--plan=full", "--device", "cpu", *options) for options in ([], ["--fp8-format", "hybrid", "--first-last-layers-bf16"]))
        self.assertEqual((fp8.returncode, fp8.stderr), (0, ""))
        self.assertRegex(fp8.stdout, r"\nprecision +bf16: --fp8-format needs it\n")
        self.assertRegex(fp8.stdout, r"\nFP8 +hybrid, tensorwise: .* of 10 of 12 layers, 1 to 10; .* in bf16; sums in fp32\n")
        self.assertNotIn("FP8", plain.stdout)

    def test_recompute_options_that_contradict(self):
        self.refused("--plan", "--recompute-modules", "norm", words=["--recompute-granularity selective"])
        self.refused("--plan", "--recompute-granularity", "auto", words=["--memory-budget"])
        self.refused("--plan", "--memory-budget", "1GiB", words=["1.00 GiB", "auto", "--cpu-offloading-num-layers 12", "saves"])
        self.refused("--plan", "--optimizer-offload-fraction", "0.5", words=["--optimizer-cpu-offload"])
        self.refused("--plan", "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0", words=["offloads nothing"])
        self.refused("--plan", "--cpu-offloading-num-layers", 13, words=["12 layers"])
        self.refused("--plan", "--offload-weights", "--world-size", 2, words=["--zero-stage 3"])
        self.refused("--plan", "--offload-gradients", "--world-size", 2, words=["--zero-stage 2"])
        self.refused("--plan", "--main-grads-dtype", "bf16", "--world-size", 2, words=["--zero-stage 2"])
        self.refused("--plan", "--main-params-dtype", "bf16", "--precision", "fp32", words=["fp32", "leave --main-params-dtype out"])
        self.refused("--plan", "--eval-only", "--val-data", "x", "--offload-gradients", words=["does not train"])
        self.refused("--plan", "--plan-gpu", "Voodoo 2", words=["Voodoo 2", "H100"])
        self.refused("--plan-gpu", "H200", words=["--plan"])
        selective = ["--plan", "--recompute-granularity", "selective", "--recompute-layer-modules"]
        for wrong in ["norm", "norm:", "norm:3-1", "norm:0;", "nrm:0", ":0", "norm:0-12"]:
            self.refused(*selective, wrong, words=["--recompute-layer-modules"])
        self.refused(*selective, "norm:0", "--recompute-modules", "norm", words=["leave out --recompute-modules"])
        self.refused("--plan", "--recompute-layer-modules", "norm:0", words=["selective"])
        full = ["--plan", "--recompute-granularity", "full"]
        self.refused(*full, "--recompute-layers", "0-12", words=["--recompute-layers", "0 to 11"])
        self.refused(*full, "--recompute-layers", "3-x", words=["--recompute-layers"])
        self.refused(*full, "--recompute-method", "block", words=["--recompute-num-layers"])
        self.refused(*full, "--recompute-method", "uniform", "--recompute-num-layers", 13, words=["12 layers"])
        self.refused("--plan", "--recompute-granularity", "selective", "--recompute-modules", "norm,mpl", words=["mpl"])

    def test_options_that_do_nothing_are_said(self):
        """Each option is named that another option makes useless; a command without such options prints none."""
        base = [*SMALL, "--plan"]
        for options, needs in ((["--lr-decay-style", "constant", "--min-lr", "1e-5"], ["--min-lr .*than constant"]),
                               (["--lr-wsd-decay-steps", 2], ["--lr-wsd-decay-steps 2 .*--lr-decay-style WSD"]),
                               (["--val-steps", 3], ["--val-steps 3 .*--val-data"]),
                               (["--top-k", 3], ["--top-k 3 .*--sample-every"]),
                               (["--sample-every", 5, "--top-k", 3, "--temperature", 0], ["--top-k 3 .*--temperature above 0"]),
                               (["--document-delimiter", "last"], ["--document-delimiter last .*--separate-documents"]),
                               (["--allow-lossy-states"], ["--allow-lossy-states true .*--recompute-granularity auto"]),
                               (["--allow-lossy-states", "--recompute-granularity", "auto", "--memory-budget", "1GiB"], []),
                               (["--zero-stage", 2, "--check-replicas", 1], ["--zero-stage 2 .*several", "--check-replicas 1 .*several"]),
                               (["--world-size", 2, "--micro-batch-size", 1, "--zero-stage", 2], []),
                               (["--sample-every", 5, "--top-k", 3, "--val-steps", 20, "--lr-decay-style", "WSD",
                                 "--lr-wsd-decay-steps", 2, "--separate-documents", "--document-delimiter", "last"], [])):
            result = run(*base, *options)
            self.assertEqual(result.returncode, 0, result.stderr)
            notes = [line for line in result.stdout.split("\n") if "does nothing in this run: it needs" in line]
            self.assertEqual(len(notes), len(needs), notes)
            for note, need in zip(notes, needs):
                self.assertRegex(note, "^note: " + need)

    def test_an_out_folder_that_is_a_file(self):
        self.refused(*SMALL, *self.data, "--out", self.path + "/t_train_000.bin", words=["--out"])


class Processor(unittest.TestCase):
    """On a CPU without the instructions that the program was compiled for there is a message, not an illegal
    instruction."""
    EMULATOR = shutil.which("qemu-x86_64")

    def on(self, cpu, *arguments):
        return subprocess.run([self.EMULATOR, "-cpu", cpu, PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)

    @unittest.skipUnless(EMULATOR and os.uname().machine == "x86_64", "no qemu-x86_64")
    @without_address_sanitizer # qemu has no room for its shadow memory
    def test_old_processors(self):
        row = next(line for line in run("--version").stdout.splitlines() if line.startswith("cpu "))
        for cpu, arch, lacks in (("Haswell", "x86-64-v3", "avx512f"), ("Westmere", "x86-64-v2", "avx2")):
            result = self.on(cpu, "--version")
            if lacks not in row.split():
                self.assertEqual(result.returncode, 0, result.stderr)
                continue
            self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
            self.assertRegex(result.stderr, r"train_gpt: built for a CPU with .*\b%s\b.*, which this one lacks; build it here, by make "
                             r"ARCH=native, or anywhere by make ARCH=%s\n$" % (lacks, arch))


class Data(Case):
    def broken(self, name, words, *arguments, **shard):
        path = os.path.join(self.path, name)
        write_shard(path, **shard)
        self.refused(*SMALL, "--train-data", path, "--out", self.path + "/never", *arguments, words=words)
        self.assertFalse(os.path.exists(self.path + "/never/log.jsonl") and os.path.getsize(self.path + "/never/log.jsonl"))

    def test_no_file_matches(self):
        self.refused(*SMALL, "--train-data", self.path + "/none_*.bin", words=["--train-data", "none_"])

    def test_names_with_the_signs_of_patterns(self):
        """A name that exists is taken as it is, where no other file matches; \\, is a comma in a pattern."""
        for folder in ("run[2]", "a,b", "{x,y}", "back\\slash"):
            os.makedirs(self.path + "/" + folder)
            write_shard(self.path + "/" + folder + "/t_000.bin", [1] * 200)
        for pattern, files in (("run[2]/t_000.bin", 1), ("a,b/t_000.bin", 1), ("a\\,b/t_*.bin", 1), ("{x,y}/t_000.bin", 1),
                               ("back\\slash/t_000.bin", 1), ("t_train_000.bin,%s/a,b/t_000.bin" % self.path, 2)):
            result = run(*SMALL, "--train-data", self.path + "/" + pattern, "--train-steps", 1, "--checkpoint-every", 0,
                         "--out", self.path + "/signs")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(" tokens in %d files\n" % files, result.stdout)
        twice = [*SMALL, "--train-steps", 1, "--checkpoint-every", 0, "--out", self.path + "/signs", "--lr", "1e-4", "--train-data", self.path + "/t_train_*.bin"]
        for other, said in (("/a,b/t_000.bin", "train_gpt: --train-data is given twice; '%s/a,b/t_000.bin' counts, '%s/t_train_*.bin' does not\n"
                             % (self.path, self.path)), ("/t_train_*.bin", "")):
            result = run(*twice, "--train-data", self.path + other)
            self.assertEqual((result.returncode, result.stderr), (0, said))
        self.refused(*SMALL, "--train-data", self.path + "/a,b/t_*.bin", words=["no file matches '%s/a'" % self.path, "\\,"])

    def test_files_that_are_read_twice_are_said(self):
        """Validation on training data is named, and so is one file under two names."""
        os.symlink("t_train_000.bin", self.path + "/link_train.bin")
        options = [*SMALL, "--train-steps", 1, "--checkpoint-every", 0, "--out", self.path + "/twice", "--train-data"]
        overlap, link = "is in --train-data and in --val-data, ", "of --train-data are one file, whose tokens count twice"
        for train, val, notes in (("t_*_000.bin", "t_val_*.bin", [overlap + "1 of 2 files"]), ("*_train*.bin", "t_val_*.bin", [link]),
                                  ("t_train_000.bin", "link_train.bin", [overlap + "1 of 1 files"]), ("t_train_*.bin", "t_val_*.bin", [])):
            shutil.rmtree(self.path + "/twice", ignore_errors=True)
            result = run(*options, self.path + "/" + train, "--val-data", self.path + "/" + val)
            self.assertEqual(result.returncode, 0, result.stderr)
            said = [line for line in result.stdout.split("\n") if line.startswith("note: ")]
            self.assertEqual(len(said), len(notes), said)
            for note, words in zip(said, notes):
                self.assertIn(words, note)
        os.remove(self.path + "/link_train.bin")

    def test_data_of_another_tokenizer_are_said(self):
        """Its ids are within the model's vocabulary. A model's spare tokens may have been given a meaning."""
        def write(folder, tokens):
            os.makedirs(self.path + "/" + folder, exist_ok=True)
            shutil.copy(self.path + "/t_train_000.bin", self.path + "/" + folder)
            ends = list(itertools.accumulate(map(len, tokens), initial=0))
            with open(self.path + "/" + folder + "/t_vocabulary.bin", "wb") as f:
                f.write(b"GPTVOCAB" + struct.pack("<4I", 1, len(tokens), 256, 0) + struct.pack("<%dI" % len(ends), *ends) + b"".join(tokens))

        bytewise = [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]
        for folder, tokens, said in (("own", bytewise, False), ("same", bytewise, False), ("spare", [b"<user>", *bytewise[1:]], False),
                                     ("other", [bytewise[i ^ 1] for i in range(256)] + bytewise[256:], True)):
            write(folder, tokens)
            model = ["--init-from", self.path + "/own/out/checkpoints/step_00000001", "--seq-length", 32, "--micro-batch-size", 4]
            result = run(*(SMALL if folder == "own" else model), "--train-data", self.path + "/" + folder + "/t_train_000.bin", "--train-steps", 1,
                         "--out", self.path + "/" + folder + "/out")
            self.assertEqual(result.returncode, 0, result.stderr)
            note = "note: 256 of 257 tokens have another text in %s/other/t_vocabulary.bin than in" % self.path
            self.assertEqual(result.stdout.count(note), said, result.stdout)
            self.assertEqual(result.stdout.count("have another text"), said)

    def test_no_data_given(self):
        self.refused(*SMALL, words=["--train-data"])

    def test_empty_and_truncated_and_foreign_files(self):
        self.broken("empty.bin", ["empty.bin"], tokens=[])
        self.broken("short.bin", ["short.bin"], tokens=[1] * 20)
        self.broken("truncated.bin", ["truncated.bin"], tokens=[1] * 200, count=300)
        self.broken("longer.bin", ["longer.bin"], tokens=[1] * 200, count=100)
        self.broken("magic.bin", ["magic.bin"], tokens=[1] * 200, magic=77)
        self.broken("version.bin", ["version.bin"], tokens=[1] * 200, version=99)
        open(self.path + "/zero.bin", "w").close()
        self.refused(*SMALL, "--train-data", self.path + "/zero.bin", words=["zero.bin"])

    def test_a_token_outside_the_vocabulary(self):
        self.broken("token.bin", ["token.bin", "400", "257"], tokens=[1] * 100 + [400] + [1] * 100)

    def test_uint32_shards(self):
        path = self.path + "/wide.bin"
        write_shard(path, list(range(200)) * 40, magic=20240801, version=7, width="I")
        result = run(*SMALL, "--train-data", path, "--train-steps", 2, "--out", self.path + "/wide")
        self.assertEqual(result.returncode, 0, result.stderr)


class Documents(Case):
    """Sequences that hold several documents: byte shards, in which 256 marks the documents."""
    EOD = 256
    SEPARATE = ["--separate-documents", "--precision", "fp32"]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        generator = random.Random(5)
        text = ("for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\nreturn sum;\n" * 10).encode()

        def documents(count):
            for _ in range(count):
                begin = generator.randrange(300)
                yield list(text[begin:begin + generator.choice([0, 1, 2, 9, 20, 50])])

        cls.texts = {name: list(documents(count)) for name, count in (("train", 400), ("val", 150))}
        for name, texts in cls.texts.items():
            write_shard("%s/first_%s.bin" % (cls.path, name), cls.tokens(texts, "first"))
            write_shard("%s/last_%s.bin" % (cls.path, name), cls.tokens(texts, "last"))
            write_megatron("%s/index_%s" % (cls.path, name), [text + [cls.EOD] for text in texts])
        cls.data = cls.data_of("first")

    @classmethod
    def tokens(cls, texts, place):
        return [token for text in texts for token in ([cls.EOD] + text if place == "first" else text + [cls.EOD])]

    @classmethod
    def data_of(cls, kind):
        return ["--train-data", "%s/%s_train.bin" % (cls.path, kind), "--val-data", "%s/%s_val.bin" % (cls.path, kind)]

    def curve(self, *arguments):
        return [(entry["step"], entry["tokens"], entry["loss"], entry["grad_norm"]) for entry in self.train(*arguments)[1]]

    def model(self, *options, name="model"):
        """Returns the folder of a model that has learned enough to use what comes before a token."""
        folder = "%s/%s/checkpoints/step_00000060" % (self.path, name)
        if not os.path.exists(folder):
            self.train(name, *self.SEPARATE, "--train-steps", 60, "--checkpoint-every", 60, *options)
        return folder

    def evaluate(self, path, *arguments):
        """Returns the validation loss of all of a file, and the number of its tokens."""
        result = run("--init-from", self.model(), "--eval-only", "--val-data", path, "--seq-length", 32, "--micro-batch-size", 1,
                     "--val-steps", 100000, "--precision", "fp32", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        loss, tokens = re.search(r"validation loss (\S+), .* over (\d+) tokens", result.stdout).groups()
        return float(loss), int(tokens)

    def test_a_packed_run_trains_and_resumes(self):
        whole = self.curve("whole", *self.SEPARATE, "--train-steps", 60)
        self.assertEqual([step for step, *_ in whole], list(range(1, 61)))
        self.assertLess(whole[-1][2], 0.7 * whole[0][2])
        self.assertNotEqual(whole, self.curve("mixed", "--precision", "fp32", "--train-steps", 60))
        self.curve("parts", *self.SEPARATE, "--train-steps", 60, "--checkpoint-every", 25)
        shutil.rmtree(self.path + "/parts/checkpoints/step_00000060")
        self.assertEqual(self.curve("parts", "--resume", "auto", "--train-steps", 60), whole)
        # Each of the three options matters, and those that were switched off stay so.
        for i, off in enumerate(["--no-reset-attention-mask", "--no-reset-position-ids", "--no-eod-mask-loss"]):
            name, data = "without%d" % i, self.data_of("last")
            last = self.curve("last%d" % i, *data, *self.SEPARATE, "--document-delimiter", "last", "--train-steps", 4)
            some = self.curve(name, *data, *self.SEPARATE, "--document-delimiter", "last", off, "--train-steps", 4, "--checkpoint-every", 2)
            self.assertNotEqual(last[0][2:], some[0][2:], off)
            shutil.rmtree(self.path + "/" + name + "/checkpoints/step_00000004")
            self.assertEqual(self.curve(name, *data, "--resume", "auto"), some, off)

    def test_evaluation_counts_the_targets(self):
        for kind, options in (("first", []), ("last", ["--document-delimiter", "last"]), ("index", [])):
            place = "first" if kind == "first" else "last"
            tokens = self.tokens(self.texts["val"], place)
            begins = {sum(len(text) + 1 for text in self.texts["val"][:i]) for i in range(len(self.texts["val"]))}
            targets = range(1, (len(tokens) - 1) // 32 * 32 + 1)
            counted = [i for i in targets if i not in begins or tokens[i] == self.EOD]
            self.assertEqual(len(counted) == len(targets), kind == "first")
            path = "%s/%s_val.bin" % (self.path, kind)
            loss, count = self.evaluate(path, "--separate-documents", *options)
            self.assertEqual(count, len(counted), kind)
            self.assertGreater(loss, 0)
            self.assertEqual(self.evaluate(path)[1], len(targets), kind)

    def test_a_sequence_that_does_not_count_changes_nothing(self):
        """A sequence without targets that count changes neither the mean loss nor the gradient: each is over the
        targets that count, of all micro-batches."""
        text = list(b"for (int i = 0; i < n; i++) sum += x[i]")[:33]
        write_megatron(self.path + "/counts", [text])
        write_megatron(self.path + "/never_counts", [[token] for token in text]) # each token begins a document
        options = ["--val-data=", "--separate-documents", "--precision", "fp32", "--vocab-size", 300, "--train-steps", 1]
        whole, *others = [self.curve("count%d" % i, "--train-data", self.path + "/" + data, *options, *batch)[0]
                          for i, (data, *batch) in enumerate([
                              ("counts.bin", "--micro-batch-size", 1), ("*counts.bin", "--micro-batch-size", 2),
                              ("*counts.bin", "--micro-batch-size", 1, "--global-batch-size", 2)])]
        for _, _, loss, norm in others:
            self.assertAlmostEqual(loss, whole[2], delta=1e-5)
            self.assertAlmostEqual(norm / whole[3], 1, delta=1e-5)

    def test_documents_do_not_see_each_other(self):
        """The losses of two documents in one sequence add up, whichever documents these are; without the options they
        do not."""
        def loss(first, second, *options):
            path = self.path + "/pair.bin"
            write_shard(path, [self.EOD, *first[:15], self.EOD, *second[:16]])
            return self.evaluate(path, *options)[0]

        a, b = list(b"for (int i = 0; i < n"), list(b"    sum += x[i] * y[i]")
        c, d = list(b"    sum += x[i] * y[i]"), list(b"return sum;\nfor (int i")
        for options, separate in ((["--separate-documents"], True), (["--reset-position-ids"], False), ([], False)):
            together = loss(a, c, *options) + loss(b, d, *options) - loss(a, d, *options) - loss(b, c, *options)
            if separate:
                self.assertLess(abs(together), 1e-5)
            else:
                self.assertGreater(abs(together), 1e-4)

    def test_generation(self):
        results = [run("--init-from", self.model(), "--seq-length", 32, "--sample-tokens", 20, "--temperature", 0, "--precision", "fp32",
                       "--generate", "for (int", *options) for options in ([], ["--separate-documents"])]
        for result in results:
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("for (int", result.stdout)
        self.assertEqual(results[0].stdout, results[1].stdout)

    def test_a_damaged_model_is_refused(self):
        """The manifest beside its files tells the damage; without a manifest, the name of the tensor with a value that
        is not finite."""
        def evaluated(*options):
            return run("--init-from", damaged, "--eval-only", "--val-data", self.path + "/first_val.bin", "--seq-length", 32,
                       "--micro-batch-size", 1, "--val-steps", 4, "--precision", "fp32", *options)
        damaged = self.path + "/damaged"
        shutil.copytree(self.model(), damaged)
        self.assertEqual(evaluated().returncode, 0)
        with open(damaged + "/model.safetensors", "r+b") as f:
            tensors = 8 + struct.unpack("<Q", f.read(8))[0]
            table = json.loads(f.read(tensors - 8))
            name = "model.norm.weight"
            f.seek(tensors + table[name]["data_offsets"][0] + 4 * 5)
            f.write(struct.pack("<f", float("inf")))
        result = evaluated()
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"damaged/model.safetensors: is damaged: .*; --check-weights=false takes the files as they are\n$")
        os.remove(damaged + "/manifest.json")
        result = evaluated()
        self.assertEqual(result.returncode, 2)
        self.assertIn("element 5 of tensor '%s' is inf" % name, result.stderr)
        result = evaluated("--check-weights=false")
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertRegex(result.stderr, "the validation loss is -?nan")
        self.assertNotIn("validation loss", result.stdout)

    def test_a_link_out_of_a_models_folder_is_not_copied(self):
        """A checkpoint has copies of the tokenizer's files, but not of a file outside the model's folder to which a
        link there leads."""
        with open(self.path + "/secret", "w", encoding="ascii") as f:
            f.write("secret")
        cache = self.path + "/cache/snapshots/0123"
        shutil.copytree(self.model(), cache)
        os.remove(cache + "/manifest.json")
        os.mkdir(self.path + "/cache/blobs")
        train = ["--init-from", cache, *self.data, "--seq-length", 32, "--micro-batch-size", 4, "--val-every", 0, "--train-steps", 1,
                 "--checkpoint-every", 1, "--precision", "fp32"]
        os.symlink(self.path + "/secret", cache + "/chat_template.jinja")
        self.refused(*train, "--out", self.path + "/copies", words=["chat_template.jinja", "is a link to a file elsewhere"])
        os.rename(self.path + "/secret", self.path + "/cache/blobs/ab12")
        os.remove(cache + "/chat_template.jinja")
        os.symlink("../../blobs/ab12", cache + "/chat_template.jinja")  # as huggingface_hub lays its cache out
        result = run(*train, "--out", self.path + "/copies")
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(self.path + "/copies/checkpoints/step_00000001/chat_template.jinja", encoding="ascii") as f:
            self.assertEqual(f.read(), "secret")
        own = cache + "-data"  # the user's own folder, whose name begins as the model's
        os.mkdir(own)
        shutil.copy(ROOT + "/test/golden/tokenizer_gpt2.json", own + "/tokenizer.json")
        shutil.copy(self.path + "/t_train_000.bin", own)
        shutil.copy(self.path + "/t_val_000.bin", own)
        os.symlink(self.path + "/t_val_000.bin", own + "/chat_template.jinja")
        result = run(*train, "--train-data", own + "/t_train_000.bin", "--val-data", own + "/t_val_000.bin", "--out", self.path + "/own")
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_generation_within_the_positions_and_past_them(self):
        """With learned positions, tokens without --sample-tokens are all that the prompt leaves room for; with RoPE
        they go on past the positions."""
        prompt = "for (int i"
        plain = ["--temperature", 0, "--precision", "fp32", "--threads", 1, "--generate", prompt]
        gpt2 = self.model("--position-embedding-type", "learned_absolute", "--normalization", "LayerNorm", "--activation", "gelu",
                          "--add-bias-linear", name="learned")
        for model, learned in ((gpt2, True), (self.model(), False)):
            left = run("--init-from", model, *plain)
            self.assertEqual((left.returncode, left.stderr), (0, ""))
            given = run("--init-from", model, *plain, "--sample-tokens", 60)
            if learned:
                self.assertEqual(given.returncode, 2)
                self.assertIn("10 tokens, and with --sample-tokens 60 that is more than the model's 32 positions", given.stderr)
            else:
                self.assertEqual(given.returncode, 0, given.stderr)
                self.assertEqual(given.stderr.count("more than the 32 positions that the model was trained on"), 1, given.stderr)
                self.assertGreater(len(given.stdout), len(left.stdout))
            longer = run("--init-from", model, *plain[:-1], 4 * prompt)
            self.assertEqual(longer.returncode, 2 if learned else 0, longer.stderr)

    def test_no_end_of_text_is_known(self):
        data = ["--train-data", self.path + "/first_train.bin", "--out", self.path + "/never"]
        other = [*SMALL, "--vocab-size", 300, *data]
        for option in ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--separate-documents"):
            result = self.refused(*other, option, words=["no end-of-text token is known", "--eod-token ID"])
            self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.refused(*other, "--separate-documents", "--document-delimiter", "last", words=["--eod-token ID"])
        self.refused(*other, "--separate-documents", "--eod-token", 300, words=["--eod-token 300", "--vocab-size 300"])
        self.assertFalse(os.path.exists(self.path + "/never/log.jsonl"))
        known = run(*other, "--separate-documents", "--eod-token", self.EOD, "--train-steps", 1)
        self.assertEqual(known.returncode, 0, known.stderr)
        index = run(*other, *self.data_of("index")[:2], "--out", self.path + "/by_index", "--separate-documents", "--train-steps", 1)
        self.assertEqual(index.returncode, 0, index.stderr) # its .idx says where documents begin


class Attention(Case):
    def test_the_report_says_which_and_why(self):
        result = run("--plan=full", "--preset", "demo")
        self.assertIn("flash", result.stdout)
        result = run("--plan=full", "--preset", "demo", environment={"NVTE_FLASH_ATTN": "0"})
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"(?m)^attention .*switched off by NVTE_FLASH_ATTN=0")
        self.assertRegex(result.stdout, r"(?m)^environment +NVTE_FLASH_ATTN=0 \(attention's backend\)$")
        # as if neither were set
        result = run("--plan=full", "--preset", "demo", environment={"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": ""})
        self.assertNotIn("NVTE_", result.stdout)
        self.assertIn("probabilities", json.dumps(self.plan("--preset", "demo", environment={"NVTE_FLASH_ATTN": "0"})))

    def test_none_left(self):
        self.refused("--plan", "--preset", "demo", environment={"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
                     words=["NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"])
        self.refused("--plan", "--preset", "demo", "--attention-backend", "flash", environment={"NVTE_FLASH_ATTN": "0"},
                     words=["NVTE_FLASH_ATTN"])

    def test_backends_agree(self):
        _, flash = self.train("flash", "--train-steps", 5, "--attention-backend", "flash", "--precision", "fp32")
        _, unfused = self.train("unfused", "--train-steps", 5, "--attention-backend", "unfused", "--precision", "fp32")
        for a, b in zip(flash, unfused):
            self.assertAlmostEqual(a["loss"], b["loss"], delta=1e-4)

    def plan(self, *arguments, **keywords):
        path = os.path.join(self.path, "plan.json")
        result = run("--plan", "--plan-json", path, *arguments, **keywords)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(path) as f:
            return json.load(f)


class Memory(Case):
    plan = Attention.plan

    def test_a_large_plan_on_a_small_machine(self):
        """llama3-8b takes 200 GiB; planning it takes less than 0.3 GiB."""
        result = run("--plan=full", "--preset", "llama3-8b")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("parameters", result.stdout)
        self.assertLess(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, 300 * 1024)

    def test_no_two_live_buffers_share_a_byte(self):
        for policy in [[], ["--recompute-granularity", "full"], ["--recompute-granularity", "selective"]]:
            plan = self.plan("--preset", "gpt2-124m", *policy)
            self.assertLessEqual(plan["peak_bytes"], 1.02 * plan["lower_bound_bytes"])
            buffers = [b for b in plan["buffers"] if b["arena"] == "activations" and b["first_phase"] >= 0 and b["bytes"]]
            self.assertGreater(len(buffers), 100)
            for i, a in enumerate(buffers):
                for b in buffers[:i]:
                    apart_in_time = a["last_phase"] < b["first_phase"] or b["last_phase"] < a["first_phase"]
                    apart_in_space = a["offset"] + a["bytes"] <= b["offset"] or b["offset"] + b["bytes"] <= a["offset"]
                    self.assertTrue(apart_in_time or apart_in_space, (a, b))

    def test_the_picture(self):
        path = self.path + "/plan.svg"
        self.assertEqual(run("--plan", "--preset", "demo", "--plan-picture", path).returncode, 0)
        with open(path) as f:
            self.assertIn("<svg", f.read())

    def test_recomputation_lowers_the_peak(self):
        peak = [self.plan("--preset", "gpt2-124m", *policy)["peak_bytes"] for policy in (
            [], ["--recompute-granularity", "selective"],
            ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", 6],
            ["--recompute-granularity", "full"])]
        self.assertEqual(peak, sorted(peak, reverse=True))
        self.assertEqual(len(set(peak)), 4)

    def test_selective_is_of_what_attention_keeps(self):
        """Of unfused attention the T x T probabilities, and the report says why; flash keeps none."""
        selective = ["--plan=full", "--preset", "demo", "--recompute-granularity", "selective"]
        for options, words in ((["--attention-backend", "unfused"], "core_attn, since unfused attention keeps T x T probabilities"),
                               (["--attention-backend", "flash"], "norm,activation"),
                               (["--attention-backend", "unfused", "--recompute-modules", "norm"], "norm")):
            self.assertRegex(run(*selective, *options).stdout, "(?m)^recomputation +selective: %s$" % words)
        plan = [self.plan("--preset", "demo", "--attention-backend", "unfused", *options)["peak_bytes"] for options in
                ([], selective[-2:], [*selective[-2:], "--recompute-modules", "core_attn"])]
        self.assertLess(plan[1], plan[0])
        self.assertEqual(plan[1], plan[2])

    def test_advice(self):
        selective = ["--plan=full", "--preset", "demo", "--recompute-granularity", "selective", "--recompute-modules"]
        self.assertIn("flash attention never stores", run(*selective, "core_attn").stdout)
        self.assertNotIn("flash attention never stores", run(*selective, "norm").stdout)
        full = ["--plan=full", "--preset", "gpt2-124m", "--recompute-granularity", "full", "--recompute-method", "uniform"]
        self.assertIn("--recompute-num-layers 1 takes less", run(*full, "--recompute-num-layers", 4).stdout)

    def test_budget(self):
        model = ["--preset", "gpt2-124m", "--precision", "bf16"] # in fp32 lossy states gain nothing where products are slow
        most = self.plan(*model)["peak_bytes"]
        budget = int(0.85 * most)
        plan = self.plan(*model, "--recompute-granularity", "auto", "--memory-budget", budget)
        self.assertLessEqual(plan["peak_bytes"], budget)
        self.assertGreater(plan["peak_bytes"], 0.95 * budget)
        report = run("--plan=full", *model, "--recompute-granularity", "auto", "--memory-budget", budget).stdout
        self.assertRegex(report, r"auto +[\d.]+ ms a step, .* of the device, .* of the host: recomputes ")
        self.assertRegex(report, r"not chosen +[\d.]+ ms a step")
        self.assertRegex(report, r"with --allow-lossy-states about [\d.]+ ms a step")
        self.assertGreater(plan["predicted"]["tokens_per_s"], 0)
        self.refused("--plan", *model, "--recompute-granularity", "auto", "--memory-budget", "1GiB",
                     "--host-memory-budget", "1MiB", words=["the least is --memory-budget ", "--micro-batch-size"])

    def test_the_nearest_budget_is_met(self):
        """The least budget that the message names fits, and a little less does not."""
        auto = ["--plan=full", "--preset", "gpt2-124m", "--recompute-granularity", "auto", "--host-memory-budget", "200MiB", "--memory-budget"]
        least = int(self.refused(*auto, "1GiB", words=["--memory-budget"]).stderr.split("least is --memory-budget ")[1].split()[0])
        self.assertEqual(run(*auto, least).returncode, 0)
        self.refused(*auto, least - 1, words=["the least is"])

    def test_offload_that_takes_memory_is_named(self):
        """Where states are smaller than the pieces of their update, auto offloads none of them, and says what the
        option costs."""
        small = ["--vocab-size", 67, "--num-layers", 1, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 4, "--micro-batch-size", 1]
        words = r"--optimizer-cpu-offload takes more of the device's memory than it frees: without it [\d.]+ .iB, with it "
        shown = 0
        # on some CPUs products need more memory than the update, in one of the two precisions
        for precision in "fp32", "bf16":
            auto = ["--plan=full", *small, "--device", "cpu", "--precision", precision, "--recompute-granularity", "auto", "--memory-budget"]
            said = [self.refused(*auto, 1000, *forced, words=["the least is"]).stderr for forced in ([], ["--optimizer-cpu-offload"])]
            alone, forced = (int(text.split("least is --memory-budget ")[1].split()[0]) for text in said)
            self.assertEqual(bool(re.search(words, said[1])), forced > alone, said)
            if forced > alone:
                shown += 1
                report = run(*auto, "100MiB", "--optimizer-cpu-offload").stdout
                self.assertRegex(report, r"\nnote +" + words)
        report = run(*auto, "100MiB").stdout
        self.assertRegex(report, r"\nbeside the plan +the program with its libraries")
        self.assertNotIn("\nnote", report)
        if shown == 0:
            self.skipTest("on this CPU products need more memory than the update in both precisions")

    @without_address_sanitizer
    def test_auto_is_kept(self):
        """config.json has what auto chose. Neither a run that is started with these options nor a resumed run searches
        again."""
        steps = ["--train-steps", 4, "--checkpoint-every", 2]
        budget = self.plan(*SMALL, *self.data, *steps)["peak_bytes"] - 8192
        result, log = self.train("kept", *steps, "--recompute-granularity", "auto", "--memory-budget", budget, "--no-offload-weights",
                                 "--no-optimizer-cpu-offload", "--no-offload-gradients", "--cpu-offloading-num-layers", 0)
        self.assertIn("\nauto ", result.stdout)
        with open(self.path + "/kept/config.json") as f:
            config = json.load(f)
        self.assertEqual(config["recompute_granularity"], "selective")
        self.assertIn(":0", config["recompute_layer_modules"])
        again, log_again = self.train("again", "--recompute-granularity", "selective", "--recompute-layer-modules",
                                      config["recompute_layer_modules"], "--train-steps", 4)
        self.assertNotIn("\nauto ", again.stdout)
        self.assertEqual([e["loss"] for e in log if "loss" in e], [e["loss"] for e in log_again if "loss" in e])
        planned = run("--config", self.path + "/kept/config.json", "--plan=full")
        self.assertEqual((planned.returncode, planned.stderr), (0, ""))
        self.assertNotIn("\nauto ", planned.stdout)
        self.assertIn(config["recompute_layer_modules"], planned.stdout)
        # Rates are measured in memory that the plan takes later. Pages of code that runs for the first time vary.
        self.assertLess(log[-1]["peak_bytes"], log_again[-1]["peak_bytes"] + (2 << 20))
        resumed, _ = self.train("kept", "--resume", "auto", "--train-steps", 6)
        self.assertNotIn("\nauto ", resumed.stdout)
        self.assertIn(config["recompute_layer_modules"], resumed.stdout)

    @unittest.skipIf("sanitize" in PROGRAM, "the sanitizers reserve address space of their own")
    @without_address_sanitizer
    def test_too_large_for_the_machine(self):
        limit = 3 << 30
        large = ["--num-layers", 24, "--hidden-size", 256, "--num-attention-heads", 4, "--seq-length", 1024, "--micro-batch-size",
                 32, "--vocab-size", 257, "--out", self.path + "/large"]
        result = self.refused(*large, *self.data, limit_bytes=limit, words=["--recompute-granularity full", "--micro-batch-size 16",
                                                                           "saves", "which fits"])
        self.assertFalse(os.path.exists(self.path + "/large"))

    @unittest.skipIf("sanitize" in PROGRAM, "the sanitizers keep freed memory")
    @without_address_sanitizer
    def test_memory_is_flat_from_step_2_on(self):
        for name, policy in [("none", []), ("full", ["--recompute-granularity", "full"]),
                             ("selective", ["--recompute-granularity", "selective", "--recompute-modules", "core_attn,mlp"])]:
            _, log = self.train("flat_" + name, *policy, "--train-steps", 40, "--val-every", 10, "--val-steps", 4)
            peaks = [entry["peak_bytes"] for entry in log]
            # Code that runs for the first time, such as a validation's, is paged in by 64 KiB at a time. One activation
            # left behind at each step, 16 KiB, would add up to 600 KiB, of which half is allowed; op_gpt checks the
            # heap to the byte.
            self.assertLessEqual(max(peaks) - peaks[1], 300 << 10, (name, peaks))


class Runs(Case):
    def start_endless(self, name):
        """A run of a million small steps, whose messages come by a pipe, and the path of its log."""
        process = subprocess.Popen(
            list(map(str, [PROGRAM, *SMALL, "--train-data", self.path + "/t_train_*.bin", "--val-every", "0", "--train-steps",
                           "1000000", "--checkpoint-every", "0", "--out", self.path + "/" + name])),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(process.__exit__, None, None, None)
        self.addCleanup(process.kill)
        return process, self.path + "/" + name + "/log.jsonl"

    def assert_stands_out(self, process, said=""):
        """Ends the run, and holds that it said of one step that it took 0.4 s or more (of two: the machine may stop too)."""
        process.send_signal(signal.SIGTERM)
        said += process.stdout.read()
        self.assertEqual(process.wait(), 3, said)
        stood_out = re.findall(r"step \d+ took (?:0\.[4-9]|[1-9])\S* s, \d+\.\d times the median of those before", said)
        self.assertIn(len(stood_out), (1, 2), said)

    def test_a_step_that_stands_out_is_said(self):
        """A step that takes much longer than others is reported once, with how much longer it took: here a step that
        was stopped for half a second."""
        process, path = self.start_endless("stands_out")
        begin = time.monotonic()

        def wait_for_bytes(size):
            while not os.path.exists(path) or os.path.getsize(path) < size:
                self.assertLess(time.monotonic(), begin + 60)
                time.sleep(0.002)

        wait_for_bytes(40 * 150)  # some 40 lines
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        wait_for_bytes(os.path.getsize(path) + 40 * 150)
        self.assert_stands_out(process)

    def test_a_wait_between_steps_counts(self):
        """Where steps wait for who reads the standard output (a terminal at Ctrl-S), this counts in a step's time, and is said."""
        process, path = self.start_endless("waits")
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        for line in process.stdout:
            if line.startswith("step"):
                break
        size, begin = 0, time.monotonic()
        while os.path.getsize(path) > size or time.monotonic() < begin + 1:
            if os.path.getsize(path) > size:
                size, begin = os.path.getsize(path), time.monotonic()
            time.sleep(0.01)
        said = ""
        while os.path.getsize(path) < size + 40 * 150:
            said += process.stdout.readline()
        self.assert_stands_out(process, said)

    @unittest.skipIf(len(os.sched_getaffinity(0)) > 8, "with more than 8 cores, threads wait by OpenMP's own rule")
    def test_threads_spin_briefly(self):
        """Threads that wait spin briefly, unless the user's environment says how they wait."""
        for policy, expected in ((None, b"1000"), ("active", None)):
            environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
            if policy:
                environment["OMP_WAIT_POLICY"] = policy
            command = [PROGRAM, *SMALL, "--train-data", self.path + "/t_train_*.bin", "--val-every", "0", "--train-steps", "1000000",
                       "--checkpoint-every", "0", "--out", self.path + "/spins"]
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
                said = process.stdout.readline()  # a line of the report: main is past its beginning
                with open("/proc/%d/environ" % process.pid, "rb") as f:
                    found = dict(variable.split(b"=", 1) for variable in f.read().split(b"\0") if b"=" in variable)
                process.kill()
            self.assertEqual(found.get(b"GOMP_SPINCOUNT"), expected, said)

    def test_training_learns_and_logs(self):
        result, log = self.train("learns", "--train-steps", 120, "--val-every", 60, "--sample-every", 120, "--sample-tokens", 32)
        self.assertEqual([entry["samples"]["1"].strip() in result.stdout for entry in log if "samples" in entry], [True])
        log = [entry for entry in log if "samples" not in entry]
        self.assertEqual([entry["step"] for entry in log], list(range(1, 121)))
        for entry in log:
            self.assertEqual({"step", "time", "tokens", "loss", "lr", "grad_norm", "step_ms", "tokens_per_second", "mfu", "mfu_palm",
                              "peak_bytes"}, set(entry) - {"val_loss"})
            self.assertEqual(entry["tokens"], entry["step"] * 4 * 32)
        # The peak is one number, which no step changes. It is a matmul's in little memory, which a step may exceed: then this is
        # said, and steps have no MFU from there on.
        told = [entry for entry in log if entry["mfu"] is not None]
        for entry in told:
            self.assertAlmostEqual(entry["mfu"] * log[0]["tokens_per_second"] / (log[0]["mfu"] * entry["tokens_per_second"]), 1, 2)
            self.assertTrue(0 < entry["mfu"] <= 1, entry)
            self.assertGreater(entry["mfu_palm"], entry["mfu"])
        self.assertEqual(told, log[:len(told)])
        exceeded = re.findall(r"(?m)^step (\d+): \d+ % of the matmul peak: .* MFU is left out from here on$", result.stdout)
        self.assertEqual(exceeded, [str(len(told) + 1)] if len(told) < len(log) else [])
        self.assertEqual(len(re.findall(r"  MFU \d", result.stdout)) > 0, len(told) > 0)
        self.assertEqual([entry["step"] for entry in log if "val_loss" in entry], [60, 120])
        self.assertGreater(log[0]["loss"], 5)
        self.assertLess(log[-1]["val_loss"], 2.5)  # bytes without their context have an entropy of 2.76 nats
        self.assertIn("sample 1 after step 120", result.stdout)
        self.assertNotIn("\r", result.stdout)
        with open(self.path + "/learns/config.json") as f:
            config = json.load(f)
        self.assertEqual(config["num_query_groups"], 2)
        self.assertEqual(config["seq_length"], 32)

    def test_threads_that_openmp_does_not_give(self):
        """OpenMP gives fewer threads than were asked for, so that only a part of the work would be done."""
        fp32 = ["--train-steps", 2, "--hidden-size", 256, "--precision", "fp32"]
        plain = self.train("plain", *fp32, "--threads", 4)[1]
        dynamic = self.train("dynamic", *fp32, "--threads", 4, environment={"OMP_DYNAMIC": "true"})[1]
        self.assertEqual([e["loss"] for e in dynamic], [e["loss"] for e in plain])
        result, _ = self.train("limit", *fp32, environment={"OMP_THREAD_LIMIT": "1"})
        self.assertRegex(result.stdout, r"(?m)^device .*\b1 threads")
        self.refused(*SMALL, *self.data, "--threads", 2, environment={"OMP_THREAD_LIMIT": "1"},
                     words=["--threads 2: OMP_THREAD_LIMIT in the environment allows 1"])

    def test_same_run_same_losses_for_any_threads(self):
        """Losses are the same to the bit where products are our own; a library may divide them otherwise."""
        by_library = re.search(r"\nmatmul +(oneDNN|OpenBLAS)", run("--plan=full", *SMALL).stdout)
        logs = [self.train("again%d" % i, "--train-steps", 6, "--hidden-dropout", 0.1, "--threads", threads)[1]
                for i, threads in enumerate([1, 2, 2, 3])]
        result = run("--config", self.path + "/again1/config.json", "--out", self.path + "/by_config")  # all of that run's options
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        with open(self.path + "/by_config/log.jsonl") as f:
            logs[2] = [json.loads(line) for line in f]
        self.refused("--config", self.path + "/again1/config.json", "--out", self.path + "/again1", words=["checkpoints of another run"])
        losses = [[entry["loss"] for entry in log] for log in logs]
        self.assertEqual(losses[1], losses[2])
        for other in losses[1], losses[3]:
            for a, b in zip(losses[0], other):
                self.assertAlmostEqual(a, b, delta=1e-5 * a if by_library else 0)

    def test_policies_give_the_same_losses(self):
        runs = [self.train("policy%d" % i, "--train-steps", 6, "--hidden-dropout", 0.1, "--attention-dropout", 0.1, *policy)[1]
                for i, policy in enumerate([[], ["--recompute-granularity", "full"],
                                            ["--recompute-granularity", "selective", "--recompute-modules", "core_attn,mlp"]])]
        losses = [[(entry["loss"], entry["grad_norm"]) for entry in log] for log in runs]
        self.assertEqual(losses[0], losses[1])
        self.assertEqual(losses[0], losses[2])

    def test_pipes_in_place_of_files(self):
        """A run would wait for another end that nobody opens, and could not be stopped."""
        data, out = self.path + "/piped", self.path + "/pipes"
        os.makedirs(data)
        os.makedirs(out)
        shutil.copy(self.path + "/t_train_000.bin", data)
        for path in (out + "/.lock", out + "/log.jsonl", out + "/config.json", data + "/t_vocabulary.bin", data + "/t_tokenizer.json"):
            os.mkfifo(path)
            self.refused(*SMALL, "--train-data", data + "/t_train_*.bin", "--train-steps", 3, "--out", out, seconds=20,
                         words=[path, "not a regular file"])
            os.remove(path)

    def test_small_stacks(self):
        """A stack that is large enough computes; a smaller one is refused, and does not overflow in the middle of a
        step."""
        command = " ".join("'%s'" % a for a in [PROGRAM, *SMALL, *self.data, "--train-steps", "1", "--out", self.path + "/stacks"])
        for before, after, words in (("ulimit -s 1024", "--threads 1", None),
                                     ("ulimit -s 1024", "--threads 2", None),
                                     ("ulimit -s 512", "--threads 1", "the stack is limited to 512 KiB, and at least 1024 KiB are needed"),
                                     ("export OMP_STACKSIZE=1M", "--threads 2", None),
                                     ("export OMP_STACKSIZE=256K", "--threads 2", "OMP_STACKSIZE gives threads stacks of 256 KiB"),
                                     # no thread starts with a stack of 32 KiB
                                     ("export OMP_STACKSIZE=32K", "--threads 2", "OMP_STACKSIZE")):
            shutil.rmtree(self.path + "/stacks", ignore_errors=True)
            result = subprocess.run("%s; exec %s %s" % (before, command, after), shell=True, executable="/bin/bash", capture_output=True,
                                    text=True, timeout=60, check=False)
            self.assertEqual(result.returncode, 2 if words else 0, (before, result.stderr))
            self.assertIn(words or "", result.stderr)

    @unittest.skipIf("sanitize" in PROGRAM, "the sanitizers reserve address space of their own")
    @without_address_sanitizer
    def test_too_little_memory_for_libraries(self):
        """The libraries' constructors would wait forever for memory, before main begins."""
        result = subprocess.run("ulimit -v 200000; exec '%s' --version" % PROGRAM, shell=True, executable="/bin/bash",
                                capture_output=True, text=True, timeout=60, check=False)
        self.assertIn(result.returncode, (0, 2), result.stderr)  # 0: no library takes so much
        self.assertIn("raise the limit of ulimit -v or ulimit -d" if result.returncode else "", result.stderr)

    def test_names_that_would_act_on_a_terminal(self):
        """The report and messages show such names safely, and leave other texts."""
        name = self.path + "/\x1b[31m"
        write_shard(name + ".bin", [1] * 1000)
        result = run(*SMALL, "--train-data", name + ".bin", "--out", name + "out", "--train-steps", 1)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("/\\x1b[31m.bin: 1,000 tokens", result.stdout)
        self.assertNotIn("\x1b", result.stdout + result.stderr)
        for arguments in (["--train-data", name + "none.bin"], ["--init-from", name, "--generate", "a"], ["--\x1b[31m"],
                          ["--train-data", name + ".bin", "--out", name + ".bin"]):
            self.assertNotIn("\x1b", self.refused(*SMALL, *arguments, words=["\\x1b[31m"]).stderr)

    def test_standard_files_that_are_closed(self):
        """Nothing else is opened in their place, or what is printed would go into the log."""
        command = " ".join("'%s'" % a for a in [PROGRAM, *SMALL, *self.data, "--train-steps", "3", "--out"])
        for number, closed in enumerate(("<&-", ">&-", "2>&-", "<&- >&- 2>&-")):
            out = self.path + "/closed_%d" % number
            result = subprocess.run("%s '%s' %s" % (command, out, closed), shell=True, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual((result.returncode, result.stderr), (0, ""), closed)
            with open(out + "/log.jsonl", encoding="utf-8") as file:
                self.assertEqual([json.loads(line)["step"] for line in file], [1, 2, 3], closed)
            with open(out + "/.lock", encoding="utf-8") as file:
                self.assertEqual(len(file.read().split()), 3, closed)

    def test_a_picture_does_not_replace_its_log(self):
        self.train("picture", "--train-steps", 2, "--checkpoint-every", 0)
        log = self.path + "/picture/log.jsonl"
        for arguments, words in (((log, "--out", self.path + "/picture/../picture/log.jsonl"), "is a log that is drawn"), ((log + "2",), "line 1: not JSON")):
            with open(log + "2", "w", encoding="utf-8") as file:
                file.write("[" * 100000 + "\n{}\n")
            result = subprocess.run([sys.executable, ROOT + "/scripts/plot_loss.py", *arguments], capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(words, result.stderr)
            self.assertNotIn("Traceback", result.stderr)
        with open(log, encoding="utf-8") as file:
            self.assertEqual([json.loads(line)["step"] for line in file], [1, 2])

    def test_never_validate(self):
        result, log = self.train("never", "--train-steps", 3, "--val-every", 0)
        self.assertFalse([entry for entry in log if "val_loss" in entry])

    def test_a_diverging_run_stops_before_the_update(self):
        result = run(*SMALL, *self.data, "--out", self.path + "/diverge", "--train-steps", 20, "--lr", "1e38", "--clip-grad", 0)
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertRegex(result.stderr, r"step \d+: the (loss|gradient norm) is -?(nan|inf).*samples \d+ to \d+")
        self.assertIn("--skip-nonfinite", result.stderr)

    def test_skips_are_counted(self):
        result = run(*SMALL, *self.data, "--out", self.path + "/skip", "--train-steps", 20, "--lr", "1e38", "--clip-grad", 0,
                     "--skip-nonfinite", 3)
        self.assertEqual(result.returncode, 2)
        self.assertEqual(result.stderr.count("skipped, "), 3)

    def test_bf16_and_fp32_agree(self):
        _, fp32 = self.train("fp32", "--train-steps", 20, "--precision", "fp32")
        _, bf16 = self.train("bf16", "--train-steps", 20, "--precision", "bf16")
        self.assertAlmostEqual(fp32[0]["loss"], bf16[0]["loss"], delta=0.02)
        self.assertAlmostEqual(fp32[-1]["loss"], bf16[-1]["loss"], delta=0.1)


if __name__ == "__main__":
    unittest.main()
