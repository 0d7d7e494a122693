#include "runtime/text/options.h"
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/say.h"      // say_warning
#include "runtime/machine/text_add.h" // text_add
#include <limits.h>                   // INT_MAX
#include <stdlib.h>                   // exit
#include <string.h>                   // strlen
#include <strings.h>                  // strcasecmp
#include <unistd.h>                   // access

static int option_minimum(int a, int b) { return a < b ? a : b; }

// The number of edits, each of a character or a swap of neighbors, from a to b: the optimal string alignment distance.
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

// Returns a word's edit distance from a name; 1 if the name has the word, of 3 letters or more (layers: num-layers).
static int option_name_distance(const char *word, const char *name) {
    return strlen(word) > 2 && strstr(name, word) ? 1 : option_edit_distance(word, name);
}
static const char *const option_questions[] = {"help", "version"}; // no rows: they print and end the program
// nearest = the name, with - for _, that is most like a word, of all options, help and version. Returns nearest.
static const char *option_nearest(const struct options *options, const char *word, char nearest[OPTION_NAME]) {
    int best = INT_MAX;
    for (int i = 0; i < 2; i++)
        if (option_name_distance(word, option_questions[i]) < best) {
            best = option_name_distance(word, option_questions[i]);
            option_display(nearest, option_questions[i]);
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

// Returns the synonym whose word is `name`, written with dashes or underscores; NULL if there is none.
static const struct option_synonym *option_synonym_of(const struct options *options, const char *name) {
    char word[OPTION_NAME];
    option_display(word, name);
    for (const struct option_synonym *s = options->synonyms; s && s->word; s++)
        if (strcmp(s->word, word) == 0)
            return s;
    return NULL;
}

const char *options_hint(const struct options *options, const char *name, char text[OPTION_TEXT]) {
    char word[OPTION_NAME], nearest[OPTION_NAME];
    const struct option_synonym *const s = option_synonym_of(options, name);
    option_display(word, name);
    if (s) {
        snprintf(text, OPTION_TEXT, "the option here is --%s%s%s", s->name, *s->how ? ": " : "", s->how);
        return text;
    }
    for (int i = 0; i < 2; i++)
        if (strcmp(word, option_questions[i]) == 0) {
            snprintf(text, OPTION_TEXT, "--%s stands only on the command line", word);
            return text;
        }
    snprintf(text, OPTION_TEXT, "the nearest is --%s (--help all lists all)", option_nearest(options, word, nearest));
    return text;
}

const struct option_value *options_value_of(const struct options *options, const struct option_row *row,
                                            const char *word) {
    for (const struct option_value *v = options->values; v && v->word; v++)
        if (strcmp(v->name, row->name) == 0 && strcasecmp(v->word, word) == 0)
            return v;
    return NULL;
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

// Sets each option in `values` to the default of its row. Lists must be NULL before.
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

// Takes apart a word with two dashes in front. Ends the program for no option, several of the name, or --no-NAME=VALUE.
static struct option_word option_word_read(const struct options *options, const char *word) {
    struct option_word result = {-1, NULL, false};
    char name[OPTION_NAME], hint[OPTION_TEXT];
    const size_t length = strcspn(word + 2, "=");
    snprintf(name, sizeof name, "%.*s", (int)length, word + 2);
    if (length > 0 && length < sizeof name) {
        // Another trainer's name is short for nothing: --save OUT must not become --save-best.
        result.row = option_synonym_of(options, name) ? -1 : option_find(options, name, false);
        if (result.row < 0 && strncmp(name, "no-", 3) == 0 && name[3]) {
            result.row = option_find(options, name + 3, true);
            result.negated = true;
        }
    }
    if (result.row < 0)
        fail("unknown option %.*s; %s", (int)length + 2, word, options_hint(options, name, hint));
    if (word[2 + length])
        result.value = word + 2 + length + 1;
    if (result.negated && result.value)
        fail("option --%s takes no value; write --%s=%s", name, name + 3, result.value);
    return result;
}

static void options_print_version(const struct options *options) {
    fputs(options->version, stdout);
    if (options->describe_build)
        options->describe_build();
    else
        putchar('\n');
}

// Prints what --help or --version asks for, then exits; returns for any other word. next: the word after, or NULL.
static void option_help_or_version(const struct options *options, const char *word, const char *next) {
    if (strncmp(word, "--help=", 7) == 0)
        options_help(options, word + 7, stdout);
    else if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "-?") == 0)
        options_help(options, next, stdout);
    else if (strcmp(word, "--version") == 0)
        options_print_version(options);
    else if (strncmp(word, "--version=", 10) == 0)
        fail("option --version takes no value; write --version");
    else
        return;
    exit(fflush(stdout) == 0 && !ferror(stdout) ? EXIT_SUCCESS : EXIT_FAILURE);
}

// Ends the program because an option lacks its value. If the word after it, `next`, is NULL, list_values may answer.
static void option_end_without_value(const struct options *options, const struct option_row *row, const char *next) {
    char name[OPTION_NAME], expected[OPTION_TEXT];
    if (!next && options->list_values && options->list_values(row))
        exit(fflush(stdout) == 0 && !ferror(stdout) ? EXIT_SUCCESS : EXIT_FAILURE);
    option_expected(row, expected);
    fail("option --%s needs a value: expected %s%s", option_display(name, row->name), expected,
         next ? " (one that begins with dashes is written after a =)" : "");
}

// Whether a word names a file that exists and has no character of a pattern or of a list of names.
static bool option_is_file(const char *word) {
    return *word && word[0] != '-' && !word[strcspn(word, ",*?[]{}~\\")] && access(word, F_OK) == 0;
}
// The number of words after argv[at] that name files too, as when a shell expands a pattern; 0 if argv[at] names none.
static int option_files_after(int at, int argc, char **argv) {
    int count = 0;
    while (option_is_file(argv[at]) && at + count + 1 < argc && option_is_file(argv[at + count + 1]))
        count++;
    return count;
}
// Returns the `count` words, joined by commas, in new memory that is never freed.
static const char *option_join(char **words, int count) {
    size_t bytes = 1;
    for (int i = 0; i < count; i++)
        bytes += strlen(words[i]) + 1;
    char *const text = (char *)malloc(bytes);
    if (!text)
        fail("out of memory");
    text[0] = 0;
    for (int i = 0; i < count; i++)
        text_add(text, bytes, "%s%s", i > 0 ? "," : "", words[i]);
    return text;
}

// Sets *given, and the option to a value or to what options->values says that the word means. A wrong value ends the
// program. Warns of a second, different value with OPTION_ONCE.
static void option_take_value(const struct options *options, const struct option_row *row, void *values, bool *given,
                              const char *value) {
    char name[OPTION_NAME], text[OPTION_TEXT];
    const struct option_value *const meant = options_value_of(options, row, value);
    if (meant && !meant->value) {
        option_expected(row, text);
        fail("--%s: '%s' is not offered, since %s; expected %s", option_display(name, row->name), value, meant->why,
             text);
    }
    value = meant ? meant->value : value;
    const char *const before = row->flags & OPTION_ONCE && *given ? option_text(text, row, values) : value;
    if (strcmp(before, value) != 0)
        say_warning("--%s is given twice; '%s' counts, '%s' does not", option_display(name, row->name), value, before);
    option_set(row, values, value);
    *given = true;
}

// Ends the program because a word is no option. Advises quotes if `before`, the option before it or NULL, takes files.
static void option_refuse_word(const char *word, const struct option_row *before) {
    char name[OPTION_NAME], advice[OPTION_NAME + 64] = "";
    if (before && before->flags & OPTION_FILES)
        snprintf(advice, sizeof advice, "; a pattern of files is quoted, as --%s 'data/*'",
                 option_display(name, before->name));
    fail("'%s' is not an option; options are written --name VALUE or --name=VALUE (--help lists them)%s", word, advice);
}

void options_parse(const struct options *options, void *values, bool *given, int argc, char **argv) {
    const struct option_row *row = NULL;
    for (int i = 1; i < argc; i++) {
        const char *const word = argv[i], *const next = i + 1 < argc ? argv[i + 1] : NULL;
        option_help_or_version(options, word, next);
        if (word[0] != '-' || !word[1])
            option_refuse_word(word, row);
        if (word[1] != '-')
            fail("unknown option %s; options begin with two dashes (--help lists them)", word);
        const struct option_word parsed = option_word_read(options, word);
        const char *value = parsed.value;
        row = &options->rows[parsed.row];
        if (option_is_flag(row) && !value) {
            value = parsed.negated ? "false" : "true";
            if (!parsed.negated && next && option_names_value(row, next))
                value = argv[++i];
        } else if (!value) {
            if (!next || strncmp(next, "--", 2) == 0)
                option_end_without_value(options, row, next);
            value = argv[++i];
            const int more = row->flags & OPTION_FILES ? option_files_after(i, argc, argv) : 0;
            if (row->kind == OPTION_LIST)
                for (int end = i + more; i < end; value = argv[++i])
                    option_take_value(options, row, values, &given[parsed.row], value);
            else if (more > 0) {
                value = option_join(argv + i, more + 1);
                i += more;
            }
        }
        option_take_value(options, row, values, &given[parsed.row], value);
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

// Writes an option as a member: a number, true or false, else a text, as for a seed from 2^63 on. Skips a group.
void option_write_json(const struct option_row *row, const void *values, struct json *json) {
    const void *const field = (const char *)values + row->offset;
    char text[OPTION_TEXT];
    switch (row->kind) {
    case OPTION_GROUP: break;
    case OPTION_INT: json_int(json, row->name, *(const int *)field); break;
    case OPTION_INT64:
    case OPTION_BYTES: json_int(json, row->name, *(const int64_t *)field); break;
    case OPTION_UINT64:
        if (*(const uint64_t *)field <= INT64_MAX)
            json_uint(json, row->name, *(const uint64_t *)field);
        else // beyond what readers of JSON hold
            json_str(json, row->name, option_text(text, row, values));
        break;
    case OPTION_FLOAT: json_float(json, row->name, *(const float *)field); break;
    case OPTION_DOUBLE: json_double(json, row->name, *(const double *)field); break;
    case OPTION_BOOL: json_bool(json, row->name, *(const bool *)field); break;
    case OPTION_ENUM:
        option_text(text, row, values);
        if (option_is_flag(row) && option_choice("false|true", text) >= 0)
            json_bool(json, row->name, option_choice("false|true", text) == 1);
        else
            json_str(json, row->name, text);
        break;
    case OPTION_STRING:
    case OPTION_LIST: json_str(json, row->name, *(const char *const *)field); break;
    }
}
void options_write_json(const struct options *options, const void *values, struct json *json) {
    for (int i = 0; i < options->count; i++)
        option_write_json(&options->rows[i], values, json);
}
