// Validation: the loss over a fixed part of the validation data, during training and as a run of its own (--eval-only).
#pragma once
#include "run/mixture_report.cuh" // log_val_losses
#include "run/ranks.cuh"          // share_losses, grant_request
#include "run/run.cuh"            // struct run

// The number of micro-batches, over all ranks, of a validation on r->val's part (dataloader_take_part): at most
// --val-steps. A rest below a micro-batch is left out, unless it has finetuning examples, or is all the data.
static int validation_batches(const struct run *r) {
    const struct config *c = r->config;
    const uint64_t samples = dataloader_samples_per_epoch(r->val), B = (uint64_t)c->training.micro_batch_size;
    const uint64_t available = has_rows(r->val) || samples < B ? (samples + B - 1) / B : samples / B;
    return available < (uint64_t)c->evaluation.val_steps ? (int)available : c->evaluation.val_steps;
}
// Reads this rank's next batch of r->val. number: its index over all ranks. Rows after the data's end get no target.
static struct batch validation_batch(struct run *r, int number) {
    const int T = r->config->model.seq_length, B = r->config->training.micro_batch_size;
    const struct batch batch = read_batch(r, r->val);
    const int64_t left = (int64_t)dataloader_samples_per_epoch(r->val) - (int64_t)number * B;
    for (int64_t i = (left > 0 ? left : 0) * T; i < (int64_t)B * T; i++)
        r->targets[i] = -1;
    return batch;
}

// Returns the mean loss of the set r->val reads, with the same bits for any number of ranks, or NAN if a signal stopped
// it (r->stopped) or a loss is NaN. *targets: how many counted; ends the program for none. Every rank calls this.
static double validate_set(struct run *r, double *targets) {
    const struct config *c = r->config;
    const int steps = validation_batches(r);
    struct loss_sum loss = {0, 0}, *losses = (struct loss_sum *)calloc((size_t)c->ranks, sizeof *losses);
    int stop = stop_asked_of_any(r);
    if (!losses)
        fail("out of memory");
    dataloader_seek(r->val, 0);
    for (int i = 0; i < steps && !stop; i += c->ranks) {
        const struct batch batch = validation_batch(r, i + c->rank);
        long_wait_begin(r->device_watch);
        const struct loss_sum mine = gpt_evaluate(r->model, batch);
        long_wait_end(r->device_watch);
        stop = share_losses(r, losses, mine);
        for (int k = i; k < i + c->ranks && k < steps; k++) {
            loss.sum += losses[k - i].sum;
            loss.count += losses[k - i].count;
        }
        stop = i + c->ranks < steps ? stop : 0; // after the last batch the loss is complete
    }
    free(losses);
    if (stop)
        grant_request(r, stop % STOP_SIGNALS * REQUEST_SIGNAL, stop / STOP_SIGNALS);
    if (!stop && loss.count == 0)
        fail(
            "--val-data: none of the tokens that validation takes has loss; make the data again, or raise --val-steps");
    *targets = loss.count;
    return stop ? NAN : loss_mean(loss);
}

// Returns validate_set's loss, for several sets the mean by their weights, with each loss in r->val_losses. Returns NAN
// if a signal stops it or a loss is NaN. *targets: how many counted in all, unless stopped. Every rank calls this.
static double validate(struct run *r, double *targets) {
    double mean = 0, counted;
    if (!r->val_losses)
        return validate_set(r, targets);
    *targets = 0;
    for (int i = 0; i < r->val->mixture.count; i++) {
        const double share = mixture_share(&r->val->mixture, i);
        dataloader_take_part(r->val, i);
        const double loss = r->val_losses[i] = validate_set(r, &counted);
        if (isnan(loss) && r->stopped)
            return NAN;
        mean += share > 0 ? share * loss : 0;
        *targets += counted;
    }
    return mean;
}

// Whether --early-stop ends the run now: enough validations have followed the lowest loss or, if there is none, the
// start. Not while a validation that a signal stopped is to be repeated, since its loss may be the lowest.
static bool stops_early(const struct run *r) {
    const int every = r->config->evaluation.val_every, most = r->config->evaluation.early_stop;
    const int since = isnan(r->best_val_loss) ? r->first_step : r->best_val_step;
    return most > 0 && r->val && every > 0 && !r->validation_due && r->finished / every - since / every >= most;
}

// Validates after step `done`, sets *loss (may be NaN), and keeps the best loss so far. Returns false if a signal
// stopped the validation, and then sets r->validation_due, so that a resumed run repeats it. Every rank calls this.
static bool validate_step(struct run *r, int done, double *loss) {
    double targets;
    *loss = validate(r, &targets);
    r->validation_due = isnan(*loss) && r->stopped;
    if (r->validation_due)
        return false;
    if (!isnan(*loss) && !(*loss >= r->best_val_loss)) {
        r->best_val_loss = *loss;
        r->best_val_step = done;
    }
    return true;
}

// Repeats and logs the validation that a signal stopped before the checkpoint, if there was one. Every rank calls this.
static void repeat_validation(struct run *r) {
    double loss;
    if (!r->validation_due || !r->val)
        return;
    gpt_swap_averages(r->model);
    const bool validated = validate_step(r, r->finished, &loss);
    gpt_swap_averages(r->model);
    if (validated) {
        char sets[MIXTURE_TEXT];
        val_losses_text(sets, r);
        log_val_loss(&r->log, r->finished, loss);
        log_val_losses(r, r->finished);
        log_event(&r->log, "step %d: validation loss %.4f%s%s", r->finished, loss, sets,
                  r->best_val_step == r->finished ? ", the best so far" : "");
    }
}
// Makes the resumed checkpoint the best, with --save-best, if a repeated validation or a kill has left that undone.
static void mend_best(struct run *r) {
    const struct config *c = r->config;
    if (c->rank == 0 && c->checkpoints.save_best && *c->checkpoint && !isnan(r->best_val_loss) &&
        r->best_val_step == r->finished)
        saver_mend_best(&r->saver, r->finished);
}

// Validates and prints the loss; ends the program if it isn't finite. Returns the exit status. Every rank calls this.
static int evaluate_only(struct run *r) {
    double targets;
    const double loss = validate(r, &targets);
    if (isnan(loss) && r->stopped)
        return EXIT_STOPPED;
    if (!isfinite(loss))
        fail("the validation loss is %g: the model's weights or activations are out of the range of %s", loss,
             sizeof(floatX) == 2 ? "bf16" : "fp32");
    printf("validation loss %.9g, perplexity %.6g, over %.0f tokens\n", loss, exp(loss), targets);
    for (int i = 0; i < r->val->mixture.count && r->val_losses; i++)
        say(stdout, "  %s: validation loss %.9g, perplexity %.6g\n", r->val->mixture.parts[i].name, r->val_losses[i],
            exp(r->val_losses[i]));
    return EXIT_SUCCESS;
}
