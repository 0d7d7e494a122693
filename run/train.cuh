// The training loop: enqueues steps, waits for their results, and validates, samples and saves between them.
#pragma once
#include "run/check_graphs.cuh"   // check_graphs
#include "run/eval_tasks.cuh"     // score_tasks
#include "run/fp8_report.cuh"     // fp8_shares
#include "run/generate.cuh"       // generate_samples
#include "run/mixture_report.cuh" // log_epochs
#include "run/ranks.cuh"          // look_for_requests, measure_collectives, check_replicas
#include "run/resume.cuh"         // save, finish_save
#include "run/utilization.cuh"    // gpt_flops_per_token
#include "run/run.cuh"            // struct run
#include "run/validate.cuh"       // validate_step
#include "run/watch_device.cuh"   // watch_device
#include "runtime/machine/say.h"  // say_warning

// ---- enqueueing a step ----

// Reads this rank's micro-batches of step r->enqueued, and enqueues their forward and backward; enqueue_update follows.
// Sets the step's r->first_sample, ->batch and ->lr. Checks graphs first. Every rank calls this.
static void enqueue_gradients(struct run *r) {
    const struct config *c = r->config;
    const int slot = r->enqueued % 2;
    r->first_sample[slot] = dataloader_position(r->train);
    r->batch[slot] = ramp_batch(&c->ramp, r->first_sample[slot]);
    r->lr[slot] = schedule_lr(&r->schedule, r->enqueued);
    const int micro_batches = r->batch[slot] / c->training.micro_batch_size;
    r->model->steps.of_step = micro_batches / c->ranks;
    for (int i = 0; i < r->model->steps.of_step; i++) {
        const struct batch batch_i = read_batch(r, r->train);
        long_wait_begin(r->device_watch); // for memory of a batch, or where CUDA's queue is full
        if (i == 0)
            check_graphs(r, batch_i, 1.0 / micro_batches);
        gpt_micro_step(r->model, i, batch_i, 1.0 / micro_batches);
        long_wait_end(r->device_watch);
    }
    look_for_graphs_refusal(r);
}
// Enqueues the update and the fetch of the step's results, and counts the step as enqueued; finish_step waits for it.
// The results of all earlier steps must be known, since AdamW's step number counts only steps that updated.
static void enqueue_update(struct run *r) {
    gpt_update(r->model, r->enqueued + 1 - r->skipped, r->lr[r->enqueued % 2]);
    r->model->io.request = 0;
    gpt_fetch_results(r->model, r->enqueued % 2);
    r->comm_sent_by_step[r->enqueued % 2] = r->collectives.sent_bytes;
    r->enqueued++;
}

// Runs enqueue(r). The watch (run/watch_device.cuh) warns if that takes long, as where CUDA's queue is full.
static void watched(struct run *r, void (*enqueue)(struct run *r)) {
    long_wait_begin(r->device_watch);
    enqueue(r);
    long_wait_end(r->device_watch);
}

static int steps_in_flight(const struct run *r) { return r->enqueued - r->finished; }

// ---- the results of a step ----

// Counts and reports a step (`step`: from 0 on) that updated nothing, since `what` (loss, gradient norm, FP8 tensor) is
// `value`, a NaN or Inf, in `samples` samples from first_sample on. Ends the program beyond --skip-nonfinite.
static void report_nonfinite(struct run *r, int step, const char *what, double value, uint64_t first_sample,
                             int samples) {
    const int allowed = r->config->training.skip_nonfinite;
    char where[160];
    snprintf(where, sizeof where, "step %d: the %s is %f; batch: samples %llu to %llu of the data's order", step + 1,
             what, value, (unsigned long long)first_sample,
             (unsigned long long)first_sample + (unsigned long long)samples - 1);
    log_end_line(&r->log);
    const int nonfinite = ++r->skipped - r->empty;
    if (nonfinite > allowed)
        fail(
            "%s; the parameters are those of step %d. Lower --lr, check the data, or allow skips by --skip-nonfinite N",
            where, step);
    say_warning("%s; skipped, %d of %d", where, nonfinite, allowed);
}

// Counts and logs a step (`step`: from 0 on) that updated nothing, since no target of its batch counts.
static void report_no_targets(struct run *r, int step) {
    r->skipped++;
    r->empty++;
    log_event(&r->log, "step %d: no token of its batch has loss; nothing was updated", step + 1);
}

// Returns the peak bytes of the device's memory, as last asked. A GPU's driver takes longer to answer than the host
// takes to enqueue many kernels, so it is asked in the first steps, which load kernels and record graphs, then seldom.
static int64_t peak_bytes(struct run *r, int step) {
    enum { FIRST_STEPS = 4, STEPS = 32 };
    const bool ask =
        step - r->first_step < FIRST_STEPS || step % STEPS == 0 || step + 1 == r->config->training.train_steps;
    return ask ? (int64_t)device_peak_bytes(&r->dev) : r->peak_bytes;
}

// Sets the entry's MFU by tokens_per_second, of one rank, and r->peak_flops (0: NAN). A step above a measured peak
// shows that the peak is too low, and sets it to 0 for good: if it were raised, the fastest step would count as 100 %.
static void measure_utilization(struct run *r, struct log_step *entry, double tokens_per_second) {
    const struct flops_per_token flops = gpt_flops_per_token(r->model);
    const double share = flops.done * tokens_per_second / r->peak_flops;
    if (r->peak_is_measured && r->peak_flops > 0 && share > 1) {
        log_event(&r->log,
                  "step %lld: %.0f %% of the matmul peak: what was measured at the start is too low, as beside other "
                  "work; MFU is left out from here on",
                  (long long)entry->step, 100 * share);
        r->peak_flops = 0;
    }
    entry->mfu = r->peak_flops > 0 ? share : NAN;
    entry->mfu_palm = r->peak_flops > 0 ? flops.palm * tokens_per_second / r->peak_flops : NAN;
}

// Computes a step's mean loss, *mean, over the *targets targets that count (0: none), by all ranks' reports (ranks,
// report_width) of `micro_batches`. Adds in the data's order, so that the bits don't depend on the number of ranks.
// Returns the first micro-batch whose loss is NaN or Inf, with its loss in *nonfinite, or -1; *nonfinite then stays.
static int mean_loss(const struct run *r, const double *reports, int micro_batches, double *mean, int64_t *targets,
                     double *nonfinite) {
    const int ranks = r->config->ranks, width = report_width(r->model);
    int first = -1;
    struct loss_sum sum = {0, 0};
    for (int i = 0; i < micro_batches; i++) {
        const double *report = &reports[i % ranks * width + REPORT_LOSSES + 2 * (i / ranks)];
        sum.sum += report[0];
        sum.count += report[1];
        if (!isfinite(report[0]) && first < 0) {
            first = i;
            *nonfinite = report[0];
        }
    }
    *mean = loss_mean(sum);
    *targets = (int64_t)sum.count;
    return first;
}

// Sets the entry's shares of values that FP8, if on, saturated or flushed. reports: all ranks'; micro_steps: a rank's.
static void measure_fp8(struct run *r, struct log_step *entry, const double *reports, int micro_steps) {
    const struct gpt *m = r->model;
    if (!fp8_is_on(&m->fp8))
        return;
    fp8_shares(r->fp8_shares, &m->fp8, &m->shape.layer, reports + report_fp8_counts_column(m), r->config->ranks,
               report_width(m), micro_steps,
               (double)r->config->training.micro_batch_size * r->config->model.seq_length);
    entry->fp8 = r->fp8_shares;
    entry->num_fp8 = LINEAR_COUNT;
}

// Waits for the oldest step in flight, counts it as finished, sets the entry to be logged, and grants all ranks'
// requests. Returns false if it updated nothing, for a NaN or Inf (too many end the program) or as no target counts.
static bool finish_step(struct run *r, struct log_step *entry) {
    const struct config *c = r->config;
    const int step = r->finished++, slot = step % 2, width = report_width(r->model);
    const double *reports;
    long_wait_begin(r->device_watch);
    const struct step_results results = gpt_results(r->model, slot, &reports);
    long_wait_end(r->device_watch);
    const int batch = r->batch[slot], micro_batches = batch / c->training.micro_batch_size;
    const double tokens = (double)batch * c->model.seq_length;
    const double seconds = device_event_seconds(&r->dev, r->step_begins, EVENT_RESULTS + slot);
    r->slowest_step = seconds > r->slowest_step ? seconds : r->slowest_step;
    r->step_begins = EVENT_RESULTS + slot;
    memset(entry, 0, sizeof *entry);
    entry->step = step + 1;
    entry->tokens = ((int64_t)r->first_sample[slot] + batch) * c->model.seq_length;
    entry->all_targets = (int64_t)batch * c->model.seq_length;
    entry->batch = c->ramp.samples > 0 ? batch : 0;
    entry->lr = r->lr[slot];
    entry->grad_norm = results.check.grad_norm;
    entry->step_ms = 1e3 * seconds;
    entry->tokens_per_second = tokens / seconds;
    measure_utilization(r, entry, tokens / seconds / c->ranks);
    entry->peak_bytes = r->peak_bytes = peak_bytes(r, step);
    for (int rank = 0; rank < c->ranks && r->parallel; rank++)
        grant_request(r, (int)reports[rank * width + report_request_column(r->model)], rank);
    measure_collectives(r, entry, slot);
    measure_fp8(r, entry, reports, micro_batches / c->ranks);
    const double median_ms = slow_steps_record(&r->slow_steps, step, batch, entry->step_ms);
    if (median_ms > 0)
        log_event(&r->log,
                  "step %d took %.3g s, %.1f times the median of those before: other processes may have the machine's "
                  "cores, or its disk",
                  step + 1, 1e-3 * entry->step_ms, entry->step_ms / median_ms);
    double loss = 0;
    const int micro_batch = mean_loss(r, reports, micro_batches, &entry->loss, &entry->targets, &loss);
    if (micro_batch >= 0)
        report_nonfinite(r, step, "loss", loss,
                         r->first_sample[slot] + (uint64_t)micro_batch * (uint64_t)c->training.micro_batch_size,
                         c->training.micro_batch_size);
    else if (entry->targets == 0)
        report_no_targets(r, step);
    else if (!results.check.finite) {
        char tensor[FP8_TENSOR_TEXT];
        double value = entry->grad_norm;
        const bool in_fp8 =
            isfinite(value) && fp8_nonfinite_tensor(tensor, &value, &r->model->fp8, &r->model->shape.layer,
                                                    reports + report_fp8_amaxes_column(r->model), c->ranks, width);
        report_nonfinite(r, step, in_fp8 ? tensor : "gradient norm", value, r->first_sample[slot], batch);
    }
    return results.check.finite;
}

// ---- between steps ----

// Whether something is due after step `done`: after every `every` steps, and after step `total`. If `every` is 0, it is
// never due, not even after the last step. If `total` is 0, no step is the last.
static bool due(int every, int done, int total) { return every > 0 && (done % every == 0 || done == total); }

// Whether tasks, if there are any, are scored after step `done`: by --eval-tasks-every, at the end, at an early stop.
static bool tasks_due(const struct run *r, int done) {
    const struct config *c = r->config;
    return r->tasks && (done == c->training.train_steps || stops_early(r) ||
                        due(c->evaluation.eval_tasks_every, done, c->training.train_steps));
}

// Whether a validation, the scoring of tasks or samples are due after step `done`.
static bool evaluation_due(const struct run *r, int done) {
    const struct config *c = r->config;
    return (r->val && due(c->evaluation.val_every, done, c->training.train_steps)) || tasks_due(r, done) ||
           due(c->evaluation.sample_every, done, c->training.train_steps);
}

// Logs and prints validate_step's loss. With --save-best, asks for a checkpoint of a new best. All ranks call this.
static void report_validation(struct run *r, int done, double loss) {
    char sets[MIXTURE_TEXT];
    const bool best = r->best_val_step == done;
    val_losses_text(sets, r);
    log_val_losses(r, done);
    log_event(&r->log, "step %d: validation loss %.4f%s%s", done, loss, sets, best ? ", the best so far" : "");
    if (best && r->config->checkpoints.save_best)
        r->save_wanted = true;
}

// Logs a finished step. Where due, validates, scores tasks and, if `updated` (finish_step's result), samples: all by
// averaged parameters, if any, so no later update may be in flight. Ends a save that is done. Every rank calls this.
static void log_finished_step(struct run *r, struct log_step *entry, bool updated) {
    const struct config *c = r->config;
    const int done = entry->step;
    const bool evaluates = evaluation_due(r, done);
    if (evaluates)
        gpt_swap_averages(r->model);
    if (r->val && due(c->evaluation.val_every, done, c->training.train_steps))
        entry->has_val_loss = validate_step(r, done, &entry->val_loss);
    log_step(&r->log, entry);
    log_epochs(r);
    if (entry->has_val_loss)
        report_validation(r, done, entry->val_loss);
    if (tasks_due(r, done) && !r->validation_due && !score_tasks(r, done))
        log_event(&r->log, "step %d: the scoring of tasks was broken off", done);
    if (updated && due(c->evaluation.sample_every, done, c->training.train_steps) && !r->validation_due)
        generate_samples(r, done);
    if (evaluates)
        gpt_swap_averages(r->model);
    if (checkpoint_thread_done(&r->saver.thread))
        finish_save(r);
}
// Waits for the oldest step in flight, and logs it. At least one step must be in flight.
static void finish_and_log_step(struct run *r) {
    struct log_step entry;
    const bool updated = finish_step(r, &entry);
    log_finished_step(r, &entry, updated);
}

// Whether a checkpoint follows the newest enqueued step: by --checkpoint-every, by a request, or because the run ends.
static bool save_due(const struct run *r) {
    return due(r->config->checkpoints.checkpoint_every, r->enqueued, r->config->training.train_steps) ||
           r->save_wanted || r->stopped || stops_early(r);
}
static bool replicas_check_due(const struct run *r) {
    return r->parallel && due(r->config->processes.check_replicas, r->enqueued, 0);
}
// Whether a save, an evaluation or a check (of replicas, of graphs) follows the newest enqueued step: it ends first.
static bool pause_due(const struct run *r) {
    const struct config *c = r->config;
    const int batch = ramp_batch(&c->ramp, dataloader_position(r->train)); // of the next step
    return save_due(r) || evaluation_due(r, r->enqueued) || replicas_check_due(r) ||
           graph_check_due(r, batch / (c->training.micro_batch_size * c->ranks));
}

// Trains to the last step, or until a signal, --exit-after or --early-stop ends the run. Ends with a checkpoint (at the
// last step: unless --checkpoint-every is 0), whose save may still be in progress (finish_save). Every rank calls this.
// A device that runs ahead of the host is given the next step's forward and backward before the host waits for the
// results of the previous step, so that it never idles. The update is enqueued once they are known.
static void train(struct run *r) {
    const struct config *c = r->config;
    step_starts(r);
    while (r->finished < c->training.train_steps && !((r->stopped || stops_early(r)) && steps_in_flight(r) == 0)) {
        const bool more = r->enqueued < c->training.train_steps;
        if (more)
            enqueue_gradients(r);
        if (steps_in_flight(r) > 0)
            finish_and_log_step(r);
        if (more)
            watched(r, enqueue_update);
        look_for_requests(r);
        if (!more || (DEVICE_RUNS_AHEAD && !pause_due(r)))
            continue;
        finish_and_log_step(r);
        look_for_requests(r); // a signal may have broken off a validation
        const bool pauses = pause_due(r);
        if (save_due(r))
            save(r);
        r->save_wanted = false;
        if (replicas_check_due(r))
            check_replicas(r);
        if (pauses) // without a pause, a wait for the log or the standard output counts in the next step's time
            step_starts(r);
    }
    if (stops_early(r) && !r->stopped && r->finished < c->training.train_steps)
        log_event(&r->log,
                  "step %d: %d validations in a row without a lower loss than step %d's: --early-stop ends the run",
                  r->finished, c->evaluation.early_stop, r->best_val_step);
}
