"""Writes or checks pages of docs/ that scripts write: tests compare each page with what its script would write."""
import sys


def write_or_check(text, path, check, complaint, part=False):
    """Writes the text to standard output or, with check, prints the complaint where the page at `path` is not the
    text or, with part, does not have it. Returns the exit status."""
    if not check:
        sys.stdout.write(text)
        return 0
    with open(path, encoding="utf-8") as file:
        there = file.read()
    if text in there if part else text == there:
        return 0
    print(complaint)
    return 1
