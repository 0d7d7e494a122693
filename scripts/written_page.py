"""Pages of docs/ that scripts write, and tests hold to what they write."""
import sys


def write_or_check(text, path, check, complaint, part=False):
    """Writes the text, or holds a page to it: all of the page, or a part. Returns the exit status."""
    if not check:
        sys.stdout.write(text)
        return 0
    with open(path, encoding="utf-8") as file:
        there = file.read()
    if text in there if part else text == there:
        return 0
    print(complaint)
    return 1
