#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_add
#include "runtime/text/options.h"
#include <errno.h>   // errno, ERANGE
#include <limits.h>  // INT_MIN, INT_MAX
#include <math.h>    // isfinite
#include <stdint.h>  // int64_t, uint64_t
#include <stdlib.h>  // strtod, strtoll
#include <string.h>  // strlen
#include <strings.h> // strcasecmp

const char *option_display(char display[OPTION_NAME], const char *name) {
    int i = 0;
    for (; name[i] && i < OPTION_NAME - 1; i++)
        display[i] = name[i] == '_' ? '-' : name[i];
    display[i] = 0;
    return display;
}

bool option_is_flag(const struct option_row *row) {
    return row->kind == OPTION_BOOL || (row->kind == OPTION_ENUM && strncmp(row->argument, "false|true|", 11) == 0);
}

static const char option_bool_names[] = "false|true|no|yes|off|on|0|1"; // false and true in turn

int option_choice(const char *list, const char *text) {
    const size_t length = strlen(text);
    int position = 0;
    for (const char *name = list;; name++, position++) {
        const size_t end = strcspn(name, "|");
        if (end == length && strncasecmp(name, text, length) == 0)
            return position;
        name += end;
        if (!*name)
            return -1;
    }
}
// name = the name at a position, which the list has; returns name.
const char *option_choice_name(const char *list, int position, char name[OPTION_NAME]) {
    for (; position > 0; position--)
        list += strcspn(list, "|") + 1;
    snprintf(name, OPTION_NAME, "%.*s", (int)strcspn(list, "|"), list);
    return name;
}
void option_choices_text(char *text, size_t size, const char *list) {
    text[0] = 0;
    for (const char *name = list;;) {
        const size_t end = strcspn(name, "|");
        const bool last = !name[end];
        const char *separator = name == list ? "" : last ? " or " : ", ";
        text_add(text, size, "%s%.*s", separator, (int)end, name);
        if (last)
            return;
        name += end + 1;
    }
}

// Returns what a value of this kind is, in words; "": a heading or an enum.
static const char *option_kind_text(enum option_kind kind) {
    switch (kind) {
    case OPTION_INT:
    case OPTION_INT64: return "an integer";
    case OPTION_UINT64: return "an integer from 0 to 2^64-1";
    case OPTION_FLOAT:
    case OPTION_DOUBLE: return "a number";
    case OPTION_BYTES: return "a size like 6GiB, 512MiB or 1e9";
    case OPTION_BOOL: return "true or false";
    case OPTION_STRING:
    case OPTION_LIST: return "text";
    case OPTION_GROUP:
    case OPTION_ENUM: break; // a heading has no value, an enum's values are in its row
    }
    return "";
}
void option_expected(const struct option_row *row, char text[OPTION_TEXT]) {
    if (row->kind == OPTION_ENUM)
        option_choices_text(text, OPTION_TEXT, row->argument);
    else
        snprintf(text, OPTION_TEXT, "%s", option_kind_text(row->kind));
    if (row->least == 0 && row->below == 0)
        return;
    text_add(text, OPTION_TEXT, " of at least %.10g", row->least);
    if (isfinite(row->below))
        text_add(text, OPTION_TEXT, " and below %.10g", row->below);
}

// Parses a decimal integer. False if the text is none. *overflow, with true: a long long can't hold the number.
static bool option_parse_integer(const char *text, long long *value, bool *overflow) {
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    *overflow = errno == ERANGE;
    return (*text == '-' || *text == '+' || (*text >= '0' && *text <= '9')) && end != text && !*end;
}
// Parses an integer without a sign. False if the text is no such integer. *overflow: 64 bits can't hold the number.
static bool option_parse_unsigned(const char *text, unsigned long long *value, bool *overflow) {
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 10);
    *overflow = errno == ERANGE;
    return *text >= '0' && *text <= '9' && !*end; // strtoull itself would take -1 for 2^64-1
}
// Parses a decimal number. False for any other text, nan too. *overflow: a double can't hold the number, or only as 0.
static bool option_parse_number(const char *text, double *value, bool *overflow) {
    char *end;
    *value = strtod(text, &end);
    *overflow = false;
    if (end == text || *end || text[strspn(text, "0123456789+-.eE")]) // strtod takes nan, inf, blanks, 0x10 as well
        return false;
    const char first = text[strcspn(text, "123456789eE")]; // a digit before the exponent: the number is not 0
    *overflow = isinf(*value) || (*value == 0 && first >= '1' && first <= '9');
    return true;
}
// Parses a size in GNU's units (K, KiB: 1024; KB: 1000). Returns false if `text` is no size. A size of 2^63 or more,
// judged exactly, sets *overflow, and the result is true then.
static bool option_parse_bytes(const char *text, int64_t *value, bool *overflow) {
    static const char letters[] = "kmgtp";
    char *unit;
    long double bytes = strtold(text, &unit);
    *overflow = false;
    if (!((*text >= '0' && *text <= '9') || *text == '.') || unit == text || strpbrk(text, "xX"))
        return false;
    const char *letter = *unit ? strchr(letters, *unit | 0x20) : NULL;
    if (letter) {
        unit++;
        const bool decimal = strcasecmp(unit, "b") == 0;
        if (!decimal && *unit && strcasecmp(unit, "ib") != 0)
            return false;
        for (long k = letter - letters; k >= 0; k--)
            bytes *= decimal ? 1000 : 1024;
    } else if (*unit && strcasecmp(unit, "b") != 0)
        return false;
    *overflow = !(bytes < 0x1p63L);
    *value = *overflow ? 0 : (int64_t)bytes;
    return true;
}

// Returns the value of an OPTION_ENUM's field: the position of its name in the row's `argument`.
static int option_enum_value(const void *field) {
    int choice;
    memcpy(&choice, field, sizeof choice); // the field may be of an enum's type
    return choice;
}

// Whether a value is at least row->least and less than row->below. It always is where both are 0.
static bool option_in_range(const struct option_row *row, double value) {
    return (row->least == 0 && row->below == 0) || (value >= row->least && value < row->below);
}

// Appends a text and OPTION_LIST_END to *list, in new memory, and frees the former list. NULL, which the list is until
// its default is set, counts as an empty list, and "" then adds nothing. Returns NULL, or what is wrong.
static const char *option_append(const char **list, const char *text) {
    if (!*list) {
        *list = "";
        if (!*text)
            return NULL;
    }
    const size_t before = strlen(*list), length = strlen(text);
    char *const longer = (char *)malloc(before + length + 2);
    if (!longer)
        return "too long: out of memory";
    memcpy(longer, *list, before);
    memcpy(longer + before, text, length);
    longer[before + length] = OPTION_LIST_END;
    longer[before + length + 1] = 0;
    if (before > 0)
        free((void *)*list);
    *list = longer;
    return NULL;
}

int option_list_count(const char *list) {
    int count = 0;
    for (; *list; list++)
        count += *list == OPTION_LIST_END;
    return count;
}

// Reads a text into a bool's or an enum's field; flags take yes, no, on, off, 1, 0 too. Returns NULL, or what is wrong.
static const char *option_read_choice(const struct option_row *row, void *field, const char *text) {
    int choice = row->kind == OPTION_ENUM ? option_choice(row->argument, text) : -1;
    if (choice < 0 && option_is_flag(row) && (choice = option_choice(option_bool_names, text)) >= 0)
        choice %= 2;
    if (choice < 0)
        return "not known";
    if (row->kind == OPTION_BOOL)
        *(bool *)field = choice;
    else
        memcpy(field, &choice, sizeof choice);
    return NULL;
}

// Returns in words how a number is out of range, a constant. overflow: the type can't hold it, too large or too near 0.
static const char *option_out_of_range(const struct option_row *row, bool overflow, double number) {
    if (overflow && number > -1 && number < 1)
        return "out of range, too near to 0 to be held";
    if (overflow && number > 0 && isinf(row->below))
        return "out of range, more than can be held";
    return "out of range";
}

// Reads a text into a number's field, within the row's limits. Returns NULL, or what is wrong: the field then stays.
static const char *option_read_number(const struct option_row *row, void *field, const char *text) {
    bool is_number = false, overflow = false;
    long long integer = 0;
    unsigned long long seed = 0;
    double number = 0;
    int64_t bytes = 0;
    switch (row->kind) {
    case OPTION_INT:
        is_number = option_parse_integer(text, &integer, &overflow);
        number = (double)integer;
        overflow = overflow || integer < INT_MIN || integer > INT_MAX;
        break;
    case OPTION_INT64:
        is_number = option_parse_integer(text, &integer, &overflow);
        number = (double)integer;
        break;
    case OPTION_UINT64:
        is_number = option_parse_unsigned(text, &seed, &overflow);
        number = (double)seed;
        break;
    case OPTION_BYTES:
        is_number = option_parse_bytes(text, &bytes, &overflow);
        number = overflow ? INFINITY : (double)bytes;
        break;
    case OPTION_FLOAT:
        is_number = option_parse_number(text, &number, &overflow);
        overflow = overflow || isinf((float)number) || (number != 0 && (float)number == 0);
        number = (float)number; // the limits are for the value that is used: 0.999999999 is 1 as a float
        break;
    case OPTION_DOUBLE: is_number = option_parse_number(text, &number, &overflow); break;
    case OPTION_GROUP:
    case OPTION_BOOL:
    case OPTION_ENUM:
    case OPTION_STRING:
    case OPTION_LIST: break; // no numbers
    }
    if (!is_number)
        return "not understood";
    if (overflow || !option_in_range(row, number))
        return option_out_of_range(row, overflow, number);
    switch (row->kind) {
    case OPTION_INT: *(int *)field = (int)integer; break;
    case OPTION_INT64: *(int64_t *)field = integer; break;
    case OPTION_UINT64: *(uint64_t *)field = seed; break;
    case OPTION_BYTES: *(int64_t *)field = bytes; break;
    case OPTION_FLOAT: *(float *)field = (float)number; break;
    case OPTION_DOUBLE: *(double *)field = number; break;
    case OPTION_GROUP:
    case OPTION_BOOL:
    case OPTION_ENUM:
    case OPTION_STRING:
    case OPTION_LIST: break;
    }
    return NULL;
}

const char *option_read(const struct option_row *row, void *field, const char *text) {
    switch (row->kind) {
    case OPTION_GROUP: return NULL;
    case OPTION_STRING: memcpy(field, &text, sizeof text); return NULL;
    case OPTION_LIST: return option_append((const char **)field, text);
    case OPTION_BOOL:
    case OPTION_ENUM: return option_read_choice(row, field, text);
    case OPTION_INT:
    case OPTION_INT64:
    case OPTION_UINT64:
    case OPTION_FLOAT:
    case OPTION_DOUBLE:
    case OPTION_BYTES: return option_read_number(row, field, text);
    }
    return "not understood"; // not reached: no such kind
}

void *option_field(const struct option_row *row, void *values) { return (char *)values + row->offset; }

bool option_names_value(const struct option_row *row, const char *word) {
    return option_choice(option_bool_names, word) >= 0 ||
           (row->kind == OPTION_ENUM && option_choice(row->argument, word) >= 0);
}

void option_set(const struct option_row *row, void *values, const char *text) {
    const char *const problem = option_read(row, option_field(row, values), text);
    if (!problem)
        return;
    char name[OPTION_NAME], expected[OPTION_TEXT];
    option_expected(row, expected);
    fail("--%s: '%s' is %s; expected %s", option_display(name, row->name), text, problem, expected);
}

const char *option_text(char text[OPTION_TEXT], const struct option_row *row, const void *values) {
    const void *const field = (const char *)values + row->offset;
    text[0] = 0;
    switch (row->kind) {
    case OPTION_GROUP: break;
    case OPTION_INT: snprintf(text, OPTION_TEXT, "%d", *(const int *)field); break;
    case OPTION_INT64:
    case OPTION_BYTES: snprintf(text, OPTION_TEXT, "%lld", (long long)*(const int64_t *)field); break;
    case OPTION_UINT64: snprintf(text, OPTION_TEXT, "%llu", (unsigned long long)*(const uint64_t *)field); break;
    case OPTION_FLOAT: snprintf(text, OPTION_TEXT, "%.9g", (double)*(const float *)field); break;
    case OPTION_DOUBLE: snprintf(text, OPTION_TEXT, "%.17g", *(const double *)field); break;
    case OPTION_BOOL: snprintf(text, OPTION_TEXT, "%s", *(const bool *)field ? "true" : "false"); break;
    case OPTION_ENUM: option_choice_name(row->argument, option_enum_value(field), text); break;
    case OPTION_STRING:
    case OPTION_LIST: return *(const char *const *)field;
    }
    return text;
}
