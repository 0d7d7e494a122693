// --perplexity: the perplexity of texts by sliding windows, as Hugging Face describes it.
#pragma once
#include "run/run.cuh"               // struct run
#include "run/score_documents.cuh"   // score_documents
#include "run/scored_text.cuh"       // encode_with_context
#include "runtime/files/file_read.h" // read_whole
#include "runtime/machine/say.h"     // say

struct scored_text {
    int32_t *ids; // (tokens)
    int64_t tokens;
    struct scored_document *windows; // (count), over ids
    int count;
};

// Cuts text->ids into text->windows (text->count, 0 before), which the caller frees. A window has up to --seq-length
// tokens, begins --perplexity-stride (0: half of that) after the last began, and scores what no earlier one scores.
static void make_windows(struct scored_text *text, const struct config *c) {
    const int64_t T = c->model.seq_length;
    const int64_t stride = c->evaluation.perplexity_stride > 0 ? c->evaluation.perplexity_stride : (T + 1) / 2;
    const int64_t most = text->tokens / stride + 1;
    text->windows = (struct scored_document *)calloc((size_t)most, sizeof *text->windows);
    if (!text->windows)
        fail("out of memory for %lld windows", (long long)most);
    for (int64_t begin = 0, before = 0; before < text->tokens; begin += stride) {
        const int64_t end = begin + T < text->tokens ? begin + T : text->tokens;
        const int64_t first = before - begin > 1 ? before - begin : 1; // the first token that is scored
        if (first < end - begin) {
            struct scored_document *window = &text->windows[text->count++];
            window->tokens = text->ids + begin;
            window->inputs = (int)(end - begin) - 1;
            window->first = (int)first - 1;
        }
        before = end;
    }
}

// Prints the perplexity of the text in a file. r->tokenizer must be open. Returns false, with nothing printed, if a
// signal stopped it. Ends the program where the file can't be read or scored. Every rank calls this.
static bool score_text(struct run *r, const char *path) {
    enum { MAX_BYTES = 1 << 30 };
    struct scored_text text;
    unsigned char *data;
    uint64_t bytes;
    struct error_text error;
    char where[PATH_MAX + 32];
    memset(&text, 0, sizeof text);
    snprintf(where, sizeof where, "--perplexity: %s", path);
    const char *problem = read_whole(&data, &bytes, MAX_BYTES, path, "a text", &error);
    if (problem)
        fail("--perplexity: %s", problem);
    text.ids = encode_with_context(r, (const char *)data, bytes, &text.tokens, where);
    free(data);
    if (text.tokens < 2)
        fail("%s: has %lld tokens; expected at least 2", where, (long long)text.tokens);
    if (text.tokens > INT32_MAX / 2)
        fail("%s: has %lld tokens; expected less than 2^30", where, (long long)text.tokens);
    make_windows(&text, r->config);
    const bool scored = score_documents(r, text.windows, text.count);
    double sum = 0;
    int64_t tokens = 0, scored_bytes = 0;
    for (int i = 0; i < text.count; i++) {
        const struct scored_document *w = &text.windows[i];
        sum -= w->log_likelihood;
        tokens += w->inputs - w->first;
        for (int t = w->first + 1; t <= w->inputs; t++) {
            int length;
            tokenizer_decode(&r->tokenizer, w->tokens[t], &length);
            scored_bytes += length;
        }
    }
    if (scored)
        say(stdout, "%s: perplexity %.9g, loss %.9g, bits per byte %.6g, over %lld tokens of %lld bytes\n", path,
            exp(sum / (double)tokens), sum / (double)tokens, sum / (log(2) * (double)scored_bytes), (long long)tokens,
            (long long)scored_bytes);
    free(text.ids);
    free(text.windows);
    return scored;
}
// Scores --perplexity's files, if any; may open r->tokenizer. Returns false if a signal stops it. All ranks call this.
static bool score_texts(struct run *r) {
    int count;
    char **paths = list_elements(r->config->evaluation.perplexity, &count);
    bool going_on = true;
    if (count > 0 && !r->tokenizer.tables)
        open_tokenizer(r, "perplexity");
    for (int i = 0; i < count && going_on; i++)
        going_on = score_text(r, paths[i]);
    for (int i = 0; i < count; i++)
        free(paths[i]);
    free(paths);
    return going_on;
}
