"""What is installed: the program and its scripts run from where they were installed, and the manual page, the completions
and docs/options.md have every option of the table."""
import glob
import os
import platform
import pty
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from environment import ROOT, long_test

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
BUILD = os.path.dirname(PROGRAM)
REFERENCE = os.path.join(BUILD, "reference")
COMMANDS = ["prepare-data", "train-tokenizer", "plot-loss", "report", "follow", "chat-format", "convert-tasks", "get", "to-gguf"]


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


def options():
    """Returns the names of the table's options, in its order."""
    rows = "".join(read(path) for path in sorted(glob.glob(ROOT + "/config/*.h")))
    return [name.replace("_", "-") for name in re.findall(r"^ +ROW\(\w+, \w+, (\w+),", rows, re.M)]


@unittest.skipUnless(os.path.exists(REFERENCE), "`make reference` has not run")
class Reference(unittest.TestCase):
    def test_every_option_and_preset_is_there(self):
        names = options()
        self.assertGreater(len(names), 150)
        manual, bash, zsh = (read(REFERENCE, "train_gpt." + name) for name in ("1", "bash", "zsh"))
        for name in names:
            self.assertIn("\n\\fB\\-\\-" + name.replace("-", "\\-") + "\\fP", manual)
            self.assertRegex(bash, r"--%s[ ')]" % name)
            self.assertRegex(zsh, r"--%s[=\[}]" % name)
        for preset in re.findall(r'X\("([\w.-]+)"', read(ROOT, "config/presets.h")):
            self.assertIn("\n.B " + preset.replace("-", "\\-") + "\n", manual)
            self.assertIn(" " + preset, bash)
        for text in (manual, bash, zsh):
            self.assertNotRegex(text, "@[A-Z_]+@")

    def test_the_page_of_options_is_up_to_date(self):
        page = read(REFERENCE, "options.md")
        names = re.findall(r"^--([\w-]+)(?:[= ]|$)", page, re.M)
        self.assertEqual(names, [name for name in re.findall(r"\.TP\n\\fB--([\w-]+)\\fP", read(REFERENCE, "train_gpt.1").replace("\\-", "-"))])
        for line in ("--num-layers=12|N                     Transformer blocks\n", "--resume=none|auto|DIR ", "--qk-layernorm  ", "--cuda-graphs=true|false  "):
            self.assertIn("\n" + line, page)
        self.assertTrue(read(ROOT, "docs/options.md") == page, "docs/options.md is out of date: make docs/options.md")

    def test_the_manual_says_what_the_table_says(self):
        manual = read(REFERENCE, "train_gpt.1")
        for name, words in (("num\\-layers\\fP \\fIN", ["Transformer blocks.", "an integer of at least 1 and below 65536", "Default: 12."]),
                            ("activation\\fP \\fINAME", ["One of: gelu, gelu_erf,", "Default: gelu."]),
                            ("plan\\fP, \\fB\\-\\-no\\-plan", ["One of: false, true or full.", "Default: false."]),
                            ("train\\-data\\fP \\fIGLOB", ["Default: none."])):
            entry = manual.split(".TP\n\\fB\\-\\-" + name, 1)[1].split("\n.TP", 1)[0].replace("\n", " ")
            for word in words:
                self.assertIn(word, entry)

    def test_the_manual_has_no_mistake(self):
        path = os.path.join(REFERENCE, "train_gpt.1")
        checks = {"mandoc": ["-T", "lint", "-W", "warning", path], "groff": ["-man", "-Tutf8", "-ww", "-z", path]}
        found = [name for name in checks if shutil.which(name)]
        if not found:
            self.skipTest("neither mandoc nor groff is installed")
        for name in found:
            checked = run(name, *checks[name])
            self.assertEqual(checked.stdout + checked.stderr, "", name)

    def test_a_part_that_is_not_known_is_refused(self):
        with tempfile.NamedTemporaryFile("w") as template:
            template.write("@NO_PART@\n")
            template.flush()
            wrong = run(os.path.join(BUILD, "write_reference"), template.name)
        self.assertEqual(wrong.returncode, 2)
        self.assertIn("@NO_PART@", wrong.stderr)

    def completed(self, folder, *words):
        """Returns what bash offers after the words, the last of which is begun. A = is a word of its own."""
        script = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _train_gpt; for word in "${COMPREPLY[@]}"; do echo "$word"; done'
        done = run("bash", "--norc", "-c", script, "bash", os.path.join(REFERENCE, "train_gpt.bash"), "train_gpt", *words, cwd=folder)
        self.assertEqual(done.stderr, "")
        return done.stdout.split("\n")[:-1]

    def test_bash_completes(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(folder + "/a folder")
            for name in ("a.bin", "a file.bin"):
                with open(os.path.join(folder, name), "w", encoding="ascii"):
                    pass
            names = ["--help", "--version", *("--" + name for name in options())]
            for words, wanted in ((["--pres"], ["--preset"]), ([""], names), (["--plan", ""], names),
                                  (["--preset", "gpt2-1"], ["gpt2-124m", "gpt2-1558m"]), (["--preset", "=", "demo"], ["demo"]),
                                  (["--optimizer", "="], ["adam", "muon"]), (["--plan", "="], ["false", "true", "full"]), (["--plan", "fu"], ["full"]),
                                  (["--deterministic-mode", "=", "f"], ["false"]), (["--no-deter"], ["--no-deterministic-mode"]),
                                  (["--init-from", ""], ["a folder"]), (["--resume", ""], ["auto", "none", "a folder"]),
                                  (["--lr", ""], []), (["--lr", "1e-4", "--lr-w"], ["--lr-warmup-steps", "--lr-wsd-decay-steps", "--lr-wsd-decay-style"])):
                with self.subTest(words):
                    self.assertEqual(self.completed(folder, *words), wanted)
            self.assertEqual(sorted(self.completed(folder, "--train-data", "a")), ["a file.bin", "a folder", "a.bin"])
            self.assertEqual(sorted(self.completed(folder, "--train-data", "=", "a.")), ["a.bin"])

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh_completes(self):
        """In a terminal of its own, where a widget calls zsh's completion and writes down what it offers."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(REFERENCE, "train_gpt.zsh"), folder + "/_train_gpt")
            os.mkdir(folder + "/models")
            setup = r"""
                PROMPT= RPROMPT= ; cd %s; fpath=(%s $fpath); autoload -Uz compinit; compinit -D -u
                compadd() { local -a hits; [[ " ${@[1,(i)(-|--)]} " == *" -"(O|A|D)" "* ]] || { builtin compadd -A hits "$@"; print -rl -- $hits >>offered; }
                            builtin compadd "$@" }
                offer() { _main_complete; print END >>offered; compstate[insert]= compstate[list]= }
                zle -C offer complete-word offer; bindkey '^T' offer; bindkey '^U' kill-whole-line; print READY >offered
                """ % (folder, folder)
            with open(folder + "/setup", "w", encoding="ascii") as file:
                file.write(setup)
            process, terminal = pty.fork()
            if process == 0:
                os.execvp("zsh", ["zsh", "-f", "-i"])
            try:
                os.write(terminal, ("source %s/setup\n" % folder).encode())
                self.wait(terminal, folder + "/offered", "READY")
                for line, wanted in (("--pres", {"--preset"}), ("--preset gpt2-1", {"gpt2-124m", "gpt2-1558m"}), ("--optimizer=", {"adam", "muon"}),
                                     ("--resume ", {"auto", "none", "models"}), ("--no-plan", {"--no-plan"})):
                    open(folder + "/offered", "w", encoding="ascii").close()
                    os.write(terminal, ("train_gpt " + line + "\x14").encode())
                    offered = self.wait(terminal, folder + "/offered", "END")
                    os.write(terminal, b"\x15")
                    self.assertLessEqual(wanted, {word.rstrip("/") for word in offered}, line)
            finally:
                os.kill(process, signal.SIGKILL)
                os.close(terminal)
                os.waitpid(process, 0)

    def wait(self, terminal, path, line):
        """Returns the file's lines when it has this one. What the terminal shows is read and forgotten."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.02)[0]:
                os.read(terminal, 65536)
            lines = read(path).splitlines() if os.path.exists(path) else []
            if line in lines:
                return lines
        self.fail("zsh did not answer")


@unittest.skipUnless(os.path.exists(REFERENCE), "`make reference` has not run")
class Installed(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(suffix=" a b")  # DESTDIR may have blanks
        self.addCleanup(shutil.rmtree, self.folder)
        self.root = self.folder + "/usr/local"

    def install(self, action="install", prefix="/usr/local"):
        return run(ROOT + "/scripts/install/install.sh", action, BUILD, self.folder, prefix, cwd=ROOT)

    def files(self):
        return [os.path.relpath(os.path.join(at, name), self.root) for at, _, names in os.walk(self.folder) for name in names]

    def test_the_program_and_its_scripts_run_from_there(self):
        installed = self.install()
        self.assertEqual((installed.returncode, installed.stderr), (0, ""), installed.stdout)
        self.assertIn("installed into %s: train_gpt " % self.root, installed.stdout)
        self.assertIn("for CPUs ", installed.stdout)
        program = self.root + "/bin/train_gpt"
        self.assertEqual(run(program, "--version", cwd=self.folder).stdout, run(PROGRAM, "--version").stdout)
        self.assertEqual(run(program, "--preset", "demo", "--plan", cwd=self.folder).returncode, 0)
        os.symlink(self.root + "/bin/train_gpt-prepare-data", self.folder + "/prepare")  # as a user may have in another bin
        with open(self.folder + "/text.txt", "w", encoding="ascii") as file:
            file.write("Once upon a time.\n" * 100)
        prepared = run(self.folder + "/prepare", "text.txt", "--val-fraction", "0", "--out", "shard", cwd=self.folder)
        self.assertEqual(prepared.returncode, 0, prepared.stderr)
        small = ["--vocab-size", "257", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32", "--threads", "1"]
        trained = run(program, *small, "--train-steps", "1", "--train-data", "shard_train_*.bin", "--mlflow-tracking-uri", "nowhere", "--out", "out", cwd=self.folder)
        self.assertIn("follow.py: mlflow: nowhere is no server's address", trained.stderr)
        page = run(self.root + "/bin/train_gpt-report", "out", cwd=self.folder)
        self.assertEqual((page.returncode, page.stdout), (0, "wrote out/report.html\n"), page.stderr)
        for name in COMMANDS:
            helped = run(self.root + "/bin/train_gpt-" + name, "--help", cwd=self.folder)
            self.assertEqual((helped.returncode, helped.stderr), (0, ""), name)
        self.assertEqual([name for name in self.files() if "__pycache__" in name], [])

    def test_modules_that_scripts_import_are_installed(self):
        self.assertEqual(self.install().returncode, 0)
        there = {os.path.basename(path)[:-3] for path in glob.glob(glob.escape(self.root) + "/share/train_gpt/*.py")}
        ours = {os.path.basename(path)[:-3] for path in glob.glob(ROOT + "/scripts/*.py")}
        for name in there:
            imported = set(re.findall(r"^\s*(?:import|from) (\w+)", read(ROOT, "scripts", name + ".py"), re.M)) & ours
            self.assertEqual(imported - there, set(), name + ": name it in scripts/install/install.sh")

    def test_what_is_installed_goes(self):
        self.assertEqual(self.install().returncode, 0)
        files = self.files()
        for name in ("bin/train_gpt", "share/man/man1/train_gpt.1", "share/bash-completion/completions/train_gpt", "share/zsh/site-functions/_train_gpt",
                     "share/doc/train_gpt/docs/install.md", "share/doc/train_gpt/README.md"):
            self.assertIn(name, files)
        os.makedirs(self.root + "/share/other")
        with open(self.root + "/share/other/file", "w", encoding="ascii"):
            pass
        self.assertEqual(self.install("remove").returncode, 0)
        self.assertEqual(self.files(), ["share/other/file"])

    def test_a_folder_that_cannot_be_written_is_named(self):
        with open(self.folder + "/file", "w", encoding="ascii"):
            pass
        refused = self.install(prefix="/file/x")
        self.assertEqual(refused.returncode, 2)
        self.assertRegex(refused.stderr, r"^install.sh: .*/file/x can't be written; .* PREFIX=\n$")

    def test_make_passes_the_folders_on(self):
        """And builds nothing, though other variables are set than when the program was built."""
        other = {"x86_64": "x86-64", "aarch64": "armv8-a"}.get(platform.machine(), "native")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
        for goal, action in (("install", "install"), ("uninstall", "remove")):
            made = run("make", "-n", "CUDA=", "B=" + os.path.relpath(BUILD, ROOT), goal, "DESTDIR=/a b", "PREFIX=/c", "ARCH=" + other, cwd=ROOT, env=environment)
            self.assertIn("install.sh %s %s '/a b' '/c'" % (action, os.path.relpath(BUILD, ROOT)), made.stdout, made.stderr)
            self.assertEqual(made.stdout.count("\n"), 1, made.stdout)

    @long_test("the files of a package are installed as in test_the_program_and_its_scripts_run_from_there")
    @unittest.skipUnless(shutil.which("dpkg-shlibdeps"), "dpkg-dev is not installed")
    def test_a_package_holds_it(self):
        build = os.path.relpath(BUILD, ROOT)
        made = run(ROOT + "/scripts/install/deb.sh", build, self.folder, cwd=ROOT)
        self.assertEqual(made.returncode, 0, made.stderr)
        package = made.stdout.split(":")[0]
        fields = dict(line.split(": ", 1) for line in run("dpkg-deb", "-f", package).stdout.splitlines() if ": " in line)
        self.assertEqual(fields["Package"], "train-gpt")
        self.assertRegex(fields["Depends"], r"libc6 \(>= .*libjansson4.*python3")
        self.assertEqual(run("dpkg-deb", "-x", package, self.folder).returncode, 0)
        self.assertEqual(run(self.folder + "/usr/bin/train_gpt", "--preset", "demo", "--plan").returncode, 0)
        self.assertEqual(run(self.folder + "/usr/bin/train_gpt-get", "--help").returncode, 0)
        self.assertIn("usr/share/doc/train-gpt/copyright", run("dpkg-deb", "-c", package).stdout)


class Version(unittest.TestCase):
    def test_the_version_stands_in_one_place(self):
        version = re.search(r'TRAIN_GPT_VERSION "(.*)"', read(ROOT, "config/config.h")).group(1)
        self.assertEqual(re.findall(r"^## (\d+\.\d+\.\d+)\b", read(ROOT, "CHANGELOG.md"), re.M)[0], version)
        self.assertTrue(run(PROGRAM, "--version").stdout.startswith("train_gpt %s (commit " % version))


if __name__ == "__main__":
    unittest.main()
