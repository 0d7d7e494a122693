#include "runtime/machine/launched.h"
#include "runtime/machine/text_add.h" // text_add
#include <string.h>                   // strcmp

// One layer's backward enqueues some 30 kernels; a queue that is deeper is of no help to a reader.
enum { NAMES = 12 };
static const char *names[NAMES]; // the newest is names[(noted - 1) % NAMES]
static unsigned noted;

void launched_record(const char *name) {
    const unsigned at = __atomic_fetch_add(&noted, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&names[at % NAMES], name, __ATOMIC_RELAXED);
}

static int is_of_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}
// Returns the name in an expression's text, *length characters: the first word that ends with _kernel, else all of it.
static const char *find_name(const char *text, int *length) {
    static const char end[] = "_kernel";
    const char *at = text;
    while ((at = strstr(at, end)) != NULL && is_of_word(at[sizeof end - 1]))
        at += sizeof end - 1;
    const char *begin = at ? at : text;
    while (at && begin > text && is_of_word(begin[-1]))
        begin--;
    *length = at ? (int)(at - begin) + (int)sizeof end - 1 : (int)strlen(text);
    return begin;
}

const char *launched_last(char *text, size_t size) {
    const unsigned end = __atomic_load_n(&noted, __ATOMIC_RELAXED);
    const char *newer = "";
    int newer_length = 0;
    text[0] = 0;
    for (unsigned i = 1; i <= NAMES && i <= end; i++) {
        const char *const expression = __atomic_load_n(&names[(end - i) % NAMES], __ATOMIC_RELAXED);
        int length = 0;
        const char *const name = find_name(expression ? expression : "", &length);
        if (length != newer_length || strncmp(name, newer, (size_t)length) != 0)
            text_add(text, size, "%s%.*s", *text ? ", " : "", length, name);
        newer = name;
        newer_length = length;
    }
    return text;
}
