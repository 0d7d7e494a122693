// The report on the sets of a mixture: shares, epochs and validation losses.
#pragma once
#include "run/run.cuh"                // struct run
#include "runtime/machine/say.h"      // say
#include "runtime/machine/text_add.h" // text_add

enum { MIXTURE_TEXT = 512 };
// Epochs of a set beyond which its repeated tokens add little: Muennighoff et al. 2023, arXiv 2305.16264.
static const double EPOCHS_WORTH = 4;

// Returns how many epochs of set `part` of r->train the run takes up to its last step, or up to now, if that is later.
static double epochs_at_end(const struct run *r, int part) {
    const struct config *c = r->config;
    const uint64_t now = dataloader_position(r->train), end = ramp_samples(&c->ramp, c->training.train_steps);
    return dataloader_epochs(r->train, part, end > now ? end : now);
}
// Prints the sets of the training data, if there are several, which of them repeat often, and what --new-data did.
static void report_mixture(const struct run *r) {
    const struct dataloader *train = r->train;
    char tokens[LOG_NUMBER], share[LOG_NUMBER], epochs[LOG_NUMBER];
    const int parts = train->mixture.count;
    for (int i = 0; i < parts && parts > 1; i++)
        log_row("mixture", "%s %% %s: %s tokens in %d files, %s epochs by the last step",
                log_digits(share, 100 * mixture_share(&train->mixture, i)), train->mixture.parts[i].name,
                log_count(tokens, (int64_t)train->parts[i].total_tokens), train->parts[i].order.num_files,
                log_digits(epochs, epochs_at_end(r, i)));
    for (int i = 0; i < parts && parts > 1; i++)
        if (epochs_at_end(r, i) > EPOCHS_WORTH)
            say(stdout,
                "note: %s is taken %s times: beyond about 4 times the same tokens add little (arXiv 2305.16264)\n",
                train->mixture.parts[i].name, log_digits(epochs, epochs_at_end(r, i)));
    if (r->config->data.new_data && *r->config->checkpoint)
        log_row("new data", "%s",
                r->data_is_new ? "from here on; step, schedule and the optimizer's moments are kept, "
                                 "the best validation loss counts anew"
                               : "none: they are the checkpoint's");
}

static void write_epochs(struct json *json, const void *context) {
    const struct run *r = (const struct run *)context;
    const uint64_t sample = r->first_sample[(r->finished + 1) % 2] + (uint64_t)r->batch[(r->finished + 1) % 2];
    for (int i = 0; i < r->train->mixture.count; i++)
        json_double(json, r->train->mixture.parts[i].name, dataloader_epochs(r->train, i, sample));
}
// Logs the epochs of each set, if there are several, after the last finished step, if that has a progress line.
static void log_epochs(struct run *r) {
    const struct config *c = r->config;
    const int done = r->finished;
    if (r->train->mixture.count > 1 && (done == 1 || done % c->data.log_every == 0 || done == c->training.train_steps))
        log_object(&r->log, done, "epochs", write_epochs, r);
}
// Logs how many epochs of each set were trained. Does nothing if there is only one set.
static void report_epochs_trained(struct run *r) {
    const struct mixture *mixture = &r->train->mixture;
    char text[MIXTURE_TEXT] = "", number[LOG_NUMBER];
    for (int i = 0; i < mixture->count; i++)
        text_add(text, sizeof text, "%s%s %s", i > 0 ? ", " : "",
                 log_digits(number, dataloader_epochs(r->train, i, dataloader_position(r->train))),
                 mixture->parts[i].name);
    if (mixture->count > 1)
        log_event(&r->log, "epochs trained: %s", text);
}

// text = the last losses of r->val's sets, as " (web 3.1234, code 2.9876)", or "" for one set or over 100 characters.
static void val_losses_text(char text[MIXTURE_TEXT], const struct run *r) {
    enum { ROOM = 100 };
    const struct mixture *mixture = &r->val->mixture;
    text[0] = '\0';
    for (int i = 0; i < mixture->count; i++)
        text_add(text, MIXTURE_TEXT, "%s%s %.4f", i > 0 ? ", " : " (", mixture->parts[i].name,
                 r->val_losses ? r->val_losses[i] : NAN);
    text_add(text, MIXTURE_TEXT, ")");
    if (!r->val_losses || strlen(text) > ROOM)
        text[0] = '\0';
}
static void write_val_losses(struct json *json, const void *context) {
    const struct run *r = (const struct run *)context;
    for (int i = 0; i < r->val->mixture.count; i++)
        json_double(json, r->val->mixture.parts[i].name, r->val_losses[i]);
}
// Logs the last validation's losses of the sets in log.jsonl, if there are several.
static void log_val_losses(struct run *r, int step) {
    if (r->val_losses)
        log_object(&r->log, step, "val_losses", write_val_losses, r);
}
