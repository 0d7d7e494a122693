#include "formats/text_digest.h"

#include <string.h> // memcpy, memset

enum { BLOCK_BYTES = 128 };

static const uint64_t initial[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
                                    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

// Returns x rotated right by `bits`, 1 to 63.
static inline uint64_t rotate(uint64_t x, int bits) { return x >> bits | x << (64 - bits); }

// The RFC's G mixes two words of a block into four words of the state.
#define MIX(a, b, c, d, x, y)                                                                                          \
    a += b + m[x], d = rotate(d ^ a, 32), c += d, b = rotate(b ^ c, 24), a += b + m[y], d = rotate(d ^ a, 16), c += d, \
                   b = rotate(b ^ c, 63)
// A round; its arguments are a row of the RFC's table SIGMA.
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)                                    \
    MIX(v0, v4, v8, v12, s0, s1), MIX(v1, v5, v9, v13, s2, s3), MIX(v2, v6, v10, v14, s4, s5),                         \
        MIX(v3, v7, v11, v15, s6, s7), MIX(v0, v5, v10, v15, s8, s9), MIX(v1, v6, v11, v12, s10, s11),                 \
        MIX(v2, v7, v8, v13, s12, s13), MIX(v3, v4, v9, v14, s14, s15)

// Adds a block (BLOCK_BYTES) to the state h (8). count: the text's bytes up to the block's end, without padding.
static void mix_block(uint64_t *h, const unsigned char *block, uint64_t count, int is_last) {
    uint64_t m[16];
    memcpy(m, block, BLOCK_BYTES);
    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    uint64_t v8 = initial[0], v9 = initial[1], v10 = initial[2], v11 = initial[3], v12 = initial[4] ^ count,
             v13 = initial[5], v14 = is_last ? ~initial[6] : initial[6], v15 = initial[7];
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    h[0] ^= v0 ^ v8, h[1] ^= v1 ^ v9, h[2] ^= v2 ^ v10, h[3] ^= v3 ^ v11;
    h[4] ^= v4 ^ v12, h[5] ^= v5 ^ v13, h[6] ^= v6 ^ v14, h[7] ^= v7 ^ v15;
}

uint64_t text_digest(const void *bytes, uint64_t count) {
    const unsigned char *text = (const unsigned char *)bytes;
    unsigned char last[BLOCK_BYTES];
    uint64_t h[8], done = 0;
    memcpy(h, initial, sizeof h);
    h[0] ^= 0x01010000u ^ sizeof(uint64_t); // no key; the digest's length
    for (; count - done > BLOCK_BYTES; done += BLOCK_BYTES)
        mix_block(h, text + done, done + BLOCK_BYTES, 0);
    memset(last, 0, sizeof last);
    if (count > done)
        memcpy(last, text + done, count - done);
    mix_block(h, last, count, 1);
    return h[0];
}
