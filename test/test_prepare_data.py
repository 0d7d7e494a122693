"""scripts/prepare_data.py: it writes what it was given, the same each time, and whole or not at all."""

import collections
import importlib.util
import io
import contextlib
import fcntl
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from environment import ROOT

SCRIPT = pathlib.Path(ROOT) / "scripts" / "prepare_data.py"
spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
prepare_data = importlib.util.module_from_spec(spec)
sys.dont_write_bytecode = True
spec.loader.exec_module(prepare_data)
import byte_tokenizer  # noqa: E402
import text_sources  # noqa: E402: prepare_data.py has put its folder into the path
import text_tokenizers  # noqa: E402
import token_shards  # noqa: E402
import token_workers  # noqa: E402

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(os.environ.get("TRAIN_GPT") or ROOT + "/build/train_gpt")), "tokenize_text")
os.environ["TOKENIZE_TEXT"] = PROGRAM


def read_shard(path):
    data = pathlib.Path(path).read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    width, code = {(20240520, 1): (2, "H"), (20240801, 7): (4, "I")}[magic, version]
    assert len(data) == 1024 + count * width and not any(data[12:96] + data[132:1024])
    return list(struct.unpack(f"<{count}{code}", data[1024:]))


def read_vocabulary(path):
    data = pathlib.Path(path).read_bytes()
    magic, version, count, end_of_text, zero = struct.unpack("<8s4I", data[:24])
    assert (magic, version, zero) == (b"GPTVOCAB", 1, 0)
    offsets = struct.unpack(f"<{count + 1}I", data[24 : 28 + 4 * count])
    text = data[28 + 4 * count :]
    assert offsets[0] == 0 and offsets[-1] == len(text)
    return [text[begin:end] for begin, end in zip(offsets, offsets[1:])], end_of_text


class Case(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def run_script(self, *arguments, out="out/x"):
        """Returns exit status, stdout and stderr."""
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                status = prepare_data.main([*map(str, arguments), "--out", str(self.folder / out)])
            except SystemExit as end:
                status = end.code
        return status, output.getvalue(), errors.getvalue()

    def prepare(self, *arguments, out="out/x"):
        status, output, errors = self.run_script(*arguments, out=out)
        self.assertEqual(status, 0, errors)
        return output

    def shards(self, split, out="out/x"):
        prefix = self.folder / out
        return sorted(prefix.parent.glob(f"{prefix.name}_{split}_*.bin"))

    def documents(self, split, out="out/x", end_of_text=256):
        """Returns the documents in a split's shards, as tuples of tokens."""
        documents = []
        for token in (token for shard in self.shards(split, out) for token in read_shard(shard)):
            if token == end_of_text:
                documents.append([])
            else:
                documents[-1].append(token)
        return documents

    def everything(self, out="out/x"):
        return [bytes(document) for split in ("train", "val") for document in self.documents(split, out)]


class Bytes(Case):
    def write_texts(self, count=200, size=300):
        generator = random.Random(1)
        texts = []
        for i in range(count):
            texts.append(bytes(generator.choices(range(1, 256), k=generator.randint(1, size))))
            self.write(f"texts/{i % 7}/{i:03d}.h", texts[-1])
        return texts

    def test_each_document_is_there_once(self):
        texts = self.write_texts()
        output = self.prepare(self.folder / "texts")
        self.assertEqual(collections.Counter(self.everything()), collections.Counter(texts))
        train, val = self.documents("train"), self.documents("val")
        self.assertTrue(1 <= len(val) <= 30, len(val))  # of 200, one in twenty
        for split, documents in ("train", train), ("val", val):
            tokens = sum(map(len, documents)) + len(documents)
            self.assertIn(f"{split}: {len(documents)} documents, {tokens:,} tokens, 1 shard", output)

    def test_vocabulary(self):
        self.write_texts(50)
        self.prepare(self.folder / "texts")
        table, end_of_text = read_vocabulary(self.folder / "out/x_vocabulary.bin")
        self.assertEqual(table, [bytes([i]) for i in range(256)] + [b"<|endoftext|>"])
        self.assertEqual(end_of_text, 256)

    def test_same_input_same_files(self):
        """The output does not depend on the order in which the system lists a folder, nor on Python's hash seed."""
        self.write_texts()
        for i in range(20):  # second names of files: which name counts must not depend on that order either
            os.symlink(self.folder / f"texts/{i % 7}/{i:03d}.h", self.folder / f"texts/{i % 7}/link_{i}.h")
        self.prepare(self.folder / "texts")
        walk = os.walk

        def other_order(*arguments, **options):
            for parent, folders, names in walk(*arguments, **options):
                folders.reverse()
                yield parent, folders, names[::-1]

        with mock.patch("os.walk", other_order):
            self.prepare(self.folder / "texts", out="other/x")
        subprocess.run(
            [sys.executable, SCRIPT, self.folder / "texts", "--out", self.folder / "third/x"],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "7"},
            stdout=subprocess.DEVNULL,
        )
        for name in "x_train_000.bin", "x_val_000.bin", "x_vocabulary.bin":
            expected = (self.folder / "out" / name).read_bytes()
            self.assertEqual((self.folder / "other" / name).read_bytes(), expected)
            self.assertEqual((self.folder / "third" / name).read_bytes(), expected)

    def test_documents_are_mixed(self):
        for i in range(100):
            self.write(f"texts/{i:03d}.txt", f"{i:03d}")
        self.prepare(self.folder / "texts", "--val-fraction", 0)
        order = [int(bytes(document)) for document in self.documents("train")]
        self.assertEqual(sorted(order), list(range(100)))
        self.assertLess(sum(b == a + 1 for a, b in zip(order, order[1:])), 10)

    def test_copies_count_once(self):
        for i in range(40):
            self.write(f"texts/{i}.txt", f"same {i // 4}")
        self.assertIn("left out 30 copies", self.prepare(self.folder / "texts", "--val-fraction", 0))
        self.assertEqual(len(self.everything()), 10)
        self.prepare(self.folder / "texts", "--val-fraction", 0.5, "--keep-copies")
        train, val = (collections.Counter(map(bytes, self.documents(split))) for split in ("train", "val"))
        self.assertEqual(sum(train.values()) + sum(val.values()), 40)
        self.assertFalse(train.keys() & val.keys())  # copies are in one split only

    def test_include_and_max_bytes(self):
        self.write_texts(100)
        self.write("texts/readme.txt", "not this")
        self.write("texts/sub/deep.H", "nor this")
        output = self.prepare(self.folder / "texts", "--include", "*.h", "--max-bytes", "2K", "--val-fraction", 0.4)
        self.assertIn("read 2,000 bytes", output)
        self.assertEqual(sum(map(len, self.everything())), 2000)
        self.prepare(self.folder / "texts", "--include", "*.txt", "--include", "sub/*", "--val-fraction", 0)
        self.assertEqual(sorted(self.everything()), [b"nor this", b"not this"])

    def test_one_long_file_has_a_validation_part(self):
        text = "".join(f"line {i} of the book\n" for i in range(20000)).encode()
        self.prepare(self.write("book.txt", text))
        documents = self.everything()
        self.assertEqual(sum(map(len, documents)), len(text))
        self.assertEqual(b"".join(sorted(documents, key=text.index)), text)
        self.assertTrue(all(document.endswith(b"\n") for document in documents))
        val = sum(map(len, self.documents("val")))
        self.assertTrue(0.01 < val / len(text) < 0.12, val / len(text))
        self.prepare(self.folder / "book.txt", "--val-fraction", 0)  # uncut
        self.assertEqual(self.everything(), [text])
        self.prepare(self.write("one_line.txt", bytes(random.Random(2).choices(b"ab", k=100000))))
        self.assertEqual(sum(map(len, self.everything())), 100000)

    def test_binary_files_are_left_out_of_folders(self):
        self.write("texts/a.txt", "text")
        self.write("texts/b.o", b"\x7fELF\0\0")
        status, _, errors = self.run_script(self.folder / "texts", "--val-fraction", 0)
        self.assertEqual(status, 0)
        self.assertEqual(self.everything(), [b"text"])
        self.assertIn("left out 1 files", errors)
        status, _, errors = self.run_script(self.folder / "texts/b.o", "--val-fraction", 0)
        self.assertEqual(status, 2)
        self.assertIn("texts/b.o: is no text: it holds zero bytes", errors)

    def test_a_file_with_two_names_counts_once(self):
        path = self.write("texts/a.txt", "text")
        os.symlink(path, self.folder / "texts/b.txt")
        os.symlink(self.folder / "texts", self.folder / "texts/loop")
        self.prepare(self.folder / "texts", path, "--val-fraction", 0, "--keep-copies")
        self.assertEqual(self.everything(), [b"text"])

    def test_shards(self):
        texts = self.write_texts(300)
        total = sum(map(len, texts)) + len(texts)
        for shard_tokens in 100, 1000, 7777, total - 1, total, total + 1:
            with self.subTest(shard_tokens=shard_tokens):
                self.prepare(self.folder / "texts", "--shard-tokens", shard_tokens, "--val-fraction", 0, out="one/x")
                sizes = [len(read_shard(shard)) for shard in self.shards("train", "one/x")]
                self.assertEqual(sum(sizes), total)
                self.assertTrue(all(size == shard_tokens for size in sizes[:-1]))
                self.assertTrue(len(sizes) == 1 or shard_tokens / 2 <= sizes[-1] <= 1.5 * shard_tokens, sizes)
                self.assertEqual(collections.Counter(self.everything("one/x")), collections.Counter(texts))
                self.assertEqual(
                    [shard.name for shard in self.shards("train", "one/x")],
                    [f"x_train_{i:03d}.bin" for i in range(len(sizes))],
                )

    def test_a_run_does_not_read_what_it_wrote(self):
        for i in range(50):
            self.write(f"texts/{i}.txt", f"text {i}")
        found = []
        for _ in range(2):
            self.prepare(self.folder / "texts", out="texts/x")
            found.append({path.name: path.read_bytes() for path in (self.folder / "texts").glob("x*")})
        self.assertEqual(*found)

    def test_shards_of_an_earlier_run_go(self):
        self.write_texts(100)
        kept = [
            self.write(f"out/{name}", "")
            for name in ("x_train.bin", "x_train_0.bin", "xy_train_005.bin", "x_train_005.bin.old")
        ]
        self.prepare(self.folder / "texts", "--shard-tokens", 500)
        self.assertGreater(len(self.shards("train")), 5)
        self.prepare(self.folder / "texts")
        self.assertEqual([path.name for path in self.shards("train") if path.stat().st_size], ["x_train_000.bin"])
        self.assertTrue(all(map(os.path.exists, kept)))


class Jsonl(Case):
    def write_lines(self, *lines):
        return self.write(
            "texts.jsonl", "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
        )

    def test_each_line_is_a_document(self):
        texts = [f"text {i} é \u20ac \U0001f389\n" for i in range(100)]
        path = self.write_lines(*[{"id": i, "text": text} for i, text in enumerate(texts)], "", "   ")
        self.prepare(path)
        self.assertEqual(sorted(self.everything()), sorted(text.encode() for text in texts))

    def test_field(self):
        path = self.write_lines(
            {"text": "no", "content": "yes"}, {"content": ""}, {"content": "\\ud83d".encode().decode("unicode_escape")}
        )
        self.prepare(path, "--jsonl-field", "content", "--val-fraction", 0)
        self.assertEqual(sorted(self.everything()), [b"?", b"yes"])

    def test_mistakes_name_file_and_line(self):
        good = {"text": "good"}
        for bad, words in [
            ("{", "line 3: not JSON"),
            ("[1]", "line 3: holds a list; expected an object"),
            ({"body": "b", "id": 3}, "line 3: has no text in the field 'text'; fields with text: 'body'"),
            ({"text": None}, "line 3: has no text"),
            ("\xff\xfe", "line 3: not JSON"),
            ('\v{"text": "t"}', "line 3: not JSON"),
            ('{"text": ' + "[" * 100000, "line 3: not JSON"),
        ]:
            for tokenizer in [], ["--tokenizer", ROOT + "/test/golden/tokenizer_gpt2.json"]:  # Python's and the engine's
                with self.subTest(words, bad=str(bad)[:20], tokenizer=tokenizer):
                    path = self.write_lines(good, "", bad, good)
                    status, _, errors = self.run_script(path, *tokenizer)
                    self.assertEqual(status, 2)
                    self.assertIn("texts.jsonl, " + words, errors)
                    self.assertFalse(os.listdir(self.folder / "out"))


class Mistakes(Case):
    def assert_mistake(self, words, *arguments):
        status, output, errors = self.run_script(*arguments)
        self.assertEqual((status, output), (2, ""))
        self.assertIn(words, errors)
        self.assertNotIn("Traceback", errors)

    def test_mistakes(self):
        text = self.write("texts/a.txt", "text")
        empty = self.write("empty.txt", "")
        self.assert_mistake("/missing: no such file or folder", self.folder / "missing")
        self.assert_mistake("no file below it matches --include *.h", self.folder / "texts", "--include", "*.h")
        self.assert_mistake("holds no text", empty)
        self.assert_mistake("'-3' is not", text, "--max-bytes=-3")
        self.assert_mistake("'12X' is not a positive number", text, "--max-bytes", "12X")
        self.assert_mistake("'1.5' is not a number from 0", text, "--val-fraction", "1.5")
        self.assert_mistake("expected at most 1G", text, "--shard-tokens", "2G")
        self.assert_mistake("fell to val", text, "--val-fraction", "0.000001")
        self.assert_mistake("--end-of-text names a token of --tokenizer", text, "--end-of-text", "</s>")
        self.assert_mistake("unrecognized arguments: --incl", text, "--incl", "*")
        self.assert_mistake("--seq-length is of --chat, which is not given", text, "--seq-length", "64")
        self.assert_mistake("--train-on is of --chat, which is not given", text, "--train-on", "last")
        self.assert_mistake("--max-bytes does nothing with --chat", text, "--chat", "--max-bytes", "5")
        self.assert_mistake("--text-field does nothing with --chat", text, "--chat", "--jsonl-field", "body")
        with mock.patch.object(token_shards, "MAX_SHARDS", 3):
            self.assert_mistake("--shard-tokens 1 makes more than 3 shards of train; raise it", text, "--val-fraction", "0", "--shard-tokens", "1")
        self.assertFalse(os.listdir(self.folder / "out"))
        golden = os.path.join(ROOT, "test/golden/tokenizer_gpt2.json")
        with mock.patch.dict(sys.modules, {"tokenizers": None}), mock.patch.object(token_workers, "find_program", lambda: None):
            words = "build/tokenize_text is not built: 'make build/tokenize_text' makes it; the Python package 'tokenizers' would do"
            self.assert_mistake(words, text, "--tokenizer", golden)

    def test_counts(self):
        for text, value in ("12", 12), ("40M", 40_000_000), ("2Ki", 2048), ("1.5GiB", 3 << 29), ("3k", 3000):
            self.assertEqual(prepare_data.count(text), value)

    def test_a_second_run_with_the_same_prefix_is_refused(self):
        """A second run is refused until the first one ends, in whatever way; another prefix in the same folder is
        free."""
        arguments = [self.write("text.txt", "text " * 100), "--val-fraction", 0]
        (self.folder / "out").mkdir()
        with open(self.folder / "out/x.lock", "a") as first:
            fcntl.flock(first, fcntl.LOCK_EX)
            status, _, errors = self.run_script(*arguments)
            self.assertEqual(status, 2)
            self.assertIn("x: another run is writing there; wait until it ends", errors)
            self.assertEqual(os.listdir(self.folder / "out"), ["x.lock"])
            self.prepare(*arguments, out="out/y")
        self.prepare(*arguments)
        self.assertFalse((self.folder / "out/x.lock").exists())

    def test_an_interrupted_run_leaves_the_earlier_shards(self):
        for i in range(100):
            self.write(f"texts/{i}.txt", f"text {i}")
        self.prepare(self.folder / "texts", "--shard-tokens", 100)
        before = {path: path.read_bytes() for path in (self.folder / "out").iterdir()}
        add = token_shards.ShardWriter.add
        for error in KeyboardInterrupt, OSError(28, "No space left on device"):
            calls = []

            def failing_add(writer, data, documents):
                calls.append(data)
                if len(calls) == 20:
                    raise error
                add(writer, data, documents)

            with mock.patch.object(token_shards.ShardWriter, "add", failing_add), mock.patch.object(
                token_shards, "WRITE_BYTES", 20
            ), mock.patch.object(text_sources, "BLOCK_BYTES", 20):
                status, _, errors = self.run_script(self.folder / "texts", "--shard-tokens", 50)
            self.assertNotEqual(status, 0)
            self.assertNotIn("Traceback", errors)
            self.assertEqual({path: path.read_bytes() for path in (self.folder / "out").iterdir()}, before)


class Vocabularies(Case):
    """The bytes of tokens come from the description in a tokenizer.json."""

    def test_byte_level_alphabet_is_a_bijection(self):
        alphabet = text_tokenizers.byte_level_alphabet()
        self.assertEqual(sorted(alphabet.values()), list(range(256)))
        self.assertEqual((alphabet["A"], alphabet["Ġ"], alphabet["Ċ"]), (65, 32, 10))  # GPT-2's space and newline

    def test_byte_level(self):
        description = {"decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 3, "content": "<|endoftext|>"}]}
        ids = {"Ġint": 0, "Ċ": 1, "Ã©": 2, "<|endoftext|>": 3, "Ã": 5}
        self.assertEqual(
            text_tokenizers.token_bytes(description, ids), [b" int", b"\n", "é".encode(), b"<|endoftext|>", b"", b"\xc3"]
        )

    def test_sentencepiece(self):
        description = {
            "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]},
            "added_tokens": [],
        }
        ids = {"<0x0A>": 0, "▁the": 1, "é": 2, "Ġ": 3}
        self.assertEqual(text_tokenizers.token_bytes(description, ids), [b"\n", b" the", "é".encode(), "Ġ".encode()])


class Tokenizers(Case):
    """Uses the `tokenizers` package, where it is installed."""

    def setUp(self):
        super().setUp()
        try:
            import tokenizers
            from tokenizers import decoders, models, pre_tokenizers, processors, trainers
        except ImportError:
            self.skipTest("the package 'tokenizers' is not installed")
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(["int main(void) { return 0; }\n"] * 10, trainer)
        tokenizer.enable_truncation(4)  # must not be applied, and neither must padding
        tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
        self.file = str(self.folder / "tokenizer.json")
        tokenizer.save(self.file)

    def test_tokens_decode_to_the_text(self):
        texts = [f"int main(void) {{ return {i}; }} // é \u20ac\n" for i in range(100)]
        for i, text in enumerate(texts):
            self.write(f"texts/{i}.c", text)
        with mock.patch.object(text_sources, "BLOCK_BYTES", 300):
            self.prepare(self.folder / "texts", "--tokenizer", self.file)
        table, end_of_text = read_vocabulary(self.folder / "out/x_vocabulary.bin")
        self.assertEqual(table[end_of_text], b"<|endoftext|>")
        self.prepare(self.folder / "texts", out="bytes/x")
        tokens = 0
        for split in "train", "val":  # each document is in the split in which it is as bytes
            documents = self.documents(split, end_of_text=end_of_text)
            decoded = [b"".join(table[token] for token in document) for document in documents]
            self.assertEqual(decoded, list(map(bytes, self.documents(split, "bytes/x"))))
            self.assertTrue(decoded and all(text.decode() in texts for text in decoded))
            tokens += sum(map(len, documents))
        self.assertLess(tokens, sum(map(len, texts)))  # tokens are longer than bytes

    def test_files_go_along(self):
        """The files beside the tokenizer are copied, whatever it is called; the copies can be given again as they
        are."""
        self.write("texts/a.c", "int main")
        config, merges = '{"eos_token": "<|endoftext|>"}', "#version: 0.2\n"
        self.write("tokenizer_config.json", config)
        self.write("merges.txt", merges)
        os.rename(self.file, self.folder / "other.json")
        original = (self.folder / "other.json").read_bytes()
        copies = {"tokenizer.json": original, "tokenizer_config.json": config.encode(), "merges.txt": merges.encode()}
        every = ["--val-fraction", "0"]

        def found():
            return {p.name: p.read_bytes() for p in self.folder.glob("out/*") if p.suffix != ".bin" and not p.name.endswith("_manifest.json")}

        expected = {f"x_{name}": content for name, content in copies.items()}
        for tokenizer in "other.json", "out/x_tokenizer.json":
            self.prepare(self.folder / "texts", "--tokenizer", self.folder / tokenizer, *every)
            self.assertEqual(found(), expected)
        os.remove(self.folder / "merges.txt")
        self.prepare(self.folder / "texts", "--tokenizer", self.folder / "other.json", *every)
        del expected["x_merges.txt"]
        self.assertEqual(found(), expected)
        self.prepare(self.folder / "texts", *every)  # bytes: the shards have no tokenizer now
        self.assertEqual(found(), {f"x_{name}": content for name, content in byte_tokenizer.files().items()})

    def test_mistakes(self):
        text = self.write("a.txt", "text")
        broken = self.write("broken.json", "{")
        description = json.loads(pathlib.Path(self.file).read_text())
        description["added_tokens"].append({**description["added_tokens"][0], "id": 400, "content": "<far>"})
        holes = self.write("holes.json", json.dumps(description))
        for words, *arguments in [
            ("no such file", "--tokenizer", "/missing.json"),
            ("broken.json: ", "--tokenizer", broken),
            ("says that <far> is token 400, but", "--tokenizer", holes),
            ("has no token </s>; name the one", "--tokenizer", self.file, "--end-of-text", "</s>"),
        ]:
            status, _, errors = self.run_script(text, *arguments)
            self.assertEqual(status, 2)
            self.assertIn(words, errors)


if __name__ == "__main__":
    unittest.main()
