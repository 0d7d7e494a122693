// The lists that --preset and --plan-gpu print where they stand without a value: all presets, all known GPUs.
#pragma once
#include "config/config.h" // config_rows, presets
#include "run/gpu_names.h" // gpu_names_print
#include <stdio.h>         // printf
#include <string.h>        // strncmp

static const char *preset_setting_or_empty(const struct preset *preset, const char *name) {
    const size_t length = strlen(name);
    const char *value = "";
    for (int i = 0; preset->settings[i]; i++)
        if (strncmp(preset->settings[i], name, length) == 0 && preset->settings[i][length] == '=')
            value = preset->settings[i] + length + 1;
    return value;
}
static void presets_print(void) {
    printf("%-16s %6s %11s %10s %10s\n", "preset", "layers", "hidden size", "vocabulary", "seq-length");
    for (int i = 0; i < CONFIG_PRESETS; i++)
        printf("%-16s %6s %11s %10s %10s\n", presets[i].name, preset_setting_or_empty(&presets[i], "num-layers"),
               preset_setting_or_empty(&presets[i], "hidden-size"), preset_setting_or_empty(&presets[i], "vocab-size"),
               preset_setting_or_empty(&presets[i], "seq-length"));
}

// Prints on stdout all values of the option of `row`, --preset or --plan-gpu. Returns false for other options.
static bool list_values(const struct option_row *row) {
    const int at = (int)(row - config_rows);
    if (at == CONFIG_ROW(model.preset))
        presets_print();
    else if (at == CONFIG_ROW(memory.plan_gpu))
        gpu_names_print();
    else
        return false;
    return true;
}
