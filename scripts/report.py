#!/usr/bin/env python3
"""Writes a page to look at one or more runs: curves, memory plan, samples, events, configuration.

  scripts/report.py out/mine                     writes out/mine/report.html
  scripts/report.py out/a out/b --out ab.html    lays two runs over each other

The page is one file, which needs no network and opens from a disk. It is made of what lies in the run's folder:
log.jsonl, config.json, plan.html and the names of the checkpoints. Run it again to see how a run goes on.
"""

import argparse
import datetime
import html
import json
import os
import re
import statistics
import sys

from mistakes import Mistake, run_script
from plot_loss import Run, finite, write_whole

HERE = os.path.dirname(os.path.abspath(__file__))
POINTS = 20000  # of a run: of more rows, the least and greatest loss of each stretch are kept
COLUMNS = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "peak_bytes", "step_ms")
RUNS = 6  # as many as the page has colors
SLOW, SLOW_ROWS = 3.0, 12  # a step is an event from so many times the median on; events of this kind
PAUSE_S = 60.0


def seconds_of(row):
    """Returns the Unix time of a row; None where the row has none, as in logs of earlier versions."""
    try:
        return datetime.datetime.fromisoformat(row["time"].replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError, AttributeError):
        return None


def clock_text(row):
    return str(row.get("time", ""))[:19].replace("T", " ")


def number(value):
    """Returns a number as the page needs it: six digits, or None where it is none."""
    return float(f"{value:.6g}") if finite(value) and not isinstance(value, int) else value if finite(value) else None


def thinned(rows):
    if len(rows) <= POINTS:
        return rows
    width, kept = len(rows) / (POINTS // 2), []
    for i in range(POINTS // 2):
        stretch = rows[int(i * width) : int((i + 1) * width)]
        ends = sorted(stretch, key=lambda row: row["loss"] if finite(row.get("loss")) else -1.0)
        kept += sorted((ends[0], ends[-1]), key=lambda row: row["step"]) if len(stretch) > 1 else stretch
    return kept


def hours_of(rows):
    """Returns the hours of training at each row, pauses between starts left out."""
    times = [seconds_of(row) for row in rows]
    if None in times or not times:
        return [None] * len(rows)
    usual = statistics.median([b - a for a, b in zip(times, times[1:])] or [0.0])
    hours, total = [0.0], 0.0
    for before, after in zip(times, times[1:]):
        total += after - before if 0 <= after - before < max(PAUSE_S, 50 * usual) else usual
        hours.append(total / 3600)
    return hours


def more_series(rows):
    """Returns the points of what only some rows have: scores of tasks, shares of FP8, times of communication."""
    found = {}

    def add(step, path, value):
        if finite(value):
            found.setdefault(path, []).append([step, number(value)])

    for row in rows:
        for name in ("comm_ms", "comm_exposed_ms"):
            add(row["step"], name, row.get(name))
        for task, scores in row["tasks"].items() if isinstance(row.get("tasks"), dict) else ():
            for name in ("acc", "acc_norm", "perplexity"):
                if isinstance(scores, dict):
                    add(row["step"], f"{task}: {name}", scores.get(name))
        fp8 = row.get("fp8")
        for i, what in enumerate(("saturated", "flushed")):
            shares = [
                pair[i]
                for linear in (fp8.values() if isinstance(fp8, dict) else ())
                if isinstance(linear, dict)
                for pair in linear.values()
                if isinstance(pair, list) and len(pair) == 2 and finite(pair[i])
            ]
            if shares:
                add(row["step"], f"FP8: largest share {what}", max(shares))
    return found


def events_of(run, folder):
    """Returns what stands out in a log: starts again, steps without an update, slow steps, the best validation, scores,
    checkpoints that are there."""
    events, rows = [], run.rows

    def add(row, text):
        events.append({"step": row["step"], "time": clock_text(row), "text": text})

    steps = [row for row in rows if "loss" in row or "step_ms" in row]
    median = statistics.median([row["step_ms"] for row in steps if finite(row.get("step_ms"))] or [0.0])
    slow = [row for row in steps[1:] if finite(row.get("step_ms")) and row["step_ms"] > SLOW * median]
    for row in sorted(slow, key=lambda row: -row["step_ms"])[:SLOW_ROWS]:
        add(row, f"slow: {row['step_ms']:,.0f} ms, {row['step_ms'] / median:.1f} times the median")
    for before, row in zip(steps, steps[1:]):
        gap = (seconds_of(row) or 0) - (seconds_of(before) or 0)
        if gap > max(PAUSE_S, 50e-3 * median):
            add(row, f"{gap / 3600:.2f} h after the step before it: a pause, or a resumed run")
    for row in steps:
        if "loss" in row and not finite(row["loss"]):
            add(row, "the loss is no number, and nothing was updated")
        elif "grad_norm" in row and not finite(row["grad_norm"]):
            add(row, "the gradient norm is no number, and nothing was updated")
    if run.val_loss:
        best = min(run.val_loss, key=lambda point: point[1])
        add(next(row for row in rows if row["step"] == best[0]), f"best validation loss, {best[1]:.4f}")
    for row in rows:
        if isinstance(row.get("self_check"), dict):
            add(row, "self-check: " + "; ".join(f"{name}: {what}" for name, what in row["self_check"].items()))
        if isinstance(row.get("tasks"), dict):
            scores = [f"{name} {s['acc']:.4f}" for name, s in row["tasks"].items() if isinstance(s, dict) and finite(s.get("acc"))]
            add(row, "scores: " + ", ".join(scores))
    by_step = {row["step"]: row for row in rows}
    checkpoints = os.path.join(folder, "checkpoints")
    for name in sorted(os.listdir(checkpoints)) if os.path.isdir(checkpoints) else ():
        if re.fullmatch(r"step_\d+", name):
            add(by_step.get(int(name[5:]), {"step": int(name[5:])}), "checkpoint: " + os.path.join(checkpoints, name))
    return sorted(events, key=lambda event: event["step"])


def read_config(folder):
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def data_of(run, folder, written):
    """Returns what the page's script has of a run."""
    rows = [row for row in run.rows if "loss" in row or "val_loss" not in row]
    steps, config = thinned([row for row in run.rows if "loss" in row]), read_config(folder)
    hours = dict(zip([row["step"] for row in rows], hours_of(rows)))
    rates = [row["tokens_per_second"] for row in rows if finite(row.get("tokens_per_second"))]
    mfus = [row["mfu"] for row in rows if finite(row.get("mfu"))]
    best = min(run.val_loss, key=lambda point: point[1]) if run.val_loss else (None, None)
    last = run.loss[-max(1, len(run.loss) // 50) :]
    total = list(hours.values())[-1] if hours else None
    samples = [
        {"step": row["step"], "text": text}
        for row in run.rows
        if isinstance(row.get("samples"), dict)
        for text in row["samples"].values()
        if isinstance(text, str)
    ]
    return {
        "name": run.name,
        "path": folder,
        "written": written,
        "step": [row["step"] for row in steps],
        "tokens": [number(row.get("tokens")) for row in steps],
        "time": [number(hours.get(row["step"])) for row in steps],
        **{name: [number(row.get(name)) for row in steps] for name in COLUMNS},
        "val": [[step, number(value)] for step, value in run.val_loss],
        "more": more_series(run.rows),
        "samples": samples,
        "events": events_of(run, folder),
        "config": config,
        "summary": {
            "steps": run.rows[-1]["step"],
            "of": config.get("train_steps"),
            "tokens": next((row["tokens"] for row in reversed(run.rows) if finite(row.get("tokens"))), None),
            "loss": number(statistics.fmean(value for _, value in last)) if last else None,
            "best": number(best[1]),
            "best_step": best[0],
            "rate": number(statistics.median(rates)) if rates else None,
            "mfu": number(statistics.median(mfus)) if mfus else None,
            "peak": max((row["peak_bytes"] for row in run.rows if finite(row.get("peak_bytes"))), default=None),
            "seconds": None if total is None else number(3600 * total),
        },
    }


def plan_of(folder):
    """Returns the plan's part of plan.html, which the engine wrote; None where it is not there, or not whole."""
    try:
        with open(os.path.join(folder, "plan.html"), encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"<!-- plan -->(.*)<!-- plan end -->", text, re.S)
    return found[1] if found else None


def plans(runs, folders):
    parts = []
    for run, folder in zip(runs, folders):
        plan = plan_of(folder)
        body = plan or (
            f'<p class="soft">{html.escape(folder)} has no plan.html, which a run writes when it starts; '
            f"train_gpt --plan --plan-picture {html.escape(folder)}/plan.html with the run's options makes one.</p>"
        )
        if len(runs) > 1:
            opened = "" if parts else " open"
            body = f"<details{opened}><summary>{html.escape(run.name)}</summary>\n{body}</details>"
        parts.append(f'<section class="card">\n{body}</section>\n')
    return "".join(parts)


def page(runs, folders, title):
    """Returns the page's text."""
    with open(os.path.join(HERE, "report_page.html"), encoding="utf-8") as file:
        template = file.read()
    written = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    data = json.dumps([data_of(run, folder, written) for run, folder in zip(runs, folders)], separators=(",", ":"), allow_nan=False)
    values = {
        "@TITLE@": html.escape(title),
        "@PLANS@": plans(runs, folders),
        "@DATA@": data.replace("<", "\\u003c"),  # no text of a sample ends the script
    }
    return re.sub("@TITLE@|@PLANS@|@DATA@", lambda match: values[match[0]], template)


def run(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or its log.jsonl")
    parser.add_argument("--out", metavar="FILE.html", help="where to write (default: report.html in the first run's folder)")
    options = parser.parse_args(arguments)
    if len(options.runs) > RUNS:
        parser.error(f"{len(options.runs)} runs; expected at most {RUNS} on one page")
    logs = [os.path.join(run, "log.jsonl") if os.path.isdir(run) else run for run in options.runs]
    folders = [os.path.dirname(log) or "." for log in logs]
    out = options.out or os.path.join(folders[0], "report.html")
    if not out.lower().endswith((".html", ".htm")):
        raise Mistake(f"--out {out}: the page is HTML; name a file that ends with .html")
    runs = [Run(log) for log in logs]
    names = [run.name for run in runs]
    for run, folder in zip(runs, folders):
        if names.count(run.name) > 1:
            run.name = folder
    write_whole(out, page(runs, folders, ", ".join(run.name for run in runs)))
    print(f"wrote {out}")


def main(arguments=None):
    return run_script("report.py", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
