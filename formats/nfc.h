// Unicode's canonical composition, NFC (UAX #15), which Qwen's tokenizers ask for before they split text: an "e" and a
// combining acute become one character.
//
// The tables are those of the `tokenizers` package, which normalises by Unicode 9 and leaves some hundred newer marks
// where they stand. The same is done here, since other ids would be worse than an unsorted mark.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// False where NFC certainly leaves well-formed UTF-8 as it is; true may be said for nothing.
bool nfc_may_change(const unsigned char *text, size_t bytes);
// Well-formed UTF-8 in NFC, *out_bytes of it; the caller frees it. NULL when out of memory.
unsigned char *nfc_normalize(const unsigned char *text, size_t bytes, size_t *out_bytes);
__END_DECLS
