"""scripts/prepare_data.py: what files hold is read whatever their names, the engine's workers make of it what Python
makes of it, and a run that was killed goes on."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import unittest
from unittest import mock

from environment import ROOT
from test_prepare_data import PROGRAM, SCRIPT, Case, prepare_data, text_sources, token_shards, token_workers

GOLDEN = os.path.join(ROOT, "test/golden/tokenizer_gpt2.json")
TEXTS = [f"text {i} é \u20ac \U0001f389, with [brackets] and \"quotes\"\n" * (1 + i % 3) for i in range(40)]
needs_program = unittest.skipUnless(os.path.exists(PROGRAM), "tokenize_text is not built")


def package(name):
    try:
        return __import__(name)
    except ImportError:
        return None


def lines(texts):
    return b"".join(json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(texts))


def tar(contents):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def parquet(texts, **options):
    pa = package("pyarrow")
    import pyarrow.parquet

    data = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"id": list(range(len(texts))), "text": texts, "meta": [{"body": text} for text in texts]}), data, **options)
    return data.getvalue()


def arrow_stream(texts):
    pa = package("pyarrow")
    data = io.BytesIO()
    table = pa.table({"text": texts})
    with pa.ipc.new_stream(data, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return data.getvalue()


def forms(texts):
    """Returns {name: the texts in a form of file}."""
    array = json.dumps([{"text": text} for text in texts], indent=1).encode()
    named = {f"{i:03d}.txt": text.encode() for i, text in enumerate(texts)}
    made = {
        "lines": lines(texts),
        "lines with a BOM and CRLF": b"\xef\xbb\xbf" + lines(texts).replace(b"\n", b"\r\n"),
        "array": array,
        "gzip": gzip.compress(lines(texts[:9])) + gzip.compress(lines(texts[9:])),
        "bzip2": bz2.compress(lines(texts[:9])) + bz2.compress(lines(texts[9:])),
        "xz": lzma.compress(lines(texts[:9])) + lzma.compress(lines(texts[9:])),
        "array, gzip": gzip.compress(array),
        "tar": tar({**named, "000.json": b'{"width": 3}', "000.jpg": b"\xff\xd8\xff\0"}),
        "tar, gzip": gzip.compress(tar(named)),
    }
    if zstandard := package("zstandard"):
        frames = [zstandard.compress(lines(part)) for part in (texts[:9], texts[9:])]
        made["zstd"] = b"\x50\x2a\x4d\x18\4\0\0\0skip".join([frames[0], frames[1]])
    if package("pyarrow"):
        made["parquet"] = parquet(texts, row_group_size=16)
        made["parquet, of zstd and dictionaries"] = parquet(texts, compression="zstd")
        made["arrow"] = arrow_stream(texts)
    return made


class Forms(Case):
    def expect(self, texts, *arguments):
        self.prepare(*arguments, "--val-fraction", 0)
        self.assertEqual(sorted(self.everything()), sorted(text.encode() for text in texts))

    def refused(self, *arguments, **options):
        """Returns the one message of a run that is refused, which leaves nothing."""
        status, output, errors = self.run_script(*arguments, **options)
        self.assertEqual((status, output), (2, ""), errors)
        self.assertEqual(errors.count("\n"), 1, errors)
        if (self.folder / "out").exists():
            self.assertEqual(os.listdir(self.folder / "out"), [])
        return errors

    def test_a_file_is_what_it_holds(self):
        for block_bytes in 500, 1 << 20:
            for form, content in forms(TEXTS).items():
                with self.subTest(form), mock.patch.object(text_sources, "BLOCK_BYTES", block_bytes):
                    self.expect(TEXTS, self.write("any name.txt", content))

    def test_compressed_text_is_cut_as_text_is(self):
        text = "".join(f"line {i} of the book\n" for i in range(5000))
        self.prepare(self.write("book.txt", text), out="out/a")
        self.prepare(self.write("book.gz", gzip.compress(text.encode())), out="out/b")
        line = "".join(f"日本語{i}" for i in range(9000))  # no line ends: characters stay whole
        self.prepare(self.write("line.txt", line), out="out/c")
        self.prepare(self.write("line.gz", gzip.compress(line.encode())), out="out/d")
        for split in "train", "val":
            documents = [sorted(map(bytes, self.documents(split, out))) for out in ("out/c", "out/d")]
            self.assertEqual(*documents)
            self.assertTrue([document.decode() for document in documents[0]])
            documents = [sorted(map(bytes, self.documents(split, out))) for out in ("out/a", "out/b")]
            self.assertEqual(*documents)
            self.assertTrue(documents[0])

    def test_standard_input(self):
        for content in lines(TEXTS), gzip.compress(lines(TEXTS)):
            subprocess.run([sys.executable, "-B", SCRIPT, "-", "--val-fraction", "0", "--out", self.folder / "out/x"], input=content, check=True, stdout=subprocess.DEVNULL)
            self.assertEqual(sorted(self.everything()), sorted(text.encode() for text in TEXTS))

    def test_a_folder_of_a_mixture(self):
        expected = []
        for number, (form, content) in enumerate(forms(["TEXT %d %d" for _ in range(1)]).items()):
            self.write(f"mixed/{number}", content)
            expected.append("TEXT %d %d")
        self.write("mixed/code.json", '{"name": "no record of text"}')
        self.write("mixed/picture.png", b"\x89PNG\r\n\0")
        self.write("mixed/nothing.txt", b"")
        os.mkfifo(self.folder / "mixed/pipe")
        os.symlink("nowhere", self.folder / "mixed/link")
        status, _, errors = self.run_script(self.folder / "mixed", "--val-fraction", 0, "--keep-copies")
        self.assertEqual(status, 0, errors)
        self.assertEqual(sorted(map(bytes.decode, self.everything())), sorted([*expected, '{"name": "no record of text"}']))
        for said in "left out 1 files: a picture or a sound, such as", "left out 1 files: empty", "pipe: a pipe or a device; left out", "link: a link to nothing":
            self.assertIn(said, errors)

    def test_chats_compressed_and_in_an_array(self):
        chats = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(9)]
        plain = "".join(json.dumps(chat) + "\n" for chat in chats).encode()
        found = set()
        for content in plain, gzip.compress(plain), json.dumps(chats, indent=1).encode():
            self.prepare(self.write("chats", content), "--chat", "--seq-length", 64, "--val-fraction", 0)
            found.add((self.folder / "out/x_train_000.bin").read_bytes())
        self.assertEqual(len(found), 1)

    def test_fields_within_fields(self):
        records = [{"meta": {"body": text}, "text": 1} for text in TEXTS]
        path = self.write("x.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        self.expect(TEXTS, path, "--text-field", "meta.body")
        self.expect(TEXTS, self.write("x.json", json.dumps(records)), "--text-field", "meta.body")
        if package("pyarrow"):
            self.expect(TEXTS, self.write("x", parquet(TEXTS)), "--text-field", "meta.body")

    def test_what_is_cut_off_is_refused(self):
        for form, content in forms(TEXTS * 9).items():
            if not form.startswith("lines"):
                with self.subTest(form):
                    errors = self.refused(self.write("cut", content[: len(content) * 2 // 3]), "--val-fraction", 0)
                    self.assertIn(f"{self.folder}/cut", errors)
                    self.assertRegex(errors, "cut off|damaged")
        content = tar({f"{i}.txt": text.encode() for i, text in enumerate(TEXTS)})
        header = content.index(b"5.txt")
        for data in content[:header], content[: header + 300], content[:header] + b"damaged" + content[header + 7 :]:
            self.assertIn("the tar is cut off or damaged", self.refused(self.write("cut", data)))
        self.assertIn("a.json, after element 1: not JSON", self.refused(self.write("cut", tar({"a.json": b'[{"text": "a"}, {"text": "'}))))
        self.assertIn("the array ends, and '[]' follows", self.refused(self.write("cut", b'[{"text": "a"}]\n' + b" " * (1 << 21) + b"[]")))
        damaged = bytearray(gzip.compress(lines(TEXTS)))
        damaged[100:110] = bytes(10)
        self.assertIn("its gzip data is damaged", self.refused(self.write("damaged", bytes(damaged))))

    def test_what_is_no_text_is_refused(self):
        for content, words in [
            (b"PK\3\4" + bytes(99), "is a zip archive; what would read it: unpack it"),
            (b"SQLite format 3\0", "is an SQLite database"),
            (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the file; what would read it: 'git lfs pull'"),
            ("text".encode("utf-16"), "is UTF-16; what would read it: 'iconv"),
            (b"\xff\xd8\xff\xe0", "is a picture or a sound"),
            (b"a\0", "is no text: it holds zero bytes"),
            (gzip.compress(b"PK\3\4" + bytes(99)), "holds a zip archive"),
            (b"text\n" * 20000 + b"\0", "is no text: byte 100000 is zero"),
        ]:
            with self.subTest(words):
                self.assertIn(words, self.refused(self.write("file.txt", content), "--val-fraction", 0))
        self.assertIn("neither an object a line", self.refused(self.write("x.json", '{\n "data": []\n}')))
        self.assertIn("x.json, element 2: has no text in the field 'text'", self.refused(self.write("x.json", '[{"text": "a"}, {"b": "c"}]')))
        self.assertIn("x.json, after element 1: not JSON", self.refused(self.write("x.json", '[{"text": "a"} {"b": "c"}]')))

    def test_a_text_may_begin_as_another_form(self):
        texts = ["ORCHESTRA", "RIFF", "PARENT", "x^2", "GIF89 files", "[section]", "{% block %}", "Object"]
        for i, text in enumerate(texts):
            self.write(f"words/{i}.txt", text)
        self.expect(texts, self.folder / "words")

    def test_a_package_that_is_missing_is_named(self):
        with mock.patch.dict(sys.modules, {"zstandard": None, "compression": None}):
            self.assertIn("pip install zstandard", self.refused(self.write("x", b"\x28\xb5\x2f\xfd" + bytes(9))))
        with mock.patch.dict(sys.modules, {"pyarrow": None}):
            self.assertIn("pip install pyarrow", self.refused(self.write("x", b"PAR1" + bytes(9))))

    @unittest.skipUnless(package("pyarrow"), "pyarrow is not installed")
    def test_columns(self):
        path = self.write("x", parquet(TEXTS))
        self.assertIn("has no column 'content'; columns with text: 'text'; name one by --text-field", self.refused(path, "--text-field", "content"))
        self.assertIn("its column 'id' is int64 and no text", self.refused(path, "--text-field", "id"))
        self.assertIn("x, row 3: has no text: it is null", self.refused(self.write("x", parquet([*TEXTS[:2], None]))))

    @unittest.skipUnless(package("pyarrow"), "pyarrow is not installed")
    def test_a_folder_of_save_to_disk(self):
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        state = {"_data_files": [{"filename": name} for name in names]}
        for split in "train", "test":
            for name, texts in zip(names, (TEXTS[:11], TEXTS[11:])):
                self.write(f"set/{split}/{name}", arrow_stream(texts))
            self.write(f"set/{split}/state.json", json.dumps(state))
            self.write(f"set/{split}/dataset_info.json", "{}")
        self.write("set/dataset_dict.json", '{"splits": ["train", "test"]}')
        self.assertIn("set: is a data set of the splits train, test; name one", self.refused(self.folder / "set"))
        self.write("set/test/state.json", json.dumps({**state, "_indices_data_files": [{"filename": "i"}]}))
        self.assertIn("flatten_indices", self.refused(self.folder / "set/test"))
        self.expect(TEXTS, self.folder / "set/train")


class Options:
    text_field, val_fraction, workers = "text", 0.25, 2


class Tokenizer:
    path, width = GOLDEN, 2
    with open(GOLDEN, encoding="utf-8") as file:
        end_of_text = next(token["id"] for token in json.load(file)["added_tokens"] if token["content"] == "<|endoftext|>")


@needs_program
class Engine(Case):
    def encode(self, block):
        encoder = token_workers.ProcessEncoder(Tokenizer, Options)
        try:
            return encoder.encode(block)
        finally:
            encoder.close()

    def test_texts_are_those_of_python(self):
        """The digest and the size of what the worker finds in a line are those of what Python's parser finds."""
        generator = random.Random(3)
        odd = ['{"text": "\\ud83d\\ude00\\u00e9\\n\\"\\\\\\/"}', '{"a": [1, -2.5e+7, {"text": "no"}, [], {}], "text": "yes", "b": null}', ' {"text":""} \r', "",
               '{"te\\u0078t": "by an escape"}', '{"text": "first", "text": "last"}', '{"text": "half \\ud83d"}', '{"n": NaN, "text": "x"}',
               '{"n": %s, "text": "x"}' % ("9" * 400), '{"text": "x", "deep": %s1%s}' % ("[" * 90, "]" * 90), '{"text": "\\u0000", "t": true}', "\t"]  # fmt: skip
        for line in range(300):
            text = "".join(generator.choices("ab \n\"\\\t\u00e9\u20ac\U0001f389\x00\x1f/", k=generator.randint(0, 40)))
            record = {"x": {"text": [text]}, "text": text, "y": generator.choice([1e300, -0.0, True, None, ["", {}]])}
            odd.append(json.dumps(record, ensure_ascii=line % 2 == 0))
        for data in ("\n".join(odd).encode(), *(line.encode() for line in odd)):
            block = text_sources.Block(0, text_sources.LINES, data, str, 0)
            texts = list(block.texts("text"))
            encoded = self.encode(block) if len(data) > 1000 else None
            if encoded:
                self.assertEqual(list(encoded.digests), [token_workers.digest(text) for text in texts])
                self.assertEqual(list(encoded.sizes), [len(text) for text in texts])
                self.assertEqual(encoded.documents[1], sum(token_workers.digest(text) < 2**62 for text in texts if text))

    def test_a_line_is_refused_where_python_refuses_it(self):
        """No line that Python refuses gets through the worker, and its message is Python's."""
        good = '{"text": "good", "n": [1, {"a": -0.5e-3}], "t": true}'
        encoder = token_workers.ProcessEncoder(Tokenizer, Options)
        generator = random.Random(5)
        refused = 0
        for _ in range(300):
            line = bytearray(good.encode())
            for _ in range(generator.randint(1, 2)):
                line[generator.randrange(len(line))] = generator.choice(b'{}[],:"\\01.eE+-truefalsn \t\x80\xff')
            block = text_sources.Block(0, text_sources.LINES, bytes(line), str, 0)
            try:
                expected = [token_workers.digest(text) for text in block.texts("text")]
            except text_sources.Mistake:
                refused += 1
                with self.assertRaises(text_sources.Mistake, msg=line):
                    encoder.encode(block)
                continue
            self.assertEqual(list(encoder.encode(block).digests), expected, line)
        encoder.close()
        self.assertTrue(50 < refused < 295, refused)

    def test_digests_of_all_lengths(self):
        texts = [bytes(random.Random(n).choices(range(256), k=n)) for n in (*range(1, 300), 1000, 4096)]
        encoded = self.encode(text_sources.block_of_texts(0, texts, str, 0))
        self.assertEqual(list(encoded.digests), [token_workers.digest(text) for text in texts])

    def test_ids_are_those_of_the_golden_file(self):
        with open(os.path.join(ROOT, "test/golden/tokenizer_ids.json"), encoding="utf-8") as file:
            golden = json.load(file)
        texts = [text.encode() for text in golden["texts"]]
        encoded = self.encode(text_sources.block_of_texts(0, texts, str, 0))
        found, at = [], [0, 0]
        for key, count in zip(encoded.digests, encoded.counts):
            split = key < 2**62
            found.append(list(struct.unpack_from(f"<{count}H", encoded.data[split], 2 * at[split])))
            at[split] += count
        self.assertEqual(found, [[Tokenizer.end_of_text, *ids] if text else [] for text, ids in zip(texts, golden["gpt2"])])

    def test_files_do_not_depend_on_workers(self):
        for i, text in enumerate(TEXTS * 3):
            self.write(f"texts/{i}.txt", f"{i} {text}")
        self.write("texts/a.jsonl", lines(TEXTS))
        self.write("texts/b.gz", gzip.compress(lines([*TEXTS, "more"])))
        found = []
        with mock.patch.object(text_sources, "BLOCK_BYTES", 700):
            for workers in 1, 2, 5:
                self.prepare(self.folder / "texts", "--tokenizer", GOLDEN, "--workers", workers, "--shard-tokens", 900)
                found.append({path.name: path.read_bytes() for path in (self.folder / "out").iterdir()})
        self.assertGreater(len(found[0]), 6)
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], found[2])
        manifest = json.loads(found[0]["x_manifest.json"])
        self.assertEqual(manifest["copies_left_out"], len(TEXTS))
        self.assertEqual(sum(source["documents"] for source in manifest["sources"]), manifest["train"]["documents"] + manifest["val"]["documents"])

    def test_copies_are_found_as_in_python(self):
        engine = token_workers.Seen()
        with mock.patch.object(token_workers, "find_program", lambda: None):
            plain = token_workers.Seen()
        generator = random.Random(6)
        for count in 0, 1, 70000, 70000:
            digests = token_workers.array.array("Q", [generator.randrange(100000) << 40 for _ in range(count)])
            self.assertEqual(engine.add(digests), plain.add(digests))
        engine.close()


class Kills(Case):
    ARGUMENTS = ["--shard-tokens", 600]

    def setUp(self):
        super().setUp()
        for i, text in enumerate(TEXTS * 3):
            self.write(f"texts/{i}.txt", f"{i} {text}")
        self.write("texts/a.jsonl", lines(TEXTS))
        self.write("texts/b.gz", gzip.compress(lines(TEXTS[::-1] + ["more"])))
        for target, name, value in (text_sources, "BLOCK_BYTES", 700), (prepare_data, "SAVE_SECONDS", 0), (token_shards, "WRITE_BYTES", 200):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def killed_at(self, blocks):
        """Runs in a child that is killed when it has written so many blocks; returns the signal, 0 where it ended."""
        child = os.fork()
        if child == 0:
            take, taken = prepare_data.TextRun.take, []

            def mortal(run, block, encoded):
                taken.append(block)
                if len(taken) > blocks:
                    os.kill(os.getpid(), signal.SIGKILL)
                take(run, block, encoded)

            with mock.patch.object(prepare_data.TextRun, "take", mortal):
                os._exit(self.run_script(self.folder / "texts", *self.ARGUMENTS)[0])
        return os.WTERMSIG(os.waitpid(child, 0)[1])

    def test_a_killed_run_goes_on(self):
        self.prepare(self.folder / "texts", *self.ARGUMENTS, out="whole/x")
        whole = {path.name: path.read_bytes() for path in (self.folder / "whole").iterdir()}
        ends, kills = 1, 0
        while ends and kills < 99:
            ends = self.killed_at(7)  # goes on from the kill before
            kills += ends != 0
            if ends:
                self.assertFalse(list((self.folder / "out").glob("*.bin")))  # nothing looks whole
                self.assertTrue((self.folder / "out/x.partial").exists())
                with open(sorted((self.folder / "out").glob("x_train_*.tmp"))[-1], "ab") as file:
                    file.write(b"behind what was saved")
        self.assertGreater(kills, 3)
        found = {path.name: path.read_bytes() for path in (self.folder / "out").iterdir()}
        found.pop("x.lock", None)
        self.assertEqual(found, whole)

    def killed_at_the_end(self, calls):
        """Runs in a child that is killed at so many changes of the folder when all blocks are there; returns the signal."""
        child = os.fork()
        if child == 0:
            publish, left = prepare_data.TextRun.publish, [calls]

            def mortal(function):
                def call(*arguments):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*arguments)

                return call

            def armed(run):
                for name in "fsync", "replace", "remove":
                    setattr(os, name, mortal(getattr(os, name)))
                publish(run)

            with mock.patch.object(prepare_data.TextRun, "publish", armed):
                os._exit(self.run_script(self.folder / "texts", *self.ARGUMENTS)[0])
        return os.WTERMSIG(os.waitpid(child, 0)[1])

    def test_a_run_killed_at_the_end_goes_on(self):
        out = self.folder / "out"
        self.prepare(self.folder / "texts", *self.ARGUMENTS)
        whole = {path.name: path.read_bytes() for path in out.iterdir()}
        shutil.rmtree(out)
        self.assertTrue(self.killed_at_the_end(1))
        shutil.copytree(out, self.folder / "before")
        self.assertGreater(len(list(out.glob("x_train*"))), len([name for name in whole if "train" in name]))  # the last is appended
        calls = 2
        while self.killed_at_the_end(calls):
            if (out / "x_manifest.json").exists():
                self.assertFalse(list(out.glob("*.tmp")))
            self.prepare(self.folder / "texts", *self.ARGUMENTS)
            self.assertEqual({path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".lock"}, whole, calls)
            shutil.rmtree(out)
            shutil.copytree(self.folder / "before", out)
            calls += 1
        self.assertGreater(calls, 20)

    def test_another_run_does_not_go_on(self):
        self.killed_at(7)
        status, _, errors = self.run_script(self.folder / "texts", "--shard-tokens", 500)
        self.assertEqual(status, 2)
        self.assertIn("x.partial: a run with other inputs or options was interrupted", errors)
        self.write("texts/a.jsonl", lines(TEXTS[1:]))
        self.assertEqual(self.run_script(self.folder / "texts", *self.ARGUMENTS)[0], 2)
        os.remove(self.folder / "out/x.partial")
        self.prepare(self.folder / "texts", *self.ARGUMENTS)
        self.assertFalse(list((self.folder / "out").glob("*partial*")))

    def test_an_interrupt_keeps_what_was_saved(self):
        take = prepare_data.TextRun.take
        for error, expected in (KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 2):
            taken = []

            def failing(run, block, encoded):
                taken.append(block)
                if len(taken) == 9:
                    raise error
                take(run, block, encoded)

            with mock.patch.object(prepare_data.TextRun, "take", failing):
                status, _, errors = self.run_script(self.folder / "texts", *self.ARGUMENTS)
            self.assertEqual(status, expected)
            self.assertIn("x.partial: what was done until then is kept; the same command goes on there", errors)
            self.assertNotIn("Traceback", errors)
        self.prepare(self.folder / "texts", *self.ARGUMENTS)

    def test_a_full_disk(self):
        """A limit on the size of files stands for the disk's; nothing was saved yet."""
        self.write("long.txt", "line of text\n" * 100000)
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300000, 300000))  # noqa: E731
        done = subprocess.run([sys.executable, "-B", SCRIPT, self.folder / "long.txt", "--keep-copies", "--out", self.folder / "full/x"],
                              preexec_fn=limit, capture_output=True, text=True, check=False)  # fmt: skip
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn("full/x", done.stderr)
        self.assertEqual(os.listdir(self.folder / "full"), [])


if __name__ == "__main__":
    unittest.main()
