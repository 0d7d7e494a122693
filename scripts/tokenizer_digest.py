"""What decides the ids of text, as a hash that shards carry: formats/tokenizer_digest.h says of what, and computes the
same. A shard's header has it in bytes 96 to 127, and the number of ids in the int after it."""

import copy
import hashlib
import json
import struct

HEADER_BYTE, HALF = 96, 16  # where it lies in the header of a shard, of text or of finetuning
FLAGS = ["single_word", "lstrip", "rstrip", "normalized"]
NOT_OF_IDS = ["vocab", "merges", "unk_token", "fuse_unk"]  # members of the model that are hashed otherwise, or not


def pack_text(text):
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data


def pack_value(value):
    if isinstance(value, dict):
        names = sorted((name for name in value if value[name]), key=lambda name: name.encode())
        return struct.pack("<cI", b"{", len(names)) + b"".join(b"s" + pack_text(name) + pack_value(value[name]) for name in names)
    if isinstance(value, list):
        return struct.pack("<cI", b"[", len(value)) + b"".join(map(pack_value, value))
    if isinstance(value, str):
        return b"s" + pack_text(value)
    if value is None or isinstance(value, bool):
        return b"t" if value else b"n" if value is None else b"f"
    return struct.pack("<cq", b"i", value) if isinstance(value, int) else struct.pack("<cd", b"d", value)


def normalize_components(value):
    """Brings the components in a value to one form: what older files leave out or name otherwise."""
    if isinstance(value, list):
        return [normalize_components(member) for member in value]
    if not isinstance(value, dict):
        return value
    value = dict(value)
    if value.get("type") == "ByteLevel":
        value = {"add_prefix_space": True, "use_regex": True, **value}
        value.pop("trim_offsets", None)
    if value.get("type") == "Metaspace":
        never = value.pop("add_prefix_space", None) is False
        value = {"prepend_scheme": "always", "split": True, **value, **({"prepend_scheme": "never"} if never else {})}
        value.pop("str_rep", None)
    return {name: normalize_components(member) for name, member in value.items()}


def pack_tokens(tokens):
    """tokens: (id, text, flags), where flags are bytes."""
    return b"".join(struct.pack("<I", number) + pack_text(text) + flags for number, text, flags in sorted(tokens, key=lambda t: (t[0], t[1].encode())))


def of(description):
    """Returns the digest, 32 bytes, of a tokenizer.json's object."""
    added = description.get("added_tokens") or []
    model = copy.copy(description["model"])
    vocab, merges = model.get("vocab"), model.get("merges")
    if merges is not None:
        model.setdefault("type", "BPE")
    parts = [{name: value for name, value in model.items() if name not in NOT_OF_IDS}, description.get("normalizer"), description.get("pre_tokenizer")]
    names = {token["content"] for token in added}
    text = pack_value(normalize_components(parts))
    text += pack_tokens([(number, token, b"") for token, number in vocab.items() if token not in names]) if isinstance(vocab, dict) else pack_value(vocab)
    for merge in merges or []:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        text += struct.pack("<2I", vocab.get(left, 0xFFFFFFFF), vocab.get(right, 0xFFFFFFFF))
    flagged = [(token["id"], token["content"], bytes([sum(bool(token.get(name)) << i for i, name in enumerate(FLAGS))])) for token in added]
    return hashlib.sha256(text).digest()[:HALF] + hashlib.sha256(pack_tokens(flagged)).digest()[:HALF]


def header_fields(tokenizer_json, ids):
    """Returns what lies at HEADER_BYTE: the digest of a tokenizer.json's bytes, and the number of ids."""
    return of(json.loads(tokenizer_json)) + struct.pack("<I", ids)
