// Prints a template with the table of options put into it: the manual page, completions for bash and zsh, and
// docs/options.md.
//   write_reference TEMPLATE
// In a template @NAME@ stands for what the function of PARTS with that name prints. All of it comes from the tables of
// options, presets and variables of the environment, so that a new row is in the manual and completes by itself.
#include "config/config.h"   // config_rows, presets
#include "run/environment.h" // environment_variables
#include <ctype.h>           // isupper
#include <stdio.h>           // FILE
#include <stdlib.h>          // exit
#include <strings.h>         // strcasecmp

// Prints --help's topics, from the table's headings, after `before`, then `between`. Returns whether there are any.
static bool print_topic_list(const char *before, const char *between) {
    const char *last = "";
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const char *const topic = config_rows[i].kind == OPTION_GROUP ? config_rows[i].argument : NULL;
        if (!topic || strcmp(topic, last) == 0)
            continue;
        printf("%s%s", *last ? between : before, topic);
        last = topic;
    }
    return *last != 0;
}
static void print_topics(void) {
    if (print_topic_list(" ", " "))
        fputs(" all", stdout);
}

// What a user may write as an option's value, for completion.
enum value_kind { VALUE_WORDS, VALUE_FILES, VALUE_FOLDERS };

// Reads what kind of values a row's argument names; words (bytes) = the words among them, auto in auto|DIR, and blanks.
static enum value_kind values_of(const struct option_row *row, char *words, size_t bytes) {
    const char *const list = row->kind == OPTION_BOOL ? "true|false" : row->argument;
    enum value_kind kind = VALUE_WORDS;
    words[0] = 0;
    for (const char *name = list; *name; name += *name == '|') {
        const int length = (int)strcspn(name, "|");
        if (row->kind == OPTION_ENUM || islower((unsigned char)*name))
            text_add(words, bytes, "%s%.*s", *words ? " " : "", length, name);
        else if (strncmp(name, "DIR", 3) == 0)
            kind = VALUE_FOLDERS;
        else if (strncmp(name, "FILE", 4) == 0 || strncmp(name, "GLOB", 4) == 0)
            kind = VALUE_FILES;
        name += length;
    }
    return kind;
}

// ---- the manual page, in man(7) ----

// Prints a text of roff in which no character is a command. wraps: a blank after MAN_COLUMNS columns begins a line.
enum { MAN_COLUMNS = 60 };
static void man_print(const char *text, bool wraps) {
    bool begins = true;
    for (int column = 0; *text; text++, column++) {
        const char *const names = "\\-'`^~\"", *const special = strchr(names, *text);
        static const char *const escapes[] = {"\\e", "\\-", "\\(aq", "\\(ga", "\\(ha", "\\(ti", "\\(dq"};
        if (begins && *text == '.')
            fputs("\\&", stdout);
        begins = wraps && *text == ' ' && column > MAN_COLUMNS;
        if (special)
            column += printf("%s", escapes[special - names]) - 1;
        else
            putchar(begins ? '\n' : *text);
        if (begins)
            column = 0;
    }
}
static void man_text(const char *text) { man_print(text, true); }

// Prints an option's entry: its name and argument, what it does, what it takes, its default.
static void man_option(const struct option_row *row) {
    char name[OPTION_NAME], expected[OPTION_TEXT];
    const bool choices = row->kind == OPTION_ENUM;
    printf(".TP\n\\fB\\-\\-");
    man_text(option_display(name, row->name));
    printf("\\fP");
    if (option_is_flag(row))
        printf(", \\fB\\-\\-no\\-"), man_text(name), printf("\\fP");
    else
        printf(" \\fI"), man_text(choices ? "NAME" : row->argument), printf("\\fP");
    putchar('\n');
    man_text(row->help);
    fputs(".\n", stdout);
    option_expected(row, expected);
    const bool bounded = row->least != 0 || row->below != 0 || row->kind == OPTION_BYTES || row->kind == OPTION_UINT64;
    if (choices || bounded) {
        fputs(choices ? "One of: " : "Takes ", stdout);
        man_text(expected);
        fputs(".\n", stdout);
    }
    fputs("Default: ", stdout);
    man_text(*row->default_text ? row->default_text : "none");
    fputs(".\n", stdout);
}
static void print_man_options(void) {
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].kind == OPTION_GROUP)
            fputs(".SS ", stdout), man_print(config_rows[i].name, false), putchar('\n');
        else
            man_option(&config_rows[i]);
}
static void print_man_presets(void) {
    for (int i = 0; i < CONFIG_PRESETS; i++) {
        fputs(".TP\n.B ", stdout);
        man_text(presets[i].name);
        putchar('\n');
        for (const char *const *setting = presets[i].settings; *setting; setting++) {
            fputs("\\-\\-", stdout);
            man_text(*setting);
            putchar('\n');
        }
    }
}
static void print_man_environment(void) {
    for (int i = 0; i < ENVIRONMENT_VARIABLES; i++) {
        fputs(".TP\n.B ", stdout);
        man_text(environment_variables[i].name);
        fputs("\nDecides ", stdout);
        man_text(environment_variables[i].why);
        fputs(".\n", stdout);
    }
}

static void print_man_topics(void) {
    if (print_topic_list("A topic may follow:\n", ",\n"))
        puts(" or all.");
}

// ---- docs/options.md ----

// An option's text begins at PAGE_COLUMN and is wrapped at PAGE_MARGIN; above WIDEST_VALUES values are listed in it.
enum { PAGE_COLUMN = 38, PAGE_MARGIN = 118, WIDEST_VALUES = 80 };

// values = what may follow an option's name, default first: "auto|cpu|cuda", "12|N"; "": a flag its name switches on.
static void page_values(const struct option_row *row, char values[OPTION_TEXT]) {
    const char *const first = row->default_text, *const all = row->kind == OPTION_BOOL ? "true|false" : row->argument;
    values[0] = 0;
    if (row->kind == OPTION_BOOL && strcmp(first, "false") == 0)
        return;
    text_add(values, OPTION_TEXT, "%s", first);
    for (const char *value = all; *value; value += *value == '|') {
        const int length = (int)strcspn(value, "|");
        if (length != (int)strlen(first) || strncmp(value, first, length) != 0)
            text_add(values, OPTION_TEXT, "%s%.*s", *values ? "|" : "", length, value);
        value += length;
    }
}
// Prints an option: its name with what may follow it, and its text.
static void page_option(const struct option_row *row) {
    char name[OPTION_NAME], values[OPTION_TEXT], list[OPTION_TEXT] = "", text[2 * OPTION_TEXT];
    page_values(row, values);
    if (strlen(values) > WIDEST_VALUES) {
        option_choices_text(list, sizeof list, row->argument);
        snprintf(values, sizeof values, "NAME");
    }
    snprintf(text, sizeof text, "%s%s%s", row->help, *list ? ": " : "", list);
    int column = printf("--%s%s%s", option_display(name, row->name), *values ? "=" : "", values);
    if (column > PAGE_COLUMN - 2)
        column = printf("\n") - 1;
    column += printf("%*s", PAGE_COLUMN - 1 - column, "");
    for (const char *word = text; *word;) {
        const int length = (int)strcspn(word, " ");
        if (column + 1 + length > PAGE_MARGIN)
            column = printf("\n%*s", PAGE_COLUMN - 1, "") - 1;
        column += printf(" %.*s", length, word);
        word += length + (word[length] == ' ');
    }
    putchar('\n');
}
// Prints every option, by topic and heading of the table.
static void print_page_options(void) {
    const char *topic = "";
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *const row = &config_rows[i];
        if (row->kind != OPTION_GROUP) {
            page_option(row);
            continue;
        }
        if (i > 0)
            puts("```");
        if (strcmp(topic, row->argument) != 0)
            printf("\n## %s\n", topic = row->argument);
        if (strcasecmp(topic, row->name) != 0)
            printf("\n%s:\n", row->name);
        puts("\n```text");
    }
    puts("```");
}

// ---- completion in bash ----

// Prints the options' names, with those of --no-NAME where `negated`, else all others.
static void bash_names(bool negated) {
    char name[OPTION_NAME];
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].kind != OPTION_GROUP && (!negated || option_is_flag(&config_rows[i])))
            printf(" --%s%s", negated ? "no-" : "", option_display(name, config_rows[i].name));
}
static void print_bash_options(void) { bash_names(false); }
static void print_bash_negated(void) { bash_names(true); }
// Prints a branch of `case` for each option: the words and kind of files that it takes, and whether a value follows.
static void print_bash_values(void) {
    static const char *const kinds[] = {"", " files=files", " files=folders"};
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *row = &config_rows[i];
        char name[OPTION_NAME], words[4 * OPTION_TEXT];
        if (row->kind == OPTION_GROUP)
            continue;
        const enum value_kind kind = values_of(row, words, sizeof words);
        printf("    --%s) words='%s'%s%s ;;\n", option_display(name, row->name), words, kinds[kind],
               option_is_flag(row) ? " flag=yes" : "");
    }
}

// ---- completion in zsh ----

// Prints a text within single quotes of a specification of _arguments, in which : [ ] end a part.
static void zsh_text(const char *text) {
    for (const char *c = text; *c; c++)
        if (*c == '\'')
            fputs("'\\''", stdout);
        else if (*c == ':' || *c == '[' || *c == ']' || *c == '\\')
            printf("\\%c", *c);
        else
            putchar(*c);
}
static void print_zsh_options(void) {
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *row = &config_rows[i];
        char name[OPTION_NAME], words[4 * OPTION_TEXT];
        if (row->kind == OPTION_GROUP)
            continue;
        const enum value_kind kind = values_of(row, words, sizeof words);
        printf("    '%s--%s=%s[", row->kind == OPTION_LIST ? "*" : "", option_display(name, row->name),
               option_is_flag(row) ? "-" : "");
        zsh_text(row->help);
        printf("]:%s", option_is_flag(row) ? ":" : "");
        zsh_text(*row->argument && row->kind != OPTION_ENUM ? row->argument : name);
        if (kind != VALUE_WORDS && *words) { // both: what one function of the shell adds to the other
            printf(":{compadd -- %s; %s}'\n", words, kind == VALUE_FILES ? "_files" : "_files -/");
            continue;
        }
        putchar(':');
        if (kind != VALUE_WORDS)
            fputs(kind == VALUE_FILES ? "_files" : "_files -/", stdout);
        else if (*words)
            printf("(%s)", words);
        else
            putchar(' ');
        puts("'");
    }
}
static void print_zsh_negated(void) {
    char name[OPTION_NAME];
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].kind != OPTION_GROUP && option_is_flag(&config_rows[i]))
            printf("      '--no-%s[Switch --%s off]'\n", option_display(name, config_rows[i].name), name);
}

// ---- templates ----

static void print_version(void) { fputs(TRAIN_GPT_VERSION, stdout); }

static const struct part {
    const char *name;
    void (*print)(void);
} parts[] = {
    {"VERSION", print_version},           {"TOPICS", print_topics},
    {"MAN_TOPICS", print_man_topics},     {"MAN_OPTIONS", print_man_options},
    {"MAN_PRESETS", print_man_presets},   {"MAN_ENVIRONMENT", print_man_environment},
    {"BASH_OPTIONS", print_bash_options}, {"BASH_NEGATED", print_bash_negated},
    {"BASH_VALUES", print_bash_values},   {"ZSH_OPTIONS", print_zsh_options},
    {"ZSH_NEGATED", print_zsh_negated},   {"PAGE_OPTIONS", print_page_options},
};

// Prints a part where the text begins with @NAME@. Returns the number of characters of that; 0: it does not.
static size_t print_part(const char *text) {
    const size_t length = strspn(text + (*text == '@'), "ABCDEFGHIJKLMNOPQRSTUVWXYZ_");
    if (*text != '@' || length == 0 || text[length + 1] != '@')
        return 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strlen(parts[i].name) == length && strncmp(parts[i].name, text + 1, length) == 0) {
            parts[i].print();
            return length + 2;
        }
    fail("the template names @%.*s@, which is no part", (int)length, text + 1);
}

int main(int argc, char **argv) {
    char line[4096];
    FILE *const template_file = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (!template_file)
        fail("write_reference: expected a template that can be read");
    while (fgets(line, sizeof line, template_file))
        for (const char *c = line; *c;) {
            const size_t printed = print_part(c);
            if (printed == 0)
                putchar(*c);
            c += printed > 0 ? printed : 1;
            if (printed > 0 && c == line + strlen(line) - 1 && line[0] == '@')
                c++; // a part that is a line of its own ends its lines itself
        }
    fclose(template_file);
    return fflush(stdout) == 0 && !ferror(stdout) ? EXIT_SUCCESS : EXIT_FAILURE;
}
