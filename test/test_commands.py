"""Checks that the pages' commands run and their links lead somewhere: the programs take each command of README and docs/,
and their messages name no option that does not exist. Of commands that need a GPU, a cluster or what another command makes, only the options'
names are checked; the others run, with --plan."""
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

from environment import ROOT, built_with_mpi

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
MODEL = os.path.join(ROOT, "test/golden/huggingface/llama")
PAGES = [os.path.join(ROOT, "README.md"), os.path.join(ROOT, "CONTRIBUTING.md"), *sorted(glob.glob(ROOT + "/docs/**/*.md", recursive=True))]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_]*(?:-[a-z0-9_]+)*")
# Options of other programs, and of examples, that the pages name.
OTHERS = {"--allow-run-as-root",  # Open MPI's
          "--logdir",  # TensorBoard's
          "--enable-lora", "--lora-modules", "--max-lora-rank",  # vLLM's
          "--fp8-param-gather", "--muon-no-split-qkv",  # Megatron-LM's
          "--most-layers"}  # docs/extending.md adds it
OTHERS_IN_MESSAGES = {"--bind-to", "--map-by", "--ulimit",  # mpirun's and docker's
                      "--new", "--with-run",  # scripts/follow.py's
                      "--paper", "--ink", "--band", "--line", "--bad"}  # colors of run/plan_page.cuh's style
# Options that --plan can't answer: files that a model, a checkpoint or a text is read from.
NEEDS_FILES = re.compile(r"--(config|init-from|resume|lora-adapter|lora-merge|generate|chat|eval-only|perplexity)\b")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def engine_options():
    text = subprocess.run([PROGRAM, "--help", "all"], capture_output=True, text=True, check=True).stdout
    return set(OPTION.findall(text))


def script_options():
    """Returns the options in the scripts' texts: each script's own tests check what it takes."""
    paths = [path for folder in ("scripts", "test", "test/cuda", "test/golden", "test/long") for path in glob.glob(ROOT + "/" + folder + "/*")
             if path.endswith((".py", ".sh"))]
    return {option for path in paths if path != os.path.abspath(__file__) for option in OPTION.findall(read(path))}


def is_known(option, options):
    """Whether there is such an option; --no-NAME turns a switch off."""
    return option in options or option.startswith("--no-") and "--" + option[len("--no-"):] in options


def commands(path):
    """Returns the lines of a page's blocks of commands, without comments; continued lines are joined."""
    for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", read(path), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"(^|\s)#.*", "", line).strip()


def engine_words(text):
    """Returns the words of an engine's command without the "..." that stands for other options, and may stand for an
    option's value, too."""
    words = shlex.split(text)
    return [word for i, word in enumerate(words) if word != "..." or i > 0 and words[i - 1].startswith("--train-data")]


class Commands(unittest.TestCase):
    def test_options_that_pages_name_are_there(self):
        known = engine_options() | script_options() | OTHERS
        for path in PAGES:
            unknown = {option for option in OPTION.findall(read(path)) if not is_known(option, known)}
            self.assertEqual(unknown, set(), path)

    def test_options_that_messages_name_are_there(self):
        known = engine_options() | OTHERS_IN_MESSAGES
        for folder in (".", "config", "model", "memory", "optimizer", "zero", "run", "formats", "runtime/*", "kernels", "kernels/*"):
            for path in glob.glob("%s/%s/*" % (ROOT, folder)):
                if not path.endswith((".h", ".c", ".cuh", ".cu")):
                    continue
                literals = re.findall(r'"(?:[^"\\\n]|\\.)*"', re.sub(r"//.*", "", read(path)))
                named = {option for literal in literals for option in OPTION.findall(literal)}
                named -= {"--no", "--name", "--json"}  # their strings begin with these and another string ends them
                self.assertEqual({option for option in named if not is_known(option, known)}, set(), path)

    def test_goals_that_pages_name_are_there(self):
        makefile = "".join(map(read, [ROOT + "/Makefile", *glob.glob(ROOT + "/scripts/*.mk")]))
        goals = set(" ".join(re.findall(r"^([a-z][a-z -]*):(?!=)", makefile, re.M)).split()) | set(re.findall(r"\$\(B\)/([a-z_]+):", makefile))
        for path in PAGES:
            for command in commands(path):
                words = command.split()
                if words[:1] == ["make"]:
                    named = [word for word in words[1:] if re.fullmatch("[a-z][a-z-]*", word)]
                    self.assertEqual([goal for goal in named if goal not in goals and not goal.startswith("fuzz-")], [], (path, command))

    def planned(self, may_run, words_of):
        """Returns how many of the engine's commands that may_run takes --plan accepts. It reads no data and writes
        nothing here."""
        ran, refused = 0, []
        for path in PAGES:
            for command in commands(path):
                found = re.search(r"build/train_gpt( [^|>]*)", command)
                if not found or not may_run(command):
                    continue
                words = words_of([word for word in engine_words(found[1]) if not re.match("--plan(=|$)", word)])
                for option in ("--plan-picture", "--plan-json"):
                    if option in words:
                        del words[words.index(option):words.index(option) + 2]
                result = subprocess.run([PROGRAM, *words, "--plan"], capture_output=True, text=True, timeout=120, cwd=ROOT)
                ran += 1
                if result.returncode != 0:
                    refused.append((os.path.relpath(path, ROOT), command, result.stderr))
        self.assertEqual(refused, [])
        return ran

    def test_commands_plan(self):
        """The engine's commands that need no file plan."""
        ran = self.planned(lambda command: not NEEDS_FILES.search(command) and not re.search(r"[$<>|]", command), list)
        self.assertGreater(ran, 9)

    def test_commands_plan_with_a_model(self):
        """Commands that need a model's folder get another model's; commands that need what another command makes do not
        run."""
        def words_of(words):
            words[words.index("--init-from") + 1] = folder
            return words
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(MODEL, folder, dirs_exist_ok=True)
            config = json.loads(read(MODEL + "/config.json"))
            with open(folder + "/config.json", "w", encoding="utf-8") as file:
                json.dump({**config, "max_position_embeddings": 4096}, file)
            ran = self.planned(lambda command: "--init-from" in command and not re.search("--lora-(adapter|merge)", command), words_of)
        self.assertGreater(ran, 8)

    def test_budgets_that_messages_name_fit(self):
        """A refusal names the least budget of each memory with the other memory's budget unchanged: this budget fits,
        and a byte less does not."""
        cases = (("gemma3-270m", 4, 2048, "2476MiB", "782MiB"), ("qwen3-0.6b", 2, 2048, "3GiB", "2GiB"), ("llama3.2-1b", 2, 2048, "5254MiB", "3GiB"))
        for preset, batch, length, device, host in cases:
            def planned(device_budget, host_budget):
                return subprocess.run([PROGRAM, "--plan", "--preset", preset, "--precision", "bf16", "--device", "cpu", "--micro-batch-size", str(batch),
                                       "--global-batch-size", str(batch), "--seq-length", str(length), "--plan-gpu", "GeForce RTX 3080",
                                       "--recompute-granularity", "auto", "--memory-budget", device_budget, "--host-memory-budget", host_budget],
                                      capture_output=True, text=True, timeout=120)
            refused = planned(device, host)
            self.assertEqual(refused.returncode, 2, (preset, refused.stdout))
            named = dict(re.findall(r"(--(?:host-)?memory-budget) (\d+)", refused.stderr))
            self.assertTrue(named, refused.stderr)
            if "--memory-budget" in named:
                self.assertEqual(planned(named["--memory-budget"], host).returncode, 0, (preset, named))
                self.assertEqual(planned(str(int(named["--memory-budget"]) - 1), host).returncode, 2, (preset, named))
            if "--host-memory-budget" in named:
                self.assertEqual(planned(device, named["--host-memory-budget"]).returncode, 0, (preset, named))
                self.assertEqual(planned(device, str(int(named["--host-memory-budget"]) - 1)).returncode, 2, (preset, named))


class Links(unittest.TestCase):
    @staticmethod
    def text(path):
        """The page without its blocks of code."""
        return re.sub(r"^```.*?^```", "", read(path), flags=re.S | re.M)

    def anchors(self, path):
        """Of the page's headings, as GitHub makes them."""
        heads = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head) for head in re.findall(r"^#+ (.+)$", self.text(path), re.M)]
        return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}

    def test_links_lead_to_files_and_headings(self):
        seen = 0
        for path in PAGES:
            for link in re.findall(r"\]\(([^)\s]+)\)", self.text(path)):
                name, _, anchor = link.partition("#")
                target = os.path.join(os.path.dirname(path), name) if name else path
                if name.startswith("http"):
                    continue
                seen += 1
                self.assertTrue(os.path.exists(target), (path, link))
                if anchor:
                    self.assertIn(anchor, self.anchors(target), (path, link))
        self.assertGreater(seen, 100)


class Recomputation(unittest.TestCase):
    def test_its_outputs_are_what_its_commands_print(self):
        blocks = re.findall(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```", read(ROOT + "/docs/recomputation.md"), re.S | re.M)
        self.assertGreater(len(blocks), 4)
        script = "echo ----\n".join(block for block, _ in blocks).replace("build/train_gpt", shlex.quote(PROGRAM))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
        result = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        self.assertEqual(result.stderr, "")
        self.assertEqual(result.stdout.split("----\n"), [output for _, output in blocks])


class Tutorial(unittest.TestCase):
    def test_its_lines_run(self):
        """The page's lines run one after another, in a folder with this tree's programs and scripts, with a tenth of
        the steps."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("scripts", "docs", "README.md"):
                os.symlink(os.path.join(ROOT, name), os.path.join(folder, name))
            os.mkdir(folder + "/build")
            os.symlink(PROGRAM, folder + "/build/train_gpt")
            lines = [re.sub(r"(--(?:train-steps|[a-z]+-every) \d+)0\b", r"\1", line).replace("step_00001200", "step_00000002")
                     for line in commands(ROOT + "/docs/tutorial.md") if line and "--plan " not in line]
            environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            demo = "--train-steps 2 --lr-warmup-steps 1 --checkpoint-every 2 --val-every 0 --sample-every 0"
            ran = []
            for line in lines:
                line = line.replace("make demo", "sh scripts/demo.sh docs %s" % demo).replace("mpirun", "mpirun --oversubscribe --bind-to none")
                if line.startswith("mpirun") and not built_with_mpi(PROGRAM):
                    continue
                result = subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
                self.assertEqual(result.returncode, 0, line + result.stdout + result.stderr)
                ran.append(line.split()[0])
            self.assertGreater(len(ran), 6, ran)


if __name__ == "__main__":
    unittest.main()
