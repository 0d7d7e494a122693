// The parser of options, and the engine's table of them: values, mistakes, presets, help, config.json.
#include "model/parameters.cuh" // parameters_number
#include "config/resolve.h"     // config_parse, config_resolve
#include "test/fails.h"         // assert_fails
#include "test/json_read.h"     // json_member
#include "test/testing.h"       // cmocka
#include <fcntl.h>              // open
#include <float.h>              // DBL_MAX

// ---- the parser, on a table of its own ----

struct values {
    int count;
    int64_t big;
    uint64_t seed;
    float share;
    double rate;
    int64_t room;
    bool fast, fast_start;
    int color, report;
    const char *file, *files;
    int more;
};
#define ROW(kind, field, ...)                                                                                          \
    { #field, OPTION_##kind, offsetof(struct values, field), sizeof(((struct values *)0)->field), __VA_ARGS__ }
static const struct option_row rows[] = {
    {"Numbers", OPTION_GROUP, 0, 0, NULL, "math", 0, 0, NULL},
    ROW(INT, count, "3", "N", 1, 100, "A count", OPTION_USUAL),
    ROW(INT64, big, "-7", "N", 0, 0, "A big one"),
    ROW(UINT64, seed, "1", "N", 0, 0, "A seed"),
    ROW(FLOAT, share, "0.5", "X", 0, 1, "A share"),
    ROW(DOUBLE, rate, "1e-3", "X", 0, INFINITY, "A rate"),
    ROW(BYTES, room, "1KiB", "BYTES", 0, INFINITY, "A size"),
    {"Others", OPTION_GROUP, 0, 0, NULL, "others", 0, 0, NULL},
    ROW(BOOL, fast, "false", "", 0, 0, "A flag"),
    ROW(BOOL, fast_start, "true", "", 0, 0, "Another flag"),
    ROW(ENUM, color, "red", "red|dark_red|Green", 0, 0, "A color"),
    ROW(ENUM, report, "false", "false|true|full", 0, 0, "A flag with a third choice"),
    ROW(STRING, file, "", "FILE", 0, 0, "A file", OPTION_FILES),
    ROW(LIST, files, "", "FILE", 0, 0, "Files", OPTION_FILES),
    {"More numbers", OPTION_GROUP, 0, 0, NULL, "math", 0, 0, NULL},
    ROW(INT, more, "4", "N", 0, 0, "One more"),
};
#undef ROW
enum { ROWS = sizeof rows / sizeof rows[0] };
static const struct option_synonym synonyms[] = {
    {"tint", "color", ""}, {"per-hundred", "share", "it over 100"}, {NULL, NULL, NULL}};
static const struct option_value other_values[] = {{"color", "crimson", "dark_red", ""},
                                                   {"count", "none", "3", ""},
                                                   {"color", "mauve", NULL, "paint is short"},
                                                   {NULL, NULL, NULL, NULL}};
static bool list_colors(const struct option_row *row) {
    if (strcmp(row->name, "color") != 0)
        return false;
    printf("three colors\n");
    return true;
}
static const struct options small_table = {rows,         ROWS,     "small", "small 1.0", "A table for tests.",
                                           "The end.\n", synonyms, NULL,    list_colors, other_values};

// The words of a command line, split at blanks. They point into `words`, which must stay.
struct command {
    char text[1024];
    char *argv[64];
    int argc;
};
static void split(struct command *command, const char *words) {
    snprintf(command->text, sizeof command->text, "%s", words);
    command->argc = 0;
    command->argv[command->argc++] = (char *)"train_gpt";
    char *rest = NULL;
    for (char *word = strtok_r(command->text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        command->argv[command->argc++] = word;
    command->argv[command->argc] = NULL;
}

static struct values parse(struct command *command, bool given[ROWS], const char *words) {
    struct values values;
    memset(&values, 0, sizeof values);
    memset(given, 0, ROWS * sizeof *given);
    split(command, words);
    options_set_defaults(&small_table, &values);
    options_parse(&small_table, &values, given, command->argc, command->argv);
    return values;
}
static void parse_in_child(void *words) {
    struct command command;
    bool given[ROWS];
    parse(&command, given, (const char *)words);
}
#define assert_rejects(command_line, words) assert_fails(parse_in_child, (void *)(command_line), (words))

static void a_flag_may_have_a_third_choice(void **state) {
    static const struct {
        const char *words;
        int report;
    } known[] = {{"", 0},
                 {"--report", 1},
                 {"--report --fast", 1},
                 {"--report=full", 2},
                 {"--report full", 2},
                 {"--rep full", 2},
                 {"--report=on", 1},
                 {"--no-report", 0},
                 {"--report=false", 0},
                 {"--report no", 0},
                 {"--report --no-report", 0}};
    struct command command;
    bool given[ROWS];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        assert_int_equal(parse(&command, given, known[i].words).report, known[i].report);
    assert_rejects("--report=most", "--report: 'most' is not known|false, true or full");
    assert_rejects("--report most", "'most' is not an option");
    assert_rejects("--no-report=full", "--no-report takes no value");
}
static void every_kind_has_its_default_and_takes_a_value(void **state) {
    struct command command;
    bool given[ROWS];
    struct values v = parse(&command, given, "");
    assert_true(v.count == 3 && v.big == -7 && v.seed == 1 && v.share == 0.5f && v.rate == 1e-3 && v.room == 1024);
    assert_true(!v.fast && v.fast_start && v.color == 0 && strcmp(v.file, "") == 0);
    for (int i = 0; i < ROWS; i++)
        assert_false(given[i]);

    v = parse(&command, given,
              "--count 99 --big=-9223372036854775808 --seed 18446744073709551615 --share .25 --rate 1e-300 --room 6GiB "
              "--fast --no-fast-start --color green --report --file=--odd=name --files a --more 5");
    assert_true(v.count == 99 && v.big == INT64_MIN && v.seed == UINT64_MAX && v.share == 0.25f && v.rate == 1e-300);
    assert_true(v.room == (int64_t)6 << 30 && v.fast && !v.fast_start && v.color == 2);
    assert_string_equal(v.file, "--odd=name");
    assert_string_equal(v.files, "a\x1e");
    for (int i = 0; i < ROWS; i++)
        assert_int_equal(given[i], rows[i].kind != OPTION_GROUP);
    v = parse(&command, given, "--count 5 --count 6 --fast=no --fast-start off --fast yes"); // the last of two wins
    assert_true(v.count == 6 && v.fast && !v.fast_start);
}

static void another_programs_value_is_taken_or_refused(void **state) {
    struct command command;
    bool given[ROWS];
    struct values v = parse(&command, given, "--color=Crimson --count 9 --count None");
    assert_true(v.color == 1 && v.count == 3);
    assert_rejects("--color mauve",
                   "--color: 'mauve' is not offered, since paint is short; expected red, dark_red or Green");
    assert_rejects("--rate none", "--rate: 'none' is not understood"); // of its own option only
}

static void sizes_in_bytes_have_gnu_units(void **state) {
    static const struct {
        const char *text;
        int64_t bytes;
    } sizes[] = {
        {"0", 0},
        {"123", 123},
        {"1e9", 1000000000},
        {"512MiB", 512 << 20},
        {"1.5GiB", (int64_t)3 << 29},
        {"7b", 7},
        {"2k", 2048},
        {"6GB", 6000000000},
        {".5T", (int64_t)1 << 39},
        {"4096PiB", (int64_t)1 << 62},
        {"3KB", 3000},
        {"3kib", 3072},
        {"9223372036854775807", INT64_MAX},
    };
    struct command command;
    bool given[ROWS];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char words[64];
        snprintf(words, sizeof words, "--room %s", sizes[i].text);
        assert_int_equal(parse(&command, given, words).room, sizes[i].bytes);
    }
    static const char *const wrong[] = {"",    "6Gi", "GiB", "0x10", "6GiBs", "6GBB", "0x",
                                        "nan", "inf", "-1",  "+1",   "1e",    "1..2"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char words[64];
        snprintf(words, sizeof words, "--room=%s", wrong[i]);
        assert_rejects(words, "--room|6GiB, 512MiB or 1e9");
    }
    assert_rejects("--room 8192P", "--room|'8192P' is out of range");
    assert_rejects("--room 1e40", "--room|out of range");
}

static void abbreviations_work_while_they_are_unambiguous(void **state) {
    struct command command;
    bool given[ROWS];
    assert_int_equal(parse(&command, given, "--cou 7").count, 7);
    assert_int_equal(parse(&command, given, "--cou=8").count, 8);
    assert_true(parse(&command, given, "--fast").fast); // a whole name, though another one begins with it
    assert_false(parse(&command, given, "--no-fast-s").fast_start);
    assert_rejects("--fas", "--fas is ambiguous|--fast |--fast-start");
    assert_rejects("--no-fas", "--no-fas is ambiguous|--no-fast |--no-fast-start");
    assert_rejects("--co 7", "--co is ambiguous|--count|--color");
    assert_rejects("--r 7", "ambiguous|--rate|--room");
}

static void unknown_options_name_the_nearest(void **state) {
    assert_rejects("--cuont 7", "unknown option --cuont;|--count");
    assert_rejects("--counts=7", "unknown option --counts;|--count");
    assert_rejects("--colr 7", "unknown option --colr;|--color");
    assert_rejects("--sead 7", "unknown option --sead;|--seed");
    assert_rejects("--start", "--start;|--fast-start"); // a part of a name counts as near
    assert_rejects("--no-rate", "unknown option --no-rate;|--rate");
    assert_rejects("--hepl", "unknown option --hepl;|--help");
    assert_rejects("--versoin", "unknown option --versoin;|--version");
    assert_rejects("--version=3", "option --version takes no value; write --version\n");
    assert_rejects("--=3", "unknown option --;");
    assert_rejects("--", "unknown option --;");
    assert_rejects("--a-name-that-is-longer-than-any-option-that-a-table-could-hold-and-some", "unknown option");
    assert_rejects("-c 3", "unknown option -c; options begin with two dashes");
    assert_rejects("--tint red", "unknown option --tint; the option here is --color\n");
    assert_rejects("--per_hundred=3", "unknown option --per_hundred; the option here is --share: it over 100\n");
}

static void what_is_no_option_is_an_error(void **state) {
    assert_rejects("seven", "'seven' is not an option");
    assert_rejects("--count 7 eight", "'eight' is not an option");
    assert_rejects("--fast maybe", "'maybe' is not an option");
    assert_rejects("-", "'-' is not an option");
}

static void values_that_are_missing_or_not_of_their_kind_are_errors(void **state) {
    assert_rejects("--count", "option --count needs a value: expected an integer of at least 1 and below 100");
    assert_rejects("--file --fast", "option --file needs a value|after a =");
    assert_rejects("--no-fast=true", "--no-fast takes no value; write --fast=true");
    static const char *const not_integers[] = {"", "x", "7x", "7.0", "1e1", "0x7", "--7", "+-7", "nan"};
    for (size_t i = 0; i < sizeof not_integers / sizeof not_integers[0]; i++) {
        char words[64], message[64];
        snprintf(message, sizeof message, "'%s' is not understood|an integer", not_integers[i]);
        snprintf(words, sizeof words, "--count=%s", not_integers[i]);
        assert_rejects(words, message);
        snprintf(words, sizeof words, "--big=%s", not_integers[i]);
        assert_rejects(words, message);
        snprintf(words, sizeof words, "--seed=%s", not_integers[i]);
        assert_rejects(words, message);
    }
    static const char *const not_numbers[] = {"",    "x",    "0.5x",     "0x1",  "nan", "-nan",
                                              "inf", "-inf", "infinity", "0.5,", "--1", "e5"};
    for (size_t i = 0; i < sizeof not_numbers / sizeof not_numbers[0]; i++) {
        char words[64];
        snprintf(words, sizeof words, "--share=%s", not_numbers[i]);
        assert_rejects(words, "--share: |is not understood; expected a number of at least 0 and below 1");
        snprintf(words, sizeof words, "--rate=%s", not_numbers[i]);
        assert_rejects(words, "--rate: |is not understood; expected a number of at least 0");
    }
    assert_rejects("--fast=perhaps", "--fast: 'perhaps' is not known; expected true or false");
    assert_rejects("--fast=", "--fast: '' is not known; expected true or false");
    assert_rejects("--color blue", "--color: 'blue' is not known; expected red, dark_red or Green");
    assert_rejects("--color=", "--color: '' is not known");
    assert_rejects("--color gree", "--color: 'gree' is not known");
    assert_rejects("--seed -1", "--seed: '-1' is not understood"); // strtoull would take it
}

static void values_out_of_range_are_errors(void **state) {
    assert_rejects("--count 0", "--count: '0' is out of range; expected an integer of at least 1 and below 100");
    assert_rejects("--count 100", "--count: '100' is out of range");
    assert_rejects("--count 4294967298", "--count: '4294967298' is out of range"); // cut to 32 bits it would be 2
    assert_rejects("--count 18446744073709551618", "out of range");
    assert_rejects("--big 9223372036854775808", "--big: |out of range");
    assert_rejects("--big -9223372036854775809", "--big: |out of range");
    assert_rejects("--seed 18446744073709551616", "--seed: |out of range; expected an integer from 0 to 2^64-1");
    assert_rejects("--share -0.001", "--share: |out of range");
    assert_rejects("--share 1", "--share: |out of range");
    assert_rejects("--share 0.9999999999", "--share: |out of range"); // as a float it would be 1
    assert_rejects("--share 1e39", "--share: |out of range");
    assert_rejects("--rate 1e309", "--rate: |out of range");
    assert_rejects("--rate -1e309", "--rate: |out of range");
}

// Checks that the words which a shell makes of a pattern are taken together, where each is a file, and no others.
static void files_of_a_pattern_that_is_not_quoted(void **state) {
    static const char *const a = "a.bin", *const b = "b.bin", *const odd = "x,y.bin"; // a folder's name may have spaces
    const char *const all[] = {a, b, odd};
    char folder[TEST_PATH], words[128], wanted[128];
    struct command command;
    bool given[ROWS];
    const int before = open(".", O_RDONLY | O_DIRECTORY);
    assert_non_null(mkdtemp(test_template(folder, "unit_options")));
    assert_int_equal(chdir(folder), 0);
    for (int i = 0; i < 3; i++)
        fclose(fopen(all[i], "w"));
    snprintf(words, sizeof words, "--file %s %s --count 7", a, b);
    snprintf(wanted, sizeof wanted, "%s,%s", a, b);
    struct values v = parse(&command, given, words);
    assert_string_equal(v.file, wanted);
    assert_int_equal(v.count, 7);
    free((void *)v.file);
    snprintf(words, sizeof words, "--files %s %s --files one", a, b);
    snprintf(wanted, sizeof wanted, "%s\x1e%s\x1eone\x1e", a, b);
    v = parse(&command, given, words);
    assert_string_equal(v.files, wanted);
    free((void *)v.files);
    const char *const wrong[][2] = {{a, "missing.bin"}, {a, odd}, {odd, a}, {"'*.bin'", a}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        snprintf(words, sizeof words, "--file %s %s", wrong[i][0], wrong[i][1]);
        snprintf(wanted, sizeof wanted, "'%s' is not an option|quoted, as --file 'data/*'", wrong[i][1]);
        assert_rejects(words, wanted);
    }
    snprintf(words, sizeof words, "--file=%s %s", a, b); // no shell makes this
    assert_rejects(words, "is not an option");
    for (int i = 0; i < 3; i++)
        unlink(all[i]);
    assert_int_equal(fchdir(before), 0);
    close(before);
    rmdir(folder);
}

static void small_to_stdout(void *words) {
    dup2(STDERR_FILENO, STDOUT_FILENO); // the parent's pipe
    parse_in_child(words);
}
// Checks that an option at the line's end asks what there is, and that elsewhere a missing value is an error.
static void an_option_without_its_value_lists_what_there_is(void **state) {
    char text[1024];
    assert_int_equal(run_in_child(small_to_stdout, (void *)"--count 3 --color", text, sizeof text), 0);
    assert_string_equal(text, "three colors\n");
    assert_rejects("--color --count 3", "option --color needs a value: expected red, dark_red or Green");
    assert_rejects("--rate", "option --rate needs a value");
}

static void help_is_by_topic_or_word(void **state) {
    static const struct {
        const char *words, *has, *has_not;
    } known[] = {
        {"--help", "  --count N ", "--big"},
        {"--help", "--help TOPIC   The options of a topic: math, others\n", "--rate"},
        {"--help", "All 13 options", "Numbers:"},
        {"-h", "  --count N ", "--big"},
        {"--help math", "Numbers:\n  --count N ", "--fast"},
        {"--help=Math", "\nMore numbers:\n  --more N ", "--color"},
        {"--help all", "\nOthers:\n  --fast ", "--help TOPIC"},
        {"--help fast", "  --fast-start ", "--count"},
        {"--help --dark_red", NULL, NULL},
        {"--help nothing", NULL, NULL},
        {"--help=", NULL, NULL},
        {"--help --fast-start", "  --fast-start ", "  --fast "},
        {"--help another", "  --fast-start ", "  --fast "}, // no name has it, a text does
        {"--help flag", "  --report ", "  --color "},
    };
    static char text[8192];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const int status = run_in_child(small_to_stdout, (void *)known[i].words, text, sizeof text);
        assert_int_equal(status, known[i].has ? 0 : 2);
        if (known[i].has)
            assert_true(strstr(text, known[i].has) && !strstr(text, known[i].has_not));
        else
            assert_non_null(strstr(text, "the topics are all, math, others\n"));
    }
}

static void help_is_laid_out_in_groups_with_defaults(void **state) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *const memory = open_memstream(&text, &bytes);
    options_help(&small_table, "all", memory);
    fclose(memory);
    const char *const numbers = strstr(text, "\nNumbers:\n"), *const others = strstr(text, "\nOthers:\n");
    assert_true(numbers && others && numbers < others);
    assert_non_null(strstr(text, "  --count N                           A count [3]\n"));
    assert_non_null(strstr(text, "  --fast-start                        Another flag [true]\n"));
    assert_non_null(strstr(text, "  --color red|dark_red|Green          A color [red]\n"));
    assert_non_null(strstr(text, "A file [none]\n"));
    free(text);
}

// ---- the engine's options ----

static struct config configure(struct command *command, const char *words) {
    split(command, words);
    return config_parse(command->argc, command->argv);
}
static void configure_in_child(void *words) {
    struct command command;
    configure(&command, (const char *)words);
}
#define assert_config_rejects(command_line, words) assert_fails(configure_in_child, (void *)(command_line), (words))

static void the_table_is_consistent(void **state) {
    static const size_t sizes[] = {0,
                                   sizeof(int),
                                   sizeof(int64_t),
                                   sizeof(uint64_t),
                                   sizeof(float),
                                   sizeof(double),
                                   sizeof(int64_t),
                                   sizeof(bool),
                                   sizeof(int),
                                   sizeof(const char *),
                                   sizeof(const char *)};
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *row = &config_rows[i];
        assert_true(row->name && strlen(row->name) < (row->kind == OPTION_GROUP ? 100 : OPTION_NAME));
        if (row->kind == OPTION_GROUP)
            continue;
        assert_int_equal(row->size, sizes[row->kind]); // the field's type is the kind's
        assert_true(row->help && *row->help && row->argument && row->default_text);
        for (int j = 0; j < i; j++) { // no two options share a field or a name
            const struct option_row *other = &config_rows[j];
            if (other->kind == OPTION_GROUP)
                continue;
            assert_string_not_equal(row->name, other->name);
            assert_true(row->offset >= other->offset + other->size || other->offset >= row->offset + row->size);
        }
    }
    // Every field has an option, and every option lies in the struct of its section: after each field the next
    // option's begins, or the struct ends, at a distance below the alignment.
    size_t sections_end = 0, largest = 0; // of a section: its end, the size of its largest field
    for (int i = 0, section = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *row = &config_rows[i];
        if (row->kind == OPTION_GROUP) {
            size_t first = row->offset + row->size;
            largest = 0;
            for (int j = i + 1; j < CONFIG_ROWS && config_rows[j].kind != OPTION_GROUP; j++) {
                first = config_rows[j].offset < first ? config_rows[j].offset : first;
                largest = config_rows[j].size > largest ? config_rows[j].size : largest;
            }
            assert_int_equal(first, row->offset);
            assert_true(row->offset >= sections_end && row->offset - sections_end < sizeof(int64_t));
            section = i;
            sections_end = row->offset + row->size;
            continue;
        }
        size_t end = row->offset + row->size, next = sections_end, alignment = largest;
        assert_true(row->offset >= config_rows[section].offset && end <= sections_end);
        for (int j = section + 1; j < CONFIG_ROWS && config_rows[j].kind != OPTION_GROUP; j++)
            if (config_rows[j].offset >= end && config_rows[j].offset < next) {
                next = config_rows[j].offset;
                alignment = config_rows[j].size;
            }
        assert_true(next - end < alignment);
    }
    assert_true(offsetof(struct config, given) - sections_end < sizeof(int64_t));
    for (int i = 0; i < CONFIG_PRESETS; i++) {
        char name[OPTION_NAME];
        assert_string_equal(option_choice_name(PRESET_NAMES, i + 1, name), presets[i].name);
        assert_null(presets[i].settings[sizeof presets[i].settings / sizeof presets[i].settings[0] - 1]);
    }
    assert_int_equal(option_choice(PRESET_NAMES, "demo"), CONFIG_PRESETS); // every name is a preset's
}

// Checks that a row's name and enumerator mean the same choice, whatever their place in the list.
static void choices_are_named_as_their_enumerators(void **state) {
    struct command command;
    const struct config c =
        configure(&command, "--plan --activation swiglu --normalization rmsnorm --attention-backend "
                            "unfused --precision fp32 --lr-decay-style wsd --collectives sockets");
    assert_true(c.model.activation == ACTIVATION_SWIGLU && c.model.normalization == NORMALIZATION_RMSNORM);
    assert_true(c.attention.attention_backend == BACKEND_UNFUSED && c.device.precision == WITH_FP32);
    assert_true(c.training.lr_decay_style == LR_DECAY_WSD && c.processes.collectives == BY_SOCKETS);
    assert_string_equal(CHOICES(NORMALIZATIONS), "LayerNorm|RMSNorm");
    assert_string_equal(activation_name(ACTIVATION_GELU), "gelu");
    assert_string_equal(activation_name(ACTIVATION_SWIGLU), "swiglu");
    assert_true(activation_is_gated(ACTIVATION_SWIGLU) && !activation_is_gated(ACTIVATION_GELU));
}

// Checks that a resumed run goes on with the same model: options that shape the model can't change, by themselves or by
// a preset. Dropout and the deviation of initial weights are in the model's group too, but belong to training.
static void a_resumed_run_cannot_change_what_shapes_the_model(void **state) {
    const size_t training[] = {offsetof(struct config, model.hidden_dropout),
                               offsetof(struct config, model.attention_dropout),
                               offsetof(struct config, model.init_method_std)};
    int group = 0;
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *row = &config_rows[i];
        bool fixed = group == 1;
        group += row->kind == OPTION_GROUP;
        if (row->kind == OPTION_GROUP)
            continue;
        for (int k = 0; k < 3; k++)
            fixed = fixed && row->offset != training[k];
        if (group == 1)
            assert_int_equal((row->flags & CONFIG_FIXED_ON_RESUME) != 0, fixed);
        assert_false((row->flags & CONFIG_FIXED_ON_RESUME) && (row->flags & CONFIG_THIS_START));
        assert_false((row->flags & CONFIG_BLOCKS) && (row->flags & CONFIG_EMBEDDING));
    }
    assert_true(config_rows[CONFIG_ROW(training.seed)].flags & CONFIG_FIXED_ON_RESUME);
    for (int i = 0; i < CONFIG_PRESETS; i++)
        for (const char *const *setting = presets[i].settings; *setting; setting++) {
            char name[OPTION_NAME];
            snprintf(name, sizeof name, "%.*s", (int)strcspn(*setting, "="), *setting);
            const int row = option_find(&config_options, name, false);
            assert_true(row >= 0 && config_rows[row].flags & CONFIG_FIXED_ON_RESUME);
        }
}

static int64_t parameter_count(const struct config *c) {
    const struct model_shape shape = model_shape_of(c, sizeof(floatX), false);
    return (int64_t)parameters_number(&shape);
}
// Checks the numbers of parameters that transformers reports for the published models.
static void presets_have_the_published_parameter_counts(void **state) {
    static const struct {
        const char *preset;
        int64_t parameters;
        int seq_length;
    } known[] = {
        {"gpt2-124m", 124439808, 1024},     {"gpt2-350m", 354823168, 1024},    {"gpt2-774m", 774030080, 1024},
        {"gpt2-1558m", 1557611200, 1024},   {"llama3.2-1b", 1235814400, 4096}, {"llama3.2-3b", 3212749824, 4096},
        {"llama3-8b", 8030261248, 4096},    {"llama3.1-8b", 8030261248, 4096}, {"mistral-7b", 7248023552, 4096},
        {"smollm2-135m", 134515008, 4096},  {"smollm2-360m", 361821120, 4096}, {"smollm2-1.7b", 1711376384, 4096},
        {"qwen3-0.6b", 596049920, 4096},    {"qwen3-1.7b", 1720574976, 4096},  {"qwen3-4b", 4022468096, 4096},
        {"qwen3-8b", 8190735360, 4096},     {"gemma3-270m", 268098176, 4096},  {"gemma3-1b", 999885952, 4096},
        {"olmo2-1b", 1484916736, 4096},     {"olmo2-7b", 7298617344, 4096},    {"pythia-70m", 70426624, 2048},
        {"pythia-160m", 162322944, 2048},   {"pythia-410m", 405334016, 2048},  {"qwen2.5-0.5b", 494032768, 4096},
        {"qwen2.5-1.5b", 1543714304, 4096}, {"qwen2.5-7b", 7615616512, 4096},
    };
    struct command command;
    assert_int_equal(sizeof known / sizeof known[0], CONFIG_PRESETS - 1); // all but demo
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        char words[64];
        snprintf(words, sizeof words, "--plan --preset %s", known[i].preset);
        const struct config c = configure(&command, words);
        assert_int_equal(parameter_count(&c), known[i].parameters);
        assert_int_equal(c.model.seq_length, known[i].seq_length);
        // GPT-2's published count has no more than its own positions; a shorter sequence changes nothing.
        snprintf(words, sizeof words, "--plan --preset %s --seq-length 256", known[i].preset);
        const struct config shorter = configure(&command, words);
        assert_int_equal(parameter_count(&shorter), known[i].parameters);
    }
}

static void a_preset_fills_only_what_the_user_left_open(void **state) {
    struct command command;
    struct config c = configure(&command, "--plan --preset llama3.2-1b");
    assert_true(c.model.num_layers == 16 && c.model.hidden_size == 2048 && c.model.num_query_groups == 8 &&
                c.model.kv_channels == 64);
    assert_true(c.model.normalization == NORMALIZATION_RMSNORM && c.model.position_embedding_type == POSITION_ROPE);
    assert_true(c.model.activation == ACTIVATION_SWIGLU && c.model.rotary_base == 500000 && !c.model.add_bias_linear &&
                !c.model.add_qkv_bias);
    // one option before the preset, one after it
    c = configure(&command, "--num-layers 2 --preset llama3.2-1b --rotary-base=10000 --plan");
    assert_true(c.model.num_layers == 2 && c.model.rotary_base == 10000 && c.model.hidden_size == 2048);
    // A value that equals the table's default is the user's choice too.
    c = configure(&command, "--plan --preset llama3-8b --num-layers 12 --seq-length 1024");
    assert_true(c.model.num_layers == 12 && c.model.seq_length == 1024 && c.model.untie_embeddings_and_output_weights);
    c = configure(&command, "--plan --preset llama3-8b --no-untie-embeddings-and-output-weights");
    assert_false(c.model.untie_embeddings_and_output_weights);
    c = configure(&command, "--plan --preset qwen2.5-7b");
    assert_true(c.model.add_qkv_bias && !c.model.add_bias_linear && c.model.norm_epsilon == 1e-6f &&
                c.model.kv_channels == 128);
    c = configure(&command, "--plan --preset demo");
    assert_true(c.model.vocab_size == 257 && c.model.num_query_groups < c.model.num_attention_heads);
    assert_true(c.model.position_embedding_type == POSITION_ROPE);
}

static void sizes_left_open_follow_from_the_others(void **state) {
    struct command command;
    struct config c = configure(&command, "--plan");
    assert_true(c.model.num_query_groups == 12 && c.model.kv_channels == 64 && c.model.ffn_hidden_size == 3072 &&
                c.model.add_qkv_bias);
    assert_true(c.model.max_position_embeddings == 1024 && c.training.global_batch_size == c.training.micro_batch_size);
    assert_true(c.training.lr_decay_steps == c.training.train_steps &&
                c.training.lr_wsd_decay_steps == c.training.train_steps / 10);
    assert_int_equal(parameter_count(&c), 124439808); // the defaults are GPT-2 124M
    c = configure(&command, "--plan --activation swiglu --hidden-size 1024 --num-attention-heads 8");
    // 8/3 x 1024 = 2730.7, rounded up to 22 x 128
    assert_true(c.model.ffn_hidden_size == 2816 && c.model.kv_channels == 128);
    c = configure(&command, "--plan --hidden-size 100 --num-attention-heads 3 --kv-channels 8");
    assert_true(c.model.kv_channels == 8);
    c = configure(&command, "--plan --no-add-qkv-bias");
    assert_true(c.model.add_bias_linear && !c.model.add_qkv_bias);
    c = configure(&command, "--plan --no-add-bias-linear");
    assert_true(!c.model.add_bias_linear && !c.model.add_qkv_bias);
    // GPT-2's 1024 positions grow with the sequence, and so do the parameters.
    c = configure(&command, "--plan --preset gpt2-124m --seq-length 2048");
    assert_int_equal(c.model.max_position_embeddings, 2048);
    assert_int_equal(parameter_count(&c), 124439808 + 1024 * 768);
    c = configure(&command, "--train-data x --sample-every 5 --seq-length 64 --train-steps 5 --lr-decay-style WSD");
    assert_true(c.evaluation.sample_tokens == 64 && c.training.lr_wsd_decay_steps == 1 &&
                c.evaluation.val_every == 0); // there is nothing to validate on
    c = configure(&command, "--train-data x --val-data y");
    assert_true(c.evaluation.val_every > 0);
    c = configure(&command, "--train-data x --val-data y --val-every 0");
    assert_int_equal(c.evaluation.val_every, 0);
    const struct schedule s = config_schedule(&c);
    assert_true(s.style == LR_DECAY_COSINE && s.lr == 6e-4 && s.decay_steps == c.training.train_steps);
    assert_true(schedule_lr(&s, 0) == 6e-4);
}

static void contradictions_name_what_to_change(void **state) {
    assert_config_rejects("--plan --num-query-groups 5", "--num-query-groups 5|12; it may be one of 1, 2, 3, 4, 6, 12");
    assert_config_rejects("--plan --num-query-groups 24", "--num-query-groups 24|1, 2, 3, 4, 6, 12");
    assert_config_rejects("--plan --hidden-size 770", "--hidden-size 770|--num-attention-heads 12|--kv-channels");
    assert_config_rejects("--plan --hidden-size 780", "multiple of 8, not 65|--hidden-size|--kv-channels");
    assert_config_rejects("--plan --kv-channels 63", "multiple of 8, not 63: change --kv-channels");
    assert_config_rejects("--plan --seq-length 2048 --max-position-embeddings 1024",
                          "--max-position-embeddings 1024|--seq-length 2048");
    assert_config_rejects("--plan --micro-batch-size 4 --global-batch-size 10",
                          "--global-batch-size 10|--micro-batch-size 4|12");
    assert_config_rejects("--plan --micro-batch-size 8 --global-batch-size 4",
                          "--global-batch-size 4|the next multiple is 8");
    static const char *const malformed[] = {"4,4",   "4,4,x", "4,4,1.5",  "4,4,1,",
                                            "4,0,1", "0,4,1", "4,4,3e11", "4,4,nan"};
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        char line[128];
        snprintf(line, sizeof line, "--plan --global-batch-size 12 --rampup-batch-size %s", malformed[i]);
        assert_config_rejects(line, "three integers, START INCREMENT SAMPLES");
    }
    assert_config_rejects("--plan --global-batch-size 12 --rampup-batch-size 6,4,9", "'6,4,9'|must be multiples of 4");
    assert_config_rejects("--plan --global-batch-size 16 --world-size 2 --rampup-batch-size 4,4,9", "4 on 2 ranks");
    assert_config_rejects("--plan --global-batch-size 12 --rampup-batch-size 4,16,9", "of 16 from 4 on|12");
    assert_config_rejects("--plan --global-batch-size 12 --rampup-batch-size 16,4,9", "of 4 from 16 on|12");
    struct command ramp_command;
    const struct config ramp = configure(&ramp_command, "--plan --global-batch-size 12 --rampup-batch-size 4,8,9");
    assert_true(ramp.ramp.start == 4 && ramp.ramp.increment == 8 && ramp.ramp.batch == 12 && ramp.ramp.samples == 9);
    assert_config_rejects("--plan --lr 1e-4 --min-lr 1e-3", "--min-lr 0.001|--lr 0.0001");
    assert_config_rejects("--plan --plan-json a --plan-picture a", "--plan-json and --plan-picture both write a");
    assert_config_rejects("--plan --head-lr-mult 2", "--head-lr-mult 2 is of a head of its own|--untie-embeddings");
    struct command head_command;
    const struct config head =
        configure(&head_command, "--plan --head-lr-mult 2 --untie-embeddings-and-output-weights");
    assert_true(head.training.head_lr_mult == 2);
    assert_config_rejects("--plan --train-steps 10 --lr-warmup-steps 11", "--lr-warmup-steps 11|10 steps|raise");
    assert_config_rejects("--plan --lr-decay-style WSD --lr-warmup-steps 600 --lr-wsd-decay-steps 500",
                          "--lr-wsd-decay-steps 500|--lr-warmup-steps 600|1000 steps");
    assert_config_rejects("--out results", "--train-data is missing|--plan");
    assert_config_rejects("--train-data=", "--train-data is missing");
    assert_config_rejects("--train-data x --out=", "--out is empty");
    assert_config_rejects("--train-data x --val-every 10", "--val-every 10 needs --val-data");
    assert_config_rejects("--train-data x --seq-length 64 --sample-tokens 65", "--sample-tokens 65|--seq-length 64");
    assert_config_rejects("--plan --num-layers=-1", "--num-layers: '-1' is out of range");
    // cut to 32 bits it would be 1
    assert_config_rejects("--plan --train-steps 4294967297", "--train-steps: |out of range");
    assert_config_rejects("--plan --train-steps 2147483648", "is out of range, more than can be held; expected");
    assert_config_rejects("--plan --max-shard-gib 1e40", "is out of range, more than can be held; expected");
    assert_config_rejects("--plan --exit-after 1e-400",
                          "is out of range, too near to 0 to be held; expected"); // 0: never
    assert_config_rejects("--plan --weight-decay 1e-50", "is out of range, too near to 0 to be held; expected");
    assert_config_rejects("--plan --z-loss 0.00e0001e", "not understood");
    assert_config_rejects("--plan --vocab-size 0", "--vocab-size: '0' is out of range");
    assert_config_rejects("--plan --hidden-dropout 1", "--hidden-dropout: '1' is out of range");
    assert_config_rejects("--plan --attention-dropout -0.5", "--attention-dropout: '-0.5' is out of range");
    assert_config_rejects("--plan --adam-beta2 1", "--adam-beta2: '1' is out of range");
    assert_config_rejects("--plan --preset gpt3", "--preset: 'gpt3' is not known|gpt2-124m|llama3-8b|or demo");
    assert_config_rejects("--plan --num-heads 3", "unknown option --num-heads;|--num-");
    assert_config_rejects("--plan --train-iters 3", "unknown option --train-iters;|--train-steps");
    assert_config_rejects("--plan --recompute full",
                          "--recompute is ambiguous|--recompute-granularity|--recompute-modules");
}

// ---- FP8 ----

#define FP8 "--plan --fp8-format hybrid "

static void fp8_is_off_and_its_recipe_is_the_stateless_one(void **state) {
    struct command command;
    struct config c = configure(&command, "--plan");
    int first, end;
    assert_true(c.fp8.fp8_format == FP8_FORMAT_NONE && c.fp8.fp8_recipe == FP8_RECIPE_TENSORWISE);
    config_fp8_layers(&c, &first, &end);
    assert_true(first == 0 && end == 0);
    c = configure(&command, FP8);
    assert_true(c.fp8.fp8_format == FP8_FORMAT_HYBRID && c.fp8.fp8_fast_accumulation == FP8_FAST_FORWARD);
    assert_true(c.device.precision == WITH_AUTO);
    c = configure(&command, FP8 "--fp8-recipe delayed");
    assert_true(c.fp8.fp8_margin == 0 && c.fp8.fp8_amax_history_len == 1 &&
                c.fp8.fp8_amax_compute_algo == FP8_AMAX_MOST_RECENT);
    c = configure(&command, FP8 "--fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max "
                                "--fp8-margin 2 --precision bf16");
    assert_true(c.fp8.fp8_margin == 2 && c.fp8.fp8_amax_history_len == 1024 &&
                c.fp8.fp8_amax_compute_algo == FP8_AMAX_MAX);
}

// Checks that blockwise scales exclude fast accumulation: the sums of blocks' products are scaled in fp32, which leaves
// nothing of it.
static void blockwise_scales_have_no_fast_accumulation(void **state) {
    struct command command;
    struct config c = configure(&command, FP8 "--fp8-recipe blockwise");
    assert_true(c.fp8.fp8_fast_accumulation == FP8_FAST_NONE);
    c = configure(&command, FP8 "--fp8-recipe blockwise --fp8-fast-accumulation none");
    assert_true(c.fp8.fp8_fast_accumulation == FP8_FAST_NONE);
    assert_config_rejects(FP8 "--fp8-recipe blockwise --fp8-fast-accumulation all",
                          "--fp8-fast-accumulation all|--fp8-recipe blockwise|leave it out");
    assert_config_rejects(FP8 "--fp8-recipe blockwise --fp8-fast-accumulation forward",
                          "--fp8-fast-accumulation forward|--fp8-recipe blockwise|leave it out");
}

static void fp8_layers_check(const char *words, int first, int end) {
    struct command command;
    const struct config c = configure(&command, words);
    int from = -1, to = -1;
    config_fp8_layers(&c, &from, &to);
    assert_int_equal(from, first);
    assert_int_equal(to, end);
}
static void first_and_last_layers_may_stay_in_bf16(void **state) {
    fp8_layers_check(FP8, 0, 12);
    fp8_layers_check(FP8 "--first-last-layers-bf16", 1, 11);
    fp8_layers_check(FP8 "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0", 0, 11);
    fp8_layers_check(FP8 "--first-last-layers-bf16 --num-layers-at-end-in-bf16 5", 1, 7);
    fp8_layers_check(FP8 "--first-last-layers-bf16 --num-layers-at-end-in-bf16 10", 1, 2);
    assert_config_rejects(FP8 "--first-last-layers-bf16 --num-layers-at-end-in-bf16 11",
                          "--num-layers-at-start-in-bf16 1|--num-layers-at-end-in-bf16 11|12 layers");
    assert_config_rejects(FP8 "--first-last-layers-bf16 --num-layers-at-start-in-bf16 65535",
                          "--num-layers-at-start-in-bf16 65535");
    assert_config_rejects(FP8 "--num-layers 2 --first-last-layers-bf16", "--num-layers-at-start-in-bf16 1|2 layers");
    assert_config_rejects(FP8 "--num-layers-at-start-in-bf16 2",
                          "--num-layers-at-start-in-bf16 2 needs --first-last-layers-bf16");
    assert_config_rejects(FP8 "--num-layers-at-end-in-bf16 2",
                          "--num-layers-at-end-in-bf16 2 needs --first-last-layers-bf16");
}

static void options_of_fp8_that_nothing_uses_are_refused(void **state) {
    static const char *const without_format[] = {
        "--fp8-recipe delayed",
        "--fp8-margin 1",
        "--fp8-amax-history-len 16",
        "--fp8-amax-compute-algo max",
        "--fp8-fast-accumulation all",
        "--first-last-layers-bf16",
        "--num-layers-at-end-in-bf16",
        "--num-layers-at-start-in-bf16",
        "--fp8-dot-product-attention full",
    };
    for (size_t i = 0; i < sizeof without_format / sizeof *without_format; i++) {
        char words[128], name[64];
        const bool layers = strncmp(without_format[i], "--num", 5) == 0;
        snprintf(words, sizeof words, "--plan %s%s", without_format[i], layers ? " 2" : "");
        snprintf(name, sizeof name, "%.*s|needs --fp8-format; add --fp8-format hybrid, or leave it out",
                 (int)strcspn(without_format[i], " "), without_format[i]);
        assert_config_rejects(words, name);
    }
    static const char *const delayed_only[] = {"--fp8-margin 1", "--fp8-amax-history-len 16",
                                               "--fp8-amax-compute-algo max"};
    for (size_t i = 0; i < 3; i++) {
        char words[128], name[64];
        snprintf(words, sizeof words, FP8 "%s", delayed_only[i]);
        snprintf(name, sizeof name, "%s is of --fp8-recipe delayed", delayed_only[i]);
        assert_config_rejects(words, name);
        snprintf(words, sizeof words, FP8 "--fp8-recipe blockwise %s", delayed_only[i]);
        assert_config_rejects(words, name);
    }
}

// Checks that Megatron's options which FP8 does not have are refused by name.
static void what_fp8_does_not_have_is_named(void **state) {
    assert_config_rejects(FP8 "--fp8-recipe mxfp8", "--fp8-recipe: 'mxfp8'|tensorwise, delayed or blockwise");
    assert_config_rejects(FP8 "--fp8-recipe custom", "--fp8-recipe: 'custom'|tensorwise, delayed or blockwise");
    assert_config_rejects("--plan --fp8-format e5m2", "--fp8-format: 'e5m2'|none, hybrid or e4m3");
    assert_config_rejects(FP8 "--fp8-interval 1", "unknown option --fp8-interval|the nearest is --fp8-");
    assert_config_rejects(FP8 "--no-fp8-wgrad", "unknown option --no-fp8-wgrad|the nearest is --");
    assert_config_rejects(FP8 "--fp8-param-gather", "unknown option --fp8-param-gather|the nearest is --");
    assert_config_rejects(FP8 "--fp8-amax-history-len 0", "--fp8-amax-history-len: '0' is out of range");
    assert_config_rejects(FP8 "--fp8-margin -1", "--fp8-margin: '-1' is out of range");
}

// Checks what attention in FP8 is by default and by the environment, and that what it does not have is refused with the
// option to change.
static void attention_in_fp8_is_asked_for_and_names_what_it_does_not_have(void **state) {
#define FP8_ATTENTION FP8 "--fp8-dot-product-attention full "
    struct command command;
    struct config c = configure(&command, FP8);
    assert_true(config_attention_in_fp8(&c) == FP8_ATTENTION_NONE);
    c = configure(&command, FP8_ATTENTION);
    assert_true(config_attention_in_fp8(&c) == FP8_ATTENTION_FULL);
    setenv("NVTE_FP8_DPA_BWD", "0", 1);
    c = configure(&command, FP8_ATTENTION);
    assert_true(config_attention_in_fp8(&c) == FP8_ATTENTION_FORWARD);
    c = configure(&command, FP8);
    assert_true(config_attention_in_fp8(&c) == FP8_ATTENTION_NONE);
    setenv("NVTE_FP8_DPA_BWD", "1", 1);
    c = configure(&command, FP8_ATTENTION);
    assert_true(config_attention_in_fp8(&c) == FP8_ATTENTION_FULL);
    setenv("NVTE_FP8_DPA_BWD", "no", 1);
    configure(&command, FP8); // which does not ask
    assert_config_rejects(FP8_ATTENTION, "NVTE_FP8_DPA_BWD=no|expected 0|or 1|unset it");
    unsetenv("NVTE_FP8_DPA_BWD");
    configure(&command, "--plan --fp8-dot-product-attention none");
    assert_config_rejects(FP8 "--fp8-dot-product-attention backward", "'backward'|none, forward or full");
    c = configure(&command, FP8 "--fp8-dot-product-attention true"); // as Megatron-LM has it
    assert_true(config_attention_in_fp8(&c) == FP8_ATTENTION_FULL);
    assert_config_rejects(FP8_ATTENTION "--fp8-recipe blockwise", "--fp8-recipe blockwise|delayed or tensorwise");
    static const char *const lacks[][2] = {
        {"--attention-dropout 0.1", "--attention-dropout: set it to 0"},
        {"--window-size 16", "--window-size: set it to none"},
        {"--reset-attention-mask", "--reset-attention-mask: leave it out"},
        {"--separate-documents", "--separate-documents: leave it out"},
        {"--separate-documents --reset-attention-mask", "--reset-attention-mask: leave it out"},
        {"--attn-logit-softcapping 30", "--attn-logit-softcapping: set it to 0"},
        {"--attention-backend unfused", "--attention-backend unfused: take auto"},
    };
    for (size_t i = 0; i < sizeof lacks / sizeof *lacks; i++) {
        char words[256], says[256];
        snprintf(words, sizeof words, FP8_ATTENTION "%s", lacks[i][0]);
        snprintf(says, sizeof says, "does not go with %s|leave --fp8-dot-product-attention out", lacks[i][1]);
        assert_config_rejects(words, says);
    }
}

static void fp8_takes_bf16_and_sizes_that_its_products_have(void **state) {
    struct command command;
    assert_config_rejects(FP8 "--precision fp32", "--fp8-format needs --precision bf16|change --precision");
    assert_config_rejects(FP8 "--hidden-size 776 --kv-channels 64", "multiples of 16|--hidden-size, is 776");
    assert_config_rejects(FP8 "--ffn-hidden-size 3080", "multiples of 16|--ffn-hidden-size, is 3080");
    assert_config_rejects(FP8 "--activation swiglu --ffn-hidden-size 2056", "--ffn-hidden-size, is 2056");
    assert_config_rejects(FP8 "--num-attention-heads 3 --kv-channels 8",
                          "--num-attention-heads times --kv-channels|24");
    assert_config_rejects(FP8 "--micro-batch-size 1 --seq-length 40",
                          "multiples of 16|--micro-batch-size times --seq-length, is 40|leave --fp8-format out");
    configure(&command, FP8 "--micro-batch-size 2 --seq-length 40");
#define BLOCKS FP8 "--fp8-recipe blockwise --hidden-size 256 --num-attention-heads 4 --kv-channels 32 "
    configure(&command, BLOCKS "--num-query-groups 2");
    assert_config_rejects(BLOCKS "--num-query-groups 1",
                          "multiples of 128|--num-query-groups, times --kv-channels, is 192|"
                          "tensorwise");
    assert_config_rejects(BLOCKS "--ffn-hidden-size 1040", "multiples of 128|--ffn-hidden-size, is 1040|tensorwise");
    assert_config_rejects(BLOCKS "--micro-batch-size 1 --seq-length 192",
                          "--micro-batch-size times --seq-length, is 192");
    assert_config_rejects(FP8 "--fp8-recipe blockwise --preset gpt2-1558m", "--hidden-size, is 1600");
    assert_config_rejects(FP8 "--fp8-recipe blockwise --hidden-size 256 --num-attention-heads 1 --kv-channels 64",
                          "--num-attention-heads times --kv-channels, is 64");
}

// Checks that validation and generation, which do not use FP8, take the options of the run that trained the model.
static void runs_that_do_not_train_ignore_what_fp8_needs(void **state) {
    struct command command;
    const struct config c = configure(&command, "--init-from m --eval-only --val-data v --fp8-format hybrid "
                                                "--precision fp32 --micro-batch-size 1 --seq-length 40");
    int first, end;
    config_fp8_layers(&c, &first, &end);
    assert_int_equal(first, end);
    free((void *)configure(&command, "--init-from m --generate x --fp8-format e4m3 --seq-length 257")
             .evaluation.generate);
}

// ---- options of the layers, of positions and of documents ----

#define ROPE "--plan --position-embedding-type rope "
#define YARN ROPE "--rope-scaling-type yarn --rope-original-max-position-embeddings 4096 "
#define LLAMA3 ROPE "--rope-scaling-type llama3 --rope-original-max-position-embeddings 8192 "
#define LONGROPE ROPE "--kv-channels 8 --rope-scaling-type longrope --rope-original-max-position-embeddings 4096 "

static void windows_are_counted_with_the_query(void **state) {
    static const struct {
        const char *text;
        int keys;
    } sizes[] = {{"none", 0}, {"512", 512}, {"511,0", 512}, {"1", 1}, {"0,0", 1}, {"1e3", 1000}, {"16777216", 1 << 24}};
    static const char *const wrong[] = {"0",
                                        "-1",
                                        "-1,0",
                                        "511,1",
                                        "511,-1",
                                        "511,0,0",
                                        "511,",
                                        ",0",
                                        "x",
                                        "",
                                        "1.5",
                                        "1.5,0",
                                        "inf",
                                        "16777217",
                                        "nan",
                                        "5;0",
                                        "5x,0",
                                        "None",
                                        "99999999999999999999"};
    struct command command;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char words[64];
        snprintf(words, sizeof words, "--plan --window-size %s", sizes[i].text);
        const struct config c = configure(&command, words);
        assert_int_equal(config_window(&c), sizes[i].keys);
        for (int l = 0; l < c.model.num_layers; l++)
            assert_int_equal(config_layer_is_windowed(&c, l), sizes[i].keys > 0);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char words[64], message[128];
        snprintf(words, sizeof words, "--plan --window-size=%s", wrong[i]);
        snprintf(message, sizeof message, "--window-size '%s': expected none, the number of keys|W-1,0", wrong[i]);
        assert_config_rejects(words, message);
    }
}

// Checks the kinds of layers. windows: W where a layer has the window; rotary: R where RoPE is applied.
static void layers_check(const char *words, const char *windows, const char *rotary) {
    struct command command;
    const struct config c = configure(&command, words);
    assert_int_equal(strlen(windows), c.model.num_layers);
    for (int l = 0; l < c.model.num_layers; l++) {
        assert_int_equal(config_layer_is_windowed(&c, l), windows[l] == 'W');
        assert_int_equal(config_layer_is_rotary(&c, l), rotary[l] == 'R');
    }
}
static void layers_are_chosen_by_number_or_list(void **state) {
    layers_check("--plan --num-layers 4", "....", "....");
    layers_check(ROPE "--num-layers 4", "....", "RRRR");
    layers_check(ROPE "--num-layers 4 --window-size 8", "WWWW", "RRRR");
    layers_check(ROPE "--num-layers 7 --window-size 8 --window-attn-skip-freq 3", "WW.WW.W", "RRRRRRR");
    layers_check(ROPE "--num-layers 3 --window-size 8 --window-attn-skip-freq 1", "...", "RRR");
    layers_check(ROPE "--num-layers 3 --window-size 8 --window-attn-skip-freq 9", "WWW", "RRR");
    layers_check(ROPE "--num-layers 3 --window-size 8 --window-attn-skip-freq 0,1,1", ".WW", "RRR");
    layers_check(ROPE "--num-layers 1 --window-size 8 --window-attn-skip-freq 0", ".", "R");
    layers_check(ROPE "--num-layers 1 --window-size 8 --window-attn-skip-freq 1", "W", "R");
    layers_check(ROPE "--num-layers 7 --no-rope-freq 3", ".......", "RR.RR.R");
    layers_check(ROPE "--num-layers 3 --no-rope-freq 1", "...", "...");
    layers_check(ROPE "--num-layers 3 --no-rope-freq 0,1,0", "...", "R.R");
    layers_check(ROPE "--num-layers 1 --no-rope-freq 1", ".", ".");
    layers_check(ROPE "--num-layers 1 --no-rope-freq 0", ".", "R");
    layers_check("--plan --preset gemma3-270m", "WWWWW.WWWWW.WWWWW.", "RRRRRRRRRRRRRRRRRR");
}
static void lists_of_layers_are_checked(void **state) {
    static const char *const options[] = {"--no-rope-freq", "--window-size 8 --window-attn-skip-freq"};
    static const struct {
        const char *text, *words;
    } wrong[] = {{"0", "expected none, a number N of at least 1, or a list"},
                 {"-2", "expected none, a number N"},
                 {"1.5", "expected none, a number N"},
                 {"x", "expected none, a number N"},
                 {"", "expected none, a number N"},
                 {"65537", "expected none, a number N"},
                 {"0,1", "has 2 layers, the model has 3"},
                 {"0,1,0,1", "has 4 layers, the model has 3"},
                 {"0,1,2", "expected a list of a 0 or 1 for each layer"},
                 {"0,1,0.5", "expected a list of a 0 or 1"},
                 {"0,1,", "expected a list of a 0 or 1"},
                 {",0,1", "expected a list of a 0 or 1"},
                 {"0,,1", "expected a list of a 0 or 1"},
                 {"0,x,1", "expected a list of a 0 or 1"}};
    for (int o = 0; o < 2; o++)
        for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
            char words[160], message[160];
            const char *const name = o == 0 ? options[o] : "--window-attn-skip-freq";
            snprintf(words, sizeof words, ROPE "--num-layers 3 %s=%s", options[o], wrong[i].text);
            snprintf(message, sizeof message, "%s '%s': |%s", name, wrong[i].text, wrong[i].words);
            assert_config_rejects(words, message);
        }
    assert_config_rejects("--plan --window-attn-skip-freq 2", "--window-attn-skip-freq 2 needs --window-size");
}

static void rotary_settings_are_of_rotary_positions(void **state) {
    struct command command;
    struct config c = configure(&command, ROPE "--rotary-percent 0.25");
    assert_int_equal(config_rotary_dims(&c), 16);
    c = configure(&command, ROPE);
    assert_int_equal(config_rotary_dims(&c), 64);
    c = configure(&command, ROPE "--kv-channels 8 --rotary-percent 0.25");
    assert_int_equal(config_rotary_dims(&c), 2);
    c = configure(&command, ROPE "--window-size 8 --rotary-base-local 10000");
    assert_true(c.model.rotary_base_local == 10000);
    static const char *const alone[] = {"--rope-scaling-type linear", "--rotary-percent 0.5", "--no-rope-freq 2",
                                        "--window-size 8 --rotary-base-local 10000", "--rotary-base 500000"};
    for (int i = 0; i < 5; i++) {
        char words[128];
        snprintf(words, sizeof words, "--plan %s", alone[i]);
        assert_config_rejects(words, "of rotary positions; add --position-embedding-type rope");
    }
    assert_config_rejects(ROPE "--rotary-percent 0.3", "--rotary-percent 0.3 rotates 19 of a head's 64 elements|even");
    assert_config_rejects(ROPE "--rotary-percent 0.02", "--rotary-percent 0.02 rotates 1 of a head's 64 elements|2 at");
    assert_config_rejects(ROPE "--rotary-percent 0.001", "--rotary-percent 0.001 rotates 0 of");
    assert_config_rejects(ROPE "--rotary-percent 0", "--rotary-percent: '0' is out of range");
    assert_config_rejects(ROPE "--rotary-percent 1.1", "--rotary-percent: '1.1' is out of range");
    assert_config_rejects(ROPE "--rotary-base-local 10000", "--rotary-base-local 10000|add --window-size");
    assert_config_rejects(ROPE "--window-size 8 --rotary-base-local 0.5", "--rotary-base-local 0.5: |at least 1");
}

static void scaled_frequencies_take_the_settings_of_their_type(void **state) {
    struct command command;
    struct config c = configure(&command, YARN "--rope-scaling-factor 4 --yarn-beta-fast 16 --no-yarn-truncate");
    assert_true(c.model.rope_scaling_type == SCALING_YARN && c.model.yarn_beta_fast == 16 && !c.model.yarn_truncate);
    c = configure(&command, LLAMA3 "--rope-scaling-factor 8 --rope-low-freq-factor 0.5");
    assert_true(c.model.rope_scaling_factor == 8 && c.model.rope_low_freq_factor == 0.5 &&
                c.model.rope_high_freq_factor == 4);
    c = configure(&command, ROPE "--rope-scaling-type linear --rope-scaling-factor 2");
    assert_true(c.model.rope_scaling_factor == 2);
    c = configure(&command, LONGROPE "--rope-short-factors 1,1.5,2,2.5 --rope-long-factors 1,2,4,1e1 "
                                     "--rope-attention-factor 1.2");
    assert_string_equal(c.model.rope_long_factors, "1,2,4,1e1");

    static const struct {
        const char *words, *option;
    } unused[] = {{ROPE "--rope-scaling-factor 2", "--rope-scaling-factor 2 |--rope-scaling-type none"},
                  {ROPE "--rope-low-freq-factor 2", "--rope-low-freq-factor 2 |--rope-scaling-type none"},
                  {YARN "--rope-low-freq-factor 2", "--rope-low-freq-factor 2 |--rope-scaling-type yarn"},
                  {YARN "--rope-high-freq-factor 2", "--rope-high-freq-factor 2 |--rope-scaling-type yarn"},
                  {YARN "--rope-short-factors 1", "--rope-short-factors 1 |--rope-scaling-type yarn"},
                  {LLAMA3 "--rope-long-factors 1", "--rope-long-factors 1 |--rope-scaling-type llama3"},
                  {LLAMA3 "--yarn-beta-fast 2", "--yarn-beta-fast 2 |--rope-scaling-type llama3"},
                  {LLAMA3 "--yarn-beta-slow 2", "--yarn-beta-slow 2 |--rope-scaling-type llama3"},
                  {LLAMA3 "--no-yarn-truncate", "--yarn-truncate false |--rope-scaling-type llama3"},
                  {LLAMA3 "--yarn-mscale 2", "--yarn-mscale 2 |--rope-scaling-type llama3"},
                  {LLAMA3 "--yarn-mscale-all-dim 2", "--yarn-mscale-all-dim 2 |--rope-scaling-type llama3"},
                  {LLAMA3 "--rope-attention-factor 2", "--rope-attention-factor 2 |--rope-scaling-type llama3"},
                  {ROPE "--rope-scaling-type linear --rope-original-max-position-embeddings 9",
                   "--rope-original-max-position-embeddings 9 |--rope-scaling-type linear"}};
    for (size_t i = 0; i < sizeof unused / sizeof unused[0]; i++) {
        char words[160];
        snprintf(words, sizeof words, "%s|is not used with|leave it out", unused[i].option);
        assert_config_rejects(unused[i].words, words);
    }
    // With another type a preset's settings fall away.
    c = configure(&command, "--plan --preset llama3.2-1b --rope-scaling-type none");
    assert_true(c.model.rope_scaling_factor == 1 && c.model.rope_original_max_position_embeddings == 0);
    c = configure(&command, "--plan --preset llama3.2-1b --rope-scaling-type yarn");
    assert_true(c.model.rope_scaling_factor == 32 && c.model.rope_original_max_position_embeddings == 8192);
    c = configure(&command, "--plan --preset llama3.2-1b");
    assert_true(c.model.rope_scaling_factor == 32 && c.model.rope_high_freq_factor == 4);

    static const char *const types[] = {"llama3", "yarn", "longrope"};
    for (int i = 0; i < 3; i++) {
        char words[128];
        snprintf(words, sizeof words, ROPE "--rope-scaling-type %s", types[i]);
        assert_config_rejects(words, "needs --rope-original-max-position-embeddings, the longest sequence");
    }
    assert_config_rejects(LLAMA3 "--rope-low-freq-factor 4", "--rope-low-freq-factor 4|--rope-high-freq-factor 4");
    assert_config_rejects(YARN "--yarn-beta-slow 32", "--yarn-beta-slow 32 is not below --yarn-beta-fast 32");
    assert_config_rejects(YARN "--rotary-base 1", "yarn needs a --rotary-base above 1, not 1");
    assert_config_rejects(YARN "--rope-scaling-factor 0", "--rope-scaling-factor: '0' is out of range");
    assert_config_rejects(LONGROPE, "--rope-short-factors '': expected 4 numbers of at least 1e-06");
    assert_config_rejects(LONGROPE "--rope-short-factors 1,1,1,1", "--rope-long-factors '': expected 4 numbers");
    assert_config_rejects(LONGROPE "--rope-short-factors 1,1,1 --rope-long-factors 1,1,1,1",
                          "--rope-short-factors '1,1,1': expected 4 numbers");
    assert_config_rejects(LONGROPE "--rope-short-factors 1,1,1,1 --rope-long-factors 1,1,1,1,1",
                          "--rope-long-factors '1,1,1,1,1': has more than 4 numbers");
    assert_config_rejects(LONGROPE "--rope-short-factors 1,1,0,1 --rope-long-factors 1,1,1,1",
                          "--rope-short-factors '1,1,0,1': expected 4 numbers of at least");
    assert_config_rejects(LONGROPE "--rope-short-factors 1,1,x,1 --rope-long-factors 1,1,1,1",
                          "--rope-short-factors '1,1,x,1': expected 4 numbers");
    assert_config_rejects(LONGROPE "--rope-short-factors 1,1,inf,1 --rope-long-factors 1,1,1,1",
                          "--rope-short-factors '1,1,inf,1': expected 4 numbers");
}

static void norms_and_multipliers_that_contradict(void **state) {
    struct command command;
    assert_true(configure(&command, "--plan --qk-layernorm --normalization RMSNorm").model.qk_layernorm);
    assert_true(configure(&command, "--plan --parallel-residual").model.parallel_residual);
    assert_true(configure(&command, "--plan --residual-multiplier -0.5").model.residual_multiplier == -0.5);
    assert_config_rejects("--plan --qk-layernorm", "--qk-layernorm takes only --normalization RMSNorm");
    assert_config_rejects("--plan --qk-layernorm-width full", "--qk-layernorm-width full needs --qk-layernorm");
    assert_config_rejects("--plan --parallel-residual --norm-placement post",
                          "--parallel-residual takes only --norm-placement pre");
    assert_config_rejects("--plan --parallel-residual --norm-placement sandwich",
                          "--parallel-residual takes only --norm-placement pre");
    assert_config_rejects("--plan --logit-multiplier 0", "--logit-multiplier|must not be 0");
    assert_config_rejects("--plan --embedding-multiplier 0", "--embedding-multiplier|must not be 0");
    assert_config_rejects("--plan --logit-multiplier -1", "--logit-multiplier|-1");
    assert_config_rejects("--plan --residual-multiplier -0", "--residual-multiplier|must not be 0");
    assert_config_rejects("--plan --softmax-scale -1", "--softmax-scale: '-1' is out of range");
    assert_config_rejects("--plan --attn-logit-softcapping -1", "--attn-logit-softcapping: '-1' is out of range");
    assert_config_rejects("--plan --final-logit-softcapping -1", "--final-logit-softcapping: '-1' is out of range");
}

// Checks that an option that stands for three does not change those that the user gave.
static void one_option_sets_three(void **state) {
    struct command command;
    struct config c = configure(&command, "--plan --add-bias-linear");
    assert_true(c.model.add_qkv_bias && c.model.add_attention_proj_bias && c.model.add_mlp_bias);
    c = configure(&command, "--plan --no-add-bias-linear");
    assert_false(c.model.add_qkv_bias || c.model.add_attention_proj_bias || c.model.add_mlp_bias);
    c = configure(&command, "--plan --no-add-bias-linear --add-mlp-bias");
    assert_true(!c.model.add_qkv_bias && !c.model.add_attention_proj_bias && c.model.add_mlp_bias);
    c = configure(&command, "--plan --add-bias-linear --no-add-attention-proj-bias");
    assert_true(c.model.add_qkv_bias && !c.model.add_attention_proj_bias && c.model.add_mlp_bias);
    c = configure(&command, "--plan --no-add-mlp-bias");
    assert_true(c.model.add_qkv_bias && c.model.add_attention_proj_bias && !c.model.add_mlp_bias);

    c = configure(&command, "--plan");
    assert_false(c.data.separate_documents || c.data.reset_attention_mask || c.data.reset_position_ids ||
                 c.data.eod_mask_loss);
    c = configure(&command, "--plan --separate-documents");
    assert_true(c.data.reset_attention_mask && c.data.reset_position_ids && c.data.eod_mask_loss);
    c = configure(&command, "--plan --no-eod-mask-loss --separate-documents");
    assert_true(c.data.reset_attention_mask && c.data.reset_position_ids && !c.data.eod_mask_loss);
    c = configure(&command, "--plan --separate-documents --no-reset-position-ids");
    assert_true(c.data.reset_attention_mask && !c.data.reset_position_ids && c.data.eod_mask_loss);
    c = configure(&command, "--plan --separate-documents --no-reset-attention-mask");
    assert_true(!c.data.reset_attention_mask && c.data.reset_position_ids && c.data.eod_mask_loss);
    c = configure(&command, "--plan --reset-position-ids --document-delimiter last --eod-token 50256");
    assert_true(!c.data.reset_attention_mask && c.data.reset_position_ids && !c.data.eod_mask_loss &&
                c.data.eod_token == 50256);
    assert_true(c.data.document_delimiter == DELIMITER_LAST);
    assert_config_rejects("--plan --eod-token 50257", "--eod-token 50257 is outside|--vocab-size 50257");
    assert_config_rejects("--plan --preset demo --eod-token 257", "--eod-token 257 is outside|--vocab-size 257");
    assert_config_rejects("--plan --eod-token -2", "--eod-token: '-2' is out of range");
    assert_config_rejects("--plan --document-delimiter middle", "--document-delimiter: 'middle'|auto, first or last");
}

static void lists_of_recomputation_are_checked_for_form(void **state) {
    struct command command;
    struct config c = configure(&command, "--plan --recompute-layers 0-3,8 --recompute-modules norm,activation");
    assert_string_equal(c.recompute.recompute_layers, "0-3,8");
    assert_string_equal(c.recompute.recompute_modules, "norm,activation");
    static const char *const wrong[] = {",",    "1,",   ",1", "1-",   "-1",    "3-1",
                                        "1--2", "1,,2", "a",  "+1,2", "1-2-3", "99999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char words[64];
        snprintf(words, sizeof words, "--plan --recompute-layers=%s", wrong[i]);
        assert_config_rejects(words, "--recompute-layers: |numbers and ranges like 0-3,8");
    }
    const char *help = config_rows[option_find(&config_options, "recompute_modules", false)].help;
    for (int i = 0; i < NUM_MODULES; i++)
        assert_non_null(strstr(help, module_names[i]));
    assert_config_rejects("--plan --recompute-modules Norm", "--recompute-modules: 'Norm' is not known");
    assert_config_rejects("--plan --recompute-modules norm,nrom",
                          "--recompute-modules: 'nrom' is not known|core_attn,norm");
    assert_config_rejects("--plan --recompute-modules norm,,mlp", "--recompute-modules: '' is not known");
    assert_config_rejects("--plan --recompute-modules norm,", "--recompute-modules: 'norm,' ends in a comma");
    assert_config_rejects("--plan --muon-num-ns-steps 5", "--muon-num-ns-steps needs --optimizer muon");
    assert_config_rejects("--plan --optimizer muon --muon-momentum 1", "--muon-momentum: '1' is out of range");
    assert_config_rejects("--plan --ema-decay 0.9 --main-params-dtype bf16 --precision bf16",
                          "--ema-decay 0.9|fp32 parameters");
    assert_config_rejects("--plan --init-from-ema", "--init-from-ema needs --init-from");
}

// Counts a model's parameters in a child: the table of parameters ends the program where a model is too large.
static void count_in_child(void *words) {
    struct command command;
    const struct config c = configure(&command, (const char *)words);
    const struct model_shape shape = model_shape_of(&c, sizeof(floatX), false);
    struct parameters table = parameters_create(&shape, 1, NULL);
    parameters_free(&table);
}
static void products_that_overflow_are_caught(void **state) {
    struct command command;
    assert_config_rejects("--plan --num-attention-heads 65535 --kv-channels 65528", "--num-attention-heads 65535|2^30");
    assert_fails(count_in_child, (void *)"--plan --num-layers 60000 --hidden-size 1048000 --num-attention-heads 8",
                 "parameters|--num-layers");
    assert_config_rejects("--plan --micro-batch-size 16777215", "--micro-batch-size 16777215|--seq-length 1024");
    assert_config_rejects("--plan --micro-batch-size 60 --seq-length 16777215 "
                          "--num-attention-heads 60000 --kv-channels 8",
                          "64 bits|--seq-length 16777215");
    assert_config_rejects("--plan --train-steps 2147483647 --global-batch-size 16777212 --seq-length 65536",
                          "--train-steps 2147483647|--global-batch-size 16777212");
    // Large and legal: nothing overflows on the way, which the sanitized build checks.
    const struct config c = configure(&command, "--plan --train-steps 2147483647 --global-batch-size 16777212 "
                                                "--num-layers 65535 --seq-length 16");
    assert_true(parameter_count(&c) == (int64_t)65535 * 7087872 + 50257 * 768 + 16 * 768 + 2 * 768);
}

// Checks that offloaded states are saved without a copy: it would need the host's memory too, where that is short.
static void what_is_offloaded_is_saved_without_a_copy(void **state) {
    static const char *const offloads[] = {"--plan --optimizer-cpu-offload", "--plan --offload-weights",
                                           "--plan --offload-gradients"};
    struct command command;
    char words[128];
    assert_true(configure(&command, "--plan").checkpoints.checkpoint_async);
    for (size_t i = 0; i < sizeof offloads / sizeof *offloads; i++) {
        assert_false(configure(&command, offloads[i]).checkpoints.checkpoint_async);
        snprintf(words, sizeof words, "%s --checkpoint-async", offloads[i]);
        assert_true(configure(&command, words).checkpoints.checkpoint_async);
    }
}

static void stdout_in_child(void *words) {
    dup2(STDERR_FILENO, STDOUT_FILENO); // the parent's pipe
    configure_in_child(words);
}
static void help_has_every_option_with_its_default(void **state) {
    static char text[65536];
    assert_int_equal(run_in_child(stdout_in_child, (void *)"--help all", text, sizeof text), 0);
    const char *at = text;
    for (int i = 0; i < CONFIG_ROWS; i++) { // in the table's order
        const struct option_row *row = &config_rows[i];
        char name[OPTION_NAME], wanted[2 * OPTION_NAME];
        option_display(name, row->name);
        if (row->kind == OPTION_GROUP)
            snprintf(wanted, sizeof wanted, "\n%s:\n", row->name);
        else
            snprintf(wanted, sizeof wanted, "\n  --%s%s", name, row->kind == OPTION_BOOL ? "" : " ");
        at = strstr(at, wanted);
        assert_non_null(at);
        if (row->kind == OPTION_GROUP)
            continue;
        snprintf(wanted, sizeof wanted, "[%s]\n", *row->default_text ? row->default_text : "none");
        const char *const next = strstr(at + 1, "\n  --"), *const value = strstr(at, wanted);
        assert_true(value && (!next || value < next));
    }
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
        assert_true(strcspn(line, "\n") <= 110);
    assert_non_null(strstr(text, "qwen2.5-7b or demo"));
    assert_int_equal(run_in_child(stdout_in_child, (void *)"--lr 3 -h", text, sizeof text), 0);
    int lines = 0;
    for (at = text; (at = strstr(at, "\n  --")); at++)
        lines += strncmp(at, "\n  --help", 8) != 0 && strncmp(at, "\n  --version", 11) != 0;
    assert_int_equal(lines, 20);          // the short help
    for (int i = 0; i < CONFIG_ROWS; i++) // every option has a topic
        assert_true(config_rows[i].kind != OPTION_GROUP || *config_rows[i].argument);
    static const char *const topics[] = {"data", "model", "memory", "parallel", "finetune", "fp8"};
    for (size_t i = 0; i < sizeof topics / sizeof *topics; i++) {
        char words[64];
        snprintf(words, sizeof words, "--help %s", topics[i]);
        assert_int_equal(run_in_child(stdout_in_child, words, text, sizeof text), 0);
        assert_true(strstr(text, ":\n  --") != NULL);
    }
    assert_int_equal(run_in_child(stdout_in_child, (void *)"--version", text, sizeof text), 0);
    assert_string_equal(text, "train_gpt " TRAIN_GPT_VERSION "\n");
}

// Checks that each name of another trainer is none here, and that the option that it means is there.
static void names_of_other_trainers_name_options_here(void **state) {
    char hint[OPTION_TEXT], display[OPTION_NAME];
    for (const struct option_synonym *s = config_synonyms; s->word; s++) {
        bool is_option = false;
        for (int i = 0; i < CONFIG_ROWS; i++) {
            if (config_rows[i].kind == OPTION_GROUP)
                continue;
            option_display(display, config_rows[i].name);
            is_option = is_option || strcmp(display, s->name) == 0;
            if (strcmp(display, s->word) == 0)
                fail_msg("--%s is an option", s->word);
        }
        if (!is_option)
            fail_msg("--%s would mean --%s, which is no option", s->word, s->name);
        options_hint(&config_options, s->word, hint);
        assert_non_null(strstr(hint, s->name));
        for (const struct option_synonym *other = s + 1; other->word; other++)
            assert_string_not_equal(s->word, other->word);
    }
    assert_config_rejects("--learning-rate 3", "unknown option --learning-rate; the option here is --lr\n");
    assert_config_rejects("--gradient_accumulation_steps 8", "--global-batch-size: it, times --micro-batch-size");
    assert_config_rejects("--batch-size 8", "--micro-batch-size");
    assert_config_rejects("--epochs 3", "the option here is --train-epochs\n");
}

// Checks that each value of another trainer is none of its option, and that what it means is one.
static void values_of_other_trainers_are_values_here(void **state) {
    struct command command;
    for (const struct option_value *v = config_values; v->word; v++) {
        struct config c = configure(&command, "--plan");
        const int i = option_find(&config_options, v->name, false);
        if (i < 0 || strcmp(config_rows[i].name, v->name) != 0)
            fail_msg("%s is no option", v->name);
        const struct option_row *const row = &config_rows[i];
        if (!option_read(row, option_field(row, &c), v->word))
            fail_msg("--%s takes %s itself", v->name, v->word);
        assert_ptr_equal(options_value_of(&config_options, row, v->word), v); // no word is there twice
        if (v->value)
            assert_null(option_read(row, option_field(row, &c), v->value));
        assert_true(!v->value == (*v->why != 0));
    }
    struct config c = configure(&command, "--plan --num-query-groups null --optimizer AdamW --recompute-method None");
    assert_int_equal(c.model.num_query_groups, c.model.num_attention_heads);
    assert_true(c.training.optimizer == OPTIMIZER_ADAM && c.recompute.recompute_method == RECOMPUTE_METHOD_UNSET);
    assert_config_rejects("--plan --precision fp16",
                          "--precision: 'fp16' is not offered|loss scaling|has bf16|bf16 or fp32");
    assert_config_rejects("--plan --fp16", "--precision|loss scaling");
}

static void partial_is_full_in_some_layers(void **state) {
    struct command command;
    struct config c = configure(&command, "--plan --recompute-granularity partial --recompute-num-layers 3");
    assert_true(c.recompute.recompute_granularity == RECOMPUTE_FULL);
    assert_true(c.recompute.recompute_method == RECOMPUTE_METHOD_BLOCK && c.recompute.recompute_num_layers == 3);
    assert_true(config_given(&c, recompute.recompute_method)); // so that the run's config.json gives it
    c = configure(&command, "--plan --recompute-granularity partial --recompute-layers 2,4");
    assert_true(c.recompute.recompute_granularity == RECOMPUTE_FULL);
    assert_true(c.recompute.recompute_method == RECOMPUTE_METHOD_UNSET);
    assert_config_rejects("--plan --recompute-granularity partial", "--recompute-method block|--recompute-num-layers");
    assert_config_rejects("--plan --recompute-method uniform --recompute-num-layers 2 --recompute-granularity partial",
                          "--recompute-granularity partial|not uniform");
}

// Checks what a checkpoint keeps of the options: each is a text that is read as the same bits.
static void every_value_reads_back_from_its_text(void **state) {
    struct command command;
    const struct config config =
        configure(&command, "--plan --preset llama3.2-1b --lr 0.0003 --adam-eps 1.7e-9 --seed 18446744073709551615 "
                            "--memory-budget 6.5GiB --out a/b --no-cuda-graphs --clip-grad 0.1");
    struct config again = configure(&command, "--plan");
    for (int i = 0; i < CONFIG_ROWS; i++) {
        const struct option_row *row = &config_rows[i];
        char text[OPTION_TEXT];
        if (row->kind == OPTION_GROUP || row->kind == OPTION_LIST)
            continue;
        char *kept = strdup(option_text(text, row, &config));
        assert_null(option_read(row, (char *)&again + row->offset, kept));
        if (row->kind == OPTION_STRING)
            assert_string_equal(*(const char *const *)((const char *)&again + row->offset), kept);
        else
            assert_memory_equal((const char *)&again + row->offset, (const char *)&config + row->offset, row->size);
        free(kept);
    }
}

static void a_list_takes_each_that_is_given(void **state) {
    struct command command;
    char *texts[] = {(char *)"train_gpt",   (char *)"--generate=", (char *)"--generate", (char *)"one, two",
                     (char *)"--generate=", (char *)"--generate",  (char *)"three",      NULL};
    struct config config = configure(&command, "--plan");
    assert_int_equal(option_list_count(config.evaluation.generate), 0);
    memset(&config, 0, sizeof config);
    options_set_defaults(&config_options, &config);
    options_parse(&config_options, &config, config.given, 7, texts);
    assert_string_equal(config.evaluation.generate, "\x1eone, two\x1e\x1ethree\x1e"); // an empty prompt is a prompt too
    assert_int_equal(option_list_count(config.evaluation.generate), 4);
    free((void *)config.evaluation.generate);
}

static void config_json_has_every_option_once(void **state) {
    struct command command;
    const struct config c = configure(&command, "--preset qwen2.5-0.5b --train-data data/\"x\\y*.bin --lr 3e-4 "
                                                "--seed 18446744073709551615 --memory-budget 6GiB "
                                                "--hidden-dropout 0.1 --normalization rmsnorm");
    char path[TEST_PATH], value[256];
    const int file = mkstemp(test_template(path, "unit_options"));
    assert_true(file >= 0);
    close(file);
    config_write_json(&c, path);
    char *const text = read_text(path);
    unlink(path);
    assert_non_null(text);
    assert_true(json_is_valid(text));
    int members = 0;
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].kind != OPTION_GROUP) {
            assert_int_equal(json_member(text, config_rows[i].name, value), 1);
            members++;
        }
    int lines = 0;
    const char *const given = strstr(text, "\n  \"given\": [");
    assert_non_null(given);
    for (const char *at = text; (at = strchr(at, '\n')) && at < given; at++)
        lines++;
    assert_int_equal(lines, members); // and nothing else before what config/config_file.h reads
    static const char *const expected[][2] = {
        {"preset", "\"qwen2.5-0.5b\""},
        {"normalization", "\"RMSNorm\""},
        {"recompute_granularity", "\"none\""},
        {"num_layers", "24"},
        {"kv_channels", "64"},
        {"seed", "\"18446744073709551615\""}, // beyond what readers of JSON hold
        {"norm_epsilon", "1e-06"},
        {"rotary_base", "1e+06"},
        {"memory_budget", "6442450944"},
        {"lr", "0.0003"},
        {"hidden_dropout", "0.1"},
        {"train_data", "\"data/\\\"x\\\\y*.bin\""},
        {"plan", "false"},
        {"add_qkv_bias", "true"},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        json_member(text, expected[i][0], value);
        assert_string_equal(value, expected[i][1]);
    }
    free(text);
}
static void write_where_no_file_can_be(void *unused) {
    struct command command;
    const struct config c = configure(&command, "--plan");
    config_write_json(&c, "/dev/null/config.json");
}
static void write_to_a_full_disk(void *unused) {
    struct command command;
    const struct config c = configure(&command, "--plan");
    config_write_json(&c, "/dev/full");
}
static void a_config_that_cannot_be_written_is_an_error(void **state) {
    assert_fails(write_where_no_file_can_be, NULL, "/dev/null/config.json: cannot be written");
    assert_fails(write_to_a_full_disk, NULL, "/dev/full: cannot be written: No space left");
}

// Checks that whatever is on a command line, it gives a configuration, the help or one message.
static void no_command_line_crashes(void **state) {
    static const char *const pieces[] = {
        "--",
        "-",
        "--no-",
        "=",
        "",
        "--plan",
        "0",
        "1",
        "-1",
        "1e9",
        "nan",
        "6GiB",
        "true",
        "%s%n",
        "--n",
        "--num-",
        "demo",
        "swiglu",
        "0-3,8",
        ",",
        "norm,mlp",
        "--preset",
        "--lr",
        "gpt2-124m",
        "\xff\xfe",
        "9223372036854775807",
        "99999999999999999999",
    };
    enum { PIECES = sizeof pieces / sizeof pieces[0] };
    static char text[65536];
    uint64_t random = 3;
    for (int trial = 0; trial < 600; trial++) {
        char words[1024] = "--plan", name[OPTION_NAME];
        for (int i = (int)(test_random(&random) % 6); i >= 0; i--) {
            const struct option_row *row = &config_rows[test_random(&random) % CONFIG_ROWS];
            const bool option = row->kind != OPTION_GROUP && test_random(&random) % 3;
            const size_t used = strlen(words);
            snprintf(words + used, sizeof words - used, " %s%s%s%s", option ? "--" : "",
                     option ? option_display(name, row->name) : pieces[test_random(&random) % PIECES],
                     test_random(&random) % 2 ? "=" : " ", pieces[test_random(&random) % PIECES]);
        }
        const int status = run_in_child(stdout_in_child, words, text, sizeof text);
        if (status != 0 && status != 2)
            print_error("%s: exit status %d\n%s\n", words, status, text);
        assert_true(status == 0 || status == 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flag_may_have_a_third_choice),
        cmocka_unit_test(every_kind_has_its_default_and_takes_a_value),
        cmocka_unit_test(another_programs_value_is_taken_or_refused),
        cmocka_unit_test(sizes_in_bytes_have_gnu_units),
        cmocka_unit_test(abbreviations_work_while_they_are_unambiguous),
        cmocka_unit_test(unknown_options_name_the_nearest),
        cmocka_unit_test(what_is_no_option_is_an_error),
        cmocka_unit_test(values_that_are_missing_or_not_of_their_kind_are_errors),
        cmocka_unit_test(values_out_of_range_are_errors),
        cmocka_unit_test(files_of_a_pattern_that_is_not_quoted),
        cmocka_unit_test(an_option_without_its_value_lists_what_there_is),
        cmocka_unit_test(help_is_by_topic_or_word),
        cmocka_unit_test(help_is_laid_out_in_groups_with_defaults),
        cmocka_unit_test(the_table_is_consistent),
        cmocka_unit_test(choices_are_named_as_their_enumerators),
        cmocka_unit_test(a_resumed_run_cannot_change_what_shapes_the_model),
        cmocka_unit_test(presets_have_the_published_parameter_counts),
        cmocka_unit_test(a_preset_fills_only_what_the_user_left_open),
        cmocka_unit_test(sizes_left_open_follow_from_the_others),
        cmocka_unit_test(contradictions_name_what_to_change),
        cmocka_unit_test(fp8_is_off_and_its_recipe_is_the_stateless_one),
        cmocka_unit_test(blockwise_scales_have_no_fast_accumulation),
        cmocka_unit_test(first_and_last_layers_may_stay_in_bf16),
        cmocka_unit_test(options_of_fp8_that_nothing_uses_are_refused),
        cmocka_unit_test(what_fp8_does_not_have_is_named),
        cmocka_unit_test(attention_in_fp8_is_asked_for_and_names_what_it_does_not_have),
        cmocka_unit_test(fp8_takes_bf16_and_sizes_that_its_products_have),
        cmocka_unit_test(runs_that_do_not_train_ignore_what_fp8_needs),
        cmocka_unit_test(windows_are_counted_with_the_query),
        cmocka_unit_test(layers_are_chosen_by_number_or_list),
        cmocka_unit_test(lists_of_layers_are_checked),
        cmocka_unit_test(rotary_settings_are_of_rotary_positions),
        cmocka_unit_test(scaled_frequencies_take_the_settings_of_their_type),
        cmocka_unit_test(norms_and_multipliers_that_contradict),
        cmocka_unit_test(one_option_sets_three),
        cmocka_unit_test(lists_of_recomputation_are_checked_for_form),
        cmocka_unit_test(products_that_overflow_are_caught),
        cmocka_unit_test(what_is_offloaded_is_saved_without_a_copy),
        cmocka_unit_test(help_has_every_option_with_its_default),
        cmocka_unit_test(names_of_other_trainers_name_options_here),
        cmocka_unit_test(partial_is_full_in_some_layers),
        cmocka_unit_test(values_of_other_trainers_are_values_here),
        cmocka_unit_test(every_value_reads_back_from_its_text),
        cmocka_unit_test(a_list_takes_each_that_is_given),
        cmocka_unit_test(config_json_has_every_option_once),
        cmocka_unit_test(a_config_that_cannot_be_written_is_an_error),
        cmocka_unit_test(no_command_line_crashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
