#!/usr/bin/env python3
"""Prints compile_commands.json, from which editors take a file's flags: make -nB GOAL ... | scripts/compile_commands.py
[HEADER ...]

A source has one command: the cpu target's where there is one; of several an engine's; of several engines' the longest.
So train_gpt.c is the bf16 engine. The HEADERs get train_gpt.c's command. The other .cuh files and the emulator's
headers get train_gpt.c's command for the emulator, since clangd would take .cuh for CUDA. clang without an omp.h of its
own finds gcc's, which comes after clang's other headers.
"""
import glob
import json
import os
import shlex
import subprocess
import sys

DROPPED = ("-MMD", "-MP", "-Wl,", "-L", "-l")
EMULATED = "-DCUDA_EMULATED"


def command_of(line):
    """Returns a command's source and its words, without the words that name source and output; None for other
    commands."""
    words = shlex.split(line)
    sources = [word for word in words if word.endswith((".c", ".cu"))]
    if "-o" not in words or len(sources) != 1:
        return None
    at = words.index("-o")
    kept = [word for word in words[:at] + words[at + 2:] if word not in ("-c", sources[0]) and not word.startswith(DROPPED)]
    gcc_headers = subprocess.run([words[0], "-print-file-name=include"], capture_output=True, text=True).stdout.strip()
    return sources[0], kept + (["-idirafter", gcc_headers] if os.path.isabs(gcc_headers) else [])


def is_better(words):
    return any(word.startswith("-DENGINE=") for word in words), len(words)


def main():
    longest = {}  # by (source, whether for the emulator)
    for line in sys.stdin:
        found = command_of(line) if " -std=" in line else None
        if found:
            key = found[0], EMULATED in found[1]
            longest[key] = max(longest.get(key, []), found[1], key=is_better)
    files = {source: longest.get((source, False)) or words for (source, _), words in longest.items()}
    for header in sys.argv[1:]:
        files[header] = longest["train_gpt.c", False] + ["-x", "c"]
    for header in [*glob.glob("*.cuh"), *glob.glob("*/*.cuh"), *glob.glob("kernels/*/*.cuh"), *glob.glob("test/emu/*.h")]:
        files.setdefault(header, longest.get(("train_gpt.c", True)))
    json.dump([{"directory": os.getcwd(), "file": file, "arguments": [*words, file]} for file, words in sorted(files.items()) if words],
              sys.stdout, indent=1)


if __name__ == "__main__":
    main()
