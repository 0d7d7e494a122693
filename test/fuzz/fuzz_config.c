// config.json of a model's folder: what is accepted sets options to values that they take. Where it is one of Hugging
// Face's models, it is written and read again as the same options.
#include "config/config.h"       // config_options
#include "formats/huggingface.h" // under test
#include "test/fuzz/fuzz.h"      // fuzz_require

// Returns the config that the settings give. Its strings are the settings' own.
static struct config options_of(const struct huggingface_config *h) {
    struct config config;
    memset(&config, 0, sizeof config);
    options_set_defaults(&config_options, &config);
    for (int i = 0; i < h->num_settings; i++) {
        char name[OPTION_NAME];
        const char *equals = strchr(h->settings[i], '=');
        fuzz_require(equals);
        snprintf(name, sizeof name, "%.*s", (int)(equals - h->settings[i]), h->settings[i]);
        const int row = option_find(&config_options, name, false);
        fuzz_require(row >= 0 && !option_read(&config_rows[row], option_field(&config_rows[row], &config), equals + 1));
    }
    return config;
}

static void write_again(const struct config *config) {
    struct huggingface_config h;
    struct error_text error;
    char *text = NULL, a[OPTION_TEXT], b[OPTION_TEXT];
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    fuzz_require(out);
    huggingface_write_config(out, config, -1, false);
    fclose(out);
    fuzz_require(!huggingface_parse_config(&h, (unsigned char *)text, bytes, "again", &error));
    fuzz_require(h.architecture == architecture_of(config));
    const struct config again = options_of(&h);
    const struct option_row *rows[CONFIG_ROWS];
    const int count = huggingface_own_options(rows);
    for (int i = 0; i < count; i++)
        fuzz_require(strcmp(option_text(a, rows[i], config), option_text(b, rows[i], &again)) == 0);
    huggingface_free(&h);
    free(text);
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct huggingface_config h;
    const char *problem = huggingface_parse_config(&h, data, bytes, "config", error);
    if (problem)
        return problem;
    const struct config config = options_of(&h);
    // A file that is accepted as Hugging Face's fits some architecture of theirs, perhaps a simpler one than it names.
    if (h.architecture != ARCHITECTURE_OURS) {
        fuzz_require(architecture_of(&config) != ARCHITECTURE_OURS);
        write_again(&config);
    }
    huggingface_free(&h);
    return NULL;
}
