#include "formats/eval_items.h"
#include "runtime/text/json_parse.h" // json_parse_object
#include "runtime/text/utf8.h"       // utf8_decode, unicode_is_space
#include <stdio.h>                   // snprintf
#include <stdlib.h>                  // realloc
#include <string.h>                  // memchr

enum { MAX_CHOICES = 1 << 16, WHERE = 512 };

// Refuses an object with a member that items don't have. where: the file and the line, for messages.
static const char *check_members(const json_t *root, const char *where, struct error_text *error) {
    static const char known[] = " task id context contexts continuation choices gold delimiter ";
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)root, key, value) {
        char member[64];
        const bool fits = (size_t)snprintf(member, sizeof member, " %s ", key) < sizeof member;
        if (!fits || strchr(key, ' ') || !strstr(known, member))
            return error_format(error, "%s: has the member \"%s\"; expected%.*s", where, json_show(key).text,
                                (int)sizeof known - 2, known);
    }
    return NULL;
}

// Sets item->varied to the line's array `key`, which must have 1 to MAX_CHOICES texts, and item->count to its length.
static const char *read_varied(struct eval_item *item, const char *key, const char *where, struct error_text *error) {
    RETURN_PROBLEM(json_get_array(item->root, key, &item->varied, where, error));
    const size_t count = json_array_size(item->varied);
    if (count == 0 || count > MAX_CHOICES)
        return error_format(error, "%s: %s has %zu texts; expected 1 to %d", where, key, count, (int)MAX_CHOICES);
    for (size_t i = 0; i < count; i++) {
        char name[64];
        const char *text;
        snprintf(name, sizeof name, "%s[%zu]", key, i);
        RETURN_PROBLEM(json_check_string(json_array_get(item->varied, i), name, &text, where, error));
    }
    item->count = (int)count;
    return NULL;
}

// Sets item->gold to the member `gold`, which must be an index of the texts that vary.
static const char *read_gold(struct eval_item *item, const char *where, struct error_text *error) {
    const json_t *gold = json_object_get(item->root, "gold");
    if (!json_is_integer(gold))
        return error_format(error, "%s: gold is %s; expected the number of the right %s, from 0", where,
                            json_type_name(gold), item->contexts_vary ? "context" : "choice");
    const json_int_t value = json_integer_value(gold);
    if (value < 0 || value >= item->count)
        return error_format(error, "%s: gold is %lld; expected 0 to %d, a number of %s", where, (long long)value,
                            item->count - 1, item->contexts_vary ? "contexts" : "choices");
    item->gold = (int)value;
    return NULL;
}

// Sets an item's texts, gold and count from its line's members, in one of the three forms of eval_items.h.
static const char *read_texts(struct eval_item *item, const char *where, struct error_text *error) {
    const json_t *root = item->root;
    const bool choices = json_has(root, "choices"), contexts = json_has(root, "contexts");
    item->gold = -1;
    item->count = 1;
    item->contexts_vary = contexts;
    if (choices + json_has(root, "continuation") != 1 || (choices && contexts) || json_has(root, "context") == contexts)
        return error_format(error,
                            "%s: expected \"context\" and \"choices\", \"contexts\" and \"continuation\", or "
                            "\"context\" and \"continuation\"",
                            where);
    if (choices) {
        RETURN_PROBLEM(json_get_string(root, "context", &item->fixed, where, error));
        RETURN_PROBLEM(read_varied(item, "choices", where, error));
        return read_gold(item, where, error);
    }
    RETURN_PROBLEM(json_get_string(root, "continuation", &item->fixed, where, error));
    if (!contexts)
        return json_get_string(root, "context", &item->context, where, error);
    RETURN_PROBLEM(read_varied(item, "contexts", where, error));
    return read_gold(item, where, error);
}

// Fills an item whose root, file and line are set. The caller calls free_item, after an error too.
static const char *read_item(struct eval_item *item, const char *where, struct error_text *error) {
    const char *task;
    const json_t *id = json_object_get(item->root, "id");
    const char *slash = strrchr(item->file, '/'), *base = slash ? slash + 1 : item->file, *dot = strrchr(base, '.');
    RETURN_PROBLEM(check_members(item->root, where, error));
    RETURN_PROBLEM(json_opt_string(item->root, "task", NULL, &task, where, error));
    RETURN_PROBLEM(json_opt_string(item->root, "delimiter", " ", &item->delimiter, where, error));
    if (id && !json_is_null(id) && !json_is_string(id) && !json_is_integer(id))
        return error_format(error, "%s: id is %s; expected a text or an integer", where, json_type_name(id));
    RETURN_PROBLEM(read_texts(item, where, error));
    item->task = task ? strdup(task) : strndup(base, dot && dot > base ? (size_t)(dot - base) : strlen(base));
    return item->task ? NULL : error_format(error, "%s: out of memory", where);
}

// Returns a zeroed item behind the last; the caller then raises items->count. Items may move. NULL when out of memory.
static struct eval_item *append_item(struct eval_items *items) {
    if (items->count == items->room) {
        const int64_t room = items->room > 0 ? 2 * items->room : 256;
        void *larger = realloc(items->all, (size_t)room * sizeof *items->all);
        if (!larger)
            return NULL;
        items->all = (struct eval_item *)larger;
        items->room = room;
    }
    struct eval_item *item = &items->all[items->count];
    memset(item, 0, sizeof *item);
    return item;
}
static void free_item(struct eval_item *item) {
    json_decref(item->root);
    free(item->task);
}

static bool is_blank(const unsigned char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (!strchr(" \t\r", text[i]) || !text[i])
            return false;
    return true;
}

const char *eval_items_parse(struct eval_items *items, const unsigned char *data, uint64_t bytes, const char *name,
                             struct error_text *error) {
    char where[WHERE];
    int64_t line = 0;
    for (uint64_t at = 0; at < bytes;) {
        const unsigned char *newline = (const unsigned char *)memchr(data + at, '\n', bytes - at);
        const uint64_t length = newline ? (uint64_t)(newline - data) - at : bytes - at;
        const unsigned char *text = data + at;
        at += length + 1;
        line++;
        if (is_blank(text, length))
            continue;
        snprintf(where, sizeof where, "%s:%lld", name, (long long)line);
        struct eval_item *item = append_item(items);
        if (!item)
            return error_format(error, "%s: out of memory", where);
        item->file = name;
        item->line = line;
        const char *problem = json_parse_object(&item->root, text, length, where, error);
        if (!problem)
            problem = read_item(item, where, error);
        if (problem) {
            free_item(item);
            return problem;
        }
        items->count++;
    }
    return NULL;
}

void eval_items_free(struct eval_items *items) {
    for (int64_t i = 0; i < items->count; i++)
        free_item(&items->all[i]);
    free(items->all);
    memset(items, 0, sizeof *items);
}

const char *eval_item_normalizing_text(const struct eval_item *item, int i) {
    return item->varied ? json_string_value(json_array_get(item->varied, (size_t)i)) : item->fixed;
}
const char *eval_item_context(const struct eval_item *item, int i) {
    if (!item->varied)
        return item->context;
    return item->contexts_vary ? eval_item_normalizing_text(item, i) : item->fixed;
}
const char *eval_item_continuation(const struct eval_item *item, int i) {
    return item->contexts_vary || !item->varied ? item->fixed : eval_item_normalizing_text(item, i);
}

int64_t eval_characters(const char *text) {
    int64_t count = 0;
    for (; *text; text++)
        count += ((unsigned char)*text & 0xC0) != 0x80;
    return count;
}

size_t eval_length_without_space(const char *text) {
    const size_t bytes = strlen(text);
    size_t length = 0;
    for (size_t at = 0; at < bytes;) {
        uint32_t code;
        const int read = utf8_decode((const unsigned char *)text + at, bytes - at, &code);
        at += read > 0 ? (size_t)read : 1;
        if (read <= 0 || !(unicode_is_space(code) || (code >= 0x1C && code <= 0x1F)))
            length = at;
    }
    return length;
}
