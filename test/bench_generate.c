// Measures the speed of generation: a prompt's tokens a second, new tokens a second, and how near new tokens come to
// the memory's bandwidth. Each weight, key and value that a token needs is read once. A triad that runs in turn with
// the tokens says what bandwidth the memory gives, since other work on the machine changes both. Figures are medians.
//
//     bench_generate [--prompt N] [--tokens N] [--rounds N] [options of train_gpt]       (without options: gpt2-124m)
#include <stddef.h> // NULL

static double *phase_seconds; // (phases); NULL: not measured
#define TIMELINE_ON_PHASE(t) ((void)(t))
#define TIMELINE_IS_WATCHED (phase_seconds != NULL)
#define TIMELINE_EXECUTE(t, is_matmul, op)                                                                             \
    do {                                                                                                               \
        const double begin_ = phase_seconds ? seconds_now() : 0;                                                       \
        op;                                                                                                            \
        if (phase_seconds)                                                                                             \
            phase_seconds[(t)->phase] += seconds_now() - begin_;                                                       \
    } while (0)
#include "config/resolve.h"
#include "run/model.cuh"
#include "run/sample.cuh"
#include <omp.h>
#include <stdio.h>

enum { MAX_SAMPLES = 4096, TRIAD_ELEMENTS = 1 << 24, TRIADS_A_ROUND = 8 };

struct samples {
    double s[MAX_SAMPLES];
    int n;
};
static void sample_add(struct samples *x, double seconds) {
    if (x->n < MAX_SAMPLES)
        x->s[x->n++] = seconds;
}
static int ascending(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) * 2 - 1; }
static double median(struct samples *x) {
    qsort(x->s, (size_t)x->n, sizeof *x->s, ascending);
    return x->n ? x->s[x->n / 2] : 0;
}

struct bench {
    struct config config;
    struct device dev;
    struct gpt *m;
    struct sampler sampler;
    int *lengths;
    int prompt, tokens, rounds;
    float *a, *b, *c; // the triad's arrays
    struct samples triad, prefill, decode, sample;
};

// Runs a = b + s c over arrays that no cache holds; counts 12 bytes an element, as STREAM does.
static void triad(struct bench *x) {
    const double begin = seconds_now();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < TRIAD_ELEMENTS; i++)
        x->a[i] = x->b[i] + 0.5f * x->c[i];
    sample_add(&x->triad, seconds_now() - begin);
}

// Feeds a prompt of random tokens for each sequence, and generates `tokens` more, with triads in between.
static void one_round(struct bench *x) {
    struct gpt *m = x->m;
    const int B = m->generation.sequences;
    for (int i = 0; i < B * x->prompt; i++)
        x->sampler.fed[i] = (int32_t)(random_uniform(1, 0, (uint64_t)i) * m->shape.V);
    double begin = seconds_now();
    const floatX *logits = gpt_prefill(m, x->sampler.fed, x->lengths);
    sample_add(&x->prefill, seconds_now() - begin);
    for (int i = 0; i < x->tokens; i++) {
        if (i % (x->tokens / TRIADS_A_ROUND + 1) == 0)
            triad(x);
        begin = seconds_now();
        for (int b = 0; b < B; b++) {
            const int t = x->prompt + i;
            x->sampler.fed[b] = sample_next(m, &x->sampler, logits, b, t - 1, 0);
            x->sampler.positions[b] = t;
        }
        const double sampled = seconds_now();
        logits = gpt_decode(m, x->sampler.fed, x->sampler.positions);
        sample_add(&x->sample, sampled - begin);
        sample_add(&x->decode, seconds_now() - begin);
    }
}

// Returns the bytes that one new token of each sequence makes the memory read: all weights, of the embeddings only a
// row unless they are the head too; and the keys and values of `positions` tokens of each sequence.
static double bytes_of_token(const struct gpt *m, double positions) {
    const struct layer_shape *s = &m->shape.layer;
    const struct tensor *wte = parameters_find(&m->table, -1, PARAM_WTE);
    const struct tensor *wpe = parameters_find(&m->table, -1, PARAM_WPE);
    double elements = 0;
    for (int l = 0; l < m->shape.L; l++)
        elements += (double)m->generation.sequences * fmin(positions, kv_capacity(m, l)) * 2 * s->G * s->D;
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        const bool row = t == wpe || (t == wte && !m->shape.tied);
        elements += row ? (double)m->generation.sequences * t->cols : (double)t->count;
    }
    return elements * sizeof(floatX);
}

// Prints the time of each op in the new tokens of one round, over all layers.
static void print_profile(struct bench *x) {
    const struct plan *plan = &x->m->timeline.plan;
    const double sampled = median(&x->sample);
    phase_seconds = (double *)calloc((size_t)plan->phase_count, sizeof *phase_seconds);
    one_round(x);
    printf("  a token by op:");
    const int begin = x->m->timeline.region_first[REGION_GENERATE];
    for (int p = begin; p < plan->phase_count; p++) {
        const char *op = strrchr(plan->phases[p].name, ':');
        double seconds = 0;
        for (int i = begin; i < plan->phase_count; i++) {
            const bool same = !strcmp(strrchr(plan->phases[i].name, ':'), op);
            seconds = same && i < p ? -1e9 : seconds + (same ? phase_seconds[i] : 0);
        }
        if (seconds > 0)
            printf("%s %.3f ms,", op + 1, 1e3 * seconds / x->tokens);
    }
    printf(" sampling %.3f ms\n", 1e3 * sampled);
    free(phase_seconds);
    phase_seconds = NULL;
}

// Opens the model that the options describe, with the sizes that --generate gives it for prompts of `prompt` tokens.
static void open_model(struct bench *x) {
    struct config *c = &x->config;
    c->prompt_tokens = x->prompt;
    c->evaluation.sample_tokens = c->model.seq_length = x->prompt + x->tokens;
    if (c->model.seq_length > c->model.max_position_embeddings)
        fail("bench_generate: %d tokens are more than the model's %d positions", c->model.seq_length,
             c->model.max_position_embeddings);
    c->training.micro_batch_size = 1;
    x->m = gpt_create(c, policy_keep_all(c->model.num_layers), ATTENTION_FLASH, &x->dev);
    gpt_allocate(x->m);
    sampler_open(&x->sampler, x->m, NULL);
    x->lengths = (int *)calloc((size_t)x->m->generation.sequences, sizeof *x->lengths);
    x->a = (float *)device_allocate(3 * (size_t)TRIAD_ELEMENTS * sizeof *x->a);
    if (!x->lengths || !x->a)
        fail("out of memory");
    x->b = x->a + TRIAD_ELEMENTS;
    x->c = x->b + TRIAD_ELEMENTS;
    for (int64_t i = 0; i < 2 * TRIAD_ELEMENTS; i++)
        x->b[i] = (float)i;
    for (int b = 0; b < x->m->generation.sequences; b++)
        x->lengths[b] = x->prompt;
}

int main(int argc, char **argv) {
    static struct bench x;
    const struct {
        const char *name;
        int *value;
    } own[] = {{"--prompt", &x.prompt}, {"--tokens", &x.tokens}, {"--rounds", &x.rounds}};
    char *options[64];
    int n = 0;
    x.prompt = 512;
    x.tokens = 64;
    x.rounds = 3;
    options[n++] = argv[0];
    options[n++] = (char *)"--plan"; // so that no model's folder is needed
    options[n++] = (char *)"--generate=x";
    for (int i = 1; i < argc && n < 62; i++) {
        int k = 0;
        while (k < 3 && strcmp(argv[i], own[k].name))
            k++;
        if (k < 3 && i + 1 < argc)
            *own[k].value = atoi(argv[++i]);
        else
            options[n++] = argv[i];
    }
    if (n == 3)
        options[n++] = (char *)"--preset=gpt2-124m";
    options[n] = NULL;
    if (x.prompt < 1 || x.tokens < 1 || x.rounds < 1)
        fail("bench_generate: --prompt, --tokens and --rounds are at least 1");
    x.config = config_parse(n, options);
    x.dev.threads = x.config.device.threads > 0 ? x.config.device.threads : omp_get_num_procs();
    omp_set_num_threads(x.dev.threads);
    x.dev.matmul = matmul_create(&x.dev);
    open_model(&x);
    struct gpt *m = x.m;
    printf("%s, %d layers of %d, %s, %d threads, %d x (prompt %d, %d new tokens)\n",
           n == 4 ? options[3] + 9 : "model as given", m->shape.L, m->shape.layer.C, FLOATX_NAME, x.dev.threads,
           m->generation.sequences, x.prompt, x.tokens);
    one_round(&x);
    x.triad.n = x.prefill.n = x.decode.n = x.sample.n = 0;
    for (int i = 0; i < x.rounds; i++)
        one_round(&x);
    const double bytes = bytes_of_token(m, x.prompt + 0.5 * (x.tokens + 1)), seconds = median(&x.decode);
    const double rate = 1e-9 * bytes / seconds, triad_rate = 1e-9 * 12 * TRIAD_ELEMENTS / median(&x.triad);
    printf("  prefill %8.1f tok/s, decode %8.2f tok/s\n", m->generation.sequences * x.prompt / median(&x.prefill),
           m->generation.sequences / seconds);
    printf("  decode reads %.1f MB a token: %.1f GB/s, triad %.1f GB/s: %.0f %%\n", 1e-6 * bytes, rate, triad_rate,
           100 * rate / triad_rate);
    print_profile(&x);
    device_free(x.a, 3 * (size_t)TRIAD_ELEMENTS * sizeof *x.a);
    free(x.lengths);
    sampler_close(&x.sampler);
    gpt_destroy(m);
    matmul_destroy(x.dev.matmul);
    return 0;
}
