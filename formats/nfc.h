// Unicode's canonical composition, NFC (UAX #15), which Qwen's tokenizers apply before they split text: an "e" and a
// combining acute become one character. The tables are the `tokenizers` package's, of Unicode 9, so that ids agree.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Whether NFC may change the text, which is well-formed UTF-8. The check is quick: only false is certain.
bool nfc_may_change(const unsigned char *text, size_t bytes);
// Returns the NFC of well-formed UTF-8, *out_bytes long without a 0 at the end. The caller frees it. NULL: no memory.
unsigned char *nfc_normalize(const unsigned char *text, size_t bytes, size_t *out_bytes);
__END_DECLS
