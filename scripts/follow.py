#!/usr/bin/env python3
"""Sends a run's log.jsonl to trackers: Weights & Biases, MLflow, Prometheus. The run never waits for it.

  scripts/follow.py out/mine --wandb-project gpt           sends what is there, and goes on until Ctrl-C
  scripts/follow.py out/mine --once --mlflow-tracking-uri http://127.0.0.1:5000

The engine's options of the same names start it beside a run, with --with-run. What was sent, and the runs' ids at the
trackers, stay in follow.json beside the log: a resumed run goes on in the same runs, and steps that it repeats, whose
numbers are the same, are sent once. W&B needs the package wandb, and is logged into by `wandb login` or WANDB_API_KEY;
without either the run is kept offline. MLflow needs no package; MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD, log into it.
"""

import argparse
import base64
import datetime
import http.server
import json
import math
import os
import re
import select
import signal
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

EVERY_S = 2.0  # between looks at the log
SLOWEST_S = 60.0  # between attempts at a tracker that is down
LAST_S, LAST_ATTEMPTS = 50.0, 3  # for sending what is left when the run has ended; the engine waits for a minute
CHUNK = 1 << 20  # bytes of the log that are sent at a time
TAIL = 128  # bytes before the place that was sent: they tell whether the log was cut or written anew


def say(text):
    """Prints a message, below the progress line where that is drawn in place."""
    begin = "\n" if sys.stderr.isatty() else ""
    try:
        sys.stderr.write(f"{begin}follow.py: {text}\n")
        sys.stderr.flush()
    except OSError:  # a reader that has gone
        pass


def flat(row, prefix=""):
    """Returns the numbers of a row of log.jsonl by their path, as fp8/qkv/input/saturated, and its texts."""
    numbers, texts = {}, {}
    for name, value in row.items():
        path = prefix + name
        if isinstance(value, list):
            value = dict(zip(("saturated", "flushed"), value))
        if isinstance(value, dict):
            inner = flat(value, path + "/")
            numbers.update(inner[0])
            texts.update(inner[1])
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[path] = value
        elif isinstance(value, str):
            texts[path] = value
    return numbers, texts


def seconds_of(row):
    """Returns the Unix time of a row; now where the row has none."""
    try:
        return datetime.datetime.fromisoformat(row["time"].replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError, AttributeError):
        return time.time()


class Place:
    """How far a tracker has read the log: a number of bytes, what stood before them, and the last step. repeated: the
    last step of an earlier reading of a log that was then cut, since its run was resumed from a checkpoint before it."""

    def __init__(self, path, kept):
        self.path = path
        self.bytes, self.step, self.tail = kept.get("bytes", 0), kept.get("step", 0), kept.get("tail", "")
        self.repeated = kept.get("repeated", -1)

    def kept(self):
        return {"bytes": self.bytes, "step": self.step, "tail": self.tail, "repeated": self.repeated}

    def read(self):
        """Returns the rows behind the place, but for repeated steps, and the place behind these rows."""
        with open(self.path, "rb") as file:
            begin, repeated = self.bytes, self.repeated
            file.seek(max(0, begin - TAIL))
            if begin and file.read(min(TAIL, begin)).decode("latin-1") != self.tail:
                begin, repeated = 0, self.step
            file.seek(begin)
            data = file.read(CHUNK)
            data = data[: data.rfind(b"\n") + 1]  # a line without its end is still being written
            behind = Place(self.path, {"bytes": begin + len(data), "step": self.step, "repeated": repeated})
            file.seek(max(0, behind.bytes - TAIL))
            behind.tail = file.read(min(TAIL, behind.bytes)).decode("latin-1")
        rows = {}
        for line in data.splitlines():
            try:
                row = json.loads(line)
                step = row["step"]
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # a note of the user's
            if isinstance(step, int) and step > repeated:
                rows.setdefault(step, {}).update(row)
                behind.step = max(behind.step, step)
        return [rows[step] for step in sorted(rows)], behind


class Wandb:
    name = "wandb"

    def __init__(self, options, folder):
        self.project, self.run_name, self.folder = options.wandb_project, options.wandb_name, folder
        self.run = self.wandb = None

    def open(self, kept, config):
        try:
            import wandb
        except ImportError:
            raise Hopeless("the package wandb is missing: pip install wandb") from None
        self.wandb = wandb
        kept.setdefault("id", os.urandom(4).hex())
        name = self.run_name or os.path.basename(os.path.abspath(self.folder))
        arguments = {"project": self.project, "id": kept["id"], "name": name, "config": config, "resume": "allow", "dir": self.folder}
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            self.run = wandb.init(**arguments)
        except Exception as error:  # no login, no network
            self.run = wandb.init(mode="offline", **arguments)
            say(f"wandb: {first_line(error)}; the run is kept in {self.folder}/wandb, and `wandb sync` sends it")
        # No step= below: W&B drops rows whose step is below the last one.
        self.run.define_metric("*", step_metric="step")

    def send(self, rows):
        for row in rows:
            numbers, texts = flat({name: value for name, value in row.items() if name != "time"})
            values = {**numbers, **{name: self.wandb.Html(page_of(text)) for name, text in texts.items()}}
            self.run.log(values)

    def close(self):
        if self.run:
            self.run.finish()


def page_of(text):
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<pre style="white-space:pre-wrap">{escaped}</pre>'


class Mlflow:
    name = "mlflow"
    METRICS, PARAMS, TEXT = 1000, 100, 6000  # of a call; characters of a param's value

    def __init__(self, options, folder):
        self.uri, self.experiment = options.mlflow_tracking_uri.rstrip("/"), options.mlflow_experiment or "train_gpt"
        self.run_name = options.wandb_name or os.path.basename(os.path.abspath(folder))
        self.id = None
        if not re.match("https?://", self.uri):
            raise Hopeless(f"{self.uri} is no server's address; expected one as http://127.0.0.1:5000")

    def call(self, path, body=None, **query):
        """Returns the answer to a call."""
        url = f"{self.uri}/api/2.0/mlflow/{path}" + ("?" + urllib.parse.urlencode(query) if query else "")
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
        if token:
            request.add_header("Authorization", "Bearer " + token)
        elif user:
            pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            request.add_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"{}")

    def experiment_id(self):
        try:
            return self.call("experiments/get-by-name", experiment_name=self.experiment)["experiment"]["experiment_id"]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        return self.call("experiments/create", {"name": self.experiment})["experiment_id"]

    def open(self, kept, config):
        if "id" in kept:
            self.id = kept["id"]
            self.call("runs/update", {"run_id": self.id, "status": "RUNNING"})
            return
        tags = [{"key": "mlflow.runName", "value": self.run_name}]
        body = {"experiment_id": self.experiment_id(), "run_name": self.run_name, "start_time": int(1e3 * time.time()), "tags": tags}
        self.id = kept["id"] = self.call("runs/create", body)["run"]["info"]["run_id"]
        params = [{"key": name, "value": str(value)[: self.TEXT]} for name, value in config.items() if value != ""]
        for i in range(0, len(params), self.PARAMS):
            self.call("runs/log-batch", {"run_id": self.id, "params": params[i : i + self.PARAMS]})

    def send(self, rows):
        metrics = []
        for row in rows:
            at = {"timestamp": int(1e3 * seconds_of(row)), "step": row["step"]}
            for name, value in flat(row)[0].items():
                if name != "step" and math.isfinite(value):
                    metrics.append({"key": re.sub(r"[^\w\-./ ]", "_", name)[:250], "value": value, **at})
        for i in range(0, len(metrics), self.METRICS):
            self.call("runs/log-batch", {"run_id": self.id, "metrics": metrics[i : i + self.METRICS]})

    def close(self):
        if self.id:
            self.call("runs/update", {"run_id": self.id, "status": "FINISHED", "end_time": int(1e3 * time.time())})


class Prometheus:
    """Answers GET /metrics with the latest numbers, in Prometheus' text format 0.0.4."""

    name = "prometheus"

    def __init__(self, options, folder):
        self.port = options.metrics_port
        self.label = os.path.basename(os.path.abspath(folder)).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        self.latest = {}
        self.server = None

    def open(self, kept, config):
        del config
        kept.clear()  # each start reads the whole log
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                found = self.path.split("?")[0] in ("/metrics", "/")
                body = owner.text().encode() if found else b"GET /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        try:
            self.server = http.server.ThreadingHTTPServer(("", self.port), Handler)
        except OSError as error:
            raise Hopeless(f"--metrics-port {self.port}: {error.strerror}; name another port") from None
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def text(self):
        lines = []
        for name, value in sorted(self.latest.items()):
            metric = "train_gpt_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            lines.append(f'# TYPE {metric} gauge\n{metric}{{run="{self.label}"}} {value!r}\n')
        return "".join(lines)

    def send(self, rows):
        for row in rows:
            self.latest = {**self.latest, **flat(row)[0]}

    def close(self):
        if self.server:
            self.server.shutdown()


class Hopeless(Exception):
    """Why a tracker will never take the run."""


def first_line(error):
    if isinstance(error, urllib.error.HTTPError):
        try:
            said = str(json.loads(error.read())["message"]).splitlines()[0]  # MLflow's
        except (ValueError, TypeError, KeyError, IndexError, OSError):
            said = error.reason
        return f"{error.code} {said}"
    reason = getattr(error, "reason", error)
    text = getattr(reason, "strerror", None) or str(reason) or str(error) or type(error).__name__
    return text.strip().splitlines()[0].rstrip(".")


class Follower:
    """A tracker, and how far it has got. What fails is tried again, ever more seldom; the first failure is said."""

    def __init__(self, tracker, log, kept, goes_on="; the run goes on without it"):
        self.tracker, self.log, self.kept, self.goes_on = tracker, log, kept, goes_on
        self.place = None
        self.is_open = self.is_hopeless = self.said = False
        self.wait, self.not_before = EVERY_S, 0.0

    def advance(self, config):
        """Sends a chunk of the log. Returns whether more of the log may be there."""
        if self.is_hopeless or time.monotonic() < self.not_before:
            return False
        try:
            if not self.is_open:
                self.tracker.open(self.kept, config)
                self.place = Place(self.log, self.kept)
                self.is_open = True
            rows, behind = self.place.read()
            if rows:
                self.tracker.send(rows)
            more = behind.bytes != self.place.bytes
            self.place = behind
            self.kept.update(behind.kept())
            self.wait = EVERY_S
            return more
        except Hopeless as error:
            self.is_hopeless = True
            say(f"{self.tracker.name}: {error}{self.goes_on}")
        except FileNotFoundError:
            pass  # the log of a run that begins
        except Exception as error:
            self.not_before = time.monotonic() + self.wait
            self.wait = min(2 * self.wait, SLOWEST_S)
            if not self.said:
                say(f"{self.tracker.name}: {first_line(error)}; the run goes on, and it is tried again")
            self.said = True
        return False

    def has_all(self):
        """Whether the tracker has all of the log, or will never have it."""
        if self.is_hopeless:
            return True
        try:
            return self.is_open and self.place.read()[1].bytes == self.place.bytes
        except OSError:
            return False

    def finish(self):
        """Closes the tracker; returns as has_all."""
        complete = self.has_all()
        try:
            self.tracker.close()
        except Exception as error:
            if not self.said:
                say(f"{self.tracker.name}: {first_line(error)}")
            return False
        return complete


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


def keep(path, state):
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(state, file, indent=2)
        os.replace(path + ".tmp", path)
    except OSError as error:
        if not state.get("said"):
            say(f"{path}: cannot be written: {error.strerror}; a resumed run will be another one at the trackers")
        state["said"] = True


def advance_all(followers, folder, state):
    """Sends what the log has; returns whether anything was sent."""
    config = read_json(os.path.join(folder, "config.json"))
    before = json.dumps(state, default=str)
    moved = False
    while any([follower.advance(config) for follower in followers]):
        moved = True
    if json.dumps(state, default=str) != before:
        keep(os.path.join(folder, "follow.json"), state)
    return moved


def run_ended(seconds):
    """Waits for `seconds`; returns whether the run has ended meanwhile, which closes the pipe that is standard input."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 512)


def follow(options):
    folder = os.path.dirname(options.run) or "." if options.run.endswith("log.jsonl") else options.run
    log = os.path.join(folder, "log.jsonl")
    if not options.with_run and not os.path.exists(log):
        print(f"follow.py: {log}: no such file; name the folder of a run", file=sys.stderr)
        return 2
    state = {} if options.new else read_json(os.path.join(folder, "follow.json"))
    state.pop("said", None)
    followers, hopeless = [], False
    goes_on = "; the run goes on without it" if options.with_run else ""
    for kind, wanted in ((Wandb, options.wandb_project), (Mlflow, options.mlflow_tracking_uri), (Prometheus, options.metrics_port)):
        if not wanted:
            continue
        kept = state.setdefault(kind.name, {})
        try:
            followers.append(Follower(kind(options, folder), log, kept, goes_on))
        except Hopeless as error:
            say(f"{kind.name}: {error}{goes_on}")
            hopeless = True
    try:
        while followers:
            advance_all(followers, folder, state)
            if not options.with_run and all(follower.is_hopeless for follower in followers):
                break
            if options.once or (options.with_run and run_ended(EVERY_S)):
                break
            if not options.with_run:
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        pass
    # The run has ended: what is left is tried a few times, then this process ends, whatever a tracker's threads do.
    missed = [follower.tracker.name for follower in followers]
    rest = f"not all was sent; scripts/follow.py {folder} --once with the same options sends the rest"

    def too_late():
        say(f"{', '.join(missed)}: {rest}")
        os._exit(1)

    watchdog = threading.Timer(LAST_S, too_late)
    watchdog.daemon = True
    watchdog.start()
    for attempt in range(LAST_ATTEMPTS):
        for follower in followers:
            follower.not_before = 0.0
        advance_all(followers, folder, state)
        if all(follower.has_all() for follower in followers) or attempt == LAST_ATTEMPTS - 1:
            break
        time.sleep(1 + attempt)
    missed[:] = [follower.tracker.name for follower in followers if not follower.finish()]
    if missed:
        say(f"{', '.join(missed)}: {rest}")
    hopeless = hopeless or any(follower.is_hopeless for follower in followers)
    return 1 if missed else 2 if hopeless and not options.with_run else 0


def port(text):
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"'{text}' is no port; expected 1 to 65535")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or its log.jsonl")
    parser.add_argument("--wandb-project", metavar="NAME", help="project of Weights & Biases")
    parser.add_argument("--wandb-name", metavar="NAME", help="the run's name (default: its folder)")
    parser.add_argument("--mlflow-tracking-uri", metavar="URL", help="MLflow's server")
    parser.add_argument("--mlflow-experiment", metavar="NAME", help="experiment there (default: train_gpt)")
    parser.add_argument("--metrics-port", type=port, metavar="PORT", help="port for Prometheus")
    parser.add_argument("--once", action="store_true", help="end when what is there is sent")
    parser.add_argument("--new", action="store_true", help="begin new runs at the trackers, whatever follow.json says")
    parser.add_argument("--with-run", action="store_true", help="end when standard input does (the engine's)")
    options = parser.parse_args()
    if not (options.wandb_project or options.mlflow_tracking_uri or options.metrics_port):
        parser.error("nothing to send to; give --wandb-project, --mlflow-tracking-uri or --metrics-port")
    if options.with_run:  # a job's end must not cut off what is left to send
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    status = follow(options)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
