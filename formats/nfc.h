// Unicode's canonical composition, NFC (UAX #15), which Qwen's tokenizers apply before they split text: an "e" and a
// combining acute become one character.
//
// The tables are those of the `tokenizers` package, which normalizes by Unicode 9 and leaves some hundred newer marks
// unsorted. The same is done here, so that token ids agree.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// A quick check of well-formed UTF-8: false: NFC leaves the text as it is; true: it may or may not.
bool nfc_may_change(const unsigned char *text, size_t bytes);
// The NFC of well-formed UTF-8, *out_bytes, which the caller frees; NULL when out of memory.
unsigned char *nfc_normalize(const unsigned char *text, size_t bytes, size_t *out_bytes);
__END_DECLS
