// BLAKE2b (RFC 7693) of 8 bytes, by which scripts/prepare_data.py finds copies and decides what goes to validation.
#pragma once
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Returns int.from_bytes(hashlib.blake2b(bytes, digest_size=8).digest(), "little") of `count` bytes.
uint64_t text_digest(const void *bytes, uint64_t count);
__END_DECLS
