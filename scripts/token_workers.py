"""Blocks of text to blocks of tokens, in order, by workers on all cores (for prepare_data.py).

A worker is a process of scripts/tokenize_text.c, which has the engine's tokenizer, or, for bytes and for a tokenizer
that the engine does not have, a thread with a tokenizer of text_tokenizers.py. What a block becomes depends on the
block only, so that the number of workers changes nothing.
"""

import array
import collections
import concurrent.futures
import contextlib
import fcntl
import hashlib
import math
import os
import queue
import shutil
import struct
import subprocess
import threading

from mistakes import Mistake
from text_sources import block_of_texts

PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ from Python 3.10 on
AHEAD = 3  # blocks a worker: one in work, one that waits, one that is done
REPLY = struct.Struct("<2I6Q")  # struct reply of scripts/tokenize_text.c
REQUEST = struct.Struct("<2IQ")
READY, LOOK, FAILED = range(3)
PROGRAM = "tokenize_text"

Encoded = collections.namedtuple("Encoded", "digests sizes counts tokens documents bytes digest data")
"""A block's documents: digests, sizes in bytes and numbers of tokens (0 of an empty text), each an array of u64; then,
(train, val) each, tokens, documents and the tokens' bytes; and the texts' bytes and sum of digests in all."""


def digest(text):
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def find_program():
    """Returns the path of the worker's program; None: it is not built."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for path in (os.environ.get("TOKENIZE_TEXT"), os.path.join(root, "build", PROGRAM), shutil.which(PROGRAM)):
        if path and os.access(path, os.X_OK):
            return path
    return None


class Refused(Exception):
    """The engine does not have this tokenizer."""


class ThreadEncoder:
    """Encodes by a tokenizer of Python's, in the thread that calls."""

    def __init__(self, tokenizer, options):
        self.tokenizer, self.options = tokenizer, options
        self.val_below = math.ceil(options.val_fraction * 2.0**64)

    def encode(self, block):
        texts = list(block.texts(self.options.text_field))
        digests, sizes, counts = (array.array("Q") for _ in range(3))
        parts, documents, total = ([], []), [0, 0], 0
        for text, tokens in zip(texts, self.tokenizer.encode(texts)):
            key = digest(text)
            digests.append(key)
            sizes.append(len(text))
            counts.append(len(tokens) // self.tokenizer.width if text else 0)
            if text:
                split = key < self.val_below
                parts[split].append(tokens)
                documents[split] += 1
                total += key
        data = [b"".join(part) for part in parts]
        tokens = [len(d) // self.tokenizer.width for d in data]
        return Encoded(digests, sizes, counts, tokens, documents, sum(sizes), total % 2**64, data)

    def close(self):
        pass


class ProcessEncoder:
    """Encodes by a process of the engine's."""

    def __init__(self, tokenizer, options):
        val_below = math.ceil(options.val_fraction * 2.0**64)
        numbers = map(str, (tokenizer.end_of_text, tokenizer.width, val_below))
        self.options, self.width = options, tokenizer.width
        self.process = start_process(tokenizer.path, *numbers, options.text_field)
        status, length, *_ = REPLY.unpack(self.read(REPLY.size))
        if status != READY:
            problem = self.read(length).decode("utf-8", "replace")
            self.close()
            raise Refused(problem)

    def read(self, count):
        data = self.process.stdout.read(count)
        if len(data) != count:
            raise Mistake(f"{PROGRAM} ended with status {self.process.wait()}; it needs memory, or its build is another")
        return data

    def encode(self, block):
        try:
            self.process.stdin.write(REQUEST.pack(block.kind, block.count, len(block.data)) + bytes(block.offsets))
            self.process.stdin.write(block.data)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # read() says so
        status, length, *totals = REPLY.unpack(self.read(REPLY.size))
        if status == LOOK:  # a line that is wrong, which is said here, or that only a whole parser of JSON reads
            texts = list(block.texts(self.options.text_field))
            return self.encode(block_of_texts(block.source, texts, block.where, block.raw_bytes))
        if status == FAILED:
            raise Mistake(f"{block.where(0)}, or a document after it: {self.read(length).decode('utf-8', 'replace')}")
        records = array.array("Q", self.read(24 * length))
        data = [self.read(tokens * self.width) for tokens in totals[:2]]
        return Encoded(records[0::3], records[1::3], records[2::3], totals[:2], totals[2:4], totals[4], totals[5], data)

    def close(self):
        end_process(self.process)


def end_process(process):
    process.kill()
    for pipe in process.stdin, process.stdout:
        with contextlib.suppress(OSError):
            pipe.close()
    process.wait()


def start_process(*arguments):
    process = subprocess.Popen([find_program(), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for pipe in process.stdin, process.stdout:
        with contextlib.suppress(OSError):  # above the user's limit
            fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
    return process


class Seen:
    """Which digests there were: of 16 to 32 bytes each in a process of the engine's, or else a set."""

    def __init__(self):
        self.process = start_process("--seen") if find_program() else None
        self.digests = set()

    def add(self, digests):
        """Returns a byte for each digest (u64): 1 where it was there, before or earlier in `digests`."""
        if self.process:
            with contextlib.suppress(BrokenPipeError):  # the answer is missing then
                self.process.stdin.write(struct.pack("<Q", len(digests)) + digests.tobytes())
                self.process.stdin.flush()
            seen = self.process.stdout.read(len(digests))
            if len(seen) != len(digests):
                raise Mistake(f"{PROGRAM} ended; it needs memory, or its build is another")
            return seen
        seen = bytearray()
        for key in digests:
            seen.append(key in self.digests)
            self.digests.add(key)
        return seen

    def close(self):
        if self.process:
            end_process(self.process)


class Workers:
    """Threads, each with an encoder, that encode blocks ahead of who takes them in order."""

    def __init__(self, make_encoder, count):
        self.encoders, self.stopped = [], threading.Event()
        self.tasks, self.order = queue.Queue(), queue.Queue(AHEAD * count)
        try:
            for _ in range(count):
                self.encoders.append(make_encoder())
        except BaseException:
            self.close()
            raise
        for encoder in self.encoders:
            threading.Thread(target=self.work, args=(encoder,), daemon=True).start()

    def work(self, encoder):
        while (item := self.tasks.get()) is not None:
            block, future = item
            try:
                future.set_result(encoder.encode(block))
            except BaseException as error:  # goes to who takes the block
                future.set_exception(error)

    def put(self, item):
        """Waits for room; returns whether there is still somebody to put it for."""
        while not self.stopped.is_set():
            with contextlib.suppress(queue.Full):
                self.order.put(item, timeout=0.2)
                return True
        return False

    def read(self, blocks):
        try:
            for block in blocks:
                future = concurrent.futures.Future()
                if not self.put((block, future)):
                    return
                self.tasks.put((block, future))
            self.put(None)
        except BaseException as error:
            future = concurrent.futures.Future()
            future.set_exception(error)
            self.put((None, future))

    def encoded(self, blocks):
        """Yields each block with what it becomes, in order; a thread reads the blocks."""
        threading.Thread(target=self.read, args=(blocks,), daemon=True).start()
        while (item := self.order.get()) is not None:
            yield item[0], item[1].result()

    def close(self):
        self.stopped.set()
        for _ in self.encoders:
            self.tasks.put(None)
        for encoder in self.encoders:
            encoder.close()
