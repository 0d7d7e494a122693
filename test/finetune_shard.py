"""Writes shards to finetune on, in the format of formats/finetune_shard.h."""
import struct


def pack_bits(bits):
    data = bytearray((len(bits) + 7) // 8)
    for i, bit in enumerate(bits):
        data[i // 8] |= bool(bit) << i % 8
    return bytes(data)


def write_rows(path, rows, T, width=2, vocabulary=None, last=0, last_bits=(False, True), **header):
    """Writes a shard. rows: lists of documents, each a list of (token, whether it is learned); padding of token 0 fills
    rows up to T. last: the token after the last row; last_bits: its bits of loss and start. header: other values of
    the header's fields."""
    tokens, loss, starts = [], [], []
    for documents in rows:
        row = [(token, learned, i == 0) for document in documents for i, (token, learned) in enumerate(document)]
        row += [(0, False, i == 0) for i in range(T - len(row))]
        assert len(row) == T
        for token, learned, start in row:
            tokens.append(token)
            loss.append(learned and not start)
            starts.append(start)
    tokens.append(last)
    loss.append(last_bits[0])
    starts.append(last_bits[1])
    fields = {"magic": 20261123, "version": 1, "T": T, "width": width, "rows": len(rows), "learned": sum(loss),
              "documents": sum(map(len, rows)), "vocabulary": vocabulary or max(tokens) + 1, **header}
    data = struct.pack("<4i3Qi", *fields.values()).ljust(1024, b"\0")
    for part in (struct.pack("<%d%s" % (len(tokens), "H" if width == 2 else "I"), *tokens), pack_bits(loss), pack_bits(starts)):
        data += part + bytes(-len(part) % 8)
    with open(path, "wb") as f:
        f.write(data)
