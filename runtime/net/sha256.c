#include "runtime/net/sha256.h"
#include <stdint.h> // uint32_t
#include <string.h> // memcpy

enum { BLOCK = 64 };

struct sha256_state {
    uint32_t h[8];
    uint64_t bytes; // hashed so far
    unsigned char block[BLOCK];
};

static const uint32_t SHA256_K[64] = { // fractional parts of the cube roots of the first 64 primes
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t sha256_rotated(uint32_t x, int right) { return x >> right | x << (32 - right); }

// Updates the state's hash by its block, which must be full. The names are of FIPS 180-4, section 6.2.2.
static void sha256_block(struct sha256_state *s) {
    uint32_t w[64], v[8]; // v: a to h
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)s->block[4 * t] << 24 | (uint32_t)s->block[4 * t + 1] << 16 |
               (uint32_t)s->block[4 * t + 2] << 8 | s->block[4 * t + 3];
    for (int t = 16; t < 64; t++) {
        const uint32_t sigma0 = sha256_rotated(w[t - 15], 7) ^ sha256_rotated(w[t - 15], 18) ^ w[t - 15] >> 3;
        const uint32_t sigma1 = sha256_rotated(w[t - 2], 17) ^ sha256_rotated(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = sigma1 + w[t - 7] + sigma0 + w[t - 16];
    }
    memcpy(v, s->h, sizeof v);
    for (int t = 0; t < 64; t++) {
        const uint32_t sum1 = sha256_rotated(v[4], 6) ^ sha256_rotated(v[4], 11) ^ sha256_rotated(v[4], 25);
        const uint32_t sum0 = sha256_rotated(v[0], 2) ^ sha256_rotated(v[0], 13) ^ sha256_rotated(v[0], 22);
        const uint32_t t1 = v[7] + sum1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + SHA256_K[t] + w[t];
        const uint32_t t2 = sum0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        s->h[i] += v[i];
}

static void sha256_begin(struct sha256_state *s) {
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memset(s, 0, sizeof *s);
    memcpy(s->h, first, sizeof first);
}

static void sha256_add(struct sha256_state *s, const void *message, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        s->block[s->bytes++ % BLOCK] = ((const unsigned char *)message)[i];
        if (s->bytes % BLOCK == 0)
            sha256_block(s);
    }
}

// hash = the hash of all bytes so far, padded with a bit 1, zeros, and the number of bits. *s then needs sha256_begin.
static void sha256_end(unsigned char hash[SHA256_BYTES], struct sha256_state *s) {
    const uint64_t bits = 8 * s->bytes;
    unsigned char padding[BLOCK + 8] = {0x80};
    const size_t bytes = BLOCK - (s->bytes + 8) % BLOCK;
    for (int i = 0; i < 8; i++)
        padding[bytes + (size_t)i] = (unsigned char)(bits >> (56 - 8 * i));
    sha256_add(s, padding, bytes + 8);
    for (int i = 0; i < SHA256_BYTES; i++)
        hash[i] = (unsigned char)(s->h[i / 4] >> (24 - i % 4 * 8));
}

void sha256(unsigned char hash[SHA256_BYTES], const void *message, size_t bytes) {
    struct sha256_state s;
    sha256_begin(&s);
    sha256_add(&s, message, bytes);
    sha256_end(hash, &s);
}

void hmac_sha256(unsigned char hash[SHA256_BYTES], const void *key, size_t key_bytes, const void *message,
                 size_t bytes) {
    unsigned char padded[BLOCK] = {0}, inner[SHA256_BYTES];
    struct sha256_state s;
    if (key_bytes > BLOCK)
        sha256(padded, key, key_bytes);
    else
        memcpy(padded, key, key_bytes);
    for (int i = 0; i < BLOCK; i++)
        padded[i] ^= 0x36;
    sha256_begin(&s);
    sha256_add(&s, padded, BLOCK);
    sha256_add(&s, message, bytes);
    sha256_end(inner, &s);
    for (int i = 0; i < BLOCK; i++)
        padded[i] ^= 0x36 ^ 0x5c;
    sha256_begin(&s);
    sha256_add(&s, padded, BLOCK);
    sha256_add(&s, inner, sizeof inner);
    sha256_end(hash, &s);
}

bool sha256_same(const unsigned char a[SHA256_BYTES], const unsigned char b[SHA256_BYTES]) {
    unsigned different = 0;
    for (int i = 0; i < SHA256_BYTES; i++)
        different |= (unsigned)(a[i] ^ b[i]);
    return different == 0;
}
