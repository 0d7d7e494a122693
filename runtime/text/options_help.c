#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_add
#include "runtime/text/options.h"
#include <string.h>  // strlen
#include <strings.h> // strcasecmp

// Prints a text and a newline, wrapped at 110 columns. The cursor is at `column`; further lines are indented to it.
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

// Whether the group at row i has the topic of an earlier group.
static bool option_topic_seen(const struct options *options, int i) {
    for (int j = 0; j < i; j++)
        if (options->rows[j].kind == OPTION_GROUP && strcmp(options->rows[j].argument, options->rows[i].argument) == 0)
            return true;
    return false;
}
// text = the topics, in the table's order: "model, attention, memory".
static void option_topics(const struct options *options, char text[OPTION_TEXT]) {
    text[0] = 0;
    for (int i = 0; i < options->count; i++)
        if (options->rows[i].kind == OPTION_GROUP && !option_topic_seen(options, i))
            text_add(text, OPTION_TEXT, "%s%s", *text ? ", " : "", options->rows[i].argument);
}

static void option_help_title(const struct options *options, const char *which, FILE *out) {
    fprintf(out, "Usage: %s [--OPTION VALUE]...\n%s\n%s The default of each is in brackets.\n", options->program,
            options->summary, which);
}
// Prints the OPTION_USUAL options without their headings, then the topics, the words that --help takes, and the notes.
static void options_help_usual(const struct options *options, FILE *out) {
    char topics[OPTION_TEXT];
    int all = 0;
    option_help_title(options, "These are the options that most runs need.", out);
    fputc('\n', out);
    for (int i = 0; i < options->count; i++) {
        all += options->rows[i].kind != OPTION_GROUP;
        if (options->rows[i].flags & OPTION_USUAL)
            option_help(out, &options->rows[i]);
    }
    option_topics(options, topics);
    fprintf(out, "\n  --help TOPIC   The options of a topic: ");
    option_print_wrapped(out, topics, 41);
    fprintf(out,
            "  --help WORD    The options that have the word in their names, as lora, or else in their texts, as NVTE\n"
            "  --help all     All %d options\n"
            "  --version      The version and how this was built\n\n",
            all);
    fputs(options->notes, out);
}
static void options_help_all(const struct options *options, FILE *out) {
    option_help_title(options, "These are all options.", out);
    for (int i = 0; i < options->count; i++)
        if (options->rows[i].kind == OPTION_GROUP)
            fprintf(out, "\n%s:\n", options->rows[i].name);
        else
            option_help(out, &options->rows[i]);
    fprintf(out, "\n  -h, --help     Print the usual options; TOPIC, WORD or all behind it: others\n"
                 "      --version  Print the version and how this was built\n\n");
    fputs(options->notes, out);
}
// Prints the options of a topic, ignoring case, under their headings. Returns whether there is such a topic.
static bool options_help_topic(const struct options *options, const char *topic, FILE *out) {
    bool here = false, any = false;
    for (int i = 0; i < options->count; i++) {
        const struct option_row *const row = &options->rows[i];
        if (row->kind == OPTION_GROUP) {
            here = strcasecmp(row->argument, topic) == 0;
            if (here)
                fprintf(out, "%s%s:\n", any ? "\n" : "", row->name);
            any = any || here;
        } else if (here)
            option_help(out, row);
    }
    return any;
}
// Prints options with a word in their dashed names or, with in_texts, texts only, in any case. Returns whether any do.
static bool options_help_word(const struct options *options, const char *word, bool in_texts, FILE *out) {
    char name[OPTION_NAME];
    bool any = false;
    for (int i = 0; i < options->count; i++)
        if (options->rows[i].kind != OPTION_GROUP &&
            strcasestr(in_texts ? options->rows[i].help : option_display(name, options->rows[i].name), word) != NULL) {
            option_help(out, &options->rows[i]);
            any = true;
        }
    return any;
}

void options_help(const struct options *options, const char *topic, FILE *out) {
    char topics[OPTION_TEXT], word[OPTION_NAME];
    if (!topic) {
        options_help_usual(options, out);
        return;
    }
    const char *const plain = topic + strspn(topic, "-");
    option_display(word, plain);
    if (strcmp(word, "all") == 0)
        options_help_all(options, out);
    else if (!*word || (!options_help_topic(options, word, out) && !options_help_word(options, word, false, out) &&
                        !options_help_word(options, plain, true, out))) {
        option_topics(options, topics);
        fail("--help %s: no topic, and no option has that in its name or text; the topics are all, %s", topic, topics);
    }
}
