// The regular expression by which a tokenizer splits text, run by PCRE2. tokenizer.json's patterns are written for
// Oniguruma. Syntax that both engines read alike is accepted. What differs is rewritten (white space; characters newer
// than the linked PCRE2) or refused by name: anchors, \w, \b, \h, nested classes, options other than (?i:...), {n}+ and
// so on. A pattern's meaning never changes silently. Texts must be well-formed UTF-8. Errors are texts in `error`.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

struct split_pattern; // a compiled pattern
struct split_search;  // the memory and the limits that one thread searches with

__BEGIN_DECLS
// *pattern = the compiled regex (bytes, then a 0), for split_pattern_free; NULL after an error. name: for messages.
const char *split_pattern_compile(struct split_pattern **pattern, const char *regex, size_t bytes, const char *name,
                                  struct error_text *error);
void split_pattern_free(struct split_pattern *pattern); // NULL is fine

// Returns a search for one thread; its limit of steps suits texts of up to `longest` bytes. NULL when out of memory.
struct split_search *split_search_create(size_t longest);
// Frees a search of split_search_create, with all that it holds. Does nothing for NULL.
void split_search_free(struct split_search *search); // NULL is fine
// Finds the first match from byte `from` on, where a character begins. Returns 1 and its bytes [*begin, *end), which
// may be none; 0: no match; below 0: a limit of steps or memory was exceeded. Lookbehinds see the text before `from`.
int split_pattern_find(const struct split_pattern *pattern, const struct split_search *search,
                       const unsigned char *text, size_t bytes, size_t from, size_t *begin, size_t *end);
__END_DECLS
