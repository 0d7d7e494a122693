"""Writes or checks pages of docs/ that scripts write: tests compare each page with what its script would write."""
import itertools
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


def table_as_block(lines):
    """Returns a Markdown table as a block of text in columns, which needs no renderer to be read. A column of figures is to the
    right."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for i, line in enumerate(lines) if i != 1]
    columns = []
    for i, cells in enumerate(zip(*rows)):
        figures = i > 0 and all(cell[:1] in "-(0123456789" for cell in cells[1:])
        columns.append([(str.rjust if figures else str.ljust)(cell, max(map(len, cells))) for cell in cells])
    return ["```text", *("  ".join(row).rstrip() for row in zip(*columns)), "```"]


def tables_as_blocks(text):
    """Returns a page with its tables as blocks, but for those that have links or code."""
    lines = []
    for is_table, group in itertools.groupby(text.split("\n"), key=lambda line: line.startswith("|")):
        group = list(group)
        lines += table_as_block(group) if is_table and not any("](" in line or "`" in line for line in group) else group
    return "\n".join(lines)
