// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): hashes that nobody can forge, for short messages.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { SHA256_BYTES = 32 };

__BEGIN_DECLS
void sha256(unsigned char hash[SHA256_BYTES], const void *message, size_t bytes);
// hash = the HMAC-SHA-256 of the message by the key: a proof that its maker had the key and the message.
void hmac_sha256(unsigned char hash[SHA256_BYTES], const void *key, size_t key_bytes, const void *message,
                 size_t bytes);
// Whether two hashes are the same, in a time that does not tell how many of their bytes are.
bool sha256_same(const unsigned char a[SHA256_BYTES], const unsigned char b[SHA256_BYTES]);
__END_DECLS
