#!/usr/bin/env python3
"""Trains a tokenizer on text: byte-level BPE, split as Llama 3 splits text, or as GPT-2 does.

  scripts/train_tokenizer.py corpus.jsonl texts/ --vocab-size 32000 --out tokenizer
  scripts/prepare_data.py corpus.jsonl texts/ --tokenizer tokenizer --out data/corpus
  build/train_gpt ... --vocab-size 32000

It writes tokenizer.json and tokenizer_config.json into the folder --out, which train_gpt, prepare_data.py and transformers read.
Needs the Python package `tokenizers`. Two million lines take minutes and some GB of memory; a sample is enough (--max-characters).
"""

import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import byte_tokenizer  # noqa: E402: lies beside this file

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PIECE_BYTES = 1 << 20


class Mistake(Exception):
    """What the user has to change; ends the program with status 2."""


def files_of(inputs):
    for given in inputs:
        if os.path.isdir(given):
            for folder, folders, names in os.walk(given):
                folders.sort()
                yield from (os.path.join(folder, name) for name in sorted(names))
        elif os.path.isfile(given):
            yield given
        else:
            raise Mistake(f"{given}: no such file or folder")


def lines_of(path, field):
    """Yields the lines of a text file, or the texts of a JSONL file."""
    jsonl = path.endswith((".jsonl", ".ndjson"))
    with open(path, "rb") as file:
        if b"\0" in file.peek(1 << 16)[: 1 << 16] or file.peek(2)[:2] == b"\x1f\x8b":
            print(f"train_tokenizer.py: {path}: is no text; left out", file=sys.stderr)
            return
        for number, line in enumerate(file, 1):
            if not jsonl:
                yield line.decode("utf-8", "replace")
                continue
            try:
                yield json.loads(line)[field] + "\n"
            except (ValueError, KeyError, TypeError, RecursionError):
                raise Mistake(f"{path}, line {number}: is no object with a text in '{field}'; name the field by --jsonl-field") from None


def texts(options):
    """Yields the text of all inputs in pieces, up to --max-characters in all."""
    left, piece, filled = options.max_characters or sys.maxsize, [], 0
    for path in files_of(options.inputs):
        for line in lines_of(path, options.jsonl_field):
            piece.append(line)
            filled += len(line)
            if filled >= min(PIECE_BYTES, left):
                yield "".join(piece)
                left, piece, filled = left - filled, [], 0
                if left <= 0:
                    return
    yield "".join(piece)


def train(options):
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise Mistake("needs the Python package 'tokenizers': pip install tokenizers") from None
    special = list(dict.fromkeys([byte_tokenizer.END_OF_TEXT, *options.special]))
    if options.vocab_size < 256 + len(special):
        raise Mistake(f"--vocab-size {options.vocab_size}: expected {256 + len(special)} at least, for the bytes and {len(special)} special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERNS[options.split]), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(options), trainers.BpeTrainer(
        vocab_size=options.vocab_size, min_frequency=2, special_tokens=special, initial_alphabet=byte_tokenizer.alphabet(), show_progress=sys.stderr.isatty()))
    return tokenizer


def write(path, text):
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.tmp", path)


def run(options):
    if os.path.exists(os.path.join(options.out, "tokenizer.json")):
        raise Mistake(f"--out {options.out}: has a tokenizer.json; name another folder, or remove it")
    tokenizer = train(options)
    os.makedirs(options.out, exist_ok=True)
    config = json.loads(byte_tokenizer.files()["tokenizer_config.json"])
    write(os.path.join(options.out, "tokenizer_config.json"), json.dumps(config, indent=1) + "\n")
    write(os.path.join(options.out, "tokenizer.json"), tokenizer.to_str(pretty=True) + "\n")
    size = tokenizer.get_vocab_size()
    print(f"{size} tokens in {options.out}/tokenizer.json; train by --vocab-size {size}")
    if size < options.vocab_size:
        print(f"train_tokenizer.py: the text has pairs for no more than {size} tokens of --vocab-size {options.vocab_size}", file=sys.stderr)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text file, .jsonl file, or folder of either")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where to write tokenizer.json")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N", help="tokens, special ones included (default: 32000)")
    parser.add_argument("--split", choices=PATTERNS, default="llama3", help="the pattern that no token crosses (default: llama3)")
    parser.add_argument("--special", action="append", default=[], metavar="TOKEN", help=f"a special token beside {byte_tokenizer.END_OF_TEXT}; may be repeated")
    parser.add_argument("--jsonl-field", default="text", metavar="NAME", help="field that holds the text (default: text)")
    parser.add_argument("--max-characters", type=int, metavar="N", help="stop after N characters of text")
    try:
        run(parser.parse_args(arguments))
    except Mistake as mistake:
        print(f"train_tokenizer.py: {mistake}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"train_tokenizer.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
