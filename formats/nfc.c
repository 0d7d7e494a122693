#include "formats/nfc.h"

#include <stdlib.h> // malloc, free
#include <string.h> // memcpy

#include "formats/unicode_tables.h" // unicode_decompositions, unicode_compositions, unicode_combining_classes
#include "runtime/text/utf8.h"      // utf8_decode, utf8_encode

// Hangul syllables are laid out so that they compose by arithmetic: (lead * 21 + vowel) * 28 + trail.
enum {
    HANGUL_SYLLABLES = 0xac00,
    HANGUL_LEADS = 0x1100,
    HANGUL_VOWELS = 0x1161,
    HANGUL_TRAILS = 0x11a7,
    HANGUL_LEAD_COUNT = 19,
    HANGUL_VOWEL_COUNT = 21,
    HANGUL_TRAIL_COUNT = 28, // trail 0: no trail
    HANGUL_SYLLABLE_COUNT = HANGUL_LEAD_COUNT * HANGUL_VOWEL_COUNT * HANGUL_TRAIL_COUNT,
    NFC_MAX_PARTS = 4 // characters of one full decomposition
};

// Returns a character's canonical combining class, 0 to 255; 0: the character is a starter, not a mark.
static uint32_t nfc_combining_class(uint32_t code) {
    size_t low = 0, high = unicode_combining_classes_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (code > unicode_combining_classes[middle].last)
            low = middle + 1;
        else
            high = middle;
    }
    return low < unicode_combining_classes_count && code >= unicode_combining_classes[low].first
               ? unicode_combining_classes[low].combining
               : 0;
}

// out = the full canonical decomposition of a character, at most NFC_MAX_PARTS; returns how many characters it has.
static int nfc_decompose(uint32_t code, uint32_t *out) {
    if (code >= HANGUL_SYLLABLES && code < HANGUL_SYLLABLES + HANGUL_SYLLABLE_COUNT) {
        const uint32_t syllable = code - HANGUL_SYLLABLES, trail = syllable % HANGUL_TRAIL_COUNT;
        out[0] = HANGUL_LEADS + syllable / (HANGUL_VOWEL_COUNT * HANGUL_TRAIL_COUNT);
        out[1] = HANGUL_VOWELS + syllable / HANGUL_TRAIL_COUNT % HANGUL_VOWEL_COUNT;
        out[2] = HANGUL_TRAILS + trail;
        return trail ? 3 : 2;
    }
    size_t low = 0, high = unicode_decompositions_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (code > unicode_decompositions[middle][0])
            low = middle + 1;
        else
            high = middle;
    }
    if (low == unicode_decompositions_count || code != unicode_decompositions[low][0]) {
        out[0] = code;
        return 1;
    }
    const int first = nfc_decompose(unicode_decompositions[low][1], out);
    return unicode_decompositions[low][2] ? first + nfc_decompose(unicode_decompositions[low][2], out + first) : first;
}

// Returns the character that two characters compose to; 0: they do not compose.
static uint32_t nfc_compose(uint32_t first, uint32_t second) {
    const uint32_t lead = first - HANGUL_LEADS, vowel = second - HANGUL_VOWELS; // a code below wraps around
    const uint32_t syllable = first - HANGUL_SYLLABLES, trail = second - HANGUL_TRAILS;
    if (lead < HANGUL_LEAD_COUNT && vowel < HANGUL_VOWEL_COUNT)
        return HANGUL_SYLLABLES + (lead * HANGUL_VOWEL_COUNT + vowel) * HANGUL_TRAIL_COUNT;
    if (syllable < HANGUL_SYLLABLE_COUNT && syllable % HANGUL_TRAIL_COUNT == 0 && trail - 1 < HANGUL_TRAIL_COUNT - 1)
        return first + trail;
    const uint64_t wanted = (uint64_t)first << 32 | second;
    size_t low = 0, high = unicode_compositions_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const uint32_t *entry = unicode_decompositions[unicode_compositions[middle]];
        const uint64_t pair = (uint64_t)entry[1] << 32 | entry[2];
        if (pair == wanted)
            return entry[0];
        if (pair < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

// Sorts codes (count), all of them marks, by class, stably. Counts classes, since runs may be long. scratch: (count).
static void nfc_sort_marks(uint32_t *codes, size_t count, uint32_t *scratch) {
    size_t places[257] = {0};
    bool sorted = true;
    for (size_t i = 0; i < count; i++) {
        places[nfc_combining_class(codes[i]) + 1]++;
        sorted = sorted && (i == 0 || nfc_combining_class(codes[i - 1]) <= nfc_combining_class(codes[i]));
    }
    if (sorted)
        return;
    for (int i = 1; i <= 256; i++)
        places[i] += places[i - 1];
    for (size_t i = 0; i < count; i++)
        scratch[places[nfc_combining_class(codes[i])]++] = codes[i];
    memcpy(codes, scratch, count * sizeof *codes);
}

// Sorts each run of marks in codes (count) by class (Canonical Ordering Algorithm). scratch: (count).
static void nfc_sort(uint32_t *codes, size_t count, uint32_t *scratch) {
    for (size_t i = 0; i < count;) {
        size_t end = i;
        while (end < count && nfc_combining_class(codes[end]))
            end++;
        if (end - i > 1)
            nfc_sort_marks(codes + i, end - i, scratch);
        i = end + 1;
    }
}

// Combines characters in place, codes (count) from nfc_sort; returns how many remain. A mark joins the last starter
// (class 0) unless a mark between, of its own or a higher class, blocks it. A starter joins only one right before it.
static size_t nfc_compose_all(uint32_t *codes, size_t count) {
    size_t out = 0, starter = SIZE_MAX;
    uint32_t last_class = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t combining = nfc_combining_class(codes[i]);
        const bool adjacent = starter != SIZE_MAX && starter + 1 == out;
        const bool reachable = starter != SIZE_MAX && (adjacent || last_class < combining);
        const uint32_t composed = reachable ? nfc_compose(codes[starter], codes[i]) : 0;
        if (composed) {
            codes[starter] = composed;
            continue;
        }
        if (combining == 0)
            starter = out;
        last_class = combining;
        codes[out++] = codes[i];
    }
    return out;
}

bool nfc_may_change(const unsigned char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (text[i] >= 0xcc) // the lead byte of U+0300 and above; no character below changes or combines
            return true;
    return false;
}

unsigned char *nfc_normalize(const unsigned char *text, size_t bytes, size_t *out_bytes) {
    if (bytes > SIZE_MAX / (8 * NFC_MAX_PARTS))
        return NULL;
    size_t characters = 0;
    for (size_t i = 0; i < bytes; i++)
        characters += (text[i] & 0xc0) != 0x80;
    const size_t most = characters * NFC_MAX_PARTS + 1;
    uint32_t *codes = (uint32_t *)malloc(2 * most * sizeof *codes);
    if (!codes)
        return NULL;
    size_t count = 0;
    for (size_t i = 0; i < bytes;) {
        uint32_t code;
        const int length = utf8_decode(text + i, bytes - i, &code);
        count += (size_t)nfc_decompose(code, codes + count);
        i += length ? (size_t)length : 1;
    }
    uint32_t *scratch = codes + most;
    nfc_sort(codes, count, scratch);
    count = nfc_compose_all(codes, count);
    unsigned char *out = (unsigned char *)scratch; // a character has at most 4 bytes, as many as a code
    *out_bytes = 0;
    for (size_t i = 0; i < count; i++)
        *out_bytes += (size_t)utf8_encode(codes[i], out + *out_bytes);
    memmove(codes, out, *out_bytes);
    return (unsigned char *)codes;
}
