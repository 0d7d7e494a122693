#!/usr/bin/env python3
"""Draws the activations of one model's step side by side, by recomputation: none, selective, full. Each panel has the
buffers of --plan-picture, all on one scale.

  plan_pictures.py [--train-gpt build/train_gpt] [engine's options] >docs/recomputation.svg

Options that are given take the place of WORDS, the plan of docs/recomputation.md. Needs only Python's library."""
import argparse
import re
import subprocess
import sys
import tempfile

WORDS = ["--preset", "llama3.2-1b", "--precision", "bf16", "--micro-batch-size", "8", "--plan-gpu", "H200"]
POLICIES = ["none", "selective", "full"]
WIDTH, HEIGHT, GAP, TOP, LEFT = 300, 300, 20, 30, 10
# Where --plan-picture has phases and addresses: its axes' ends.
X0, X1, Y0, Y1 = 260.0, 1190.0, 770.0, 70.0
RECT = re.compile(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="(#\w+)"><title>[^\n<]*\n[^\n<]*\n([^\n<]*)\n')


def drawn(program, words, policy):
    """Returns the bytes of the activations arena and its buffers: (x, y, width, height, color, category) in shares."""
    with tempfile.NamedTemporaryFile(suffix=".svg") as file:
        subprocess.run([program, "--plan", *words, "--recompute-granularity", policy, "--plan-picture", file.name], check=True, stdout=subprocess.DEVNULL)
        with open(file.name, encoding="utf-8") as picture:
            text = picture.read()
    bytes_of_arena = int(re.search(r"<title>activations \((\d+) bytes\)", text)[1])
    return bytes_of_arena, [((float(x) - X0) / (X1 - X0), (Y0 - float(y)) / (Y0 - Y1), float(width) / (X1 - X0), float(height) / (Y0 - Y1), color, category)
                            for x, y, width, height, color, category in RECT.findall(text.partition('<g class="buffers"')[2])]


def panel(left, policy, arena, buffers, largest):
    """Returns the lines of a panel, whose buffers are one path a color."""
    paths = {}
    for x, y, width, height, color, _ in buffers:
        scale = HEIGHT * arena / largest
        rect = "M%.1f %.1fh%.1fv%.1fh-%.1fz" % (left + WIDTH * x, TOP + HEIGHT - scale * y, WIDTH * width, scale * height, WIDTH * width)
        if scale * height >= 0.05:
            paths.setdefault(color, []).append(rect)
    yield '<text x="%d" y="20">%s: %.2f GiB</text>' % (left, policy, arena / 2**30)
    yield '<path d="M%d %dv%dh%d" fill="none" stroke="#999"/>' % (left, TOP, HEIGHT, WIDTH)
    yield from ('<path fill="%s" d="%s"/>' % (color, "".join(rects)) for color, rects in paths.items())


def picture(program, words):
    """Returns the SVG."""
    plans = [drawn(program, words, policy) for policy in POLICIES]
    largest = max(arena for arena, _ in plans)
    categories = {category: color for _, buffers in plans for *_, height, color, category in buffers if height > 0.01}
    width = LEFT + len(POLICIES) * (WIDTH + GAP)
    bottom = TOP + HEIGHT + 25
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">' % (width, bottom + 20 * (len(categories) + 3) // 4),
             '<rect width="100%" height="100%" fill="#fff"/>']
    for i, (policy, (arena, buffers)) in enumerate(zip(POLICIES, plans)):
        lines += panel(LEFT + i * (WIDTH + GAP), policy, arena, buffers, largest)
    for i, (category, color) in enumerate(categories.items()):
        x, y = LEFT + i % 4 * 235, bottom + i // 4 * 20
        lines.append('<rect x="%d" y="%d" width="10" height="10" fill="%s"/><text x="%d" y="%d">%s</text>' % (x, y - 9, color, x + 15, y, category))
    return "\n".join([*lines, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--train-gpt", default="build/train_gpt", help="the engine's program")
    options, words = parser.parse_known_args()
    sys.stdout.write(picture(options.train_gpt, words or WORDS))


if __name__ == "__main__":
    main()
