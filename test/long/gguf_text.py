#!/usr/bin/env python3
"""Takes small checkpoints through scripts/to_gguf.py, which runs llama.cpp's converter, and compares llama.cpp's greedy
text, in fp32, with --generate's; of a tokenizer split as GPT-2's, of bytes, and of one that train_tokenizer.py makes.

The Python package llama-cpp-python is llama.cpp as a library. Its source distribution, unpacked into $ROW_FOLDER, has
the converter. Exit status 77 if either can't be had.
"""
import functools
import glob
import json
import os
import shutil
import subprocess
import sys
import tarfile

from job import PROGRAM, ROOT, Difference, Folder, run_checks

VERSION = "0.3.36"
GOLDEN = ROOT + "/test/golden/tokenizer_gpt2.json"
TOKENS, NEW_TOKENS = 64, 24
SHAPE = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", TOKENS,
         "--max-position-embeddings", "128", "--micro-batch-size", "4", "--global-batch-size", "8", "--precision", "fp32", "--train-steps", "80",
         "--lr", "1e-2", "--lr-warmup-steps", "5", "--threads", "2"]
LLAMA = ["--normalization", "RMSNorm", "--position-embedding-type", "rope", "--activation", "swiglu", "--no-add-bias-linear",
         "--num-query-groups", "2", "--kv-channels", "16"]
MODELS = {
    "gpt2": [],
    "llama": [*LLAMA, "--untie-embeddings-and-output-weights"],
    "qwen2": [*LLAMA, "--add-qkv-bias"],
    "qwen3": [*LLAMA, "--qk-layernorm"],
    "bytes": LLAMA,
    "trained": LLAMA,
}
VOCABULARIES = {"bytes": 257, "trained": 300}  # of the data of that name; others train on the golden tokenizer's
PROMPTS = ["the quick", "for (int i = 0;", "return "]
TEXT = "the quick brown fox returns for the lazy dog; for (int i = 0; i < n; i++) { sum += x[i]; } return sum / n;\n" * 40
GREEDY = """
import sys, json, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=128, n_threads=2, verbose=False, type_k=0, type_v=0)
for prompt in json.loads(sys.argv[2]):
    tokens = model.tokenize(prompt.encode(), add_bos=False)
    out = []
    model.reset()
    for token in model.generate(tokens, top_k=1, temp=0.0, repeat_penalty=1.0):
        out.append(token)
        if len(out) == int(sys.argv[3]):
            break
    print(json.dumps(model.detokenize(out, tokens).decode(errors="replace")))
"""


def source_of_converter():
    """Returns the folder with convert_hf_to_gguf.py, or None."""
    folder = os.path.join(os.environ.get("ROW_FOLDER") or "/tmp", "source")
    if not glob.glob(folder + "/*/vendor/llama.cpp/convert_hf_to_gguf.py"):
        os.makedirs(folder, exist_ok=True)
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", folder,
                               "llama-cpp-python==" + VERSION], check=False, stdin=subprocess.DEVNULL)
        for path in glob.glob(folder + "/*.tar.gz") if done.returncode == 0 else []:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
    found = glob.glob(folder + "/*/vendor/llama.cpp/convert_hf_to_gguf.py")
    return os.path.dirname(found[0]) if found else None


def write_data(folder):
    """Writes shards of the text's tokens by the package tokenizers, beside the tokenizer, which is copied into the
    checkpoints."""
    import struct
    from tokenizers import Tokenizer
    tokens = Tokenizer.from_file(GOLDEN).encode(TEXT).ids
    for name in ("t_train_000.bin", "t_val_000.bin"):
        with open(folder.path + "/" + name, "wb") as file:
            file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack("<%dH" % len(tokens), *tokens))
    os.remove(folder.path + "/t_train_001.bin")
    shutil.copy(GOLDEN, folder.path + "/t_tokenizer.json")


def write_own_data(folder):
    """Writes shards of bytes, and of a tokenizer that is trained on the text."""
    def script(name, *arguments):
        subprocess.run([sys.executable, ROOT + "/scripts/" + name, text, *arguments], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    text = folder.path + "/text.txt"
    with open(text, "w", encoding="utf-8") as file:
        file.write(TEXT)
    script("train_tokenizer.py", "--vocab-size", str(VOCABULARIES["trained"]), "--out", folder.path + "/tokenizer")
    script("prepare_data.py", "--val-fraction", "0", "--out", folder.path + "/bytes")
    script("prepare_data.py", "--val-fraction", "0", "--out", folder.path + "/trained", "--tokenizer", folder.path + "/tokenizer")


def greedy_of_ours(checkpoint, prompt):
    done = subprocess.run([PROGRAM, "--init-from", checkpoint, "--precision", "fp32", "--sample-tokens", str(NEW_TOKENS), "--temperature", "0",
                           "--threads", "2", "--generate", prompt], capture_output=True, text=True, check=True)
    if prompt not in done.stdout:
        raise Difference("--generate does not begin with its prompt: " + done.stdout)
    return done.stdout.partition(prompt)[2].rstrip("\n")


def mark_as_byte_level(checkpoint):
    """Completes the golden tokenizer's files as transformers and the converter want them."""
    with open(checkpoint + "/tokenizer_config.json", "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, file)
    with open(checkpoint + "/tokenizer.json", encoding="utf-8") as file:
        tokenizer = json.load(file)
    tokenizer["model"]["type"] = "BPE"
    with open(checkpoint + "/tokenizer.json", "w", encoding="utf-8") as file:
        json.dump(tokenizer, file)


def check(folder, name, source):
    data, vocabulary = (name, VOCABULARIES[name]) if name in VOCABULARIES else ("t", 1005)
    command = [PROGRAM, *map(str, SHAPE), *MODELS[name], "--vocab-size", str(vocabulary), "--train-data", "%s/%s_train_*.bin" % (folder.path, data),
               "--val-every", "0", "--out", folder.out(name + "_run")]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    checkpoint = folder.checkpoint(name + "_run", 80)
    ours = [greedy_of_ours(checkpoint, prompt) for prompt in PROMPTS]
    if data == "t":
        mark_as_byte_level(checkpoint)
    gguf = folder.path + "/%s.gguf" % name
    done = subprocess.run([sys.executable, ROOT + "/scripts/to_gguf.py", folder.out(name + "_run"), "--llama-cpp", source, "--outtype", "f32", "--out", gguf],
                          capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        raise Difference("the converter refuses it: " + done.stdout[-2000:] + done.stderr[-3000:])
    done = subprocess.run([sys.executable, "-c", GREEDY, gguf, json.dumps(PROMPTS), str(NEW_TOKENS)], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Difference("llama.cpp does not run it: " + done.stderr[-3000:])
    theirs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    for prompt, one, other in zip(PROMPTS, ours, theirs, strict=True):
        if one.strip() != other.strip() or not one.strip():
            raise Difference("%r: ours %r, llama.cpp's %r" % (prompt, one, other))


def main():
    try:
        import llama_cpp, tokenizers  # noqa: F401, E401
    except ImportError as error:
        print("missing: the Python package %s" % error.name)
        return 77
    source = source_of_converter()
    if not source:
        print("missing: the source distribution of llama-cpp-python %s, which has the converter" % VERSION)
        return 77
    with Folder() as folder:
        write_data(folder)
        write_own_data(folder)
        return run_checks([(name, functools.partial(check, folder, name, source)) for name in MODELS])


if __name__ == "__main__":
    sys.exit(main())
