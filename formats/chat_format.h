// The form of a chat: what stands before and after its turns. It is chat_format.json in a model's folder, which
// scripts/chat_format.py derives from the model's chat template.
//  {"version": 1, "begin": "<|begin_of_text|>", "roles": {"system": {"before": "..", "after": ".."}, "user": {..},
//   "assistant": {..}}, "default_system": null, "trim": true, "stop": ["<|eot_id|>"]}
// A chat is `begin`, then for each turn before, content and after. roles.assistant.before asks for an answer.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdbool.h>                    // bool
#include <stdint.h>                     // uint64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_ROLES };
enum { CHAT_MAX_STOPS = 16 };

// chat_format_free frees the texts.
struct chat_format {
    char *begin;
    struct {
        char *before, *after;
    } roles[CHAT_ROLES];
    char *default_system; // content of the system turn that a chat without one gets; NULL: it gets none
    bool trim;            // white space around contents is left out
    char *stops[CHAT_MAX_STOPS];
    int stop_count; // 1 at least
};

__BEGIN_DECLS
// Reads *format from a file; chat_format_free frees it. Returns NULL, or the problem: then there is nothing to free.
const char *chat_format_read(struct chat_format *format, const char *path, struct error_text *error);
// Reads *format, as chat_format_read does, from a file's bytes, which may be malformed. name: the file's, for messages.
const char *chat_format_parse(struct chat_format *format, const unsigned char *data, uint64_t bytes, const char *name,
                              struct error_text *error);
void chat_format_free(struct chat_format *format);
__END_DECLS
