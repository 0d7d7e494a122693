#!/usr/bin/env python3
"""Makes token shards for train_gpt from text files, folders of them, or JSONL; or from chats, to finetune on.

  scripts/prepare_data.py book.txt --out data/book
  scripts/prepare_data.py /usr/include --include '*.h' --max-bytes 40M --out data/headers
  scripts/prepare_data.py corpus.jsonl --tokenizer tokenizer.json --out data/corpus
  scripts/prepare_data.py chats.jsonl --chat --tokenizer MODEL/tokenizer.json --seq-length 2048 --out data/chats

Without --tokenizer a token is a byte (0 to 255), and 256 marks where a document begins; this needs only Python. A
Hugging Face tokenizer.json needs the `tokenizers` package.

The script writes PREFIX_train_000.bin ..., PREFIX_val_000.bin ... (llm.c's shards: uint16 where token ids fit,
otherwise uint32) and PREFIX_vocabulary.bin, from which train_gpt prints samples as text. It copies the file of
--tokenizer as PREFIX_tokenizer.json, and what lies beside it of a tokenizer's and a chat's files as
PREFIX_tokenizer_config.json and so on, so that a checkpoint can take them along; bytes have such files, too. A run
replaces all that an earlier run with the same PREFIX wrote. The same input gives the same files on any machine: a document's name decides its place in
the order, and its content whether it goes to training or validation. Of documents with the same content one is taken.

With --chat a line of JSONL is an example: messages, prompt and completion, ShareGPT's conversations, or Alpaca's
instruction (scripts/chat_data.py). The tokenizer's own chat template is applied, what the assistant says is learned,
and examples are packed into rows of --seq-length tokens; no example sees another. docs/finetune_data.md has more.
"""

import argparse
import collections
import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import byte_tokenizer  # noqa: E402: lies beside this file
import chat_data  # noqa: E402
import chat_rows  # noqa: E402
import chat_template  # noqa: E402
import tokenizer_digest  # noqa: E402

SHARD_HEADER_INTS = 256
SHARD_KINDS = {2: (20240520, 1), 4: (20240801, 7)}  # bytes a token: (magic, version)
END_OF_TEXT = "<|endoftext|>"
BYTE_END_OF_TEXT = 256
VOCABULARY_MAGIC = b"GPTVOCAB"  # formats/vocabulary.h has the layout
VOCABULARY_VERSION = 1
NO_TOKEN = 0xFFFFFFFF
MAX_SHARDS = 10_000  # more come of --shard-tokens 100 in place of 100M, and take hours to remove
WRITE_BYTES = 1 << 22  # tokens are handed to the file in pieces of about this size
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
                   "chat_template.jinja", "generation_config.json", "chat_format.json"]  # fmt: skip
BATCH_BYTES = 1 << 22  # text is handed to a tokenizer in batches of about this size


class Mistake(Exception):
    """What the user has to change; ends the program with status 2."""


# --- Documents --------------------------------------------------------------------------------------------------------


class Document:
    """A part of a file, from byte begin to byte end: a text file or a piece of one (line 0), or a line of JSONL."""

    __slots__ = ("path", "begin", "end", "line", "order")

    def __init__(self, path, begin, end, line, identity):
        self.path, self.begin, self.end, self.line = path, begin, end, line
        self.order = hashlib.blake2b(identity, digest_size=12).digest()


def files_of_folder(folder, patterns):
    """Returns the files below a folder that match a pattern, sorted, as (path, path below the folder). Links to
    folders are not followed."""
    found = []
    for parent, _, names in os.walk(
        folder, onerror=lambda error: warn(f"{error.filename}: {error.strerror}; left out")
    ):
        for name in names:
            path = os.path.join(parent, name)
            below = os.path.relpath(path, folder)
            wanted = any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(below, p) for p in patterns)
            if wanted and os.path.isfile(path):
                found.append((path, below))
    return sorted(found, key=lambda item: os.fsencode(item[1]))


def find_files(inputs, patterns):
    """Returns all input files as (path, name that decides its place, whether the user named it, bytes). A file with
    two names counts once."""
    files, seen = [], set()
    for number, given in enumerate(inputs):
        if os.path.isdir(given):
            below = files_of_folder(given, patterns)
            if not below:
                raise Mistake(f"{given}: no file below it matches --include {' '.join(patterns)}")
            found = [(path, name, False) for path, name in below]
        elif os.path.isfile(given):
            found = [(given, os.path.basename(given), True)]
        else:
            raise Mistake(f"{given}: no such file or folder")
        for path, name, named in found:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                files.append((path, f"{number}/{name}", named, status.st_size))
    return files


def lines_of_jsonl(path, name):
    documents, offset = [], 0
    identity = os.fsencode(name)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                documents.append(Document(path, offset, offset + len(line), number, b"%s:%d" % (identity, number)))
            offset += len(line)
    return documents


def pieces_of_text(path, name, size, piece_bytes):
    """Returns a file as documents: one, or, if it is much longer than piece_bytes, pieces of about piece_bytes, cut
    at line ends. piece_bytes of 0 cuts nothing."""
    cuts = [0]
    if piece_bytes and size > 2 * piece_bytes:
        with open(path, "rb") as file:
            while cuts[-1] + 2 * piece_bytes < size:
                file.seek(cuts[-1] + piece_bytes)
                line_end = file.read(min(piece_bytes, 1 << 16)).find(b"\n")
                cuts.append(cuts[-1] + piece_bytes + line_end + 1)  # no line end is near: at piece_bytes exactly
    cuts.append(size)
    identity = os.fsencode(name)
    return [Document(path, begin, end, 0, b"%s@%d" % (identity, begin)) for begin, end in zip(cuts, cuts[1:])]


def is_jsonl(path):
    return path.endswith((".jsonl", ".ndjson"))


def find_documents(options):
    """Returns all documents in the order in which they are written."""
    files = find_files(options.inputs, options.include or ["*"])
    total = min(sum(size for *_, size in files), options.max_bytes or sys.maxsize)
    # A document goes to validation whole or not at all. A long file is cut so that about ten pieces should go: into
    # pieces of at least 1 KiB, some windows long, since each cut is an end of text inside a text, and of at most 1 MiB.
    piece_bytes = min(max(int(total * options.val_fraction / 10), 1 << 10), 1 << 20) if options.val_fraction else 0
    documents, skipped = [], []
    for path, name, named, size in files:
        try:
            if is_jsonl(path):
                documents += lines_of_jsonl(path, name)
            elif size and (named or not is_binary(path)):
                documents += pieces_of_text(path, name, size, piece_bytes)
            elif size:
                skipped.append(path)
        except OSError as error:
            if named:
                raise Mistake(f"{path}: {error.strerror}") from None
            warn(f"{path}: {error.strerror}; left out")
    if skipped:
        warn(f"left out {len(skipped)} files that hold zero bytes and so are no text, such as {skipped[0]}")
    documents.sort(key=lambda document: document.order)
    return documents


def is_binary(path):
    with open(path, "rb") as file:
        return b"\0" in file.read(1 << 16)


def text_of_line(document, line, field):
    where = f"{document.path}, line {document.line}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{where}: not JSON: {error}; expected one object a line") from None
    if not isinstance(value, dict):
        raise Mistake(f"{where}: holds a {type(value).__name__}; expected an object with the field '{field}'")
    if not isinstance(value.get(field), str):
        having = ", ".join(f"'{name}'" for name in value if isinstance(value[name], str)) or "none"
        raise Mistake(
            f"{where}: has no text in the field '{field}'; fields with text: {having}; name one by --jsonl-field"
        )
    # A lone surrogate (half of a \u escape) is valid JSON and not valid text.
    return value[field].encode("utf-8", "replace")


def digest(text):
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def read_documents(documents, options, statistics):
    """Yields each document's bytes and their digest, up to --max-bytes in all; the last document is cut to fit.
    Counts bytes and copies in statistics."""
    left = options.max_bytes or sys.maxsize
    file, opened = None, None
    seen = set()
    try:
        for document in documents:
            if opened != document.path:
                if file:
                    file.close()
                file, opened = open(document.path, "rb"), document.path
            file.seek(document.begin)
            text = file.read(document.end - document.begin)
            if document.line:
                text = text_of_line(document, text, options.jsonl_field)
            text = text[:left]
            key = digest(text)
            if not text or key in seen:
                statistics["copies"] += key in seen
                continue
            if not options.keep_copies:
                seen.add(key)
            left -= len(text)
            statistics["bytes"] += len(text)
            yield text, key
            if not left:
                return
    finally:
        if file:
            file.close()


# --- Tokens -----------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """A token is a byte."""

    end_of_text = BYTE_END_OF_TEXT
    width = 2
    strips_space = False

    def files(self):
        return byte_tokenizer.files()

    def vocabulary(self):
        return [bytes([byte]) for byte in range(256)] + [END_OF_TEXT.encode()]

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
        """Yields each text as little-endian tokens; the first is the mark of a document's begin."""
        begin = struct.pack("<H", BYTE_END_OF_TEXT)
        for text in texts:
            tokens = bytearray(2 * len(text))
            tokens[::2] = text  # the low bytes; the high ones stay 0
            yield begin + tokens


class HuggingFaceTokenizer:
    """A tokenizer.json, through the `tokenizers` package."""

    def __init__(self, path, end_of_text, chat=False):
        """Loads the file. end_of_text: a token's name; None: a usual one; with chat, tokenizer_config.json's before
        the usual ones."""
        try:
            import tokenizers
        except ImportError:
            raise Mistake(
                "--tokenizer needs the Python package 'tokenizers': pip install tokenizers; "
                "or leave --tokenizer out for byte-level tokens"
            ) from None
        if not os.path.isfile(path):
            raise Mistake(f"--tokenizer {path}: no such file; expected a tokenizer.json of Hugging Face")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
            self.contents = read_tokenizer_files(path)
            self.description = json.loads(self.contents["tokenizer.json"])
        except Exception as error:  # the package raises bare Exception
            raise Mistake(f"--tokenizer {path}: {error}; expected a tokenizer.json of Hugging Face") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.ids = self.tokenizer.get_vocab(with_added_tokens=True)
        for token in self.description.get("added_tokens", []):
            if self.ids.get(token["content"]) != token["id"]:  # the package numbers them from the vocabulary's size on
                raise Mistake(
                    f"--tokenizer {path}: says that {token['content']} is token {token['id']}, but the package 'tokenizers' "
                    f"makes it {self.ids.get(token['content'])}; the vocabulary must have no holes before added tokens"
                )
        self.end_of_text = self.find_end_of_text(path, end_of_text, chat)
        self.width = 2 if max(self.ids.values()) < 1 << 16 else 4
        self.strips_space = "Strip" in decoder_types(self.description.get("decoder"))  # that of SentencePiece, before a text

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

    def vocabulary(self):
        return token_bytes(self.description, self.ids)

    def encode_with_offsets(self, text):
        """Returns a text's tokens, in which added tokens stand for themselves, and the characters [begin, end) of
        each token."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode(self, texts):
        code = "H" if self.width == 2 else "I"
        for batch in batches(texts, BATCH_BYTES):
            decoded = [text.decode("utf-8", "replace") for text in batch]
            for encoding in self.tokenizer.encode_batch(decoded, add_special_tokens=False):
                ids = encoding.ids
                yield struct.pack(f"<{len(ids) + 1}{code}", self.end_of_text, *ids)


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


def batches(items, size):
    batch, filled = [], 0
    for item in items:
        batch.append(item)
        filled += len(item)
        if filled >= size:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


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
        if number in added:
            table[number] = token.encode("utf-8", "replace")
        elif "ByteLevel" in types and all(character in alphabet for character in token):
            table[number] = bytes(alphabet[character] for character in token)
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


# --- Files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(prefix):
    """Holds the lock of PREFIX.lock, which ends with the process at the latest: two runs would write into each
    other's files."""
    refusal = Mistake(f"--out {prefix}: another run is writing there; wait until it ends, or name another --out")
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    path = f"{prefix}.lock"
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        except OSError as error:
            warn(f"{path}: cannot be locked: {error.strerror}; start no second run with this --out")
        if not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise refusal  # its holder has just removed it, and another run may hold a new one
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


class ShardWriter:
    """Cuts a stream of tokens into shards under temporary names, which publish() replaces: all shards appear, or
    none."""

    def __init__(self, prefix, split, width, shard_tokens, tokenizer_fields):
        self.prefix, self.split, self.width, self.tokenizer_fields = prefix, split, width, tokenizer_fields
        self.shard_bytes = shard_tokens * width
        self.header_bytes = SHARD_HEADER_INTS * 4
        self.paths, self.file, self.room = [], None, 0
        self.documents = self.tokens = 0
        self.pending, self.pending_bytes = [], 0

    def add(self, document):
        self.documents += 1
        self.pending.append(document)
        self.pending_bytes += len(document)
        if self.pending_bytes >= WRITE_BYTES:
            self.write_pending()

    def write_pending(self):
        data = memoryview(b"".join(self.pending))
        self.pending, self.pending_bytes = [], 0
        self.tokens += len(data) // self.width
        while len(data):
            if not self.room:
                self.begin_shard()
            taken = min(len(data), self.room)
            self.file.write(data[:taken])
            self.room -= taken
            data = data[taken:]

    def path_of(self, number):
        return f"{self.prefix}_{self.split}_{number:03d}.bin"

    def begin_shard(self):
        if self.file:
            self.file.close()
        if len(self.paths) == MAX_SHARDS:
            raise Mistake(
                f"--shard-tokens {self.shard_bytes // self.width} makes more than {MAX_SHARDS:,} shards of {self.split}; raise it"
            )
        temporary = f"{self.path_of(len(self.paths))}.tmp"
        self.paths.append(temporary)
        self.file = open(temporary, "wb")
        self.file.write(bytes(self.header_bytes))
        self.room = self.shard_bytes

    def finish(self):
        """Completes the temporary files. A last shard of less than half the size is appended to the shard before: by
        itself it would hold few windows or none."""
        self.write_pending()
        if self.file:
            self.file.close()
        if len(self.paths) > 1 and self.room > self.shard_bytes // 2:
            last = self.paths.pop()
            with open(last, "rb") as source, open(self.paths[-1], "ab") as target:
                source.seek(self.header_bytes)
                while piece := source.read(WRITE_BYTES):
                    target.write(piece)
            os.remove(last)
        for path in self.paths:
            self.write_header(path)

    def write_header(self, path):
        with open(path, "r+b") as file:
            tokens = (os.fstat(file.fileno()).st_size - self.header_bytes) // self.width
            file.write(struct.pack("<3i", *SHARD_KINDS[self.width], tokens))
            file.seek(tokenizer_digest.HEADER_BYTE)
            file.write(self.tokenizer_fields)
            file.flush()
            os.fsync(file.fileno())

    def discard(self):
        if self.file:
            self.file.close()
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def publish(writers, prefix, files):
    """Writes `files`, {name: bytes}, and gives them and the writers' shards their final names. Removes what an earlier
    run wrote and the present one did not: more shards, a tokenizer's files."""
    renames = []
    for name, content in files.items():
        path = f"{prefix}_{name}"
        with open(f"{path}.tmp", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        renames.append((f"{path}.tmp", path))
    for writer in writers.values():
        renames += [(path, path.removesuffix(".tmp")) for path in writer.paths]
    folder, name = os.path.split(prefix)
    tokenizer_files = TOKENIZER_FILES if os.path.exists(f"{prefix}_vocabulary.bin") else []  # else the user's own
    endings = "|".join([r"(train|val)_\d{3,}\.bin", *map(re.escape, tokenizer_files)])
    ours = re.compile(f"{re.escape(name)}_({endings})")
    kept = {path for _, path in renames}
    for old in sorted(os.listdir(folder or ".")):
        if ours.fullmatch(old) and os.path.join(folder, old) not in kept:
            os.remove(os.path.join(folder, old))
    for old, new in renames:
        os.replace(old, new)


def write_shards(documents, tokenizer, options):
    fields = tokenizer_digest.header_fields(tokenizer.files()["tokenizer.json"], len(tokenizer.vocabulary()))
    writers = {
        split: ShardWriter(options.out, split, tokenizer.width, options.shard_tokens, fields) for split in ("train", "val")
    }
    statistics = {"bytes": 0, "copies": 0}
    splits = collections.deque()  # of documents that the tokenizer was given and has not yet encoded

    def texts():
        for text, key in read_documents(documents, options, statistics):
            splits.append("val" if key < options.val_fraction * 2**64 else "train")
            yield text

    try:
        for tokens in tokenizer.encode(texts()):
            writers[splits.popleft()].add(tokens)
        for writer in writers.values():
            writer.finish()
        for split, fraction in (("train", 1 - options.val_fraction), ("val", options.val_fraction)):
            if fraction > 0 and not writers[split].tokens:
                raise Mistake(
                    f"none of {sum(w.documents for w in writers.values())} documents fell to {split} with "
                    f"--val-fraction {options.val_fraction}; give more documents or another fraction"
                )
        vocabulary = pack_vocabulary(tokenizer.vocabulary(), tokenizer.end_of_text, tokenizer.strips_space)
        publish(writers, options.out, {"vocabulary.bin": vocabulary, **tokenizer.files()})
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    return writers, statistics


# --- Command line -----------------------------------------------------------------------------------------------------


def warn(message):
    print(f"prepare_data.py: {message}", file=sys.stderr)


def count(text):
    """Parses a positive number, with K, M, G for thousands, millions, billions, or Ki, Mi, Gi for powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(i?)B?", text, re.IGNORECASE)
    value = 0
    if match and not (match[3] and not match[2]):
        value = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMG".index(match[2].upper() or " "))
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number such as 1000000, 40M or 2Gi")
    return value


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 up to, not including, 1")
    return value


def parse_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text file, .jsonl file, or folder of either")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="where to write: PREFIX_train_000.bin and so on")
    parser.add_argument(
        "--include",
        action="append",
        metavar="PATTERN",
        help="take only files of a folder that match, as '*.h'; may be repeated",
    )
    parser.add_argument(
        "--max-bytes", type=count, metavar="N", help="stop after N bytes of text, as 40M; documents are shuffled before"
    )
    parser.add_argument(
        "--jsonl-field", default="text", metavar="NAME", help="field that holds the text (default: text)"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json of Hugging Face (default: a token is a byte)"
    )
    parser.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help=f"token of --tokenizer that begins a document (default: {END_OF_TEXT} or a similar one)",
    )
    parser.add_argument(
        "--keep-copies", action="store_true", help="take every document, also of the same content as an earlier one"
    )
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        default=0.05,
        metavar="X",
        help="share of the documents for validation (default: 0.05)",
    )
    parser.add_argument(
        "--shard-tokens", type=count, default=100_000_000, metavar="N", help="tokens a shard (default: 100M)"
    )
    chat = parser.add_argument_group("chats to finetune on")
    chat.add_argument("--chat", action="store_true", help="the inputs are JSONL of chats or of other examples")
    chat.add_argument("--seq-length", type=count, default=1024, metavar="T", help="tokens of a row (default: 1024)")
    chat.add_argument(
        "--train-on",
        choices=chat_data.TRAIN_ON,
        default=chat_data.TRAIN_ON[0],
        help="what is learned: the assistant's turns, only the last of them, or all turns (default: assistant)",
    )
    chat.add_argument(
        "--template",
        metavar="FILE|NAME",
        help=f"chat template: a file, one of several of the tokenizer's, or {' or '.join(chat_template.BUILTIN)} (default: the tokenizer's own)",
    )
    chat.add_argument("--show", type=count, default=0, metavar="N", help="print N examples, with what is learned in color")
    chat.add_argument("--drop-refused", action="store_true", help="leave out lines that are refused, and count them")
    options = parser.parse_args(arguments)
    of_text, of_chat = ("max_bytes", "jsonl_field"), ("seq_length", "train_on", "template", "show", "drop_refused")
    for name in of_text if options.chat else of_chat:
        if getattr(options, name) != parser.get_default(name):
            why = "does nothing with --chat" if options.chat else "is of --chat, which is not given"
            parser.error(f"--{name.replace('_', '-')} {why}")
    if options.tokenizer and os.path.isdir(options.tokenizer):
        options.tokenizer = os.path.join(options.tokenizer, TOKENIZER_FILES[0])
    if options.end_of_text and not options.tokenizer:
        parser.error("--end-of-text names a token of --tokenizer, which is not given")
    if options.shard_tokens > 1_000_000_000:
        parser.error("--shard-tokens: a shard's header counts to 2^31; expected at most 1G")
    if not os.path.basename(options.out):
        parser.error(f"--out {options.out}: is a folder; expected a prefix of file names, as {options.out}text")
    return options


def report(writers, statistics, tokenizer, options, seconds):
    for split, writer in writers.items():
        shards = len(writer.paths)
        print(
            f"{split:>5}: {writer.documents:,} documents, {writer.tokens:,} tokens, {shards} shard{'s' * (shards != 1)}"
            + (f" {options.out}_{split}_*.bin" if shards else "")
        )
    copies = f", left out {statistics['copies']:,} copies" if statistics["copies"] else ""
    print(
        f"read {statistics['bytes']:,} bytes in {seconds:.1f} s{copies}; "
        f"vocabulary of {len(tokenizer.vocabulary())} tokens in {options.out}_vocabulary.bin, "
        f"{tokenizer.end_of_text} begins a document"
    )


# --- Chats ------------------------------------------------------------------------------------------------------------


def chat_template_of(options, tokenizer):
    """Returns the template; None where the tokenizer has none and --template names none."""
    name = options.template or (None if options.tokenizer else "plain")
    where = os.path.dirname(options.tokenizer or "") or "."
    try:
        return chat_template.of_files(tokenizer.files(), where, name)
    except chat_template.TemplateError as error:
        if not options.template and "has no chat template" in str(error):
            return None
        raise Mistake(error) from None


def read_examples(options, reader, statistics):
    """Yields each example of the inputs and the digest of its line, in the inputs' order. Copies, examples of which
    nothing is learned and, with --drop-refused, refused lines are left out, and counted in statistics."""
    seen = set()
    for path, *_ in find_files(options.inputs, options.include or ["*.jsonl", "*.ndjson"]):
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.strip()
                key = digest(line)
                if not line or (key in seen and not options.keep_copies):
                    statistics["copies"] += bool(line)
                    continue
                seen.add(key)
                try:
                    example = reader.example(line.decode("utf-8", "replace"))
                except chat_data.Refused as error:
                    if not options.drop_refused:
                        raise Mistake(f"{path}, line {number}: {error}") from None
                    statistics["refused"] += 1
                    continue
                statistics["cut"] += example.cut > 0
                if not any(example.learned):
                    statistics["nothing learned"] += 1
                    continue
                yield example, key


def show_example(example, table, number):
    """Prints an example, with what is learned in green or, not on a terminal, between [[ and ]]."""
    begin, end = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("[[", "]]")
    text, learns = bytearray(), False
    for token, learned in zip(example.tokens, example.learned):
        if learned != learns:
            text += (begin if learned else end).encode()
            learns = learned
        text += table[token]
    text += end.encode() if learns else b""
    print(f"--- example {number}: {len(example.tokens)} tokens, {sum(example.learned)} learned ---")
    print(text.decode("utf-8", "replace"))


def report_chats(writers, statistics, options):
    for split, writer in writers.items():
        tokens = sum(len(example.tokens) for example in writer.examples)
        learned = sum(sum(example.learned) for example in writer.examples)
        if tokens:
            print(
                f"{split:>5}: {len(writer.examples):,} examples, {tokens:,} tokens, {learned / tokens:.1%} of them learned; "
                f"{len(writer.rows):,} rows of {options.seq_length}, {tokens / (len(writer.rows) * options.seq_length):.1%} full; "
                f"{options.out}_{split}_*.bin"
            )
    for what, text in (("cut", f"longer than {options.seq_length} tokens and cut"), ("refused", "refused and left out"),
                       ("nothing learned", "left out, since nothing of them would be learned"),
                       ("copies", "copies left out")):  # fmt: skip
        if statistics[what]:
            print(f"{statistics[what]:,} examples {text}" if what != "copies" else f"{statistics[what]:,} {text}")


def write_chats(writers, table, tokenizer, options):
    tokenizer_json = tokenizer.files().get("tokenizer.json", b"")
    try:
        for writer in writers.values():
            if writer.examples:
                writer.write(options.seq_length, tokenizer.width, tokenizer.end_of_text, len(table), tokenizer_json, options.shard_tokens)
        vocabulary = pack_vocabulary(table, tokenizer.end_of_text, tokenizer.strips_space)
        publish(writers, options.out, {"vocabulary.bin": vocabulary, **tokenizer.files()})
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise


def prepare_chats(options, tokenizer):
    reader = chat_data.Reader(tokenizer, chat_template_of(options, tokenizer), options.train_on, options.seq_length)
    writers = {split: chat_rows.RowWriter(options.out, split) for split in ("train", "val")}
    statistics = collections.Counter()
    table = tokenizer.vocabulary()
    for example, key in read_examples(options, reader, statistics):
        writers["val" if key < options.val_fraction * 2**64 else "train"].examples.append(example)
        shown = sum(len(writer.examples) for writer in writers.values())
        if shown <= options.show:
            show_example(example, table, shown)
    if not writers["train"].examples:
        raise Mistake(f"{' '.join(options.inputs)}: no example is left to train on")
    if options.val_fraction and not writers["val"].examples:
        warn(f"no example fell to validation with --val-fraction {options.val_fraction}")
    with alone(options.out):
        write_chats(writers, table, tokenizer, options)
    report_chats(writers, statistics, options)


def run(arguments):
    began = time.monotonic()
    options = parse_options(arguments)
    tokenizer = HuggingFaceTokenizer(options.tokenizer, options.end_of_text, options.chat) if options.tokenizer else ByteTokenizer()
    if options.chat:
        prepare_chats(options, tokenizer)
        return
    documents = find_documents(options)
    if not documents:
        raise Mistake(f"{' '.join(options.inputs)}: holds no text")
    with alone(options.out):
        writers, statistics = write_shards(documents, tokenizer, options)
    report(writers, statistics, tokenizer, options, time.monotonic() - began)


def main(arguments=None):
    try:
        run(arguments)
    except Mistake as mistake:
        warn(mistake)
        return 2
    except OSError as error:
        warn(f"{error.filename}: {error.strerror}" if error.filename else error)
        return 2
    except KeyboardInterrupt:
        warn("interrupted; nothing was written")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
