#!/usr/bin/env python3
"""Plants faults in attention, one at a time, and checks that the test which is to find a fault fails.

It needs the programs that FAULTS names, in the folder $B (build). A fault replaces one text of one file, which is compiled
again and linked into one program. FP8 attention's faults are planted in the cpu target's, fp32 flash attention's in the
emulated GPU's.
"""
import os
import re
import shlex
import subprocess
import sys
import tempfile

FP8, FP32 = "test/op_fp8_attention_bf16", "emu/op_attention_fp32"
CPU, SM80, TILES = "kernels/fp8/attention_cpu.cu", "kernels/attention/sm80.cu", "kernels/attention/sm80_tiles.cuh"
FORWARD = "kernels/attention/sm80_forward.cuh"
FORMULAS, ERRORS = "attention_follows_the_formulas", "tf32_errs_like_fp32"
# (what is wrong, the file, its text, the text in its place, the source to compile, the program, the test)
FAULTS = [
    ("K's descale is left out", CPU, "scales[FP8_ATTENTION_Q]->inverse * scales[FP8_ATTENTION_K]->inverse * LOG2E",
     "scales[FP8_ATTENTION_Q]->inverse * LOG2E", CPU, FP8, FORMULAS),
    ("V's scale stands for its descale", CPU, "c.out = scales[FP8_ATTENTION_V]->inverse", "c.out = scales[FP8_ATTENTION_V]->scale", CPU, FP8,
     FORMULAS),
    ("P's scale is not in dV", CPU, "c.dv = s[FP8_ATTENTION_DOUT]->inverse / FP8_ATTENTION_P_SCALE", "c.dv = s[FP8_ATTENTION_DOUT]->inverse",
     CPU, FP8, FORMULAS),
    ("O's amax is taken after its scale", CPU, "const vec x = vec_load(block + q * BLOCK + d) * factor;",
     "const vec x = vec_load(block + q * BLOCK + d) * factor * scale;", CPU, FP8, FORMULAS),
    ("D lacks O's descale", CPU, "s[FP8_ATTENTION_DOUT]->inverse * a.out->inverse", "s[FP8_ATTENTION_DOUT]->inverse", CPU, FP8, FORMULAS),
    ("the scores' scale is in dQ twice", CPU, "c.dq = s[FP8_ATTENTION_DS]->inverse", "c.dq = a.shape.scale * s[FP8_ATTENTION_DS]->inverse", CPU,
     FP8, FORMULAS),
    ("dO is read as E4M3", CPU, "decode_rows(dout_rows, c->a.gradients,", "decode_rows(dout_rows, FP8_E4M3,", CPU, FP8, FORMULAS),
    ("lse is rounded to bf16", CPU, "0.6931471806f * state.max[q] + logf(state.sum[q])",
     "bf16_to_float(bf16_from_float(0.6931471806f * state.max[q] + logf(state.sum[q])))", CPU, FP8, FORMULAS),
    ("P is rounded before it is normalized", CPU, "vec_fp8_round_small(vec_load(at) * factor, FP8_E4M3)",
     "vec_fp8_round_small(vec_load(at), FP8_E4M3) * factor", CPU, FP8, FORMULAS),
    ("no run finds O's first amax", CPU, "takes_amax && a.out->delayed == 0", "false", CPU, FP8, FORMULAS),
    ("no run finds dS's first amax", CPU, "if (s[FP8_ATTENTION_DS]->delayed == 0)", "if (false)", CPU, FP8, FORMULAS),
    ("dS's amax is not merged", CPU, "merge_lanes(&c->a.scales[FP8_ATTENTION_DS]->amax,", "merge_lanes(&(uint32_t){0},", CPU, FP8, FORMULAS),
    ("the small parts are left out", TILES, "for (int term = 0; term < 3; term++)", "for (int term = 2; term < 3; term++)", SM80, FP32, ERRORS),
    ("one product of parts is left out", TILES, "for (int term = 0; term < 3; term++)", "for (int term = 1; term < 3; term++)", SM80, FP32,
     ERRORS),
    ("sums stay in the tensor cores", TILES, "FP32 && D > 64 ? 64 / STEP : D / STEP", "D / STEP", SM80, FP32, ERRORS),
    ("sums of runs are overwritten", TILES, "add_run<M, N>(s, run, begin == 0)", "add_run<M, N>(s, run, true)", SM80, FP32, ERRORS),
    ("big is rounded, small is cut off", TILES, "{x.x[0] & 0xffffe000u, x.x[1]", "{(x.x[0] + 0x1000u) & 0xffffe000u, x.x[1]", SM80, FP32, ERRORS),
    ("P's columns are in memory's order", TILES, "__float_as_uint(acc[m][k][i % 2 * 2 + i / 2])", "__float_as_uint(acc[m][k][i])", SM80, FP32,
     ERRORS),
    ("two columns of an operand are exchanged", TILES, "a.x, b.x[2], b.x[3])", "a.x, b.x[3], b.x[2])", SM80, FP32, ERRORS),
    ("K is the last tile's", FORWARD, "(tile - 1) * KEYS, a);", "tile * KEYS, a);", SM80, FP32, ERRORS),
    ("a query sees the key after it", FORWARD, "- fragment_row(m, i) > row)", "- fragment_row(m, i) > row + 1)", SM80, FP32, ERRORS),
    ("infinities lose their NaN", TILES, "x.x[i]) - __uint_as_float(x.x[i] & 0xffffe000u));",
     "x.x[i]) - __uint_as_float(x.x[i] & 0xffffe000u)) & 0x3fffffffu;", SM80, FP32, "tf32_carries_infinities"),
]


def commands(build, source, program):
    """Returns make's commands that compile the source and that link the program, as words."""
    said = subprocess.run(["make", "-n", "V=1", f"B={build}", "-W", source, f"{build}/{program}"], capture_output=True, text=True,
                          check=True).stdout
    lines = [shlex.split(line) for line in said.splitlines() if " -o " in line]
    compile_one = next(words for words in lines if words[words.index("-o") - 1] == source)
    return compile_one, next(words for words in lines if words[-1] == f"{build}/{program}")


def fails(program, test):
    """Whether the test fails in the program, or does not end."""
    try:
        result = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "TEST_FILTER": test})
    except subprocess.TimeoutExpired:
        return True
    return re.search(rf"^\[  FAILED  \] {test}$", result.stdout + result.stderr, re.M) is not None


def plant(folder, build, path, old, new, source, program):
    """Makes the program FOLDER/program with a fault. Returns why there is none, or ""."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if text.count(old) != 1:
        return f"{path} has its text {text.count(old)} times"
    os.makedirs(os.path.dirname(f"{folder}/{path}"), exist_ok=True)
    with open(f"{folder}/{path}", "w", encoding="utf-8") as file:
        file.write(text.replace(old, new))
    compile_one, link = commands(build, source, program)
    at = compile_one.index("-o")
    compile_one[at - 1:] = [f"{folder}/{path}" if path == source else source, "-o", f"{folder}/fault.o"]
    archive = next(i for i, word in enumerate(link) if word.endswith(".a"))
    made = subprocess.run([compile_one[0], f"-I{folder}", *compile_one[1:]], check=False).returncode == 0 and subprocess.run(
        [*link[:archive], f"{folder}/fault.o", *link[archive:-1], f"{folder}/program"], check=False).returncode == 0
    os.remove(f"{folder}/{path}")
    return "" if made else "it does not compile"


def main():
    build, failed = os.environ.get("B", "build"), 0
    for program, test in sorted({fault[-2:] for fault in FAULTS}):
        if fails(f"{build}/{program}", test):
            sys.exit(f"{build}/{program}: {test} fails without a fault")
    with tempfile.TemporaryDirectory() as folder:
        for name, *fault, test in FAULTS:
            problem = plant(folder, build, *fault)
            if not problem and not fails(f"{folder}/program", test):
                problem = f"{test} does not fail"
            print(f"{'not ok' if problem else 'ok'} - {name}{': ' if problem else ''}{problem}", flush=True)
            failed += problem != ""
    print(f"{len(FAULTS) - failed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
