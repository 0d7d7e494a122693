// Hashes of bytes by xxHash, which is fast. They reveal damage, not forgery.
#pragma once
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { HASH128_DIGITS = 32 };

struct hash128; // a running XXH3 of 128 bits

__BEGIN_DECLS
// Returns the 64-bit XXH3. seed: 0, or in a chain the former part's hash; the last covers all parts and their lengths.
uint64_t hash64(const void *bytes, uint64_t count, uint64_t seed);

struct hash128 *hash128_new(void); // NULL: out of memory
void hash128_free(struct hash128 *hash);
void hash128_reset(struct hash128 *hash); // to the hash of no bytes, as a new one
void hash128_update(struct hash128 *hash, const void *bytes, uint64_t count);
// text = the hash of all bytes so far, as `xxhsum -H128` prints it: lower-case hexadecimal. More bytes may follow.
void hash128_text(char text[HASH128_DIGITS + 1], const struct hash128 *hash);

const char *hash_library_version(void); // of xxHash: "0.8.1"; static memory
__END_DECLS
