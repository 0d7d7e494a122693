// Inside the reading of a tokenizer.json: members by name and type. What is not known is refused by name, so that no
// file is read as what it is not. Functions that take `r` return NULL, or what is wrong, in r->error.
#pragma once
#include <jansson.h>   // json_t
#include <stdbool.h>   // bool
#include <stdint.h>    // int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "formats/tokenizer_tables.h" // struct tokenizer_tables

enum { TOKENIZER_MAX_IDS = 1 << 26 };

struct tokenizer_reader {
    struct tokenizer *tokenizer;
    struct tokenizer_tables *tables; // of the tokenizer
    const char *name;                // the file, for messages
    struct error_text *error;
};

__BEGIN_DECLS
// Refuses what is no object or has a member that `allowed` lacks, names as in " type content ". where: for messages.
const char *reader_only_members(struct tokenizer_reader *r, const json_t *object, const char *where,
                                const char *allowed);
// *parts = the list `key` of a Sequence, in its object; refuses what is no list, and other members. where: for messages.
const char *reader_sequence(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                            const json_t **parts);
// *value = the flag `key` of the object, `where` in messages; unchanged where it is absent or null.
const char *reader_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                        bool *value);
// Refuses the flag `key` where its value is `refused`; absent or null passes.
const char *reader_refuse_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                               bool refused);
// Refuses the member `key`, unless it is absent, null or "". reader_expect_text refuses it, unless it is `expected`.
const char *reader_refuse_text(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key);
const char *reader_expect_text(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                               const char *expected);
// Returns the "type" of a component, which owns the text; "": it has none, is no object or is NULL.
const char *reader_type(const json_t *object);
// Returns the text, never NULL, that refuses a component (NULL: null) by its type, with the types that are expected.
const char *reader_refuse_type(struct tokenizer_reader *r, const json_t *object, const char *where,
                               const char *expected);
// *id = `number`, the id of a token, from 0 to TOKENIZER_MAX_IDS - 1; refuses others. token: its text, for messages.
const char *reader_id(struct tokenizer_reader *r, const json_t *number, const char *token, int32_t *id);
__END_DECLS
