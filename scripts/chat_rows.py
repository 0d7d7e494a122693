"""Packs examples into rows of a fixed length and writes them as shards to finetune on (formats/finetune_shard.h has the
layout).

Packing is best fit, the longest example first: no example is cut, and each lies in one row.
"""

import array
import bisect
import hashlib
import os
import struct

import tokenizer_digest

MAGIC, VERSION, HEADER_BYTES = 20261123, 1, 1024


def pack(lengths, room):
    """Returns rows, as lists of the numbers of the examples in them; the same lengths always give the same rows.
    lengths: tokens of the examples; room: tokens of a row."""
    rows, left = [], []  # left: free tokens of each row
    by_room = {}  # rows by their free tokens, the latest last
    rooms = []  # keys of by_room, sorted
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row = len(rows)
            rows.append([])
            left.append(room)
        else:
            row = by_room[rooms[at]].pop()
            if not by_room[rooms[at]]:
                del by_room[rooms[at]], rooms[at]
        rows[row].append(number)
        left[row] -= length
        if left[row]:
            if left[row] not in by_room:
                by_room[left[row]] = []
                bisect.insort(rooms, left[row])
            by_room[left[row]].append(row)
    return rows


def pack_bits(bits):
    """Packs bits into bytes, the lowest bit first."""
    data = bytearray((len(bits) + 7) // 8)
    for i, bit in enumerate(bits):
        if bit:
            data[i >> 3] |= 1 << (i & 7)
    return bytes(data)


def padded(data):
    return data + bytes(-len(data) % 8)


def shard_bytes(rows, examples, length, width, padding, vocabulary, tokenizer_json):
    """Returns a shard of these rows as bytes. length: tokens of a row; width: bytes of a token; padding: the token
    that fills a row's rest; tokenizer_json: the file's bytes, or none."""
    tokens = array.array("H" if width == 2 else "I")
    loss, starts = bytearray(), bytearray()
    for row in rows:
        used = 0
        for number in row:
            example = examples[number]
            tokens.extend(example.tokens)
            loss += bytes(example.learned)
            starts += b"\1" + bytes(len(example.tokens) - 1)
            used += len(example.tokens)
        if used < length:
            tokens.extend([padding] * (length - used))
            loss += bytes(length - used)
            starts += b"\1" + bytes(length - used - 1)
    tokens.append(padding)  # the target of the last row's last token, which never counts
    loss.append(0)
    starts.append(1)
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        tokens.byteswap()
    header = struct.pack("<4i3Qi", MAGIC, VERSION, length, width, len(rows), sum(loss), sum(map(len, rows)), vocabulary)
    header = header.ljust(64, b"\0")
    if tokenizer_json:
        header += hashlib.sha256(tokenizer_json).digest() + tokenizer_digest.header_fields(tokenizer_json, vocabulary)
    return header.ljust(HEADER_BYTES, b"\0") + b"".join(padded(bytes(part)) for part in (tokens.tobytes(), pack_bits(loss), pack_bits(starts)))


class RowWriter:
    """Writes a split's rows as shards under temporary names; prepare_data.publish renames them."""

    def __init__(self, prefix, split):
        self.prefix, self.split, self.paths = prefix, split, []
        self.examples, self.rows = [], []

    def write(self, length, width, padding, vocabulary, tokenizer_json, shard_tokens):
        self.rows = pack([len(example.tokens) for example in self.examples], length)
        a_shard = max(1, shard_tokens // length)
        for begin in range(0, len(self.rows), a_shard):
            path = f"{self.prefix}_{self.split}_{len(self.paths):03d}.bin.tmp"
            self.paths.append(path)
            with open(path, "wb") as file:
                file.write(shard_bytes(self.rows[begin : begin + a_shard], self.examples, length, width, padding, vocabulary, tokenizer_json))
                file.flush()
                os.fsync(file.fileno())

    def discard(self):
        for path in self.paths:
            if os.path.exists(path):
                os.remove(path)
