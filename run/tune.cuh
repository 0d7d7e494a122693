// Chooses algorithms of the matrix products before the first step, on rank 0 for all ranks, so that all have the same
// bits. Times products of training and validation that the checkpoint's file, or --out's, lacks; others use heuristics.
#pragma once
#include "run/check_deadline.cuh" // deadline_begin
#include "run/self_check.cuh"     // self_check_any_rank_wants
#include "run/self_known.cuh"     // self_check_known, self_check_keep_right
#ifdef TARGET_CUDA
#include "kernels/matmul/choices.cuh" // struct matmul_choice, matmul_tune
#endif

#ifdef TARGET_CUDA
#include "formats/matmul_algorithms.h" // matmul_algorithms_parse
#include "runtime/files/file_read.h"   // read_whole
#include "runtime/machine/say.h"       // say_warning
#include "runtime/machine/text_add.h"  // text_add
#include "runtime/net/parallel.h"      // parallel_share_text
#include <assert.h>                    // static_assert
#include <errno.h>                     // errno
#include <limits.h>                    // PATH_MAX
#include <math.h>                      // fmax
#include <stdlib.h>                    // calloc, free
#include <unistd.h>                    // access

static const char *const tune_key_names[] = {
#define TUNE_KEY_NAME(name) #name,
    MATMUL_KEY(TUNE_KEY_NAME)
#undef TUNE_KEY_NAME
};
static_assert((int)MATMUL_ALGORITHMS_KEY == (int)MATMUL_KEY_NUMBERS, "a file's line has a product's key");
static_assert((int)MATMUL_ALGORITHMS_ROWS == (int)MATMUL_PLANS, "a file has room for all products");
static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof((struct matmul_algorithm *)0)->bytes,
              "a file's line has an algorithm");

// ---- Choices to and from the file's form ----

static struct matmul_choice tune_choice_of(const struct matmul_algorithm *row) {
    struct matmul_choice choice;
    memcpy(&choice.key, row->key, sizeof choice.key);
    memcpy(&choice.algorithm, row->bytes, sizeof choice.algorithm);
    choice.fused = row->fused;
    choice.candidate = row->candidate;
    choice.first_us = row->first_us;
    choice.us = row->us;
    return choice;
}
// Sets what choices are valid for: the library's version, and the GPU's name and number of multiprocessors.
static void tune_describe_machine(struct matmul_algorithms *algorithms, const struct device *dev) {
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    algorithms->library = (int64_t)cublasLtGetVersion();
    algorithms->multiprocessors = properties.multiProcessorCount;
    snprintf(algorithms->gpu, sizeof algorithms->gpu, "%s", properties.name);
}
// Returns an empty list, which the caller frees; never NULL.
static struct matmul_algorithms *tune_allocate(void) {
    struct matmul_algorithms *algorithms = (struct matmul_algorithms *)calloc(1, sizeof *algorithms);
    if (!algorithms)
        fail("out of memory");
    return algorithms;
}
// Returns the file's text (*bytes), which the caller frees: the choices and, if there is room, the rows of `others`.
static char *tune_text(const struct matmul_library *library, const struct matmul_algorithms *others,
                       const struct device *dev, size_t *bytes) {
    struct matmul_algorithms *algorithms = tune_allocate();
    tune_describe_machine(algorithms, dev);
    for (int i = 0; i < library->choice_count; i++) {
        const struct matmul_choice *choice = &library->choices[i];
        struct matmul_algorithm *row = &algorithms->rows[algorithms->count++];
        memcpy(row->key, &choice->key, sizeof row->key);
        memcpy(row->bytes, &choice->algorithm, sizeof row->bytes);
        row->fused = choice->fused;
        row->candidate = choice->candidate;
        row->first_us = choice->first_us;
        row->us = choice->us;
    }
    for (int i = 0; i < others->count && algorithms->count < MATMUL_ALGORITHMS_ROWS; i++)
        algorithms->rows[algorithms->count++] = others->rows[i];
    char *text = matmul_algorithms_text(algorithms, tune_key_names, bytes);
    if (!text)
        fail("out of memory");
    free(algorithms);
    return text;
}
// Takes over the choices of a file's text, but none from another GPU or library. others = the choices that this run has
// no use for. note = what is unused and why; stays if nothing is. Returns NULL, or what is wrong.
static const char *tune_take_text(struct run *r, const char *text, size_t bytes, const char *name, char note[TUNE_TEXT],
                                  struct matmul_algorithms *others, struct error_text *error) {
    struct matmul_algorithms *theirs = tune_allocate(), *ours = tune_allocate();
    const char *problem =
        matmul_algorithms_parse(theirs, tune_key_names, (const unsigned char *)text, bytes, name, error);
    tune_describe_machine(ours, &r->dev);
    const bool same = theirs->library == ours->library && theirs->multiprocessors == ours->multiprocessors &&
                      strcmp(theirs->gpu, ours->gpu) == 0;
    if (!problem && !same)
        snprintf(note, TUNE_TEXT, "%s: of cuBLASLt %lld on %s with %d multiprocessors, here %lld on %s with %d", name,
                 (long long)theirs->library, theirs->gpu, theirs->multiprocessors, (long long)ours->library, ours->gpu,
                 ours->multiprocessors);
    others->count = 0;
    for (int i = 0; i < theirs->count && !problem && same; i++) {
        const struct matmul_choice choice = tune_choice_of(&theirs->rows[i]);
        if (!matmul_take_choice(r->dev.matmul, &choice))
            others->rows[others->count++] = theirs->rows[i];
    }
    if (others->count > 0)
        snprintf(note, TUNE_TEXT, "%s: %d of its %d products, which are not this run's", name, others->count,
                 theirs->count);
    free(theirs);
    free(ours);
    return problem;
}

// ---- Rank 0 ----

// Takes over, on rank 0, the choices of the checkpoint's file or else of --out's; none from another GPU or library.
// others (empty before) = the rest of such a file. path = the file, or "" without one. A broken file ends the program.
static void tune_read(struct run *r, struct matmul_algorithms *others, char path[PATH_MAX]) {
    enum { MAX_BYTES = MATMUL_ALGORITHMS_BYTES };
    const char *const folders[] = {r->config->checkpoint, r->config->data.out};
    struct error_text error;
    unsigned char *data = NULL;
    uint64_t bytes = 0;
    bool found = false;
    for (int i = 0; i < 2 && !found; i++)
        found = *folders[i] && (size_t)snprintf(path, PATH_MAX, "%s/" MATMUL_ALGORITHMS_NAME, folders[i]) < PATH_MAX &&
                access(path, F_OK) == 0;
    if (!found) {
        *path = 0;
        return;
    }
    const char *problem = read_whole(&data, &bytes, MAX_BYTES, path, "a list of matmul algorithms", &error);
    if (!problem)
        problem = tune_take_text(r, (const char *)data, (size_t)bytes, path, r->tuning_note, others, &error);
    if (problem)
        fail("%s; --matmul-tuning=false starts without that file", problem);
    free(data);
}
// Fills the activations with noise, which tune_end frees, and sets FP8's inverse scales to 1, before the first step.
static struct matmul_noise tune_begin(struct run *r) {
    const struct arenas *arenas = &r->model->timeline.arenas;
    fp8_set_inverses(&r->model->fp8, 1, &r->dev); // with 0 all results would be 0, and tell nothing
    return matmul_noise_open(arenas->base[ARENA_ACTIVATIONS], arenas->bytes[ARENA_ACTIVATIONS], &r->dev);
}
// Frees the noise, and zeroes what timing overwrote: gradients on the device, and FP8's inverse scales.
static void tune_end(struct run *r, struct matmul_noise *noise) {
    struct gpt *m = r->model;
    if (!m->zero.grads_on_host)
        device_zero(m->zero.grads, zero_gradients_bytes(&m->zero), &r->dev);
    fp8_set_inverses(&m->fp8, 0, &r->dev);
    matmul_noise_close(noise, &r->dev);
}
// Runs of a product whose algorithms are timed, 16, in 3 rounds, twice or more in each; and of one that is proven.
enum { TUNE_RUNS = 96, TUNE_PROOF_RUNS = 4 };
static const double TUNE_SLOW_FLOPS = 1e13; // a second, which GPUs exceed in fp32, too
// Gives `runs` runs of a product a deadline, up to deadline_end, by *check, which is filled.
static void tune_deadline_begin(struct run *r, struct timed_check *check, const struct matmul_product *product,
                                int runs) {
    const struct gemm *gemm = &product->gemm;
    const double flops = 2.0 * (double)gemm->rows * (double)gemm->cols * (double)gemm->depth;
    snprintf(check->what, sizeof check->what, "a product of %lld x %lld x %lld by cuBLASLt", (long long)gemm->rows,
             (long long)gemm->cols, (long long)gemm->depth);
    check->instead = r->config->device.matmul_tuning ? "--matmul-tuning=false takes the heuristics' first algorithms"
                                                     : "another version of the library or of the driver may be right";
    deadline_begin(r, check, runs * flops / TUNE_SLOW_FLOPS);
}
// Times the listed products that have no choice yet, keeps the choices and returns how many. If any, overwrites the
// activations, and zeroes device gradients and FP8's inverse scales: call this before the first step.
static int tune_time(struct run *r) {
    struct matmul_library *library = r->dev.matmul;
    struct timed_check check;
    int timed = 0;
    if (library->choice_count == library->product_count)
        return 0;
    struct matmul_noise noise = tune_begin(r);
    for (int i = 0; i < library->product_count; i++) {
        const struct matmul_product *product = &library->products[i];
        const struct matmul_key key = matmul_key_of(&product->gemm, product->dbias);
        tune_deadline_begin(r, &check, product, TUNE_RUNS);
        timed += !matmul_choice_of(library, &key) && matmul_tune(library, product, &noise, &r->dev);
        deadline_end(r);
    }
    tune_end(r, &noise);
    return timed;
}
// Compares elements of listed products whose flags in `wrong` (MATMUL_PLANS) are set with sums in double, and clears
// right ones' flags. Overwrites what tune_time does.
static void tune_prove(struct run *r, bool *wrong) {
    struct matmul_library *library = r->dev.matmul;
    struct matmul_noise noise = tune_begin(r);
    struct timed_check check;
    for (int i = 0; i < library->product_count; i++)
        if (wrong[i]) {
            tune_deadline_begin(r, &check, &library->products[i], TUNE_PROOF_RUNS);
            wrong[i] = !matmul_prove(library, &library->products[i], &noise, &r->dev);
            deadline_end(r);
        }
    tune_end(r, &noise);
}
// Sets r->tuning to the start-up report's text. path: the file that the choices that were not timed come from.
static void tune_describe(struct run *r, int timed, double seconds, const char *path) {
    const struct matmul_library *library = r->dev.matmul;
    double first_us = 0, us = 0, most = 0;
    int others = 0, epilogues = 0, unproven = 0;
    for (int i = 0; i < library->choice_count; i++) {
        const struct matmul_choice *choice = &library->choices[i];
        first_us += choice->first_us;
        us += choice->us;
        others += choice->candidate > 0;
        epilogues += choice->fused;
        unproven += choice->first_us == 0;
        most = choice->first_us > 0 ? fmax(most, 1 - choice->us / choice->first_us) : most;
    }
    const size_t size = sizeof r->tuning;
    snprintf(r->tuning, size, "%d products, %d timed in %.2f s", library->choice_count, timed, seconds);
    if (timed < library->choice_count)
        text_add(r->tuning, size, ", %d by %s", library->choice_count - timed, path);
    text_add(r->tuning, size, "; %d not by the heuristics' first", others);
    if (others > 0)
        text_add(r->tuning, size, ", which saves %.1f %% of one run of each, %.1f %% at most",
                 100 * (1 - us / first_us), 100 * most);
    if (epilogues > 0)
        text_add(r->tuning, size, "; %d by an epilogue that does what comes with them", epilogues);
    if (unproven > 0)
        text_add(r->tuning, size, "; %d by the heuristics' first, since no algorithm could be proven", unproven);
    if (library->list_overflowed)
        text_add(r->tuning, size, "; products after the first %d untimed, by the heuristics' first", MATMUL_PLANS);
}
// Replaces a file as a whole, so that a full disk or a kill leaves the old file. Returns 0, or an errno.
static int tune_replace_file(const char *path, const char *text, size_t bytes) {
    char temporary[PATH_MAX];
    int problem = 0;
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp", path) >= sizeof temporary)
        return ENAMETOOLONG;
    FILE *file = fopen(temporary, "w");
    if (!file)
        return errno;
    if (fwrite(text, 1, bytes, file) != bytes || fflush(file) != 0 || fsync(fileno(file)) != 0)
        problem = errno;
    if (fclose(file) != 0 && !problem)
        problem = errno;
    if (!problem && rename(temporary, path) != 0)
        problem = errno;
    if (problem)
        unlink(temporary);
    return problem;
}
// Writes the choices into --out, or warns. Gives the text to the saver, which puts it into checkpoints and frees it.
static void tune_write(struct run *r, char *text, size_t bytes) {
    char path[PATH_MAX];
    const bool fits =
        (size_t)snprintf(path, sizeof path, "%s/" MATMUL_ALGORITHMS_NAME, r->config->data.out) < sizeof path;
    const int problem = fits ? tune_replace_file(path, text, bytes) : ENAMETOOLONG;
    if (problem)
        say_warning("%s: cannot be written: %s; the choice of matmul algorithms is only in checkpoints", path,
                    strerror(problem));
    saver_set_algorithms(&r->saver, text, bytes);
}

// ---- All ranks ----

// Whether earlier starts found the listed products right on all ranks. key (SELF_CHECK_KEY bytes): of that verdict.
static bool tune_products_known(struct run *r, char *key) {
    char request[SELF_CHECK_REQUEST];
    snprintf(request, sizeof request, " products=%016" PRIx64, matmul_products_hash(r->dev.matmul));
    self_check_write_key(key, request, &r->dev);
    return self_check_known(r, key) == SELF_CHECK_RIGHT;
}
// Proves all listed products if they are to be proven `here`. All ranks replace choices that any rank finds wrong by
// the heuristics' first, or end if it is wrong, too. Returns how many. *known: a verdict said so. Every rank calls this.
static int tune_check_products(struct run *r, bool here, bool *known) {
    struct matmul_library *library = r->dev.matmul;
    bool wrong[MATMUL_PLANS], dropped[MATMUL_PLANS] = {false};
    char key[SELF_CHECK_KEY];
    int count = 0;
    *known = tune_products_known(r, key);
    if (*known)
        return 0;
    for (int i = 0; i < MATMUL_PLANS; i++)
        wrong[i] = here && i < library->product_count;
    if (here)
        tune_prove(r, wrong);
    for (;; count++) {
        int last = -1;
        for (int i = 0; i < MATMUL_PLANS; i++)
            last = wrong[i] ? i : last;
        const int i = parallel_largest(r->parallel, last, "the check of matmul algorithms");
        if (i < 0)
            break;
        dropped[i] = i < library->product_count && matmul_drop_choice(library, &library->products[i]);
        if (wrong[i] && !dropped[i])
            matmul_fail_wrong(&library->products[i].gemm, "its algorithm differs");
        wrong[i] = false;
    }
    if (count > 0)
        tune_prove(r, dropped);
    for (int i = 0; i < MATMUL_PLANS; i++)
        if (dropped[i])
            matmul_fail_wrong(&library->products[i].gemm, "its chosen algorithm and the heuristics' first differ");
    if (count == 0)
        self_check_keep_right(r, "products", key);
    return count;
}
static void tune_log_wrong(struct json *json, const void *text) {
    json_str(json, "matmul algorithms", (const char *)text);
}
// Adds to r->tuning, and logs, how many algorithms multiply wrongly: `dropped` choices, and timed ones.
static void tune_report_wrong(struct run *r, int dropped) {
    char text[192] = "";
    if (dropped > 0)
        text_add(text, sizeof text, "%d chosen ones multiply wrongly, and give way to the heuristics' first", dropped);
    if (r->dev.matmul->wrong > 0)
        text_add(text, sizeof text, "%s%d timed ones multiply wrongly, and are left out", *text ? "; " : "",
                 r->dev.matmul->wrong);
    if (!*text)
        return;
    text_add(r->tuning, sizeof r->tuning, "; %s", text);
    log_object(&r->log, r->first_step, "self_check", tune_log_wrong, text);
}

// Gives rank 0's choices to the other ranks. A rank with another GPU or library warns and keeps the heuristics'
// choices. Every rank of a job of several ranks calls this.
static void tune_share(struct run *r) {
    struct matmul_algorithms *others = tune_allocate();
    struct error_text error;
    const bool first = r->config->rank == 0;
    size_t own_bytes = 0;
    char *const own = first ? tune_text(r->dev.matmul, others, &r->dev, &own_bytes) : NULL;
    uint64_t bytes = own_bytes;
    char *const text = parallel_share_text(r->parallel, own, &bytes, "the choice of matmul algorithms", true);
    const char *problem =
        first ? NULL
              : tune_take_text(r, text, bytes, "rank 0's choice of matmul algorithms", r->tuning_note, others, &error);
    if (problem)
        fail("%s", problem);
    if (!first && *r->tuning_note)
        say_warning("rank %d does not use %s", r->config->rank, r->tuning_note);
    free(own);
    free(text);
    free(others);
}
// Reads, completes and writes the file of matmul algorithms, unless --matmul-tuning=false. --self-check tests the
// products. A bad file, or a product whose first algorithm is wrong too, ends the program. Overwrites what tune_time
// does. Every rank calls this.
static void tune_matmuls(struct run *r) {
    const struct config *c = r->config;
    char path[PATH_MAX] = "";
    const double begin = seconds_now();
    const bool proves = self_check_any_rank_wants(r);
    bool known = false;
    if (c->device.matmul_tuning || proves) {
        matmul_list_begin(r->dev.matmul);
        gpt_dry_run(r->model);
        matmul_list_end(r->dev.matmul);
    }
    if (!c->device.matmul_tuning) {
        if (proves)
            tune_check_products(r, true, &known);
        snprintf(r->tuning, sizeof r->tuning, "the heuristics' first (--matmul-tuning=false)");
        if (proves)
            text_add(r->tuning, sizeof r->tuning, "; all %d products are right by %s, %.2f s",
                     r->dev.matmul->product_count, known ? SELF_CHECK_NAME " in --out" : "sums in double",
                     seconds_now() - begin);
        return;
    }
    struct matmul_algorithms *others = tune_allocate();
    int timed = 0; // on this rank: matmul_tune has held their algorithms against sums
    if (c->rank == 0) {
        tune_read(r, others, path);
        timed = tune_time(r);
        tune_describe(r, timed, seconds_now() - begin, path);
    }
    if (r->parallel)
        tune_share(r);
    const int dropped = proves ? tune_check_products(r, timed < r->dev.matmul->product_count, &known) : 0;
    if (c->rank == 0) {
        tune_report_wrong(r, dropped);
        size_t bytes = 0;
        char *text = tune_text(r->dev.matmul, others, &r->dev, &bytes);
        tune_write(r, text, bytes);
    }
    free(others);
}

#else

static void tune_matmuls(struct run *r) {}

#endif
