"""Where prepare_data.py's text comes from: files, folders and standard input, looked at by what they hold.

find_sources() lists the inputs; read_blocks() yields blocks of documents, of about BLOCK_BYTES, in an order that the
inputs alone decide. Text files, lines of JSONL and row groups of parquet, which can be read at any place, are shuffled
by the hash of their file's name and their place; streams (compressed files, tar, standard input) follow, each from its
beginning to its end. Memory is bounded: what is listed is files, pieces of 1 MiB, and row groups.
"""

import bz2
import codecs
import collections
import fnmatch
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
import sys
import tarfile

from mistakes import Mistake, warn

BLOCK_BYTES = 1 << 20  # of documents that a worker is given at once
HEAD_BYTES = 1 << 16  # what a file is, is seen in so many of its first bytes
FIRST_RECORD_BYTES = 1 << 20  # and, of JSON, in so many
UNCUT_BYTES = 1 << 24  # pieces of a text that is not cut for validation's sake
CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8's bytes within a character
LONGEST_DOCUMENT = 1 << 28  # a line of JSONL, an element of an array, a file in a tar


# --- What a file holds ------------------------------------------------------------------------------------------------

COMPRESSED = [(b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"),
              *((bytes([0x50 + i]) + b"\x2a\x4d\x18", "zstd") for i in range(16))]  # fmt: skip
REFUSED = [  # first bytes, what they are, what would read them
    (b"PK\3\4", "a zip archive", "unpack it, or 'unzip -p FILE | prepare_data.py -'"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "'lz4 -dc FILE | prepare_data.py -'"),
    (b"SQLite format 3\0", "an SQLite database", "export the text as JSONL"),
    (b"\x93NUMPY", "a NumPy array", "numpy.load"),
    (b"FEA1", "feather of version 1", "write it anew by pyarrow.feather"),
    (b"PARE", "encrypted parquet", "decrypt it"),
    (b"ORC", "ORC", "convert it to parquet by pyarrow.orc"),
    (b"Obj\1", "Avro", "convert it to JSONL"),
    (b"\x89HDF\r\n", "HDF5", "export the text as JSONL"),
    (b"%PDF-", "a PDF", "pdftotext"),
    (b"\x1f\x9d", "compressed by compress", "'uncompress -c FILE | prepare_data.py -'"),
    *((b"x" + level, "zlib data, as git's objects", "the program that wrote it") for level in (b"\x01", b"\x9c", b"\xda")),
    *((magic, "a picture or a sound", "name its text") for magic in (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"OggS", b"ID3")),
    (b"version https://git-lfs", "a Git LFS pointer, not the file", "'git lfs pull'"),
    (b"\xff\xfe\0\0", "UTF-32", "'iconv -f UTF-32 -t UTF-8'"),
    (b"\xff\xfe", "UTF-16", "'iconv -f UTF-16 -t UTF-8'"),
    (b"\xfe\xff", "UTF-16", "'iconv -f UTF-16 -t UTF-8'"),
    *((b"\x80" + bytes([i]), "a pickle", "export the text as JSONL") for i in range(2, 6)),
]  # fmt: skip
BINARY = ("no text: it holds zero bytes", "a program that knows its format")


def compression(head):
    """Returns what the bytes are compressed by, or None."""
    if head[:3] == b"BZh" and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    return next((name for magic, name in COMPRESSED if head.startswith(magic)), None)


def lookup(value, field):
    """Returns what a record has in a field; dots lead into records within records. None: nothing."""
    while isinstance(value, dict):
        if field in value:
            return value[field]
        name, dot, field = field.partition(".")
        if not dot:
            return None
        value = value.get(name)
    return None


def first_record(head):
    """Returns the first object of JSONL or of an array, or None where the bytes begin with none."""
    text = head.decode("utf-8-sig", "ignore").lstrip(" \t\r\n")
    if text[:1] == "[":
        text = text[1:].lstrip(" \t\r\n")
    elif text[:1] == "{":
        text = text.partition("\n")[0]
    try:
        return json.JSONDecoder().raw_decode(text)[0] if text[:1] == "{" else None
    except (ValueError, RecursionError):
        return None


def kind_of(head, name, field, named):
    """Returns "text", "lines" (JSONL), "array" (of JSON), "parquet", "arrow", "tar", "empty" or "binary"; or why the
    file is refused, as (what it is, what would read it). A file of a folder, not `named`, is JSON where its first
    record has the field: code has files of JSON, too, which are text."""
    if not head:
        return "empty"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")):
        return "arrow"
    if head[257:262] == b"ustar":
        return "tar"
    has_zero = b"\0" in head[:HEAD_BYTES]
    # A text may begin with a magic that is a word, as ORC and RIFF are.
    refused = next(((what, reader) for magic, what, reader in REFUSED if head.startswith(magic) and (has_zero or not magic.isalnum())), None)
    if refused:
        return refused
    if has_zero:
        return "binary"
    begin = head[3:] if head.startswith(b"\xef\xbb\xbf") else head
    begin = begin.lstrip(b" \t\r\n")[:1]
    parts = os.path.basename(name).lower().split(".")
    if "jsonl" in parts or "ndjson" in parts:
        return "array" if begin == b"[" and isinstance(first_record(head), dict) else "lines"
    if begin not in (b"{", b"["):
        return "text"
    record = first_record(head)
    if isinstance(lookup(record, field), str) or (named and isinstance(record, dict)):
        return "lines" if begin == b"{" else "array"
    if named and "json" in parts:
        return ("JSON, but neither an object a line nor an array of objects", "'jq -c .[]' makes such lines")
    return "text"


# --- Streams ----------------------------------------------------------------------------------------------------------


class Peek:
    """A file, or standard input, of which the first bytes can be looked at before they are read. Counts bytes."""

    def __init__(self, file):
        self.file, self.head, self.taken = file, b"", 0

    def peek(self, count):
        while len(self.head) < count:
            more = self.file.read(count - len(self.head))
            if not more:
                break
            self.head += more
        return self.head[:count]

    def read(self, count=-1):
        data = self.head if count < 0 else self.head[:count]
        self.head = self.head[len(data):]
        if len(data) != count:
            data += self.file.read(count - len(data) if count >= 0 else -1)
        self.taken += len(data)
        return data


class ZstdFrames:
    """The content of all frames of a zstd file. Its package reads a file that is cut off without an error, so that the
    last frame's end is looked for here."""

    def __init__(self, file):
        import zstandard

        self.file, self.zstandard, self.frame, self.input, self.begun = file, zstandard, None, b"", False

    def read(self, count):
        while True:
            self.input = self.input or self.file.read(1 << 17)
            if not self.input:
                if self.begun:
                    raise EOFError("its last frame has no end")
                return b""
            if not self.begun:
                self.frame = self.zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                self.begun = True
            data = self.frame.decompress(self.input)
            self.input = b""
            if self.frame.eof:
                self.input, self.begun = self.frame.unused_data, False
            if data:
                return data


def open_zstd(file, path):
    try:
        return ZstdFrames(file)
    except ImportError:
        pass
    try:
        from compression import zstd  # of Python 3.14

        return zstd.ZstdFile(file)
    except ImportError:
        raise Mistake(f"{path}: is compressed by zstd, which needs the Python package 'zstandard': pip install zstandard; "
                      f"or 'zstd -dc {path} | prepare_data.py -'") from None  # fmt: skip


class Decompressed:
    """What a compressed file holds; damage is the user's mistake, which names the file."""

    OPEN = {"gzip": lambda file, path: gzip.GzipFile(fileobj=file), "bz2": lambda file, path: bz2.BZ2File(file),
            "xz": lambda file, path: lzma.LZMAFile(file), "zstd": open_zstd}  # fmt: skip

    def __init__(self, file, path, name):
        self.path, self.name, self.file = path, name, self.OPEN[name](file, path)

    def read(self, count=-1):
        try:
            return self.file.read(count)
        except EOFError:
            raise Mistake(f"{self.path}: ends in the middle of its {self.name} data; it is cut off: fetch it again") from None
        except OSError as error:
            if error.errno:
                raise
            raise Mistake(f"{self.path}: its {self.name} data is damaged: {error}") from None
        except Exception as error:  # zlib.error, LZMAError, ZstdError
            raise Mistake(f"{self.path}: its {self.name} data is damaged: {error}") from None


def opened(file, path):
    """Returns (the file without its compressions, what it holds is to be read from; whether it was compressed)."""
    stream, depth = Peek(file), 0
    while name := compression(stream.peek(10)):
        depth += 1
        if depth > 3:
            raise Mistake(f"{path}: is compressed more than three times")
        stream = Peek(Decompressed(stream, path, name))
    return stream, depth > 0


# --- Blocks -----------------------------------------------------------------------------------------------------------

LINES, TEXTS_32, TEXTS_64 = 0, 1, 2  # as in scripts/tokenize_text.c


class Block:
    """Documents that a worker is given at once. kind LINES: data is lines of JSONL. TEXTS_32 and TEXTS_64: data is
    texts behind each other, offsets their count + 1 borders, as integers of so many bits. where(i): names document i
    for messages. raw_bytes: what of the input it stands for."""

    __slots__ = ("source", "kind", "data", "offsets", "count", "where", "raw_bytes", "entry", "number")

    def __init__(self, source, kind, data, where, raw_bytes, offsets=b"", count=0):
        self.source, self.kind, self.data, self.offsets, self.count = source, kind, data, offsets, count
        self.where, self.raw_bytes = where, raw_bytes
        self.entry = self.number = 0

    def texts(self, field):
        """Yields each document's bytes."""
        if self.kind == LINES:
            for number, line in enumerate(self.data.split(b"\n")):
                if line.strip():
                    yield text_of_line(lambda: self.where(number), line, field)
        else:
            borders = memoryview(self.offsets).cast("I" if self.kind == TEXTS_32 else "Q")
            data = memoryview(self.data)
            for begin, end in zip(borders[:-1], borders[1:]):
                yield bytes(data[begin - borders[0] : end - borders[0]])


def block_of_texts(source, texts, where, raw_bytes):
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    packed = b"".join(offset.to_bytes(8, "little") for offset in offsets)
    return Block(source, TEXTS_64, b"".join(texts), where, raw_bytes, packed, len(texts))


def text_of_record(where, value, field):
    """Returns the text in a record's field, as bytes. where(): names the record."""
    if not isinstance(value, dict):
        raise Mistake(f"{where()}: holds a {type(value).__name__}; expected an object with the field '{field}'")
    text = lookup(value, field)
    if not isinstance(text, str):
        having = ", ".join(f"'{name}'" for name in value if isinstance(value[name], str)) or "none"
        raise Mistake(f"{where()}: has no text in the field '{field}'; fields with text: {having}; name one by --text-field")
    # A lone surrogate (half of a \u escape) is valid JSON and not valid text.
    return text.encode("utf-8", "replace")


def text_of_line(where, line, field):
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{where()}: not JSON: {error}; expected one object a line") from None
    return text_of_record(where, value, field)


# --- Sources ----------------------------------------------------------------------------------------------------------


class Source:
    """An input file, or all text files together (path None), and what it gave."""

    def __init__(self, path, kind, size, stamp):
        self.path, self.kind, self.size, self.stamp = path, kind, size, stamp
        self.documents = self.tokens = self.bytes = self.digest = 0


class Document:
    """A text file, or a piece of one, from byte begin to byte end."""

    __slots__ = ("path", "begin", "end", "named", "order")

    def __init__(self, path, begin, end, named, identity):
        self.path, self.begin, self.end, self.named = path, begin, end, named
        self.order = place(identity)


class Unit:
    """What is read at once, and can be read at any time: a range of a JSONL file, a row group of parquet, or a stream.
    read(source, *arguments) yields its blocks."""

    __slots__ = ("source", "order", "read", "arguments")

    def __init__(self, source, identity, read, *arguments):
        self.source, self.order, self.read, self.arguments = source, place(identity), read, arguments


def place(identity):
    """Returns the key that an item's place in the order has, from its name."""
    return hashlib.blake2b(identity, digest_size=12).digest()


def files_of_folder(folder, patterns):
    """Returns the files below a folder that match a pattern, sorted, as (path, path below the folder). Links to
    folders are not followed."""
    found = []
    for parent, _, names in os.walk(folder, onerror=lambda error: warn(f"{error.filename}: {error.strerror}; left out")):
        if not patterns and (files := files_of_dataset(parent, names)) is not None:
            found += [(path, os.path.relpath(path, folder)) for path in files]
            continue
        for name in names:
            path = os.path.join(parent, name)
            below = os.path.relpath(path, folder)
            wanted = not patterns or any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(below, p) for p in patterns)
            if wanted and os.path.isfile(path):
                found.append((path, below))
            elif wanted:
                warn(f"{path}: {'a pipe or a device' if os.path.exists(path) else 'a link to nothing'}; left out")
    return sorted(found, key=lambda item: os.fsencode(item[1]))


def files_of_dataset(folder, names):
    """Returns the Arrow files of a folder of datasets.save_to_disk; None where it is another folder."""
    def described(name):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError, RecursionError):
            return None

    if "dataset_dict.json" in names:
        splits = lookup(described("dataset_dict.json"), "splits") or []
        if len(splits) > 1:
            raise Mistake(f"{folder}: is a data set of the splits {', '.join(map(str, splits))}; name one, as {os.path.join(folder, str(splits[0]))}")
        return []  # the split's folder comes next
    state = described("state.json") if "state.json" in names else None
    files = lookup(state, "_data_files")
    if not isinstance(files, list):
        return None
    if state.get("_indices_data_files"):
        raise Mistake(f"{folder}: a selection of rows, with an index beside them; save it by flatten_indices() first")
    paths = [os.path.join(folder, str(lookup(file, "filename"))) for file in files]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing:
        raise Mistake(f"{missing}: no such file, which {folder}/state.json names")
    return paths


def find_files(inputs, patterns):
    """Returns all input files as (path, name that decides its place, whether the user named it, its os.stat). A file
    with two names counts once. "-" and pipes are streams of a size of 0."""
    files, seen = [], set()
    for number, given in enumerate(inputs):
        if given == "-":
            found = [(given, given, True)]
        elif os.path.isdir(given):
            below = files_of_folder(given, patterns)
            if not below:
                raise Mistake(f"{given}: no file below it" + (f" matches --include {' '.join(patterns)}" if patterns else ""))
            found = [(path, name, False) for path, name in below]
        elif os.path.isfile(given) or (os.path.exists(given) and stat.S_ISFIFO(os.stat(given).st_mode)):
            found = [(given, os.path.basename(given), True)]
        else:
            raise Mistake(f"{given}: no such file or folder")
        for path, name, named in found:
            status = os.fstat(0) if path == "-" else os.stat(path)
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                files.append((path, f"{number}/{name}", named, status))
    return files


def cut_of(data):
    """Returns where a text is cut that goes on with `data`: behind a line's end or, where none is near, a character's."""
    return data.find(b"\n") + 1 or len(data[:3]) - len(data[:3].lstrip(CONTINUATION))


def pieces_of_text(path, name, size, named, piece_bytes):
    """Returns a file as documents: one, or, if it is much longer than piece_bytes, pieces of about piece_bytes, cut
    at line ends."""
    cuts = [0]
    if size > 2 * piece_bytes:
        with open(path, "rb") as file:
            while cuts[-1] + 2 * piece_bytes < size:
                file.seek(cuts[-1] + piece_bytes)
                cuts.append(cuts[-1] + piece_bytes + cut_of(file.read(min(piece_bytes, 1 << 16))))
    cuts.append(size)
    identity = os.fsencode(name)
    return [Document(path, begin, end, named, b"%s@%d" % (identity, begin)) for begin, end in zip(cuts, cuts[1:])]


def piece_bytes_of(total, val_fraction):
    """Returns into what pieces long texts are cut, of `total` bytes of text. A document goes to validation whole or not
    at all, so that about ten pieces should go; of at least 1 KiB, some windows long, since each cut is an end of text
    inside a text, and of at most 1 MiB."""
    return min(max(int(total * val_fraction / 10), 1 << 10), 1 << 20) if val_fraction else UNCUT_BYTES


class Finder:
    """Sorts files into sources, documents and units by what they hold."""

    def __init__(self, options, is_output=lambda path: False):
        """is_output: whether a path is one that this run, or an earlier one, writes; in a folder they are no input."""
        self.options, self.is_output = options, is_output
        self.texts = Source(None, "text", 0, None)
        self.sources, self.documents, self.units, self.streams = [self.texts], [], [], []
        self.left_out = collections.defaultdict(list)  # why: paths

    def find(self):
        files = [file for file in find_files(self.options.inputs, self.options.include or []) if file[2] or not self.is_output(file[0])]
        self.total = sum(status.st_size for *_, status in files if stat.S_ISREG(status.st_mode))
        self.piece_bytes = piece_bytes_of(min(self.total, self.options.max_bytes or sys.maxsize), self.options.val_fraction)
        for path, name, named, status in files:
            try:
                self.add(path, name, named, status)
            except OSError as error:
                if named:
                    raise Mistake(f"{path}: {error.strerror}") from None
                self.left_out[error.strerror].append(path)
        for why, paths in self.left_out.items():
            warn(f"left out {len(paths)} files: {why}, such as {paths[0]}")

    def add(self, path, name, named, status):
        identity = os.fsencode(name)
        stamp = [status.st_size, status.st_mtime_ns]
        if path == "-" or not stat.S_ISREG(status.st_mode):
            self.add_stream(path, "stream", identity, 0, None)
            return
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
            if compression(head):
                self.add_stream(path, "stream", identity, status.st_size, stamp)
                return
            if head[:1] in b"{[ \t\r\n\xef":
                head += file.read(FIRST_RECORD_BYTES)
        kind = kind_of(head, path, self.options.text_field, named)
        if isinstance(kind, tuple) or kind == "binary":
            what, reader = kind if kind != "binary" else BINARY
            if named:
                raise Mistake(f"{path}: is {what}; what would read it: {reader}")
            self.left_out[what].append(path)
        elif kind == "text":
            pieces = pieces_of_text(path, name, status.st_size, named, self.piece_bytes)
            self.documents += pieces
            self.texts.size += status.st_size
        elif kind == "lines":
            source = self.add_source(path, kind, status.st_size, stamp)
            for begin in range(0, status.st_size, BLOCK_BYTES):
                end = min(begin + BLOCK_BYTES, status.st_size)
                self.units.append(Unit(source, b"%s@%d" % (identity, begin), read_line_range, begin, end))
        elif kind == "parquet":
            import arrow_sources

            source = self.add_source(path, kind, status.st_size, stamp)
            for group, raw_bytes in arrow_sources.row_groups(path, self.options.text_field):
                self.units.append(Unit(source, b"%s@%d" % (identity, group), arrow_sources.read_row_group, group, raw_bytes, self.options.text_field))
        elif kind == "empty":
            self.left_out["empty"].append(path)
        else:
            self.add_stream(path, kind, identity, status.st_size, stamp)

    def add_source(self, path, kind, size, stamp):
        self.sources.append(Source(path, kind, size, stamp))
        return len(self.sources) - 1, path

    def add_stream(self, path, kind, identity, size, stamp):
        self.streams.append(Unit(self.add_source(path, kind, size, stamp), identity, read_stream, self))

    def entries(self):
        """Returns what is read, in order: units, and lists of documents of about BLOCK_BYTES."""
        items = sorted([*self.documents, *self.units], key=lambda item: item.order)
        entries, filled = [], 0
        for item in items:
            if not isinstance(item, Document):
                entries.append(item)
                continue
            size = item.end - item.begin
            if entries and isinstance(entries[-1], list) and filled + size <= BLOCK_BYTES:
                entries[-1].append(item)
                filled += size
            else:
                entries.append([item])
                filled = size
        return entries + sorted(self.streams, key=lambda unit: unit.order)

    def stamp_of_texts(self):
        """Returns a hash of the text files' names, sizes and times, by which a later run knows them again."""
        stamp, seen = hashlib.blake2b(digest_size=16), None
        for document in self.documents:
            if document.path != seen:
                seen = document.path
                status = os.stat(seen)
                stamp.update(os.fsencode(seen) + b"\0%d %d\0" % (status.st_size, status.st_mtime_ns))
        return stamp.hexdigest()


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_blocks(finder, entries, entry=0, number=0):
    """Yields the blocks of the entries, from block `number` of entry `entry` on. Those before it are not read where
    they lie in another place, and are read but not returned where they are before it in a stream."""
    for index in range(entry, len(entries)):
        item = entries[index]
        blocks = read_documents(finder, item) if isinstance(item, list) else item.read(item.source, *item.arguments)
        for count, block in enumerate(blocks):
            if index > entry or count >= number:
                block.entry, block.number = index, count
                yield block


def read_documents(finder, documents):
    texts, names, raw_bytes, file, opened_path = [], [], 0, None, None
    try:
        for document in documents:
            if opened_path != document.path:
                if file:
                    file.close()
                file, opened_path = open(document.path, "rb"), document.path
            file.seek(document.begin)
            text = file.read(document.end - document.begin)
            raw_bytes += len(text)
            if b"\0" in text:
                if document.named:
                    raise Mistake(f"{document.path}: is no text: byte {document.begin + text.index(0)} is zero")
                warn(f"{document.path}: left out bytes {document.begin} to {document.end}, of which some are zero")
                continue
            texts.append(text)
            names.append(document.path)
    finally:
        if file:
            file.close()
    yield block_of_texts(0, texts, names.__getitem__, raw_bytes)


def line_number_at(path, offset):
    """Returns the number of the line that begins at a byte."""
    number = 1
    with open(path, "rb") as file:
        while offset > 0 and (piece := file.read(min(offset, 1 << 20))):
            number += piece.count(b"\n")
            offset -= len(piece)
    return number


def read_line_range(source, begin, end):
    """Yields one block: the lines that begin at bytes [begin, end) of a file."""
    index, path = source
    with open(path, "rb") as file:
        first = begin
        if begin:
            file.seek(begin - 1)
            first += len(file.readline(LONGEST_DOCUMENT)) - 1
        data = b""
        if first < end:
            file.seek(first)
            data = file.read(end - first)
            if not data.endswith(b"\n"):
                data += file.readline(LONGEST_DOCUMENT)
            if len(data) >= LONGEST_DOCUMENT:
                raise Mistake(f"{path}, line {line_number_at(path, first)}: longer than {LONGEST_DOCUMENT >> 20} MiB; expected one object a line")
    yield Block(index, LINES, data, lambda number: f"{path}, line {line_number_at(path, first) + number}", end - begin)


class Packer:
    """Collects texts into blocks."""

    def __init__(self, source, progress):
        self.index, self.path = source
        self.progress, self.done = progress, 0
        self.texts, self.filled = [], 0

    def add(self, text):
        """Returns whether a block is full."""
        self.texts.append(text)
        self.filled += len(text)
        return self.filled >= BLOCK_BYTES

    def block(self):
        raw_bytes, self.done = self.progress() - self.done, self.progress()
        texts, self.texts, self.filled = self.texts, [], 0
        return block_of_texts(self.index, texts, lambda number: self.path, raw_bytes)


def read_stream(source, finder):
    """Yields the blocks of a file, or of standard input, that is read from its beginning to its end."""
    index, path = source
    field = finder.options.text_field
    with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
        raw = Peek(file)
        stream, compressed = opened(raw, path)
        head = stream.peek(HEAD_BYTES)
        if head[:1] in b"{[ \t\r\n\xef":
            head = stream.peek(FIRST_RECORD_BYTES)
        kind = kind_of(head, path, field, True)
        if kind in ("parquet", "arrow") and (compressed or not file.seekable()):
            raise Mistake(f"{path}: {kind} " + ("within a compressed file: decompress it" if compressed else "from a pipe: name a file"))
        if isinstance(kind, tuple) or kind == "binary":
            what, reader = kind if kind != "binary" else BINARY
            raise Mistake(f"{path}: {'holds' if compressed else 'is'} {what}; what would read it: {reader}")
        finder.sources[index].kind = kind
        progress = lambda: raw.taken  # noqa: E731
        if kind == "lines":
            yield from read_line_stream(source, stream, progress)
        elif kind == "array":
            yield from read_array(source, stream, progress, field)
        elif kind == "tar":
            yield from read_tar(source, stream, progress, field)
        elif kind == "arrow":
            import arrow_sources

            yield from arrow_sources.read_arrow(source, field)
        elif kind == "text":
            yield from read_text_stream(source, stream, progress, finder)


def read_line_stream(source, stream, progress):
    index, path = source
    rest, line, done = b"", 1, 0
    ended = False
    while not ended:
        pieces, size, ended = [rest], len(rest), True
        while more := stream.read(BLOCK_BYTES):
            pieces.append(more)
            size += len(more)
            if size >= BLOCK_BYTES and b"\n" in more:
                ended = False
                break
            if size > LONGEST_DOCUMENT:
                raise Mistake(f"{path}, line {line}: longer than {LONGEST_DOCUMENT >> 20} MiB; expected one object a line")
        data = b"".join(pieces)
        cut = len(data) if ended else data.rindex(b"\n") + 1
        data, rest = data[:cut], data[cut:]
        raw_bytes, done = progress() - done, progress()
        if data:
            yield Block(index, LINES, data, lambda number, first=line: f"{path}, line {first + number}", raw_bytes)
        line += data.count(b"\n")


def read_array(source, stream, progress, field):
    """Yields the texts of an array of JSON objects."""
    packer = Packer(source, progress)
    for number, value in enumerate(elements(stream, source[1]), 1):
        if packer.add(text_of_record(lambda: f"{source[1]}, element {number}", value, field)):
            yield packer.block()
    yield packer.block()


def elements(stream, path):
    """Yields the elements of a JSON array, of which one and a chunk of the file are in memory."""
    decoder, text, at, number, expects, ended = json.JSONDecoder(), "", 0, 0, "[", False
    characters = codecs.getincrementaldecoder("utf-8-sig")()

    def decoded(more):
        try:
            return characters.decode(more, not more)
        except UnicodeDecodeError as error:
            raise Mistake(f"{path}, after element {number}: not UTF-8: {error.reason}") from None

    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        problem = "it ends early; the file is cut off"
        if at < len(text):
            if expects == "[" or (text[at] == "," and expects == "],"):
                at, expects = at + 1, "]{" if expects == "[" else "{"
                continue
            if text[at] == "]" and expects != "{":
                while not (rest := text[at + 1 :].strip(" \t\r\n")) and (more := stream.read(BLOCK_BYTES)):
                    text, at = decoded(more), -1
                if rest:
                    raise Mistake(f"{path}, after element {number}: not JSON: the array ends, and {rest[:20]!r} follows")
                return
            try:
                if expects == "],":
                    raise Mistake(f"{path}, after element {number}: not JSON: expected , or ] and not {text[at]!r}")
                value, end = decoder.raw_decode(text, at)
                if end < len(text):
                    number, at, expects = number + 1, end, "],"
                    yield value
                    continue
            except (ValueError, RecursionError) as error:
                problem = str(error)
        if ended or len(text) - at > LONGEST_DOCUMENT:
            raise Mistake(f"{path}, after element {number}: not JSON: {problem}")
        more = stream.read(max(BLOCK_BYTES, len(text) - at))
        ended = not more
        text, at = text[at:] + decoded(more), 0


def lines_of(path):
    """Yields the lines of a JSONL file, and the elements of an array of JSON as lines, as (number, bytes); path "-":
    of standard input."""
    with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
        stream, _ = opened(file, path)
        if stream.peek(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            for number, value in enumerate(elements(stream, path), 1):
                yield number, json.dumps(value).encode()
            return
        first = 1
        for block in read_line_stream((0, path), stream, lambda: 0):
            lines = block.data.split(b"\n")
            yield from enumerate(lines, first)
            first += len(lines) - 1


def read_text_stream(source, stream, progress, finder):
    """Yields a text as pieces, cut at line ends: of the size that its length asks for, or, where it is longer than
    UNCUT_BYTES, of 1 MiB."""
    packer = Packer(source, progress)
    data, more = b"", b"."
    while len(data) < 2 * UNCUT_BYTES and (more := stream.read(BLOCK_BYTES)):
        data += more
    piece_bytes = piece_bytes_of(sys.maxsize if more else len(data), finder.options.val_fraction)
    while data:
        cut = len(data)
        if len(data) > 2 * piece_bytes or (more and len(data) > piece_bytes):
            cut = piece_bytes + cut_of(data[piece_bytes : piece_bytes + min(piece_bytes, 1 << 16)])
        if b"\0" in data[:cut]:
            raise Mistake(f"{source[1]}: is no text: some of its bytes are zero")
        if packer.add(data[:cut]):
            yield packer.block()
        data = data[cut:]
        while more and len(data) < 2 * piece_bytes and (more := stream.read(BLOCK_BYTES)):
            data += more
    yield packer.block()


class TarMember(tarfile.TarInfo):
    """A file in a tar. tarfile takes a header that is cut off or damaged, but for the first, for the end."""

    @classmethod
    def frombuf(cls, buf, *encoding):
        try:
            return super().frombuf(buf, *encoding)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def read_tar(source, stream, progress, field):
    """Yields the texts in a tar: texts as they are, of JSON the records' field; other files are counted."""
    path, packer, left_out = source[1], Packer(source, progress), 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=TarMember) as archive:
            for member in archive:
                if not member.isfile():
                    continue
                if member.size > LONGEST_DOCUMENT:
                    raise Mistake(f"{path}: {member.name} in it is longer than {LONGEST_DOCUMENT >> 20} MiB; unpack it")
                data = archive.extractfile(member).read()
                kind = kind_of(data, member.name, field, False)
                where = lambda number: f"{path}, {member.name}, line {number + 1}"  # noqa: E731
                if kind == "lines":
                    texts = Block(0, LINES, data, where, 0).texts(field)
                elif kind == "array":
                    values = list(elements(io.BytesIO(data), f"{path}, {member.name}"))
                    texts = [text_of_record(lambda: f"{path}, {member.name}", value, field) for value in values]
                elif kind == "text" and not member.name.endswith(".json"):
                    texts = [data]
                else:
                    left_out += kind != "empty"
                    continue
                for text in texts:
                    if packer.add(text):
                        yield packer.block()
    except tarfile.TarError as error:
        raise Mistake(f"{path}: {error}; the tar is cut off or damaged") from None
    if left_out:
        warn(f"{path}: left out {left_out} files that hold no text")
    yield packer.block()
