"""The rooms of the source: who may include whom, and how long a file may be. Needs only Python's standard library.

A room that is not in FLOORS fails: its place, and what it may include, is decided when it is made.
"""
import os
import re
import unittest

from environment import ROOT

# Name of a floor; its files (folder/ is everything below it that no floor names); the floors that these may include.
# Files of one floor may include each other as long as there is no circle. From the top: the program, what a run does,
# the model, the model's parts, what these are computed with and read from, and at the bottom what any trainer needs.
# The order is not a straight line. Kernels know no option and no file format, files and data know no kernel, so that
# each is read and tested without the other. Of the parts: a parameter's row names recomputation's module, ZeRO's units
# are ranges of parameters, ZeRO shards the optimizer's state, and whatever holds memory is planned. Recomputation
# stands below the options, one of which lists its modules.
PARTS = ["attention", "optimizer", "zero", "fp8", "parameters", "recompute", "timeline", "memory"]
FLOORS = [
    ("program", ["train_gpt.c"], ["run", "gpt", *PARTS, "data", "formats", "config", "kernels", "runtime"]),
    ("run", ["run/"], ["gpt", *PARTS, "data", "formats", "config", "kernels", "runtime"]),
    ("gpt", ["gpt.cuh", "block.cuh", "model/"], [*PARTS, "config", "kernels", "runtime"]),
    ("attention", ["attention.cuh"], ["recompute", "memory", "config", "kernels", "runtime"]),
    ("optimizer", ["optimizer/"], ["zero", "fp8", "parameters", "recompute", "timeline", "memory", "config", "kernels", "runtime"]),
    ("zero", ["zero/"], ["parameters", "recompute", "timeline", "memory", "config", "kernels", "runtime"]),
    ("fp8", ["model/fp8.cuh"], ["parameters", "recompute", "timeline", "memory", "config", "kernels", "runtime"]),
    ("parameters", ["model/parameters.cuh", "model/frozen_weights.cuh"], ["recompute", "config", "kernels", "runtime"]),
    ("timeline", ["model/timeline.cuh"], ["memory", "kernels", "runtime"]),
    ("memory", ["memory.cuh", "memory/"], ["kernels", "runtime"]),
    ("data", ["dataloader.h"], ["formats", "config", "recompute", "runtime"]),
    ("formats", ["formats/"], ["config", "runtime"]),
    ("config", ["config/"], ["recompute", "runtime"]),
    ("recompute", ["recompute.cuh"], ["runtime"]),
    ("kernels", ["kernels/"], ["runtime"]),
    ("runtime", ["runtime/"], []),
]
# What a reader meets first: the core's files, and a folder for each room. A new entry is a decision to be made here.
ENTRIES = ["Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "train_gpt.c", "gpt.cuh", "block.cuh", "attention.cuh", "recompute.cuh", "memory.cuh", "dataloader.h",
           "model", "optimizer", "zero", "memory", "config", "kernels", "run", "formats", "runtime"]
MADE = {"build", "data", "models", "out", "compile_commands.json"}  # a build or a run leaves these
EMULATOR = "test/emu/"  # a kernel's inline PTX has its model on the host there

LINES = 700
LONGER = {
    "formats/unicode_tables.h": None, "formats/unicode_tables.c": None,  # a script writes these
    "kernels/attention/sm90_backward.cu": None,  # one backend's kernels
}
READ_LINES = 4500            # what docs/reading.md lists for a person who changes a model
CORE = ["gpt.cuh", "block.cuh", "model/linear.cuh", "model/state.cuh", "optimizer/optimizer.cuh", "zero/units.cuh"]
CORE_LINES = 2000            # an option lies in a file of its own, which these call
GPT_FIELDS = 30              # of struct gpt, which must be readable at once
RUNTIME_HEADER_LINES = 1478  # of all headers of runtime/ together

NO_C = {"kernels/attention/sm90.cuh"}  # compiled for the CUDA target only

NOT_OURS = {"build", "test", "docs", "scripts"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)


def read_tree():
    """Returns each source file's text by its path, without tests and what a build made, in whatever folder (make
    B=)."""
    tree = {}
    for folder, folders, names in os.walk(ROOT):
        here = os.path.relpath(folder, ROOT)
        if "build-with" in names:
            folders.clear()
            continue
        if here == ".":
            folders[:] = [name for name in folders if name not in NOT_OURS]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith((".c", ".h", ".cuh", ".cu")):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    tree[os.path.normpath(os.path.join(here, name))] = file.read()
    return tree


def floor_of(path):
    """Returns the floor that names the file, or else the floor that names its folder."""
    folder = path[:path.find("/") + 1]
    return next((name for place in (path, folder) for name, files, _ in FLOORS if place in files), None)


def wrong_includes(tree):
    stands_on = {name: lower for name, _, lower in FLOORS}
    for path in sorted(tree):
        floor = floor_of(path)
        if floor is None:
            yield "%s stands on no floor: add it to FLOORS of test/test_floors.py" % path
            continue
        for included in INCLUDE.findall(tree[path]):
            if floor == "kernels" and included.startswith(EMULATOR):
                continue
            other = floor_of(included)
            if included not in tree:
                yield "%s includes %s, which is no file by its path from the root" % (path, included)
            elif other and other != floor and other not in stands_on[floor]:
                yield "%s (%s) includes %s (%s): %s stands on %s" % (path, floor, included, other, floor,
                                                                    ", ".join(stands_on[floor]) or "nothing")


def own_headers_not_first(tree):
    """Yields a fault for each source file of the library or of the ops that does not include its own header first. The
    Makefile does not check again that such a header compiles by itself."""
    for path in sorted(tree):
        base, kind = os.path.splitext(path)
        own = base + (".h" if kind == ".c" else ".cuh")
        if path.startswith(("formats/", "kernels/", "runtime/")) and kind in (".c", ".cu") and own in tree and own not in NO_C:
            first = re.search(r"^[ \t]*#.*", tree[path], re.M)
            if not first or not first[0].startswith('#include "%s"' % own):
                yield "%s does not include %s before anything else" % (path, own)


def circles(tree):
    """Returns each circle of includes once, from its first file in the alphabet."""
    found, done = set(), set()

    def visit(path, way):
        if path in way:
            circle = way[way.index(path):]
            first = circle.index(min(circle))
            found.add(" > ".join([*circle[first:], *circle[:first], min(circle)]))
        elif path not in done:
            for included in INCLUDE.findall(tree.get(path, "")):
                visit(included, [*way, path])
            done.add(path)

    for path in sorted(tree):
        visit(path, [])
    return sorted(found)


def call_circles(tree):
    """Returns circles of .c files that call each other, each as a set of files. A file defines for others the functions
    whose definitions begin a line, and uses the functions of other files that it names."""
    code = {path: re.sub(r"//.*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", "", text) for path, text in tree.items() if path.endswith(".c")}
    owner = {}
    for path, text in code.items():
        for match in re.finditer(r"^(?!static\b|typedef\b)[A-Za-z_][\w \*]*?\b(\w+)\([^;{}]*\)\s*\{", text, re.M):
            owner[match[1]] = path
    uses = {path: {owner[word] for word in re.findall(r"\w+", text) if owner.get(word, path) != path} for path, text in code.items()}

    def reached(path):
        found, new = set(), [path]
        while new:
            new = [other for way in new for other in uses[way] if other not in found and not found.add(other)]
        return found

    reach = {path: reached(path) for path in uses}
    return sorted({" ".join(sorted(other for other in reach[path] if path in reach[other])) for path in uses if path in reach[path]})


def too_long(tree):
    headers = sum(text.count("\n") for path, text in tree.items() if path.startswith("runtime/") and path.endswith(".h"))
    for path in sorted(tree):
        lines, most = tree[path].count("\n"), LONGER.get(path, LINES)
        if most is not None and lines > most:
            yield "%s has %d lines, more than %d" % (path, lines, most)
    if headers > RUNTIME_HEADER_LINES:
        yield "the headers of runtime/ have %d lines, more than %d" % (headers, RUNTIME_HEADER_LINES)


def lines_to_read(page, tree):
    """Returns the page's number of lines to read before changing a model, and the number in the files that it names for
    this."""
    sentence = re.search(r"To change a model, read(.*?)([\d,]+)\s+lines", page, re.S)
    files, folder = [], ""
    for name in re.findall(r"`([^`]+)`", sentence[1]):
        if name.endswith("/"):
            folder = name
        else:
            files.append(folder + name)
    return int(sentence[2].replace(",", "")), sum(tree[file].count("\n") for file in files)


def fields(struct, text):
    """Returns the number of fields of a struct."""
    body = re.search(r"^struct %s \{$(.*?)^\};$" % struct, text, re.M | re.S)[1]
    return sum(statement.count(",") + 1 for statement in re.sub(r"//.*", "", body).split(";") if statement.strip())


class Floors(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.tree = read_tree()

    def no_fault(self, faults):
        faults = list(faults)
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_no_arrow_runs_up(self):
        self.assertGreater(len(self.tree), 50)
        self.no_fault(wrong_includes(self.tree))

    def test_own_headers_come_first(self):
        self.no_fault(own_headers_not_first(self.tree))

    def test_no_include_in_a_circle(self):
        self.no_fault(circles(self.tree))

    def test_no_call_in_a_circle(self):
        """The engine's headers hold their definitions; these are the files that are linked."""
        self.no_fault(call_circles({path: text for path, text in self.tree.items() if path.startswith(("formats/", "runtime/"))}))

    def test_no_file_is_too_long(self):
        self.no_fault(too_long(self.tree))

    def test_the_page_counts_the_lines_to_read(self):
        with open(ROOT + "/docs/reading.md", encoding="utf-8") as file:
            said, counted = lines_to_read(file.read(), self.tree)
        self.assertLessEqual(abs(said - counted), 50, "docs/reading.md says %d, its files have %d" % (said, counted))
        self.assertLessEqual(counted, READ_LINES)

    def test_the_core_is_short(self):
        self.assertLessEqual(sum(self.tree[file].count("\n") for file in CORE), CORE_LINES)
        self.assertLessEqual(fields("gpt", self.tree["model/state.cuh"]), GPT_FIELDS)

    def test_every_file_of_a_floor_is_there(self):
        named = {file for _, files, _ in FLOORS for file in files if not file.endswith("/")}
        self.assertEqual(named - set(self.tree), set())

    def test_the_root_holds_only_the_core_and_the_rooms(self):
        there = {name for name in os.listdir(ROOT) if not name.startswith(".") and name not in MADE}
        self.assertEqual(there, {*ENTRIES, *NOT_OURS - MADE})


class Faults(unittest.TestCase):
    """Faults, planted in a tree of a few files, that the checks must find."""
    TREE = {
        "train_gpt.c": '#include "run/run.cuh"\n#include <math.h>\n',
        "run/run.cuh": '#include "gpt.cuh" // the model\n#include "formats/manifest.h"\n',
        "gpt.cuh": '#include "zero/units.cuh"\n#include "config/config.h"\n',
        "zero/units.cuh": '#include "model/parameters.cuh"\n',
        "model/parameters.cuh": '#include "kernels/norm.cuh"\n',
        "kernels/norm.cuh": '#include "runtime/machine/error.h"\n#ifdef CUDA_EMULATED\n    #include "test/emu/warp.h"\n#endif\n',
        "formats/manifest.h": '#include "config/config.h"\n',
        "config/config.h": '#include "runtime/machine/error.h"\n',
        "runtime/machine/error.h": "\n",
        "runtime/machine/error.c": '#include "runtime/machine/error.h"\n',
    }

    def with_line(self, path, line):
        return {**self.TREE, path: self.TREE.get(path, "") + line + "\n"}

    def test_the_tree_is_right(self):
        self.assertEqual([*wrong_includes(self.TREE), *circles(self.TREE), *too_long(self.TREE)], [])

    def test_arrows_that_run_up(self):
        for path, included in (("runtime/machine/error.c", "config/config.h"), ("runtime/machine/error.h", "formats/manifest.h"),
                               ("kernels/norm.cuh", "config/config.h"), ("kernels/norm.cuh", "formats/manifest.h"), ("kernels/norm.cuh", "gpt.cuh"),
                               ("config/config.h", "formats/manifest.h"), ("formats/manifest.h", "kernels/norm.cuh"),
                               ("formats/manifest.h", "model/parameters.cuh"), ("model/parameters.cuh", "zero/units.cuh"), ("gpt.cuh", "run/run.cuh"),
                               ("gpt.cuh", "formats/manifest.h"), ("zero/units.cuh", "gpt.cuh"), ("run/run.cuh", "train_gpt.c")):
            for spaces in ("", "  "):
                faults = list(wrong_includes(self.with_line(path, '#%sinclude "%s" // why' % (spaces, included))))
                self.assertEqual(len(faults), 1, (path, included, faults))
                self.assertIn("%s (%s) includes %s " % (path, floor_of(path), included), faults[0])

    def test_a_room_that_is_forgotten(self):
        for path in ("new/room.h", "lion.cuh", "kernels.h"):
            faults = list(wrong_includes({**self.TREE, path: "\n"}))
            self.assertEqual(len(faults), 1)
            self.assertIn(path + " stands on no floor", faults[0])

    def test_names_that_are_no_path_from_the_root(self):
        for path, included in (("formats/manifest.h", "token_file.h"), ("config/config.h", "test/emu/warp.h"), ("config/config.h", "../config.h")):
            self.assertIn("which is no file", "".join(wrong_includes(self.with_line(path, '#include "%s"' % included))))

    def test_own_headers(self):
        path = "runtime/machine/error.c"
        self.assertEqual(list(own_headers_not_first(self.TREE)), [])
        self.assertEqual(list(own_headers_not_first(self.with_line(path, "#include <errno.h>"))), [])
        for text in ("", "#include <errno.h>\n", "#ifdef A\n"):
            self.assertEqual(len(list(own_headers_not_first({**self.TREE, path: text + self.TREE[path] if text else ""}))), 1, text)

    def test_call_circles(self):
        ends = 'void net_end(int status) {\n    _exit(status);\n}\n'
        tree = {"runtime/net/a.c": 'static int beat(void) { return 1; }\nint net_run(int n) {\n    net_end(beat()); // b\n}\n',
                "runtime/net/b.c": ends}
        self.assertEqual(call_circles(tree), [])
        tree["runtime/net/b.c"] = ends.replace("_exit(status)", "net_run(status)")
        self.assertEqual(call_circles(tree), ["runtime/net/a.c runtime/net/b.c"])
        tree["runtime/net/b.c"] = ends.replace("_exit(status);", '_exit(status); // net_run\n    say("net_run");')
        self.assertEqual(call_circles(tree), [])

    def test_circles(self):
        tree = self.with_line("runtime/machine/error.h", '#include "runtime/machine/log.h"')
        tree["runtime/machine/log.h"] = '#include "runtime/machine/error.h"\n'
        self.assertEqual(circles(tree), ["runtime/machine/error.h > runtime/machine/log.h > runtime/machine/error.h"])
        self.assertEqual(circles(self.with_line("config/config.h", '#include "config/config.h"')), ["config/config.h > config/config.h"])

    def test_fields(self):
        text = "struct other {\n    int a, b;\n};\nstruct gpt {\n    int a, b; // c; d\n    struct other *o; // e\n\n    char f[3];\n};\n"
        self.assertEqual((fields("other", text), fields("gpt", text)), (2, 4))

    def test_lengths(self):
        def lengths(path, lines):
            return list(too_long({**self.TREE, path: "\n" * lines}))
        self.assertEqual(lengths("gpt.cuh", 700) + lengths("config/config.h", 700) + lengths("formats/unicode_tables.h", 9000), [])
        for path, lines in (("gpt.cuh", 701), ("config/config.h", 701), ("kernels/attention_sm70.cu", 701), ("runtime/machine/error.c", 701)):
            self.assertEqual(len(lengths(path, lines)), 1, path)
        headers = {"runtime/net/%d.h" % i: "\n" * n for i, n in enumerate((600, 600, RUNTIME_HEADER_LINES - 1200))}  # one line is in TREE
        self.assertEqual(list(too_long({**self.TREE, **headers})),
                         ["the headers of runtime/ have %d lines, more than %d" % (RUNTIME_HEADER_LINES + 1, RUNTIME_HEADER_LINES)])


if __name__ == "__main__":
    unittest.main()
