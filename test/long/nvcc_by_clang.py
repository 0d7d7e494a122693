#!/usr/bin/env python3
"""Stands for nvcc where a toolkit's wheels have none: hands nvcc's arguments, as the Makefile writes them, to clang.

CUDA_HOME is the toolkit's folder, with its headers, libdevice, ptxas and libraries, and CLANG the compiler. GPU code is
compiled and assembled, but no object holds it: no wheel of CUDA 12 has fatbinary, which would put it there. A program
links and starts.
"""
import glob
import os
import subprocess
import sys

HOME, CLANG = os.environ["CUDA_HOME"], os.environ["CLANG"]
# Other toolkits' headers may lie in /usr/local/include. cuda-compat is of unroll(N), which nvcc's manual has too.
ALWAYS = ["-isystem", HOME + "/include", "-Wno-unknown-warning-option", "-Wno-cuda-compat"]
# nvcc's words that are left out, and the number of words after each that go with it.
DROPPED = {"-forward-unknown-opts": 0, "-fno-gnu-unique": 0, "all-warnings": 0, "-Xcompiler": 0, "--threads": 1,
           "-diag-suppress": 1}
RENAMED = {"cu": "cuda", "-lineinfo": "-gline-tables-only"}


def translated(words):
    """Returns clang's words for nvcc's, those for the GPU's code alone and the GPU."""
    found, device, gpu, words = list(ALWAYS), [], "", iter(words)
    for word in words:
        if word in DROPPED:
            for _ in range(DROPPED[word]):
                next(words)
        elif word == "-gencode":
            gpu = next(words).rpartition("code=")[2]
        elif word == "-Xptxas":
            device += ["-Xcuda-ptxas", next(words)]
        elif word == "-Xlinker":
            found.append("-Wl," + next(words))
        elif word.startswith("-Xcompiler="):
            found += word.partition("=")[2].split(",")
        else:
            found.append(RENAMED.get(word, word))
    return found, device, gpu


def version():
    """Returns the last line of `nvcc --version`: the compiler and the toolkit."""
    clang, ptxas = (subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
                    for program in (CLANG, HOME + "/bin/ptxas"))
    return f"{clang.splitlines()[0]}, ptxas {ptxas.splitlines()[-1]}"


def main():
    if sys.argv[1:] == ["--version"]:
        print(version())
        return 0
    found, device, gpu = translated(sys.argv[1:])
    if "-c" not in found:
        runtime = [*glob.glob(HOME + "/lib/libcudart.so*"), "-Wl,-rpath," + HOME + "/lib"]
        return subprocess.run([CLANG, *found, *runtime], check=False).returncode
    at = found.index("-o")
    device += [word for word in found[:at] + found[at + 2:] if word not in ("-MMD", "-MP")]
    compile_cuda = [CLANG, "--cuda-path=" + HOME, "--offload-arch=" + gpu]
    for words in (["--cuda-device-only", *device, "-o", found[at + 1] + ".cubin"], ["--cuda-host-only", *found]):
        status = subprocess.run([*compile_cuda, *words], check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
