// train_gpt: reads the options, builds the memory plan, runs the training loop.
//
// This file is compiled several times. With ENGINE defined (cpu_fp32, cpu_bf16, ...) it is one copy of the engine, whose
// floatX is that precision, exporting one entry point; without it, it is main, which picks a copy and calls it.
#include "config.h"         // struct config: every option
#include "kernels/amx.cuh"  // amx_available
#include "runtime/error.h"  // fail
#include <omp.h>            // omp_set_num_threads, omp_get_num_procs
#include <stdio.h>          // printf

typedef int engine_entry(const struct config *config);
engine_entry train_cpu_fp32, train_cpu_bf16;

#ifndef ENGINE

int main(int argc, char **argv) {
    const struct config config = config_parse(argc, argv);
    const bool bf16_wanted = config.precision == WITH_BF16 || (config.precision == WITH_AUTO && amx_available());
    return (bf16_wanted ? train_cpu_bf16 : train_cpu_fp32)(&config);
}

#else

#include "attention.cuh"        // attention_choose
#include "dataloader.h"         // token shards to batches
#include "fit.cuh"              // options to a policy, a plan that fits
#include "gpt.cuh"              // the model and its step
#include "runtime/log.h"        // progress line, log.jsonl
#include "runtime/schedule.h"   // learning rate
#include "runtime/vocabulary.h" // tokens to text
#include "sample.cuh"           // generation

// All that a run consists of.
struct run {
    const struct config *config;
    struct device dev;
    struct attention_choice attention;
    struct fit fit;
    struct gpt *model;
    struct dataloader *train, *val;
    struct vocabulary vocabulary;
    struct schedule schedule;
    struct log log;
    int32_t *inputs, *targets;  // (micro batch, T) of the current micro-batch
    int32_t *samples;           // (sample_count, sample_tokens)
    double peak_flops;          // what a large matmul reaches here, in flop/s
    int skipped;                // steps not taken because of a NaN or Inf
};

// ---- start-up ----

static void start_device(struct run *r) {
    r->dev.threads = r->config->threads > 0 ? r->config->threads : omp_get_num_procs();
    omp_set_num_threads(r->dev.threads);
    r->dev.matmul = matmul_create(&r->dev);
}

static void make_plan(struct run *r) {
    const struct config *c = r->config;
    const struct layer_shape s = model_shape_of(c, sizeof(floatX), false).layer;
    struct attention_shape shape;
    shape.B = c->micro_batch_size;
    shape.T = s.T;
    shape.num_heads = s.H;
    shape.num_query_groups = s.G;
    shape.head_dim = s.D;
    shape.scale = 1;
    r->attention = attention_choose((enum attention_backend)c->attention_backend, shape, &r->dev);
    r->fit = fit_of(c, r->attention.backend, &r->dev);
    r->model = gpt_create(c, fit_policy(&r->fit), r->attention.backend, &r->dev);
    r->schedule = config_schedule(c);
}

static void write_plan(const struct run *r) {
    const struct plan *plan = &r->model->plan;
    if (*r->config->plan_json)
        plan_write_json(plan, r->config->plan_json);
    if (*r->config->plan_picture)
        plan_write_svg(plan, r->config->plan_picture);
}

static void open_data(struct run *r) {
    const struct config *c = r->config;
    const size_t batch = (size_t)c->micro_batch_size * (size_t)c->seq_length;
    enum { BATCHES_AHEAD = 4 };
    r->train = dataloader_open(c->train_data, c->seq_length, c->seed, true, c->vocab_size, 0, 1, c->micro_batch_size,
                               BATCHES_AHEAD, "--train-data");
    if (*c->val_data)
        r->val = dataloader_open(c->val_data, c->seq_length, 0, false, c->vocab_size, 0, 1, c->micro_batch_size, 0,
                                 "--val-data");
    char path[PATH_MAX];
    const bool found = vocabulary_find(dataloader_path(r->train, 0), path, sizeof path);
    r->vocabulary = vocabulary_open(found ? path : NULL, c->vocab_size);
    r->inputs = (int32_t *)calloc(batch, sizeof *r->inputs);
    r->targets = (int32_t *)calloc(batch, sizeof *r->targets);
    r->samples = (int32_t *)calloc((size_t)c->sample_count * (size_t)c->sample_tokens, sizeof *r->samples);
    if (!r->inputs || !r->targets || !r->samples)
        fail("out of memory for a batch of %d sequences of %d tokens", c->micro_batch_size, c->seq_length);
}

static void write_config(const struct config *c) {
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/config.json", c->out) >= sizeof path)
        fail("--out %s: the name is too long", c->out);
    config_write_json(c, path);
}

static void report(const struct run *r) {
    const struct config *c = r->config;
    const struct gpt *m = r->model;
    const struct plan *plan = &m->plan;
    char text[LOG_NUMBER], more[LOG_NUMBER];
    log_row("model", "%d layers, hidden %d, %d heads, %d KV heads of %d, FFN %d, vocabulary %d", c->num_layers,
            c->hidden_size, c->num_attention_heads, c->num_query_groups, c->kv_channels, c->ffn_hidden_size, c->vocab_size);
    log_row("parameters", "%s", log_count(text, m->table.visible));
    log_row("device", "cpu, %d threads, %s", r->dev.threads, FLOATX_NAME);
    log_row("matmul", "%s", matmul_describe(r->dev.matmul));
    log_row("attention", "%s", r->attention.reason);
    log_row("recomputation", "%s", m->policy.description);
    log_row("memory", "%s planned, %s of it activations", log_bytes(text, (int64_t)plan->peak_bytes),
            log_bytes(more, (int64_t)plan->arena_bytes[ARENA_ACTIVATIONS]));
    if (r->train) {
        log_row("training data", "%s: %s tokens in %d files", c->train_data,
                log_count(text, (int64_t)dataloader_total_tokens(r->train)), dataloader_num_files(r->train));
        log_row("batch", "%d sequences of %d tokens, in %d micro-batches", c->global_batch_size, c->seq_length,
                c->global_batch_size / c->micro_batch_size);
        log_row("steps", "%d, %.3g epochs", c->train_steps,
                (double)c->train_steps * c->global_batch_size / (double)dataloader_samples_per_epoch(r->train));
        log_row("matmul peak", "%.0f GFLOP/s measured, which MFU is held against", 1e-9 * r->peak_flops);
    }
    fit_advise(&r->fit, stdout);
    printf("\n");
    fflush(stdout);
}

// ---- the loop ----

// What stopped a step before its update. Ends the run, unless --skip-nonfinite still allows a skip.
static void nonfinite(struct run *r, int step, const char *what, double value, uint64_t first_sample, int samples) {
    const int allowed = r->config->skip_nonfinite;
    char where[160];
    snprintf(where, sizeof where, "step %d: the %s is %f; batch: samples %llu to %llu of the data's order", step + 1, what,
             value, (unsigned long long)first_sample, (unsigned long long)first_sample + (unsigned long long)samples - 1);
    log_end_line(&r->log);
    if (r->skipped++ >= allowed)
        fail("%s; the parameters are those of step %d. Lower --lr, check the data, or allow skips by --skip-nonfinite N",
             where, step);
    fprintf(stderr, "train_gpt: %s; skipped, %d of %d\n", where, r->skipped, allowed);
}

// Forward and backward of a global batch and the update. False where a NaN or Inf was met: nothing is updated then.
static bool train_step(struct run *r, int step, struct log_step *entry) {
    const struct config *c = r->config;
    struct gpt *m = r->model;
    const int micro_steps = c->global_batch_size / c->micro_batch_size;
    const uint64_t first_sample = dataloader_position(r->train);
    bool good = true;
    entry->loss = 0;
    entry->lr = schedule_lr(&r->schedule, step);
    gpt_zero_gradients(m);
    for (int i = 0; i < micro_steps; i++) {
        const uint64_t sample = dataloader_position(r->train);
        dataloader_read(r->train, r->inputs, r->targets, c->micro_batch_size);
        const double loss = gpt_micro_step(m, r->inputs, r->targets, 1.0 / micro_steps);
        entry->loss += loss / micro_steps;
        if (good && !isfinite(loss))
            nonfinite(r, step, "loss", loss, sample, c->micro_batch_size);
        good = good && isfinite(loss);
    }
    entry->grad_norm = gpt_gradient_norm(m);
    if (good && !isfinite(entry->grad_norm)) {
        nonfinite(r, step, "gradient norm", entry->grad_norm, first_sample, c->global_batch_size);
        good = false;
    }
    if (good)
        gpt_update(m, step + 1 - r->skipped, entry->lr, entry->grad_norm);
    return good;
}

// Mean loss over the first --val-steps batches of the validation data, the same ones each time.
static double validate(struct run *r) {
    const struct config *c = r->config;
    const uint64_t batches = dataloader_samples_per_epoch(r->val) / (uint64_t)c->micro_batch_size;
    const int steps = batches < (uint64_t)c->val_steps ? (int)batches : c->val_steps;
    double loss = 0;
    dataloader_seek(r->val, 0);
    for (int i = 0; i < steps; i++) {
        dataloader_read(r->val, r->inputs, r->targets, c->micro_batch_size);
        loss += gpt_evaluate(r->model, r->inputs, r->targets) / steps;
    }
    return loss;
}

static void print_samples(struct run *r, int step) {
    const struct config *c = r->config;
    // A document begins behind the end of the one before; without such a mark, behind token 0.
    const int end = r->vocabulary.end_of_text;
    gpt_generate(r->model, r->samples, end >= 0 && end < c->vocab_size ? end : 0, (uint64_t)step);
    for (int i = 0; i < c->sample_count; i++) {
        log_event(&r->log, "--- sample %d after step %d ---", i + 1, step);
        vocabulary_print(stdout, &r->vocabulary, r->samples + (size_t)i * (size_t)c->sample_tokens, c->sample_tokens);
        log_event(&r->log, "\n---");
    }
}

// True every `every` steps and after the last; 0 is never.
static bool due(int every, int done, int total) { return every > 0 && (done % every == 0 || done == total); }

static void train(struct run *r) {
    const struct config *c = r->config;
    const double tokens_per_step = (double)c->global_batch_size * c->seq_length;
    const double flops = tokens_per_step * gpt_flops_per_token(r->model);
    struct log_step entry;
    memset(&entry, 0, sizeof entry);
    for (int step = 0; step < c->train_steps; step++) {
        const double begin = seconds_now();
        const bool good = train_step(r, step, &entry);
        const double seconds = seconds_now() - begin;
        const int done = step + 1;
        entry.step = done;
        entry.tokens = (int64_t)done * (int64_t)tokens_per_step;
        entry.step_ms = 1e3 * seconds;
        entry.tokens_per_second = tokens_per_step / seconds;
        entry.mfu = r->peak_flops > 0 ? flops / seconds / r->peak_flops : NAN;
        entry.peak_bytes = (int64_t)resident_peak_bytes();
        entry.has_val_loss = r->val && due(c->val_every, done, c->train_steps);
        if (entry.has_val_loss)
            entry.val_loss = validate(r);
        log_step(&r->log, &entry);
        if (entry.has_val_loss)
            log_event(&r->log, "step %d: validation loss %.4f", done, entry.val_loss);
        if (good && due(c->sample_every, done, c->train_steps))
            print_samples(r, done);
    }
}

static void finish(struct run *r) {
    dataloader_close(r->train);
    dataloader_close(r->val);
    vocabulary_close(&r->vocabulary);
    gpt_destroy(r->model);
    matmul_destroy(r->dev.matmul);
    free(r->inputs);
    free(r->targets);
    free(r->samples);
}

int ENGINE(const struct config *config) {
    struct run r;
    memset(&r, 0, sizeof r);
    r.config = config;
    start_device(&r);
    make_plan(&r);
    write_plan(&r);
    if (config->plan) {
        report(&r);
        plan_print(&r.model->plan, stdout);
        finish(&r);
        return 0;
    }
    fit_check(&r.fit, r.model->plan.peak_bytes, machine_memory_bytes());
    open_data(&r);
    log_open(&r.log, config->out, config->train_steps, config->log_every);
    write_config(config);
    gpt_allocate(r.model);
    r.peak_flops = gpt_measure_peak(r.model);
    report(&r);
    train(&r);
    log_close(&r.log);
    finish(&r);
    return 0;
}

#endif
