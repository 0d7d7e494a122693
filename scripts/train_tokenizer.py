#!/usr/bin/env python3
"""Trains a tokenizer on text: byte-level BPE, split as Llama 3 splits text, or as GPT-2 does.

  scripts/train_tokenizer.py corpus.jsonl texts/ --vocab-size 32000 --out tokenizer
  scripts/prepare_data.py corpus.jsonl texts/ --tokenizer tokenizer --out data/corpus
  build/train_gpt ... --vocab-size 32000

It writes tokenizer.json and tokenizer_config.json into the folder --out, which train_gpt, prepare_data.py and transformers read.
Needs the Python package `tokenizers`. Two million lines take minutes and some GB of memory; a sample is enough (--max-characters).
The inputs are prepare_data.py's: text, JSONL, parquet, compressed files, folders of any of them, in a shuffled order.
"""

import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import byte_tokenizer  # noqa: E402: lies beside this file
import text_sources  # noqa: E402
from mistakes import Mistake, run_script, warn  # noqa: E402

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def texts(options):
    """Yields the inputs' documents, up to --max-characters in all."""
    finder = text_sources.Finder(options)
    finder.find()
    left = options.max_characters or sys.maxsize
    for block in text_sources.read_blocks(finder, finder.entries()):
        for text in filter(None, block.texts(options.text_field)):
            text = text.decode("utf-8", "replace")[:left]
            yield text
            left -= len(text)
            if not left:
                return
    if left == (options.max_characters or sys.maxsize):
        raise Mistake(f"{' '.join(options.inputs)}: holds no text")


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
    is_new = not os.path.isdir(options.out)
    os.makedirs(options.out, exist_ok=True)  # before minutes of work
    try:
        tokenizer = train(options)
    except BaseException:
        if is_new:
            os.rmdir(options.out)
        raise
    config = json.loads(byte_tokenizer.files()["tokenizer_config.json"])
    write(os.path.join(options.out, "tokenizer_config.json"), json.dumps(config, indent=1) + "\n")
    write(os.path.join(options.out, "tokenizer.json"), tokenizer.to_str(pretty=True) + "\n")
    size = tokenizer.get_vocab_size()
    print(f"{size} tokens in {options.out}/tokenizer.json; train by --vocab-size {size}")
    if size < options.vocab_size:
        warn(f"the text has pairs for no more than {size} tokens of --vocab-size {options.vocab_size}")


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file or folder of text, as of prepare_data.py; - for standard input")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where to write tokenizer.json")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N", help="tokens, special ones included (default: 32000)")
    parser.add_argument("--split", choices=PATTERNS, default="llama3", help="the pattern that no token crosses (default: llama3)")
    parser.add_argument("--special", action="append", default=[], metavar="TOKEN", help=f"a special token beside {byte_tokenizer.END_OF_TEXT}; may be repeated")
    parser.add_argument("--text-field", "--jsonl-field", default="text", metavar="NAME", help="field that holds the text (default: text)")
    parser.add_argument("--max-characters", type=int, metavar="N", help="stop after N characters of text")
    parser.set_defaults(include=None, max_bytes=None, val_fraction=0)  # as text_sources.Finder wants
    options = parser.parse_args(arguments)
    if options.max_characters is not None and options.max_characters < 1:
        parser.error(f"--max-characters {options.max_characters}: expected at least 1")
    return options


def main(arguments=None):
    return run_script("train_tokenizer.py", lambda: run(parse_options(arguments)))


if __name__ == "__main__":
    sys.exit(main())
