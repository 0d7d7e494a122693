"""Writes shards of tokens for prepare_data.py: under temporary names, which publish() replaces, so that all shards
appear, or none; and keeps in PREFIX.partial how far a run is, from where the same command goes on after a kill."""

import array
import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct

import tokenizer_digest
from mistakes import Mistake, warn
from text_tokenizers import TOKENIZER_FILES

SHARD_HEADER_INTS = 256
SHARD_KINDS = {2: (20240520, 1), 4: (20240801, 7)}  # bytes a token: (magic, version)
MAX_SHARDS = 10_000  # more come of --shard-tokens 100 in place of 100M, and take hours to remove
WRITE_BYTES = 1 << 22  # tokens are handed to the file in pieces of about this size
MANIFEST = "manifest.json"
OUTPUT = re.compile(rf"(_(train|val)_\d{{3,}}\.bin|_({'|'.join(map(re.escape, [*TOKENIZER_FILES, MANIFEST, 'vocabulary.bin']))})|\.(lock|partial|partial_digests))(\.tmp)?")


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
    """Cuts a stream of tokens into shards under temporary names."""

    def __init__(self, prefix, split, width, shard_tokens, tokenizer_fields):
        self.prefix, self.split, self.width, self.tokenizer_fields = prefix, split, width, tokenizer_fields
        self.shard_bytes = shard_tokens * width
        self.header_bytes = SHARD_HEADER_INTS * 4
        self.paths, self.file, self.room = [], None, 0
        self.documents = self.tokens = 0
        self.pending, self.pending_bytes = [], 0
        self.hashing, self.hashes = concurrent.futures.ThreadPoolExecutor(1), {}

    def add(self, data, documents):
        self.documents += documents
        self.pending.append(data)
        self.pending_bytes += len(data)
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
        self.seal()
        if len(self.paths) == MAX_SHARDS:
            raise Mistake(
                f"--shard-tokens {self.shard_bytes // self.width} makes more than {MAX_SHARDS:,} shards of {self.split}; raise it"
            )
        temporary = f"{self.path_of(len(self.paths))}.tmp"
        self.paths.append(temporary)
        self.file = open(temporary, "wb")
        self.file.write(bytes(self.header_bytes))
        self.room = self.shard_bytes

    def seal(self):
        """Completes the last shard, whose hash a thread then takes."""
        if self.file:
            self.file.close()
            self.file = None
            self.write_header(self.paths[-1])
            self.hash(self.paths[-1])

    def hash(self, path):
        self.hashes[path] = self.hashing.submit(hash_of_file, path)

    def finish(self):
        """Completes the temporary files. A last shard of less than half the size is appended to the shard before: by
        itself it would hold few windows or none."""
        self.write_pending()
        self.seal()
        if len(self.paths) > 1 and self.room > self.shard_bytes // 2:
            last = self.paths.pop()
            with open(last, "rb") as source, open(self.paths[-1], "ab") as target:
                source.seek(self.header_bytes)
                while piece := source.read(WRITE_BYTES):
                    target.write(piece)
            self.hashes.pop(last).result()  # publish() removes it: a run that is killed before goes on with it
            self.hashes[self.paths[-1]].result()
            self.write_header(self.paths[-1])
            self.hash(self.paths[-1])

    def shards(self):
        """Returns what the manifest says of the finished shards."""
        return [{"file": os.path.basename(path).removesuffix(".tmp"), "bytes": os.path.getsize(path), "sha256": self.hashes[path].result()} for path in self.paths]

    def write_header(self, path):
        with open(path, "r+b") as file:
            tokens = (os.fstat(file.fileno()).st_size - self.header_bytes) // self.width
            file.write(struct.pack("<3i", *SHARD_KINDS[self.width], tokens))
            file.seek(tokenizer_digest.HEADER_BYTE)
            file.write(self.tokenizer_fields)
            file.flush()
            os.fsync(file.fileno())

    def save(self):
        """Brings all tokens to the disk; returns where the next ones go, for resume()."""
        self.write_pending()
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        return {"shards": len(self.paths), "room": self.room, "tokens": self.tokens, "documents": self.documents}

    def resume(self, saved):
        """Goes on where save() was; what was written after it is cut off."""
        self.room, self.tokens, self.documents = saved["room"], saved["tokens"], saved["documents"]
        self.paths = [f"{self.path_of(number)}.tmp" for number in range(saved["shards"])]
        if len(self.paths) > 1:  # finish() may have appended the last shard to it
            os.truncate(self.paths[-2], self.header_bytes + self.shard_bytes)
            self.write_header(self.paths[-2])
        for path in self.paths[:-1]:
            self.hash(path)
        if self.paths:
            size = self.header_bytes + self.shard_bytes - self.room
            self.file = open(self.paths[-1], "r+b")
            if os.fstat(self.file.fileno()).st_size < size:
                raise OSError(f"{self.paths[-1]} is shorter than {self.prefix}.partial says")
            self.file.truncate(size)
            self.file.seek(size)

    def restore(self, saved):
        """Takes up the counts of finished shards, which only have to be published."""
        self.tokens, self.documents = saved["tokens"], saved["documents"]
        self.paths = [f"{self.path_of(number)}.tmp" for number in range(saved["shards"])]

    def close(self):
        self.hashing.shutdown(wait=True)
        if self.file:
            self.file.close()
            self.file = None

    def discard(self):
        self.pending = []
        with contextlib.suppress(OSError):  # a full disk's
            self.close()
        remove(outputs(self.prefix, [rf"{self.split}_\d{{3,}}\.bin\.tmp"]))


def hash_of_file(path):
    value = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(WRITE_BYTES):
            value.update(piece)
    return value.hexdigest()


def outputs(prefix, endings):
    """Returns the files of PREFIX_ with one of the endings (regular expressions), sorted."""
    folder, name = os.path.split(prefix)
    ours = re.compile(f"{re.escape(name)}_({'|'.join(endings)})")
    return [os.path.join(folder, old) for old in sorted(os.listdir(folder or ".")) if ours.fullmatch(old)]


def is_output(prefix, path):
    """Returns whether runs with the prefix write the path."""
    prefix, path = os.path.abspath(prefix), os.path.abspath(path)
    return path.startswith(prefix) and OUTPUT.fullmatch(path[len(prefix) :]) is not None


def publish(writers, prefix, files, keep=None):
    """Writes `files`, {name: bytes}, and gives them and the writers' shards their final names. Removes what an earlier
    run wrote and the present one did not: more shards, a tokenizer's files. keep: is called with the moves, {"removes",
    "renames"}, before the first; move() can make them again after a kill."""
    names = [name for name in files if name != MANIFEST]
    temporaries = [f"{prefix}_{name}.tmp" for name in files]
    try:
        for path, content in zip(temporaries, files.values()):
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        remove(temporaries)
        raise
    shards = [path.removesuffix(".tmp") for writer in writers.values() for path in writer.paths]
    # The manifest goes first and comes last: where it is, the shards are those that it names.
    finals = [*(f"{prefix}_{name}" for name in names), *shards, *(f"{prefix}_{name}" for name in files if name == MANIFEST)]
    earlier = [*TOKENIZER_FILES, MANIFEST] if os.path.exists(f"{prefix}_vocabulary.bin") else []  # else the user's own
    kept = {*finals, *(f"{path}.tmp" for path in finals)} - {f"{prefix}_{MANIFEST}"}
    old = [path for path in outputs(prefix, [r"(train|val)_\d{3,}\.bin(\.tmp)?", *map(re.escape, earlier)]) if path not in kept]
    old.sort(key=lambda path: not path.endswith(MANIFEST))
    moves = {"removes": [path[len(prefix) :] for path in old], "renames": [path[len(prefix) :] for path in finals]}
    if keep:
        keep(moves)
    move(prefix, moves)


def move(prefix, moves):
    """Makes the moves of publish(), or those that a killed run did not make."""
    remove(prefix + ending for ending in moves["removes"])
    for ending in moves["renames"]:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{prefix}{ending}.tmp", prefix + ending)


def remove(paths):
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


class Progress:
    """PREFIX.partial: how far a run is. PREFIX.partial_digests: the digests of its documents."""

    def __init__(self, prefix, run):
        """run: a hash of what the run reads and how, which a run that goes on must have, too."""
        self.prefix, self.run = prefix, run
        self.path, self.digests_path = f"{prefix}.partial", f"{prefix}.partial_digests"
        self.is_saved = False  # whether this run's progress can be gone on with
        self.is_refused = False  # whether another run's is there, which stays
        self.digests, self.digest_bytes = None, 0

    def load(self, writers, seen):
        """Takes up an earlier run, if there is one; returns what it saved, else None."""
        try:
            with open(self.path, encoding="utf-8") as file:
                self.is_refused = True
                saved = json.load(file)
            if saved["run"] != self.run:
                raise Mistake(f"{self.path}: a run with other inputs or options was interrupted; give these to go on, or remove {self.path} to begin anew")
            for split, writer in writers.items():
                (writer.restore if saved.get("moves") else writer.resume)(saved["writers"][split])
            self.digest_bytes = saved["digest_bytes"]
            self.digests = open(self.digests_path, "r+b")
            while self.digests.tell() < self.digest_bytes:
                known = array.array("Q")
                known.frombytes(self.digests.read(min(WRITE_BYTES, self.digest_bytes - self.digests.tell())))
                if seen:
                    seen.add(known)
            self.digests.truncate(self.digest_bytes)
        except FileNotFoundError as error:
            if error.filename != self.path:
                raise Mistake(f"{error.filename}: no such file, which {self.path} needs; remove {self.path} to begin anew") from None
            return self.load_nothing()
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise Mistake(f"{self.path}: is damaged ({error}); remove it to begin anew") from None
        self.is_saved, self.is_refused = True, False
        return saved

    def load_nothing(self):
        """Begins anew, without what a killed run may have left."""
        remove([*outputs(self.prefix, [r"(train|val)_\d{3,}\.bin\.tmp"]), self.path, self.digests_path])
        self.digests = open(self.digests_path, "wb")

    def add(self, digests):
        self.digests.write(digests)
        self.digest_bytes += len(digests)

    def save(self, writers, state):
        saved = {"run": self.run, "writers": {split: writer.save() for split, writer in writers.items()}, "digest_bytes": self.digest_bytes, **state}
        self.digests.flush()
        os.fsync(self.digests.fileno())
        with open(f"{self.path}.tmp", "w", encoding="utf-8") as file:
            json.dump(saved, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{self.path}.tmp", self.path)
        self.is_saved = True

    def remove(self):
        if self.digests:
            with contextlib.suppress(OSError):
                self.digests.close()
        remove([self.path, f"{self.path}.tmp", self.digests_path])
