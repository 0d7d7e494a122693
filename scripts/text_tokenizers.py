"""The tokenizers of prepare_data.py: bytes, and a tokenizer.json of Hugging Face.

TokenizerFile reads the file: what the shards need to know of it. Text becomes tokens in the engine's own program
(token_workers.py) or, for chats, whose tokens need places in the text, by the package `tokenizers`.
"""

import contextlib
import functools
import json
import os
import re
import struct

import byte_tokenizer
import chat_template
import tokenizer_digest
from mistakes import Mistake

END_OF_TEXT = "<|endoftext|>"
BYTE_END_OF_TEXT = 256
VOCABULARY_MAGIC = b"GPTVOCAB"  # formats/vocabulary.h has the layout
VOCABULARY_VERSION = 1
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
                   "chat_template.jinja", "generation_config.json", "chat_format.json"]  # fmt: skip
PACKAGE_MISSING = "needs the Python package 'tokenizers': pip install tokenizers; or leave --tokenizer out for byte-level tokens"


class ByteTokenizer:
    """A token is a byte."""

    end_of_text = BYTE_END_OF_TEXT
    width = 2
    strips_space = False
    path = None

    def files(self):
        return byte_tokenizer.files()

    def vocabulary(self):
        return [bytes([byte]) for byte in range(256)] + [END_OF_TEXT.encode()]

    def digest(self):
        return tokenizer_digest.of(json.loads(self.files()["tokenizer.json"]))

    def encode_with_offsets(self, text):
        """Returns a text's tokens, of which END_OF_TEXT in the text is one, and the characters [begin, end) of each
        token."""
        tokens, offsets, at = [], [], 0
        for number, part in enumerate(text.split(END_OF_TEXT)):
            if number:
                tokens.append(BYTE_END_OF_TEXT)
                offsets.append((at, at + len(END_OF_TEXT)))
                at += len(END_OF_TEXT)
            for character in part:
                data = character.encode("utf-8", "replace")
                tokens += data
                offsets += [(at, at + 1)] * len(data)
                at += 1
        return tokens, offsets

    def encode(self, texts):
        """Returns each text as little-endian tokens; the first is the mark of a document's begin."""
        begin = struct.pack("<H", BYTE_END_OF_TEXT)
        documents = []
        for text in texts:
            tokens = bytearray(2 * len(text))
            tokens[::2] = text  # the low bytes; the high ones stay 0
            documents.append(begin + tokens)
        return documents


class TokenizerFile:
    """A tokenizer.json. ids: {token: id}."""

    def __init__(self, path, end_of_text, chat=False):
        """Loads the file. end_of_text: a token's name; None: a usual one; with chat, tokenizer_config.json's before
        the usual ones."""
        if not os.path.isfile(path):
            raise Mistake(f"--tokenizer {path}: no such file; expected a tokenizer.json of Hugging Face")
        self.path = path
        try:
            self.contents = read_tokenizer_files(path)
            self.description = json.loads(self.contents["tokenizer.json"])
            self.ids = self.ids_of_file()
        except Exception as error:
            raise Mistake(f"--tokenizer {path}: {error}; expected a tokenizer.json of Hugging Face") from None
        self.check_added_tokens(path)
        self.end_of_text = self.find_end_of_text(path, end_of_text, chat)
        self.width = 2 if max(self.ids.values()) < 1 << 16 else 4
        self.strips_space = "Strip" in decoder_types(self.description.get("decoder"))  # that of SentencePiece, before a text

    def ids_of_file(self):
        vocabulary = self.description["model"]["vocab"]
        if isinstance(vocabulary, list):  # of Unigram: [token, score]
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        ids = dict(vocabulary)
        for token in self.description.get("added_tokens", []):  # the package numbers them from the vocabulary's size on
            ids.setdefault(token["content"], len(ids))
        return ids

    def check_added_tokens(self, path):
        for token in self.description.get("added_tokens", []):
            if self.ids.get(token["content"]) != token["id"]:
                raise Mistake(
                    f"--tokenizer {path}: says that {token['content']} is token {token['id']}, but the package 'tokenizers' "
                    f"makes it {self.ids.get(token['content'])}; the vocabulary must have no holes before added tokens"
                )

    def find_end_of_text(self, path, wanted, chat):
        usual = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"]
        with contextlib.suppress(ValueError, RecursionError):
            eos = chat_template.special_tokens(json.loads(self.contents.get("tokenizer_config.json", b"{}"))).get("eos_token")
            usual = [eos, *usual] if chat and eos else usual
        for name in [wanted] if wanted else usual:
            if name in self.ids:
                return self.ids[name]
        special = ", ".join(token["content"] for token in self.description.get("added_tokens", [])[:20]) or "none"
        raise Mistake(
            f"--tokenizer {path}: has no token {wanted or ' or '.join(usual)}; "
            f"name the one that separates documents by --end-of-text (special tokens: {special})"
        )

    def files(self):
        return self.contents

    @functools.lru_cache(1)
    def vocabulary(self):
        return token_bytes(self.description, self.ids)

    @functools.lru_cache(1)
    def digest(self):
        """Returns the hash of what decides a text's ids."""
        return tokenizer_digest.of(self.description)


class PackageTokenizer(TokenizerFile):
    """A tokenizer.json, through the `tokenizers` package."""

    def __init__(self, path, end_of_text, chat=False):
        try:
            import tokenizers
        except ImportError:
            raise Mistake(f"--tokenizer {PACKAGE_MISSING}") from None
        self.package = tokenizers
        super().__init__(path, end_of_text, chat)

    def ids_of_file(self):
        self.tokenizer = self.package.Tokenizer.from_file(self.path)  # raises bare Exception
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def encode_with_offsets(self, text):
        """Returns a text's tokens, in which added tokens stand for themselves, and the characters [begin, end) of
        each token."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode(self, texts):
        """Returns each text as little-endian tokens; the first is the mark of a document's begin."""
        code = "H" if self.width == 2 else "I"
        decoded = [text.decode("utf-8", "replace") for text in texts]
        try:
            encodings = self.tokenizer.encode_batch(decoded, add_special_tokens=False)
        except Exception as error:  # bare: a text that the vocabulary has no tokens for
            raise Mistake(f"--tokenizer {self.path}: the package 'tokenizers' cannot encode by it: {error}") from None
        return [struct.pack(f"<{len(e.ids) + 1}{code}", self.end_of_text, *e.ids) for e in encodings]


def read_tokenizer_files(path):
    """Returns the files of a tokenizer, {name: bytes}: the file at `path`, whatever its name, as tokenizer.json, and
    the other TOKENIZER_FILES beside it. Beside PREFIX_tokenizer.json a name has the PREFIX, too, as in the script's
    output, which can so be the script's input."""
    name = TOKENIZER_FILES[0]
    prefix = path.removesuffix(name) if path.endswith(name) else os.path.join(os.path.dirname(path), "")
    contents = {}
    for other in TOKENIZER_FILES:
        beside = path if other == name else prefix + other
        if os.path.isfile(beside):
            with open(beside, "rb") as file:
                contents[other] = file.read()
    return contents


def byte_level_alphabet():
    """Returns {character: byte}, GPT-2's way of writing bytes as printable characters."""
    return {character: byte for byte, character in enumerate(byte_tokenizer.alphabet())}


def decoder_types(decoder):
    if not decoder:
        return set()
    return {decoder.get("type")}.union(*(decoder_types(part) for part in decoder.get("decoders", [])))


def token_bytes(description, ids):
    """Returns what each token stands for, as bytes, by id; an id without a token stands for nothing."""
    types = decoder_types(description.get("decoder"))
    added = {token["id"] for token in description.get("added_tokens", [])}
    alphabet = byte_level_alphabet()
    table = [b""] * (max(ids.values()) + 1)
    for token, number in ids.items():
        if "ByteLevel" in types and number not in added:
            with contextlib.suppress(KeyError):
                table[number] = bytes([alphabet[character] for character in token])
                continue
        if number in added:
            table[number] = token.encode("utf-8", "replace")
        elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):  # a byte that SentencePiece's vocabulary has no character for
            table[number] = bytes([int(token[3:5], 16)])
        else:
            table[number] = token.replace("\u2581", " ").encode("utf-8", "replace")  # SentencePiece's mark for a space
    return table


def pack_vocabulary(table, end_of_text, strips_space=False):
    offsets = [0]
    for entry in table:
        offsets.append(offsets[-1] + len(entry))
    header = struct.pack("<8s4I", VOCABULARY_MAGIC, VOCABULARY_VERSION, len(table), end_of_text, strips_space)
    return header + struct.pack(f"<{len(offsets)}I", *offsets) + b"".join(table)
