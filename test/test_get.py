"""scripts/get.py: whole files with the right checksum or none, downloads that go on, one line where something fails. A
server on this host stands for the network. And how the scripts that users call end, scripts/mistakes.py."""
import contextlib
import hashlib
import http.server
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

from environment import ROOT, free_port

sys.path.insert(0, os.path.join(ROOT, "scripts"))
import get  # noqa: E402
import mistakes  # noqa: E402

TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 3000
MODEL = os.path.join(ROOT, "test/golden/huggingface/llama")


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves self.server.files, {path: bytes}: large files by way of a redirect, as huggingface.co does, with their
    SHA-256, others with git's SHA-1."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        at_store = self.path.startswith("/store")
        data = server.files.get(self.path[len("/store"):] if at_store else self.path)
        if data is None or server.status != 200:
            self.send_error(404 if data is None else server.status)
            return
        large = len(data) > 10000
        checksum = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        first = int(self.headers["Range"][len("bytes="):-1]) if self.headers.get("Range") else 0
        if large and not at_store:
            self.send_response(302)
            self.send_header("Location", "http://localhost:%d/store%s" % (server.server_port, self.path))
            self.send_header("X-Linked-Size", str(len(data)))
        elif first >= len(data) > 0:
            self.send_response(416)
        else:
            self.send_response(206 if first else 200)
        self.send_header("ETag" if not large else "X-Linked-Etag", '"%s"' % checksum.hexdigest())
        self.send_header("X-Repo-Commit", "c0ffee")
        sent = b"" if large and not at_store else data[first:]
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(sent[:server.cut])

    def log_message(self, *arguments):
        pass


class Get(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.files, self.server.asked, self.server.cut, self.server.status = {}, [], None, 200
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.url = "http://127.0.0.1:%d" % self.server.server_port
        for patch in (mock.patch.dict(os.environ, {"HF_ENDPOINT": self.url, "no_proxy": "*"}),
                      mock.patch.object(get, "SHAKESPEARE", (self.url + "/input.txt", hashlib.sha256(TEXT).hexdigest())),
                      mock.patch.dict(sys.modules, {"huggingface_hub": None})):
            patch.start()
            self.addCleanup(patch.stop)
        os.environ.pop("HF_TOKEN", None)

    def path(self, name):
        return os.path.join(self.folder, name)

    def get(self, *arguments, status=0):
        """Returns what get.py printed: its lines, or the one line that says why it failed."""
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            self.assertEqual(get.main(list(arguments)), status, error.getvalue())
        if status == 0:
            self.assertEqual(error.getvalue(), "")
            return out.getvalue().splitlines()
        self.assertRegex(error.getvalue(), "^get.py: [^\n]*\n$")
        return error.getvalue()

    def read(self, name):
        with open(self.path(name), "rb") as file:
            return file.read()

    def test_a_text_comes_once(self):
        self.server.files["/input.txt"] = TEXT
        lines = self.get("shakespeare", "--out", self.folder)
        self.assertIn("%s bytes, checksum agrees" % format(len(TEXT), ","), lines[0])
        self.assertEqual((self.read("shakespeare.txt"), os.listdir(self.folder)), (TEXT, ["shakespeare.txt"]))
        asked = len(self.server.asked)
        self.assertIn("is here already", self.get("shakespeare", "--out", self.folder)[0])
        self.assertEqual(len(self.server.asked), asked)
        with open(self.path("shakespeare.txt"), "ab") as file:
            file.write(b"!")
        self.assertIn("is another file", self.get("shakespeare", "--out", self.folder, status=2))

    def test_a_wrong_checksum_leaves_nothing(self):
        self.server.files["/input.txt"] = TEXT[:-1] + b"?"
        self.assertIn("checksum", self.get("shakespeare", "--out", self.folder, status=2))
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_broken_download_goes_on(self):
        self.server.files["/input.txt"] = TEXT
        self.server.cut = 70000
        self.assertIn("ended after 70,000 of", self.get("shakespeare", "--out", self.folder, status=2))
        self.assertEqual(os.listdir(self.folder), ["shakespeare.txt.part"])
        self.server.cut = None
        self.get("shakespeare", "--out", self.folder)
        self.assertEqual((self.read("shakespeare.txt"), os.listdir(self.folder)), (TEXT, ["shakespeare.txt"]))
        self.assertIn("bytes=70000-", [asked[1] for asked in self.server.asked])
        # What is there may be whole, or longer than the file.
        os.rename(self.path("shakespeare.txt"), self.path("shakespeare.txt.part"))
        self.get("shakespeare", "--out", self.folder)
        self.assertEqual(self.read("shakespeare.txt"), TEXT)

    def test_a_slice_of_a_data_set(self):
        shards = [b"PAR1" + bytes([i]) * 20000 for i in range(2)]
        for i, shard in enumerate(shards):
            self.server.files["/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/shard_%05d.parquet" % i] = shard
        self.get("fineweb-edu", "--shards", "2", "--out", self.path("slice"))
        self.assertEqual([self.read("slice/shard_0000%d.parquet" % i) for i in range(2)], shards)
        self.assertIn("status 404", self.get("fineweb-edu", "--shards", "3", "--out", self.path("slice"), status=2))
        self.assertEqual(len(os.listdir(self.path("slice"))), 2)

    def serve_model(self, names=None):
        names = names or os.listdir(MODEL)
        for name in names:
            with open(os.path.join(MODEL, name), "rb") as file:
                self.server.files["/owner/tiny/resolve/c0ffee/" + name] = file.read()
        listed = json.dumps({"id": "owner/tiny", "sha": "c0ffee", "siblings": [{"rfilename": name} for name in [*names, "README.md", "pytorch_model.bin"]]})
        self.server.files["/api/models/owner/tiny"] = listed.encode()

    def test_a_model_is_a_folder_when_it_is_whole(self):
        self.serve_model()
        self.server.cut = 12000  # of model.safetensors
        self.get("model", "owner/tiny", "--out", self.path("tiny"), status=2)
        self.assertEqual(os.listdir(self.folder), ["tiny.part"])
        self.server.cut = None
        with mock.patch.dict(os.environ, {"HF_TOKEN": "secret"}):
            self.get("model", "owner/tiny", "--out", self.path("tiny"))
        self.assertEqual(os.listdir(self.folder), ["tiny"])
        for name in os.listdir(self.path("tiny")):
            with open(os.path.join(MODEL, name), "rb") as file:
                self.assertEqual(self.read("tiny/" + name), file.read(), name)
        self.assertLessEqual({"config.json", "model.safetensors"}, set(os.listdir(self.path("tiny"))))
        tokens = {path.startswith("/store"): token for path, _, token in self.server.asked}
        self.assertEqual(tokens, {False: "Bearer secret", True: None}, "the token is for the server only")
        self.assertIn("is here already", self.get("model", "owner/tiny", "--out", self.path("tiny"))[0])

    @unittest.skipUnless(importlib.util.find_spec("huggingface_hub"), "huggingface_hub is not installed")
    def test_a_model_by_huggingface_hub(self):
        """In a process of its own: the package reads its variables when it is imported."""
        self.serve_model()
        program = [sys.executable, "-B", os.path.join(ROOT, "scripts/get.py"), "model", "owner/tiny", "--out", self.path("tiny")]
        variables = {**os.environ, "HF_HOME": self.path("home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(set(os.listdir(self.path("tiny"))), {*os.listdir(MODEL)} & {*get.MODEL_FILES, "model.safetensors"})
        program[-1] += "2"
        done = subprocess.run(program, env={**variables, "HF_ENDPOINT": "http://127.0.0.1:%d" % free_port()}, capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr.splitlines()[-1], "^get.py: owner/tiny can't be downloaded .* and copy them into %s here$" % self.path("tiny2"))

    def test_what_is_no_model_is_named(self):
        shard = "model-00001-of-00001.safetensors"
        for names in (["config.json"], ["config.json", "model.safetensors.index.json"], ["config.json", shard], ["model.safetensors"]):
            self.server.files["/api/models/owner/tiny"] = json.dumps({"sha": "c0ffee", "siblings": [{"rfilename": name} for name in names]}).encode()
            self.assertIn("owner/tiny: it has no config.json with model.safetensors", self.get("model", "owner/tiny", "--out", self.path("tiny"), status=2))
        self.server.files["/api/models/owner/tiny"] = b"<html>"
        self.assertIn("no JSON", self.get("model", "owner/tiny", "--out", self.path("tiny"), status=2))
        self.assertEqual(get.model_files(["config.json", "model.safetensors.index.json", shard, "README.md"]), ["config.json", shard, "model.safetensors.index.json"])
        self.assertIn("OWNER/NAME", self.get("model", "tiny", status=2))
        self.assertEqual(os.listdir(self.folder), [])

    def test_failures_are_one_line(self):
        self.server.files["/input.txt"] = TEXT
        for status, words in ((404, "status 404"), (401, "HF_TOKEN"), (500, "status 500")):
            self.server.status = status
            self.assertIn(words, self.get("shakespeare", "--out", self.folder, status=2))
        nobody = "http://127.0.0.1:%d" % free_port()
        with mock.patch.dict(os.environ, {"HF_ENDPOINT": "nobody"}):
            self.assertIn("HF_ENDPOINT=nobody: is no server's address", self.get("fineweb-edu", status=2))
        with mock.patch.dict(os.environ, {"HF_ENDPOINT": nobody}), mock.patch.object(get, "SHAKESPEARE", (nobody + "/input.txt", "0" * 64)):
            for goal in (["shakespeare"], ["fineweb"], ["model", "owner/tiny"]):
                message = self.get(*goal, "--out", self.path("x"), status=2)
                self.assertIn("can't be reached", message)
                self.assertIn("on a machine with a network get ", message)
            self.assertIn("get the files of %s/owner/tiny, and copy them into %s here" % (nobody, self.path("x")), message)
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_folder_that_cannot_be_written(self):
        self.server.files["/input.txt"] = TEXT
        with open(self.path("file"), "w", encoding="ascii"):
            pass
        self.assertIn(self.path("file"), self.get("shakespeare", "--out", self.path("file"), status=2))


class Ends(unittest.TestCase):
    """mistakes.run_script."""
    def ends(self, work, **options):
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            return mistakes.run_script("x.py", work, **options), error.getvalue()

    def raising(self, error, **options):
        return self.ends(mock.Mock(side_effect=error), **options)

    def test_what_goes_wrong_is_one_line(self):
        self.assertEqual(self.raising(mistakes.Mistake("a.txt: is empty")), (2, "x.py: a.txt: is empty\n"))
        self.assertEqual(self.ends(lambda: open("/no/such", encoding="utf-8")), (2, "x.py: /no/such: No such file or directory\n"))
        self.assertEqual(self.raising(OSError(28, "No space left on device")), (2, "x.py: writing: No space left on device\n"))
        self.assertEqual(self.raising(OSError("not of the system")), (2, "x.py: not of the system\n"))
        self.assertEqual(self.ends(lambda: subprocess.run(["false"], check=True)), (1, "x.py: false failed with status 1\n"))
        self.assertEqual(self.raising(KeyboardInterrupt), (130, "x.py: interrupted\n"))
        self.assertEqual(self.raising(KeyboardInterrupt, interrupted="interrupted; again"), (130, "x.py: interrupted; again\n"))
        self.assertEqual(self.ends(lambda: None) + self.ends(lambda: 3), (0, "", 3, ""))

    def test_output_that_cannot_be_written(self):
        """Python's own end says nothing after the script's."""
        program = """import mistakes, sys
def work():
    print("a" * int(sys.argv[1]))
    if int(sys.argv[2]):
        raise mistakes.Mistake("a mistake")
sys.exit(mistakes.run_script("x.py", work))"""
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        read_end, write_end = os.pipe()
        os.close(read_end)
        with open("/dev/full", "w", encoding="ascii") as full, open(write_end, "w", encoding="ascii") as pipe:
            for out, expected in ((full, (2, "x.py: writing: No space left on device\n")), (pipe, (141, ""))):
                for arguments in ("1", "0"), ("100000", "0"), ("1", "1"):
                    done = subprocess.run([sys.executable, "-B", "-c", program, *arguments], cwd=os.path.join(ROOT, "scripts"), stdout=out,
                                          stderr=subprocess.PIPE, env=buffered, text=True, check=False, timeout=60)
                    self.assertEqual((done.returncode, done.stderr), expected, arguments)

    def test_every_script_of_users_ends_so(self):
        with open(os.path.join(ROOT, "scripts/install/install.sh"), encoding="utf-8") as file:
            commands = re.search('^commands="(.*)"$', file.read(), re.M)[1].split()
        for name in set(commands) - {"follow"}:  # which ends with the run, whatever it could not send
            with open(os.path.join(ROOT, "scripts", name + ".py"), encoding="utf-8") as file:
                self.assertIn('run_script("%s.py", ' % name, file.read())


if __name__ == "__main__":
    unittest.main()
