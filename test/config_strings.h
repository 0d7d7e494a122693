// Strings that start_find copies into a config. A run keeps them to its end; a test frees them.
#pragma once
#include "config/config.h" // struct config

// Frees the strings of a config that don't point into words (bytes), the command line that the config was read from.
static inline void config_free_strings(const struct config *config, const char *words, size_t bytes) {
    for (int row = 0; row < CONFIG_ROWS; row++) {
        char *text = NULL;
        if (config_rows[row].kind != OPTION_STRING || !config->given[row])
            continue;
        memcpy(&text, (const char *)config + config_rows[row].offset, sizeof text);
        if (text < words || text >= words + bytes)
            free(text);
    }
}
