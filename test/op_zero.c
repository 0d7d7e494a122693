// The model on several ranks. Every ZeRO stage and policy computes the same bits, whatever is offloaded, whatever lies
// in memory that the plan calls dead, and however slow network and bus are; and a stage takes the memory that it
// should. The ranks are processes that are forked here.
#include <malloc.h>     // mallinfo2; before testing.h, which may redefine free
#include "test/model.h" // before gpt.cuh, which it looks into
#include "kernels/device.cuh"
#include "test/free_port.h"
#include "test/testing.h"

#include "run/fit.cuh"
#include "run/ranks.cuh"                   // check_replicas
#include "runtime/machine/memory_limits.h" // memory_resident_bytes
#include "runtime/net/parallel.h"
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STEPS = 2, MAX_MICRO_STEPS = 2, MAX_RANKS = 3, MAX_BATCHES = MAX_MICRO_STEPS * MAX_RANKS };
enum { MAX_TOKENS = 128 }; // of a micro-batch
#define SMALL                                                                                                          \
    "--vocab-size 150 --micro-batch-size 2 --loss-chunk-tokens 25 --sample-every 1 --sample-tokens 2 "                 \
    "--sample-count 2 --bucket-mib 0.03 --checkpoint-every 1 --train-steps 2 --num-layers 3 "
#define SMALL_GPT2 SMALL "--hidden-size 32 --num-attention-heads 2 --hidden-dropout 0.1 --attention-dropout 0.2 "
#define SMALL_LLAMA                                                                                                    \
    SMALL "--hidden-size 48 --num-attention-heads 3 --num-query-groups 1 --normalization RMSNorm "                     \
          "--position-embedding-type rope --activation swiglu --add-bias-linear=false "                                \
          "--untie-embeddings-and-output-weights --hidden-dropout 0.1 "
static const char GPT2[] = SMALL_GPT2 "--seq-length 19 ";
static const char LLAMA[] = SMALL_LLAMA "--seq-length 19 --ffn-hidden-size 104 ";
// In FP8, widths and the tokens of a micro-batch are multiples of 16; for blocks, of 128.
#define DELAYED                                                                                                        \
    "--seq-length 24 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max "
static const char GPT2_TENSORWISE[] = SMALL_GPT2 "--seq-length 24 --fp8-format hybrid ";
static const char GPT2_DELAYED[] = SMALL_GPT2 DELAYED;
static const char LLAMA_DELAYED[] = SMALL_LLAMA "--ffn-hidden-size 112 " DELAYED;
static const char GPT2_BLOCKWISE[] =
    SMALL "--seq-length 64 --hidden-size 128 --num-attention-heads 2 --ffn-hidden-size 128 --hidden-dropout 0.1 "
          "--fp8-format e4m3 --fp8-recipe blockwise ";
static const char *const policies[] = {
    "", "--recompute-granularity selective", "--recompute-granularity full",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"};
enum { POLICIES = sizeof policies / sizeof *policies, STAGES = 4 };

// ---- a rank ----

// Prints what is wrong in a rank, and ends it, by which the other ranks end too.
static void expect(bool right, const char *format, ...) {
    va_list values;
    if (right)
        return;
    va_start(values, format);
    test_case_print();
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    _exit(1);
}
// Checks that x (n) and expected (n) are equal. Frees both arrays.
static void expect_same_values(double *x, double *expected, int64_t n, const char *what, const char *name) {
    char text[512];
    if (memcmp(x, expected, (size_t)n * sizeof *x) != 0) {
        const struct difference largest = largest_difference(x, expected, n);
        test_case_print();
        snprintf(text, sizeof text, "%s: a value of the %s", what, name);
        print_difference(text, largest.size, "", 0, largest);
        _exit(1);
    }
    free(x);
    free(expected);
}

struct setup {
    struct device dev;
    struct config config;
    struct gpt *model;
    struct collectives collectives;
};

static void setup_open(struct setup *s, struct parallel *parallel, const char *shape, const char *policy, int stage,
                       int micro_steps) {
    char options[512];
    const int ranks = parallel ? parallel->launch.ranks : 1;
    memset(s, 0, sizeof *s);
    s->dev.threads = 1; // barriers would take most of the time of ops this small
    omp_set_num_threads(1);
    s->dev.matmul = matmul_create(&s->dev);
    snprintf(options, sizeof options, "%s --zero-stage %d --world-size %d --global-batch-size %d", policy, stage, ranks,
             2 * ranks * micro_steps);
    test_case(1, "%s %s, rank %d", shape, options, parallel ? parallel->launch.rank : 0); // micro_step counts from it
    s->config = config_of_options(shape, options);
    s->config.evaluation.val_every = 1; // config_parse sets 0, since there is no --val-data
    s->config.rank = parallel ? parallel->launch.rank : 0;
    const enum attention_backend backend = ATTENTION_FLASH;
    const struct fit f = fit_of(&s->config, backend, &s->dev);
    s->model = gpt_create(&s->config, fit_policy(&f), backend, &s->dev);
    if (parallel)
        gpt_open_collectives(s->model, &s->collectives, parallel, COLLECTIVES_HOST);
    gpt_allocate(s->model);
    forget_gradients(s->model);
    if (parallel)
        gpt_connect(s->model, &s->collectives);
    enlarge_parameters(s->model);
}
static void setup_close(struct setup *s, struct parallel *parallel) {
    if (parallel) {
        zero_wait_for_updates(&s->model->zero);
        parallel_barrier(parallel, "the end of a model");
        collectives_close(&s->collectives, &s->dev);
    }
    gpt_destroy(s->model);
    matmul_destroy(s->dev.matmul);
}

// Makes the network slower than the computing, so that what one phase begins is not done in the next one.
static void sleep_in_work_thread(void *arguments) { usleep(100); }
// Overwrites dead memory, and delays the network. Memory that only workspaces use is left out: in bf16 it would take
// most of the time, and op_gpt tests it.
static void poison_and_delay(struct gpt *m) {
    poison_with(m, false);
    work_thread_add(m->zero.collectives->parallel->work, sleep_in_work_thread, NULL, 0, "a pause");
}

static void fill_tokens(const struct setup *s, int32_t *tokens, uint64_t seed) {
    for (int i = 0; i < s->config.training.micro_batch_size * s->config.model.seq_length; i++)
        tokens[i] = (int32_t)(test_random(&seed) % (uint64_t)s->config.model.vocab_size);
}
// Runs micro-batch `batch` of the `batches` that all ranks have in a step.
static void micro_step(struct setup *s, int step, int index, int batch, int batches) {
    int32_t inputs[MAX_TOKENS], targets[MAX_TOKENS];
    fill_tokens(s, inputs, (uint64_t)(100 * step + batch + 1));
    fill_tokens(s, targets, (uint64_t)(100 * step + batch + 51));
    gpt_micro_step(s->model, index, batch_of(inputs, targets), 1.0 / batches);
}

// The results that are compared: all losses and norms; this rank's shards of the last step's reduced gradients and of
// the state; what evaluation and generation compute with the parameters. In FP8 also how many values of each kind were
// saturated or flushed, and what a checkpoint holds of delayed scales.
struct outcome {
    double loss[STEPS * MAX_BATCHES], norm[STEPS], evaluation;
    double counts[STEPS][FP8_KINDS * FP8_COUNTS];
    float *scales; // (num_scales, 1 + history_length): `delayed`, then the history
    int num_scales, history_length;
    float *own[4]; // (flat / ranks) each: gradients, moments, parameters
    floatX logits[512];
    int64_t flat, part;
};

static float *own_shards(const struct gpt *m, const float *flat, bool sharded) {
    const struct shards *s = &m->zero.shards;
    float *own = (float *)test_alloc((size_t)(s->flat / s->ranks) * sizeof *own);
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        const int64_t place = shards_place(s, b, shards_own_begin(s, b), sharded);
        memcpy(own + b->begin / s->ranks, flat + place, (size_t)b->shard * sizeof *own);
    }
    return own;
}
// Returns this rank's gradients as fp32, however they are stored; the caller frees them.
static float *own_gradients(const struct gpt *m) {
    const struct zero *z = &m->zero;
    const int64_t n = shards_elements(&z->shards, shards_gradients(&z->shards));
    float *all = (float *)test_alloc((size_t)n * sizeof *all);
    state_decode(all, z->grads, z->grads_format, n);
    float *own = own_shards(m, all, shards_gradients(&z->shards));
    free(all);
    return own;
}
static float *own_values(const struct gpt *m, enum optimizer_state id) {
    const struct shards *s = &m->zero.shards;
    float *own = (float *)test_alloc((size_t)(s->flat / s->ranks) * sizeof *own);
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        optimizer_values(&m->optimizer, id, shards_own_begin(s, b), b->shard, own + b->begin / s->ranks);
    }
    return own;
}
static void run_steps(struct setup *s, int first, int steps, struct outcome *o) {
    struct gpt *m = s->model;
    const int ranks = m->zero.shards.ranks, batches = m->steps.most * ranks;
    for (int step = first; step < first + steps; step++) {
        const double *reports;
        if (m->zero.grads_on_host) // the first micro-step overwrites these
            memset(m->zero.grads, 0xff, zero_gradients_bytes(&m->zero));
        for (int i = 0; i < m->steps.most; i++)
            micro_step(s, step, i, i * ranks + m->zero.shards.rank, batches);
        gpt_update(m, step + 1, 1e-2);
        gpt_fetch_results(m, 0);
        const struct step_results results = gpt_results(m, 0, &reports);
        expect(results.check.finite, "step %d: not finite", step);
        expect(results.check.grad_norm > m->config.training.clip_grad, "step %d: gradients are not clipped", step);
        for (int i = 0; i < batches && o; i++)
            o->loss[step * MAX_BATCHES + i] = reports[i % ranks * report_width(m) + REPORT_LOSSES + 2 * (i / ranks)];
        if (o)
            o->norm[step] = results.check.grad_norm;
        for (int i = 0; i < FP8_KINDS * FP8_COUNTS && o && fp8_is_on(&m->fp8); i++)
            for (int rank = 0; rank < ranks; rank++)
                o->counts[step][i] += reports[rank * report_width(m) + report_fp8_counts_column(m) + i];
    }
}
// Checks the copy from which a checkpoint is made: of this rank's shards, or, in stage 0, rank 0's copy of everything.
static void expect_copy(struct gpt *m) {
    const struct shards *s = &m->zero.shards;
    expect(m->copy.keeps == (s->rank == 0 || s->stage > 0), "stage %d: the copy of rank %d", s->stage, s->rank);
    for (int part = 0; part < STATE_PARTS && m->copy.keeps; part++)
        for (int i = 0; i < s->count && part_is_stored(&m->optimizer, part); i++) {
            const int64_t at = shards_own_begin(s, &s->buckets[i]), n = s->buckets[i].shard;
            char *native = (char *)test_alloc((size_t)n * sizeof(float));
            const void *copied = optimizer_copy_read(&m->copy, &m->optimizer, part, at, n, native);
            part_download(&m->optimizer, part, at, n, native);
            expect(!memcmp(native, copied, part_offset(&m->optimizer, part, n) - part_offset(&m->optimizer, part, 0)),
                   "stage %d, rank %d: the copy of part %d, bucket %d", s->stage, s->rank, part, i);
            free(native);
        }
}
static void collect_state(struct setup *s, struct outcome *o) {
    struct gpt *m = s->model;
    const struct shards *h = &m->zero.shards;
    o->flat = h->flat;
    o->part = h->flat / h->ranks;
    gpt_copy_state(m);
    o->own[0] = own_gradients(m);
    o->own[1] = own_values(m, STATE_MOMENT1);
    o->own[2] = own_values(m, STATE_MOMENT2);
    o->own[3] = own_values(m, STATE_MASTER);
    if (fp8_is_delayed(&m->fp8)) {
        o->num_scales = fp8_num_scales(&m->fp8);
        o->history_length = m->fp8.delay.length;
        o->scales = (float *)test_alloc((size_t)fp8_state_floats(&m->fp8) * sizeof *o->scales);
        fp8_state_download(&m->fp8, o->scales, m->dev);
    }
    expect_copy(m);
}
static struct outcome outcome_of(struct setup *s) {
    struct outcome o;
    int32_t inputs[MAX_TOKENS], targets[MAX_TOKENS];
    memset(&o, 0, sizeof o);
    run_steps(s, 0, STEPS, &o);
    collect_state(s, &o); // while the updated parameters are still on their way
    fill_tokens(s, inputs, 7);
    fill_tokens(s, targets, 8);
    o.evaluation = loss_mean(gpt_evaluate(s->model, batch_of(inputs, targets)));
    const int prompts[2] = {1, 1};
    const int32_t positions[2] = {1, 1};
    gpt_prefill(s->model, inputs, prompts);
    memcpy(o.logits, gpt_decode(s->model, inputs + 2, positions), sizeof o.logits); // (2, 256)
    return o;
}
static void outcome_free(struct outcome *o) {
    for (int i = 0; i < 4; i++)
        free(o->own[i]);
    free(o->scales);
}
static void expect_same_bits(const struct outcome *a, const struct outcome *b, const char *what) {
    static const char *const names[] = {"gradients", "first moments", "second moments", "parameters"};
    for (int i = 0; i < STEPS * MAX_BATCHES; i++)
        expect(a->loss[i] == b->loss[i], "%s: loss %d is %.17g, not %.17g", what, i, b->loss[i], a->loss[i]);
    for (int i = 0; i < 4; i++)
        expect_same_values(floats_to_doubles(b->own[i], a->part), floats_to_doubles(a->own[i], a->part), a->part, what,
                           names[i]);
    expect(!memcmp(a->norm, b->norm, sizeof a->norm), "%s: the norm is %.17g, not %.17g", what, b->norm[0], a->norm[0]);
    expect(!memcmp(a->counts, b->counts, sizeof a->counts), "%s: counts of saturated or flushed values differ", what);
    for (int i = 0; i < a->num_scales * (1 + a->history_length); i++)
        expect(a->scales[i] == b->scales[i], "%s: value %d of the delayed scales is %.9g, not %.9g", what, i,
               (double)b->scales[i], (double)a->scales[i]);
    expect(a->evaluation == b->evaluation, "%s: evaluation gives %.17g, not %.17g", what, b->evaluation, a->evaluation);
    const int64_t logits = sizeof a->logits / sizeof *a->logits;
    expect_same_values(to_doubles(b->logits, logits), to_doubles(a->logits, logits), logits, what, "logits");
}

// ---- jobs ----

typedef void rank_body(struct parallel *parallel, int which);

static void run_rank(int rank, int ranks, const char *rendezvous, rank_body *body, int which) {
    struct parallel *parallel = (struct parallel *)calloc(1, sizeof *parallel);
    struct error_text error;
    char number[16];
    alarm(300); // a rank that hangs is a failure; sanitizers on a busy machine take their time
    snprintf(number, sizeof number, "%d", rank);
    setenv("RANK", number, 1);
    setenv("LOCAL_RANK", number, 1);
    snprintf(number, sizeof number, "%d", ranks);
    setenv("WORLD_SIZE", number, 1);
    setenv("LOCAL_WORLD_SIZE", number, 1);
    const char *problem = parallel_open(parallel, rendezvous, "", 120, &error);
    problem = problem ? problem : parallel_open_exchange(parallel, EXCHANGE_SOCKETS, &error);
    expect(!problem, "%s", problem);
    body(parallel, which);
    parallel_close(parallel);
    free(parallel);
    _exit(0);
}
// Runs each rank in a process of its own; returns how many failed. Nothing may use OpenMP before, since a fork leaves
// its threads behind.
static int run_ranks(int ranks, rank_body *body, int which) {
    char rendezvous[64];
    pid_t pids[MAX_RANKS];
    int status, failed = 0;
    snprintf(rendezvous, sizeof rendezvous, "127.0.0.1:%d", test_free_port());
    fflush(stdout);
    for (int rank = 0; rank < ranks; rank++) {
        pids[rank] = fork();
        assert_true(pids[rank] >= 0);
        if (pids[rank] == 0)
            run_rank(rank, ranks, rendezvous, body, which);
    }
    for (int rank = 0; rank < ranks; rank++) {
        assert_int_equal(waitpid(pids[rank], &status, 0), pids[rank]);
        failed += status != 0;
    }
    return failed;
}

// ---- the same bits ----

// How a run is disturbed: not at all; with dead memory poisoned and a slow network; also with late copies in one
// direction.
enum disturbance { UNDISTURBED, POISONED, LATE_TO_HOST, LATE_TO_DEVICE };
static void poison_alone(struct gpt *m) { poison_with(m, false); }

static struct outcome run_model(struct parallel *parallel, const char *shape, const char *options, int stage,
                                int micro_steps, enum disturbance disturbance) {
    struct setup *s = (struct setup *)calloc(1, sizeof *s);
    setup_open(s, parallel, shape, options, stage, micro_steps);
    watch_phases(s->model, disturbance == UNDISTURBED ? NULL : parallel ? poison_and_delay : poison_alone);
    if (disturbance >= LATE_TO_HOST)
        transfers_postpone_copies(&s->model->timeline.transfers,
                                  disturbance == LATE_TO_HOST ? TRANSFER_TO_HOST : TRANSFER_TO_DEVICE);
    const struct outcome o = outcome_of(s);
    watch_phases(s->model, NULL);
    setup_close(s, parallel);
    free(s);
    return o;
}

// Compares with one rank that computes all micro-batches. The first step's losses, amaxes and counts are equal to the
// bit, since no gradients were summed yet; the rest nearly.
static void compare_with_one(const struct outcome *o, const char *shape, int batches) {
    struct outcome one = run_model(NULL, shape, "", 0, batches, UNDISTURBED);
    const double tolerance = sizeof(floatX) == 2 ? 2e-2 : 1e-5;
    for (int i = 0; i < batches; i++)
        expect(one.loss[i] == o->loss[i], "loss %d of the first step is %.17g, with one rank %.17g", i, o->loss[i],
               one.loss[i]);
    expect(!memcmp(one.counts[0], o->counts[0], sizeof one.counts[0]), "the counts of the first step");
    for (int i = 0; i < o->num_scales; i++) {
        const int at = o->num_scales + i * o->history_length + STEPS - 1;
        expect(o->scales[at] > 0 && one.scales[at] == o->scales[at],
               "amax %d of the first step is %.9g, with one rank %.9g", i, (double)o->scales[at],
               (double)one.scales[at]);
    }
    for (int step = 0; step < STEPS; step++)
        expect(fabs(o->norm[step] / one.norm[step] - 1) < tolerance, "the norm of step %d is %g, with one rank %g",
               step, o->norm[step], one.norm[step]);
    expect(fabs(o->evaluation / one.evaluation - 1) < tolerance, "evaluation gives %g, with one rank %g", o->evaluation,
           one.evaluation);
    outcome_free(&one);
}

// Compares the stages. Stages 0 and 1 reduce the sum of a step's micro-steps, stages 2 and 3 each micro-step's
// gradients: with one micro-step this is the same.
static void compare_stages(struct parallel *parallel, const char *shape, int micro_steps, int num_policies) {
    struct outcome expected[2] = {run_model(parallel, shape, "", 0, micro_steps, UNDISTURBED),
                                  run_model(parallel, shape, "", 2, micro_steps, UNDISTURBED)};
    for (int i = 0; i < 2; i++)
        compare_with_one(&expected[i], shape, parallel->launch.ranks * micro_steps);
    if (micro_steps == 1)
        expect_same_bits(&expected[0], &expected[1], "stage 2 and stage 0");
    if (test_slowness() > 1) // which ops a policy runs again is no matter of the CPU
        num_policies = 1;
    for (int i = 0; i < num_policies * STAGES; i++) {
        char what[256];
        const int stage = i % STAGES;
        if (i >= STAGES && stage % 2 == 0) // what recomputation meets in stages 0 and 2, it meets in 1 and 3
            continue;
        if (i >= STAGES && (i / STAGES + i % STAGES / 2) % 2 && !in_long_run()) // each policy in one of these two
            continue;
        struct outcome o = run_model(parallel, shape, policies[i / STAGES], stage, micro_steps, POISONED);
        snprintf(what, sizeof what, "stage %d, %d micro-steps, %s", stage, micro_steps, policies[i / STAGES]);
        expect_same_bits(&expected[stage >= 2], &o, what);
        outcome_free(&o);
    }
    outcome_free(&expected[0]);
    outcome_free(&expected[1]);
}

// ---- the same bits when offloaded ----

// Sets of what is offloaded, with the lowest stage that takes each on several ranks.
static const struct {
    const char *options;
    int least_stage;
} offloads[] = {
    {"--offload-gradients", 2},
    {"--offload-weights", 3},
    {"--offload-gradients --offload-weights", 3},
    {"--offload-gradients --offload-weights --optimizer-cpu-offload", 3},
};
enum { OFFLOADS = sizeof offloads / sizeof *offloads };

// Checks that offloaded runs have the bits of `expected`, a run without offload.
static void compare_offloads(struct parallel *parallel, const char *shape, const char *dtype, int policy,
                             int micro_steps, const struct outcome *expected) {
    static const enum disturbance disturbances[] = {POISONED, LATE_TO_HOST, LATE_TO_DEVICE};
    for (int i = 0; i < 3 * OFFLOADS * STAGES; i++) {
        const int stage = i % STAGES, offload = i / STAGES % OFFLOADS, order = i / STAGES / OFFLOADS;
        char options[384], what[512];
        if (parallel ? stage < offloads[offload].least_stage : stage > 0)
            continue;
        // each set in one order of copies, another one for each policy
        if ((offload + order + policy) % 3 && !in_long_run())
            continue;
        // Offload turns asynchronous checkpoints off, and with them the copy that is compared, unless they are asked
        // for.
        snprintf(options, sizeof options, "%s %s --checkpoint-async %s", policies[policy], dtype,
                 offloads[offload].options);
        struct outcome o = run_model(parallel, shape, options, stage, micro_steps, disturbances[order]);
        snprintf(what, sizeof what, "stage %d, %d micro-steps, %s, order %d", stage, micro_steps, options, order);
        expect_same_bits(expected, &o, what);
        outcome_free(&o);
    }
}
// With the larger vocabulary, stored gradients of head and embeddings are streamed.
static const char *const gradient_options[] = {"", "--main-grads-dtype bf16", "--vocab-size 700",
                                               "--main-grads-dtype bf16 --vocab-size 700"};
// Compares offloads under every kind of stored gradients. On several ranks only the long run takes every policy.
static void compare_offloads_of(struct parallel *parallel, const char *shape) {
    for (int i = 0; i < 8; i++) {
        const char *options = gradient_options[i % 4];
        const int micro_steps = 1 + i / 4;
        const bool all = micro_steps == 2 && i % 4 < 2 && (parallel ? in_long_run() : test_slowness() == 1);
        if (!takes_case(i, 3))
            continue;
        const int num_policies = all ? POLICIES : 1;
        struct outcome expected = run_model(parallel, shape, options, parallel ? 2 : 0, micro_steps, UNDISTURBED);
        for (int policy = 0; policy < num_policies; policy++)
            compare_offloads(parallel, shape, options, policy, micro_steps, &expected);
        outcome_free(&expected);
    }
}
static const char *const shapes[] = {GPT2, LLAMA, GPT2_TENSORWISE, LLAMA_DELAYED, GPT2_BLOCKWISE};
static void compare_policies(struct parallel *parallel, int shape) {
    compare_stages(parallel, shapes[shape], 1, 1);
    compare_stages(parallel, shapes[shape], 2, POLICIES);
}
static void test_gpt2_on_two(void **state) { assert_int_equal(run_ranks(2, compare_policies, 0), 0); }
static void test_llama_on_three(void **state) { assert_int_equal(run_ranks(3, compare_policies, 1), 0); }
static void offload_alone(struct parallel *parallel, int shape) { compare_offloads_of(NULL, shapes[shape]); }
static void offload_together(struct parallel *parallel, int shape) { compare_offloads_of(parallel, shapes[shape]); }
static void test_gpt2_offloaded(void **state) { assert_int_equal(run_ranks(1, offload_alone, 0), 0); }
static void test_llama_offloaded(void **state) { assert_int_equal(run_ranks(1, offload_alone, 1), 0); }
static void test_gpt2_offloaded_on_three(void **state) { assert_int_equal(run_ranks(3, offload_together, 0), 0); }
static void test_llama_offloaded_on_two(void **state) { assert_int_equal(run_ranks(2, offload_together, 1), 0); }
static void fp8_needs_bf16(void) {
    if (sizeof(floatX) != 2)
        skip();
}
static void test_tensorwise_on_two(void **state) {
    fp8_needs_bf16();
    assert_int_equal(run_ranks(2, compare_policies, 2), 0);
}
static void test_delayed_on_three(void **state) {
    fp8_needs_bf16();
    assert_int_equal(run_ranks(3, compare_policies, 3), 0);
}
static void test_blockwise_on_two(void **state) {
    fp8_needs_bf16();
    assert_int_equal(run_ranks(2, compare_policies, 4), 0);
}

// ---- memory ----

// Returns the bytes of FP8's state: the counts of 12 kinds of tensors; with delayed scales a slot and a history for
// each of each layer's tensors; and the amaxes of weights, where each rank updates all weights.
static size_t fp8_state_bytes(const struct gpt *m, int stage) {
    const size_t scales = (size_t)m->shape.L * 12, weights = (size_t)m->shape.L * 4;
    if (m->config.fp8.fp8_format == FP8_FORMAT_NONE)
        return 0;
    return plan_aligned(12 * FP8_COUNTS * sizeof(uint64_t)) + plan_aligned(scales * sizeof(struct fp8_scale)) +
           plan_aligned(scales * (size_t)m->config.fp8.fp8_amax_history_len * sizeof(float)) +
           (stage == 0 ? plan_aligned(weights * sizeof(uint32_t)) : 0);
}
// Checks that the flat buffers take what the stage leaves of them on a rank, and that nothing is allocated that is not
// planned.
static void memory_body(struct parallel *parallel, int delayed) {
    const size_t ranks = (size_t)parallel->launch.ranks;
    for (int stage = 0; stage < STAGES; stage++) {
        struct setup s;
        setup_open(&s, parallel, delayed ? GPT2_DELAYED : GPT2, "", stage, 1);
        const struct gpt *m = s.model;
        const struct plan *plan = &m->timeline.plan;
        const size_t flat = (size_t)m->table.trained.flat, own = flat / (stage >= 1 ? ranks : 1);
        // moments and, in bf16, the remainders of master weights
        const size_t state_bytes = sizeof(floatX) < 4 ? 10 : 8;
        const bool writes = stage >= 1 || parallel->launch.rank == 0;
        size_t copy = 0;
        for (int i = 0; i < plan->count; i++)
            if (strcmp(plan->categories[plan->buffers[i].category], "copy for checkpoints") == 0)
                copy += plan->buffers[i].bytes;
        expect(copy == (writes ? own * (state_bytes + sizeof(floatX)) : 0), "copy of stage %d: %zu", stage, copy);
        const size_t reports =
            plan_aligned(sizeof(struct step_results)) + plan_aligned(ranks * (size_t)report_width(m) * sizeof(double));
        const size_t tables = plan_aligned(optimizer_tensor_table_bytes(&m->table)) +
                              plan_aligned(optimizer_bucket_table_bytes(&m->zero.shards));
        const size_t scratch = plan_aligned(
            collectives_scratch_bytes(m->zero.shards.largest_shard, (int)ranks, COLLECTIVES_HOST, false, 0, m->dev));
        size_t allocated[MEMORY_COUNT] = {0};
        for (int a = 0; a < ARENA_COUNT; a++) {
            expect(m->timeline.arenas.bytes[a] == plan->arena_bytes[a], "arena %d", a);
            allocated[plan_arena_memory((enum plan_arena)a)] += m->timeline.arenas.bytes[a];
        }
        expect(allocated[MEMORY_DEVICE] == plan->peak_bytes && allocated[MEMORY_HOST] == plan->host_peak_bytes,
               "%zu and %zu bytes planned, %zu and %zu allocated", plan->peak_bytes, plan->host_peak_bytes,
               allocated[MEMORY_DEVICE], allocated[MEMORY_HOST]);
        expect(plan->arena_bytes[ARENA_PARAMETERS] == flat * sizeof(floatX) / (stage >= 3 ? ranks : 1),
               "parameters of stage %d", stage);
        expect(plan->arena_bytes[ARENA_GRADIENTS] == flat * sizeof(float) / (stage >= 2 ? ranks : 1) + scratch,
               "gradients of stage %d", stage);
        expect(plan->arena_bytes[ARENA_OPTIMIZER] == own * state_bytes + tables + reports + fp8_state_bytes(m, stage),
               "optimizer of stage %d", stage);
        setup_close(&s, parallel);
    }
}
static void test_memory(void **state) {
    assert_int_equal(run_ranks(3, memory_body, 0), 0);
    if (sizeof(floatX) == 2)
        assert_int_equal(run_ranks(3, memory_body, 1), 0);
}

// Checks that from the third step on the heap's size stays. A first round does not count, since libraries keep some
// memory of their first calls.
static void heap_body(struct parallel *parallel, int which) {
    for (int round = 0; round <= STAGES; round++) {
        const int stage = round > 0 ? round - 1 : 0;
        struct setup s;
        setup_open(&s, parallel, GPT2, "", stage, 2);
        run_steps(&s, 0, STEPS, NULL);
        zero_wait_for_updates(&s.model->zero);
        const struct mallinfo2 before = mallinfo2();
        run_steps(&s, STEPS, 3, NULL);
        zero_wait_for_updates(&s.model->zero);
        const struct mallinfo2 after = mallinfo2();
        expect(round == 0 || (after.uordblks == before.uordblks && after.hblkhd == before.hblkhd),
               "stage %d: %zu bytes on the heap before, %zu after", stage, before.uordblks + before.hblkhd,
               after.uordblks + after.hblkhd);
        setup_close(&s, parallel);
    }
}
static void test_steps_allocate_nothing(void **state) { assert_int_equal(run_ranks(2, heap_body, 0), 0); }

// Checks delayed scales, full recomputation and sharded parameters together, where other engines were seen to keep what
// each step restored: resident memory after many steps is as after two. The kernel's count lags by some pages a CPU;
// activations that stayed would add up to several times as much.
static void resident_body(struct parallel *parallel, int which) {
    enum { MANY = 60 };
    const size_t lag = 1 << 20;
    for (int round = 0; round < 2; round++) { // libraries keep some memory of their first calls
        struct setup s;
        setup_open(&s, parallel, LLAMA_DELAYED, "--recompute-granularity full", 3, 2);
        expect(MANY * s.model->timeline.plan.arena_bytes[ARENA_ACTIVATIONS] > 4 * lag, "the model is too small");
        run_steps(&s, 0, STEPS, NULL);
        zero_wait_for_updates(&s.model->zero);
        const struct mallinfo2 before = mallinfo2();
        const size_t resident = memory_resident_bytes();
        run_steps(&s, STEPS, MANY, NULL);
        zero_wait_for_updates(&s.model->zero);
        const struct mallinfo2 after = mallinfo2();
        expect(round == 0 || (after.uordblks == before.uordblks && after.hblkhd == before.hblkhd),
               "%zu bytes on the heap before, %zu after", before.uordblks + before.hblkhd,
               after.uordblks + after.hblkhd);
        expect(memory_resident_bytes() < resident + lag, "%zu bytes are resident after %d steps, %zu after %d",
               resident, STEPS, memory_resident_bytes(), STEPS + MANY);
        setup_close(&s, parallel);
    }
}
static void test_resident_memory_stays(void **state) {
    fp8_needs_bf16();
    if (UNDER_ADDRESS_SANITIZER)
        skip();
    assert_int_equal(run_ranks(2, resident_body, 0), 0);
}

// ---- when units are gathered ----

// Counts, as the schedule runs. late: units that were gathered only in the phase that waits for them; ahead: units
// whose gathering began before.
struct watch {
    enum unit_state before[PASS_COUNT][8];
    int late[PASS_COUNT], ahead[PASS_COUNT];
    int late_groups; // recomputed groups, in their first layer
};
static struct watch watch;

static void watch_units(struct gpt *m) {
    for (int r = 0; r < REGION_COUNT; r++)
        if (m->timeline.phase == m->timeline.region_first[r])
            memset(watch.before, 0, sizeof watch.before);
    for (int pass = 0; pass < PASS_COUNT; pass++)
        for (int unit = 0; unit < m->zero.shards.units; unit++) {
            const enum unit_state now = m->zero.units[pass * m->zero.shards.units + unit];
            const bool late = watch.before[pass][unit] == UNIT_ABSENT && now == UNIT_READY;
            const int layer = m->shape.L - unit;
            watch.late[pass] += late;
            const bool first = layer >= 0 && layer < m->shape.L && m->policy.group_first[layer] == layer;
            watch.late_groups += late && first && pass == PASS_BACKWARD;
            watch.ahead[pass] += watch.before[pass][unit] == UNIT_ABSENT && now == UNIT_IN_FLIGHT;
            watch.before[pass][unit] = now;
        }
}

// Checks that units are gathered ahead, except the first one of a region, the embeddings, and the layers of a
// recomputed group after its first one, which come one right after another.
static void units_body(struct parallel *parallel, int offloaded) {
    static const char *const tied_or_not[] = {GPT2, LLAMA};
    enum { LAYERS = 5 };
    for (int i = 0; i < 2 * POLICIES; i++) {
        char policy[256];
        struct setup s;
        const bool tied = i % 2 == 0;
        // group: layers of a recomputed group; second: how many layers are the second one of theirs
        const int group = i / 2 == 3 ? 2 : 1, second = group == 2 ? LAYERS / 2 : 0;
        snprintf(policy, sizeof policy, "%s --num-layers %d %s", policies[i / 2], LAYERS,
                 offloaded ? "--offload-weights" : "");
        setup_open(&s, parallel, tied_or_not[i % 2], policy, 3, 1);
        memset(&watch, 0, sizeof watch);
        watch_phases(s.model, watch_units);
        run_steps(&s, 0, 1, NULL);
        int32_t tokens[MAX_TOKENS];
        fill_tokens(&s, tokens, 7);
        gpt_evaluate(s.model, batch_of(tokens, tokens));
        watch_phases(s.model, NULL);
        expect(watch.late[PASS_TRAIN] == 1 && watch.late[PASS_EVALUATE] == 1,
               "%s: forward waits for %d units, evaluation for %d", policy, watch.late[PASS_TRAIN],
               watch.late[PASS_EVALUATE]);
        expect(watch.late[PASS_BACKWARD] == second, "%s: backward waits for %d units, not %d", policy,
               watch.late[PASS_BACKWARD], second);
        expect(watch.late_groups == 0, "%s: %d groups wait for their first layer", policy, watch.late_groups);
        expect(watch.ahead[PASS_TRAIN] == LAYERS + 1, "%s: forward gathers %d units", policy, watch.ahead[PASS_TRAIN]);
        expect(watch.ahead[PASS_BACKWARD] == LAYERS - second + tied, "%s: backward gathers %d units", policy,
               watch.ahead[PASS_BACKWARD]);
        // No earlier than needed: two layers are in memory at a time, or a group and the first layer of the next.
        const struct plan *plan = &s.model->timeline.plan;
        for (int phase = 0; phase < plan->phase_count; phase++) {
            int layers = 0;
            for (int b = 0; b < plan->count; b++) {
                const struct plan_buffer *u = &plan->buffers[b];
                layers += !strcmp(plan->categories[u->category], "parameters of a unit") && u->layer >= 0 &&
                          phase >= u->first_phase && phase <= u->last_phase;
            }
            expect(layers <= group + 1, "%s: %d layers are there in phase '%s'", policy, layers,
                   plan->phases[phase].name);
        }
        setup_close(&s, parallel);
    }
}
static void test_units_come_a_unit_ahead(void **state) {
    for (int offloaded = 0; offloaded < 2; offloaded++)
        assert_int_equal(run_ranks(2, units_body, offloaded), 0);
}

// ---- replicas ----

// The buffers of which a bit flips on rank 1: all ranks must end, and say which rank's buffer it was.
enum { NO_BUFFER = 4 };
static void replicas_body(struct parallel *parallel, int which) {
    struct run *r = (struct run *)calloc(1, sizeof *r);
    struct setup s;
    setup_open(&s, parallel, GPT2, "", which == NO_BUFFER, 1);
    struct gpt *m = s.model;
    watch_phases(m, poison_and_delay); // the updated parameters are still under way
    run_steps(&s, 0, 1, NULL);
    r->model = m;
    r->parallel = parallel;
    void *const buffers[] = {m->zero.params, m->optimizer.states[STATE_MASTER].device,
                             m->optimizer.states[STATE_MOMENT1].device, m->optimizer.states[STATE_MOMENT2].device,
                             NULL};
    if (parallel->launch.rank == 1 && buffers[which]) {
        zero_wait_for_updates(&m->zero);
        ((unsigned char *)buffers[which])[12345] ^= 4;
    }
    check_replicas(r);
    watch_phases(m, NULL);
    setup_close(&s, parallel);
    free(r);
}
static void test_replicas(void **state) {
    static const char *const names[] = {"parameters", "master weights", "first moments", "second moments"};
    assert_int_equal(run_ranks(3, replicas_body, NO_BUFFER), 0);
    for (int which = 0; which < NO_BUFFER; which++) {
        char text[4096], expected[128];
        FILE *said = test_file();
        const int error = dup(STDERR_FILENO);
        if (which == 1 && sizeof(floatX) == sizeof(float)) // fp32 parameters are their own master weights
            continue;
        dup2(fileno(said), STDERR_FILENO);
        const int failed = run_ranks(3, replicas_body, which);
        dup2(error, STDERR_FILENO);
        close(error);
        rewind(said);
        text[fread(text, 1, sizeof text - 1, said)] = '\0';
        fclose(said);
        snprintf(expected, sizeof expected, "the %s of rank 1 are not those of the other ranks", names[which]);
        if (failed != 3 || !strstr(text, expected))
            fail_msg("%s: %d ranks ended, and said: %s", names[which], failed, text);
    }
}

// Checks which rank is called wrong: most ranks are right, and of two equally large groups the first one is.
static void test_odd_rank(void **state) {
    static const struct {
        uint64_t rows[5];
        int ranks, odd;
    } cases[] = {{{7, 7, 7}, 3, -1}, {{7, 7, 8}, 3, 2},       {{8, 7, 7}, 3, 0},
                 {{7, 8}, 2, 1},     {{8, 8, 7, 7, 7}, 5, 0}, {{7, 8, 9, 8, 8}, 5, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int right = -1;
        assert_int_equal(odd_rank(cases[i].rows, cases[i].ranks, 1, &right), cases[i].odd);
        assert_true(cases[i].odd < 0 || cases[i].rows[right] != cases[i].rows[cases[i].odd]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_on_two),
        cmocka_unit_test(test_llama_on_three),
        cmocka_unit_test(test_tensorwise_on_two),
        cmocka_unit_test(test_delayed_on_three),
        cmocka_unit_test(test_blockwise_on_two),
        cmocka_unit_test(test_gpt2_offloaded),
        cmocka_unit_test(test_llama_offloaded),
        cmocka_unit_test(test_gpt2_offloaded_on_three),
        cmocka_unit_test(test_llama_offloaded_on_two),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_resident_memory_stays),
        cmocka_unit_test(test_units_come_a_unit_ahead),
        cmocka_unit_test(test_replicas),
        cmocka_unit_test(test_odd_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
