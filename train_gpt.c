// train_gpt: reads the options, builds the memory plan, runs the training loop.
//
// This file is compiled several times. With ENGINE defined (train_cpu_fp32, ...) it is one copy of the engine, whose
// floatX is that precision, exporting one entry point; without it, it is main, which picks a copy and calls it.
#include "config.h"                // struct config: every option
#include "kernels/amx.cuh"         // amx_available
#include "runtime/machine/error.h" // fail
#include <omp.h>                   // omp_set_num_threads, omp_get_num_procs
#include <stdio.h>                 // printf

#ifdef __cplusplus
extern "C" {
#endif
typedef int engine_entry(const struct config *config);
typedef const char *engine_obstacle(void); // why a target can't be used on this machine; empty: it can
engine_entry train_cpu_fp32, train_cpu_bf16, train_cuda_fp32, train_cuda_bf16;
engine_obstacle train_cuda_fp32_obstacle, train_cuda_bf16_obstacle;
typedef void engine_libraries(void); // prints those of a target, with their versions
engine_libraries train_cuda_fp32_libraries, train_cuda_bf16_libraries;
#ifdef __cplusplus
}
#endif

#ifndef ENGINE

#include "run/start.h"   // from nothing, a model's folder or a checkpoint
#include "run/version.h" // --version

#ifdef HAVE_CUDA
static engine_entry *const cuda_engines[2] = {train_cuda_fp32, train_cuda_bf16};
static const char *cuda_obstacle(void) { return train_cuda_bf16_obstacle(); }
static void cuda_describe(void) {
    log_row("cuda", "fp32 and bf16, for %s", GPU_ARCHITECTURES);
    train_cuda_bf16_libraries();
}
#else
static engine_entry *const cuda_engines[2] = {NULL, NULL};
static const char *cuda_obstacle(void) { return "this train_gpt was built without it (make cuda builds it)"; }
static void cuda_describe(void) { log_row("cuda", "%s", cuda_obstacle()); }
#endif

// The engine for the target and precision that are asked for, or that suit this machine. Sets config->device.
static engine_entry *choose_engine(struct config *config) {
    const bool built = cuda_engines[0] != NULL;
    const char *obstacle = config->device == DEVICE_CPU ? "" : cuda_obstacle();
    if (config->device == DEVICE_AUTO) {
        config->device = *obstacle ? DEVICE_CPU : DEVICE_CUDA;
        if (built && *obstacle)
            printf("no GPU is used: %s\n", obstacle);
    }
    if (config->device == DEVICE_CUDA) {
        if (*obstacle && !(built && config->plan)) // a plan needs no GPU
            fail("--device cuda: %s; --device cpu trains on the CPU", obstacle);
        return cuda_engines[config->precision != WITH_FP32];
    }
    const bool bf16_wanted = config->precision == WITH_BF16 || (config->precision == WITH_AUTO && amx_available());
    return bf16_wanted ? train_cpu_bf16 : train_cpu_fp32;
}

// A plan, a loss or a sample that was printed into a full disk is a run without its result. A reader that has left, as head
// does, wanted no more of it.
static void check_printed(const struct config *config) {
    const bool prints_result = config->plan || !config_trains(config);
    errno = 0;
    if (prints_result && (fflush(stdout) != 0 || ferror(stdout)) && errno != EPIPE)
        fail("the standard output cannot be written: %s", strerror(errno));
}

static void describe_build(void) {
    version_print();
    cuda_describe();
}

int main(int argc, char **argv) {
    struct config config = config_read(argc, argv, describe_build);
    struct parallel parallel;
    start_ranks(&config, &parallel);
    start_find(&config);
    const struct config asked = config;
    config_resolve(&config);
    config.asked = &asked;
    start_check(&config);
    start_check_ranks(&config);
    const int status = choose_engine(&config)(&config);
    if (config.parallel)
        parallel_close(&parallel);
    check_printed(&config);
    return status;
}

#else

#include "attention.cuh"      // attention_choose
#include "dataloader.h"       // token shards to batches
#include "run/fit.cuh"        // options to a policy, a plan that fits
#include "run/generate.cuh"   // prompts, samples, tokens to text
#include "gpt.cuh"            // the model and its step
#include "run/ranks.cuh"      // several processes
#include "run/resume.cuh"     // where a run begins, and its checkpoints
#include "run/run.cuh"        // struct run
#include "runtime/text/log.h" // progress line, log.jsonl
#include "runtime/schedule.h" // learning rate

// ---- start-up ----

static void start_device(struct run *r) {
    const struct config *c = r->config;
    r->dev.threads = c->threads > 0 ? c->threads : threads_of_rank(r);
    omp_set_num_threads(r->dev.threads);
    if (!c->plan)
        device_open(&r->dev, r->parallel ? r->parallel->launch.local_rank : 0,
                    collectives_kind_of(c) == COLLECTIVES_HOST);
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
    shape.full = false;
    r->attention = attention_choose((enum attention_backend)c->attention_backend, shape, c->attention_dropout, &r->dev);
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
    if (config_trains(c))
        r->train = dataloader_open(c->train_data, c->seq_length, c->seed, true, c->vocab_size, c->rank, c->ranks,
                                   c->micro_batch_size, BATCHES_AHEAD, "--train-data");
    if (*c->val_data && !*c->generate)
        r->val = dataloader_open(c->val_data, c->seq_length, 0, false, c->vocab_size, c->rank, c->ranks,
                                 c->micro_batch_size, 0, "--val-data");
    r->inputs = (int32_t *)calloc(batch, sizeof *r->inputs);
    r->targets = (int32_t *)calloc(batch, sizeof *r->targets);
    if (!r->inputs || !r->targets)
        fail("out of memory for a batch of %d sequences of %d tokens", c->micro_batch_size, c->seq_length);
    check_same_data(r);
}

static void write_config(const struct config *c) {
    char path[PATH_MAX];
    if (c->rank > 0)
        return;
    if ((size_t)snprintf(path, sizeof path, "%s/config.json", c->out) >= sizeof path)
        fail("--out %s: the name is too long", c->out);
    config_write_json(c, path);
}

// The hardware's own figure where the GPU is a known one, else what a large matmul reaches.
static void find_peak(struct run *r) {
    r->peak_flops = device_data_sheet_flops(&r->dev);
    r->peak_is_measured = r->peak_flops <= 0;
    if (r->peak_is_measured)
        r->peak_flops = gpt_measure_peak(r->model);
}

static void report(const struct run *r) {
    const struct config *c = r->config;
    const struct gpt *m = r->model;
    const struct plan *plan = &m->plan;
    char text[LOG_NUMBER], more[LOG_NUMBER], device[384];
    log_row("model", "%d layers, hidden %d, %d heads, %d KV heads of %d, FFN %d, vocabulary %d", c->num_layers,
            c->hidden_size, c->num_attention_heads, c->num_query_groups, c->kv_channels, c->ffn_hidden_size,
            c->vocab_size);
    log_row("parameters", "%s", log_count(text, m->table.visible));
    log_row("device", "%s", device_describe(device, sizeof device, &r->dev));
    log_row("matmul", "%s", matmul_describe(r->dev.matmul));
    log_row("attention", "%s", r->attention.reason);
    log_row("recomputation", "%s", m->policy.description);
    if (c->ranks > 1)
        log_row("ranks", "%d, ZeRO stage %d; gradients in %s, in %d pieces of %s at most; memory is a rank's", c->ranks,
                c->zero_stage, c->grad_reduce_in_bf16 ? "bf16" : "fp32", m->shards.count,
                log_bytes(text, m->shards.largest_part * c->ranks * (int64_t)sizeof(float)));
    log_row("memory", "%s planned, %s of it activations", log_bytes(text, (int64_t)plan->peak_bytes),
            log_bytes(more, (int64_t)plan->arena_bytes[ARENA_ACTIVATIONS]));
    if (r->train) {
        log_row("training data", "%s: %s tokens in %d files", c->train_data,
                log_count(text, (int64_t)dataloader_total_tokens(r->train)), dataloader_num_files(r->train));
        log_row("batch", "%d sequences of %d tokens, in %d micro-batches", c->global_batch_size, c->seq_length,
                c->global_batch_size / c->micro_batch_size);
        log_row("steps", "%d, %.3g epochs", c->train_steps,
                (double)c->train_steps * c->global_batch_size / (double)dataloader_samples_per_epoch(r->train));
        if (c->checkpoint_every > 0)
            log_row("checkpoints", "every %d steps into %s%s%s", c->checkpoint_every, r->saver.job.root,
                    *huggingface_note(c) ? "; " : "", huggingface_note(c));
        log_row("matmul peak", "%.0f GFLOP/s %s, which MFU is held against", 1e-9 * r->peak_flops,
                r->peak_is_measured ? "measured" : "by the data sheet");
    }
    if (*c->checkpoint)
        log_row("goes on from", "%s", c->checkpoint);
    else if (*c->init_from)
        log_row("begins from", "%s", c->init_from);
    fit_advise(&r->fit, stdout);
    printf("\n");
    fflush(stdout);
}

// ---- the loop ----

// What stopped a step before its update. Ends the run, unless --skip-nonfinite still allows a skip.
static void nonfinite(struct run *r, int step, const char *what, double value, uint64_t first_sample, int samples) {
    const int allowed = r->config->skip_nonfinite;
    char where[160];
    snprintf(where, sizeof where, "step %d: the %s is %f; batch: samples %llu to %llu of the data's order", step + 1,
             what, value, (unsigned long long)first_sample,
             (unsigned long long)first_sample + (unsigned long long)samples - 1);
    log_end_line(&r->log);
    if (r->skipped++ >= allowed)
        fail(
            "%s; the parameters are those of step %d. Lower --lr, check the data, or allow skips by --skip-nonfinite N",
            where, step);
    fprintf(stderr, "train_gpt: %s; skipped, %d of %d\n", where, r->skipped, allowed);
}

// What the run has taken of the device's memory, as it was found lately. A GPU's is asked of its driver, which takes longer
// than to enqueue many kernels, and it grows as the first steps load kernels and record graphs: seldom later.
static int64_t peak_bytes(struct run *r, int step) {
    enum { FIRST_STEPS = 4, STEPS = 32 };
    const bool ask = step - r->first_step < FIRST_STEPS || step % STEPS == 0 || step + 1 == r->config->train_steps;
    return ask ? (int64_t)device_peak_bytes(&r->dev) : r->peak_bytes;
}

// Model flops over the peak, from the tokens a second of one rank.
static void measure_utilisation(struct run *r, struct log_step *entry, double tokens_per_second) {
    const struct flops_per_token flops = gpt_flops_per_token(r->model);
    // A matmul's rate is no more than a lower bound of the peak; a step that is faster is a better one.
    if (r->peak_is_measured && r->peak_flops > 0 && r->peak_flops < flops.done * tokens_per_second)
        r->peak_flops = flops.done * tokens_per_second;
    entry->mfu = r->peak_flops > 0 ? flops.done * tokens_per_second / r->peak_flops : NAN;
    entry->mfu_palm = r->peak_flops > 0 ? flops.palm * tokens_per_second / r->peak_flops : NAN;
}

// Waits for the oldest step whose results are not known yet. False where a NaN or Inf was met: it has updated nothing.
static bool finish_step(struct run *r, struct log_step *entry) {
    const struct config *c = r->config;
    const int step = r->finished++, slot = step % 2, ranks = c->ranks, width = report_width(r->model);
    const double *reports;
    const struct step_results results = gpt_results(r->model, slot, &reports);
    const double tokens = (double)c->global_batch_size * c->seq_length, now = seconds_now();
    const double seconds = now - r->last_finish;
    r->slowest_step = seconds > r->slowest_step ? seconds : r->slowest_step;
    const int micro_batches = r->model->micro_steps * ranks;
    r->last_finish = now;
    memset(entry, 0, sizeof *entry);
    entry->step = step + 1;
    entry->tokens =
        ((int64_t)r->samples_before + (int64_t)(r->finished - r->first_step) * c->global_batch_size) * c->seq_length;
    entry->lr = r->lr[slot];
    entry->grad_norm = results.check.grad_norm;
    entry->step_ms = 1e3 * seconds;
    entry->tokens_per_second = tokens / seconds;
    measure_utilisation(r, entry, tokens / seconds / ranks);
    entry->peak_bytes = r->peak_bytes = peak_bytes(r, step);
    for (int rank = 0; rank < ranks && r->parallel; rank++)
        grant_request(r, (int)reports[rank * width + REPORT_REQUEST], rank);
    measure_collectives(r, entry, slot);
    int bad = -1; // micro-batch; in the data's order, whatever the number of ranks
    double bad_loss = 0;
    for (int i = 0; i < micro_batches; i++) {
        const double loss = reports[i % ranks * width + REPORT_LOSSES + i / ranks];
        entry->loss += loss / micro_batches;
        if (!isfinite(loss) && bad < 0) {
            bad = i;
            bad_loss = loss;
        }
    }
    if (bad >= 0)
        nonfinite(r, step, "loss", bad_loss, r->first_sample[slot] + (uint64_t)bad * (uint64_t)c->micro_batch_size,
                  c->micro_batch_size);
    else if (!results.check.finite)
        nonfinite(r, step, "gradient norm", entry->grad_norm, r->first_sample[slot], c->global_batch_size);
    return results.check.finite;
}

// Enqueues forward and backward of a global batch.
static void enqueue_gradients(struct run *r) {
    const struct config *c = r->config;
    const int slot = r->enqueued % 2;
    r->first_sample[slot] = dataloader_position(r->train);
    r->lr[slot] = schedule_lr(&r->schedule, r->enqueued);
    gpt_zero_gradients(r->model);
    for (int i = 0; i < r->model->micro_steps; i++) {
        dataloader_read(r->train, r->inputs, r->targets, c->micro_batch_size);
        gpt_micro_step(r->model, i, r->inputs, r->targets, 1.0 / (r->model->micro_steps * c->ranks));
    }
}
// Enqueues the update. Its number in AdamW is that of the steps that updated, so the results of all before must be known.
static void enqueue_update(struct run *r) {
    gpt_update(r->model, r->enqueued + 1 - r->skipped, r->lr[r->enqueued % 2]);
    r->model->request = 0;
    gpt_fetch_results(r->model, r->enqueued % 2);
    r->comm_sent_by_step[r->enqueued % 2] = r->collectives.sent_bytes;
    r->enqueued++;
}

// Mean loss over the first --val-steps batches of the validation data, the same ones each time and added in the same
// order, whatever the number of ranks. NAN where a signal came before the end.
static double validate(struct run *r, int *batches) {
    const struct config *c = r->config;
    const uint64_t there = dataloader_samples_per_epoch(r->val) / (uint64_t)c->micro_batch_size;
    const int steps = there < (uint64_t)c->val_steps ? (int)there : c->val_steps;
    double loss = 0, *losses = (double *)calloc((size_t)c->ranks, sizeof *losses);
    int stop = stop_asked_of_any(r);
    if (!losses)
        fail("out of memory");
    *batches = steps;
    dataloader_seek(r->val, 0);
    for (int i = 0; i < steps && !stop; i += c->ranks) {
        dataloader_read(r->val, r->inputs, r->targets, c->micro_batch_size);
        const double mine = gpt_evaluate(r->model, r->inputs, r->targets);
        stop = share_losses(r, losses, mine);
        for (int k = i; k < i + c->ranks && k < steps; k++)
            loss += losses[k - i] / steps;
        stop = i + c->ranks < steps ? stop : 0; // it is complete
    }
    free(losses);
    if (stop)
        grant_request(r, stop % STOP_SIGNALS * REQUEST_SIGNAL, stop / STOP_SIGNALS);
    return stop ? NAN : loss;
}

// True every `every` steps and after the last; 0 is never.
static bool due(int every, int done, int total) { return every > 0 && (done % every == 0 || done == total); }

// Validates after step `done`; false where a signal came before the end, and a resumed run will have to.
static bool validate_step(struct run *r, int done, double *loss) {
    int batches;
    *loss = validate(r, &batches);
    r->validation_due = isnan(*loss) && r->stopped;
    if (r->validation_due)
        return false;
    if (!(*loss >= r->best_val_loss)) {
        r->best_val_loss = *loss;
        r->best_val_step = done;
    }
    return true;
}

// What is done once a step's results are known. Validation, samples and checkpoints need the parameters of that very step:
// nothing else may be enqueued then.
static void report_step(struct run *r, struct log_step *entry, bool good) {
    const struct config *c = r->config;
    const int done = entry->step;
    if (r->val && due(c->val_every, done, c->train_steps))
        entry->has_val_loss = validate_step(r, done, &entry->val_loss);
    log_step(&r->log, entry);
    if (entry->has_val_loss)
        log_event(&r->log, "step %d: validation loss %.4f%s", done, entry->val_loss,
                  r->best_val_step == done ? ", the best so far" : "");
    if (good && due(c->sample_every, done, c->train_steps) && !r->validation_due)
        print_samples(r, done);
    if (checkpoint_thread_done(&r->saver.thread))
        report_save(r);
}

// A step ends with nothing enqueued behind it: what needs its parameters can run.
static bool step_is_last_enqueued(const struct run *r) { return r->finished == r->enqueued; }

static void train(struct run *r) {
    const struct config *c = r->config;
    struct log_step entry;
    r->last_finish = seconds_now();
    while (r->finished < c->train_steps && !(r->stopped && step_is_last_enqueued(r))) {
        const bool more = r->enqueued < c->train_steps;
        if (more)
            enqueue_gradients(r);
        if (r->finished <
            r->enqueued) { // its work is done or under way, and the device has the next step's to go on with
            const bool good = finish_step(r, &entry);
            report_step(r, &entry, good);
        }
        if (more)
            enqueue_update(r);
        look_for_requests(r);
        const int step = r->enqueued;
        const bool save_now = due(c->checkpoint_every, step, c->train_steps) || r->save_wanted || r->stopped;
        const bool wanted_now = !DEVICE_RUNS_AHEAD || save_now || (r->val && due(c->val_every, step, c->train_steps)) ||
                                due(c->sample_every, step, c->train_steps) ||
                                (r->parallel && due(c->check_replicas, step, 0));
        if (more && wanted_now) {
            const bool good = finish_step(r, &entry);
            report_step(r, &entry, good);
            look_for_requests(r); // a signal may have ended a validation
            if (save_now || r->save_wanted || r->stopped)
                save(r);
            r->save_wanted = false;
            if (r->parallel && due(c->check_replicas, r->finished, 0))
                check_replicas(r);
            r->last_finish = seconds_now();
        }
    }
}

// A validation that a signal broke off before this start.
static void make_up_for_validation(struct run *r) {
    double loss;
    if (!r->validation_due || !r->val)
        return;
    if (validate_step(r, r->finished, &loss)) {
        log_val_loss(&r->log, r->finished, loss);
        log_event(&r->log, "step %d: validation loss %.4f", r->finished, loss);
    }
}

// ---- evaluation and generation alone ----

static int evaluate_only(struct run *r) {
    int batches;
    const double loss = validate(r, &batches);
    if (isnan(loss) && r->stopped)
        return EXIT_STOPPED;
    printf("validation loss %.9g, perplexity %.6g, over %lld tokens\n", loss, exp(loss),
           (long long)batches * r->config->micro_batch_size * r->config->seq_length);
    return 0;
}

static void finish(struct run *r) {
    saver_close(&r->saver);
    dataloader_close(r->train);
    dataloader_close(r->val);
    vocabulary_close(&r->vocabulary);
    tokenizer_free(&r->tokenizer);
    if (r->model->collectives)
        collectives_close(&r->collectives, &r->dev);
    gpt_destroy(r->model);
    matmul_destroy(r->dev.matmul);
    device_close(&r->dev);
    free(r->inputs);
    free(r->targets);
    free(r->samples);
    free(r->prompt_tokens);
}

// A run that trains, from its data to its last checkpoint. Returns the exit status.
static int run_training(struct run *r) {
    const struct config *c = r->config;
    open_data(r);
    open_vocabulary(r);
    open_samples(r);
    allocate_model(r);
    load_model(r);
    log_open(&r->log, c->out, c->train_steps, c->log_every, r->first_step, c->rank == 0,
             launch_is_by_mpirun());
    write_config(c);
    open_saver(r);
    find_peak(r);
    report(r);
    if (r->finished >= c->train_steps)
        log_event(&r->log, "step %d of --train-steps %d: nothing is left to do", r->finished, c->train_steps);
    if (!stop_asked_of_any(r)) {
        make_up_for_validation(r);
        train(r);
    }
    report_save(r);
    parallel_barrier(r->parallel, "the last checkpoint"); // a launcher may end the others with the first that ends
    log_close(&r->log);
    return r->save_failed ? EXIT_FAILURE : r->finished < c->train_steps ? EXIT_STOPPED : EXIT_SUCCESS;
}
static int run_evaluation(struct run *r) {
    open_data(r);
    allocate_model(r);
    load_model(r);
    report(r);
    return evaluate_only(r);
}
static int run_generation(struct run *r, int new_tokens) {
    allocate_model(r);
    load_model(r);
    return generate_only(r, new_tokens);
}

int ENGINE(const struct config *config) {
    struct run r;
    struct config own = *config;
    memset(&r, 0, sizeof r);
    r.config = &own;
    r.parallel = config->parallel;
    r.deadline = deadline_after_minutes(deadline_clock_s(), config->exit_after);
    signals_install();
    if (*config->generate && !config->plan) {
        open_vocabulary(&r);
        open_tokenizer(&r);
        read_prompts(&r, &own);
    }
    start_device(&r);
    make_plan(&r);
    write_plan(&r);
    int status = 0;
    if (config->plan) {
        report(&r);
        plan_print(&r.model->plan, stdout);
    } else {
        status = *config->generate   ? run_generation(&r, config->sample_tokens)
                 : config->eval_only ? run_evaluation(&r)
                                     : run_training(&r);
    }
    finish(&r);
    return status;
}

#ifdef TARGET_CUDA
#include "run/libraries.cuh" // libraries_print
#define NAME(engine, suffix) engine##suffix
#define NAME_OF(engine, suffix) NAME(engine, suffix)
const char *NAME_OF(ENGINE, _obstacle)(void) { return device_obstacle(); }
void NAME_OF(ENGINE, _libraries)(void) { libraries_print(); }
#endif

#endif
