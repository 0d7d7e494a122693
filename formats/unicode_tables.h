// The Unicode tables of nfc.c and split_pattern.c. scripts/make_unicode_tables.py writes formats/unicode_tables.c.
#pragma once
#include <stddef.h>    // size_t
#include <stdint.h>    // uint32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

// Code points first..last share a general category ("Lu").
struct unicode_category {
    uint32_t first, last;
    char category[3];
};
// Code points first..last share a canonical combining class.
struct unicode_combining {
    uint32_t first, last, combining;
};

__BEGIN_DECLS
// The code points assigned after Unicode 14, in Unicode 15 and 16. In the order of the code points.
extern const struct unicode_category unicode_newer_categories[];
extern const size_t unicode_newer_categories_count;

// The combining classes that are not 0. In the order of the code points.
extern const struct unicode_combining unicode_combining_classes[];
extern const size_t unicode_combining_classes_count;

// Canonical decompositions except Hangul's: code point, first part, second part (0: none). In the code points' order.
extern const uint32_t unicode_decompositions[][3];
extern const size_t unicode_decompositions_count;

// Indices of the decompositions that NFC composes again, in the order of (first part, second part).
extern const uint16_t unicode_compositions[];
extern const size_t unicode_compositions_count;
__END_DECLS
