"""Programs that stand in for those of a machine with a GPU, for rehearsals of scripts/gpu_check.sh. Where the environment has
STAND_IN_RUNS, ncu and memcheck run the program that they are given."""
import os
import sys

STAND_INS = {
    "nvidia-smi": """#!/bin/sh
case "$1" in
-L) echo "GPU 0: ${STAND_IN_GPU:-Stand-in}" ;;
*) echo "${STAND_IN_GPU:-Stand-in}, 1.0, ${STAND_IN_CAPABILITY:-8.0}, 1024 MiB" ;;
esac
""",
    # Nsight Compute: a step's kernels, each of 2 us, between lines of its own.
    "ncu": f"""#!{sys.executable}
import os, subprocess, sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
assert options["--metrics"] == "gpu__time_duration.sum" and options["--clock-control"] == "none" and "--cuda-graphs=false" in options
with open(os.environ["STAND_IN_FOLDER"] + "/profiled", "a") as f:
    f.write(" ".join(sys.argv) + "\\n")
lines = ["==PROF== Connected to process 1"]
if os.environ.get("NCU_SAYS"):
    lines.append(os.environ["NCU_SAYS"])
else:
    step = ["void norm_forward_kernel<float>(float *, int)", "nvjet_hsh_128x256", "void cublasLt::splitKreduce_kernel<32>(T1)",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "void sm90_forward_kernel<plan<64, 0>>(arguments)",
            "something_else", "void squares_of_ranges_kernel<float>(double *)", "void adamw_kernel<(bool)0>(adamw_arguments)"]
    lines.append('"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
    names = ["void normal_kernel(float *)"] + 3 * step
    lines += [f'"{{i}}","1","{{name}}","gpu__time_duration.sum","ns","{{"2,000" if i > 8 else "7"}}"' for i, name in enumerate(names)]
with open(options["--log-file"], "w") as f:
    f.write("\\n".join(lines) + "\\n")
if os.environ.get("STAND_IN_RUNS"):
    sys.exit(subprocess.run(sys.argv[sys.argv.index("--log-file") + 2:]).returncode)
sys.exit(1 if os.environ.get("NCU_SAYS") else 0)
""",
    "compute-sanitizer": """#!/bin/sh
[ -n "$STAND_IN_RUNS" ] || { echo 'Device not supported.'; exit 1; }
[ "$2" != racecheck ] || exit 0 # memcheck has run the same programs
while [ "${1#/}" = "$1" ]; do shift; done
exec "$@"
""",
    "python": f"""#!/bin/sh
case "$1 $2 $3" in
"-c "*"import torch"*) echo 9.9 of a stand-in ;;
"test/cuda/peer_torch.py attention "*) cat "$STAND_IN_FOLDER/attention" ;;
"test/cuda/peer_torch.py train "*) case $TORCHINDUCTOR_CACHE_DIR in */torchinductor) cat "$STAND_IN_FOLDER/train" ;; esac ;;
*) exec {sys.executable} "$@" ;;
esac
"""}


def write_program(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, 0o755)


def write_stand_ins(folder):
    """Writes STAND_INS into a folder, which is to come first in PATH; python is for PYTHON."""
    os.makedirs(folder, exist_ok=True)
    for name, text in STAND_INS.items():
        write_program(f"{folder}/{name}", text)
