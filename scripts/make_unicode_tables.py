#!/usr/bin/env python3
"""Writes formats/unicode_tables.c, the tables that formats/unicode_tables.h declares.

    pip install tokenizers; scripts/make_unicode_tables.py > formats/unicode_tables.c      (Python 3.11)

Token ids must be the `tokenizers` package's, so the package is asked for all that depends on the version of Unicode: it
knows 16 where it splits and 9 where it normalizes. The tables by which text is normalized are compared with the
package's answers for every character before they are written.
"""
import sys
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split()
CODES = [code for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
HANGUL = range(0xAC00, 0xD7A4)  # composed by arithmetic


def ranges(values):
    """Returns rows [first, last, value] of {code: value}."""
    rows = []
    for code, value in sorted(values.items()):
        if rows and rows[-1][1] == code - 1 and rows[-1][2] == value:
            rows[-1][1] = code
        else:
            rows.append([code, code, value])
    return rows


def newer_categories():
    """Returns the categories of characters of Unicode 15 and 16, which PCRE2 before 10.43 (Debian 12's) takes for
    unassigned."""
    new = [code for code in CODES if unicodedata.category(chr(code)) == "Cn"]
    found = {}
    for category in CATEGORIES:
        matches = pre_tokenizers.Split(Regex(rf"\p{{{category}}}"), "removed").pre_tokenize_str
        found.update({code: category for code in new if not matches(chr(code))})
    return ranges(found)


def decompositions():
    rows = []
    for code in CODES:
        parts = unicodedata.decomposition(chr(code)).split()
        known = normalizers.NFD().normalize_str(chr(code)) != chr(code)
        if known and parts and not parts[0].startswith("<") and code not in HANGUL:
            rows.append((code, *(int(part, 16) for part in parts), 0)[:3])
    return rows


def combining_classes():
    """Returns {code: combining class} of the marks that the package knows: it moves a known mark to the other
    side of a mark of a higher or a lower class."""
    normalize = normalizers.NFD().normalize_str
    marks = [code for code in CODES if unicodedata.combining(chr(code))]
    moves = lambda text: normalize(text) != text
    return {
        code: unicodedata.combining(chr(code))
        for code in marks
        if moves("\u0345" + chr(code)) or moves(chr(code) + "\u0334") or code in (0x334, 0x345)
    }


def check(rows, classes, pairs):
    """Checks that the package normalizes as the tables do, by code that follows Unicode's definition and is slow."""
    parts = {code: [first, second] if second else [first] for code, first, second in rows}
    package = normalizers.NFC().normalize_str

    def decompose(code):
        return [c for part in parts[code] for c in decompose(part)] if code in parts else [code]

    def normalize(text):
        codes = [c for character in text for c in decompose(ord(character))]
        for end in range(len(codes)):  # stable sort of each run of marks
            i = end
            while i and 0 < classes.get(codes[i], 0) < classes.get(codes[i - 1], 0):
                codes[i - 1 : i + 1] = codes[i], codes[i - 1]
                i -= 1
        out, starter, last = [], None, 0
        for code in codes:
            combining = classes.get(code, 0)
            composed = pairs.get((out[starter], code)) if starter is not None else None
            if composed and (last < combining or (last == 0 and starter == len(out) - 1)):
                out[starter] = composed
                continue
            if combining == 0:
                starter, last = len(out), 0
            else:
                last = combining
            out.append(code)
        return "".join(map(chr, out))

    for code in CODES:
        if code not in HANGUL:
            for text in (chr(code), f"a{chr(code)}\u0323\u0345", f"\u0301{chr(code)}", f"a{chr(code)}\u0301",
                         f"\u0345{chr(code)}\u0334", f"e{chr(code)}\u0301"):
                assert package(text) == normalize(text), (hex(code), text)
    for _, first, second in rows:
        for text in (chr(first) + "\u0323" * 2 + chr(second or 0x300), chr(first) + chr(second or 0x300)):
            assert package(text) == normalize(text), text


def print_table(type_name, name, dimensions, cells):
    print(f"const {type_name} {name}{dimensions} = {{")
    line = "   "
    for cell in cells:
        if len(line) + len(cell) + 2 > 119:
            print(line)
            line = "   "
        line += f" {cell},"
    print(f"{line}\n}};\nconst size_t {name}_count = sizeof {name} / sizeof *{name};")


def main():
    assert unicodedata.unidata_version == "14.0.0", "which characters are new counts from Unicode 14"
    rows, classes = decompositions(), combining_classes()
    composed = [i for i, row in enumerate(rows) if row[2] and unicodedata.normalize("NFC", chr(row[0])) == chr(row[0])]
    composed.sort(key=lambda i: rows[i][1:])
    check(rows, classes, {rows[i][1:]: rows[i][0] for i in composed})
    print("// Written by scripts/make_unicode_tables.py: change that, not this.")
    print('#include "formats/unicode_tables.h"\n')
    print_table("struct unicode_category", "unicode_newer_categories", "[]",
                [f'{{{a:#x}, {b:#x}, "{c}"}}' for a, b, c in newer_categories()])
    print()
    print_table("struct unicode_combining", "unicode_combining_classes", "[]",
                [f"{{{a:#x}, {b:#x}, {c}}}" for a, b, c in ranges(classes)])
    print()
    print_table("uint32_t", "unicode_decompositions", "[][3]", [f"{{{a:#x}, {b:#x}, {c:#x}}}" for a, b, c in rows])
    print()
    print_table("uint16_t", "unicode_compositions", "[]", map(str, composed))


if __name__ == "__main__":
    sys.exit(main())
