// --attention-backend auto by measurement (docs/internals/self-check.md). Once the backend that the rules chose has
// passed the self-check, a child process times it and its alternatives at the run's own shape, and the run takes the
// fastest. The child first checks alternatives without a verdict, and opens cuDNN before the run's process does. The
// times are kept in self_check.txt for later starts, as another backend would change the bits of a run that goes on.
#pragma once
#include "run/self_check.cuh" // the child, its verdicts and their file

enum self_measure_result { SELF_MEASURE_NOTHING, SELF_MEASURE_REFUSED, SELF_MEASURE_DONE };

#ifdef TARGET_CUDA
#include "run/time_attention.cuh"     // time_attention
#include "runtime/machine/text_add.h" // text_add
#include <inttypes.h>                 // PRIx64, SCNx64

// How many times as fast as the choice by rule another backend must be to be taken: times vary by a few percent.
static const double SELF_MEASURE_GAIN = 1.03;
// Why a backend that is right is not taken. This text is recognized by its address.
static const char SELF_MEASURE_SLOWER[] = "is not faster on this GPU";

// ---- The request ----

struct measure_request {
    enum attention_backend rule; // the choice by rule, which has passed the self-check
    struct attention_check check;
    struct attention_timing timing;        // what is timed beside the check's shape and features
    bool others[ATTENTION_BACKENDS_COUNT]; // may be taken instead
    uint64_t cudnn;                        // fused_installed(); 0 where fused is not among `others`
};

#define SELF_MEASURE_WORD FLOATX_NAME " measure "

// Returns a bit for each backend that is timed beside m->rule, whose own bit is never set; 0: there is none.
static int measure_others_bits(const struct measure_request *m) {
    int mask = 0;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        mask |= m->others[i] << i;
    return mask;
}
// Writes the words that ask a child of this process for a measurement to text (SELF_CHECK_REQUEST bytes).
static void measure_write_request(char *text, const struct measure_request *m, int gpu) {
    const struct attention_shape *s = &m->check.shape;
    const struct attention_timing *t = &m->timing;
    snprintf(text, SELF_CHECK_REQUEST,
             SELF_MEASURE_WORD "parent=%d gpu=%d backend=%d others=%d cudnn=%" PRIx64
                               " B=%d T=%d heads=%d groups=%d dim=%d scale=%.9g softcap=%.9g hides=%d rotary=%d "
                               "biases=%d amax=%d any_order=%d timed=%d window=%d layers=%d,%d",
             (int)getpid(), gpu, (int)m->rule, measure_others_bits(m), m->cudnn, s->B, s->T, s->num_heads,
             s->num_query_groups, s->head_dim, (double)s->scale, (double)s->softcap, m->check.hides_keys,
             m->check.rotary, m->check.biases, m->check.amax, m->check.any_order,
             t->biases | t->out_amax << 1 | t->gradient_amax << 2 | t->documents << 3, t->window, t->layers[MASK_PLAIN],
             t->layers[MASK_WINDOWED]);
}
// Reads what measure_write_request wrote. Returns false where this program can't make such a measurement.
static bool measure_read_request(struct measure_request *m, int *parent, int *gpu, const char *text) {
    struct attention_shape *s = &m->check.shape;
    struct attention_timing *t = &m->timing;
    int backend, others, hides, rotary, biases, amax, any_order, timed;
    memset(m, 0, sizeof *m);
    const int read =
        sscanf(text,
               SELF_MEASURE_WORD "parent=%d gpu=%d backend=%d others=%d cudnn=%" SCNx64
                                 " B=%d T=%d heads=%d groups=%d dim=%d scale=%f softcap=%f hides=%d rotary=%d "
                                 "biases=%d amax=%d any_order=%d timed=%d window=%d layers=%d,%d",
               parent, gpu, &backend, &others, &m->cudnn, &s->B, &s->T, &s->num_heads, &s->num_query_groups,
               &s->head_dim, &s->scale, &s->softcap, &hides, &rotary, &biases, &amax, &any_order, &timed, &t->window,
               &t->layers[MASK_PLAIN], &t->layers[MASK_WINDOWED]);
    if (read != 21 || *gpu < 0 || !self_check_is_backend(backend) || s->B < 1 || s->T < 1 ||
        !self_check_heads_are_valid(s) || t->layers[MASK_PLAIN] < 0 || t->layers[MASK_WINDOWED] < 0 ||
        (t->layers[MASK_PLAIN] == 0 && t->layers[MASK_WINDOWED] == 0))
        return false;
    m->rule = (enum attention_backend)backend;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        m->others[i] = others >> i & 1;
    m->check.hides_keys = hides;
    m->check.rotary = t->rotary = rotary;
    m->check.biases = biases;
    m->check.amax = amax;
    m->check.any_order = t->any_order = any_order;
    t->biases = timed & 1;
    t->out_amax = timed >> 1 & 1;
    t->gradient_amax = timed >> 2 & 1;
    t->documents = timed >> 3 & 1;
    t->shape = *s;
    return true;
}

// ---- The child ----

// A child's lines, each with a backend's number. AT: its work begins. OUT: why it is not timed. TOOK: its milliseconds.
#define SELF_MEASURE_AT "self-measure: at "
#define SELF_MEASURE_OUT "self-measure: out "
#define SELF_MEASURE_TOOK "self-measure: took "

static void print_backend_begins(enum attention_backend backend) { printf("\n" SELF_MEASURE_AT "%d\n", (int)backend); }
// Writes why a backend can't be timed to reason (size bytes), or "". Only fused is checked against a simpler one.
static void measure_judge(char *reason, size_t size, const struct measure_request *m, enum attention_backend backend,
                          int multiprocessors, struct device *dev) {
    struct attention_demands demands;
    char wrong[256] = "", fused[320] = "";
    double largest = 0;
    struct attention_check check = m->check;
    check.backend = backend;
    check.simpler = ATTENTION_AUTO;
    if (backend == ATTENTION_FUSED) {
        memset(&demands, 0, sizeof demands);
        demands.any_order = check.any_order;
        self_check_cudnn(wrong, sizeof wrong, &check, dev);
        if (!*wrong)
            attention_fused_reason(fused, sizeof fused, ATTENTION_AUTO, check.shape, demands, dev);
    } else
        self_check_stage(wrong, sizeof wrong, check, JUDGE_BY_ITSELF, multiprocessors, &largest, dev);
    if (*wrong)
        snprintf(reason, size, "failed the self-check: %.200s", wrong);
    else
        snprintf(reason, size, "%.200s", strncmp(fused, "fused: ", 7) == 0 ? fused + 7 : fused);
}
static int measure_serve(const char *request) {
    struct measure_request m;
    struct cudaDeviceProp properties;
    struct device dev;
    char reason[256];
    int parent = 0, gpu = 0;
    if (!measure_read_request(&m, &parent, &gpu, request))
        fail("a request to measure attention is not understood: %s", request);
    self_check_open(&dev, &properties, parent, gpu);
    struct attention_timing timing = m.timing;
    timing.candidates[m.rule] = true;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (m.others[i]) {
            print_backend_begins((enum attention_backend)i);
            measure_judge(reason, sizeof reason, &m, (enum attention_backend)i, properties.multiProcessorCount, &dev);
            if (*reason)
                printf("\n" SELF_MEASURE_OUT "%d %s\n", i, reason);
            timing.candidates[i] = !*reason;
        }
    print_backend_begins(ATTENTION_AUTO); // what is not one backend's work
    time_attention(&timing, device_free_bytes(&dev) / 2, print_backend_begins, &dev);
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (timing.candidates[i])
            printf("\n" SELF_MEASURE_TOOK "%d %.6g ms\n", i, 1e3 * timing.seconds[i]);
    self_check_close(&dev);
    return EXIT_SUCCESS;
}
static int self_check_or_measure_serve(const char *request) {
    return strncmp(request, SELF_MEASURE_WORD, strlen(SELF_MEASURE_WORD)) == 0 ? measure_serve(request)
                                                                               : self_check_serve(request);
}

// ---- The parent ----

// Returns the backend whose work a child began last, or ATTENTION_AUTO if that was not the work of one backend.
static enum attention_backend measure_last_at(const char *output) {
    int backend = ATTENTION_AUTO;
    for (const char *at = strstr(output, SELF_MEASURE_AT); at; at = strstr(at + 1, SELF_MEASURE_AT))
        backend = atoi(at + strlen(SELF_MEASURE_AT));
    return backend > 0 && backend < ATTENTION_BACKENDS_COUNT ? (enum attention_backend)backend : ATTENTION_AUTO;
}
// Sets *verdict by a child's line to RIGHT with a time, or WRONG with why. Returns false, with *verdict void, if none.
static bool measure_read_line(struct self_verdict *verdict, const char *output, int backend) {
    char start[64];
    snprintf(start, sizeof start, SELF_MEASURE_TOOK "%d ", backend);
    verdict->kind = SELF_CHECK_RIGHT;
    verdict->lasts = true;
    if (self_check_line(verdict->text, sizeof verdict->text, output, start))
        return true;
    snprintf(start, sizeof start, SELF_MEASURE_OUT "%d ", backend);
    verdict->kind = SELF_CHECK_WRONG;
    return self_check_line(verdict->text, sizeof verdict->text, output, start);
}
// Runs a child for the request. Sets each verdicts[backend]: RIGHT with its time, WRONG with the reason, or UNKNOWN if
// the child did not reach it. Sets s->measured.missing to how the child ended, or "" if it ended well.
static void measure_ask(struct self_verdict *verdicts, struct self_check *s, const struct measure_request *m,
                        char *request) {
    enum { OUTPUT = 1 << 16 };
    char opened[8];
    const double begin = seconds_now(), limit = self_check_limit();
    char *const output = (char *)malloc(OUTPUT);
    if (!output)
        fail("out of memory");
    const struct child_result result = self_check_run_child(output, OUTPUT, request, limit);
    const bool open = self_check_line(opened, sizeof opened, output, SELF_CHECK_OPEN);
    const bool ended = result.end == CHILD_EXITED && result.status == 0;
    const bool fault = open && self_check_is_fault(result, output) && !stop_asked();
    const enum attention_backend culprit = fault ? measure_last_at(output) : ATTENTION_AUTO;
    s->measured.seconds += seconds_now() - begin;
    s->measured.missing[0] = '\0';
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++) {
        struct self_verdict *const verdict = &verdicts[i];
        memset(verdict, 0, sizeof *verdict);
        verdict->kind = SELF_CHECK_UNKNOWN;
        if ((i != (int)m->rule && !m->others[i]) || measure_read_line(verdict, output, i))
            continue;
        verdict->kind = i == (int)culprit ? SELF_CHECK_WRONG : SELF_CHECK_UNKNOWN;
        verdict->lasts = result.end != CHILD_LATE;
        if (i == (int)culprit) {
            char why[200];
            self_check_explain(why, sizeof why, result, output, limit);
            snprintf(verdict->text, sizeof verdict->text, "failed the self-check: %s", why);
        }
    }
    if (!ended)
        self_check_explain(s->measured.missing, sizeof s->measured.missing, result, output, limit);
    free(output);
}

static void measure_write_key(char *key, const char *request_key, int backend) {
    snprintf(key, SELF_CHECK_KEY, "%.*s; time of %d", SELF_CHECK_KEY - 32, request_key, backend);
}
// Sets the verdicts (zeroed before) of all backends to compare: from known lines or, if one has none, by a child. Starts
// no child if one is known to be wrong: refuse it first. Returns whether each has one. *is_new: a child has given them.
static bool measure_here(struct self_verdict *verdicts, bool *is_new, struct run *r, const struct measure_request *m) {
    struct self_check *s = &r->self_check;
    char request[SELF_CHECK_REQUEST], base[SELF_CHECK_KEY], key[SELF_CHECK_KEY];
    bool known = true, wrong = false, was_late[ATTENTION_BACKENDS_COUNT] = {false};
    measure_write_request(request, m, r->dev.index);
    self_check_write_key(base, request, &r->dev);
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (i == (int)m->rule || m->others[i]) {
            measure_write_key(key, base, i);
            const bool found = self_check_recall(&verdicts[i], &was_late[i], s->known, key);
            if (!found)
                memset(&verdicts[i], 0, sizeof verdicts[i]);
            known = known && found;
            wrong = wrong || (found && verdicts[i].kind == SELF_CHECK_WRONG);
        }
    if (known || wrong)
        return known;
    measure_ask(verdicts, s, m, request);
    *is_new = true;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        self_check_count_late(&verdicts[i], was_late[i]);
    return !*s->measured.missing;
}
// Adds new verdicts, on which ranks have agreed, to s->found.
static void measure_keep(const struct self_verdict *verdicts, struct run *r, const struct measure_request *m) {
    char request[SELF_CHECK_REQUEST], base[SELF_CHECK_KEY], key[SELF_CHECK_KEY];
    measure_write_request(request, m, r->dev.index);
    self_check_write_key(base, request, &r->dev);
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if ((i == (int)m->rule || m->others[i]) && self_check_is_kept(&verdicts[i], r->config)) {
            measure_write_key(key, base, i);
            self_check_add(&r->self_check.found, &verdicts[i], key);
        }
}

// Returns a backend's milliseconds on the slowest rank, or 0 if any rank has no complete times. Every rank calls this.
static double measure_slowest_ms(struct run *r, const struct self_verdict *verdict, bool complete) {
    const double ms = complete && verdict->kind == SELF_CHECK_RIGHT ? strtod(verdict->text, NULL) : 0;
    const int microseconds = ms > 0 && ms < 1e6 ? (int)(1e3 * ms) + 1 : INT_MAX;
    const int slowest = parallel_largest(r->parallel, microseconds, "the time of attention");
    return slowest == INT_MAX ? 0 : 1e-3 * slowest;
}
// Sets s->measured.missing, where this rank has its times but another has not, to which. A rank other than 0 without
// times warns. Every rank calls this.
static void measure_agree_on_missing(struct run *r) {
    struct self_measured *m = &r->self_check.measured;
    const int rank = r->config->rank;
    const int without = parallel_largest(r->parallel, *m->missing ? rank + 1 : 0, "the time of attention");
    if (*m->missing && rank > 0)
        say_warning("rank %d, the time of attention: %s", rank, m->missing);
    else if (!*m->missing && without > 0)
        snprintf(m->missing, sizeof m->missing, "rank %d could not measure it", without - 1);
}
// Whether any rank found a backend wrong; then *verdict is WRONG, and refused[backend] is the reason, in r->self_check.
// Every rank calls this.
static bool measure_refuse(struct run *r, struct self_verdict *verdict, enum attention_backend backend,
                           const char **refused) {
    struct self_check *s = &r->self_check;
    char *const text = s->measured.left_out[backend];
    const size_t size = sizeof s->measured.left_out[backend];
    const bool wrong = verdict->kind == SELF_CHECK_WRONG, failed = wrong && strncmp(verdict->text, "failed", 6) == 0;
    const int rank = r->config->rank, mine = wrong ? 4 * (rank + 1) + 2 * failed + verdict->lasts : 0;
    const int worst = parallel_largest(r->parallel, mine, "the time of attention");
    if (worst == 0)
        return false;
    if (failed && rank > 0)
        say_warning("rank %d, the time of attention by %s: %s", rank, self_check_backend_name(backend, &r->dev),
                    verdict->text);
    if (!wrong) {
        verdict->kind = SELF_CHECK_WRONG;
        verdict->lasts = worst % 2;
        snprintf(verdict->text, sizeof verdict->text,
                 worst & 2 ? "failed the self-check: rank %d found it wrong" : "rank %d can't take it", worst / 4 - 1);
    }
    snprintf(text, size, "%s", verdict->text);
    if (strncmp(text, "failed", 6) == 0) // a fallback, which log.jsonl has, too
        memcpy(s->refused[backend], text, size);
    refused[backend] = text;
    return true;
}

// Returns what the run's calls do beside attention itself: in FP8 layers if it has some, which sum biases by a cast.
static struct attention_timing measure_timing_of(const struct config *c) {
    struct attention_timing t;
    int first, end;
    memset(&t, 0, sizeof t);
    config_fp8_layers(c, &first, &end);
    const bool in_fp8 = end > first, sums = !c->model.qk_layernorm; // the norm of q and k makes another gradient
    t.biases = sums && !in_fp8 && c->model.add_qkv_bias && c->finetuning.lora_rank == 0;
    t.out_amax = in_fp8 && c->fp8.fp8_recipe != FP8_RECIPE_BLOCKWISE;
    t.gradient_amax = sums && t.out_amax;
    t.documents = c->data.reset_attention_mask;
    t.window = config_window(c) < c->model.seq_length ? config_window(c) : 0;
    for (int l = 0; l < c->model.num_layers; l++)
        t.layers[t.window > 0 && config_layer_is_windowed(c, l) ? MASK_WINDOWED : MASK_PLAIN]++;
    return t;
}
static struct measure_request measure_request_of(struct run *r, enum attention_backend rule,
                                                 const struct attention_demands *demands) {
    struct measure_request m;
    struct attention_reasons reasons;
    struct cudaDeviceProp properties;
    char never[256]; // why cuDNN can't take the shape, whatever version is installed
    memset(&m, 0, sizeof m);
    m.rule = rule;
    m.check = attention_check_of(r, rule);
    m.timing = measure_timing_of(r->config);
    attention_prefers_flash(&reasons, ATTENTION_AUTO, m.check.shape, demands, &r->dev);
    attention_ruled_out(reasons.fused, sizeof reasons.fused, ATTENTION_FUSED, ATTENTION_AUTO);
    m.others[ATTENTION_FLASH_SM90] = !*reasons.sm90;
    m.others[ATTENTION_FLASH] = !*reasons.flash && demands->kernels != FLASH_KERNELS_WGMMA;
    cuda_check(cudaGetDeviceProperties(&properties, r->dev.index));
    fused_refuses(never, sizeof never, SIZE_MAX, properties.major, m.check.shape, m.check.any_order);
    if (!*reasons.fused && !*never && !*reasons.flash && demands->kernels == FLASH_KERNELS_AUTO &&
        demands->dropout == 0 && !demands->documents && m.timing.layers[MASK_PLAIN] > 0 &&
        !demands->refused[ATTENTION_FUSED])
        m.cudnn = fused_installed();
    m.others[ATTENTION_FUSED] = m.cudnn > 0;
    m.others[rule] = false;
    return m;
}

// Times `rule`, the rules' backend, and its alternatives. Returns DONE if `rule` has a time: demands->fastest is set,
// demands->refused has slower ones. Else returns REFUSED if that has wrong ones, or NOTHING. Every rank calls this.
static enum self_measure_result self_measure(struct run *r, enum attention_backend rule,
                                             struct attention_demands *demands) {
    struct self_measured *measured = &r->self_check.measured;
    struct self_verdict verdicts[ATTENTION_BACKENDS_COUNT];
    enum self_measure_result result = SELF_MEASURE_NOTHING;
    if (rule == ATTENTION_UNFUSED || !self_check_any_rank_wants(r))
        return result;
    const struct measure_request m = measure_request_of(r, rule, demands);
    if (!parallel_largest(r->parallel, measure_others_bits(&m) != 0, "the time of attention"))
        return result;
    memset(verdicts, 0, sizeof verdicts);
    bool is_new = false;
    const bool complete = measure_others_bits(&m) != 0 && measure_here(verdicts, &is_new, r, &m);
    parallel_barrier(r->parallel, "the time of attention"); // the children may take longer than agreement
    measure_agree_on_missing(r);
    enum attention_backend fastest = rule;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++) {
        if (measure_refuse(r, &verdicts[i], (enum attention_backend)i, demands->refused))
            result = SELF_MEASURE_REFUSED;
        measured->ms[i] = measure_slowest_ms(r, &verdicts[i], complete);
    }
    if (is_new)
        measure_keep(verdicts, r, &m);
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT && measured->ms[rule] > 0; i++)
        if (measured->ms[i] > 0 && measured->ms[i] * SELF_MEASURE_GAIN < measured->ms[rule] &&
            measured->ms[i] < measured->ms[fastest])
            fastest = (enum attention_backend)i;
    if (measured->ms[rule] > 0) {
        demands->fastest = fastest;
        result = SELF_MEASURE_DONE;
    }
    if (measured->ms[ATTENTION_FUSED] > 0 && fastest != ATTENTION_FUSED)
        demands->refused[ATTENTION_FUSED] = SELF_MEASURE_SLOWER;
    if (fastest == ATTENTION_FLASH && measured->ms[ATTENTION_FLASH_SM90] > 0)
        demands->refused[ATTENTION_FLASH_SM90] = SELF_MEASURE_SLOWER;
    return (enum self_measure_result)parallel_largest(r->parallel, (int)result, "the time of attention");
}

// Drops demands->fastest, which has turned out to be wrong, and the refusals of backends for being slower.
static void self_measure_forget(struct attention_demands *demands) {
    demands->fastest = ATTENTION_AUTO;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (demands->refused[i] == SELF_MEASURE_SLOWER)
            demands->refused[i] = NULL;
}

static void self_measure_report(const struct run *r) {
    const struct self_measured *measured = &r->self_check.measured;
    const struct attention_timing timing = measure_timing_of(r->config);
    const int plain = timing.layers[MASK_PLAIN], windowed = timing.layers[MASK_WINDOWED];
    char text[320] = "", took[64];
    int timed = 0;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (measured->ms[i] > 0 && ++timed)
            text_add(text, sizeof text, "%s%s %.3g ms", *text ? ", " : "",
                     self_check_backend_name((enum attention_backend)i, &r->dev), measured->ms[i]);
    snprintf(took, sizeof took, "%.2f s", measured->seconds);
    if (timed > 1)
        log_row("attention's time", "%s: a layer%s, forward and backward; %s", text,
                plain > 0 && windowed > 0 ? ", the mean of those with and without a window" : "",
                measured->seconds == 0 ? "by " SELF_CHECK_NAME " in --out" : took);
    else if (*measured->missing)
        log_row("attention's time", "not measured: %s", measured->missing);
}

#else

static enum self_measure_result self_measure(struct run *r, enum attention_backend rule,
                                             struct attention_demands *demands) {
    return SELF_MEASURE_NOTHING;
}
static void self_measure_forget(struct attention_demands *demands) {}
static void self_measure_report(const struct run *r) {}

#endif
