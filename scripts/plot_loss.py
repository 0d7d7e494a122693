#!/usr/bin/env python3
"""Draws the loss curves of one or more runs from their log.jsonl.

  scripts/plot_loss.py out/log.jsonl                         writes out/loss.svg
  scripts/plot_loss.py a/log.jsonl b/log.jsonl --out ab.svg  compares two runs
  scripts/plot_loss.py out/log.jsonl --png                   writes out/loss.png too

The training loss is a thin line, its moving average a thick line, validation losses are points, and the learning rate
lies beneath. The SVG needs only Python; the PNG needs rsvg-convert (the same picture), matplotlib or gnuplot, whichever
is there.
"""

import argparse
import html
import json
import math
import os
import shutil
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mistakes import Mistake, run_script  # noqa: E402: lies beside this file

WIDTH, LEFT, RIGHT = 960, 72, 40
LOSS_TOP, LOSS_BOTTOM, RATE_TOP, RATE_BOTTOM, HEIGHT = 78, 424, 450, 512, 562
# Okabe and Ito's colors, which color-blind readers can tell apart: (training, validation) of each run.
COLORS = [("#0072b2", "#d55e00"), ("#009e73", "#cc79a7"), ("#56b4e9", "#e69f00"), ("#555555", "#999999")]
TEXT, FAINT, GRID = "#222222", "#666666", "#e6e6e6"
COLUMNS = 600  # of a line of many points: each is drawn as the range of its values


def write_whole(path, text):
    """Writes a file of which nobody sees a part."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


# --- The log ----------------------------------------------------------------------------------------------------------


class Run:
    """A log's rows by step. Of a step that is there twice (a resumed run) the later row's values count."""

    def __init__(self, path):
        self.path = path
        self.name = (
            os.path.basename(os.path.dirname(os.path.abspath(path))) if os.path.basename(path) == "log.jsonl" else path
        )
        rows = {}
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError):
                if number == len(lines):  # still being written
                    continue
                raise Mistake(f"{path}, line {number}: not JSON; expected one object a line") from None
            if isinstance(row, dict) and finite(row.get("step")):
                rows.setdefault(row["step"], {}).update(row)
        self.rows = [rows[step] for step in sorted(rows)]
        self.loss, self.val_loss, self.rate = self.series("loss"), self.series("val_loss"), self.series("lr")
        if not self.loss and not self.val_loss:
            raise Mistake(f'{path}: has no loss; expected lines such as {{"step": 1, "loss": 5.5}}')

    def series(self, name):
        return [(row["step"], row[name]) for row in self.rows if finite(row.get(name))]

    def summary(self, smooth):
        parts = []
        if smooth:
            parts.append(f"training loss {smooth[-1][1]:.4g}")
        if self.val_loss:
            step, best = min(self.val_loss, key=lambda point: point[1])
            last = self.val_loss[-1][1]
            parts.append(
                f"validation loss {last:.4g}" + (f" (best {best:.4g} at step {step:,})" if best < last else "")
            )
        if self.rows and finite(self.rows[-1].get("tokens")):
            parts.append(f"{short(self.rows[-1]['tokens'])} tokens")
        rates = [rate for _, rate in self.series("tokens_per_second")]
        if rates:
            parts.append(f"{short(statistics.median(rates))} tokens/s")
        return ", ".join(parts)


def finite(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def moving_average(points, window):
    """Returns the mean of the points around each point: of fewer points near the start, where the loss falls fast
    and the mean of many would be too high."""
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    average = []
    for i, (step, _) in enumerate(points):
        half = min(window // 2, i // 3)
        begin, end = i - half, min(len(points), i + half + 1)
        average.append((step, (sums[end] - sums[begin]) / (end - begin)))
    return average


# --- The picture ------------------------------------------------------------------------------------------------------


def short(value):
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ticks(low, high, about):
    """Returns round numbers from low to high, about so many, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_text(value, values):
    step = values[1] - values[0] if len(values) > 1 else abs(value) or 1
    if step >= 1:
        return f"{value:,.0f}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def rate_text(value):
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


class Axis:
    """Maps values from low to high to places from begin to end."""

    def __init__(self, low, high, begin, end):
        self.low, self.high, self.begin, self.end = low, high if high > low else low + 1, begin, end

    def __call__(self, value):
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def text(x, y, content, size=12, color=FAINT, anchor="start", weight="normal", more=""):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}"{more}>{html.escape(str(content))}</text>'
    )


def line(points, color, width, opacity=1.0):
    if len(points) == 1:
        return (
            f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="{width}" fill="{color}" opacity="{opacity}"/>'
        )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" '
        f'stroke-linecap="round" opacity="{opacity}"/>'
    )


def thinned(points, x):
    """Returns the points; of many points only the least and the greatest of each column, which look the same and
    stay few."""
    if len(points) <= 2 * COLUMNS:
        return points
    columns = {}
    for step, value in points:
        columns.setdefault(int((x(step) - LEFT) / (WIDTH - LEFT - RIGHT) * COLUMNS), []).append((step, value))
    kept = []
    for column in columns.values():
        kept += sorted({min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])})
    return kept


def frame(x, y, rate):
    """Draws grid, ticks and names of the axes. rate: the learning rate's axis; None: there is none."""
    parts = []
    values = ticks(y.low, y.high, 7)
    for value in values:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{GRID}"/>'
        )
        parts.append(text(LEFT - 8, y(value) + 4, tick_text(value, values), anchor="end"))
    bottom = RATE_BOTTOM if rate else LOSS_BOTTOM
    values = [value for value in ticks(x.low, x.high, 8) if value == int(value)]
    for value in values:
        for top, end in ((LOSS_TOP, LOSS_BOTTOM), (RATE_TOP, RATE_BOTTOM))[: 2 if rate else 1]:
            parts.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top}" y2="{end}" stroke="{GRID}"/>')
        parts.append(text(x(value), bottom + 18, tick_text(value, values), anchor="middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, "step", 13, anchor="middle"))
    middle = (LOSS_TOP + LOSS_BOTTOM) / 2
    parts.append(
        text(22, middle, "loss, nats a token", 13, anchor="middle", more=f' transform="rotate(-90 22 {middle})"')
    )
    if rate:
        parts.append(text(LEFT - 8, rate(rate.high) + 4, rate_text(rate.high), anchor="end"))
        parts.append(text(LEFT - 8, rate(0) + 4, "0", anchor="end"))
        parts.append(text(LEFT + 2, RATE_TOP - 4, "learning rate", 11))
    for top, end in ((LOSS_TOP, LOSS_BOTTOM), (RATE_TOP, RATE_BOTTOM))[: 2 if rate else 1]:
        parts.append(f'<path d="M{LEFT} {top}V{end}H{WIDTH - RIGHT}" fill="none" stroke="#aaaaaa"/>')
    return parts


def curves(runs, averages, x, y):
    parts = ['<g clip-path="url(#loss)">']
    for (color, _), run in zip(COLORS, runs):
        parts.append(
            line([(x(step), y(value)) for step, value in thinned(run.loss, x)], color, 1, 0.3) if run.loss else ""
        )
    for (color, _), average in zip(COLORS, averages):
        parts.append(line([(x(step), y(value)) for step, value in thinned(average, x)], color, 2.2) if average else "")
    parts.append("</g>")
    for (_, color), run in zip(COLORS, runs):
        points = [(x(step), y(value)) for step, value in run.val_loss]
        if points:
            parts.append(line(points, color, 1.4))
            parts += [
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.4" fill="white" stroke="{color}" stroke-width="1.8"/>'
                for px, py in (points if len(points) <= 80 else points[-1:])
            ]
    return parts


def legend(runs):
    """Draws the legend in the upper right corner, which a falling curve leaves free."""
    rows = []
    for (train, val), run in zip(COLORS, runs):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if run.loss:
            rows.append((prefix + "training, moving average", train, False))
        if run.val_loss:
            rows.append((prefix + "validation", val, True))
    left = WIDTH - RIGHT - 40 - 6.6 * max(len(row[0]) for row in rows)
    parts = [
        f'<rect x="{left - 10:.0f}" y="{LOSS_TOP + 4}" width="{WIDTH - RIGHT - left + 6:.0f}" '
        f'height="{20 * len(rows) + 10}" fill="white" opacity="0.85"/>'
    ]
    for i, (name, color, marked) in enumerate(rows):
        middle = LOSS_TOP + 20 + 20 * i
        parts.append(
            f'<line x1="{left:.0f}" x2="{left + 26:.0f}" y1="{middle}" y2="{middle}" stroke="{color}" '
            'stroke-width="2.2"/>'
        )
        if marked:
            parts.append(
                f'<circle cx="{left + 13:.0f}" cy="{middle}" r="3.4" fill="white" stroke="{color}" '
                'stroke-width="1.8"/>'
            )
        parts.append(text(left + 34, middle + 4, name, color=TEXT))
    return parts


def draw(runs, averages, title):
    steps = [row["step"] for run in runs for row in run.rows]
    # The averages and validation stay in the picture; single steps may leave it above (an outlier) and below.
    values = [value for points in averages + [run.val_loss for run in runs] for _, value in points]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    x = Axis(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y = Axis(low - margin, high + margin, LOSS_BOTTOM, LOSS_TOP)
    rates = [value for run in runs for _, value in run.rate]
    rate = Axis(0, max(rates), RATE_BOTTOM, RATE_TOP + 6) if rates and max(rates) > 0 else None
    height = HEIGHT if rate else HEIGHT - (RATE_BOTTOM - LOSS_BOTTOM)
    subtitle = runs[0].summary(averages[0]) if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f'<clipPath id="loss"><rect x="{LEFT}" y="{LOSS_TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{LOSS_BOTTOM - LOSS_TOP}"/></clipPath>',
        '<rect width="100%" height="100%" fill="white"/>',
        text(LEFT, 34, title, 18, TEXT, weight="bold"),
        text(LEFT, 56, subtitle, 13),
    ]
    parts += frame(x, y, rate) + curves(runs, averages, x, y)
    if rate:
        parts += [
            line([(x(step), rate(value)) for step, value in thinned(run.rate, x)], colors[0], 1.6)
            for colors, run in zip(COLORS, runs)
            if run.rate
        ]
    return "\n".join(parts + legend(runs) + ["</svg>", ""])


# --- PNG --------------------------------------------------------------------------------------------------------------


def png_by_matplotlib(runs, averages, title, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.6, 5.6), dpi=200)
    for (train, val), run, average in zip(COLORS, runs, averages):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for points, style in (
            (run.loss, {"color": train, "lw": 0.6, "alpha": 0.35}),
            (average, {"color": train, "lw": 1.6, "label": prefix + "training, moving average"}),
            (run.val_loss, {"color": val, "lw": 1, "marker": "o", "ms": 3, "label": prefix + "validation"}),
        ):
            if points:
                axes.plot(*zip(*points), **style)
    axes.set(title=title, xlabel="step", ylabel="loss, nats a token")
    axes.grid(color=GRID)
    axes.legend(frameon=False)
    figure.savefig(path, bbox_inches="tight")


def pale(color):
    """Mixes a color with white: gnuplot's terminal knows no transparency."""
    return "#" + "".join(f"{255 - (255 - int(color[i : i + 2], 16)) * 3 // 10:02x}" for i in (1, 3, 5))


def png_by_gnuplot(runs, averages, title, path):
    quoted = lambda content: '"' + content.translate(str.maketrans({'"': "'", "\\": "/", "\n": " "})) + '"'
    plots, data = [], []
    for (train, val), run, average in zip(COLORS, runs, averages):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for points, style in (
            (run.loss, f'with lines lw 1 lc rgb "{pale(train)}" notitle'),
            (average, f'with lines lw 4 lc rgb "{train}" title {quoted(prefix + "training, moving average")}'),
            (run.val_loss, f'with linespoints lw 2 pt 7 ps 1.8 lc rgb "{val}" title {quoted(prefix + "validation")}'),
        ):
            if points:
                plots.append(f"'-' {style}")
                data.append("".join(f"{step} {value}\n" for step, value in points) + "e\n")
    script = (
        f'set terminal png size 1920,1120 font ",22"\nset output {quoted(path)}\nset title {quoted(title)} noenhanced\n'
        'set key noenhanced\nset xlabel "step"\nset ylabel "loss, nats a token"\nset grid\n'
        f"plot {', '.join(plots)}\n{''.join(data)}"
    )
    subprocess.run(["gnuplot"], input=script, text=True, check=True)


def write_png(svg_path, path, runs, averages, title):
    if shutil.which("rsvg-convert"):
        subprocess.run(["rsvg-convert", "--zoom=2", svg_path, "-o", path], check=True)
        return
    try:
        png_by_matplotlib(runs, averages, title, path)
    except ImportError:
        if not shutil.which("gnuplot"):
            raise Mistake(
                "--png needs rsvg-convert, matplotlib or gnuplot, and none is there: apt-get install librsvg2-bin; "
                f"{svg_path} is written"
            ) from None
        png_by_gnuplot(runs, averages, title, path)


# --- Command line -----------------------------------------------------------------------------------------------------


def run(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log.jsonl of a run, or the folder that holds it")
    parser.add_argument("--out", metavar="FILE.svg", help="where to write (default: loss.svg beside the first log)")
    parser.add_argument("--png", action="store_true", help="also write a PNG beside it")
    parser.add_argument(
        "--smooth", type=int, metavar="STEPS", help="width of the moving average (default: a fortieth of the run)"
    )
    parser.add_argument("--title", help="headline (default: name of the run's folder)")
    options = parser.parse_args(arguments)
    if len(options.logs) > len(COLORS):
        parser.error(f"{len(options.logs)} logs; expected at most {len(COLORS)} in one picture")
    if options.smooth is not None and options.smooth < 1:
        parser.error(f"--smooth is {options.smooth}; expected at least 1")
    logs = [os.path.join(log, "log.jsonl") if os.path.isdir(log) else log for log in options.logs]
    out = options.out or os.path.join(os.path.dirname(logs[0]), "loss.svg")
    if any(os.path.realpath(log) == os.path.realpath(out) for log in logs):
        parser.error(f"--out {out} is a log that is drawn, and would be lost; name another file")

    runs = [Run(log) for log in logs]
    averages = [moving_average(run.loss, options.smooth or len(run.loss) // 40) for run in runs]
    title = options.title or ("Loss: " + ", ".join(run.name for run in runs))
    write_whole(out, draw(runs, averages, title))
    print(f"wrote {out}")
    if options.png:
        png = os.path.splitext(out)[0] + ".png"
        write_png(out, png, runs, averages, title)
        print(f"wrote {png}")


def main(arguments=None):
    return run_script("plot_loss.py", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
