// Items of tasks that are scored by likelihood: JSONL, an object a line, in any order and mixture of tasks.
//     {"task": "arc_easy", "id": "Mercury_1", "context": TEXT, "choices": [TEXT, ...], "gold": 2}
//     {"task": "winogrande", "contexts": [TEXT, ...], "continuation": TEXT, "gold": 0}    scored: the continuation
//     {"task": "lambada", "context": TEXT, "continuation": TEXT}                 right: each token the likeliest
// "delimiter" stands between context and what is scored; its default is a space. "id", a text or an integer, is written
// beside the scores, and is the line's number by default. "task" is by default the file's name without its ending.
// Blank lines are skipped. Members of other names are refused: a misspelt "delimiter" would change scores in silence.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <jansson.h>                    // json_t
#include <stdbool.h>                    // bool
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

struct eval_item {
    const char *file; // the caller's, for messages
    int64_t line;     // from 1
    char *task;
    json_t *root;      // the line
    json_t *varied;    // in root: the choices, or the contexts; NULL: there is one continuation, without alternatives
    const char *fixed; // in root: the context where choices vary, else the continuation
    const char *delimiter, *context; // in root, or constant; context: where nothing varies
    bool contexts_vary;
    int gold;  // -1 where nothing varies
    int count; // texts to score: 1 where nothing varies
};
struct eval_items {
    int64_t count, room;
    struct eval_item *all;
};

__BEGIN_DECLS
// Appends a file's items to *items, zeroed before the first file; eval_items_free frees it. `name`, the file's, must
// outlive the items; `data` need not. An error begins with file and line; the items of the lines before it stay.
const char *eval_items_parse(struct eval_items *items, const unsigned char *data, uint64_t bytes, const char *name,
                             struct error_text *error);
void eval_items_free(struct eval_items *items); // zeroed is fine

// Returns the context of text `i` of an item, i < count; the item owns the text.
const char *eval_item_context(const struct eval_item *item, int i);
// Returns the continuation of text `i`, without the delimiter before the continuation; the item owns the text.
const char *eval_item_continuation(const struct eval_item *item, int i);
// Returns the text by whose length acc_norm and acc_bytes divide: choice or context `i`, else the only continuation.
const char *eval_item_normalizing_text(const struct eval_item *item, int i);

// The number of characters of a UTF-8 text.
int64_t eval_characters(const char *text);
// The number of bytes before the white space at a text's end, as Python's str.rstrip sees it: Unicode's, U+001C to 1F.
size_t eval_length_without_space(const char *text);
__END_DECLS
