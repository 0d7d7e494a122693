// Reads members of a tokenizer.json, by name and type, for the files that read a tokenizer. What is not known is
// refused by name: no file is read as what it is not. Functions that take `r` return NULL, or a problem, in r->error.
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
// Refuses what is no object, or has a member that `allowed` (as " type content ") does not list. where: for messages.
const char *reader_only_members(struct tokenizer_reader *r, const json_t *object, const char *where,
                                const char *allowed);
// *parts = the list `key` of a Sequence, which must have no other members but its type. where: for messages.
const char *reader_sequence(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                            const json_t **parts);
// *value = the flag `key` of an object; stays where the flag is absent or null. where: the object, for messages.
const char *reader_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                        bool *value);
// Refuses the flag `key` where its value is `refused`; absent or null passes.
const char *reader_refuse_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                               bool refused);
// Refuses the member `key`, unless it is absent, null or "".
const char *reader_refuse_text(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key);
// Refuses the member `key`, unless it is the text `expected`.
const char *reader_expect_text(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                               const char *expected);
// Returns the "type" of a component, which owns the text; "": it has none, is no object or is NULL.
const char *reader_type(const json_t *object);
// Refuses a component, or NULL, for its type. Returns the problem, never NULL, which names the types that are expected.
const char *reader_refuse_type(struct tokenizer_reader *r, const json_t *object, const char *where,
                               const char *expected);
// *id = `number`, which must be a token's id, 0 to TOKENIZER_MAX_IDS - 1. token: the token's text, for messages.
const char *reader_id(struct tokenizer_reader *r, const json_t *number, const char *token, int32_t *id);
__END_DECLS
