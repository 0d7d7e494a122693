"""Tokenizers that match or are refused: shards carry the digest of theirs, which the engine and the scripts compute alike,
and a run is refused on another one than the model's. Bytes have the files of a tokenizer."""
import contextlib
import gzip
import importlib.util
import io
import json
import os
import shutil
import struct
import sys
import unittest
from unittest import mock

from environment import ROOT
from test_cli import SMALL, Case, run, write_shard

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import byte_tokenizer
import prepare_data
import to_gguf
import tokenizer_digest
import train_tokenizer

GOLDEN = os.path.join(ROOT, "test/golden/tokenizer_%s.json")
DIGESTS = {  # test/unit_tokenizer_digest.c has them, too
    "gpt2": "e33ea2b9cc33e07c0b45a7b8e180e7b2953b101b151de9e07e45a3981ed1a34b",
    "llama3": "b1cee6cf0668d060b037185db42b090cede22df4e9b5b7f81f369f0b5419bd0e",
    "qwen2": "05cd741c529086fc33d80cf2c9a3b0093298af780e0aa53f97fa515b9ee2ba5d",
    "llama2": "0b88cec82c86503b0e82945929c75ff5c7e6d5ee65483eb1d292f9a6bb8c43bf",
}


# What stands for llama.cpp's converter: a model's file is the name of how its tokenizer splits text, and its merges.
CONVERTER = """
import argparse, gguf
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "listed"
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--outfile")
    parser.add_argument("--outtype")
    options = parser.parse_args()
    vocabulary = gguf.SpecialVocab()
    with open(options.outfile, "w") as file:
        file.write(TextModel().get_vocab_base_pre(options.outtype))
        vocabulary.add_to_gguf(file)
"""
GGUF = """
class SpecialVocab:
    load_merges, merges = True, []
    def add_to_gguf(self, file):
        file.write(" %d" % len(self.merges))
"""


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Tokenizers(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with open(cls.path + "/text.txt", "w", encoding="utf-8") as file:
            file.write("for (int i = 0; i < n; i++) s += x[i]; // ü €\n" * 400)
        cls.prepare("bytes")
        cls.model = cls.path + "/model"
        result = cls.run_on("bytes", "--checkpoint-every", 1)
        assert result.returncode == 0, result.stderr
        shutil.move(cls.path + "/out/checkpoints/step_00000001", cls.model)

    @classmethod
    def prepare(cls, name):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert prepare_data.main([cls.path + "/text.txt", "--out", "%s/%s/x" % (cls.path, name), "--val-fraction", "0"]) == 0

    @classmethod
    def run_on(cls, name, *options):
        data = "%s/%s/x_train_000.bin" % (cls.path, name)
        shutil.rmtree(cls.path + "/out", ignore_errors=True)
        return run(*(SMALL if "--init-from" not in options else SMALL[10:14]), "--train-data", data, "--train-steps", 1, "--out", cls.path + "/out",
                   "--threads", 1, *options)

    def with_header(self, name, digest, vocabulary):
        """Copies the shard of bytes to a folder, without the files beside it, with another tokenizer in its header."""
        os.makedirs("%s/%s" % (self.path, name))
        shard = bytearray(read(self.path + "/bytes/x_train_000.bin"))
        shard[96:132] = digest + struct.pack("<I", vocabulary)
        with open("%s/%s/x_train_000.bin" % (self.path, name), "wb") as file:
            file.write(shard)

    def test_digests(self):
        for name, digest in DIGESTS.items():
            self.assertEqual(tokenizer_digest.of(json.loads(read(GOLDEN % name))).hex(), digest)

    def test_ways_to_write_a_metaspace(self):
        ways = [{"prepend_scheme": "never"}, {"add_prefix_space": False}, {"prepend_scheme": "never", "add_prefix_space": False},
                {"prepend_scheme": "always", "add_prefix_space": False}, {"prepend_scheme": "always"}]
        tokenizer = json.loads(read(GOLDEN % "llama2"))
        digests = [tokenizer_digest.of({**tokenizer, "pre_tokenizer": {"type": "Metaspace", **way}}) for way in ways]
        self.assertEqual([digest == digests[0] for digest in digests], [True] * 4 + [False])

    def test_byte_shards_carry_their_tokenizer(self):
        """It goes to checkpoints, and is what the engine reads of its file."""
        header = read(self.path + "/bytes/x_train_000.bin")[:1024]
        files = byte_tokenizer.files()
        self.assertEqual(header[96:132], tokenizer_digest.header_fields(files["tokenizer.json"], 257))
        for name, content in files.items():
            self.assertEqual((read(self.path + "/bytes/x_" + name), read(self.model + "/" + name)), (content, content))
        result = run("--init-from", self.model, "--generate", "for (ü", "--sample-tokens", 1, "--threads", 1)
        self.assertEqual((result.returncode, result.stdout[:6]), (0, "for (ü"), result.stderr)
        result = self.run_on("bytes", "--init-from", self.model)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertNotIn("note: the tokenizer", result.stdout)

    def test_another_tokenizer_is_refused(self):
        """By the shard's header, or by the file beside it; than the model's, or than other shards'."""
        other = bytes.fromhex(DIGESTS["gpt2"])
        model = ["--init-from", self.model]
        self.with_header("header", other, 257)
        os.makedirs(self.path + "/beside")
        write_shard(self.path + "/beside/x_train_000.bin", [1] * 4000)
        shutil.copy(GOLDEN % "gpt2", self.path + "/beside/x_tokenizer.json")
        for name, shown in (("header", "header/x_train_000.bin"), ("beside", "beside/x_tokenizer.json")):
            result = self.run_on(name, *model)
            self.assertEqual(result.returncode, 2, result.stdout)
            self.assertIn("%s/%s is of another tokenizer than %s/tokenizer.json" % (self.path, shown, self.model), result.stderr)
            self.assertIn("digests e33ea2b9cc33e07c, ", result.stderr)
            self.assertEqual(result.stderr.count("\n"), 1)
        result = self.run_on("bytes", "--val-data", self.path + "/header/x_train_000.bin")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--val-data: %s/header/x_train_000.bin is of another tokenizer than %s/bytes/x_train_000.bin" % (self.path, self.path), result.stderr)

    def test_other_added_tokens_are_said(self):
        digest = tokenizer_digest.of(json.loads(byte_tokenizer.files()["tokenizer.json"]))
        self.with_header("added", digest[:16] + bytes(range(16)), 257)
        result = self.run_on("added", "--init-from", self.model)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("have other added tokens", result.stderr)

    def test_a_vocabulary_far_below_the_models_is_said(self):
        note = "note: the tokenizer of %s/%s/x_train_000.bin has 257 tokens, far below the model's vocabulary of %d"
        for size, said in ((512, 0), (514, 1)):
            self.assertEqual(self.run_on("bytes", "--vocab-size", size).stdout.count(note % (self.path, "bytes", size)), said)
        os.makedirs(self.path + "/old", exist_ok=True)
        self.with_header("older", bytes(32), 0)
        shutil.copy(self.path + "/bytes/x_vocabulary.bin", self.path + "/older")
        self.assertIn(note % (self.path, "older", 600), self.run_on("older", "--vocab-size", 600).stdout)

    def test_byte_fallback(self):
        """A prompt gets the template's beginning and a space, which is not shown at a text's beginning."""
        model = self.path + "/llama2"
        os.makedirs(self.path + "/pieces")
        write_shard(self.path + "/pieces/x_train_000.bin", [*range(2, 700)] * 8)
        shutil.copy(GOLDEN % "llama2", self.path + "/pieces/x_tokenizer.json")
        result = self.run_on("pieces", "--vocab-size", 768, "--checkpoint-every", 1)
        self.assertEqual(result.returncode, 0, result.stderr)
        shutil.move(self.path + "/out/checkpoints/step_00000001", model)
        result = run("--init-from", model, "--generate", "the  Ω world", "--sample-tokens", 1, "--threads", 1)
        self.assertEqual((result.returncode, result.stdout[:16]), (0, "<s> the  Ω world"), result.stderr)

    def test_transformers_opens_the_tokenizer_of_bytes(self):
        if not importlib.util.find_spec("transformers"):
            self.skipTest("the package 'transformers' is not installed")
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        text = "".join(map(chr, range(300))) + " €😀  \r\n<|endoftext|>é"
        self.assertEqual(tokenizer.encode(text), prepare_data.ByteTokenizer().encode_with_offsets(text)[0])
        self.assertEqual((tokenizer.decode(tokenizer.encode(text)), tokenizer.eos_token_id), (text, 256))

    def train_tokenizer(self, *arguments, text="text.txt"):
        """Returns the script's exit status and what it says."""
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = train_tokenizer.main([f"{self.path}/{text}", *map(str, arguments)])
        return status, output.getvalue() + errors.getvalue()

    def to_gguf(self, model, outtype="own"):
        """Returns to_gguf.py's exit status, what it says, and the file's text."""
        folder, out = self.path + "/llama.cpp", self.path + "/x.gguf"
        os.makedirs(folder, exist_ok=True)
        for name, content in (("convert_hf_to_gguf.py", CONVERTER), ("gguf.py", GGUF)):
            with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                file.write(content)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), mock.patch.object(to_gguf, "PACKAGES", []), \
                mock.patch.object(sys, "argv", sys.argv), mock.patch.object(sys, "path", list(sys.path)), mock.patch.dict(sys.modules):
            status = to_gguf.main([model, "--llama-cpp", folder, "--out", out, "--outtype", outtype])
        text = read(out).decode() if os.path.exists(out) else ""
        self.assertFalse(os.path.exists(out + ".part"))
        with contextlib.suppress(FileNotFoundError):
            os.remove(out)
        return status, said.getvalue(), text

    def test_llama_cpps_converter_takes_our_tokenizers(self):
        """Bytes, of a run's newest checkpoint; what the list has; adapters and other splits are refused."""
        run = self.path + "/run"
        for step in 1, 20:
            shutil.copytree(self.model, "%s/checkpoints/step_%08d" % (run, step))
        os.makedirs(run + "/checkpoints/step_00000030")  # unfinished
        status, said, text = self.to_gguf(run)
        self.assertEqual((status, text), (0, "gpt-2 1"), said)
        self.assertIn("step_00000020", said)
        self.assertEqual(self.to_gguf(run, "known")[2], "listed 1")
        config = json.loads(read(self.model + "/tokenizer.json"))
        with open(run + "/checkpoints/step_00000020/tokenizer.json", "w", encoding="utf-8") as file:
            json.dump({**config, "normalizer": {"type": "NFC"}}, file)
        status, said, text = self.to_gguf(run)
        self.assertEqual((status, text), (2, ""))
        self.assertRegex(said, r"^to_gguf.py: .*step_00000020/tokenizer.json: changes the text before it is split; [^\n]*\n$")
        os.makedirs(self.path + "/adapters")
        for name in "adapter_config.json", "config.json":
            shutil.copy(self.model + "/config.json", f"{self.path}/adapters/{name}")
        self.assertIn("--lora-merge", self.to_gguf(self.path + "/adapters")[1])
        self.assertIn("has no config.json", self.to_gguf(self.path)[1])
        with mock.patch.object(to_gguf, "CONVERTER", "none.py"):
            self.assertIn("has no none.py; expected a clone of", self.to_gguf(self.model)[1])

    def test_ways_to_split(self):
        """The known ones of tokenizers that have merges; a pattern that is another, or text that is changed before."""
        level = {"type": "ByteLevel", "add_prefix_space": False}
        model = {"type": "BPE", "merges": [["a", "b"]]}
        def split(pattern):
            return {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": pattern}}, {**level, "use_regex": False}]}
        patterns = train_tokenizer.PATTERNS
        for steps, more, name in ((level, {}, "gpt-2"), (split(patterns["gpt2"]), {}, "gpt-2"), (split(patterns["llama3"]), {}, "smaug-bpe"),
                                  (split(patterns["llama3"]), {"ignore_merges": True}, "llama-bpe")):
            self.assertEqual(to_gguf.way_to_split({"model": {**model, **more}, "pre_tokenizer": steps}), name)
        for steps, more in ((split("x"), {}), ({**level, "use_regex": False}, {}), ({**level, "add_prefix_space": True}, {}), (level, {"type": "Unigram"}),
                            (level, {"byte_fallback": True}), (None, {})):
            with self.assertRaises(to_gguf.Mistake):
                to_gguf.way_to_split({"model": {**model, **more}, "pre_tokenizer": steps})

    def test_training_a_tokenizer(self):
        """The engine reads what the script writes."""
        if not importlib.util.find_spec("tokenizers"):
            self.skipTest("the package 'tokenizers' is not installed")
        folder = self.path + "/trained"
        self.assertEqual(self.train_tokenizer("--vocab-size", 270, "--special", "<|im_end|>", "--out", folder),
                         (0, "270 tokens in %s/tokenizer.json; train by --vocab-size 270\n" % folder))
        self.assertEqual(self.train_tokenizer("--out", folder)[0], 2)
        self.assertIn("expected 257 at least", self.train_tokenizer("--vocab-size", 256, "--out", folder + "2")[1])
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(prepare_data.main([self.path + "/text.txt", "--tokenizer", folder, "--out", self.path + "/t/x", "--val-fraction", "0"]), 0)
        result = self.run_on("t", "--vocab-size", 270, "--checkpoint-every", 1)
        self.assertEqual(result.returncode, 0, result.stderr)
        result = run("--init-from", self.path + "/out/checkpoints/step_00000001", "--generate", "x[i] ü<|im_end|>", "--sample-tokens", 1, "--threads", 1)
        self.assertTrue(result.stdout.startswith("x[i] ü<|im_end|>"), result.stdout)

    def test_training_on_what_prepare_data_reads(self):
        if not importlib.util.find_spec("tokenizers"):
            self.skipTest("the package 'tokenizers' is not installed")
        for name, data in ("a.gz", gzip.compress(b'{"text": "abab \\ud800"}\n\n' * 9)), ("b.txt", b""), ("c.gz", gzip.compress(b"abab")[:-9]):
            with open(f"{self.path}/{name}", "wb") as file:
                file.write(data)
        self.assertEqual(self.train_tokenizer("--vocab-size", 258, "--out", self.path + "/a", text="a.gz")[0], 0)
        for name, said in ("b.txt", "holds no text"), ("c.gz", "cut off"):
            status, errors = self.train_tokenizer("--out", self.path + "/b", text=name)
            self.assertEqual((status, said in errors, os.path.exists(self.path + "/b")), (2, True, False), errors)

    def test_training_without_the_package(self):
        with mock.patch.dict(sys.modules, {"tokenizers": None}):
            status, said = self.train_tokenizer("--out", self.path + "/none")
        self.assertEqual((status, said), (2, "train_tokenizer.py: needs the Python package 'tokenizers': pip install tokenizers\n"))


if __name__ == "__main__":
    unittest.main()
