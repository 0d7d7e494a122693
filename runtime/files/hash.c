#include "runtime/files/hash.h"
#include <stdio.h> // snprintf

#define XXH_INLINE_ALL // compiled in, for the instruction set of this file's flags: no library to link
#include <xxhash.h>

uint64_t hash64(const void *bytes, uint64_t count, uint64_t seed) {
    return XXH3_64bits_withSeed(bytes, (size_t)count, seed);
}

// Returns a new running hash, of no bytes yet, which hash128_free frees; NULL when out of memory.
struct hash128 *hash128_new(void) {
    XXH3_state_t *const state = XXH3_createState(); // aligned to 64 bytes, as it must be
    if (state)
        XXH3_128bits_reset(state);
    return (struct hash128 *)state;
}
// Frees a running hash; NULL is fine.
void hash128_free(struct hash128 *hash) { XXH3_freeState((XXH3_state_t *)hash); }
void hash128_reset(struct hash128 *hash) { XXH3_128bits_reset((XXH3_state_t *)hash); }
void hash128_update(struct hash128 *hash, const void *bytes, uint64_t count) {
    XXH3_128bits_update((XXH3_state_t *)hash, bytes, (size_t)count);
}
void hash128_text(char text[HASH128_DIGITS + 1], const struct hash128 *hash) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest((const XXH3_state_t *)hash));
    for (int i = 0; i < HASH128_DIGITS / 2; i++)
        snprintf(text + 2 * i, 3, "%02x", canonical.digest[i]);
}

#define HASH_TEXT(...) #__VA_ARGS__
#define HASH_VALUE(...) HASH_TEXT(__VA_ARGS__)
const char *hash_library_version(void) { return HASH_VALUE(XXH_VERSION_MAJOR.XXH_VERSION_MINOR.XXH_VERSION_RELEASE); }
