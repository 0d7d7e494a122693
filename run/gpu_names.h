// Finds GPUs in the table of kernels/gpu_peak.cuh by names as people write them: "4090", "a100-80". Texts are split
// into words of letters or of digits. A text means a row whose name and further words have all words of the text.
#pragma once
#include "config/planned_gpus.h"      // planned_gpus
#include "kernels/gpu_peak.cuh"       // gpu_peaks
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_add
#include <ctype.h>                    // isalpha, isdigit, tolower
#include <stdio.h>                    // fprintf

enum { GPU_WORDS_MAX = 24, GPU_WORD_MAX = 16, GPU_NAME_MAX = 64 };
struct gpu_words {
    int count;
    bool too_many; // or one too long: no row has them
    char word[GPU_WORDS_MAX][GPU_WORD_MAX];
};

static bool gpu_word_is_brand(const char *word) {
    static const char *const brands[] = {"nvidia", "geforce", "rtx", "tesla", "gpu"};
    for (size_t i = 0; i < sizeof brands / sizeof *brands; i++)
        if (strcmp(word, brands[i]) == 0)
            return true;
    return false;
}
// Adds a text's runs of letters or of digits, in lower case, but no brands. Sets too_many if one has no room.
static void gpu_words_add(struct gpu_words *words, const char *text) {
    for (const char *at = text; *at;) {
        const bool letters = isalpha((unsigned char)*at), digits = isdigit((unsigned char)*at);
        int length = 0;
        while (letters ? isalpha((unsigned char)at[length]) : digits && isdigit((unsigned char)at[length]))
            length++;
        if (length == 0) {
            at++;
            continue;
        }
        if (words->count == GPU_WORDS_MAX || length >= GPU_WORD_MAX) {
            words->too_many = true;
            return;
        }
        char *const word = words->word[words->count];
        for (int i = 0; i < length; i++)
            word[i] = (char)tolower((unsigned char)at[i]);
        word[length] = 0;
        words->count += !gpu_word_is_brand(word);
        at += length;
    }
}
// Whether `words` has every word of `some`, each at least as often.
static bool gpu_words_have(const struct gpu_words *words, const struct gpu_words *some) {
    bool used[GPU_WORDS_MAX] = {false};
    for (int i = 0; i < some->count; i++) {
        int j = 0;
        while (j < words->count && (used[j] || strcmp(words->word[j], some->word[i]) != 0))
            j++;
        if (j == words->count)
            return false;
        used[j] = true;
    }
    return true;
}

// Returns the table's row of the same GPU with more memory, which follows `gpu`, or NULL.
static const struct gpu_peak *gpu_larger_edition(const struct gpu_peak *gpu) {
    const struct gpu_peak *const next = gpu + 1;
    return next < gpu_peaks + GPU_PEAKS && strcmp(next->name, gpu->name) == 0 ? next : NULL;
}
static bool gpu_has_editions(const struct gpu_peak *gpu) {
    return gpu_larger_edition(gpu) || (gpu > gpu_peaks && strcmp(gpu[-1].name, gpu->name) == 0);
}
// Writes a row's name for messages to text, with the memory if editions differ in it. gpu_asked knows it. Returns text.
static const char *gpu_name(char text[GPU_NAME_MAX], const struct gpu_peak *gpu) {
    snprintf(text, GPU_NAME_MAX, "%.*s%s%s", (int)strcspn(gpu->name, "$"), gpu->name, gpu_has_editions(gpu) ? " " : "",
             gpu_has_editions(gpu) ? gpu->words : "");
    return text;
}

// Finds rows with all words of text, which has no count, or only the first whose whole name is there. Returns how many.
static int gpu_names_find(const char *text, const struct gpu_peak *found[GPU_PEAKS]) {
    struct gpu_words asked;
    int count = 0;
    memset(&asked, 0, sizeof asked);
    gpu_words_add(&asked, text);
    if (asked.count == 0 || asked.too_many)
        return 0;
    for (int i = 0; i < GPU_PEAKS; i++) {
        struct gpu_words name, all;
        memset(&name, 0, sizeof name);
        gpu_words_add(&name, gpu_peaks[i].name);
        all = name;
        gpu_words_add(&all, gpu_peaks[i].words);
        if (!gpu_words_have(&all, &asked))
            continue;
        if (gpu_words_have(&asked, &name)) {
            found[0] = &gpu_peaks[i];
            return 1;
        }
        found[count++] = &gpu_peaks[i];
    }
    return count;
}
// Whether rows have the same memory and rate of products, so that a text that means either need not say which.
static bool gpu_rows_are_alike(const struct gpu_peak *const *rows, int count) {
    for (int i = 1; i < count; i++)
        if (rows[i]->memory_mib != rows[0]->memory_mib || rows[i]->bf16_tflops != rows[0]->bf16_tflops)
            return false;
    return true;
}

// Returns a rate in TFLOP/s, in text, or "-" for 0.
static const char *gpu_rate(char text[GPU_NAME_MAX], double tflops) {
    snprintf(text, GPU_NAME_MAX, "%.4g", tflops);
    return tflops > 0 ? text : "-";
}
static void gpu_names_print(void) {
    char name[GPU_NAME_MAX], bf16[GPU_NAME_MAX], fp8[GPU_NAME_MAX];
    printf("%-48s %10s %7s %7s %7s\n", "GPU", "memory", "GB/s", "bf16", "FP8");
    for (int i = 0; i < GPU_PEAKS; i++) {
        const struct gpu_peak *const gpu = &gpu_peaks[i];
        printf("%-48s %6d MiB %7.0f %7s %7s\n", gpu_name(name, gpu), gpu->memory_mib, gpu->memory_gbps,
               gpu_rate(bf16, gpu->bf16_tflops), gpu_rate(fp8, gpu->fp8_tflops));
    }
    fputs(
        "\nbf16, FP8: TFLOP/s of dense products by the data sheet; -: the GPU has none. GPUs without bf16 are not used.\n"
        "A part of a name does, as 4090 or a100-80; 2x3090 plans for two.\n",
        stdout);
}

// Returns the row that the text of --plan-gpu ("2x 4090") names, or NULL if the text is empty. Of several alike rows,
// takes the row with the slowest memory. Ends the program for an unknown GPU, GPUs that differ, or a GPU without bf16.
static const struct gpu_peak *gpu_asked(const char *text) {
    const struct gpu_peak *found[GPU_PEAKS] = {NULL};
    char name[GPU_NAME_MAX], list[1024] = "";
    int number;
    if (!*text)
        return NULL;
    const int count = gpu_names_find(planned_gpus(text, &number), found);
    if (count == 0)
        fail("--plan-gpu '%s' is not a GPU whose data sheet is known; expected a name like '4090', 'A100-80' or "
             "'2x H100 PCIe' (--plan-gpu without a name lists all)",
             text);
    const bool old = found[count - 1]->capability < 80 && found[0]->capability < 80;
    if (!old && !gpu_rows_are_alike(found, count)) {
        for (int i = 0; i < count; i++)
            text_add(list, sizeof list, "%s'%s'",
                     i == 0          ? ""
                     : i + 1 < count ? ", "
                                     : " or ",
                     gpu_name(name, found[i]));
        fail("--plan-gpu '%s' may be %s; name one of them", text, list);
    }
    if (old)
        fail("--plan-gpu '%s': the %s has compute capability %d.%d and no bf16; expected an NVIDIA GPU of 8.0 or more "
             "(Ampere or newer)",
             text, gpu_name(name, found[0]), found[0]->capability / 10, found[0]->capability % 10);
    const struct gpu_peak *slowest = found[0];
    for (int i = 1; i < count; i++)
        slowest = found[i]->memory_gbps < slowest->memory_gbps ? found[i] : slowest;
    return slowest;
}
