"""--self-check on the emulator, with faults planted in its kernels (test/emu/fault.h): what is found, what the run
falls back on, what it says, and that a second start costs nothing. Skipped where TRAIN_GPT_CUDA names no train_gpt of
the emulator."""
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import unittest

from environment import chosen, free_port, long_test

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT_CUDA") or "/nowhere")
TEXT = b"for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\nreturn sum / (double)n + 1e-9;\n" * 30
OPTIONS = ("--device cuda --precision bf16 --num-layers 1 --hidden-size 128 --num-attention-heads 2 --num-query-groups 1 --kv-channels 64 "
           "--position-embedding-type rope --vocab-size 257 --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-steps 2 "
           "--lr 1e-3 --val-every 0 --checkpoint-every 0 --matmul-tuning=false").split()


@unittest.skipUnless(os.path.exists(PROGRAM), "TRAIN_GPT_CUDA names no train_gpt of the emulator")
class SelfCheck(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        with open(cls.folder.name + "/t_train_000.bin", "wb") as file:
            file.write(struct.pack("<256i", 20240520, 1, len(TEXT), *[0] * 253) + struct.pack(f"<{len(TEXT)}H", *TEXT))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def popen(self, *arguments, cwd=None, stdin=None, **environment):
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("EMU_", "TRAIN_GPT_SELF_CHECK"))}
        # With one multiprocessor, the check takes one tile of tokens and the rest of a second one.
        clean["EMU_MULTIPROCESSORS"] = "1"
        return subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
                                env={**clean, "EMU_CAPABILITY": "9.0", "NVTE_FUSED_ATTN": "0", "EMU_SLOW": "flash", **environment})

    def begin(self, name, *arguments, **environment):
        """Starts a run whose --out has this name."""
        return self.popen(*OPTIONS, "--train-data", self.folder.name + "/t_train_*.bin", "--out", f"{self.folder.name}/{name}", *arguments, **environment)

    def start(self, name, *arguments, **environment):
        """Returns what a run says, and its losses."""
        process = self.begin(name, *arguments, **environment)
        result = subprocess.CompletedProcess([], None, *process.communicate(timeout=300))
        result.returncode = process.returncode
        losses = []
        if result.returncode == 0:
            with open(f"{self.folder.name}/{name}/log.jsonl", encoding="utf-8") as file:
                entries = list(map(json.loads, file))
            losses = [entry["loss"] for entry in entries if "loss" in entry]
            self.refused = [entry["self_check"] for entry in entries if "self_check" in entry]
        return result, losses

    def row(self, result, name):
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return next((line for line in result.stdout.splitlines() if line.startswith(name)), "")

    def test_right_kernels_are_checked_once(self):
        """The verdict is kept in --out. A second start goes by it, unless it must always check; another model's verdict
        is a new one."""
        first, losses = self.start("once")
        self.assertRegex(self.row(first, "self-check"), r"attention's kernels are right, within 0\.00\d+ of what they should give; \d+\.\d\d s$")
        self.assertIn("flash, wgmma", self.row(first, "attention"))
        second, again = self.start("once")
        self.assertRegex(self.row(second, "self-check"), r"right, within 0\.00\d+ .*; by self_check.txt in --out")
        self.assertEqual(losses, again)
        with open(self.folder.name + "/once/self_check.txt", encoding="utf-8") as file:
            lines = file.read().splitlines()
        self.assertEqual(len(lines), 6, lines)
        self.assertRegex(lines[0], r"^right\twithin 0\.00\d+\temulated GPU; .* of %d bytes.*; bf16 backend=\d simpler=\d heads=2 groups=1 dim=64 [^\n]*$" % os.path.getsize(PROGRAM))
        self.assertRegex(lines[3], r"^right\tproducts\temulated GPU; .*; bf16 products=[0-9a-f]{16}$")
        for line, kind in zip(lines[4:], ("begun", "right")):
            self.assertRegex(line, f"^{kind}\\tgraphs\\temulated GPU; .*; bf16 backend=\\d ranks=1 by=ours products=[0-9a-f]{{16}} graphs=[0-9a-f]{{16}} kind=0$")
        for line in lines[1:3]:
            self.assertRegex(line, r"^right\t\d[0-9.]* ms\temulated GPU; .*; bf16 backend=3 others=2 cudnn=0 B=1 T=32 .*; time of [13]$")
        always, _ = self.start("once", "--self-check", "always", TRAIN_GPT_SELF_CHECK="off")
        self.assertRegex(self.row(always, "self-check"), r"; \d+\.\d\d s$")
        other, _ = self.start("once", "--num-query-groups", 2)
        self.assertRegex(self.row(other, "self-check"), r"; \d+\.\d\d s$")

    def test_a_program_for_other_gpus_is_said(self):
        result, _ = self.start("no_code", EMU_NO_CODE="1")
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr, "does not run on emulated GPU, of compute capability 9.0: no kernel image .*; `make cuda GPU_ARCH=release` builds one")

    def test_off(self):
        off, losses = self.start("off", "--self-check", "off")
        self.assertEqual(self.row(off, "self-check"), "")
        site, also = self.start("site", TRAIN_GPT_SELF_CHECK="off")
        self.assertEqual(self.row(site, "self-check"), "")
        self.assertEqual(losses, also)

    def test_what_is_wrong_is_not_used(self):
        """wgmma falls back on mma.sync, whose results the run then has, to the bit. Each way in which wgmma can fail is
        reported."""
        _, mma = self.start("mma", "--flash-kernels", "mma", "--self-check", "off")
        faults = {"wrong:sm90_forward": "its output is wrong: it is not finite",
                  "unsteady:sm90_backward_kernel": "its backward, computed again, gives other bits",
                  "unwaited:sm90_backward_kernel": "its dQ is wrong: it is not finite",
                  "refused:sm90_backward_kernel": "invalid argument",
                  "illegal:sm90_backward_kernel": "an illegal memory access was encountered; the fault is of work that was enqueued before",
                  "hang:sm90_backward_kernel": "it did not end within 10 s"}
        for i, (fault, said) in enumerate(faults.items()):
            if fault in chosen(list(faults), [fault for fault in faults if not fault.startswith(("wrong", "refused"))]):
                with self.subTest(fault):
                    result, losses = self.start(f"fault{i}", EMU_FAULT=fault, TRAIN_GPT_SELF_CHECK_SECONDS="10" if "hang" in fault else "60")
                    attention = self.row(result, "attention")
                    self.assertIn("flash, mma.sync", attention)
                    self.assertIn("failed the self-check: ", attention)
                    self.assertIn(said[:150], attention)
                    self.assertIn("kernels are right", self.row(result, "self-check"))
                    self.assertEqual(losses, mma)

    def test_a_candidate_that_is_wrong_takes_no_other_away(self):
        """mma.sync is judged only to be timed: if it is wrong, wgmma, which is right, stays."""
        _, wgmma = self.start("wgmma", "--flash-kernels", "wgmma")
        result, losses = self.start("candidate", EMU_FAULT="wrong:flash_")
        self.assertIn("flash, wgmma", self.row(result, "attention"))
        self.assertIn("kernels are right", self.row(result, "self-check"))
        self.assertEqual(losses, wgmma)
        self.assertRegex(self.refused[0]["mma.sync bf16"], "failed the self-check: its output is wrong")

    def test_a_verdict_of_wrong_is_kept(self):
        first, _ = self.start("kept", EMU_FAULT="wrong:sm90_backward_kernel")
        second, _ = self.start("kept")  # the fault is gone, the verdict stays
        for result in (first, second):
            self.assertRegex(self.row(result, "attention"), r"flash, mma\.sync .*; wgmma bf16 failed the self-check: its dQ is wrong")
        self.assertIn("by self_check.txt", self.row(second, "self-check"))
        self.assertEqual(list(self.refused[0]), ["wgmma bf16"])
        self.assertRegex(self.refused[0]["wgmma bf16"], "failed the self-check: its dQ is wrong")

    def test_late_twice_is_kept(self):
        """A host that was busy once costs one start's speed; kernels that hang cost two starts' waits. More seconds check again."""
        late = {"EMU_FAULT": "hang:sm90_forward", "TRAIN_GPT_SELF_CHECK_SECONDS": "3"}

        def start(said, **environment):
            result, _ = self.start("late", "--flash-kernels", "wgmma", "--train-steps", 1, **environment)
            self.assertRegex(self.row(result, "attention "), said)
            with open(path, encoding="utf-8") as file:
                return [line.split("\t")[0] for line in file if " simpler=" in line], self.row(result, "self-check")
        path = self.folder.name + "/late/self_check.txt"
        self.assertEqual(start("mma.sync .*it did not end within 3 s", **late)[0], ["late", "right"])
        shutil.copy(path, path + ".once")
        self.assertEqual(start("flash, wgmma")[0], ["late", "right", "right"])
        os.replace(path + ".once", path)
        kept = "mma.sync .*it did not end within 3 s, as in the start before; more TRAIN_GPT_SELF_CHECK_SECONDS, or no self_check.txt, check again"
        self.assertEqual(start(kept, **late)[0], ["late", "right", "wrong"])
        kinds, row = start(kept, TRAIN_GPT_SELF_CHECK_SECONDS="3")
        self.assertEqual(kinds, ["late", "right", "wrong"])
        self.assertIn("by self_check.txt", row)
        self.assertEqual(start("flash, wgmma")[0], ["late", "right", "wrong", "right"])

    def test_a_wrong_candidate_of_a_rank_is_kept(self):
        """Of cuDNN, which fails while it is timed, on one of two ranks: the next start does not go by the other rank's time."""
        cudnn = {"NVTE_FUSED_ATTN": "1", "TRAIN_GPT_SELF_CHECK_SECONDS": "6"}
        cases = {"illegal": [(["wrong"], True), (["wrong"], False)], "hang": [(["late"], True), (["late", "wrong"], True), (["late", "wrong"], False)]}
        for fault, starts in chosen(list(cases.items()), [("illegal", cases["illegal"])]):
            for kinds, is_new in starts:
                said, statuses = self.ranks(fault, "--train-steps", 1, environments=(cudnn, {**cudnn, "EMU_FAULT": fault + ":cudnnBackendExecute"}))
                self.assertEqual(statuses, [0, 0], said)
                self.assertRegex(said[0], "(?m)^attention +flash, .*; fused: failed the self-check: rank 1 found it wrong")
                self.assertIn("rank 1, the time of attention by cuDNN: failed the self-check: ", said[1])
                self.assertEqual("by self_check.txt in --out" in re.search("(?m)^attention's time.*", said[0])[0], not is_new)
                with open(f"{self.folder.name}/{fault}/self_check.txt", encoding="utf-8") as file:
                    self.assertEqual([line.split("\t")[0] for line in file if "time of 4" in line], kinds)

    def test_late_once_refuses_no_candidate(self):
        """Also where another one is known to be wrong, so that what is left is asked for anew."""
        path = self.folder.name + "/once_late/self_check.txt"
        self.start("once_late", "--train-steps", 1, NVTE_FUSED_ATTN="1")
        with open(path, encoding="utf-8") as file:
            lines = [line.split("\t") for line in file]
        for line in lines:
            if line[2].endswith("time of 4\n"):
                line[:2] = "wrong", "failed the self-check: planted"
            elif line[2].endswith("time of 1\n"):
                line[:2] = "late", "failed the self-check: it did not end within 60 s"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(map("\t".join, lines))
        result, _ = self.start("once_late", "--train-steps", 1, NVTE_FUSED_ATTN="1")
        self.assertEqual((sorted(self.times(result)), list(self.refused[-1])), (["mma.sync", "wgmma"], ["cuDNN"]))

    def test_a_file_of_verdicts_that_can_not_be_read_is_none(self):
        """A folder in its place, or a file that is too large. A generation, which may find another run's folder, says nothing."""
        for name, warns in (("folder", "self_check.txt: is a folder"), ("large", "self_check.txt: .*1048577")):
            path = f"{self.folder.name}/{name}/self_check.txt"
            os.makedirs(path if name == "folder" else os.path.dirname(path))
            if name == "large":
                with open(path, "wb") as file:
                    file.write(b"x" * 1048577)
            result, _ = self.start(name, "--flash-kernels", "mma", "--train-steps", 1)
            self.assertRegex(self.row(result, "self-check"), r"kernels are right, .*; \d+\.\d\d s$")
            self.assertRegex(result.stderr, warns + ".*; this start checks this GPU again")
            _, warning = self.answer("--generate", "for", "--sample-tokens", 1, "--out", f"{self.folder.name}/{name}")
            self.assertEqual(warning, "")

    def test_unfused_is_what_is_left(self):
        result, _ = self.start("unfused", EMU_FAULT="wrong:flash", EMU_CAPABILITY="8.0")
        self.assertRegex(self.row(result, "attention"), r"unfused, .*\(flash: failed the self-check: ")
        asked, _ = self.start("asked", "--attention-backend", "flash", EMU_FAULT="wrong:flash", EMU_CAPABILITY="8.0")
        self.assertEqual(asked.returncode, 2, asked.stdout + asked.stderr)
        self.assertRegex(asked.stderr, r"no attention backend is left \(flash: failed the self-check: .*unfused: --attention-backend flash")

    def test_flash_is_judged_before_cudnn(self):
        """cuDNN's attention is compared with flash, and leaves windows to flash."""
        right, _ = self.start("cudnn", NVTE_FUSED_ATTN="1", EMU_CAPABILITY="10.0")
        self.assertRegex(self.row(right, "attention"), r"^attention +fused, ")
        self.assertIn("kernels are right", self.row(right, "self-check"))
        wrong, _ = self.start("no_cudnn", NVTE_FUSED_ATTN="1", EMU_CAPABILITY="10.0", EMU_FAULT="wrong:flash")
        self.assertRegex(self.row(wrong, "attention"), r"unfused, .*flash: failed the self-check: .*fused: leaves windows to flash, which failed the self-check")

    def test_cudnn_is_judged_in_a_child(self):
        """A hang or a fault in cuDNN, which the rules choose on 10.x, ends a child; FP8 attention, which only cuDNN has, ends the run."""
        cudnn = {"NVTE_FUSED_ATTN": "1", "EMU_CUDNN_VERSION": "92800", "EMU_CAPABILITY": "10.0"}
        in_fp8 = ["--attention-backend", "flash", "--fp8-format", "hybrid", "--fp8-dot-product-attention", "full"]
        _, flash = self.start("no_fused", "--attention-backend", "flash", "--self-check", "off", **cudnn)
        for fault, limit, said in (("hang", 6, "it did not end within 6 s"), ("illegal", 60, ".*an illegal memory access")):
            result, losses = self.start(fault, **cudnn, EMU_FAULT=fault + ":cudnnBackendExecute", TRAIN_GPT_SELF_CHECK_SECONDS=str(limit))
            self.assertRegex(self.row(result, "attention "), "flash, mma.sync .*; fused: failed the self-check: " + said)
            self.assertEqual((losses, list(self.refused[0])), (flash, ["cuDNN"]))
        ended, _ = self.start("in_fp8", *in_fp8, **cudnn, EMU_FAULT="illegal:cudnnBackendExecute")
        self.assertEqual(ended.returncode, 2, ended.stdout + ended.stderr)
        self.assertRegex(ended.stderr, "--fp8-dot-product-attention, by cuDNN, failed the self-check: .*an illegal memory access"
                         ".*; install another cuDNN, or leave --fp8-dot-product-attention out")
        said, statuses = self.ranks("fused", environments=(cudnn, {**cudnn, "EMU_FAULT": "illegal:cudnnBackendExecute"}))
        self.assertEqual(statuses, [0, 0], said)
        self.assertRegex(said[0], "(?m)^attention +flash, mma.sync .*; fused: failed the self-check: rank 1 found it wrong")
        again, losses = self.start("illegal", **cudnn)  # the fault is gone, its verdict stays
        self.assertIn("fused: failed the self-check: ", self.row(again, "attention "))
        self.assertIn("by self_check.txt", self.row(again, "self-check"))
        self.assertEqual(losses, flash)

    def answer(self, *options, status=0, **environment):
        """Returns what a run of a trained model says, which must write nothing where it runs."""
        model, empty = self.folder.name + "/model", self.folder.name + "/empty"
        if not os.path.exists(model):
            self.start("model", "--checkpoint-every", 2, "--self-check", "off", "--attention-backend", "flash")
            os.mkdir(empty)
        process = self.popen("--device", "cuda", "--precision", "bf16", "--init-from", model + "/checkpoints/step_00000002", *options, cwd=empty, **environment)
        out, err = process.communicate(timeout=300)
        self.assertEqual((process.returncode, os.listdir(empty)), (status, []), out + err)
        return out, err

    def evaluate(self, *options, **environment):
        return self.answer("--eval-only", "--seq-length", 32, "--micro-batch-size", 1, "--val-data", self.folder.name + "/t_train_*.bin", *options, **environment)[0]

    def test_cudnn_is_judged_where_nothing_trains(self):
        """An evaluation, in which cuDNN hangs or faults, and a generation go on by flash, and write nothing."""
        cudnn = {"NVTE_FUSED_ATTN": "1", "EMU_CUDNN_VERSION": "92800", "EMU_CAPABILITY": "10.0"}
        for options, environment, said in [
            ([], {}, "fused, cuDNN"),
            ([], {"EMU_FAULT": "illegal:cudnnBackendExecute"}, "flash, mma.sync .*; fused: failed the self-check: .*an illegal memory access"),
            ([], {"EMU_FAULT": "hang:cudnnBackendExecute", "TRAIN_GPT_SELF_CHECK_SECONDS": "6"}, "flash, mma.sync .*; fused: failed the self-check: it did not end within 6 s"),
            (["--attention-backend", "flash"], {"EMU_FAULT": "hang:cudnnBackendExecute"}, "flash, mma.sync "),
        ]:
            self.assertRegex(self.evaluate(*options, **cudnn, **environment), "(?m)^attention +" + said)
        generates = ["--generate", "for", "--sample-tokens", 2, "--temperature", 0]
        text, _ = self.answer(*generates, **cudnn)
        again, warning = self.answer(*generates, **cudnn, EMU_FAULT="illegal:cudnnBackendExecute")
        self.assertEqual(again, text)
        self.assertRegex(warning, "the self-check of attention by cuDNN: .*an illegal memory access")

    def test_forward_is_judged_where_nothing_trains(self):
        """Backward, which is not used there, may be wrong."""
        def loss(said):
            return re.search(r"validation loss ([0-9.]+)", said).group(1)
        wgmma, mma = (self.evaluate("--flash-kernels", kernels, "--self-check", "off") for kernels in ("wgmma", "mma"))
        self.assertNotIn("self-check", wgmma)
        for fault, taken, right in (("forward", r"mma\.sync .*wgmma bf16 failed the self-check: its output is wrong", mma), ("backward", "wgmma ", wgmma)):
            said = self.evaluate(EMU_FAULT=f"wrong:sm90_{fault}")
            self.assertRegex(said, f"(?ms)^attention +flash, {taken}.*^self-check +attention's forward kernels are right, within 0.00")
            self.assertEqual(loss(said), loss(right))
        prompt = "--generate", "for", "--sample-tokens", 2, "--temperature", 0
        text, warning = self.answer(*prompt)
        self.assertEqual(warning, "")
        again, warning = self.answer(*prompt, EMU_FAULT="wrong:sm90_forward")
        self.assertEqual(again, text)
        self.assertRegex(warning, "the self-check of attention by wgmma bf16: its output is wrong")

    def test_decoding_is_judged(self):
        """Where a run draws text, also from a window's ring. A fault ends the run, and is no matter to a run without samples."""
        samples = ["--flash-kernels", "mma", "--train-steps", 1, "--sample-tokens", 2, "--window-size", 8, "--sample-every"]
        self.assertEqual(self.start("silent", *samples, 0, EMU_FAULT="wrong:attention_decode")[0].returncode, 0)
        faults = {"wrong:attention_decode": "its output is wrong: it is not finite",
                  "wrong:kv_cache_append": "its output is wrong: it is not finite",
                  "unsteady:kv_cache_append": "its output is wrong: it is not finite",
                  "unsteady:attention_decode": "a token, decoded again, gets other bits",
                  "refused:attention_decode": "invalid argument",
                  "hang:attention_decode": "it did not end within 3 s"}
        told = "train_gpt: decoding attention, which --%s needs, failed the self-check: .*%s.*; %s, or install another driver\n$"
        for fault in chosen(list(faults), ["wrong:attention_decode", "unsteady:attention_decode", "hang:attention_decode"]):
            with self.subTest(fault):
                wrong, _ = self.start("decodes", *samples, 1, EMU_FAULT=fault, TRAIN_GPT_SELF_CHECK_SECONDS="3" if "hang" in fault else "60")
                self.assertEqual(wrong.returncode, 2, wrong.stdout + wrong.stderr)
                self.assertRegex(wrong.stderr, told % ("sample-every", faults[fault], "leave --sample-every out"))
        right, losses = self.start("decodes", *samples, 1)
        self.assertEqual((right.returncode, right.stderr), (0, ""))
        with open(self.folder.name + "/decodes/self_check.txt", encoding="utf-8") as file:
            self.assertRegex(file.read(), r"(?m)^right\twithin 0\.00\d+\t.* hides=1 .* decodes=1$")
        again, same = self.start("decodes", *samples, 1, EMU_FAULT="wrong:attention_decode")  # goes by the verdict in --out
        self.assertEqual((again.returncode, same), (0, losses), again.stderr)
        off, _ = self.start("undecided", *samples, 1, "--self-check", "off", EMU_FAULT="wrong:attention_decode")
        self.assertEqual(off.returncode, 0, off.stderr)

    def test_decoding_is_judged_where_nothing_trains(self):
        prompt = "--generate", "for", "--sample-tokens", 2
        _, warning = self.answer(*prompt)
        self.assertEqual(warning, "")
        _, warning = self.answer(*prompt, EMU_FAULT="wrong:kv_cache_append", status=2)
        self.assertRegex(warning, "^train_gpt: decoding attention, which --generate needs, failed the self-check: its output .*; start with --device cpu, or")
        said, statuses = self.ranks("decoders", "--sample-every", 1, "--flash-kernels", "mma", environments=({}, {"EMU_FAULT": "wrong:attention_decode"}))
        self.assertNotIn(0, statuses)
        self.assertIn("which --sample-every needs, failed the self-check: rank 1 found it wrong", said[0])
        self.assertIn("rank 1, the self-check of attention by the kernels of decoding: its output is wrong", said[1])

    def times(self, result):
        """Returns what the report says of each backend's milliseconds."""
        row = self.row(result, "attention's time")
        return {name: float(ms) for name, ms in re.findall(r"(mma\.sync|wgmma|cuDNN)[a-z0-9 ]* ([0-9.e+]+) ms", row)}

    def test_the_fastest_is_taken(self):
        """The fastest backend is taken among those that are right, where --attention-backend auto leaves several. A
        second start goes by the same times."""
        cudnn = {"NVTE_FUSED_ATTN": "1"}
        for name, environment, slow, taken in [("to_mma", {}, "sm90", "flash, mma.sync"), ("to_cudnn", cudnn, "_kernel", "fused, cuDNN"),
                                               ("from_cudnn", {**cudnn, "EMU_CAPABILITY": "10.0"}, "cudnn", "flash, mma.sync")]:
            if name in chosen(["to_mma", "to_cudnn", "from_cudnn"], ["from_cudnn"]):
                first, losses = self.start(name, **environment, EMU_SLOW=slow)
                self.assertIn(taken, self.row(first, "attention "))
                times = self.times(first)
                self.assertEqual(min(times, key=times.get), taken.split()[1].rstrip(","), times)
                again, same = self.start(name, **environment, EMU_SLOW="none of it")
                self.assertIn(taken, self.row(again, "attention "))
                self.assertIn("by self_check.txt in --out", self.row(again, "attention's time"))
                self.assertEqual((self.times(again), same), (times, losses))

    def test_what_is_timed_is_what_the_run_does(self):
        """With sums of biases' gradients, amaxes for FP8, windows and documents. cuDNN is timed where it computes some layer."""
        sums = (["--add-qkv-bias"], "dbias_partial", "biases=1 amax=0 any_order=0 timed=1 window=0 layers=2,0", ["cuDNN", "mma.sync"])
        amaxes = (["--fp8-format", "hybrid"], "fp8_amax", "amax=1 any_order=0 timed=6 window=0 layers=2,0", ["cuDNN", "mma.sync"])
        window = (["--window-size", 8], None, "timed=1 window=8 layers=0,2", [])
        mixed = (["--window-size", 8, "--window-attn-skip-freq", 2], "flash_backward", "timed=1 window=8 layers=1,1", ["cuDNN"])
        documents = (["--reset-attention-mask", "--eod-token", 10], None, "timed=9 window=0 layers=2,0", [])
        for options, slow, asked, slower in chosen([sums, amaxes, window, mixed, documents], [sums, mixed]):
            with self.subTest(asked):
                name = asked.translate(str.maketrans(" =,", "___"))
                result, _ = self.start(name, "--num-layers", 2, *options, NVTE_FUSED_ATTN="1", EMU_SLOW=slow or "none")
                times = self.times(result)
                self.assertEqual(sorted(times), ["cuDNN"] * (slow is not None) + ["mma.sync", "wgmma"])
                for backend in slower:  # EMU_SLOW adds 20 ms to such a kernel, which a layer, or half of them, launches
                    self.assertGreater(times[backend], 20)
                self.assertEqual("the mean of those with and without a window" in self.row(result, "attention's time"), "layers=1,1" in asked)
                with open(f"{self.folder.name}/{name}/self_check.txt", encoding="utf-8") as file:
                    self.assertIn(asked + "; time of ", file.read())

    def test_a_candidate_that_fails_is_left_out(self):
        """A crash while candidates are timed ends only the child; the others are timed without the culprit."""
        result, _ = self.start("crash", NVTE_FUSED_ATTN="1", EMU_FAULT="illegal:cudnnBackendExecute")
        self.assertRegex(self.row(result, "attention "), r"flash, wgmma .*; fused: failed the self-check: .*an illegal memory access")
        self.assertEqual(sorted(self.times(result)), ["mma.sync", "wgmma"])
        self.assertIn("an illegal memory access", self.refused[0]["cuDNN"])
        again, _ = self.start("crash", NVTE_FUSED_ATTN="1")  # known results start no child
        self.assertIn("fused: failed the self-check: ", self.row(again, "attention "))
        self.assertEqual(self.times(again), self.times(result))
        self.assertIn("by self_check.txt in --out", self.row(again, "attention's time"))

    def test_products_are_checked(self):
        """Where no algorithm is timed, the heuristics' first one is compared with sums in double."""
        right, _ = self.start("products")
        self.assertRegex(self.row(right, "matmul algorithms"), r"all \d+ products are right by sums in double")
        again, _ = self.start("products")
        self.assertRegex(self.row(again, "matmul algorithms"), r"all \d+ products are right by self_check.txt in --out")
        wrong, _ = self.start("products", "--self-check", "always", EMU_CUBLASLT_WRONG="0")
        self.assertEqual(wrong.returncode, 2, wrong.stdout + wrong.stderr)
        self.assertRegex(wrong.stderr, r"cuBLASLt multiplies wrongly on this GPU: of a product of \d+ x \d+ x \d+ its algorithm differs")

    def test_algorithms_from_before_are_checked(self):
        """A file of algorithms may come from elsewhere, as from another GPU of the same name. A wrong one gives way to the heuristics' first."""
        times = {"EMU_CUBLASLT_TIMES": "900,200,300,800", "EMU_CUBLASLT_BGRAD_TIMES": "900", "EMU_CUBLASLT_DGELU_TIMES": "900"}
        def kept(name="tuned"):
            with open(f"{self.folder.name}/{name}/matmul_algorithms.txt", encoding="utf-8") as file:
                return set(re.findall(r"^rows=.* candidate=(\d+)", file.read(), re.M))

        _, first = self.start("first")
        tuned, _ = self.start("tuned", "--matmul-tuning=true", **times, EMU_CUBLASLT_WRONG="1")
        left_out = r"\d+ timed ones multiply wrongly, and are left out"
        self.assertRegex(self.row(tuned, "matmul algorithms"), "timed in .*; " + left_out)
        self.assertRegex(self.refused[0]["matmul algorithms"], left_out)
        self.assertEqual(kept(), {"2"})
        self.take_algorithms("tuned", "copied")
        wrong, losses = self.start("copied", "--matmul-tuning=true", **times, EMU_CUBLASLT_WRONG="2")
        gives_way = r"\d+ chosen ones multiply wrongly, and give way to the heuristics' first"
        self.assertRegex(self.row(wrong, "matmul algorithms"), r"\d+ products, 0 timed .*; " + gives_way)
        self.assertRegex(self.refused[-1]["matmul algorithms"], gives_way)
        self.assertEqual((losses, kept("copied")), (first, {"0"}))
        wrong, _ = self.start("copied", "--matmul-tuning=true", **times, EMU_CUBLASLT_WRONG="0")
        self.assertEqual(wrong.returncode, 2, wrong.stdout + wrong.stderr)
        self.assertRegex(wrong.stderr, "cuBLASLt multiplies wrongly on this GPU: .* its chosen algorithm and the heuristics' first differ")

    def take_algorithms(self, name, other):
        """Gives a new --out of another name this one's file of algorithms, and no verdicts."""
        os.mkdir(f"{self.folder.name}/{other}")
        shutil.copy(f"{self.folder.name}/{name}/matmul_algorithms.txt", f"{self.folder.name}/{other}")

    def test_gelus_epilogue_from_before_is_checked(self):
        """A product that was fused with GELU's derivative at the first start is held against one that is not."""
        times = {"EMU_CUBLASLT_TIMES": "900,900", "EMU_CUBLASLT_BGRAD_TIMES": "9000,9000", "EMU_CUBLASLT_DGELU_TIMES": "900,200"}
        options = ["--matmul-tuning=true", "--flash-kernels", "wgmma"]
        tuned, fused = self.start("gelu", *options, **times)
        self.assertIn("; 1 by an epilogue", self.row(tuned, "matmul algorithms"))
        for name in "gelu_right", "gelu_wrong":
            self.take_algorithms("gelu", name)
        again, same = self.start("gelu_right", *options, **times)
        self.assertEqual((same, self.refused), (fused, []), again.stderr)
        wrong, losses = self.start("gelu_wrong", *options, **times, EMU_CUBLASLT_WRONG="1")
        self.assertRegex(self.row(wrong, "matmul algorithms"), "; 1 chosen ones multiply wrongly, and give way to the heuristics' first")
        self.assertEqual(losses, self.start("plain", "--flash-kernels", "wgmma")[1])

    def test_a_check_that_hangs_ends_the_run(self):
        """Within the child's seconds, by a sentence that names what hung and how to start without it."""
        cases = [(["--matmul-tuning=true"], "cublasLtMatmul", r"a product of \d+ x \d+ x \d+ by cuBLASLt did .*: --matmul-tuning=false takes"),
                 (["--fp8-format", "hybrid"], "fp8_tile", "FP8's cast of inputs did .*: leave out --fp8-format"),
                 ([], "a graph", "a micro-step, enqueued as a graph, did .*: the next start uses no graphs, as with --cuda-graphs=false")]
        for options, fault, said in chosen(cases, cases[::2]):
            result, _ = self.start("hangs", "--flash-kernels", "wgmma", *options, EMU_FAULT="hang:" + fault, TRAIN_GPT_SELF_CHECK_SECONDS="3")
            self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
            self.assertRegex(result.stderr, "self-check: " + said.replace("did", r"did not end on this GPU within [3-9]\S*"))

    def test_cudnn_without_a_verdict_is_left_out(self):
        """Only --attention-backend fused goes on with it, and the run's own comparison then has a deadline."""
        cudnn = {"NVTE_FUSED_ATTN": "1", "EMU_CAPABILITY": "10.0", "TRAIN_GPT_SELF_CHECK_SECONDS": "1e-9", "EMU_FAULT": "hang:cudnnBackendExecute"}
        result, _ = self.start("no_verdict", **cudnn)
        self.assertRegex(self.row(result, "attention "), r"flash, mma\.sync .*; fused: failed the self-check: it did not end within 1e-09 s")
        self.assertIn("cuDNN", self.refused[0])
        asked, _ = self.start("no_verdict", "--attention-backend", "fused", **cudnn)
        self.assertEqual(asked.returncode, 2, asked.stdout + asked.stderr)
        self.assertRegex(asked.stderr, "self-check: attention by cuDNN did not end on this GPU within 1 s: .* the newest first: cuDNN's attention, ")

    def test_rates_have_a_deadline(self):
        """On a GPU without a data sheet auto measures a product and copies before anything is checked."""
        result, _ = self.start("rates", "--recompute-granularity", "auto", EMU_FAULT="hang:cublasLtMatmul", TRAIN_GPT_SELF_CHECK_SECONDS="1e-9")
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr, "self-check: the measurement of this GPU's rates did not .*the newest first: cublasLtMatmul")

    def test_what_does_not_train_is_watched(self):
        """Loading, evaluation, scores, generation and chat."""
        self.start("asked_model", "--checkpoint-every", 2, "--self-check", "off")
        model, text = self.folder.name + "/asked_model/checkpoints/step_00000002", self.folder.name + "/text.txt"
        with open(model + "/chat_format.json", "w", encoding="utf-8") as file:
            turn = {"before": "", "after": "\n"}
            json.dump({"version": 1, "begin": "", "roles": {"system": turn, "user": turn, "assistant": turn}, "default_system": None,
                       "trim": False, "stop": ["<|endoftext|>"]}, file)
        with open(text, "w", encoding="utf-8") as file:
            file.write("a line\n")
        evaluates = ["--eval-only", "--seq-length", 32, "--micro-batch-size", 1]
        cases = [[*evaluates, "--val-data", self.folder.name + "/t_train_*.bin"], ["--generate", "for", "--sample-tokens", 2],
                 ["--chat", "--seq-length", 32], [*evaluates, "--perplexity", text]]
        kept = r"the GPU has kept the host for 0\.2 s\. Enqueued last, the newest first: .*cublasLtMatmul"
        loading = r"the model is not loaded after 0\.2 s: its files are read slowly, or the GPU has hung"
        for options, fault, expected in [(["--generate", "for", "--self-check", "off"], "a copy", loading), *((case, "cublasLtMatmul", kept) for case in cases)]:
            with self.subTest(f"{options[0]}, {fault}"), open(text, encoding="utf-8") as turns:
                process = self.popen("--device", "cuda", "--precision", "bf16", "--init-from", model, *options, stdin=turns,
                                     EMU_FAULT="hang:" + fault, TRAIN_GPT_WATCH_SECONDS="0.2")
                timer = threading.Timer(20, process.kill)
                timer.start()
                said = next((line for line in process.stderr if "0.2 s" in line), "")
                timer.cancel()
                process.kill()
                process.communicate()
                self.assertRegex(said, expected)

    def test_casts_are_checked(self):
        """Once, as a verdict of right is kept."""
        recipes = {"tensorwise": [], "delayed": [], "blockwise": ["--seq-length", 128]}
        for recipe in chosen(list(recipes), ["tensorwise"]):
            options = ["--fp8-format", "hybrid", "--fp8-recipe", recipe, *recipes[recipe]]
            for _ in range(2):
                right, _ = self.start("casts_" + recipe, *options)
                self.assertEqual(right.returncode, 0, right.stdout + right.stderr)
            with open(f"{self.folder.name}/casts_{recipe}/self_check.txt", encoding="utf-8") as file:
                self.assertEqual(file.read().count("right\tcasts and copies\t"), 1)
        for fault in chosen(["wrong:fp8_amax", "wrong:fp8_tile"], ["wrong:fp8_tile"]):
            wrong, _ = self.start("casts", "--fp8-format", "hybrid", EMU_FAULT=fault)
            self.assertEqual(wrong.returncode, 2, wrong.stdout + wrong.stderr)
            self.assertIn("self-check: FP8's casts of inputs have other bits on this GPU than on the host", wrong.stderr)

    def test_ops_that_cast_are_checked(self):
        """With delayed scales norms and the activation write FP8 themselves. The other forms of a layer pass."""
        delayed = ["--flash-kernels", "wgmma", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"]
        forms = [[], ["--hidden-size", 1056, "--normalization", "RMSNorm", "--activation", "geglu", "--no-add-bias-linear"],
                 ["--hidden-dropout", 0.1, "--activation", "squared_relu", "--fp8-amax-compute-algo", "most_recent"]]
        for options in chosen(forms, forms[2:]):
            right, _ = self.start("delayed", *delayed, *options)
            self.assertEqual(right.returncode, 0, right.stdout + right.stderr)
        op, update = "gives other bits on this GPU than the op and the cast", "the update of FP8's scales gives other numbers on this GPU than"
        faults = {"norm_amax_kernel": "a norm that casts to FP8 " + op, "norm_fp8_kernel": "a norm that casts to FP8 " + op,
                  "activation_amax": "the activation that casts to FP8 " + op, "fp8_scales_update": update}
        for fault, said in faults.items():
            with self.subTest(fault):
                wrong, _ = self.start("delayed_wrong", *delayed, EMU_FAULT="wrong:" + fault)
                self.assertEqual(wrong.returncode, 2, wrong.stdout + wrong.stderr)
                self.assertIn("self-check: " + said, wrong.stderr)

    def test_a_check_that_can_not_be_made_is_said(self):
        result, _ = self.start("unknown", TRAIN_GPT_SELF_CHECK_SECONDS="1e-9")
        self.assertIn("not made: it did not end within 1e-09 s", self.row(result, "self-check"))
        self.assertEqual(self.refused, [{name: f"not {done}: it did not end within 1e-09 s" for name, done in (("attention", "made"), ("attention's time", "measured"))}])
        with open(self.folder.name + "/unknown/self_check.txt", encoding="utf-8") as file:
            self.assertRegex(file.read(), r"^right\tproducts\t[^\n]*\nbegun\tgraphs\t[^\n]*\nright\tgraphs\t[^\n]*\n$")  # and none of attention
        said, statuses = self.ranks("of_rank", environments=({}, {"TRAIN_GPT_SELF_CHECK_SECONDS": "1e-9"}))
        self.assertEqual(statuses, [0, 0], said)
        not_made, not_measured = "not made: rank 1 came to no verdict", "not measured: rank 1 could not measure it"
        self.assertRegex(said[0], f"(?ms)^self-check +{not_made}$.*^attention's time +{not_measured}$")
        self.assertRegex(said[1], "(?s)rank 1, the self-check of attention by wgmma bf16: .*rank 1, the time of attention: it did not end")
        with open(self.folder.name + "/of_rank/log.jsonl", encoding="utf-8") as file:
            self.assertEqual(json.loads(file.readline())["self_check"], {"attention": not_made, "attention's time": not_measured})

    def ranks(self, name, *arguments, environments=({}, {})):
        """Returns what two ranks say, and their exit statuses."""
        port, ranks = free_port(), []
        for rank, environment in enumerate(environments):
            one = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "EMU_DEVICES": "2"}
            ranks.append(self.begin(name, "--global-batch-size", 2, "--collectives", "sockets", "--threads", 1, "--rendezvous",
                                    "127.0.0.1:%d" % port, *arguments, **one, **environment))
        said = ["".join(rank.communicate(timeout=300)) for rank in ranks]
        return said, [rank.returncode for rank in ranks]

    def test_ranks_agree(self):
        """A fault on one rank's GPU makes all ranks take the simpler kernels, in this start and in the next one, and the heuristics' first
        algorithms of products."""
        times = {"EMU_CUBLASLT_TIMES": "900,800,300"}
        for fault in ({"EMU_FAULT": "wrong:sm90_backward_kernel", "EMU_CUBLASLT_WRONG": "2"}, {}):
            said, statuses = self.ranks("ranks", "--matmul-tuning=true", environments=(times, {**times, **fault}))
            self.assertEqual(statuses, [0, 0], said)
            self.assertRegex(said[0], r"(?m)^attention +flash, mma\.sync .* failed the self-check: rank 1 found it wrong; ")
            if fault:
                self.assertRegex(said[1], "rank 1, the self-check of attention by wgmma bf16: its dQ is wrong")
                self.assertIn("chosen ones multiply wrongly, and give way to the heuristics' first", said[0])

    @long_test("test_ranks_agree holds that what one rank's GPU shows counts for all")
    def test_the_slowest_ranks_times_count(self):
        said, statuses = self.ranks("slow_rank", environments=({}, {"EMU_SLOW": "sm90"}))
        self.assertEqual(statuses, [0, 0], said)
        times = dict(re.findall(r"(mma\.sync|wgmma)[a-z0-9 ]* ([0-9.e+]+) ms", said[0]))
        taken = re.search(r"(?m)^attention +flash, (mma\.sync|wgmma)", said[0]).group(1)
        self.assertGreater(min(map(float, times.values())), 20, said[0])
        self.assertEqual(taken, "mma.sync" if 1.03 * float(times["mma.sync"]) < float(times["wgmma"]) else "wgmma", times)

    def test_graphs_are_checked(self):
        """A graph that loses its work, or that nothing waits for, is found before it trains, on one rank, too, and
        leaves no trace in the losses."""
        _, right = self.start("plain", "--self-check", "off")
        for fault in ("wrong:a graph", "unwaited:a graph"):
            result, losses = self.start(fault[:5], EMU_FAULT=fault)
            self.assertRegex(result.stderr, "self-check: a micro-step that is enqueued as a graph gives another loss or other gradients")
            self.assertEqual((losses, list(self.refused[0])), (right, ["graphs"]))
            self.assertEqual(self.row(result, "graphs"), "graphs             none: " + self.refused[0]["graphs"])
        again, losses = self.start("wrong")  # a wrong graph is remembered
        self.assertEqual((losses, self.row(again, "graphs")), (right, "graphs             none: " + self.refused[0]["graphs"]))
        self.assertNotIn("gives another loss", again.stderr)
        steps = ["--global-batch-size", 3, "--attention-backend", "flash", "--flash-kernels", "mma"]
        for options in chosen([[], ["--offload-gradients"]], [[]]):  # the second graph adds to what the first one gives
            _, right = self.start("plain", *steps, *options, "--self-check", "off")
            result, losses = self.start("adds", *steps, *options, EMU_FAULT="wrong:a graph (2)")
            self.assertRegex(result.stderr, r"gives another loss or other gradients \(of a step's micro-steps one that adds to its gradients: loss")
            self.assertEqual((losses, list(self.refused[0])), (right, ["graphs"]))
            result, losses = self.start("sums", *steps, *options)
            self.assertEqual((losses, self.refused), (right, []), result.stderr)
        self.start("kept")  # a verdict holds for the same work, and for no other
        for options, finds in (([], False), (["--self-check", "always"], True), (["--hidden-dropout", "0.1"], True)):
            result, _ = self.start("kept", *options, EMU_FAULT="wrong:a graph")
            self.assertEqual("gives another loss" in result.stderr, finds, (options, result.stderr))
        for stage in chosen([0, 1, 2, 3], [3]):
            # One backend in each run: which one is the fastest on a busy machine differs each time.
            options = ["--zero-stage", stage, "--train-steps", 3, "--global-batch-size", 4, "--attention-backend", "flash", "--flash-kernels", "mma"]
            logs = []
            for name, *environments in [("straight", {}, {}), ("one_graph", {}, {"EMU_FAULT": "wrong:a graph"})]:
                check = "always" if name == "one_graph" else "off"
                said, statuses = self.ranks(name, *options, "--self-check", check, environments=environments)
                self.assertEqual(statuses, [0, 0], said)
                self.assertEqual("gives another loss" in said[0], name == "one_graph", said[0])
                with open(f"{self.folder.name}/{name}/log.jsonl", encoding="utf-8") as file:
                    entries = [entry for entry in map(json.loads, file) if "loss" in entry]
                logs.append([[entry[key] for key in ("loss", "grad_norm", "comm_bytes")] for entry in entries])
                shutil.rmtree(f"{self.folder.name}/{name}")
            self.assertEqual(*logs)

    def graph_losses(self, name, fault, *options, finds=True, **environment):
        """Returns a run's losses and gradient norms, and whether the check of graphs found the fault, which `finds` says."""
        result, _ = self.start(name, "--attention-backend", "flash", "--flash-kernels", "mma", *options, **environment, **{"EMU_FAULT": fault} if fault else {})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual("gives another loss or other gradients" in result.stderr, finds, result.stderr)
        with open(f"{self.folder.name}/{name}/log.jsonl", encoding="utf-8") as file:
            entries = [entry for entry in map(json.loads, file) if "loss" in entry]
        self.assertGreater(min(entry["step_ms"] for entry in entries), 0)
        return [(entry["loss"], entry["grad_norm"]) for entry in entries]

    def test_graphs_are_checked_once_they_are_recorded(self):
        """Graphs that the first step does not have are checked before they train: those after FP8 attention's calibration, and those of
        micro-steps that add to gradients once the batch has grown."""
        fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-dot-product-attention", "full", "--kv-channels", 128, "--train-steps", 3]
        cudnn = {"EMU_CAPABILITY": "10.0", "EMU_CUDNN_VERSION": "92800", "NVTE_FUSED_ATTN": "1"}
        grows = ["--global-batch-size", 3, "--rampup-batch-size", "1 2 2", "--train-steps", 4]
        for name, options, environment, fault in [("calibrated", fp8, cudnn, "a graph"), ("grown", grows, {}, "a graph (2)")]:
            right = self.graph_losses(name, None, *options, "--self-check", "off", finds=False, **environment)
            self.assertEqual(self.graph_losses(name, "wrong:" + fault, *options, **environment), right)
        self.assertEqual(self.graph_losses("kept_kinds", None, *grows, finds=False), right)
        self.graph_losses("kept_kinds", "wrong:a graph", *grows, finds=False)  # by the verdicts of both kinds in --out

    def test_graphs_are_checked_with_their_libraries(self):
        """A verdict is of cuDNN's version and of the products' algorithms, which graphs have in them."""
        cudnn = {"EMU_CAPABILITY": "10.0", "NVTE_FUSED_ATTN": "1"}
        for version, finds in [("92800", False), ("92800", False), ("92900", True)]:
            fault = {"EMU_FAULT": "wrong:a graph"} if version == "92900" else {}
            result, _ = self.start("versions", "--attention-backend", "fused", **cudnn, EMU_CUDNN_VERSION=version, **fault)
            self.assertEqual("gives another loss" in result.stderr, finds, result.stderr)
        for times, fault, finds in [("900,200,300", None, False), ("900,200,300", "wrong:a graph", False), ("900,300,200", "wrong:a graph", True)]:
            if finds:
                os.remove(self.folder.name + "/algorithms/matmul_algorithms.txt")
            self.graph_losses("algorithms", fault, "--matmul-tuning=true", finds=finds, EMU_CUBLASLT_TIMES=times)

    def test_graphs_are_checked_in_any_order(self):
        """Where backward's bits differ each time, too; and a graph that loses work only when it runs again."""
        for options in (["--deterministic-mode=false"], []):
            right = self.graph_losses("any", None, *options, "--self-check", "off", finds=False)
            self.assertEqual(self.graph_losses("any", None, *options, "--self-check", "always", finds=False), right)
            for fault in ("wrong", "unsteady"):
                self.assertEqual(self.graph_losses("any", fault + ":a graph", *options, "--self-check", "always"), right)

    def test_what_tells_nothing_is_no_verdict(self):
        """Lost work that leaves NaNs without graphs, too, is said, and nothing is kept of graphs; nor is it where none was recorded."""
        result, _ = self.start("nan", EMU_FAULT="wrong:gelu_forward")
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr, "self-check: a micro-step has loss nan and .*: a kernel left NaNs that its memory held before, or the data or the weights have")
        with open(self.folder.name + "/nan/self_check.txt", encoding="utf-8") as file:
            self.assertNotIn("graphs", file.read())
        self.graph_losses("unrecorded", "capture", finds=False)
        self.graph_losses("unrecorded", "wrong:a graph")  # what was not recorded was not found right

    def test_a_check_of_graphs_that_did_not_end_is_remembered(self):
        """A graph that hangs or faults ends one start. The next ones launch kernels one by one, on all ranks, and say so, until --self-check
        always has found graphs right."""
        said = "an earlier start's check of graphs failed, hung or was killed, by self_check.txt in --out; --self-check always checks again"
        options = ["--attention-backend", "flash", "--flash-kernels", "mma"]
        _, right = self.start("plain", *options, "--self-check", "off")
        for fault in chosen(("hang:a graph", "illegal:a graph"), ("hang:a graph",)):
            first, _ = self.start(fault, *options, EMU_FAULT=fault, TRAIN_GPT_SELF_CHECK_SECONDS="2")
            self.assertEqual(first.returncode, 2, first.stdout + first.stderr)
            second, losses = self.start(fault, *options, EMU_FAULT=fault)
            self.assertEqual((self.row(second, "graphs"), self.refused[0], losses), ("graphs             none: " + said, {"graphs": said}, right))
        for more, refused in [([], [{"graphs": said}]), (["--self-check", "always"], []), ([], [])]:
            _, losses = self.start("hang:a graph", *options, *more)
            self.assertEqual((self.refused, losses), (refused, right))
        _, statuses = self.ranks("rank", *options, environments=({}, {"EMU_FAULT": "illegal:a graph"}))
        self.assertNotIn(0, statuses)
        ranks, statuses = self.ranks("rank", *options)
        self.assertEqual(statuses, [0, 0], ranks)
        self.assertIn(said, ranks[0])

    def test_ranks_without_graphs(self):
        """A rank that can record nothing goes on by single launches. If one rank has lost a recorded part, all end."""
        options = ["--self-check", "off", "--zero-stage", 3, "--check-replicas", 1, "--train-steps", 3]
        said, statuses = self.ranks("launches", *options, environments=({}, {"EMU_FAULT": "capture"}))
        self.assertEqual(statuses, [0, 0], said)
        self.assertIn("the GPU's work can't be recorded (cudaStreamBeginCapture: ", said[1])
        self.assertRegex(said[0], r"(?m)^graphs +none: rank 1: the GPU's work can't be recorded \(cudaStreamBeginCapture: ")
        with open(self.folder.name + "/launches/log.jsonl", encoding="utf-8") as file:
            refused = [entry["self_check"]["graphs"] for entry in map(json.loads, file) if "self_check" in entry]
        self.assertRegex(" ".join(refused), r"^rank 1: the GPU's work can't be recorded \(cudaStreamBeginCapture: [^(]*$")
        said, statuses = self.ranks("lost", *options, environments=({}, {"EMU_GRAPH_NODES": "1"}))
        self.assertNotIn(0, statuses, said)
        self.assertIn("start again with --cuda-graphs=false", said[1])

    def test_kernels_that_are_asked_for_are_taken(self):
        """Instead of cuDNN, where it is installed, too, which stays for what flash may not compute."""
        cases = [("9.0", "mma", []), ("9.0", "wgmma", []), ("10.0", "mma", []), ("10.0", "mma", ["--self-check", "off"]), ("9.0", "mma", ["--self-check", "off"]),
                 ("8.0", "mma", ["--deterministic-mode=false"])]
        for capability, kernels, options in chosen(cases, [cases[0], cases[3], cases[5]]):
            with self.subTest(capability=capability, kernels=kernels, options=options):
                result, _ = self.start("kernels", "--flash-kernels", kernels, "--train-steps", 1, *options, NVTE_FUSED_ATTN="1", EMU_CAPABILITY=capability, EMU_SLOW="_kernel")
                taken = "mma.sync" if kernels == "mma" else kernels
                self.assertRegex(self.row(result, "attention "), rf"flash, {taken} .*; fused: --flash-kernels {kernels} asks for flash")
                shutil.rmtree(self.folder.name + "/kernels")
        result, _ = self.start("kernels", "--flash-kernels", "mma", "--train-steps", 1, NVTE_FUSED_ATTN="1", NVTE_FLASH_ATTN="0")
        self.assertRegex(self.row(result, "attention "), "fused, cuDNN .*flash: switched off by NVTE_FLASH_ATTN=0")

    def test_wgmma_can_be_asked_for(self):
        result, _ = self.start("asks", "--flash-kernels", "wgmma", EMU_CAPABILITY="8.0")
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr, "--flash-kernels wgmma: wgmma bf16 .*; leave the option out")


if __name__ == "__main__":
    unittest.main()
