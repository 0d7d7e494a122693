// Long GNU options from a table: a row is an option and says where in a struct its value goes.
//     --name VALUE   --name=VALUE   --flag   --flag=false   --no-flag   --unambiguous-abbreviation
// A flag is a bool, or an enum whose first two names are false and true: --plan is true, --plan=full its third name.
// Not by getopt or argp: argp sorts the help, neither suggests an option. A user's mistake ends the program: fail().
#pragma once
#include "runtime/text/json.h" // struct json
#include <stdbool.h>           // bool
#include <stddef.h>            // offsetof, for the tables
#include <stdio.h>             // FILE
#include <sys/cdefs.h>         // __BEGIN_DECLS

enum option_kind {
    OPTION_GROUP,  // a heading of the help: its text is `name`, its topic `argument`; offset, size: of its section
    OPTION_INT,    // int
    OPTION_INT64,  // int64_t
    OPTION_UINT64, // uint64_t, for seeds
    OPTION_FLOAT,  // float
    OPTION_DOUBLE, // double
    OPTION_BYTES,  // int64_t, written 6GiB, 512MiB or 1e9
    OPTION_BOOL,   // bool
    OPTION_ENUM,   // int or enum: the position in `argument`, which lists the names as first|second|third
    OPTION_STRING, // const char *, never NULL
    OPTION_LIST,   // const char *, never NULL: all elements that were given, each ended by OPTION_LIST_END
};

struct option_row {
    const char *name; // with underscores, as the struct's field; users write it with dashes
    enum option_kind kind;
    size_t offset, size;      // of the field
    const char *default_text; // as a user would write it
    const char *argument;     // the value's name in the help: N, FILE
    double least, below;      // least <= number < below; both 0: no limits but the type's
    const char *help;
    unsigned flags; // enum option_flag; all others are the table's owner's, and not used here
};
enum option_flag {
    OPTION_ONCE = 1 << 30,  // a second, different value is warned of, since users may expect the values to add up
    OPTION_USUAL = 1 << 29, // in the short help
    OPTION_FILES = 1 << 28, // of strings and lists: takes all files that a shell has made of a pattern
};
// The name of an option in other programs, or of what these programs have in its place.
struct option_synonym {
    const char *word; // with dashes
    const char *name; // of the option here, with dashes
    const char *how;  // "": of the same value; else how the option's value follows from the word's
};

// A word of other programs for an option's value.
struct option_value {
    const char *name;  // of the option, with underscores
    const char *word;  // whatever its case; no value of the option
    const char *value; // what the word means here; NULL: the word is refused
    const char *why;   // the word is refused; "": it is not
};

typedef void options_build(void);                        // prints the rest of the version's line, and the build
typedef bool options_list(const struct option_row *row); // prints what a value may be; false: does not know

struct options {
    const struct option_row *rows;
    int count;
    const char *program;
    const char *version;                   // what --version prints
    const char *summary;                   // above the options in the help
    const char *notes;                     // below them
    const struct option_synonym *synonyms; // NULL: none; the last one's word is NULL
    options_build *describe_build;         // what --version adds; NULL: nothing
    options_list *list_values;             // answers an option at the line's end that lacks its value; NULL: none
    const struct option_value *values;     // NULL: none; the last one's word is NULL
};

// Bytes of a value's text, and of a name; the character that ends a list's element (ASCII's record separator).
enum { OPTION_TEXT = 512, OPTION_NAME = 64, OPTION_LIST_END = '\x1e' };

__BEGIN_DECLS
// ---- all options; `values` is the struct that their fields are of ----

void options_set_defaults(const struct options *options, void *values);
// Reads argv[1] and on into `values`, and sets given[row], false before, for each option in argv; other fields stay. An
// option given twice has its last value, but a list has both. Strings point into argv or options->values, or are joined
// names of OPTION_FILES, never freed. --help, --version and what list_values answers exit with status 0.
void options_parse(const struct options *options, void *values, bool *given, int argc, char **argv);
// Sets options from a preset, except where given[row]. texts: each "name=value", NULL after the last; they must outlive
// the values. `given` stays. An unknown name or a wrong value ends the program.
void options_fill(const struct options *options, void *values, const bool *given, const char *const *texts);
// Prints the usual options (topic NULL), all ("all") or a topic's. For no such topic, prints options with the word
// `topic`, dashes before it or not, in their names or, if none has, in their texts. Ends the program if none has.
void options_help(const struct options *options, const char *topic, FILE *out);
// text = a hint on an unknown option: the option here of which it is a synonym, or the nearest name. Of help and
// version it says that only the command line has them. Returns text.
const char *options_hint(const struct options *options, const char *name, char text[OPTION_TEXT]);
// Returns the row of options->values that has `word`, another program's for a value of this option; NULL if none has.
const struct option_value *options_value_of(const struct options *options, const struct option_row *row,
                                            const char *word);
// Writes every option as a member of the object that is open in *json.
void options_write_json(const struct options *options, const void *values, struct json *json);

// ---- one option ----

// Returns the index of the row named `word` (- or _), else of the only row whose name begins with it; -1 if there is
// none. If several names begin with it, the program ends. flags: looks only at flags, for --no-NAME.
int option_find(const struct options *options, const char *word, bool flags);
// Whether an option may stand without a value: a bool, or an enum whose first names are false and true.
bool option_is_flag(const struct option_row *row);
// Whether the word after a flag is the flag's value: true, no, 1, or a name of its enum.
bool option_names_value(const struct option_row *row, const char *word);
// display = the name with - for _, as after --, cut where it is too long; returns display.
const char *option_display(char display[OPTION_NAME], const char *name);
void *option_field(const struct option_row *row, void *values);
// Reads a text into the row's field. Returns NULL, or what is wrong with the text ("out of range"), and the field
// stays. A string is not copied. A list gets one more element, in new memory, and its former memory is freed.
const char *option_read(const struct option_row *row, void *field, const char *text);
// Reads a text into the option's field, as option_read does. If it is wrong, ends the program with what is expected.
void option_set(const struct option_row *row, void *values, const char *text);
// text = what the user should have written, in words: "an integer of at least 1".
void option_expected(const struct option_row *row, char text[OPTION_TEXT]);
// Writes an option, but no group, as a member: a number, true or false for a flag, else a text, as a seed from 2^63 on.
void option_write_json(const struct option_row *row, const void *values, struct json *json);
// Returns the value as a user would write it, so that it reads back equal: a string's own text, else `text`. Of a list
// it returns the list's own text, with OPTION_LIST_END after each element, which option_read would not read back.
const char *option_text(char text[OPTION_TEXT], const struct option_row *row, const void *values);

// ---- one value ----

// Returns the position of a text among the names of a list first|second|third, ignoring case; -1: none of them.
int option_choice(const char *list, const char *text);
const char *option_choice_name(const char *list, int position, char name[OPTION_NAME]);
// text = a list first|second|third in words: "first, second or third".
void option_choices_text(char *text, size_t size, const char *list);
int option_list_count(const char *list); // elements of an OPTION_LIST
__END_DECLS
