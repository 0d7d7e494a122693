// What the tests of config.json share: options as from a command line, a file written, a file parsed.
#pragma once
#include "config/resolve.h"      // config_parse
#include "formats/huggingface.h" // huggingface_parse_config
#include "test/testing.h"        // cmocka

// Parses a copy of exactly that size, so that the sanitizer sees a read beyond it.
static inline const char *parse_bytes(struct huggingface_config *h, const char *text, size_t bytes,
                                      struct error_text *error) {
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    const char *problem = huggingface_parse_config(h, copy, bytes, "config.json", error);
    free(copy);
    return problem;
}
// The texts of the last four live on.
static inline struct config config_of(const char *options) {
    static char texts[4][1024];
    static int next;
    char *text = texts[next++ % 4];
    char *words[64], *rest = NULL;
    int n = 0;
    snprintf(text, sizeof texts[0],
             "train_gpt --plan --num-layers 3 --hidden-size 64 --num-attention-heads 4 --vocab-size 777 "
             "--seq-length 20 %s",
             options);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        words[n++] = word;
    words[n] = NULL;
    return config_parse(n, words);
}
static inline char *written(const struct config *c, int end_of_text, size_t *bytes) {
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    huggingface_write_config(out, c, end_of_text, true);
    fclose(out);
    return text;
}
