#!/usr/bin/env python3
"""Rehearses scripts/gpu_check.sh on the emulator with every program that it starts on a GPU: rehearsal.py CAPABILITY CALL

The programs are those of gpu-rehearsal (scripts/gpu_check.mk) in the folder $B (build). test/gpu_stand_ins.py has nvidia-smi,
ncu and compute-sanitizer; PyTorch is missing. A CALL of CALLS is one call of gpu_check.sh by its own time limits: each check
passes, or is skipped for a reason of SKIPS. Each call adds to one report in $ROW_FOLDER, which the first call begins. The CALL
`report` looks in that report for each program's check, which passed or was skipped for a reason of SKIPS.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "test"))
# pylint: disable=wrong-import-position
from gpu_stand_ins import write_stand_ins  # noqa: E402

SECONDS = 560
# By name: stages, and a regular expression of their checks.
CALLS = {
    "first": ("build,unit,attention,model", ""),
    "tables": ("curve,attention_table,train_table,kernels", ""),
    "fp8": ("fp8", ""),
    "ops_bf16": ("ops", "_bf16$"),
    "ops_fp32": ("ops", "_fp32$"),
    "ranks": ("ranks,sanitize", ""),
}
# (check, why it is skipped, the compute capabilities at which it may be; empty: any)
SKIPS = [
    ("build", "a rehearsal by the programs in ", ""),
    ("torch", "No module named 'torch'|torch sees no GPU", ""),
    ("fp8_training", "the compute capability is below 8.9", "8.0"),
    ("unit_sm90", "needs compute capability 9.0", "8.0 8.9 10.0 12.0"),
    ("ranks_nccl", "there is one GPU", ""),
    ("racecheck_op_attention_quick", "racecheck does not follow mbarriers", "9.0"),
]
# The checks of programs that have other names.
CHECKS = {"attention_bench": "attention_ours", "memory_probe": "memory_managed", "op_attention_quick": "memcheck_op_attention_quick",
          "train_gpt": "train_demo_64_none"}


def is_expected(check, capability):
    """Whether a check passed, or was skipped for a reason of SKIPS."""
    return check["outcome"] == "passed" or check["outcome"] == "skipped" and any(
        check["check"] == name and re.search(reason, check["why"]) and capability in (capabilities or capability).split()
        for name, reason, capabilities in SKIPS)


def faults_of_run(results, capability):
    """Yields (check, what is wrong with it or "") of each check of the report's last run."""
    for check in results["checks"]:
        if check["run"] == len(results["runs"]) - 1:
            yield check["check"], "" if is_expected(check, capability) else f"{check['outcome']}: {check.get('why')}"


def faults_of_report(results, capability, programs):
    """Yields (program, what is wrong with its check or "") of each of the programs."""
    checks = {check["check"]: check for check in results["checks"]}
    for program in programs:
        check = checks.get(CHECKS.get(program, program))
        yield program, "" if check and is_expected(check, capability) else f"{check['outcome']}: {check.get('why')}" if check else "never started"


def programs_of(build):
    """Returns the paths of the programs that gpu_check.sh looks for, as scripts/gpu_check.mk lists them."""
    command = ["make", "-s", "-f", "scripts/gpu_check.mk", "B=" + build, "CUDA=", "--eval=words:;@echo $(GPU_REHEARSED) $(B)/emu/train_gpt", "words"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def read_results(folder):
    with open(folder + "/results/gpu_check.json", encoding="utf-8") as file:
        return json.load(file)


def call(name, capability, folder, programs):
    """Makes one call of gpu_check.sh. Yields as faults_of_run."""
    stages, only = CALLS[name]
    if name == next(iter(CALLS)):
        shutil.rmtree(folder + "/results", ignore_errors=True)
    shutil.rmtree(folder + "/programs", ignore_errors=True)
    os.makedirs(folder + "/programs")
    for path in programs:
        if os.path.exists(os.path.join(ROOT, path)):
            os.symlink(os.path.join(ROOT, path), f"{folder}/programs/{os.path.basename(path)}")
    write_stand_ins(folder + "/bin")
    environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHON": sys.executable, "STAND_IN_FOLDER": folder, "STAND_IN_RUNS": "1",
                   "STAND_IN_CAPABILITY": capability, "EMU_CAPABILITY": capability, "GPU_CHECK_PROGRAMS": folder + "/programs",
                   "GPU_CHECK_SMALL": "1", "GPU_CHECK_SECONDS": str(SECONDS), "GPU_CHECK_ONLY": only,
                   "GPU_CHECK_TOGETHER": os.environ.get("JOBS", "1")}
    status = subprocess.run(["scripts/gpu_check.sh", "--stages", stages, folder + "/results"], cwd=ROOT, env=environment,
                            stdin=subprocess.DEVNULL, check=False).returncode
    yield "gpu_check.sh", f"status {status}" if status else ""
    yield from faults_of_run(read_results(folder), capability)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability")
    parser.add_argument("call", choices=[*CALLS, "report"])
    options = parser.parse_args()
    folder = os.path.join(ROOT, os.environ.get("ROW_FOLDER") or "build/rehearsal-" + options.capability)
    programs = programs_of(os.environ.get("B", "build"))
    if options.call == "report":
        faults = list(faults_of_report(read_results(folder), options.capability, map(os.path.basename, programs)))
    else:
        faults = list(call(options.call, options.capability, folder, programs))
    for name, fault in faults:
        if fault:
            print(f"failed: {name}\n    {fault}")
    failed = sum(bool(fault) for _, fault in faults)
    print(f"{len(faults) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
