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

// The largest rate that a square matmul reaches, flop/s: what MFU is held against. Uses the activations' arena, filled
// with noise (zeros multiply faster), before anything else does.
static double measure_peak(struct run *r) {
    char *base = r->model->arenas.base[ARENA_ACTIVATIONS];
    const size_t bytes = r->model->arenas.bytes[ARENA_ACTIVATIONS];
    int n = 1536;
    while (n > 64 && 3 * (size_t)n * n * sizeof(floatX) + matmul_workspace_bytes(n, n, n, &r->dev) > bytes)
        n -= 64;
    if (3 * (size_t)n * n * sizeof(floatX) + matmul_workspace_bytes(n, n, n, &r->dev) > bytes)
        return 0;
    floatX *out = (floatX *)base, *in = out + (size_t)n * n, *weight = in + (size_t)n * n;
    for (int64_t i = 0; i < 2 * (int64_t)n * n; i++)
        in[i] = to_floatX(random_uniform(r->config->seed, 1, (uint64_t)i) - 0.5f);
    double best = 0;
    for (int i = 0; i < 6; i++) {
        const double begin = seconds_now();
        matmul_forward(out, in, weight, NULL, n, n, n, weight + (size_t)n * n, &r->dev);
        const double rate = 2.0 * n * n * n / (seconds_now() - begin);
        best = rate > best ? rate : best;
    }
    return best;
}

static void open_data(struct run *r) {
    const struct config *c = r->config;
    const size_t batch = (size_t)c->micro_batch_size * (size_t)c->seq_length;
    r->train = dataloader_open(c->train_data, c->seq_length, c->seed, true, c->vocab_size, c->micro_batch_size);
    if (*c->val_data)
        r->val = dataloader_open(c->val_data, c->seq_length, 0, false, c->vocab_size, c->micro_batch_size);
    r->vocabulary = vocabulary_beside(c->train_data);
    r->inputs = (int32_t *)calloc(batch, sizeof *r->inputs);
    r->targets = (int32_t *)calloc(batch, sizeof *r->targets);
    r->samples = (int32_t *)calloc((size_t)c->sample_count * (size_t)c->sample_tokens, sizeof *r->samples);
    if (!r->inputs || !r->targets || !r->samples)
        fail("out of memory for a batch of %d sequences of %d tokens", c->micro_batch_size, c->seq_length);
}

static void report(const struct run *r) {
}

// ---- the loop ----

// One step. Returns false where a NaN or Inf was met, before the update.
static bool train_step(struct run *r, int step, struct log_step *entry) {
    const struct config *c = r->config;
    struct gpt *m = r->model;
    const int micro_steps = c->global_batch_size / c->micro_batch_size;
    entry->loss = 0;
    gpt_zero_gradients(m);
    for (int i = 0; i < micro_steps; i++) {
        const uint64_t sample = dataloader_position(r->train);
        dataloader_read(r->train, r->inputs, r->targets, c->micro_batch_size);
        const double loss = gpt_micro_step(m, r->inputs, r->targets, 1.0 / micro_steps);
        entry->loss += loss / micro_steps;
        if (!isfinite(loss)) {
            report_nonfinite(r, step, "loss", loss, sample, c->micro_batch_size);
            return false;
        }
    }
    entry->grad_norm = gpt_gradient_norm(m);
    if (!isfinite(entry->grad_norm)) {
        report_nonfinite(r, step, "gradient norm", entry->grad_norm, dataloader_position(r->train) - c->global_batch_size,
                         c->global_batch_size);
        return false;
    }
    entry->lr = schedule_lr(&r->schedule, step);
    gpt_update(m, step + 1, entry->lr, entry->grad_norm);
    return true;
}
#endif
