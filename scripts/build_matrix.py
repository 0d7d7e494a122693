#!/usr/bin/env python3
"""Builds and tests the cpu target as other machines would: compilers, instruction sets, libraries, aarch64.

  scripts/build_matrix.py [ROW ...]      all rows, or those named, in turn (--list names them); --jobs N
  scripts/build_matrix.py --table        only writes docs/machines.md anew

A row is a build of its own in build/matrix/ROW, warnings as errors: the program, `make quick`'s tests, and two training runs of
20 steps, whose losses are held against those of the first row. What a row found is kept in build/matrix/ROW.json, and
docs/machines.md is written from all of these. Exit status 1 if a row failed.

Debian 12: apt-get install clang-14 clang-16 clang-19 libomp-14-dev gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user
"""
import argparse
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = "build/matrix"
PAGE = "docs/machines.md"
ARM64 = FOLDER + "/arm64" # Debian's libraries for aarch64, by scripts/setup.sh
QEMU_AARCH64 = "qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "
# One OpenMP runtime of LLVM can be installed at a time. Version 14's serves clang 16 too; clang 19 calls what it does not have, so
# that its own is unpacked into a folder.
LIBOMP = {"C_INCLUDE_PATH": FOLDER + "/libomp", "LIBRARY_PATH": "/usr/lib/llvm-14/lib"}
LIBOMP_19 = FOLDER + "/libomp-19"
LLVM_19 = ROOT + "/" + LIBOMP_19 + "/usr/lib/llvm-19/lib"
OWN_LIBOMP = {"C_INCLUDE_PATH": LLVM_19 + "/clang/19/include", "LIBRARY_PATH": LLVM_19, "LD_LIBRARY_PATH": LLVM_19}

# A model with all that differs from GPT-2, and few enough steps for an emulated CPU.
TRAINING = ("--device cpu --threads 2 --num-layers 3 --hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 32 "
            "--ffn-hidden-size 160 --normalization RMSNorm --position-embedding-type rope --activation swiglu --no-add-bias-linear "
            "--untie-embeddings-and-output-weights --vocab-size 257 --seq-length 48 --micro-batch-size 1 --global-batch-size 2 "
            "--train-steps 20 --lr 1e-3 --lr-warmup-steps 4 --val-every 20 --val-steps 2 --seed 7 --checkpoint-every 0").split()
# Relative difference of a loss in fp32: 20 steps let roundings of 2^-24 grow. A curve in bf16 may be twice as far from the
# reference's fp32 curve as the reference's own bf16 curve is.
FP32_TOLERANCE = 1e-4
LONGEST_SECONDS = 1800 # of a test program: an emulator may hang where processes stop each other


class Row:
    """What to build with. `make`: variables; `environment`: more of the compiler's; `emulator`: runs the programs; `tested`: names what
    is tested. Units and parsers are built without the machine's own instructions, so a row that changes these alone tests the ops."""
    def __init__(self, name, make, emulator="", needs="", tested="units, ops", environment=None):
        self.name, self.make, self.emulator, self.needs, self.tested = name, make, emulator, needs, tested
        self.environment = environment or {}


def rows_of_compiler(name, compiler):
    make = {"CC": compiler}
    return [Row(name, {**make, "ARCH": "native"}),
            *(Row(name + "-x86-64-" + v, {**make, "ARCH": "x86-64-" + v}, needs=flags, tested="ops")
              for v, flags in (("v2", "sse4_2 popcnt"), ("v3", "avx2 fma bmi2"), ("v4", "avx512f avx512bw avx512vl avx512dq"),
                               ("v4+avx512bf16", "avx512_bf16")))]


def all_rows():
    gcc = {"CC": "gcc", "ARCH": "native"}
    aarch64 = {"CC": "aarch64-linux-gnu-gcc", "DEPS": ARM64 + "/usr"}
    return [*rows_of_compiler("gcc", "gcc"),
            Row("gcc-without-onednn", {**gcc, "ONEDNN": ""}, tested="ops"),
            Row("gcc-without-openblas", {**gcc, "OPENBLAS": ""}, tested="ops"),
            Row("gcc-without-mpi", {**gcc, "MPI": ""}),
            Row("gcc-without-any", {**gcc, "ONEDNN": "", "OPENBLAS": "", "MPI": ""}),
            *rows_of_compiler("clang-14", "clang-14"),
            Row("clang-16", {"CC": "clang-16", "ARCH": "native"}, environment=LIBOMP),
            Row("clang-19", {"CC": "clang-19", "ARCH": "native"}, environment=OWN_LIBOMP),
            Row("aarch64", aarch64, QEMU_AARCH64 + "neoverse-n1"),
            Row("aarch64-bf16", {**aarch64, "ARCH": "armv8.6-a"}, QEMU_AARCH64 + "max", tested="ops"),
            Row("aarch64-sve2", {**aarch64, "ARCH": "armv9-a"}, QEMU_AARCH64 + "max", tested="ops"),
            Row("aarch64-without-any", {**aarch64, "ONEDNN": "", "OPENBLAS": ""}, QEMU_AARCH64 + "neoverse-n1", tested="ops")]


def output(*command):
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def why_not(row):
    """What this machine lacks to build and run the row; empty: nothing."""
    for command in [row.make["CC"], *row.emulator.split()[:1]]:
        if not shutil.which(command):
            return command + " is not installed"
    if row.environment is LIBOMP and not os.path.exists(output("clang-14", "-print-resource-dir") + "/include/omp.h"):
        return "libomp-14-dev, whose OpenMP it takes, is not installed"
    with open("/proc/cpuinfo") as file:
        here = set(file.read().split())
    lacking = [flag for flag in row.needs.split() if flag not in here]
    return "the CPU has no " + ", ".join(lacking) if lacking else ""


def write_data():
    for name, repeats in (("train", 200), ("val", 30)):
        text = b"for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\nreturn sum / (double)n + 1e-9;\n" * repeats
        with open("%s/%s/text_%s_000.bin" % (ROOT, FOLDER, name), "wb") as file:
            file.write(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253))
            file.write(struct.pack("<%dH" % len(text), *text))


def prepare(row):
    os.makedirs(ROOT + "/" + FOLDER, exist_ok=True)
    write_data()
    if row.environment is OWN_LIBOMP and not os.path.exists(LLVM_19):
        os.makedirs(ROOT + "/" + LIBOMP_19, exist_ok=True)
        subprocess.run("apt-get download libomp-19-dev libomp5-19 && for deb in *.deb; do dpkg -x $deb .; done", shell=True,
                       cwd=ROOT + "/" + LIBOMP_19, check=True)
    if row.environment is LIBOMP: # the header alone: the folder that it lies in has all of clang 14's
        os.makedirs("%s/%s/libomp" % (ROOT, FOLDER), exist_ok=True)
        shutil.copy(output("clang-14", "-print-resource-dir") + "/include/omp.h", "%s/%s/libomp" % (ROOT, FOLDER))
    if ARM64 in row.make.get("DEPS", "") and not os.path.exists(ROOT + "/" + ARM64 + "/usr"):
        subprocess.run(["scripts/setup.sh", "--into", ARM64, "--architecture", "arm64"], cwd=ROOT, check=True)


def make(row, folder, jobs, *arguments, log):
    # CFLAGS: without -g, which takes a fifth of the time
    environment = {**os.environ, **row.environment, "TEST_RUNNER": row.emulator, "TEST_LIMIT": str(LONGEST_SECONDS), "CFLAGS": "-O3"}
    command = ["make", "-j%d" % jobs, "--no-print-directory", "B=" + folder, "CUDA=", "WERROR=1",
               *("%s=%s" % variable for variable in row.make.items()), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log.write(done.stdout)
    return done


def losses(row, folder, precision, log):
    """Of each step and the last validation; none where the run failed."""
    out = "%s/out_%s" % (folder, precision)
    shutil.rmtree(ROOT + "/" + out, ignore_errors=True)
    command = [*row.emulator.split(), folder + "/train_gpt", *TRAINING, "--precision", precision, "--out", out,
               *(["--instruction-set", row.make["ARCH"]] if "ARCH" in row.make else []), # not a higher level that the program has, too
               "--train-data", FOLDER + "/text_train_*.bin", "--val-data", FOLDER + "/text_val_*.bin"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **row.environment}, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    log.write(done.stdout)
    if done.returncode != 0:
        return []
    with open("%s/%s/log.jsonl" % (ROOT, out)) as file:
        steps = [json.loads(line) for line in file]
    return [step["loss"] for step in steps] + [step["val_loss"] for step in steps if "val_loss" in step]


def run(row, jobs):
    result = {"row": row.name, "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": output("git", "rev-parse", "--short", "HEAD"),
              "cpu": re.search("model name\\s*: (.*)|$", open("/proc/cpuinfo").read()).group(1) or platform.machine()}
    prepare(row)
    folder = FOLDER + "/" + row.name
    shutil.rmtree(ROOT + "/" + folder, ignore_errors=True)
    result["compiler"] = output(row.make["CC"], "--version").splitlines()[0]
    begin = time.time()
    with open(ROOT + "/" + folder + ".log", "w") as log:
        only_ops = [] if "units" in row.tested else ["UNITS=", "FUZZ="]
        built = make(row, folder, jobs, "-k", folder + "/train_gpt", "quick-programs", *only_ops, log=log)
        result["built"] = built.returncode == 0
        result["build_seconds"] = round(time.time() - begin)
        begin = time.time()
        if result["built"]:
            tested = make(row, folder, jobs, "quick", *only_ops, log=log).stdout
            result["tests"] = [int(n) for n in re.findall(r"^(\d+) passed, (\d+) failed", tested, re.M)[-1]]
            skipped = re.findall(r"^(\d+) skipped", tested, re.M)
            result["tests"].append(int(skipped[-1]) if skipped else 0)
            result["failed"] = re.findall(r"^(\S+) +\d+ passed +[1-9]\d* failed", tested, re.M)
            result["losses"] = {precision: losses(row, folder, precision, log) for precision in ("fp32", "bf16")}
        result["test_seconds"] = round(time.time() - begin)
    with open(ROOT + "/" + folder + ".json", "w") as file:
        json.dump(result, file)
    return result


def stored(row):
    try:
        with open("%s/%s/%s.json" % (ROOT, FOLDER, row.name)) as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def difference(ours, theirs):
    """The largest relative difference; infinite where a curve is missing."""
    if not ours or len(ours) != len(theirs) or None in ours:
        return float("inf")
    return max(abs(a / b - 1) for a, b in zip(ours, theirs))


def verdict(result, reference):
    """Text of the table's cells after the names, and whether all is well."""
    if not result["built"]:
        return ["no", "", "", "", "%d" % result["build_seconds"]], False
    passed, failed, skipped = result["tests"]
    tests = "%d passed, %d failed%s" % (passed, failed, ", %d skipped" % skipped if skipped else "")
    if result["failed"]:
        tests += " (%s)" % ", ".join(result["failed"])
    curves = result["losses"]
    fp32, bf16 = difference(curves["fp32"], reference["fp32"]), difference(curves["bf16"], reference["fp32"])
    limit = 2 * difference(reference["bf16"], reference["fp32"])
    good = failed == 0 and fp32 <= FP32_TOLERANCE and bf16 <= limit
    return ["yes", tests, "%.1e" % fp32, "%.1e" % bf16, "%d + %d" % (result["build_seconds"], result["test_seconds"])], good


def describe(row):
    settings = ["%s=%s" % variable for variable in row.make.items() if variable[0] not in ("CC", "DEPS")]
    if row.emulator:
        settings.append("under %s, %s" % (row.emulator.split()[0], row.emulator.split("-cpu ")[-1]))
    return " ".join(settings)


def write_table(rows):
    """docs/machines.md from what is stored. Returns the names of the rows that failed."""
    reference = stored(rows[0])
    if not reference or not reference["built"] or not all(reference["losses"].values()):
        sys.exit("build_matrix.py: run the row %s first: the others' losses are held against its own" % rows[0].name)
    reference = reference["losses"]
    bad = []
    lines = ["# Compilers, instruction sets and libraries", "",
             "Written by `scripts/build_matrix.py` from its own runs; a row is a build of the cpu target with warnings as errors, the tests of",
             "`make quick`, and 20 steps of training. Units and parsers are the same programs for every `ARCH`, so that only the first row of",
             "a compiler tests them. Columns fp32 and bf16: the largest relative difference of a loss from the fp32 losses of the first",
             "row, bounds %.0e in fp32 and %.1e in bf16 (twice what the first row's own bf16 run differs by)." %
             (FP32_TOLERANCE, 2 * difference(reference["bf16"], reference["fp32"])), "",
             "| row | compiler | settings | builds | tests | fp32 | bf16 | seconds: build + test | |",
             "|---|---|---|---|---|---|---|---|---|"]
    machines = set()
    for row in rows:
        result = stored(row)
        if result is None:
            reason = why_not(row)
            lines.append("| %s | %s | %s | | not run%s | | | | |" % (row.name, row.make["CC"], describe(row),
                                                                  ": " + reason if reason else ""))
            continue
        cells, good = verdict(result, reference)
        if not good:
            bad.append(row.name)
        machines.add(result["cpu"])
        lines.append("| %s |" % " | ".join([row.name, result["compiler"].split(" (")[0].replace(" version", ""), describe(row), *cells,
                                           "%s, %s" % (result["date"], result["commit"])]))
    lines += ["", "Run on: %s." % "; ".join(sorted(machines))]
    with open(ROOT + "/" + PAGE, "w") as file:
        file.write("\n".join(lines) + "\n")
    return bad


def main():
    rows = all_rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    unknown = set(options.rows) - {row.name for row in rows}
    if unknown:
        parser.error("no row %s; --list names them" % ", ".join(sorted(unknown)))
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    named = {row.name: row for row in rows}
    for row in [] if options.table else [named[name] for name in options.rows or named]:
        missing = why_not(row)
        if missing:
            print("%-26s %s" % (row.name, missing), flush=True)
            continue
        result = run(row, options.jobs)
        print("%-26s built: %s, tests: %s, %d + %d s" % (row.name, result["built"], result.get("tests"), result["build_seconds"],
                                                         result["test_seconds"]), flush=True)
    bad = write_table(rows)
    for name in bad:
        print("build_matrix.py: %s failed: %s/%s.log" % (name, FOLDER, name), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
