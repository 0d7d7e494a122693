#!/usr/bin/env python3
"""Makes token shards for train_gpt from text: files, folders, standard input; or from chats, to finetune on.

  scripts/prepare_data.py book.txt --out data/book
  scripts/prepare_data.py /usr/include --include '*.h' --max-bytes 40M --out data/headers
  scripts/prepare_data.py corpus.jsonl.zst more.parquet --tokenizer MODEL/tokenizer.json --out data/corpus
  curl URL | scripts/prepare_data.py - --tokenizer MODEL/tokenizer.json --out data/streamed
  scripts/prepare_data.py chats.jsonl --chat --tokenizer MODEL/tokenizer.json --seq-length 2048 --out data/chats

A file is what it holds, whatever its name: text, JSONL, an array of JSON objects, parquet, Arrow, a tar of such files;
each but parquet and Arrow also compressed by gzip, zstd, bzip2 or xz. A folder may hold any mixture, or be a folder of
datasets.save_to_disk. What can't be read is refused. Parquet and Arrow need the package pyarrow, zstd zstandard.

Without --tokenizer a token is a byte (0 to 255), and 256 marks where a document begins; this needs only Python. With a
Hugging Face tokenizer.json the engine's own tokenizer does the work, in a process a core: `make build/tokenize_text`.
Where it does not have the kind of tokenizer, or is not built, the `tokenizers` package does, several times slower.

The script writes PREFIX_train_000.bin ..., PREFIX_val_000.bin ... (llm.c's shards: uint16 where token ids fit,
otherwise uint32), PREFIX_vocabulary.bin, from which train_gpt prints samples as text, and PREFIX_manifest.json, which
says what they were made of. It copies the file of --tokenizer as PREFIX_tokenizer.json, and what lies beside it of a
tokenizer's and a chat's files as PREFIX_tokenizer_config.json and so on, so that a checkpoint can take them along;
bytes have such files, too. A
run replaces all that an earlier run with the same PREFIX wrote. The same input gives the same files on any machine and
by any number of workers: names and places in files decide the order, and a document's content whether it goes to
training or validation. Of documents with the same content one is taken. A run that was killed goes on where
PREFIX.partial says, at the same command.

With --chat a line of JSONL is an example: messages, prompt and completion, ShareGPT's conversations, or Alpaca's
instruction (scripts/chat_data.py). The tokenizer's own chat template is applied, what the assistant says is learned,
and examples are packed into rows of --seq-length tokens; no example sees another. docs/data.md and
docs/finetune_data.md have more.
"""

import argparse
import array
import collections
import hashlib
import itertools
import json
import math
import os
import re
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import chat_data  # noqa: E402: lies beside this file
import chat_rows  # noqa: E402
import chat_template  # noqa: E402
import token_shards  # noqa: E402
import token_workers  # noqa: E402
from mistakes import Mistake, run_script, warn  # noqa: E402
from text_sources import Finder, block_of_texts, find_files, lines_of, read_blocks  # noqa: E402
from text_tokenizers import END_OF_TEXT, PACKAGE_MISSING, TOKENIZER_FILES, ByteTokenizer, PackageTokenizer, TokenizerFile, pack_vocabulary  # noqa: E402
from token_workers import digest  # noqa: E402

SPLITS = ("train", "val")
SAVE_SECONDS = 15  # of work that a kill may lose
LINE_SECONDS = 30  # between lines of progress where stderr is no terminal


# --- Command line -----------------------------------------------------------------------------------------------------


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
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file or folder of text, or - for standard input")
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
        "--text-field", "--jsonl-field", default="text", metavar="NAME",
        help="field of JSON or column of parquet that holds the text; a.b: field b of a (default: text)",
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
    parser.add_argument("--workers", type=count, default=len(os.sched_getaffinity(0)), metavar="N", help="processes that encode (default: one a core)")
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
    of_text, of_chat = ("max_bytes", "text_field"), ("seq_length", "train_on", "template", "show", "drop_refused")
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
    if options.workers > 1024:
        parser.error(f"--workers {options.workers}: expected at most 1024")
    if not os.path.basename(options.out):
        parser.error(f"--out {options.out}: is a folder; expected a prefix of file names, as {options.out}text")
    return options


# --- Texts ------------------------------------------------------------------------------------------------------------


class Meter:
    """Says on stderr how far a run is: on a terminal in one line, elsewhere in a line every LINE_SECONDS."""

    def __init__(self, total, done):
        self.total, self.done, self.began = total, done, time.monotonic()
        self.first = (done, 0)
        self.terminal = sys.stderr.isatty()
        self.last, self.width = self.began, 0

    def show(self, raw_bytes, tokens):
        now = time.monotonic()
        if now - self.last < (0.5 if self.terminal else LINE_SECONDS):
            return
        self.last = now
        seconds = now - self.began
        rate = (raw_bytes - self.first[0]) / seconds
        text = f"{raw_bytes / 1e6:,.0f} MB read, {tokens / 1e6:,.1f} M tokens, {(tokens - self.first[1]) / seconds / 1e6:.2f} M tokens/s"
        if self.total:
            left = int(max(self.total - raw_bytes, 0) / rate) if rate else 0
            text = f"{min(raw_bytes / self.total, 1):4.0%}, {text}, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        if self.terminal:
            print("\r" + text.ljust(self.width), end="", file=sys.stderr, flush=True)
            self.width = len(text)
        else:
            warn(text)

    def clear(self):
        if self.width:
            print("\r" + " " * self.width + "\r", end="", file=sys.stderr, flush=True)
            self.width = 0


def choose_encoder(options):
    """Returns the tokenizer, what makes an encoder for it, how many, and a name for what encodes."""
    if not options.tokenizer:
        tokenizer = ByteTokenizer()
        return tokenizer, lambda: token_workers.ThreadEncoder(tokenizer, options), min(2, options.workers), "python"
    why = f"build/{token_workers.PROGRAM} is not built: 'make build/{token_workers.PROGRAM}' makes it"
    tokenizer = TokenizerFile(options.tokenizer, options.end_of_text)
    if token_workers.find_program():
        try:
            first = [token_workers.ProcessEncoder(tokenizer, options)]
            return tokenizer, lambda: first.pop() if first else token_workers.ProcessEncoder(tokenizer, options), options.workers, "engine"
        except token_workers.Refused as refused:
            why = str(refused)
    try:
        package = PackageTokenizer(options.tokenizer, options.end_of_text)
    except Mistake as mistake:
        if PACKAGE_MISSING in str(mistake):
            raise Mistake(f"--tokenizer {options.tokenizer}: {why}; the Python package 'tokenizers' would do, too: pip install tokenizers") from None
        raise
    warn(f"{why}; the package 'tokenizers' encodes instead, several times slower")
    return package, lambda: token_workers.ThreadEncoder(package, options), 2, "package"


def hash_of_run(finder, tokenizer, encodes_by, options):
    """Returns a hash of all that decides the files: a run that was killed goes on only where it is the same."""
    chosen = [getattr(options, name) for name in ("inputs", "include", "max_bytes", "text_field", "end_of_text", "keep_copies", "val_fraction", "shard_tokens")]
    sources = [(source.path, source.stamp) for source in finder.sources]
    run = [1, chosen, sources, finder.stamp_of_texts(), tokenizer.digest().hex(), encodes_by]
    return hashlib.sha256(json.dumps(run).encode()).hexdigest()


class TextRun:
    """A run over texts: where it is, what it wrote, what it left out."""

    def __init__(self, finder, tokenizer, make_encoder, progress, options):
        self.finder, self.tokenizer, self.make_encoder, self.progress, self.options = finder, tokenizer, make_encoder, progress, options
        fields = tokenizer.digest() + struct.pack("<I", len(tokenizer.vocabulary()))  # as tokenizer_digest.header_fields
        self.writers = {split: token_shards.ShardWriter(options.out, split, tokenizer.width, options.shard_tokens, fields) for split in SPLITS}
        self.val_below = math.ceil(options.val_fraction * 2.0**64)
        self.seen = None if options.keep_copies else token_workers.Seen()
        self.left = options.max_bytes or sys.maxsize
        self.raw_bytes = self.bytes = self.copies = 0
        self.moves = None  # of a run that was killed while it published
        self.resumable = all(source.stamp for source in finder.sources[1:])

    def run(self, workers_count):
        """Encodes and writes all that is not done yet."""
        entries = self.finder.entries()
        if not entries:
            raise Mistake(f"{' '.join(self.options.inputs)}: holds no text")
        entry, block = self.take_up()
        if self.moves:
            return
        total = 0 if self.options.max_bytes else self.finder.total
        meter, saved_at = Meter(total, self.raw_bytes), time.monotonic()
        meter.first = (self.raw_bytes, self.tokens())
        workers = token_workers.Workers(self.make_encoder, workers_count)
        try:
            for block, encoded in workers.encoded(read_blocks(self.finder, entries, entry, block)):
                self.take(block, encoded)
                meter.show(self.raw_bytes, self.tokens())
                if not self.left:
                    break
                if self.resumable and time.monotonic() - saved_at >= SAVE_SECONDS:
                    self.save(block.entry, block.number + 1)
                    saved_at = time.monotonic()
        finally:
            meter.clear()
            workers.close()

    def tokens(self):
        return sum(writer.tokens for writer in self.writers.values())

    def take(self, block, encoded):
        """Writes a block's documents but for copies and what --max-bytes leaves out."""
        copies = self.seen.add(encoded.digests) if self.seen else b""
        if self.seen:
            self.progress.add(encoded.digests.tobytes())
        self.raw_bytes += block.raw_bytes
        source = self.finder.sources[block.source]
        if encoded.bytes > self.left or 1 in copies:
            encoded = self.kept(block, encoded, copies)
        for writer, data, documents in zip(self.writers.values(), encoded.data, encoded.documents):
            if data:
                writer.add(data, documents)
        self.left -= encoded.bytes
        self.bytes += encoded.bytes
        source.documents += sum(encoded.documents)
        source.tokens += sum(encoded.tokens)
        source.bytes += encoded.bytes
        source.digest = (source.digest + encoded.digest) % 2**64

    def kept(self, block, encoded, copies):
        """Returns what a block becomes without its copies, and without what is beyond --max-bytes; the last document is
        cut to fit."""
        parts, documents, at, left, width = ([], []), [0, 0], [0, 0], self.left, self.tokenizer.width
        digests = size_in_all = 0
        for number, (key, size, count) in enumerate(zip(encoded.digests, encoded.sizes, encoded.counts)):
            split = key < self.val_below
            tokens = memoryview(encoded.data[split])[at[split] : at[split] + count * width]
            at[split] += count * width
            if not count:
                continue
            if copies and copies[number]:
                self.copies += 1
                continue
            if size > left:
                key, size, split, tokens = self.cut(block, number, left)
            left -= size
            parts[split].append(tokens)
            documents[split] += 1
            size_in_all += size
            digests = (digests + key) % 2**64
            if not left:
                break
        data = [b"".join(part) for part in parts]
        empty = array.array("Q")
        return token_workers.Encoded(empty, empty, empty, [len(d) // width for d in data], documents, size_in_all, digests, data)

    def cut(self, block, number, size):
        """Returns digest, size, split and tokens of a document's first bytes."""
        text = next(itertools.islice(block.texts(self.options.text_field), number, None))[:size]
        encoder = self.make_encoder()
        try:
            encoded = encoder.encode(block_of_texts(0, [text], lambda _: block.where(number), 0))
        finally:
            encoder.close()
        split = encoded.documents[1]
        return encoded.digests[0], size, split, encoded.data[split]

    def take_up(self):
        """Returns (entry, block) from where the run goes on: the beginning, or where an earlier run was killed."""
        saved = self.progress.load(self.writers, self.seen) if self.resumable else self.progress.load_nothing()
        if not saved:
            return 0, 0
        self.raw_bytes, self.bytes, self.copies = saved["raw_bytes"], saved["bytes"], saved["copies"]
        self.left -= self.bytes
        for source, counts in zip(self.finder.sources, saved["sources"]):
            source.kind, source.documents, source.tokens, source.bytes, source.digest = counts
        self.moves = saved.get("moves")
        warn(f"{self.progress.path}: goes on after {self.tokens():,} tokens")
        return saved["entry"], saved["block"]

    def save(self, entry, block, moves=None):
        sources = [[s.kind, s.documents, s.tokens, s.bytes, s.digest] for s in self.finder.sources]
        state = {"entry": entry, "block": block, "raw_bytes": self.raw_bytes, "bytes": self.bytes, "copies": self.copies, "sources": sources, "moves": moves}
        self.progress.save(self.writers, state)

    def publish(self):
        if self.moves:
            token_shards.move(self.options.out, self.moves)
            return
        for writer in self.writers.values():
            writer.finish()
        documents = sum(writer.documents for writer in self.writers.values())
        if not documents:
            raise Mistake(f"{' '.join(self.options.inputs)}: holds no text")
        for split, fraction in zip(SPLITS, (1 - self.options.val_fraction, self.options.val_fraction)):
            if fraction > 0 and not self.writers[split].tokens:
                raise Mistake(
                    f"none of {documents} documents fell to {split} with "
                    f"--val-fraction {self.options.val_fraction}; give more documents or another fraction"
                )
        vocabulary = pack_vocabulary(self.tokenizer.vocabulary(), self.tokenizer.end_of_text, self.tokenizer.strips_space)
        manifest = json.dumps(self.manifest(), indent=1).encode() + b"\n"
        files = {"vocabulary.bin": vocabulary, token_shards.MANIFEST: manifest, **self.tokenizer.files()}
        token_shards.publish(self.writers, self.options.out, files, (lambda moves: self.save(0, 0, moves)) if self.resumable else None)

    def manifest(self):
        """Returns what the shards were made of and by."""
        files = self.tokenizer.files()
        options = self.options
        return {
            "inputs": options.inputs,
            "options": {name: getattr(options, name) for name in ("include", "max_bytes", "text_field", "keep_copies", "val_fraction", "shard_tokens")},
            "tokenizer": {
                "file": options.tokenizer,
                "sha256": hashlib.sha256(files["tokenizer.json"]).hexdigest(),
                "digest": self.tokenizer.digest().hex(),
                "end_of_text": self.tokenizer.end_of_text,
            },
            "sources": [
                {"path": s.path or "text files", "kind": s.kind, "file_bytes": s.size, "documents": s.documents, "tokens": s.tokens,
                 "text_bytes": s.bytes, "text_digest": f"{s.digest:016x}"} for s in self.finder.sources if s.size or s.documents
            ],
            "copies_left_out": self.copies,
            **{split: {"documents": w.documents, "tokens": w.tokens, "shards": w.shards()} for split, w in self.writers.items()},
        }  # fmt: skip

    def end(self, done):
        """Removes what a later run does not need."""
        if self.seen:
            self.seen.close()
        if self.progress.is_refused:
            for writer in self.writers.values():
                writer.close()
            return
        if done or not self.progress.is_saved:
            if not done:
                for writer in self.writers.values():
                    writer.discard()
            self.progress.remove()
            return
        for writer in self.writers.values():
            try:
                writer.close()
            except OSError:
                pass  # a full disk: what counts is what was saved
        warn(f"{self.progress.path}: what was done until then is kept; the same command goes on there")


def prepare_texts(options):
    began = time.monotonic()
    tokenizer, make_encoder, workers, encodes_by = choose_encoder(options)
    finder = Finder(options, lambda path: token_shards.is_output(options.out, path))
    finder.find()
    with token_shards.alone(options.out):
        progress = token_shards.Progress(options.out, hash_of_run(finder, tokenizer, encodes_by, options))
        run, done = TextRun(finder, tokenizer, make_encoder, progress, options), False
        try:
            run.run(workers)
            run.publish()
            done = True
        except OSError as error:
            raise Mistake(f"{error.filename or f'--out {options.out}'}: {error.strerror or error}") from None
        finally:
            run.end(done)
    report(run, time.monotonic() - began)


def report(run, seconds):
    for split, writer in run.writers.items():
        shards = len(writer.paths)
        print(
            f"{split:>5}: {writer.documents:,} documents, {writer.tokens:,} tokens, {shards} shard{'s' * (shards != 1)}"
            + (f" {run.options.out}_{split}_*.bin" if shards else "")
        )
    copies = f", left out {run.copies:,} copies" if run.copies else ""
    print(
        f"read {run.bytes:,} bytes in {seconds:.1f} s{copies}; "
        f"vocabulary of {len(run.tokenizer.vocabulary())} tokens in {run.options.out}_vocabulary.bin, "
        f"{run.tokenizer.end_of_text} begins a document"
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
    names = [f"*.{name}{ending}" for name in ("jsonl", "ndjson") for ending in ("", ".gz", ".zst", ".bz2", ".xz")]
    for path, *_ in find_files(options.inputs, options.include or names):
        for number, line in lines_of(path):
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
        token_shards.publish(writers, options.out, {"vocabulary.bin": vocabulary, **tokenizer.files()})
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
    with token_shards.alone(options.out):
        write_chats(writers, table, tokenizer, options)
    report_chats(writers, statistics, options)


def run(arguments):
    options = parse_options(arguments)
    if options.chat:
        tokenizer = PackageTokenizer(options.tokenizer, options.end_of_text, True) if options.tokenizer else ByteTokenizer()
        prepare_chats(options, tokenizer)
    else:
        prepare_texts(options)


def main(arguments=None):
    return run_script("prepare_data.py", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
