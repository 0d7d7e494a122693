#!/usr/bin/env python3
"""Compares the ids, and the text that comes back, of byte-fallback BPE with the `tokenizers` package's on ten million
tokens of hard text: every plane of Unicode, white space, marks, emoji, controls, added tokens and their beginnings.

    test/long/tokenizer_ids.py [--tokens N] [--model tokenizer.model]

Vocabularies are trained here: one in which text may be cut before spaces, and one in which it may not. --model adds
that of a file of SentencePiece, as Llama 2's, for which the package `sentencepiece` is needed.
"""
import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MARK = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]
SPACES = [chr(c) for c in [9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, 0x180E, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF]]


def training_text():
    for folder, _, names in sorted(os.walk(ROOT)):
        if "/." in folder or "/build" in folder:
            continue
        for name in sorted(names):
            if name.endswith((".md", ".c", ".py")):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    yield file.read()


def trained(size, across):
    """Returns the model of a trained tokenizer. across: merges cross spaces."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = None if across else pre_tokenizers.Metaspace()
    lines = [line.replace(" ", MARK) for text in training_text() for line in text.split("\n")] if across else training_text()
    byte_tokens = ["<0x%02X>" % byte for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return json.loads(tokenizer.to_str())["model"]


def of_sentencepiece(path):
    """Returns the model of a file of SentencePiece. A piece's merges are its splits into two pieces."""
    import sentencepiece
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    vocab = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    merges = []
    for piece, number in vocab.items():
        if not (processor.is_byte(number) or processor.is_control(number) or processor.is_unknown(number)):
            halves = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
            merges += [(processor.get_score(number), len(a), a, b) for a, b in halves if a in vocab and b in vocab]
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    return {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": [[a, b] for *_, a, b in merges]}


def forms(model):
    """Yields (name, the object of a tokenizer.json) for each form of formats/tokenizer_fallback.h, and more."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, replace]}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    unmark = [{"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    names = SPECIAL + ["<|left|>", "<|right|>", "<|both|>", "<n m>", "</s>x"]
    size = max(model["vocab"].values()) + 1

    def metaspace(scheme, splits=False):
        return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": splits}

    def added(normalized):
        ids = iter(range(size, size + len(names)))
        return [{"id": model["vocab"][name] if name in model["vocab"] else next(ids), "content": name, "single_word": False,
                 "lstrip": name in ("<|left|>", "<|both|>"), "rstrip": name in ("<|right|>", "<|both|>"), "normalized": normalized,
                 "special": name in SPECIAL} for name in names]

    for name, normalizer, pre_tokenizer, strips, normalized, ignores in (
        ("llama2", llama, None, True, False, False), ("gemma", replace, split, False, False, False),
        ("first", None, metaspace("first"), True, False, False), ("always", None, metaspace("always"), True, False, False),
        ("never", None, metaspace("never"), False, False, False), ("splits", None, metaspace("always", True), True, False, False),
        ("normalized", llama, None, True, True, False), ("normalized first", replace, metaspace("first"), False, True, False),
        ("whole", llama, None, True, False, True), ("bare", None, None, False, False, False),
    ):
        yield name, {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added(normalized), "normalizer": normalizer,
                     "pre_tokenizer": pre_tokenizer, "post_processor": None, "model": {**model, "ignore_merges": ignores},
                     "decoder": {"type": "Sequence", "decoders": unmark + [strip] * strips}}


def hard_texts(seed, documents):
    """Yields texts without an end: of characters, of likely parts, of words, and of all of them."""
    generator = random.Random(seed)
    everything = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    likely = ["</s>", "<s>", "<unk>", "<|left|>", "<|right|>", "<|both|>", "<n m>", "</s>x", "</s", "<|", "<0x41>", "<0x0A>", MARK, MARK * 2, "  ", "   ",
              "\u0301", "\u0323", "\u200d", "\ufe0f", "\U0001f468\u200d\U0001f469", "\U0001f1e9\U0001f1ea", "\0", "e\u0301", "\ufffd", "\r\n"]
    words = [word for text in documents for word in text.split(" ")]
    while True:
        kind = generator.randrange(5)
        if kind == 0:
            yield "".join(generator.choices(everything, k=generator.randrange(60)))
        elif kind == 1:
            yield "".join(generator.choices(SPACES + ["a", "1", ".", MARK], k=generator.randrange(60)))
        elif kind == 2:
            yield "".join(generator.choice(likely if generator.random() < 0.4 else words) + " " * generator.choice([0, 1, 1, 1, 2, 7]) for _ in range(generator.randrange(60)))
        elif kind == 3:
            text = generator.choice(documents)
            begin = generator.randrange(len(text))
            yield text[begin : begin + generator.randrange(8000)]
        else:
            yield "".join(generator.choice((generator.choice(everything), generator.choice(likely), generator.choice(SPACES), generator.choice(words))) for _ in range(generator.randrange(80)))


def answers(program, path, texts):
    data = b"".join(struct.pack("<I", len(text)) + text for text in (text.encode() for text in texts))
    out = subprocess.run([program, path], input=data, stdout=subprocess.PIPE, check=True).stdout
    at = 0
    for _ in texts:
        count, = struct.unpack_from("<I", out, at)
        ids = list(struct.unpack_from("<%di" % count, out, at + 4))
        length, = struct.unpack_from("<I", out, at + 4 + 4 * count)
        at += 8 + 4 * count + length
        yield ids, out[at - length : at]


def compare(program, where, description, tokens, documents):
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/tokenizer.json"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(description, file, ensure_ascii=False)
        package = tokenizers.Tokenizer.from_file(path)
        done, texts = 0, hard_texts(where, documents)
        while done < tokens:
            batch = [next(texts) for _ in range(2000)]
            encodings = package.encode_batch(batch, add_special_tokens=False)
            for text, expected, (ids, decoded) in zip(batch, encodings, answers(program, path, batch)):
                if ids != expected.ids:
                    raise SystemExit("%s: %r\nexpected %s\ngot      %s" % (where, text, expected.ids, ids))
                wanted = package.decode(ids, skip_special_tokens=False)
                if "\ufffd" not in wanted and decoded != wanted.encode():
                    raise SystemExit("%s: %r came back as %r; expected %r" % (where, text, decoded, wanted))
                done += len(ids)
    print("%-28s %9d tokens" % (where, done), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--model")
    options = parser.parse_args()
    vocabularies = {"cut": trained(6000, False), "across": trained(6000, True)}
    if options.model:
        vocabularies["model"] = of_sentencepiece(options.model)
    documents = [text for text in training_text() if text]
    with tempfile.TemporaryDirectory() as folder:
        program = folder + "/tokenize"
        subprocess.run(["cc", "-O2", "-I" + ROOT, ROOT + "/test/long/tokenize.c", ROOT + "/build/library.a", "-o", program, "-ljansson", "-lpcre2-8", "-lm",
                        "-ldl"], check=True)
        tasks = [(name + ", " + form, description) for name, model in vocabularies.items() for form, description in forms(model)]
        for where, description in tasks:
            compare(program, where, description, options.tokens // len(tasks), documents)


if __name__ == "__main__":
    sys.exit(main())
