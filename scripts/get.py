#!/usr/bin/env python3
"""Downloads what a first run needs: a text, a slice of FineWeb, or a small model with its tokenizer.

  scripts/get.py shakespeare              data/shakespeare.txt, 1.1 MB
  scripts/get.py fineweb-edu --shards 2   data/fineweb-edu/, parquet files of some 100 MB each
  scripts/get.py fineweb                  data/fineweb/, parquet files of 2 GB each: the sample of 10 billion tokens
  scripts/get.py model smollm2-135m       models/SmolLM2-135M, a folder for --init-from and --tokenizer
  scripts/get.py model OWNER/NAME         any model of huggingface.co

A file has its name only when it is whole: its checksum agrees with the one that is known here or that the server tells.
What an interrupted download leaves is called .part, and the next call goes on with it. A model comes by
huggingface_hub where that package is installed, else by plain https. HF_TOKEN in the environment opens models that ask
for an account, HF_ENDPOINT names another server than https://huggingface.co.
"""

import argparse
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mistakes import Mistake, run_script  # noqa: E402: lies beside this file

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
               "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")  # fmt: skip
# Of each data set: its repository, and the name of its file number i.
DATASETS = {
    "fineweb-edu": ("karpathy/fineweb-edu-100b-shuffle", "shard_%05d.parquet"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample/10BT/%03d_00000.parquet"),
}
MODELS = {
    "gpt2-124m": "openai-community/gpt2",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
}
# What train_gpt and prepare_data.py read of a model's folder, beside model.safetensors or its shards.
MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
               "vocab.json", "merges.txt", "chat_template.jinja"]  # fmt: skip
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors$")


def endpoint():
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not re.match("https?://.", address):
        raise Mistake(f"HF_ENDPOINT={address}: is no server's address; expected one as https://huggingface.co")
    return address


# --- One file ---------------------------------------------------------------------------------------------------------


def told_checksum(url, headers):
    """Returns the checksum that an answer's headers tell, in hexadecimal digits, or None. Only huggingface.co's ETag is
    one: SHA-256 of a large file, git's SHA-1 of the others."""
    if urllib.parse.urlsplit(url).netloc != urllib.parse.urlsplit(endpoint()).netloc:
        return None
    found = re.fullmatch(r'(?:W/)?"?([0-9a-f]{64}|[0-9a-f]{40})"?', headers.get("X-Linked-Etag") or headers.get("ETag") or "")
    return found.group(1) if found else None


class Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the checksum that huggingface.co tells before it sends a client to where the bytes are, and keeps the token
    from other hosts."""

    told = None

    def redirect_request(self, request, fp, code, message, headers, target):
        following = super().redirect_request(request, fp, code, message, headers, target)
        self.told = self.told or told_checksum(request.full_url, headers)
        if following and urllib.parse.urlsplit(target).netloc != urllib.parse.urlsplit(request.full_url).netloc:
            following.remove_header("Authorization")
        return following


class Answer:
    """A server's answer. checksum: what the server says of the file, None: nothing; start: the first byte that comes;
    size: of the whole file, None: not told."""

    def __init__(self, url, start=0):
        headers = {"User-Agent": "train_gpt"}
        if start:
            headers["Range"] = f"bytes={start}-"
        if os.environ.get("HF_TOKEN") and url.startswith(endpoint() + "/"):
            headers["Authorization"] = "Bearer " + os.environ["HF_TOKEN"]
        redirects = Redirects()
        self.stream = urllib.request.build_opener(redirects).open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
        length = self.stream.headers.get("Content-Length")
        self.checksum = redirects.told or told_checksum(self.stream.url, self.stream.headers)
        self.start = start if self.stream.status == 206 else 0
        self.size = self.start + int(length) if length else None


def checksum_of(path, like):
    """Returns the file's checksum of the kind of `like`: SHA-256, or of 40 digits git's SHA-1 of a blob."""
    digest = hashlib.sha256() if len(like) == 64 else hashlib.sha1(b"blob %d\0" % os.path.getsize(path))
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def show(name, done, size):
    if sys.stderr.isatty():
        print(f"\r{name}: {done / 1e6:,.1f}{f' of {size / 1e6:,.1f}' if size else ''} MB ", end="", file=sys.stderr, flush=True)


def why_failed(url, error, wanted=None):
    """Returns what is wrong, and what would help. wanted: the address of what a user may fetch; None: url."""
    host = urllib.parse.urlsplit(url).netloc
    if isinstance(error, urllib.error.HTTPError):
        if error.code in (401, 403):
            return f"{url}: the server wants an account with access to it (status {error.code}); set HF_TOKEN to its token"
        return f"{url}: the server answers with status {error.code}, {error.reason}"
    reason = getattr(error, "reason", None) or error
    return f"{host} can't be reached: {reason}; on a machine with a network get {wanted or url}"


def copy_answer(answer, part, name):
    """Appends what the answer has to the file `part`, from its first byte on."""
    with open(part, "r+b" if answer.start else "wb") as file:
        file.seek(answer.start)
        done = answer.start
        while chunk := answer.stream.read(CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            show(name, done, answer.size)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if answer.size is not None and done != answer.size:
        raise Mistake(f"{name}: the connection ended after {done:,} of {answer.size:,} bytes; call get.py again, which goes on from there")


def fetch(url, path, checksum=None):
    """Downloads a file, or goes on with what is there of it. checksum: SHA-256, None: what the server tells."""
    part, name = path + ".part", os.path.basename(path)
    try:
        answer = Answer(url, os.path.getsize(part) if os.path.exists(part) else 0)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing follows what is there: it is whole, or of another file
            os.remove(part)
            return fetch(url, path, checksum)
        raise Mistake(why_failed(url, error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise Mistake(why_failed(url, error)) from None
    with answer.stream:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        try:
            copy_answer(answer, part, name)
        except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
            raise Mistake(f"{name}: the connection broke ({error}); call get.py again, which goes on from there") from None
    wanted = checksum or answer.checksum
    if wanted and checksum_of(part, wanted) != wanted:
        os.remove(part)
        raise Mistake(f"{name}: its checksum is not {wanted[:16]}..., so it was removed; call get.py again, or see what {url} has become")
    os.replace(part, path)
    return f"{path}: {os.path.getsize(path):,} bytes, " + ("checksum agrees" if wanted else "the server tells no checksum")


# --- Goals ------------------------------------------------------------------------------------------------------------


def get_shakespeare(out):
    path = os.path.join(out or "data", "shakespeare.txt")
    url, checksum = SHAKESPEARE
    if os.path.exists(path):
        if checksum_of(path, checksum) != checksum:
            raise Mistake(f"{path} is another file; move it away, or name another folder by --out")
        print(f"{path}: is here already")
    else:
        print(fetch(url, path, checksum))
    print(f"next: scripts/prepare_data.py {path} --out {os.path.join(out or 'data', 'shakespeare')}")


def get_dataset(name, out, shards):
    repository, pattern = DATASETS[name]
    folder = out or os.path.join("data", name)
    for i in range(shards):
        path = os.path.join(folder, os.path.basename(pattern % i))
        if os.path.exists(path):
            print(f"{path}: is here already")
        else:
            print(fetch(f"{endpoint()}/datasets/{repository}/resolve/main/{pattern % i}", path))
    print(f"next: scripts/prepare_data.py {folder} --tokenizer MODEL/tokenizer.json --out {folder}")


def model_files(names):
    """Returns which of a repository's files make the model and its tokenizer."""
    shards = [name for name in names if SHARD.match(name)]
    weights = ["model.safetensors"] if "model.safetensors" in names else shards and [*shards, "model.safetensors.index.json"]
    if "config.json" not in names or not weights or not set(weights) <= set(names):
        raise Mistake("it has no config.json with model.safetensors; train_gpt reads no other form of weights")
    return [name for name in MODEL_FILES if name in names] + weights


def read_json(url, wanted):
    try:
        with Answer(url).stream as stream:
            return json.load(stream)
    except (OSError, http.client.HTTPException) as error:
        raise Mistake(why_failed(url, error, wanted)) from None
    except ValueError:
        raise Mistake(f"{url}: the server's answer is no JSON") from None


def by_hand(repository, folder):
    """Returns what a user without this network may fetch, and where to put it."""
    return f"the files of {endpoint()}/{repository}, and copy them into {folder} here"


def fetch_model(repository, folder):
    """Downloads a model's files, all of one commit, into the folder, named .part, by plain https."""
    listed = read_json(f"{endpoint()}/api/models/{repository}", by_hand(repository, folder.removesuffix(".part")))
    try:
        commit, names = listed["sha"], [sibling["rfilename"] for sibling in listed["siblings"]]
    except (KeyError, TypeError):
        raise Mistake(f"{repository}: the server does not list its files") from None
    for name in model_files(names):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            print(fetch(f"{endpoint()}/{repository}/resolve/{commit}/{name}", path))


def hub_model(hub, repository, folder):
    """Downloads a model's files into the folder, named .part, by huggingface_hub."""
    try:
        info = hub.HfApi().model_info(repository)
        for name in model_files([sibling.rfilename for sibling in info.siblings]):
            hub.hf_hub_download(repository, name, revision=info.sha, local_dir=folder)
    except Mistake:
        raise
    except Exception as error:  # of the package, or of the library by which it downloads
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        wanted = by_hand(repository, folder.removesuffix(".part"))
        raise Mistake(f"{repository} can't be downloaded by huggingface_hub: {line}; on a machine with a network get {wanted}") from None
    shutil.rmtree(os.path.join(folder, ".cache"), ignore_errors=True)  # the package's notes


def get_model(name, out):
    repository = MODELS.get(name.lower(), name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise Mistake(f"'{name}' is no model; expected OWNER/NAME of {endpoint()}, or {', '.join(MODELS)}")
    folder = (out or os.path.join("models", repository.split("/")[1])).rstrip("/")
    if os.path.exists(folder):
        if not os.path.exists(os.path.join(folder, "config.json")):
            raise Mistake(f"{folder} is no model's folder; move it away, or name another one by --out")
        print(f"{folder}: is here already")
    else:
        try:
            import huggingface_hub as hub
        except ImportError:
            hub = None
        try:
            if hub:
                hub_model(hub, repository, folder + ".part")
            else:
                fetch_model(repository, folder + ".part")
        except Mistake as mistake:
            raise Mistake(str(mistake) if repository in str(mistake) else f"{repository}: {mistake}") from None
        os.rename(folder + ".part", folder)
        print(f"{folder}: whole")
    print(f"next: train_gpt --init-from {folder} --generate 'Once upon a time'")


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of files; expected at least 1")
    return int(text)


def run(arguments):
    parser = argparse.ArgumentParser(prog="get.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal", choices=["shakespeare", *DATASETS, "model"])
    parser.add_argument("name", nargs="?", metavar="MODEL", help=f"of `model`: {', '.join(MODELS)}, or OWNER/NAME")
    parser.add_argument("--shards", type=positive, default=1, metavar="N", help="of a data set: its first N files [1]")
    parser.add_argument("--out", metavar="DIR", help="the folder to write [data, data/GOAL or models/NAME]")
    options = parser.parse_args(arguments)
    if (options.goal == "model") != (options.name is not None):
        parser.error("`model` needs a name" if options.goal == "model" else f"'{options.name}': only `model` takes a name")
    if options.goal == "shakespeare":
        get_shakespeare(options.out)
    elif options.goal == "model":
        get_model(options.name, options.out)
    else:
        get_dataset(options.goal, options.out, options.shards)


def main(arguments=None):
    return run_script("get.py", run, arguments, interrupted="interrupted; the next call goes on from what is there")


if __name__ == "__main__":
    sys.exit(main())
