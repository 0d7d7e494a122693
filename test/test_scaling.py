"""The scaling model, its page and its plans, the example launches, and the table of one and two ranks: none needs a cluster."""
import dataclasses
import glob
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest

from environment import ROOT

SCRIPTS = os.path.join(ROOT, "scripts")
sys.path.insert(0, SCRIPTS)
# pylint: disable=wrong-import-position
import bench_parallel  # noqa: E402
import scaling_model as sm  # noqa: E402
from roofline import Shape  # noqa: E402

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))

TIED = sm.Model(Shape("tied", 3, 64, 4, 2, 128, 1000, False, 2, 32), 1)
UNTIED = sm.Model(Shape("untied", 3, 64, 4, 2, 128, 1000, True, 2, 32, tied=False), 1)
FREE = dataclasses.replace(sm.Machine(), nvlink_gbps=1e18, nic_gbps=1e18, latency_scale=0.0)


def scaling_model(*arguments):
    return subprocess.run([sys.executable, os.path.join(SCRIPTS, "scaling_model.py"), *arguments], capture_output=True, text=True,
                          check=False)


class Instant(sm.Model):
    """Compute that takes no time."""
    def seconds(self, machine):
        return {"embedding": [0.0, 0.0], "layer": [0.0, 0.0], "head": [0.0, 0.0]}, {}


class Queues(unittest.TestCase):
    def test_by_hand(self):
        # two backwards of 3 s, each reduced for 2 s: the second reduction is exposed
        now, waited = sm.simulate([(3.0, 0), (3.0, 0), (1.0, 2)], [(2.0, 1), (2.0, 2)], 0.0)
        self.assertAlmostEqual(now, 9.0)
        self.assertAlmostEqual(waited, 2.0)
        # beside the first reduction compute goes at half its rate, and so ends 1 s later
        now, waited = sm.simulate([(3.0, 0), (3.0, 0), (1.0, 2)], [(2.0, 1), (2.0, 2)], 0.5)
        self.assertAlmostEqual(now, 10.0)
        self.assertAlmostEqual(waited, 2.0)
        # a network that is slower than compute
        now, waited = sm.simulate([(1.0, 0), (1.0, 0), (0.0, 2)], [(4.0, 1), (4.0, 2)], 0.0)
        self.assertAlmostEqual(now, 9.0)
        self.assertAlmostEqual(waited, 7.0)

    def test_queues_that_wait_for_each_other(self):
        with self.assertRaises(ValueError):
            sm.simulate([(1.0, 1)], [(1.0, 1)], 0.0)


class Scaling(unittest.TestCase):
    def test_page_is_what_the_script_writes(self):
        result = scaling_model("--check")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_parameters(self):
        for model, published in zip(sm.MODELS, (1557.6e6, 8030.3e6, 70553.7e6)):  # GPT-2's: 47 rows of padding less
            self.assertAlmostEqual(model.parameters / published, 1, places=3)

    def test_elements_sent(self):
        for model in (TIED, UNTIED, *sm.MODELS):
            one_micro_step = sm.Model(model.shape, 1)
            once = model.head if model.shape.tied else model.head + model.embedding  # at stage 3; the rest is gathered twice
            for gpus in (2, 8, 64):
                for stage, elements in enumerate([2 * model.parameters] * 3 + [3 * model.parameters - once]):
                    sent = sm.Step(sm.Run(one_micro_step, gpus, stage), sm.Machine()).predict()["sent_elements"]
                    self.assertAlmostEqual(sent / (elements * (gpus - 1) / gpus), 1, places=9)

    def test_bytes_of_micro_steps(self):
        # fp32 reductions, bf16 parameters; stage 0 gathers fp32 gradients
        model = sm.Model(TIED.shape, 4)
        for bf16, wire in ((False, 4), (True, 2)):
            for stage, size in enumerate((wire + 4, wire + 2, 4 * wire + 2, 4 * (wire + 2 + 2))):
                sent = sm.Step(sm.Run(model, 8, stage, bf16_gradients=bf16), sm.Machine()).predict()["sent_bytes"]
                once = 4 * 2 * model.head if stage == 3 else 0
                self.assertAlmostEqual(sent / ((size * model.parameters - once) * 7 / 8), 1, places=9)

    def test_default_bucket(self):
        self.assertEqual([sm.default_bucket_mib(gpus) for gpus in (1, 8, 32, 33, 1024)], [32, 32, 32, 33, 1024])
        for gpus, mib in ((16, 32), (1024, 1024)):
            runs = [sm.predict(sm.Run(sm.MODELS[1], gpus, 3, "none", bucket), sm.Machine()) for bucket in (0, mib)]
            self.assertEqual(runs[0], runs[1])

    def test_a_free_network_leaves_compute(self):
        for stage in sm.STAGES:
            result = sm.predict(sm.Run(sm.MODELS[0], 64, stage), FREE)
            self.assertAlmostEqual(result["step_ms"] / result["compute_ms"], 1, places=6)
            self.assertLess(result["exposed_ms"], 1e-3)
        # but for the norm, of which each rank has its part
        stage_0, one = (sm.predict(sm.Run(sm.MODELS[0], gpus, 0), FREE)["step_ms"] for gpus in (64, 1))
        part = 4e3 * sm.MODELS[0].parameters * 63 / 64 / (sm.roofline.BYTES_PER_S * FREE.efficiency)
        self.assertAlmostEqual((one - part) / stage_0, 1, places=6)

    def test_what_waits_for_what(self):
        """Of three layers, by hand: how much of the other queue an entry waits for."""
        def queues(model, stage, policy="none"):
            step = sm.Step(sm.Run(model, 8, stage, policy), sm.Machine())
            return [needs for _, needs in step.compute], [after for _, after in step.network]
        # forward: embedding, three layers in two entries, head; backward: head, three layers, embedding; norm, update
        self.assertEqual(queues(UNTIED, 0), ([0] * 8 + [0] * 5 + [10, 11], [9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14]))
        gathers = [1, 2, 3, 3, 4, 4, 5, 5]  # a layer's second entry makes the next unit's norm
        self.assertEqual(queues(UNTIED, 1), (gathers + [0, 4, 3, 2, 0] + [10, 11], [0] * 5 + [9, 10, 11, 12, 13, 14]))
        # head; layer and what the unit before it left, three times; embedding and what two units left
        self.assertEqual(queues(UNTIED, 2), (gathers + [0] + [4, 6, 3, 7, 2, 8] + [0, 9, 10] + [10, 11],
                                             [0] * 5 + [9, 10, 12, 14, 16, 19]))
        # the last layer is gathered when the head is done, each of the others as the one above it begins
        self.assertEqual(queues(UNTIED, 3), (gathers + [0] + [6, 7, 8, 9, 10, 11] + [0, 12, 13] + [13, 14],
                                             [0, 0, 1, 3, 5] + [9, 9, 9, 10, 11, 12, 14, 16, 19]))
        # a tied table comes again for the head, and is waited for there
        self.assertEqual(queues(TIED, 3)[0][:8], [1, 2, 3, 3, 4, 4, 5, 6])
        # what is made again waits for its layer, and then the one below begins to come
        needs, after = queues(UNTIED, 3, "full")
        self.assertEqual(needs[8:18], [0, 6, 6, 7, 8, 8, 9, 10, 10, 11])
        self.assertEqual(after[5:11], [9, 9, 10, 11, 13, 14])

    def test_micro_steps_begin_anew(self):
        for stage, reductions in ((0, 2), (1, 1), (2, 2), (3, 2)):  # of a unit; stage 0 gathers the sum
            step = sm.Step(sm.Run(sm.Model(UNTIED.shape, 2), 8, stage), sm.Machine())
            gathers = {0: 0, 1: 5, 2: 5, 3: 2 * 8}[stage]
            self.assertEqual(len(step.network), gathers + 5 * reductions + 1)

    def test_instant_compute_leaves_communication(self):
        machine = dataclasses.replace(sm.Machine(), efficiency=1e15)  # the update too
        for stage in sm.STAGES:
            model = Instant(sm.MODELS[0].shape, 2)
            result = sm.Step(sm.Run(model, 64, stage), machine).predict()
            self.assertAlmostEqual(result["step_ms"] / result["communication_ms"], 1, places=6)

    def test_bounds_and_monotone(self):
        for stage in sm.STAGES:
            for gpus in (8, 64, 1024):
                last = 0.0
                for rate in (1000.0, 360.0, 100.0, 20.0):
                    machine = dataclasses.replace(sm.Machine(), nvlink_gbps=rate, nic_gbps=rate / 8, sm_share=0.0)
                    r = sm.predict(sm.Run(sm.MODELS[0], gpus, stage), machine)
                    self.assertGreaterEqual(r["step_ms"], last)
                    self.assertGreaterEqual(r["step_ms"] + 1e-9, max(r["compute_ms"], r["communication_ms"]))
                    self.assertLessEqual(r["step_ms"], r["compute_ms"] + r["communication_ms"] + 1e-9)
                    self.assertAlmostEqual(r["step_ms"], r["compute_ms"] + r["exposed_ms"], places=6)
                    last = r["step_ms"]

    def test_collectives(self):
        machine = sm.Machine()
        for size in (1e3, 1e6, 1e9, 1e11):
            times = [sm.ring_seconds(machine, gpus, size) for gpus in (2, 4, 8, 16, 64, 1024)]
            self.assertEqual(times, sorted(times))
        # a large message is all bandwidth, a small one all latency: LL's, by hand
        self.assertAlmostEqual(sm.ring_seconds(machine, 8, 1e13) / (7 / 8 * 1e13 / 360e9), 1, places=4)
        self.assertAlmostEqual(sm.ring_seconds(machine, 16, 0), 1e-6 * (6.6 + 14 * 0.6 * 1.8 + 2.7), places=12)
        # a slow adapter counts between nodes only
        slow = dataclasses.replace(machine, nic_gbps=10.0)
        self.assertEqual(sm.ring_seconds(slow, 8, 1e9), sm.ring_seconds(machine, 8, 1e9))
        self.assertGreater(sm.ring_seconds(slow, 16, 1e11), 4 * sm.ring_seconds(machine, 16, 1e11))

    def test_the_bucket_is_a_trade(self):
        # within a node small pieces overlap no worse; at 1024 GPUs each pays for 1023 hops
        def step(gpus, mib=0):
            return sm.predict(sm.Run(sm.MODELS[1], gpus, 1, "none", mib), sm.Machine())["step_ms"]
        self.assertLess(step(1024, 512), 0.6 * step(1024, 32))
        self.assertLess(step(8, 32), 1.01 * step(8, 2048))
        for gpus in sm.GPUS:
            self.assertLess(step(gpus), 1.02 * min(step(gpus, mib) for mib in sm.BUCKETS_MIB))

    def test_one_run(self):
        slow = json.loads(scaling_model("--model", "llama3-8b", "--gpus", "64", "--nvlink-gbps", "100").stdout)
        self.assertGreater(slow["step_ms"], json.loads(scaling_model("--model", "llama3-8b", "--gpus", "64").stdout)["step_ms"])
        for arguments, words in ((("--model", "llama3-70b", "--zero-stage", "0"), "raise --zero-stage"),
                                 (("--model", "llama3-8b", "--gpus", "12"), "whole nodes")):
            result = scaling_model(*arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn(words, result.stderr)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = folder.name

    def program(self, name, text):
        path = os.path.join(self.path, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path

    def call(self, script, *arguments, **environment):
        return subprocess.run([os.path.join(SCRIPTS, script), *arguments], capture_output=True, text=True, check=False, timeout=60,
                              env={**os.environ, **environment})


# A train_gpt that plans a number of bytes a GPU for each layer, with the attention and the arenas that it is told.
PLANNER = """#!{python}
import json, sys
a = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
arenas = [{{"name": name, "bytes": int(a["--num-layers"]) * 10**9 // int(a["--world-size"])}} for name in {arenas}]
with open(sys.argv[sys.argv.index("--plan-json") + 1], "w") as file:
    json.dump({{"arenas": arenas, "peak_bytes": sum(arena["bytes"] for arena in arenas)}}, file)
"""


class Plans(Folder):
    """What docs/internals/scaling_plans.json holds, and where what it does not hold comes from."""
    def planner(self, arenas=sm.ARENAS):
        text = PLANNER.format(python=sys.executable, arenas=arenas)
        return self.program(f"planner_{len(os.listdir(self.path))}", text)

    def test_plans_are_those_of_the_engine_to_the_byte(self):
        result = scaling_model("--train-gpt", PROGRAM, "--check")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_plans_are_of_the_models_that_the_page_is_about(self):
        """2 P of parameters, 4 P of gradients, 10 P of optimizer, sharded as the stage says."""
        for run in sm.planned_runs():
            with self.subTest(run=(run.model.name, run.gpus, run.stage, run.policy)):
                s, planned = run.model.shape, sm.planned_arenas(run)
                rotary = 4 * s.T * s.D if s.llama else 0
                for arena, size, sharded_from in (("parameters", 2, 3), ("gradients", 4, 2), ("optimizer", 10, 1)):
                    part = run.model.parameters / (run.gpus if run.stage >= sharded_from else 1)
                    bytes_of_arena = planned[arena] - (rotary if arena == "parameters" else 0)
                    # tensors are padded to 128 elements, 14e-6 of GPT-2; among ranks each part of a piece too, 0.34 % on 1024, where the
                    # optimizer's tables of tensors and pieces are 0.21 %; on one GPU 2e-6
                    padding = 0.006 if run.gpus > 1 else 2e-5
                    self.assertAlmostEqual(bytes_of_arena / (size * part), 1, delta=padding)
        for run in sm.planned_runs():
            less = {"none": "selective", "selective": "full"}.get(run.policy)
            if less:
                self.assertLess(sm.planned_gb(dataclasses.replace(run, policy=less)), sm.planned_gb(run))

    def test_policy_is_the_first_that_leaves_the_reserve(self):
        model, machine = sm.MODELS[1], sm.Machine()
        self.assertIsNone(sm.policy_that_fits(sm.MODELS[2], machine, 8, 3))
        for policy in sm.POLICIES:
            planned = sm.planned_gb(sm.Run(model, 8, 1, policy))
            for missing_bytes in (-1, 1):
                small = dataclasses.replace(machine, memory_gb=planned + machine.reserve_gb - 1e-9 * missing_bytes)
                self.assertEqual(sm.policy_that_fits(model, small, 8, 1) == policy, missing_bytes < 0)

    def test_runs_without_a_written_plan(self):
        for arguments in (("--bucket-mib", "128"), ("--grad-reduce-in-bf16",), ("--gpus", "24", "--recompute", "none")):
            self.assertIsNone(json.loads(scaling_model("--model", "llama3-8b", *arguments).stdout)["planned_gb"])
        refused = scaling_model("--model", "llama3-8b", "--gpus", "24")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("no plan of llama3-8b on 24 GPUs", refused.stderr)
        made = json.loads(scaling_model("--model", "llama3-8b", "--gpus", "24", "--train-gpt", self.planner()).stdout)
        self.assertAlmostEqual(made["planned_gb"], 4 * 32 / 24)

    def test_programs_that_plan_otherwise(self):
        for planner, words in ((self.planner(arenas=("parameters", "activations")), "plans other arenas"),
                               (self.program("none", "#!/bin/sh\necho no engine >&2\nexit 2\n"), "made no plan: no engine")):
            result = scaling_model("--train-gpt", planner)
            self.assertEqual((result.returncode, result.stdout), (2, ""))
            self.assertIn(words, result.stderr)


# Says who it is and what it was given; may end badly, or wait to be told to stop.
RANK = """#!/bin/sh
said="$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE"
for word in "$@"; do said="$said [$word]"; done
echo "$said"
if [ "${RANK:-none}" = "${WAITS:-}" ]; then
    trap 'exit 3' TERM
    touch "$WAITING"
    while :; do sleep 0.05; done
fi
[ "${RANK:-none}" != "${FAILS:-}" ] || exit 5
"""


class Launches(Folder):
    def test_syntax(self):
        for name in sorted(os.listdir(SCRIPTS)):
            if name.startswith("launch_"):
                subprocess.run(["sh", "-n", os.path.join(SCRIPTS, name)], check=True)

    def two_hosts(self, *options, **environment):
        """Both of them this one: what ssh would run there, a shell runs here."""
        return {"args": [os.path.join(SCRIPTS, "launch_two_hosts.sh"), "other", *options],
                "env": {**os.environ, "GPUS": "2", "ADDRESS": "first", "PORT": "1234", "RSH": "sh -c",
                        "TRAIN_GPT": self.program("rank", RANK), **environment}}

    def test_two_hosts(self):
        options = ["--train-data", "data/it's_*.bin", "--out", "two  words \"$HOME\""]
        result = subprocess.run(**self.two_hosts(*options), capture_output=True, text=True, check=False, timeout=10)
        self.assertEqual(result.returncode, 0, result.stderr)
        given = "".join(f" [{word}]" for word in ["--rendezvous", "first:1234", *options])
        expected = [f"{rank} 4 {rank % 2} 2{given}" for rank in range(4)]
        self.assertEqual(sorted(result.stdout.splitlines()), expected)

    def test_two_hosts_have_one_environment(self):
        """What changes what is computed goes there too: ssh takes nothing along."""
        rank = self.program("says", '#!/bin/sh\necho "$RANK [${NVTE_FLASH_ATTN:-}] [${DNNL_MAX_CPU_ISA:-}]"\n')
        there = "exec env -u NVTE_FLASH_ATTN -u DNNL_MAX_CPU_ISA sh -c \"$1\""
        call = self.two_hosts(TRAIN_GPT=rank, NVTE_FLASH_ATTN="0", DNNL_MAX_CPU_ISA="it's", RSH=self.program("rsh", "#!/bin/sh\n" + there))
        result = subprocess.run(**call, capture_output=True, text=True, check=False, timeout=10)
        self.assertEqual(sorted(result.stdout.splitlines()), [f"{rank} [0] [it's]" for rank in range(4)], result.stderr)

    def test_variables_are_those_of_the_table(self):
        """What ranks must agree on, and what the launch scripts take to them."""
        with open(os.path.join(ROOT, "run", "environment.h"), encoding="utf-8") as file:
            table = re.findall(r'^    \{"([A-Z0-9_]+)", ', file.read(), re.M)
        with open(os.path.join(SCRIPTS, "launch_environment.sh"), encoding="utf-8") as file:
            listed = re.search('COMPUTING_VARIABLES="([^"]*)"', file.read())[1].split()
        self.assertEqual(listed, table)
        read = set()
        for path in [os.path.join(ROOT, "attention.cuh"), *glob.glob(os.path.join(ROOT, "kernels", "**", "*.*"), recursive=True)]:
            with open(path, encoding="utf-8") as file:
                read.update(re.findall(r'"((?:NVTE|CUDNN)_[A-Z_]+)"', file.read()))
        self.assertIn("NVTE_FLASH_ATTN", read)
        self.assertLessEqual(read, set(table))

    def test_two_hosts_share_a_secret(self):
        """One that was made, another in each run, or the user's; it is no argument of a command."""
        rank = self.program("tells", '#!/bin/sh\necho "$RANK $TRAIN_GPT_SECRET"\n')
        remote = self.program("rsh", '#!/bin/sh\nfor word in "$@"; do echo "argument $word"; done >&2\nexec sh -c "$1"\n')
        environment = {name: value for name, value in os.environ.items() if name != "TRAIN_GPT_SECRET"}
        seen = []
        for given in (None, None, "the user's own secret"):
            job = self.two_hosts(TRAIN_GPT=rank, RSH=remote)
            job["env"] = {**environment, **{name: job["env"][name] for name in ("GPUS", "ADDRESS", "PORT", "RSH", "TRAIN_GPT")},
                          **({"TRAIN_GPT_SECRET": given} if given else {})}
            result = subprocess.run(**job, capture_output=True, text=True, check=True, timeout=10)
            ranks = dict(line.split(" ", 1) for line in result.stdout.splitlines())
            self.assertEqual(sorted(ranks), ["0", "1", "2", "3"])
            self.assertEqual(len(set(ranks.values())), 1, ranks)
            self.assertIn("argument ", result.stderr)
            self.assertNotIn(ranks["0"], result.stderr)
            seen.append(ranks["0"])
        self.assertEqual(seen[2], "the user's own secret")
        self.assertRegex(seen[0] + " " + seen[1], "^[0-9a-f]{64} [0-9a-f]{64}$")
        self.assertNotEqual(seen[0], seen[1])

    def test_two_hosts_report_a_failure(self):
        for rank in ("1", "2"):  # here, there
            result = subprocess.run(**self.two_hosts(FAILS=rank), capture_output=True, text=True, check=False, timeout=10)
            self.assertEqual(result.returncode, 5)

    def test_two_hosts_stop(self):
        waiting = os.path.join(self.path, "waiting")
        job = subprocess.Popen(**self.two_hosts(WAITS="0", WAITING=waiting), stdout=subprocess.DEVNULL,
                               start_new_session=True)
        try:
            for _ in range(200):
                if os.path.exists(waiting):
                    break
                time.sleep(0.05)
            job.send_signal(signal.SIGTERM)
            self.assertEqual(job.wait(timeout=10), 3)
        finally:
            if job.poll() is None:  # nothing is left behind by a test that fails
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()

    def test_mpirun(self):
        result = self.call("launch_mpirun.sh", "--out", "a b", MPIRUN=self.program("mpirun", RANK), RANKS="16",
                           HOSTS="one:8,two:8", NCCL_DEBUG="INFO", NVTE_FLASH_ATTN="0", TRAIN_GPT_SECRET="of the ranks")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("[-np] [16] [--host] [one:8,two:8] ", result.stdout)
        self.assertIn("[-x] [NCCL_DEBUG] ", result.stdout)
        self.assertIn("[-x] [NVTE_FLASH_ATTN] ", result.stdout)
        self.assertIn("[-x] [TRAIN_GPT_SECRET] ", result.stdout)
        self.assertNotIn("of the ranks", result.stdout)
        self.assertIn("[--collectives] [nccl] [--out] [a b]\n", result.stdout)
        result = self.call("launch_mpirun.sh", MPIRUN=self.program("mpirun", RANK), TARGET="cpu", RANKS="2")
        self.assertIn("[--map-by] [ppr:1:socket] [--bind-to] [socket] [build/train_gpt] [--device] [cpu]", result.stdout)
        self.assertEqual(self.call("launch_mpirun.sh", TARGET="tpu").returncode, 2)

    def slurm(self, status):
        srun = self.program("srun", f'#!/bin/sh\necho "srun $* threads=$OMP_NUM_THREADS secret=$TRAIN_GPT_SECRET"\nexit {status}\n')
        scontrol = self.program("scontrol", '#!/bin/sh\necho "scontrol $*"\n')
        return self.call("launch_slurm.sh", "--out", "x", SRUN=srun, SCONTROL=scontrol, SLURM_SUBMIT_DIR=ROOT, SLURM_JOB_ID="77",
                         SLURM_CPUS_PER_TASK="12")

    def test_slurm(self):
        for status, requeued in ((0, False), (1, False), (3, True)):  # done, failed, stopped before the last step
            result = self.slurm(status)
            self.assertEqual(result.returncode, status)
            self.assertRegex(result.stdout, r"build/train_gpt --resume auto --out x threads=12 secret=[0-9a-f]{64}\n")
            self.assertEqual("scontrol requeue 77" in result.stdout, requeued)
        with open(os.path.join(SCRIPTS, "launch_slurm.sh"), encoding="utf-8") as file:
            lines = file.read().splitlines()
        self.assertEqual([line[:8] for line in lines[1:11]], ["#SBATCH "] * 10)  # sbatch reads none after the first command


# A train_gpt that trains nothing: writes a plan, or the log of a run whose two ranks hide three quarters of 40 ms.
TRAINER = """#!{python}
import json, os, sys
a = sys.argv[1:]
if "--plan-json" in a:
    buffers = [{{"arena": "gradients", "bytes": 4000}}, {{"arena": "activations", "bytes": 5}}]
    json.dump({{"buffers": buffers}}, open(a[a.index("--plan-json") + 1], "w"))
    sys.exit(0)
ranks, value = int(os.environ.get("RANKS", "1")), lambda name: int(a[a.index(name) + 1])
os.makedirs(a[a.index("--out") + 1])
micro = value("--global-batch-size") // (ranks * value("--micro-batch-size"))
stage = value("--zero-stage")
sent = {{0: 2, 1: 2, 2: micro + 1, 3: 3 * micro}}[stage] * 4000 // 2 if ranks > 1 else 0
with open(a[a.index("--out") + 1] + "/log.jsonl", "w") as f:
    for step in range(value("--train-steps")):
        slow = 1000 if step < 2 else 0
        f.write(json.dumps({{"step": step + 1, "step_ms": slow + 10 + 90 * micro, "comm_bytes": sent if {sends} else 0,
                            "comm_ms": 40 if ranks > 1 else 0, "comm_exposed_ms": 10 if ranks > 1 else 0}}) + "\\n")
"""


class Bench(Folder):
    def bench(self, sends=True):
        trainer = self.program("train_gpt", TRAINER.format(python=sys.executable, sends=sends))
        mpirun = self.program("mpirun", '#!/bin/sh\nexport RANKS=$2\nshift 2\nexec "$@"\n')
        table = os.path.join(self.path, "table.json")
        return self.call("bench_parallel.py", "--steps", "1", "--json", table, TRAIN_GPT=trainer, MPIRUN=mpirun), table

    def test_table(self):
        result, path = self.bench()
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
        self.assertEqual(table["elements"], 1000)
        two = [row for row in table["rows"] if row["ranks"] == 2]
        self.assertEqual(len(two), 10)
        for row in two:
            self.assertEqual(row["bytes_to_theory"], 1)
            self.assertEqual(row["hidden"], 0.75)
            # half the micro-steps a rank, less the 10 ms of each step, or as many in the same time
            self.assertAlmostEqual(row["ratio"], 1.9 if row["case"] == "same global batch" else 2)
        self.assertEqual(len(result.stdout.splitlines()), 1 + len(table["rows"]))
        self.assertIn("same global batch      2     3    100.0      10240   1.90", result.stdout)

    def test_ranks_that_send_nothing(self):
        result, _ = self.bench(sends=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("sent nothing", result.stderr)

    def test_theory(self):
        for stage, times in enumerate((2, 2, 2, 3)):
            self.assertEqual(bench_parallel.theory_bytes(1000, 4, stage, 1), times * 4000 * 3 / 4)
        self.assertEqual(bench_parallel.theory_bytes(1000, 2, 2, 3), 4 * 4000 / 2)
        self.assertEqual(bench_parallel.theory_bytes(1000, 2, 3, 3), 9 * 4000 / 2)
        self.assertEqual(bench_parallel.theory_bytes(1000, 1, 0, 1), 0)


if __name__ == "__main__":
    unittest.main()
