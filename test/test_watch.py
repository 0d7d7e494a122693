"""What a run shows elsewhere than in the terminal: event files for TensorBoard, the followers of log.jsonl, the page of
scripts/report.py. Needs only Python's standard library; tensorboard and node check more where they are."""
import http.server
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

from environment import ROOT

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
SMALL = ["--vocab-size", 257, "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--seq-length", 32, "--micro-batch-size", 4,
         "--lr", "3e-3", "--lr-decay-style", "constant", "--val-every", 4, "--val-steps", 2, "--sample-every", 6, "--sample-tokens", 8, "--checkpoint-every", 6, "--checkpoint-async", "false"]  # fmt: skip
WANDB = '''
import json, os, sys
if os.environ["FAKE_WANDB"] == "missing":
    raise ImportError("no such package")
class Run:
    def __init__(self, arguments): self.say("init", arguments)
    def say(self, *what):
        with open(os.environ["FAKE_WANDB"], "a") as file: file.write(json.dumps(what) + "\\n")
    def define_metric(self, name, step_metric): self.say("metric", name, step_metric)
    def log(self, values): self.say("log", values)
    def finish(self): self.say("finish")
def Html(text): return text
def init(**arguments):
    if "WANDB_API_KEY" not in os.environ and arguments.get("mode") != "offline": raise RuntimeError("api_key not configured\\nmore")
    return Run(arguments)
'''


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    """Returns the records of a TFRecord file, whose checksums must be right."""
    with open(path, "rb") as file:
        data = file.read()
    found, at = [], 0
    while at < len(data):
        length, of_length = struct.unpack_from("<QI", data, at)
        record = data[at + 12 : at + 12 + length]
        assert of_length == crc32c(data[at : at + 8]) and struct.unpack_from("<I", data, at + 12 + length)[0] == crc32c(record)
        found.append(record)
        at += 16 + length
    return found


def message(data):
    """Returns the fields of a protocol buffer: lists of values by number."""
    fields, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            value = varint()
        else:
            length = {1: 8, 5: 4}.get(wire) or varint()
            value, at = data[at : at + length], at + length
        fields.setdefault(number, []).append(value)
    return fields


def events(path):
    """Returns the scalars and texts of an event file, {(tag, step): value}, and the steps at which sessions start."""
    scalars, texts, starts = {}, {}, []
    for event in map(message, records(path)):
        step = event[2][0]
        if 7 in event:
            starts.append(step)
        for value in map(message, message(event[5][0])[1] if 5 in event else []):
            tag = value[1][0].decode()
            if 2 in value:
                scalars[tag, step] = struct.unpack("<f", value[2][0])[0]
            else:
                texts[tag, step] = message(value[8][0])[8][0].decode()
    return scalars, texts, starts


class Mlflow(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(404, {"message": "no such experiment"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.path.partition("mlflow/")[2], body))
        self.answer(200, {"experiment_id": "5", "run": {"info": {"run_id": "r1"}}})

    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def unused_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = cls.folder.name
        os.mkdir(cls.path + "/modules")
        with open(cls.path + "/modules/wandb.py", "w", encoding="utf-8") as file:
            file.write(WANDB)
        text = ("for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\n" * 100).encode()
        for part in ("train", "val"):
            with open(f"{cls.path}/t_{part}_000.bin", "wb") as file:
                file.write(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253) + struct.pack(f"<{len(text)}H", *text))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def train(self, name, *arguments, **environment):
        """Makes a small run, which must succeed; returns what it says on stderr."""
        data = ["--train-data", self.path + "/t_train_*.bin", "--val-data", self.path + "/t_val_*.bin", "--out", f"{self.path}/{name}"]
        result = subprocess.run([PROGRAM, *map(str, [*SMALL, *data, *arguments])], capture_output=True, text=True, timeout=120, check=False,
                                env={**os.environ, "PYTHONPATH": self.path + "/modules", "FAKE_WANDB": "missing", **environment})  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stderr

    def script(self, name, *arguments):
        return subprocess.run([sys.executable, "-B", f"{ROOT}/scripts/{name}", *arguments], capture_output=True, text=True, timeout=60, check=False)

    def rows(self, name):
        rows = {}
        with open(f"{self.path}/{name}/log.jsonl", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                rows.setdefault(row["step"], {}).update(row)
        return rows

    def javascript(self, page):
        """Checks that a page's scripts parse, where node is there to say so."""
        if not shutil.which("node"):
            return
        for script in re.findall(r"<script>(.*?)</script>", page, re.S):
            result = subprocess.run(["node", "--check", "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)


class TensorBoard(Case):
    def test_a_run_and_its_resumption(self):
        """What log.jsonl has is in the event files: first a run of 12 steps, then steps 7 to 12 again and two more."""
        folder = self.path + "/tb/deep"
        self.train("run", "--train-steps", 12, "--tensorboard-dir", folder)
        first = self.rows("run")
        self.train("run", "--train-steps", 14, "--tensorboard-dir", folder, "--resume", self.path + "/run/checkpoints/step_00000006")
        rows = self.rows("run")
        names = sorted(os.listdir(folder))
        self.assertEqual(len(names), 2)
        self.assertEqual([message(records(f"{folder}/{name}")[0])[3][0] for name in names], [b"brain.Event:2"] * 2)
        for name, begin, log in zip(names, (1, 7), (first, rows)):
            scalars, texts, starts = events(f"{folder}/{name}")
            self.assertEqual(starts, [begin])
            self.assertEqual(sorted({step for _, step in scalars}), list(range(begin, max(log) + 1)))
            for (tag, step), value in scalars.items():
                member = {"train": "loss", "val": "val_loss"}.get(tag.partition("/")[2], tag.partition("/")[2])
                self.assertEqual(value, struct.unpack("<f", struct.pack("<f", log[step][member]))[0], tag)
            for (tag, step), text in texts.items():
                self.assertEqual((tag, text), ("samples/1", "".join(f"    {line}\n" for line in log[step]["samples"]["1"].split("\n"))))
            wanted = {"loss/train", "optimizer/lr", "optimizer/grad_norm", "speed/tokens_per_second", "speed/mfu", "memory/peak_bytes"}
            self.assertEqual(wanted - {tag for tag, step in scalars if step == max(log)}, set())
            self.assertEqual({step for tag, step in scalars if tag == "loss/val"}, {step for step, row in log.items() if "val_loss" in row and step >= begin})
            self.assertEqual({step for _, step in texts}, {step for step, row in log.items() if "samples" in row and step >= begin})
        self.by_tensorboard(folder, rows)

    def by_tensorboard(self, folder, rows):
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            return
        read = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
        read.Reload()
        self.assertEqual([point.step for point in read.Scalars("loss/train")], sorted(rows))  # a repeated step is there once
        self.assertEqual([point.step for point in read.Scalars("loss/val")], [step for step in sorted(rows) if "val_loss" in rows[step]])
        self.assertEqual(read.SummaryMetadata("samples/1").plugin_data.plugin_name, "text")
        self.assertEqual({point.step for point in read.Tensors("samples/1")}, {step for step in rows if "samples" in rows[step]} | {12})

    def test_only_rank_0_has_a_file_and_the_time_is_in_the_log(self):
        before = time.time()
        self.train("time", "--train-steps", 2)
        for row in self.rows("time").values():
            self.assertRegex(row["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
            at = time.strptime(row["time"][:19], "%Y-%m-%dT%H:%M:%S")
            self.assertLess(abs(time.mktime(at) - time.timezone - before), 3600 + 60)  # within a minute, or an hour of summer time


class Followers(Case):
    def test_trackers_get_each_step_once(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mlflow)
        server.calls = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        heard = self.path + "/wandb.jsonl"
        options = ["--wandb-project", "p", "--wandb-name", "n", "--mlflow-tracking-uri", f"http://127.0.0.1:{server.server_port}/"]
        self.assertEqual(self.train("once", "--train-steps", 12, *options, FAKE_WANDB=heard, WANDB_API_KEY="k"), "")
        said = self.train("once", "--train-steps", 14, "--resume", self.path + "/once/checkpoints/step_00000006", FAKE_WANDB=heard)
        self.assertEqual(said.count("\n"), 1)  # without a login; the trackers are the checkpoint's
        self.assertIn("wandb: api_key not configured; the run is kept in", said)
        rows = self.rows("once")
        with open(heard, encoding="utf-8") as file:
            calls = [json.loads(line) for line in file]
        starts = [call[1] for call in calls if call[0] == "init"]
        self.assertEqual([(start["project"], start["name"], start["resume"], start.get("mode")) for start in starts],
                         [("p", "n", "allow", None), ("p", "n", "allow", "offline")])  # fmt: skip
        self.assertEqual(starts[0]["id"], starts[1]["id"])
        self.assertEqual(starts[0]["config"]["hidden_size"], 32)
        self.assertIn(["metric", "*", "step"], calls)
        self.assertEqual(sum(call[0] == "finish" for call in calls), 2)
        self.same([call[1] for call in calls if call[0] == "log" and "loss" in call[1]], rows)
        self.assertIn("<pre", next(call[1]["samples/1"] for call in calls if call[0] == "log" and "samples/1" in call[1]))

        self.assertEqual([path for path, _ in server.calls if path.startswith(("experiments", "runs/create"))], ["experiments/create", "runs/create"])
        batches = [body for path, body in server.calls if path == "runs/log-batch"]
        self.assertTrue(all(body["run_id"] == "r1" and len(body.get("params", [])) <= 100 and len(body.get("metrics", [])) <= 1000 for body in batches))
        params = {param["key"]: param["value"] for body in batches for param in body.get("params", [])}
        self.assertEqual((params["lr"], params["num_layers"], "mlflow_experiment" in params), ("0.003", "2", False))
        by_step = {}
        for metric in (metric for body in batches for metric in body.get("metrics", [])):
            self.assertNotIn(metric["key"], by_step.setdefault(metric["step"], {}))
            by_step[metric["step"]][metric["key"]] = metric["value"]
            self.assertLess(abs(metric["timestamp"] / 1e3 - time.time()), 600)
        self.same([{"step": step, **values} for step, values in sorted(by_step.items())], rows)
        self.assertEqual([body["status"] for path, body in server.calls if path == "runs/update"], ["FINISHED", "RUNNING", "FINISHED"])

    def same(self, sent, rows):
        self.assertEqual([row["step"] for row in sent], sorted(rows))
        for row in sent:
            self.assertEqual({name: row[name] for name in ("loss", "lr", "grad_norm")}, {name: rows[row["step"]][name] for name in ("loss", "lr", "grad_norm")})

    def test_trackers_that_are_not_there(self):
        """A message each, and the run is whole."""
        begin = time.monotonic()
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            said = self.train("alone", "--train-steps", 3, "--wandb-project", "p", "--mlflow-tracking-uri", f"http://127.0.0.1:{unused_port()}",
                              "--metrics-port", taken.getsockname()[1])  # fmt: skip
        self.assertLess(time.monotonic() - begin, 30)
        for words in ("wandb: the package wandb is missing: pip install wandb; the run goes on without it", "Connection refused; the run goes on, and it is tried again",
                      "mlflow: not all was sent; scripts/follow.py", "prometheus: --metrics-port"):  # fmt: skip
            self.assertEqual(said.count(words), 1, said)
        self.assertEqual(said.count("\n"), 4, said)
        self.assertEqual(sorted(self.rows("alone")), [1, 2, 3])
        said = self.train("file", "--train-steps", 1, "--mlflow-tracking-uri", "sqlite:///mlflow.db", "--wandb-name", "x")
        self.assertIn("is no server's address; expected one as http://127.0.0.1:5000", said)
        said = self.train("no_python", "--train-steps", 1, "--wandb-project", "p", PATH="/none")
        self.assertIn("cannot be started: No such file or directory; the run goes on without trackers", said)

    def test_prometheus(self):
        """By hand, beside a log that grows: GET /metrics has the latest numbers."""
        os.mkdir(self.path + '/a "run"')
        log = self.path + '/a "run"/log.jsonl'
        with open(log, "w", encoding="utf-8") as file:
            file.write('{"step": 1, "loss": 3.5, "fp8": {"qkv": {"input": [0.25, null]}}}\n# a note\n{"step": 2, "loss": 3.25, "val_loss": null}\n{"step": 3, "lo')
        port = unused_port()
        process = subprocess.Popen([sys.executable, f"{ROOT}/scripts/follow.py", os.path.dirname(log), "--metrics-port", str(port)])
        try:
            for _ in range(200):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                        text = answer.read().decode()
                except OSError:
                    text = ""
                if "loss" in text:
                    break
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(30), 0)
        self.assertEqual(answer.headers["Content-Type"], "text/plain; version=0.0.4; charset=utf-8")
        for line in ('train_gpt_loss{run="a \\"run\\""} 3.25', 'train_gpt_fp8_qkv_input_saturated{run="a \\"run\\""} 0.25', "# TYPE train_gpt_step gauge"):
            self.assertIn(line + "\n", text)
        self.assertNotIn("val_loss", text)
        for arguments, words in (((self.path + "/none", "--once", "--metrics-port", "1"), "no such file; name the folder of a run"),
                                 ((self.path + '/a "run"', "--once", "--metrics-port", "99999"), "is no port"),
                                 ((self.path + '/a "run"', "--mlflow-tracking-uri", "nowhere"), "nowhere is no server's address; expected one as http://127.0.0.1:5000\n"),
                                 ((self.path,), "nothing to send to")):  # fmt: skip
            result = self.script("follow.py", *arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn(words, result.stderr)


class Page(Case):
    def page(self, *arguments):
        result = self.script("report.py", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(result.stdout.split()[-1], encoding="utf-8") as file:
            return file.read()

    def test_the_page_of_a_run(self):
        self.train("whole", "--train-steps", 12)
        page, rows = self.page(self.path + "/whole"), self.rows("whole")
        run = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])[0]
        self.assertEqual(run["step"], sorted(rows))
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "peak_bytes"):
            self.assertEqual(run[name], [float(f"{row[name]:.6g}") if isinstance(row[name], float) else row[name] for _, row in sorted(rows.items())])
        self.assertEqual([step for step, _ in run["val"]], [4, 8, 12])
        self.assertEqual([sample["text"] for sample in run["samples"]], [rows[6]["samples"]["1"], rows[12]["samples"]["1"]])
        self.assertEqual(run["config"]["hidden_size"], 32)
        self.assertEqual((run["summary"]["steps"], run["summary"]["of"]), (12, 12))
        texts = [event["text"] for event in run["events"]]
        self.assertTrue(any(text.startswith("best validation loss") for text in texts) and sum("checkpoint: " in text for text in texts) == 2, texts)
        self.assertIn('<g class="buffers"', page)
        self.javascript(page)
        # nothing is loaded from elsewhere
        self.assertEqual(re.findall(r"(?:src|href)=[\"']?([^\"'> ]+)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page), [])

    def test_pages_of_hostile_and_other_logs(self):
        os.mkdir(self.path + "/<b>")
        log = self.path + "/<b>/log.jsonl"
        with open(log, "w", encoding="utf-8") as file:
            for step in range(1, 50001):
                row = {"step": step, "loss": None if step == 7 else 1 + 1 / step + (5 if step == 30001 else 0), "step_ms": 900 if step == 20 else 1}
                file.write(json.dumps(row) + "\n")
            file.write('{"step": 50000, "samples": {"1": "</script><script>alert(1)</script>\\ud800"}, "tasks": {"t": {"acc": 0.5}, "u": 3}, "fp8": 1}\n')
        page = self.page(log, "--out", self.path + "/page.html")
        self.assertNotIn("alert(1)</script>", page)
        self.assertIn("<title>&lt;b&gt;</title>", page)
        run = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])[0]
        self.assertLess(len(run["step"]), 20001)
        self.assertIn(30001, run["step"])  # an outlier stays, however many rows are left out
        self.assertEqual(run["more"]["t: acc"], [[50000, 0.5]])
        texts = " ".join(event["text"] for event in run["events"])
        self.assertIn("the loss is no number", texts)
        self.assertIn("slow: 900 ms", texts)
        self.assertIn("has no plan.html", page)
        for arguments, words in (((self.path + "/none",), "No such file"), ((log, "--out", log), "name a file that ends with .html"),
                                 ((self.path + "/page.html", "--out", self.path + "/x.html"), "line 1: not JSON"), ([log] * 7, "at most 6")):  # fmt: skip
            result = self.script("report.py", *arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn(words, result.stderr)
            self.assertNotIn("Traceback", result.stderr)

    def test_the_plan_alone(self):
        path = self.path + "/plan.HTML"
        for name in (path, self.path + "/plan.svg"):
            result = subprocess.run([PROGRAM, "--preset", "demo", "--plan", "--plan-picture", name], capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
        with open(path, encoding="utf-8") as file, open(self.path + "/plan.svg", encoding="utf-8") as svg:
            page, picture = file.read(), svg.read()
        self.assertIn(picture, page)
        self.assertTrue(page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n"))
        self.javascript(page)


if __name__ == "__main__":
    unittest.main()
