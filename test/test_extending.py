"""docs/extending.md is true: the hunks of each of its sections, applied to a copy of the tree, build and pass what the section
runs; and with any one hunk left out the build or the run fails. Python's standard library alone.

A hunk is a fenced `diff` block: the file's name, then lines that are there (' '), go ('-') or come ('+'). Spaces count as one,
so that alignment may change. A link [PATH](../test/extending/NAME) is a hunk that adds the file PATH with that file's text; a link to
NAME.diff stands for the hunks in that file, which empty lines separate. Hunks of test/ are not left out: they are what tells of the
others.

The short run holds one of the eleven sections to all that and of the others, BUILT_ONLY, that what they change compiles.
"""
import glob
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from environment import ROOT, in_long_run

PAGE = ROOT + "/docs/extending.md"
ADDED = "test/extending"  # whole files that sections add
SOURCES = ["Makefile", "scripts", "test", "config", "formats", "kernels", "memory", "model", "optimizer", "run", "runtime", "zero"]
REUSED = ("build-with*", "commit.c", "linked-for", "library", "library.a", "sanitized", "emu/emulator*", "ops/cpu_fp32*", "ops/cpu_bf16*", "ops/emu_bf16*")
NEEDS = {"A parameter of each layer": ["An op, for both targets"]}  # sections whose hunks come first
# At most so many files and places, tests and what a section needs apart: what the design promises.
MAX = {"An activation function": (5, 6), "A parameter of each layer": (4, 7), "A module of --recompute-modules": (1, 2), "A position bias inside attention": (3, 4),
        "An op inside a branch, with a linear layer of its own": (6, 12), "A second head with a loss of its own": (5, 8), "A kind of rank group": (1, 1),
        "A state of the optimizer": (2, 3), "An option, which only some commands may set": (3, 3), "A preset": (1, 1),
        "An op, for both targets": (2, 3)}
# Sections that the short run only builds: 52 builds and runs otherwise.
BUILT_ONLY = [] if in_long_run() else [name for name in MAX if name != "A preset"]

# What is built and not run is compiled in a third of the time: no object that is taken over depends on these flags.
UNOPTIMIZED = ("TEST_FLAGS=-O0 OP_TEST_FLAGS=-O0 PRECISION_fp32='-O0 -Wno-maybe-uninitialized' "
               "PRECISION_bf16='-DPRECISION_BF16 -O0 -Wno-maybe-uninitialized' ")


class Hunk:
    def __init__(self, text):
        self.path, *self.lines = text.rstrip("\n").split("\n")

    def is_test(self):
        return self.path.startswith("test/")

    def applied(self, text):
        """The file's text with this hunk; a new file where there is none."""
        before = [line[1:] for line in self.lines if line[:1] in (" ", "-")]
        after = [line[1:] for line in self.lines if line[:1] in (" ", "+")]
        if not before:
            assert text is None, f"{self.path} is there already"
            return "\n".join(after) + "\n"
        assert text is not None, f"{self.path} is not there"
        lines = text.split("\n")
        plain = [" ".join(line.split()) for line in lines]
        wanted = [" ".join(line.split()) for line in before]
        found = [i for i in range(len(plain)) if plain[i:i + len(wanted)] == wanted]
        assert len(found) == 1, f"{self.path}: the hunk's place is found {len(found)} times:\n" + "\n".join(before)
        lines[found[0]:found[0] + len(wanted)] = after
        return "\n".join(lines)


def sections():
    with open(PAGE, encoding="utf-8") as file:
        parts = re.split(r"^## (.+)$", file.read(), flags=re.M)[1:]
    result = {}
    for name, body in zip(parts[::2], parts[1::2]):
        hunks = [Hunk(text) for text in re.findall(r"^```diff\n(.*?)^```$", body, re.M | re.S)]
        for path, file_name in re.findall(rf"\[([^]]+)\]\(\.\./{ADDED}/([^)]+)\)", body):
            with open(f"{ROOT}/{ADDED}/{file_name}", encoding="utf-8") as file:
                text = file.read()
            if file_name.endswith(".diff"):
                hunks += map(Hunk, text.split("\n\n"))
            else:
                hunks.append(Hunk("\n".join([path, *("+" + line for line in text.splitlines())])))
        commands = re.findall(r"^```sh\n(.*?)\n```$", body, re.M | re.S)
        result[name] = (hunks, commands)
    return result


class Extending(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="extending_")
        for name in os.listdir(ROOT):
            source = os.path.join(ROOT, name)
            if name in SOURCES and os.path.isdir(source):
                shutil.copytree(source, os.path.join(cls.folder, name))
            elif name in SOURCES or name.endswith((".c", ".h", ".cuh")):
                shutil.copy2(source, cls.folder)
            elif name == ".deps":
                os.symlink(source, os.path.join(cls.folder, name))
        # What this tree's build has made of sources that no hunk changes is not compiled again: the copy has the sources' times.
        cls.made = os.path.join(cls.folder, "made")
        build = os.path.dirname(os.path.join(ROOT, os.environ.get("TRAIN_GPT", "build/train_gpt")))
        for pattern in REUSED:
            for source in glob.glob(os.path.join(build, pattern)):
                made = os.path.join(cls.made, os.path.relpath(source, build))
                os.makedirs(os.path.dirname(made), exist_ok=True)
                (shutil.copytree if os.path.isdir(source) else shutil.copy2)(source, made)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def run_commands(self, commands, hunks, flags=""):
        """Exit status and output of a section's commands in the copy with these hunks; the copy is as before afterwards.
        flags: what make is given besides."""
        kept = {}
        shutil.rmtree(os.path.join(self.folder, "build"), ignore_errors=True)
        if os.path.isdir(self.made):
            shutil.copytree(self.made, os.path.join(self.folder, "build"))
        try:
            for hunk in hunks:
                path = os.path.join(self.folder, hunk.path)
                text = times = None
                if os.path.exists(path):
                    with open(path, encoding="utf-8") as file:
                        text = file.read()
                    times = os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns
                kept.setdefault(path, (text, times))
                with open(path, "w", encoding="utf-8") as file:
                    file.write(hunk.applied(text))
            output = ""
            for command in commands:
                command = command.replace("make ", "make --no-print-directory -j2 CUDA= WERROR=1 " + flags)
                done = subprocess.run(["sh", "-ec", command], cwd=self.folder, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                output += done.stdout
                if done.returncode != 0 or re.search(r" 0 test\(s\) run", done.stdout):
                    return 1, output
            return 0, output
        finally:
            for path, (text, times) in kept.items():
                if text is None:
                    os.remove(path)
                else:
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(text)
                    os.utime(path, ns=times)

    def check(self, name):
        hunks, commands = sections()[name]
        needed = [hunk for other in NEEDS.get(name, []) for hunk in sections()[other][0]]
        ours = [hunk for hunk in hunks if not hunk.is_test()]
        self.assertTrue(hunks and commands, f"{name}: no hunk, or nothing to run")
        files, places = MAX[name]
        self.assertLessEqual(len({hunk.path for hunk in ours}), files, f"{name}: files")
        self.assertLessEqual(len(ours), places, f"{name}: places")
        if name in BUILT_ONLY:
            return
        status, output = self.run_commands(commands, needed + hunks)
        self.assertEqual(status, 0, f"{name}:\n{output[-4000:]}")
        for left_out in ours:
            try:
                status, output = self.run_commands(commands, needed + [hunk for hunk in hunks if hunk is not left_out])
            except AssertionError:
                continue  # another hunk has no place without it
            self.assertNotEqual(status, 0, f"{name}: nothing tells of a hunk of {left_out.path} that was left out:\n" +
                                "\n".join(left_out.lines))

    def fit_together(self, hunks):
        """Whether each of the hunks finds its place after those before it."""
        texts = {}
        for hunk in hunks:
            path = os.path.join(self.folder, hunk.path)
            if hunk.path not in texts and os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    texts[hunk.path] = file.read()
            try:
                texts[hunk.path] = hunk.applied(texts.get(hunk.path))
            except AssertionError:
                return False
        return True

    def test_sections_that_are_only_built(self):
        """Builds in one copy the sections that begin by building the same program."""
        every, groups = sections(), {}
        for name in BUILT_ONLY:
            goals = [command.split(" && ")[0].partition("make ")[2] for command in every[name][1]]
            groups.setdefault(goals[0].split()[0], []).append((name, goals))
        for group in groups.values():
            while group:
                hunks, goals, names = [], [], []
                for name, its_goals in group:
                    more = [hunk for part in [*NEEDS.get(name, []), name] if part not in names for hunk in every[part][0]]
                    if self.fit_together(hunks + more):
                        hunks += more
                        goals += its_goals
                        names += [part for part in [*NEEDS.get(name, []), name] if part not in names]
                self.assertTrue(names, f"a hunk of each of these has no place: {group}")
                status, output = self.run_commands(["make " + " ".join(goals)], hunks, UNOPTIMIZED)
                self.assertEqual(status, 0, f"{names}:\n{output[-4000:]}")
                group = [entry for entry in group if entry[0] not in names]

    def test_every_section_is_held(self):
        self.assertEqual(set(sections()), set(MAX))

    def test_every_added_file_is_of_a_section(self):
        with open(PAGE, encoding="utf-8") as file:
            linked = re.findall(rf"\(\.\./{ADDED}/([^)]+)\)", file.read())
        self.assertEqual(sorted(linked), sorted(os.listdir(f"{ROOT}/{ADDED}")))


for number, name in enumerate(MAX):
    words = re.sub(r"\W+", "_", name).strip("_").lower()
    setattr(Extending, "test_" + words, lambda self, name=name: self.check(name))

if __name__ == "__main__":
    unittest.main()
