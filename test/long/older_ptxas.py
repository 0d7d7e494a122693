#!/usr/bin/env python3
"""Stands for nvcc: compiles to PTX by the nvcc NEWER_NVCC, and assembles it by an older toolkit's ptxas, OLDER_PTXAS.

Both paths may hold wildcards. PTX_VERSION is the newest PTX that this ptxas reads. An object is one GPU's code alone.
"""
import glob
import os
import re
import subprocess
import sys


def main():
    nvcc, ptxas = (glob.glob(os.environ[name])[0] for name in ("NEWER_NVCC", "OLDER_PTXAS"))
    words = sys.argv[1:]
    if "-c" not in words:
        return subprocess.run([nvcc, *words], check=False).returncode
    gencode, verbose, output = (words.index(word) for word in ("-gencode", "-Xptxas", "-o"))
    gpu, target = words[gencode + 1].rpartition("code=sm_")[2], words[output + 1]
    ptx, virtual = target + ".ptx", f"arch=compute_{gpu},code=compute_{gpu}"
    replaced = {gencode + 1: virtual, words.index("-c"): "-ptx", output + 1: ptx}
    kept = [replaced.get(i, word) for i, word in enumerate(words) if i not in (verbose, verbose + 1)]
    status = subprocess.run([nvcc, *kept, "-MF", re.sub(r"\.o$", ".d", target), "-MT", target], check=False).returncode
    if status:
        return status
    with open(ptx, encoding="utf-8") as file:
        text = re.sub(r"(?m)^\.version .*", ".version " + os.environ["PTX_VERSION"], file.read())
    assemble = [ptxas, "-v", "-lineinfo", "-arch=sm_" + gpu, "-o", target, "-"]
    return subprocess.run(assemble, input=text, text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
