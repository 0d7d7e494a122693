// --self-check: attention on a GPU is checked before memory is planned (docs/internals/self-check.md). A child process
// with a deadline tests the backend that the run has chosen (run/check_attention.cuh). A crash, a hang or wrong numbers
// end only the child, and the run takes the next simpler backend: wgmma, mma.sync, unfused. Verdicts are kept in --out,
// by GPU, driver, libraries, program and request. A child compares cuDNN with flash before this process does.
#pragma once
#include "config/layers.h" // config_rotates, config_window
#include "run/run.cuh"     // struct run

#ifdef TARGET_CUDA
#include "run/check_attention.cuh"    // check_attention
#include "run/check_decode.cuh"       // check_decode
#include "run/levels.h"               // build_commit
#include "run/libraries.cuh"          // cuda_version_text, library_variant
#include "runtime/files/file_read.h"  // read_whole
#include "runtime/machine/child.h"    // child_run
#include "runtime/machine/say.h"      // say_warning
#include "runtime/machine/text_add.h" // text_add
#include "runtime/net/parallel.h"     // parallel_largest, parallel_share_text
#include <inttypes.h>                 // PRIx64, SCNx64
#include <signal.h>                   // SIGSEGV
#include <sys/stat.h>                 // stat

#define SELF_CHECK_NAME "self_check.txt"
#define SELF_CHECK_LATE "it did not end within " // seconds follow
enum { SELF_CHECK_REQUEST = 320, SELF_CHECK_KEY = 1280, SELF_CHECK_MAX_FILE = 1 << 20 };
static const double SELF_CHECK_SECONDS = 60; // starting a process on a host of 8 GPUs takes up to 20

// ---- The request: what a child is asked, as words of a command line ----

// Returns what FP8 attention is to do as bits, 0 without it.
static int self_check_fp8_bits(const struct attention_check *check) {
    const struct fp8_attention_demands *d = &check->fp8;
    return check->in_fp8 ? 1 | d->full << 1 | d->delayed << 2 | (d->gradients == FP8_E5M2) << 3 : 0;
}
// Writes to text (SELF_CHECK_REQUEST bytes) how a child is asked for a check on GPU `gpu`. B, T 0: chosen by the judge.
static void self_check_write_request(char *text, const struct attention_check *check, int gpu) {
    const struct attention_shape *s = &check->shape;
    const bool sized = check->backend == ATTENTION_FUSED;
    snprintf(
        text, SELF_CHECK_REQUEST,
        FLOATX_NAME
        " parent=%d gpu=%d backend=%d simpler=%d heads=%d groups=%d dim=%d scale=%.9g softcap=%.9g hides=%d rotary=%d "
        "biases=%d amax=%d any_order=%d dropout=%.9g B=%d T=%d cudnn=%" PRIx64 " fp8=%d forward_only=%d decodes=%d",
        (int)getpid(), gpu, (int)check->backend, (int)check->simpler, s->num_heads, s->num_query_groups, s->head_dim,
        (double)s->scale, (double)s->softcap, check->hides_keys, check->rotary, check->biases, check->amax,
        check->any_order, (double)check->dropout, sized ? s->B : 0, sized ? s->T : 0, check->cudnn,
        self_check_fp8_bits(check), check->forward_only, check->decodes);
}
static bool self_check_is_backend(int backend) { return backend >= 0 && backend < ATTENTION_BACKENDS_COUNT; }
static bool self_check_heads_are_valid(const struct attention_shape *s) {
    return s->num_query_groups >= 1 && s->num_heads % s->num_query_groups == 0 && s->head_dim >= 8 &&
           s->head_dim <= ATTENTION_MAX_HEAD_DIM && s->head_dim % 8 == 0;
}
// Reads what self_check_write_request wrote. Returns false where this program can't make such a check.
static bool self_check_read_request(struct attention_check *check, int *parent, int *gpu, const char *text) {
    struct attention_shape *s = &check->shape;
    int backend, simpler, hides, rotary, biases, amax, any_order, fp8, forward_only, decodes;
    memset(check, 0, sizeof *check);
    const int read = sscanf(
        text,
        FLOATX_NAME
        " parent=%d gpu=%d backend=%d simpler=%d heads=%d groups=%d dim=%d scale=%f softcap=%f hides=%d rotary=%d "
        "biases=%d amax=%d any_order=%d dropout=%f B=%d T=%d cudnn=%" SCNx64 " fp8=%d forward_only=%d decodes=%d",
        parent, gpu, &backend, &simpler, &s->num_heads, &s->num_query_groups, &s->head_dim, &s->scale, &s->softcap,
        &hides, &rotary, &biases, &amax, &any_order, &check->dropout, &s->B, &s->T, &check->cudnn, &fp8, &forward_only,
        &decodes);
    if (read != 21 || *gpu < 0 || !self_check_is_backend(backend) || !self_check_is_backend(simpler) ||
        !self_check_heads_are_valid(s) || (backend == ATTENTION_FUSED && (s->B < 1 || s->T < 1)))
        return false;
    check->backend = (enum attention_backend)backend;
    check->simpler = (enum attention_backend)simpler;
    check->hides_keys = hides;
    check->rotary = rotary;
    check->biases = biases;
    check->amax = amax;
    check->any_order = any_order;
    check->forward_only = forward_only;
    check->decodes = decodes;
    check->in_fp8 = fp8 & 1;
    check->fp8.full = fp8 >> 1 & 1;
    check->fp8.delayed = fp8 >> 2 & 1;
    check->fp8.any_order = any_order;
    check->fp8.gradients = fp8 >> 3 & 1 ? FP8_E5M2 : FP8_E4M3;
    return true;
}

// ---- The child ----

// A child's lines, among the libraries' own. OPEN: the GPU is open. ITSELF: the backend is right, as far as can be told
// without a simpler one. Last is RIGHT or WRONG. ITSELF and RIGHT end with how far from right, WRONG with why.
#define SELF_CHECK_OPEN "self-check: open"
#define SELF_CHECK_ITSELF "self-check: right by itself "
#define SELF_CHECK_IS_RIGHT "self-check: right, "
#define SELF_CHECK_IS_WRONG "self-check: wrong, "

// Judges the backend by itself or by the simpler one, as `stage` says: with all keys seen and, if the model hides some,
// with some hidden. Writes the first fault to reason (size bytes), "" before. Raises *largest to the largest distance.
static void self_check_stage(char *reason, size_t size, struct attention_check check, enum judge_stage stage,
                             int multiprocessors, double *largest, struct device *dev) {
    const bool hides = check.hides_keys;
    for (int hidden = 0; hidden <= (hides ? 1 : 0) && !*reason; hidden++) {
        check.hides_keys = hidden;
        check_attention(reason, size, &check, stage, multiprocessors, largest, dev);
    }
}
// Writes to reason (size bytes) how cuDNN differs from flash, in bf16 or FP8, or "", also where it refuses the shape.
static void self_check_cudnn(char *reason, size_t size, const struct attention_check *check, struct device *dev) {
    char text[256];
    if (check->in_fp8)
        fp8_attention_unavailable_reason(text, sizeof text, check->shape, check->fp8, dev);
    else
        fused_unavailable_reason(text, sizeof text, check->shape, check->any_order, dev);
    const bool refuses = *text;
    text[0] = '\0';
    if (!refuses && check->in_fp8)
        fp8_attention_check(text, sizeof text, check->shape, check->fp8, dev);
    else if (!refuses)
        fused_check(text, sizeof text, check->shape, check->any_order, dev);
    if (*text && check->in_fp8)
        snprintf(reason, size, "%s: %.200s", fp8_attention_describe(dev), text);
    else
        snprintf(reason, size, "%.200s", text);
}
// Opens GPU `gpu` in this child and prints SELF_CHECK_OPEN. From here on the child ends when process `parent` does.
static void self_check_open(struct device *dev, struct cudaDeviceProp *properties, int parent, int gpu) {
    child_follow_parent(parent);
    memset(dev, 0, sizeof *dev);
    dev->threads = 1;
    device_open(dev, gpu, true);
    dev->matmul = matmul_create(dev);
    cuda_check(cudaGetDeviceProperties(properties, dev->index));
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("\n" SELF_CHECK_OPEN "\n");
}
// Closes the device that self_check_open opened in this child, with its matmul library and its attention.
static void self_check_close(struct device *dev) {
    matmul_destroy(dev->matmul);
    attention_close(dev);
    device_close(dev);
}
// Serves as a run's child: checks the backend that the request names, and prints the verdict. Returns EXIT_SUCCESS.
static int self_check_serve(const char *request) {
    struct attention_check check;
    struct cudaDeviceProp properties;
    struct device dev;
    char reason[256] = "";
    double largest = 0;
    int parent = 0, gpu = 0;
    if (!self_check_read_request(&check, &parent, &gpu, request))
        fail("a self-check's request is not understood: %s", request);
    self_check_open(&dev, &properties, parent, gpu);
    if (check.decodes)
        check_decode(reason, sizeof reason, &check, &largest, &dev);
    else if (check.backend == ATTENTION_FUSED)
        self_check_cudnn(reason, sizeof reason, &check, &dev);
    else
        self_check_stage(reason, sizeof reason, check, JUDGE_BY_ITSELF, properties.multiProcessorCount, &largest, &dev);
    if (!*reason && check.simpler != ATTENTION_AUTO) {
        printf("\n" SELF_CHECK_ITSELF "within %.2g\n", largest);
        self_check_stage(reason, sizeof reason, check, JUDGE_BY_SIMPLER, properties.multiProcessorCount, &largest,
                         &dev);
    }
    if (*reason)
        printf("\n" SELF_CHECK_IS_WRONG "%s\n", reason);
    else if (check.backend == ATTENTION_FUSED)
        printf("\n" SELF_CHECK_IS_RIGHT "by flash\n");
    else
        printf("\n" SELF_CHECK_IS_RIGHT "within %.2g\n", largest);
    self_check_close(&dev);
    return EXIT_SUCCESS;
}

// ---- The parent ----

// Returns the last line in `text`. First cuts the newlines off the text's end.
static const char *self_check_last_line(char *text) {
    size_t length = strlen(text);
    while (length > 0 && text[length - 1] == '\n')
        text[--length] = '\0';
    const char *const newline = strrchr(text, '\n');
    return newline ? newline + 1 : text;
}
// Replaces control characters by spaces, so that text fits into a line with tabs.
static void self_check_clean(char *text) {
    for (char *at = text; *at; at++)
        if ((unsigned char)*at < ' ')
            *at = ' ';
}
// Copies the rest of the first line that begins with `start` to text (size bytes). Returns false if there is none.
static bool self_check_line(char *text, size_t size, const char *output, const char *start) {
    const char *at = strstr(output, start);
    while (at && at > output && at[-1] != '\n')
        at = strstr(at + 1, start);
    if (!at)
        return false;
    at += strlen(start);
    snprintf(text, size, "%.*s", (int)strcspn(at, "\n"), at);
    self_check_clean(text);
    return true;
}
// Returns the seconds that a child may take: TRAIN_GPT_SELF_CHECK_SECONDS or a default. A bad value ends the program.
static double self_check_limit(void) {
    const char *const text = getenv("TRAIN_GPT_SELF_CHECK_SECONDS");
    char *end = NULL;
    const double seconds = text ? strtod(text, &end) : SELF_CHECK_SECONDS;
    if (!(seconds > 0 && seconds < 1e6) || (end && *end))
        fail("TRAIN_GPT_SELF_CHECK_SECONDS=%s in the environment: expected seconds above 0", text);
    return seconds;
}
// Whether a child's output has an error for which the kernels are not to blame: memory was short, or is broken.
static bool self_check_blames_memory(const char *output) {
    static const char *const texts[] = {"out of memory", "no memory", "ALLOC_FAILED", "uncorrectable"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (strstr(output, texts[i]))
            return true;
    return false;
}
// Whether the kernels are to blame for a child's end: it hung or failed, but not for lack of memory, nor by a signal
// that somebody sent. The caller has made sure that the child opened its GPU and gave no verdict.
static bool self_check_is_fault(struct child_result result, const char *output) {
    switch (result.end) {
    case CHILD_LATE: return true;
    case CHILD_KILLED:
        return result.status == SIGSEGV || result.status == SIGBUS || result.status == SIGILL ||
               result.status == SIGFPE || result.status == SIGABRT;
    case CHILD_EXITED: return result.status != 0 && !self_check_blames_memory(output);
    case CHILD_NOT_STARTED: break;
    }
    return false;
}
// Writes to text (size bytes) how a child without a verdict ended; it had `limit` seconds. Trims newlines off output.
static void self_check_explain(char *text, size_t size, struct child_result result, char *output, double limit) {
    switch (result.end) {
    case CHILD_LATE: snprintf(text, size, SELF_CHECK_LATE "%g s", limit); break;
    case CHILD_KILLED: snprintf(text, size, "it ended by %s", strsignal(result.status)); break;
    case CHILD_NOT_STARTED: snprintf(text, size, "no process can be started: %s", strerror(result.status)); break;
    case CHILD_EXITED:
        snprintf(text, size, "%.230s", self_check_last_line(output));
        if (!*text)
            snprintf(text, size, "it ended with status %d", result.status);
        break;
    }
    self_check_clean(text);
}
// Runs a child for the request and waits for its end. The child has `limit` seconds, which begin anew once it prints
// SELF_CHECK_OPEN. Writes what it printed to output (size bytes).
static struct child_result self_check_run_child(char *output, size_t size, char *request, double limit) {
    char program[] = "train_gpt", option[] = SELF_CHECK_ARGUMENT;
    char *const arguments[] = {program, option, request, NULL};
    const struct child_result result = child_run(output, size, arguments, limit, SELF_CHECK_OPEN);
    if (result.left)
        say_warning("the self-check's process %d does not end: memory of the GPU that it holds is missing "
                    "from what is free for this run",
                    result.left);
    return result;
}
// Has a child check the backend that the request names, and sets *verdict by the child's lines; "right by itself" is
// enough. Without such a line, a fault of the kernels gives WRONG, and any other end gives UNKNOWN.
static void self_check_ask(struct self_verdict *verdict, char *request) {
    enum { OUTPUT = 1 << 16 };
    char within[64], opened[8];
    char *const output = (char *)malloc(OUTPUT);
    if (!output)
        fail("out of memory");
    const double begin = seconds_now(), limit = self_check_limit();
    const struct child_result result = self_check_run_child(output, OUTPUT, request, limit);
    char *const text = verdict->text;
    const size_t size = sizeof verdict->text;
    verdict->seconds = seconds_now() - begin;
    // what ends the child after this line is the simpler backend's fault
    const bool by_itself = self_check_line(within, sizeof within, output, SELF_CHECK_ITSELF);
    const bool in_full = self_check_line(within, sizeof within, output, SELF_CHECK_IS_RIGHT);
    if (self_check_line(text, size, output, SELF_CHECK_IS_WRONG)) {
        verdict->kind = SELF_CHECK_WRONG;
        verdict->lasts = true;
    } else if (by_itself || in_full) {
        verdict->kind = SELF_CHECK_RIGHT;
        verdict->lasts = in_full;
        snprintf(text, size, "%s", within);
    } else {
        const bool open = self_check_line(opened, sizeof opened, output, SELF_CHECK_OPEN);
        verdict->kind =
            open && self_check_is_fault(result, output) && !stop_asked() ? SELF_CHECK_WRONG : SELF_CHECK_UNKNOWN;
        verdict->lasts = verdict->kind == SELF_CHECK_WRONG && result.end != CHILD_LATE;
        self_check_explain(text, size, result, output, limit);
    }
    free(output);
}

// Writes the driver's version, for which CUDA has no function, to text (size bytes), or "" where it is not known.
static void self_check_driver(char *text, size_t size) {
    FILE *const file = fopen("/proc/driver/nvidia/version", "r");
    text[0] = '\0';
    if (file && !fgets(text, (int)size, file))
        text[0] = '\0';
    if (file)
        fclose(file);
    text[strcspn(text, "\n")] = '\0';
}
// text (size bytes) = this build's commit, the program's length and, if the commit is unknown or dirty, its time.
static void self_check_program(char *text, size_t size) {
    struct stat file;
    const bool tells = strcmp(build_commit, "unknown") != 0 && !strstr(build_commit, "dirty");
    snprintf(text, size, "%s", build_commit);
    if (stat("/proc/self/exe", &file) != 0)
        return;
    text_add(text, size, " of %lld bytes", (long long)file.st_size);
    if (!tells)
        text_add(text, size, ", %lld.%09ld", (long long)file.st_mtim.tv_sec, file.st_mtim.tv_nsec);
}
// Writes a verdict's key (SELF_CHECK_KEY bytes): GPU name, driver, libraries, program, and the request's own words.
static void self_check_write_key(char *key, const char *request, struct device *dev) {
    char gpu[256], driver[256], libraries[192], program[128], version[LIBRARY_VERSION], built_with[LIBRARY_VERSION];
    const char *const words = strstr(request, " backend=");
    int of_driver = 0;
    self_check_driver(driver, sizeof driver);
    cudaDriverGetVersion(&of_driver);
    snprintf(libraries, sizeof libraries, "CUDA %s, built with %s, cuBLASLt %zu", cuda_version_text(version, of_driver),
             cuda_version_text(built_with, CUDART_VERSION), cublasLtGetVersion());
    self_check_program(program, sizeof program);
    snprintf(key, SELF_CHECK_KEY, "%s; %s; %s; %s; " FLOATX_NAME "%s", device_name(gpu, sizeof gpu, dev), driver,
             libraries, program, words ? words : request);
}

// Sets r->self_check.known to the text of rank 0's verdicts, or "", as where the file can't be read. Every rank calls
// this.
static void self_check_read(struct run *r) {
    char path[PATH_MAX];
    struct self_check *s = &r->self_check;
    struct error_text error;
    unsigned char *data = NULL;
    uint64_t bytes = 0;
    s->is_read = true;
    if (r->config->rank == 0 &&
        (size_t)snprintf(path, sizeof path, "%s/" SELF_CHECK_NAME, r->config->data.out) < sizeof path &&
        access(path, F_OK) == 0) {
        const char *const problem = read_whole(&data, &bytes, SELF_CHECK_MAX_FILE, path, "a list of verdicts", &error);
        if (problem && config_trains(r->config)) // other runs may find another's folder
            say_warning("%s; this start checks this GPU again", problem);
    }
    if (r->parallel)
        s->known =
            parallel_share_text(r->parallel, data ? (const char *)data : "", &bytes, "the self-check's verdicts", true);
    else
        s->known = strndup(data ? (const char *)data : "", bytes);
    if (!s->known)
        fail("out of memory");
    free(data);
}
enum { SELF_CHECK_LATE_LINE = SELF_CHECK_BEGUN + 1 }; // a line's kind: WRONG that does not last
static const char *const self_verdict_names[] = {"", "right", "wrong", "unknown", "begun", "late"};
// Sets *verdict from the last line of `known` (kind, tab, text, tab, key) that has the key. Returns whether one has it.
// A line of kind "late" gives WRONG that does not last.
static bool self_check_find(struct self_verdict *verdict, const char *known, const char *key) {
    bool found = false;
    for (const char *line = known; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        const size_t length = strcspn(line, "\n"), kind = strcspn(line, "\t\n");
        const char *const rest = line + kind + 1;
        if (kind >= length)
            continue;
        const size_t text = strcspn(rest, "\t\n");
        const char *const line_key = rest + text + 1;
        if (line_key > line + length || strlen(key) != (size_t)(line + length - line_key) ||
            strncmp(line_key, key, strlen(key)) != 0)
            continue;
        for (int i = SELF_CHECK_RIGHT; i <= SELF_CHECK_LATE_LINE; i++)
            if (strncmp(line, self_verdict_names[i], kind) == 0 && kind == strlen(self_verdict_names[i])) {
                verdict->kind = i == SELF_CHECK_LATE_LINE ? SELF_CHECK_WRONG : (enum self_verdict_kind)i;
                snprintf(verdict->text, sizeof verdict->text, "%.*s", (int)text, rest);
                verdict->seconds = 0;
                verdict->lasts = i != SELF_CHECK_LATE_LINE;
                found = true;
            }
    }
    return found;
}
// Appends a verdict to *lines (NULL where there are none yet), which the caller frees at the end.
static void self_check_add(char **lines, const struct self_verdict *verdict, const char *key) {
    char *const before = *lines;
    const bool late = verdict->kind == SELF_CHECK_WRONG && !verdict->lasts;
    const char *const kind = self_verdict_names[late ? SELF_CHECK_LATE_LINE : (int)verdict->kind];
    if (asprintf(lines, "%s%s\t%s\t%s\n", before ? before : "", kind, verdict->text, key) < 0)
        fail("out of memory");
    free(before);
}
// Sets *verdict as self_check_find does. Returns whether the verdict holds: not if one start was late (then *was_late
// is true), which a busy host explains, too, nor if two were, but had fewer seconds than there are now.
static bool self_check_recall(struct self_verdict *verdict, bool *was_late, const char *known, const char *key) {
    double limit = INFINITY;
    const bool found = known && self_check_find(verdict, known, key);
    const char *const late = found && verdict->kind == SELF_CHECK_WRONG ? strstr(verdict->text, SELF_CHECK_LATE) : NULL;
    *was_late = found && !verdict->lasts;
    if (late)
        limit = strtod(late + strlen(SELF_CHECK_LATE), NULL);
    return found && verdict->lasts && limit >= self_check_limit();
}
// Makes a new verdict of a late check last if the last start was late, too.
static void self_check_count_late(struct self_verdict *verdict, bool was_late) {
    if (verdict->kind != SELF_CHECK_WRONG || verdict->lasts || !was_late)
        return;
    verdict->lasts = true;
    text_add(verdict->text, sizeof verdict->text,
             ", as in the start before; more TRAIN_GPT_SELF_CHECK_SECONDS, or no " SELF_CHECK_NAME ", check again");
}
static const char *self_check_backend_name(enum attention_backend backend, const struct device *dev) {
    switch (backend) {
    case ATTENTION_FLASH: return flash_describe(dev);
    case ATTENTION_UNFUSED: return unfused_compute_name(dev);
    case ATTENTION_FLASH_SM90: return sm90_describe();
    case ATTENTION_FUSED: return "cuDNN";
    case ATTENTION_AUTO: break;
    }
    return "auto";
}
static void self_check_log_refused(struct json *json, const void *context) {
    const struct run *r = (const struct run *)context;
    const struct self_check *s = &r->self_check;
    char text[320];
    snprintf(text, sizeof text, "not made: %s", s->last.text);
    if (s->last.kind == SELF_CHECK_UNKNOWN)
        json_str(json, "attention", text);
    snprintf(text, sizeof text, "not measured: %s", s->measured.missing);
    if (*s->measured.missing)
        json_str(json, "attention's time", text);
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (*s->refused[i])
            json_str(json, self_check_backend_name((enum attention_backend)i, &r->dev), s->refused[i]);
}
// Whether a new verdict goes to the file in --out.
static bool self_check_is_kept(const struct self_verdict *verdict, const struct config *c) {
    const bool counts = verdict->kind == SELF_CHECK_WRONG || (verdict->kind == SELF_CHECK_RIGHT && verdict->lasts);
    return counts && c->device.self_check == CHECK_AUTO;
}
// Appends, on rank 0, verdicts that later starts may use to the file in --out, or warns that it can't. lines: or NULL.
static void self_check_append(struct run *r, const char *lines) {
    char path[PATH_MAX];
    if (r->config->rank != 0 || !lines)
        return;
    const bool fits = (size_t)snprintf(path, sizeof path, "%s/" SELF_CHECK_NAME, r->config->data.out) < sizeof path;
    FILE *const file = fits ? fopen(path, "a") : NULL;
    int reason = !fits ? ENAMETOOLONG : file && fputs(lines, file) >= 0 && fflush(file) == 0 ? 0 : errno;
    if (!reason && fsync(fileno(file)) != 0) // a GPU that hangs may take the machine with it
        reason = errno;
    if (file && fclose(file) != 0 && !reason)
        reason = errno;
    if (reason)
        say_warning("%s: cannot be written: %s; the next start checks this GPU again", path, strerror(reason));
}
// Appends the new verdicts to the file in --out. Logs refusals and checks that were not made in log.jsonl, which is
// open. No check of attention may follow.
static void self_check_save(struct run *r) {
    struct self_check *s = &r->self_check;
    self_check_append(r, s->found);
    bool any = s->last.kind == SELF_CHECK_UNKNOWN || *s->measured.missing;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        any = any || *s->refused[i];
    if (any)
        log_object(&r->log, r->first_step, "self_check", self_check_log_refused, r);
    free(s->found);
    s->found = NULL;
}

// ---- The choice ----

// Whether --self-check, and the site's TRAIN_GPT_SELF_CHECK, ask this rank for a check. `by_auto`: auto asks for it.
static bool self_check_asks(const struct config *c, bool by_auto) {
    const char *const site = getenv("TRAIN_GPT_SELF_CHECK");
    switch (c->device.self_check) {
    case CHECK_AUTO: return by_auto && !(site && strcmp(site, "off") == 0);
    case CHECK_ALWAYS: return true;
    case CHECK_OFF: break;
    }
    return false;
}
// Whether any rank, with its GPU open, asks for a check, as self_check_asks says. Every rank calls this.
static bool self_check_any_rank_asks(struct run *r, bool by_auto) {
    return r->dev.open && parallel_largest(r->parallel, self_check_asks(r->config, by_auto), "whether to check");
}
// Whether any rank is to check what training needs. Every rank calls this.
static bool self_check_any_rank_wants(struct run *r) { return self_check_any_rank_asks(r, config_trains(r->config)); }
// Returns the simpler backend to compare with, or ATTENTION_AUTO where there is none or it needs too much memory.
static enum attention_backend self_check_simpler(enum attention_backend backend, struct attention_shape shape,
                                                 struct device *dev) {
    char reason[128];
    flash_unavailable_reason(reason, sizeof reason, shape, dev);
    switch (backend) {
    case ATTENTION_FLASH_SM90: return *reason ? ATTENTION_UNFUSED : ATTENTION_FLASH;
    case ATTENTION_FLASH: {
        struct attention_shape largest = shape;
        struct cudaDeviceProp properties;
        cuda_check(cudaGetDeviceProperties(&properties, dev->index));
        judge_choose_size(&largest, properties.multiProcessorCount);
        const size_t bytes = attention_saved_bytes(ATTENTION_UNFUSED, largest) +
                             attention_backward_workspace_bytes(ATTENTION_UNFUSED, largest, false, dev);
        return bytes < device_free_bytes(dev) / 8 ? ATTENTION_UNFUSED : ATTENTION_AUTO;
    }
    case ATTENTION_UNFUSED:
    case ATTENTION_FUSED:
    case ATTENTION_AUTO: break;
    }
    return ATTENTION_AUTO;
}
// Returns what a check of `backend` is to run: the model's shape and features, and the simpler backend to compare with.
static struct attention_check attention_check_of(struct run *r, enum attention_backend backend) {
    const struct config *c = r->config;
    struct attention_check check;
    memset(&check, 0, sizeof check);
    check.backend = backend;
    check.shape = attention_shape_of(c, c->training.micro_batch_size, c->model.seq_length);
    check.simpler = self_check_simpler(backend, check.shape, &r->dev);
    check.hides_keys =
        c->data.reset_attention_mask || *c->evaluation.eval_tasks || *c->evaluation.perplexity || config_window(c) > 0;
    check.rotary = config_rotates(c);
    check.biases = c->model.add_qkv_bias;
    check.amax = c->fp8.fp8_format != FP8_FORMAT_NONE;
    check.any_order = !c->attention.deterministic_mode;
    check.dropout = c->model.attention_dropout;
    check.cudnn = backend == ATTENTION_FUSED ? fused_installed() : 0;
    return check;
}
// Shares this rank's verdict of the check's backend, which may differ between ranks, as GPUs may. Returns a backend that
// some rank found wrong, or ATTENTION_AUTO. If that is this rank's, *verdict becomes WRONG. Else RIGHT becomes UNKNOWN
// if another rank has no verdict. Ranks other than 0 warn of their own bad verdicts. Every rank calls this.
static enum attention_backend self_check_agree(struct run *r, struct self_verdict *verdict,
                                               const struct attention_check *check) {
    enum { RANKS = 1 << 24 };
    const enum attention_backend backend = check->backend;
    const int rank = r->config->rank;
    const bool wrong = verdict->kind == SELF_CHECK_WRONG, unknown = verdict->kind == SELF_CHECK_UNKNOWN;
    const bool is_told = rank == 0 && (check->decodes ? wrong : !config_generates(r->config)); // by report or fail()
    if ((wrong || unknown) && !is_told)
        say_warning("rank %d, the self-check of attention by %s: %s", rank,
                    check->decodes ? "the kernels of decoding" : self_check_backend_name(backend, &r->dev),
                    verdict->text);
    parallel_barrier(r->parallel, "the self-check"); // the children may take longer than agreement
    const int worst = parallel_largest(r->parallel, wrong ? RANKS * (int)backend + rank + 1 : 0, "the self-check");
    const int without = parallel_largest(r->parallel, unknown ? rank + 1 : 0, "the self-check");
    const bool passes = parallel_largest(r->parallel, wrong && !verdict->lasts, "the self-check");
    const enum attention_backend refused = (enum attention_backend)(worst / RANKS);
    if (refused == backend && !wrong) {
        verdict->kind = SELF_CHECK_WRONG;
        verdict->lasts = !passes;
        snprintf(verdict->text, sizeof verdict->text, "rank %d found it wrong", worst % RANKS - 1);
    } else if (without > 0 && !wrong && !unknown) {
        verdict->kind = SELF_CHECK_UNKNOWN;
        snprintf(verdict->text, sizeof verdict->text, "rank %d came to no verdict", without - 1);
    }
    return refused;
}
// Returns the part of a check that the run needs: where nothing trains, only forward, without what training adds.
static struct attention_check self_check_needed(const struct attention_check *check, const struct config *c) {
    struct attention_check needed = *check;
    if (config_trains(c))
        return needed;
    needed.forward_only = true;
    needed.biases = needed.amax = false;
    needed.dropout = 0;
    return needed;
}
// Makes a check, unless its verdict is known. Returns false if some rank's backend is wrong; refused[] of that backend
// is then why, in r->self_check. A missing verdict passes, but not cuDNN by auto. Every rank calls this.
static bool self_check_passes(struct run *r, const struct attention_check *check, const char **refused) {
    struct self_check *s = &r->self_check;
    const enum attention_backend backend = check->backend;
    char request[SELF_CHECK_REQUEST], key[SELF_CHECK_KEY];
    if (!s->is_read && r->config->device.self_check != CHECK_ALWAYS)
        self_check_read(r);
    struct self_verdict verdict;
    self_check_write_request(request, check, r->dev.index);
    self_check_write_key(key, request, &r->dev);
    bool was_late, missing = false;
    const bool is_new = !self_check_recall(&verdict, &was_late, s->known, key);
    if (is_new) {
        const struct attention_check asked = self_check_needed(check, r->config);
        self_check_write_request(request, &asked, r->dev.index);
        self_check_ask(&verdict, request);
        self_check_count_late(&verdict, was_late);
        s->seconds += verdict.seconds;
        missing = verdict.kind == SELF_CHECK_UNKNOWN;
        if (missing && backend == ATTENTION_FUSED && !check->in_fp8 &&
            r->config->attention.attention_backend == BACKEND_AUTO)
            verdict.kind = SELF_CHECK_WRONG; // this process would compare cuDNN itself, and may hang
        struct self_verdict here = verdict;
        here.lasts = true; // in this start
        if (verdict.kind != SELF_CHECK_UNKNOWN)
            self_check_add(&s->known, &here, key);
    }
    const enum attention_backend wrong = self_check_agree(r, &verdict, check);
    if (is_new && !missing && self_check_is_kept(&verdict, r->config))
        self_check_add(&s->found, &verdict, key);
    if (!check->decodes && (backend != ATTENTION_FUSED || verdict.kind == SELF_CHECK_UNKNOWN))
        s->last = verdict;
    if (wrong == ATTENTION_AUTO)
        return true;
    snprintf(s->refused[wrong], sizeof s->refused[wrong], "failed the self-check: %s",
             wrong == backend ? verdict.text : "another rank's GPU gives wrong numbers");
    refused[wrong] = s->refused[wrong];
    return false;
}
// Checks a backend where a check is wanted, in a run that does not train, too. Returns self_check_passes's result, or
// true. Every rank calls this.
static bool self_check_attention(struct run *r, enum attention_backend backend, const char **refused) {
    if (!self_check_any_rank_asks(r, true))
        return true;
    const struct attention_check check = attention_check_of(r, backend);
    return self_check_passes(r, &check, refused);
}
// Checks cuDNN's FP8 attention as self_check_attention does a backend.
static bool self_check_fp8_attention(struct run *r, struct fp8_attention_demands demands, const char **refused) {
    if (!self_check_any_rank_wants(r))
        return true;
    struct attention_check check = attention_check_of(r, ATTENTION_FUSED);
    check.in_fp8 = true;
    check.fp8 = demands;
    return self_check_passes(r, &check, refused);
}
// Checks decoding as self_check_attention does a backend, if the run decodes. Returns why some rank's is wrong, or NULL.
static const char *self_check_decoding(struct run *r) {
    const char *refused[ATTENTION_BACKENDS_COUNT] = {NULL};
    struct attention_check check;
    if (!config_samples(r->config) || !self_check_any_rank_asks(r, true))
        return NULL;
    memset(&check, 0, sizeof check);
    check.backend = ATTENTION_FLASH; // by its name ranks agree
    check.shape = attention_shape_of(r->config, 1, 1);
    check.hides_keys = config_window(r->config) > 0;
    check.forward_only = check.decodes = true;
    self_check_passes(r, &check, refused);
    return refused[check.backend];
}

// Logs the last check's verdict in the row "self-check", unless none was made or it is WRONG.
static void self_check_report(const struct run *r) {
    const struct self_check *s = &r->self_check;
    const bool is_old = s->seconds == 0;
    char took[64];
    snprintf(took, sizeof took, "%.2f s", s->seconds);
    switch (s->last.kind) {
    case SELF_CHECK_NOT_MADE: break;
    case SELF_CHECK_RIGHT:
        log_row("self-check", "attention's %skernels are right, %s of what they should give; %s",
                config_trains(r->config) ? "" : "forward ", s->last.text,
                is_old ? "by " SELF_CHECK_NAME " in --out" : took);
        break;
    case SELF_CHECK_BEGUN:
    case SELF_CHECK_WRONG: break; // then another backend was checked, or the run has ended
    case SELF_CHECK_UNKNOWN: log_row("self-check", "not made: %s", s->last.text); break;
    }
}

#else

static void self_check_report(const struct run *r) {}
static bool self_check_attention(struct run *r, enum attention_backend backend, const char **refused) { return true; }
static bool self_check_fp8_attention(struct run *r, struct fp8_attention_demands demands, const char **refused) {
    return true;
}
static const char *self_check_decoding(struct run *r) { return NULL; }
static void self_check_save(struct run *r) {}

#endif
