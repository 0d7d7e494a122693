#include "runtime/text/options.h"
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/say.h"      // say_warning
#include "runtime/machine/text_add.h" // text_add
#include <errno.h>                    // errno, ERANGE
#include <limits.h>                   // INT_MIN, INT_MAX
#include <math.h>                     // isfinite
#include <stdint.h>                   // int64_t, uint64_t
#include <stdlib.h>                   // strtod, strtoll
#include <string.h>                   // strlen
#include <strings.h>                  // strcasecmp

// ---- names ----

const char *option_display(char display[OPTION_NAME], const char *name) {
    int i = 0;
    for (; name[i] && i < OPTION_NAME - 1; i++)
        display[i] = name[i] == '_' ? '-' : name[i];
    display[i] = 0;
    return display;
}

static int option_minimum(int a, int b) { return a < b ? a : b; }

// The number of characters inserted, deleted or changed, or neighbors swapped, from a to b: the Damerau-Levenshtein
// distance.
static int option_edit_distance(const char *a, const char *b) {
    const int m = option_minimum((int)strlen(a), OPTION_NAME - 1), n = option_minimum((int)strlen(b), OPTION_NAME - 1);
    int d[OPTION_NAME][OPTION_NAME];
    for (int i = 0; i <= m; i++)
        for (int j = 0; j <= n; j++) {
            d[i][j] = i + j;
            if (i == 0 || j == 0)
                continue;
            const int changed = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            d[i][j] = option_minimum(changed, 1 + option_minimum(d[i - 1][j], d[i][j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = option_minimum(d[i][j], d[i - 2][j - 2] + 1);
        }
    return d[m][n];
}

// Returns the distance of a word from a name: their edit distance, but 1 for a substring of the name (--layers for
// --num-layers).
static int option_name_distance(const char *word, const char *name) {
    return strlen(word) > 2 && strstr(name, word) ? 1 : option_edit_distance(word, name);
}
// nearest = the name, as users write it, that a word is most like, of all options, help and version; returns nearest.
static const char *option_nearest(const struct options *options, const char *word, char nearest[OPTION_NAME]) {
    static const char *const built_in[] = {"help", "version"};
    int best = INT_MAX;
    for (int i = 0; i < 2; i++)
        if (option_name_distance(word, built_in[i]) < best) {
            best = option_name_distance(word, built_in[i]);
            option_display(nearest, built_in[i]);
        }
    for (int i = 0; i < options->count; i++) {
        char name[OPTION_NAME];
        option_display(name, options->rows[i].name);
        if (options->rows[i].kind == OPTION_GROUP || option_name_distance(word, name) >= best)
            continue;
        best = option_name_distance(word, name);
        option_display(nearest, name);
    }
    return nearest;
}

// Whether an option may stand without a value: a bool, or an enum whose first names are false and true.
static bool option_is_flag(const struct option_row *row) {
    return row->kind == OPTION_BOOL || (row->kind == OPTION_ENUM && strncmp(row->argument, "false|true|", 11) == 0);
}
int option_find(const struct options *options, const char *word, bool flags) {
    char wanted[OPTION_NAME], name[OPTION_NAME], candidates[OPTION_TEXT] = "";
    option_display(wanted, word);
    int found = -1, matches = 0;
    for (int i = 0; i < options->count; i++) {
        const struct option_row *row = &options->rows[i];
        if (row->kind == OPTION_GROUP || (flags && !option_is_flag(row)))
            continue;
        option_display(name, row->name);
        if (strcmp(name, wanted) == 0)
            return i;
        if (strncmp(name, wanted, strlen(wanted)) != 0)
            continue;
        found = i;
        matches++;
        text_add(candidates, sizeof candidates, " --%s%s", flags ? "no-" : "", name);
    }
    if (matches > 1)
        fail("option --%s%s is ambiguous; it could be%s", flags ? "no-" : "", wanted, candidates);
    return found;
}

// ---- values ----

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
// text = a list first|second|third in words: "first, second or third".
static void option_choices_text(char *text, size_t size, const char *list) {
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

// Parses an integer. False: the text is no integer. *overflow: a long long can't hold the number.
static bool option_parse_integer(const char *text, long long *value, bool *overflow) {
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    *overflow = errno == ERANGE;
    return (*text == '-' || *text == '+' || (*text >= '0' && *text <= '9')) && end != text && !*end;
}
// Parses an integer without a sign. False: the text is no such integer. *overflow: 64 bits can't hold the number.
static bool option_parse_unsigned(const char *text, unsigned long long *value, bool *overflow) {
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 10);
    *overflow = errno == ERANGE;
    return *text >= '0' && *text <= '9' && !*end; // strtoull itself would take -1 for 2^64-1
}
// Parses a number. False: the text is no number. *overflow: a double can't hold the number, or would hold it as 0.
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
// Parses a size in GNU's units: K = KiB = 1024, KB = 1000. False: the text is no size. *overflow: 2^63 bytes or more. A
// long double holds every 64-bit count exactly.
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

// Returns the value of an OPTION_ENUM's field: a name's position in `argument`.
static int option_enum_value(const void *field) {
    int choice;
    memcpy(&choice, field, sizeof choice); // the field may be of an enum's type
    return choice;
}

// Whether a number is within the limits of a row, if the row has any.
static bool option_in_range(const struct option_row *row, double value) {
    return (row->least == 0 && row->below == 0) || (value >= row->least && value < row->below);
}

// Appends an element to *list, which moves to other memory; the former is freed. The first call, which finds NULL there
// and sets the default, makes the list, empty for an empty text. Returns NULL, or what is wrong.
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

// Reads a text into the field of a bool or an enum; flags also take yes, no, on, off, 1 and 0. Returns NULL, or what is
// wrong with the text: the field is then unchanged.
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

// Returns how a number is out of range: too near to 0, too large, or only that, where the row's limits, which the
// message names next, say the rest.
static const char *option_out_of_range(const struct option_row *row, bool overflow, double number) {
    if (overflow && number > -1 && number < 1)
        return "out of range, too near to 0 to be held";
    if (overflow && number > 0 && isinf(row->below))
        return "out of range, more than can be held";
    return "out of range";
}

// Reads a text into the field of a number, within the row's limits. Returns NULL, or what is wrong with the text: the
// field is then unchanged.
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

// Returns where the option's value lies in the struct `values`.
void *option_field(const struct option_row *row, void *values) { return (char *)values + row->offset; }

// Whether a word after the flag is the flag's value.
static bool option_names_value(const struct option_row *row, const char *word) {
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

// ---- the command line ----

// Prints a text in lines of at most 110 columns. The cursor is at `column`; lines after the first are indented to it.
static void option_print_wrapped(FILE *out, const char *text, int column) {
    enum { RIGHT_MARGIN = 110 };
    int at = column;
    for (const char *word = text; *word;) {
        const int length = (int)strcspn(word, " ");
        if (at > column && at + 1 + length > RIGHT_MARGIN) {
            fprintf(out, "\n%*s", column, "");
            at = column;
        }
        at += fprintf(out, "%s%.*s", at > column ? " " : "", length, word);
        word += length + (word[length] == ' ');
    }
    fputc('\n', out);
}

// Prints the help of one option: its name and argument, what it does, its default.
static void option_help(FILE *out, const struct option_row *row) {
    enum { COLUMN = 38, WIDEST_LIST = 40 };
    char name[OPTION_NAME], list[OPTION_TEXT] = "", text[2 * OPTION_TEXT];
    const bool listed = row->kind == OPTION_ENUM && strlen(row->argument) > WIDEST_LIST; // too wide beside the name
    if (listed)
        option_choices_text(list, sizeof list, row->argument);
    const char *const argument = listed ? "NAME" : row->argument;
    int at = fprintf(out, "  --%s%s%s", option_display(name, row->name), *argument ? " " : "", argument);
    if (at > COLUMN - 2) {
        fputc('\n', out);
        at = 0;
    }
    snprintf(text, sizeof text, "%s%s%s [%s]", row->help, listed ? ": " : "", list,
             *row->default_text ? row->default_text : "none");
    fprintf(out, "%*s", COLUMN - at, "");
    option_print_wrapped(out, text, COLUMN);
}

// Prints the help: usage, all options under their headings, the notes.
void options_help(const struct options *options, FILE *out) {
    fprintf(out, "Usage: %s [--OPTION VALUE]...\n%s The default of each option is in brackets.\n", options->program,
            options->summary);
    for (int i = 0; i < options->count; i++)
        if (options->rows[i].kind == OPTION_GROUP)
            fprintf(out, "\n%s:\n", options->rows[i].name);
        else
            option_help(out, &options->rows[i]);
    fprintf(out, "\n  -h, --help     Print this and exit\n      --version  Print the version and how this was built, "
                 "and exit\n\n");
    fputs(options->notes, out);
}

// Sets each option in `values`, where lists are NULL before, to the default of its row.
void options_set_defaults(const struct options *options, void *values) {
    for (int i = 0; i < options->count; i++)
        if (options->rows[i].kind != OPTION_GROUP)
            option_set(&options->rows[i], values, options->rows[i].default_text);
}

// A word of the command line that begins with two dashes, taken apart.
struct option_word {
    int row;           // which option
    const char *value; // what follows the =, NULL without one
    bool negated;      // --no-NAME
};

// Takes a word that begins with two dashes apart; ends the program where it names no option or several.
static struct option_word option_word_read(const struct options *options, const char *word) {
    struct option_word result = {-1, NULL, false};
    char name[OPTION_NAME], nearest[OPTION_NAME];
    const size_t length = strcspn(word + 2, "=");
    snprintf(name, sizeof name, "%.*s", (int)length, word + 2);
    if (length > 0 && length < sizeof name) {
        result.row = option_find(options, name, false);
        if (result.row < 0 && strncmp(name, "no-", 3) == 0 && name[3]) {
            result.row = option_find(options, name + 3, true);
            result.negated = true;
        }
    }
    if (result.row < 0)
        fail("unknown option %.*s; the nearest is --%s (--help lists all)", (int)length + 2, word,
             option_nearest(options, name, nearest));
    if (word[2 + length])
        result.value = word + 2 + length + 1;
    if (result.negated && result.value)
        fail("option --%s takes no value; write --%s=%s", name, name + 3, result.value);
    return result;
}

// Prints the version, and how the program was built.
static void options_version(const struct options *options) {
    printf("%s\n", options->version);
    if (options->describe_build)
        options->describe_build();
}

// Prints what the word --help or --version asks for and ends the program; does nothing for another word.
static void option_help_or_version(const struct options *options, const char *word) {
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "-?") == 0)
        options_help(options, stdout);
    else if (strcmp(word, "--version") == 0)
        options_version(options);
    else
        return;
    exit(fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
}

void options_parse(const struct options *options, void *values, bool *given, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *const word = argv[i];
        option_help_or_version(options, word);
        if (word[0] != '-' || !word[1])
            fail("'%s' is not an option; options are written --name VALUE or --name=VALUE (--help lists them)", word);
        if (word[1] != '-')
            fail("unknown option %s; options begin with two dashes (--help lists them)", word);
        const struct option_word parsed = option_word_read(options, word);
        const struct option_row *row = &options->rows[parsed.row];
        const char *value = parsed.value;
        const char *const next = i + 1 < argc ? argv[i + 1] : NULL;
        char name[OPTION_NAME], expected[OPTION_TEXT], text[OPTION_TEXT];
        option_display(name, row->name);
        if (option_is_flag(row) && !value) {
            value = parsed.negated ? "false" : "true";
            if (!parsed.negated && next && option_names_value(row, next))
                value = argv[++i];
        } else if (!value) {
            option_expected(row, expected);
            if (!next || strncmp(next, "--", 2) == 0)
                fail("option --%s needs a value: expected %s%s", name, expected,
                     next ? " (one that begins with dashes is written after a =)" : "");
            value = argv[++i];
        }
        const char *const before =
            row->flags & OPTION_ONCE && given[parsed.row] ? option_text(text, row, values) : value;
        if (strcmp(before, value) != 0)
            say_warning("--%s is given twice; '%s' counts, '%s' does not", name, value, before);
        option_set(row, values, value);
        given[parsed.row] = true;
    }
}

void options_fill(const struct options *options, void *values, const bool *given, const char *const *texts) {
    for (; *texts; texts++) {
        char name[OPTION_NAME];
        const size_t length = strcspn(*texts, "=");
        snprintf(name, sizeof name, "%.*s", (int)length, *texts);
        const int row = option_find(options, name, false);
        if (row < 0)
            fail("a preset sets the unknown option --%s", name);
        if (!given[row])
            option_set(&options->rows[row], values, *texts + length + 1);
    }
}

void options_write_json(const struct options *options, const void *values, struct json *json) {
    for (int i = 0; i < options->count; i++) {
        const struct option_row *row = &options->rows[i];
        const void *const field = (const char *)values + row->offset;
        char name[OPTION_NAME];
        switch (row->kind) {
        case OPTION_GROUP: break;
        case OPTION_INT: json_int(json, row->name, *(const int *)field); break;
        case OPTION_INT64:
        case OPTION_BYTES: json_int(json, row->name, *(const int64_t *)field); break;
        case OPTION_UINT64: json_uint(json, row->name, *(const uint64_t *)field); break;
        case OPTION_FLOAT: json_float(json, row->name, *(const float *)field); break;
        case OPTION_DOUBLE: json_double(json, row->name, *(const double *)field); break;
        case OPTION_BOOL: json_bool(json, row->name, *(const bool *)field); break;
        case OPTION_ENUM:
            option_choice_name(row->argument, option_enum_value(field), name);
            if (option_is_flag(row) && option_enum_value(field) < 2) // false, true
                json_bool(json, row->name, option_enum_value(field) == 1);
            else
                json_str(json, row->name, name);
            break;
        case OPTION_STRING:
        case OPTION_LIST: json_str(json, row->name, *(const char *const *)field); break;
        }
    }
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
