// Text from the model: samples during training, and --generate as a run of its own.
#pragma once
#include "config/layers.h"       // config_learns_positions
#include "run/run.cuh"           // struct run
#include "run/sample.cuh"        // gpt_generate
#include "run/text_files.cuh"    // find_text_file
#include "runtime/machine/say.h" // say_warning

// Allocates the samples of a training run, each with a prompt of one token, and opens r->sampler. close_run frees them.
static void open_training_samples(struct run *r) {
    const struct config *c = r->config;
    r->samples = (int32_t *)calloc((size_t)c->evaluation.sample_count * ((size_t)c->evaluation.sample_tokens + 1),
                                   sizeof *r->samples);
    r->prompt_tokens = (int *)calloc((size_t)c->evaluation.sample_count, sizeof *r->prompt_tokens);
    if (!r->samples || !r->prompt_tokens)
        fail("out of memory for samples");
    sampler_open(&r->sampler, r->model, r->device_watch);
    for (int i = 0; i < c->evaluation.sample_count; i++)
        r->prompt_tokens[i] = 1;
}

// Writes the text of each sample into json under its number, from 1. context: the struct run.
static void write_samples(struct json *json, const void *context) {
    const struct run *r = (const struct run *)context;
    const int n = r->config->evaluation.sample_tokens + 1;
    for (int i = 0; i < r->config->evaluation.sample_count; i++) {
        char *text = NULL, number[16];
        size_t bytes = 0;
        FILE *const out = open_memstream(&text, &bytes);
        if (!out)
            fail("out of memory for a sample");
        vocabulary_print(out, &r->vocabulary, r->samples + (size_t)i * (size_t)n + 1, n - 1);
        fclose(out);
        snprintf(number, sizeof number, "%d", i + 1);
        json_str(json, number, text);
        free(text);
    }
}

// Generates, prints and logs the samples of a training run after `step` steps. Does nothing if a signal to stop comes,
// in a run of one rank. Needs open_training_samples; call before the next update is enqueued. Every rank calls this.
static void generate_samples(struct run *r, int step) {
    const struct config *c = r->config;
    const int n = c->evaluation.sample_tokens + 1, end = r->vocabulary.end_of_text;
    for (int i = 0; i < c->evaluation.sample_count; i++)
        r->samples[(size_t)i * (size_t)n] = end >= 0 && end < c->model.vocab_size ? end : 0;
    // Several ranks generate the same text, and gather sharded parameters for it together: no rank may stop by itself.
    if (!gpt_generate(r->model, &r->sampler, r->samples, r->prompt_tokens, n, (uint64_t)step,
                      r->parallel ? NULL : stop_asked))
        return;
    for (int i = 0; i < c->evaluation.sample_count; i++) {
        log_event(&r->log, "--- sample %d after step %d ---", i + 1, step);
        vocabulary_print(stdout, &r->vocabulary, r->samples + (size_t)i * (size_t)n + 1, n - 1);
        putchar('\n');
        log_event(&r->log, "---");
    }
    log_object(&r->log, step, "samples", write_samples, r);
}

// ---- --generate ----

// Opens r->tokenizer from the tokenizer.json that find_text_file finds. Without that file, a model of 256 or 257 tokens
// gets a tokenizer of bytes. Ends the program where neither works, naming --OPTION. close_run frees the tokenizer.
static void open_tokenizer(struct run *r, const char *option) {
    const struct config *c = r->config;
    char path[PATH_MAX];
    struct error_text error;
    const char *problem = NULL;
    if (find_text_file(r, "tokenizer.json", path, sizeof path))
        problem = tokenizer_read(&r->tokenizer, path, &error);
    else if (c->model.vocab_size == 256 || c->model.vocab_size == 257)
        problem = tokenizer_of_bytes(&r->tokenizer, c->model.vocab_size, &error);
    else
        fail("--%s: %s has no tokenizer.json, which a model of %d tokens needs; copy the tokenizer's files there",
             option, *c->checkpoints.init_from ? c->checkpoints.init_from : "the folder of the data",
             c->model.vocab_size);
    if (problem)
        fail("--%s: %s", option, problem);
}

// Encodes a prompt (bytes long) with the tokens of the tokenizer's template. Returns the number of tokens in *ids, for
// free(). An empty prompt becomes the end of text, or token 0. Ends the program where the model lacks a token.
static int encode_prompt(const struct run *r, const char *text, size_t bytes, int32_t **ids) {
    const int end = r->vocabulary.end_of_text, V = r->config->model.vocab_size;
    int64_t count;
    struct error_text error;
    const char *problem = tokenizer_encode(&r->tokenizer, text, bytes, ENCODE_IN_TEMPLATE, ids, &count, &error);
    if (problem)
        fail("--generate: %s", problem);
    if (count > INT_MAX / 2)
        fail("--generate: a prompt of %lld tokens is too long", (long long)count);
    if (count == 0) { // an empty prompt becomes the token that ends a document
        free(*ids);
        *ids = (int32_t *)calloc(1, sizeof **ids);
        if (!*ids)
            fail("out of memory for a prompt");
        (*ids)[0] = end >= 0 && end < V ? end : 0;
        return 1;
    }
    for (int64_t i = 0; i < count; i++)
        if ((*ids)[i] >= V)
            fail("--generate: the tokenizer makes token %d, outside the model's vocabulary of %d", (int)(*ids)[i], V);
    return (int)count;
}

// Reduces --sample-tokens, unless it is given, to the positions that the longest prompt, of `longest` tokens, leaves.
// If the tokens still don't fit, ends the program where the model learns its positions; else only warns.
static void fit_sample_tokens(struct config *c, int longest) {
    const int positions = c->model.max_position_embeddings, left = positions - longest;
    if (c->evaluation.sample_tokens <= left)
        return;
    if (left > 0 && !config_given(c, evaluation.sample_tokens)) {
        c->evaluation.sample_tokens = left;
        return;
    }
    if (config_learns_positions(c))
        fail("--generate: the longest prompt has %d tokens, and with --sample-tokens %d that is more than the model's "
             "%d positions; shorten one of them",
             longest, c->evaluation.sample_tokens, positions);
    if (c->rank == 0)
        say_warning("the longest prompt has %d tokens; with --sample-tokens %d that is more than the %d positions "
                    "that the model was trained on, and the text may lose its sense behind them",
                    longest, c->evaluation.sample_tokens, positions);
}

// Encodes --generate's prompts, --sample-count times each, as r->samples and r->prompt_tokens. Sets *c's prompt_tokens
// to the longest prompt's, --sample-tokens and --seq-length to it plus the new tokens, and the micro-batch size to 1.
static void read_prompts(struct run *r, struct config *c) {
    static const char list_end[] = {OPTION_LIST_END, 0};
    const int prompts = option_list_count(c->evaluation.generate), sequences = prompts * c->evaluation.sample_count;
    int32_t **ids = (int32_t **)calloc((size_t)prompts, sizeof *ids);
    int longest = 0;
    r->prompt_tokens = (int *)calloc((size_t)sequences, sizeof *r->prompt_tokens);
    if (!ids || !r->prompt_tokens)
        fail("out of memory for %d prompts", prompts);
    const char *text = c->evaluation.generate;
    for (int p = 0; p < prompts; p++) {
        const size_t length = strcspn(text, list_end);
        const int n = encode_prompt(r, text, length, &ids[p]);
        longest = n > longest ? n : longest;
        for (int i = 0; i < c->evaluation.sample_count; i++)
            r->prompt_tokens[p * c->evaluation.sample_count + i] = n;
        text += length + 1;
    }
    fit_sample_tokens(c, longest);
    const int64_t n = (int64_t)longest + c->evaluation.sample_tokens;
    r->samples = (int32_t *)calloc((size_t)sequences * (size_t)n, sizeof *r->samples);
    if (!r->samples)
        fail("out of memory for samples");
    for (int b = 0; b < sequences; b++)
        memcpy(r->samples + (size_t)b * (size_t)n, ids[b / c->evaluation.sample_count],
               (size_t)r->prompt_tokens[b] * sizeof **ids);
    for (int p = 0; p < prompts; p++)
        free(ids[p]);
    free(ids);
    c->evaluation.sample_tokens = c->model.seq_length = (int)n; // tokens of the KV cache, and of the rotary table
    c->prompt_tokens = longest;
    c->training.micro_batch_size = 1;
}

// Prints read_prompts' prompts and up to new_tokens tokens after each; nothing if a signal stops a run of one rank. The
// model is loaded. Opens r->sampler. Returns the exit status. Every rank calls this.
static int generate_only(struct run *r, int new_tokens) {
    const struct config *c = r->config;
    const int n = c->evaluation.sample_tokens, end = r->vocabulary.end_of_text;
    sampler_open(&r->sampler, r->model, r->device_watch);
    if (!gpt_generate(r->model, &r->sampler, r->samples, r->prompt_tokens, n, 0, r->parallel ? NULL : stop_asked)) {
        say_warning("%s: the run ends without a result", strsignal(signals_stop_requested()));
        return EXIT_STOPPED;
    }
    for (int b = 0; b < r->model->generation.sequences; b++) {
        const int32_t *tokens = r->samples + (size_t)b * (size_t)n;
        const int last = r->prompt_tokens[b] + new_tokens < n ? r->prompt_tokens[b] + new_tokens : n;
        int count = r->prompt_tokens[b];
        while (count < last && tokens[count] != end)
            count++;
        if (r->model->generation.sequences > 1)
            printf("--- %d ---\n", b + 1);
        vocabulary_print(stdout, &r->vocabulary, tokens, count);
        printf("\n");
    }
    return 0;
}
