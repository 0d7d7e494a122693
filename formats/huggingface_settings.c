// Keeps the options that a config.json sets, as texts, in the order in which they were read.
#include <stdarg.h> // va_list
#include <stdio.h>  // vasprintf
#include <stdlib.h> // realloc, free
#include <string.h> // strlen, strncmp, memset

#include "formats/huggingface.h"        // struct huggingface_config
#include "formats/huggingface_traits.h" // huggingface_complete_gpt2
#include "runtime/machine/error.h"      // fail

int huggingface_own_options(const struct option_row **rows) {
    int count = 0;
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].flags & CONFIG_BLOCKS)
            rows[count++] = &config_rows[i];
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].flags & CONFIG_EMBEDDING)
            rows[count++] = &config_rows[i];
    return count;
}

// Adds a setting "OPTION=VALUE", OPTION with dashes. The caller adds no option twice. Out of memory ends the program.
void huggingface_add_setting(struct huggingface_config *h, const char *format, ...) {
    va_list arguments;
    char **settings = (char **)realloc(h->settings, (size_t)(h->num_settings + 1) * sizeof *settings);
    if (!settings)
        fail("out of memory");
    h->settings = settings;
    va_start(arguments, format);
    if (vasprintf(&h->settings[h->num_settings], format, arguments) < 0)
        fail("out of memory");
    va_end(arguments);
    h->num_settings++;
}
void huggingface_free(struct huggingface_config *h) {
    for (int i = 0; i < h->num_settings; i++)
        free(h->settings[i]);
    free(h->settings);
    memset(h, 0, sizeof *h);
}
const char *huggingface_setting(const struct huggingface_config *h, const char *option) {
    const size_t length = strlen(option);
    for (int i = 0; i < h->num_settings; i++)
        if (strncmp(h->settings[i], option, length) == 0 && h->settings[i][length] == '=')
            return h->settings[i] + length + 1;
    return NULL;
}
void huggingface_set_defaults(struct huggingface_config *h) {
    const struct option_row *rows[CONFIG_ROWS];
    char name[OPTION_NAME];
    const int count = huggingface_own_options(rows);
    for (int i = 0; i < count; i++)
        if (!huggingface_setting(h, option_display(name, rows[i]->name)))
            huggingface_add_setting(h, "%s=%s", name, rows[i]->default_text);
}
void huggingface_complete_gpt2(struct huggingface_config *h) {
    huggingface_add_setting(h, "normalization=LayerNorm");
    huggingface_add_setting(h, "position-embedding-type=learned_absolute");
    if (!huggingface_setting(h, "activation"))
        huggingface_add_setting(h, "activation=gelu");
    huggingface_add_setting(h, "add-bias-linear=true");
    huggingface_add_setting(h, "add-qkv-bias=true");
    huggingface_add_setting(h, "add-attention-proj-bias=true");
    huggingface_add_setting(h, "add-mlp-bias=true");
    huggingface_set_defaults(h);
}
