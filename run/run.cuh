// struct run: the state of a run, which all files of run/ pass along; and how a run is asked to stop.
#pragma once
#include "dataloader.h"               // struct dataloader
#include "run/attention_choice.cuh"   // struct attention_choice
#include "run/fit_auto.cuh"           // struct fit, struct fit_chosen
#include "run/follower.h"             // struct follower
#include "run/model.cuh"              // struct gpt
#include "run/sample.cuh"             // struct sampler
#include "run/save.cuh"               // struct saver
#include "run/self_verdict.cuh"       // struct self_check
#include "run/slow_steps.h"           // struct slow_steps
#include "runtime/machine/deadline.h" // --exit-after
#include "runtime/text/log.h"         // struct log
#include "runtime/schedule.h"         // struct schedule
#include "runtime/machine/signals.h"  // save, stop
#include "formats/tokenizer.h"        // text to tokens
#include "formats/vocabulary.h"       // tokens to text

enum { TUNE_TEXT = 1024 };
struct eval_tasks; // run/eval_tasks.cuh

struct run {
    const struct config *config;
    struct config *own; // config, where what the run itself chooses is kept as if it had been given
    struct device dev;
    struct attention_choice attention;
    struct self_check self_check;
    struct fit fit;
    struct config asked;      // own before the run chose what depends on free memory
    struct fit_chosen chosen; // by --recompute-granularity auto
    bool chunk_grew;          // --loss-chunk-tokens is what free memory allowed, and more than planned otherwise
    bool connected;           // the collectives' library has taken its memory
    bool graphs_reported;     // why graphs are refused is in the report
    bool planned_again;       // since memory that was free was then taken
    struct fit_rates rates;   // of auto and of a plan, to predict times with; flops 0: not known
    struct gpt *model;
    struct dataloader *train, *val;
    double *val_losses; // (sets of r->val) of the last validation, if there are several; else NULL
    bool data_is_new;   // --new-data: the training data are not the checkpoint's
    struct vocabulary vocabulary;
    struct tokenizer tokenizer; // of --generate, --eval-tasks and --perplexity
    struct eval_tasks *tasks;   // of --eval-tasks; NULL: none
    struct schedule schedule;
    struct log log;
    struct follower follower;       // of trackers
    struct long_wait *device_watch; // of what enqueues work and of the waits for a step's results; NULL: none
    int32_t *inputs, *targets;      // (micro batch, T), the current micro-batch
    int32_t *document_starts; // (micro batch, T) where the inputs' documents begin; NULL: documents are not separated
    int32_t *samples;         // (sequences, n): each prompt, with room for its continuation
    int *prompt_tokens;       // (sequences) tokens of each prompt
    struct sampler sampler;   // host memory for sampling
    double peak_flops;        // peak of one rank, flop/s, for utilization; 0: not known
    bool peak_is_measured;    // peak_flops was measured on this machine, not taken from a data sheet
    char tuning[TUNE_TEXT];   // for the report: how the matrix products' algorithms were chosen; "": they were not
    char tuning_note[TUNE_TEXT]; // which choices of a file are not used, and why; "": all are
    // Steps. At most one is in flight: enqueued, its results not known yet. Arrays of 2 are indexed by step number % 2.
    int enqueued, finished;   // numbers of steps
    int skipped;              // steps that updated nothing, because of a NaN or Inf or as no target counted
    int empty;                // of the skipped steps, those without a target that counts
    uint64_t first_sample[2]; // position of a step's first sample in the data's order
    int batch[2];             // sequences of a step, over all ranks
    double lr[2];
    int step_begins;     // the device event at which the oldest step in flight began: EVENT_START or a step's results
    double slowest_step; // seconds
    struct slow_steps slow_steps;            // which steps stand out
    int64_t peak_bytes;                      // peak of the device's memory, as last asked
    struct log_fp8 fp8_shares[LINEAR_COUNT]; // of the last finished step
    // Checkpoints
    struct saver saver;
    int first_step;       // the first step of this start
    double best_val_loss; // NAN: none yet
    int best_val_step;
    bool validation_due;                  // a signal broke off the validation of the last finished step
    bool save_failed;                     // the last save failed
    char base_folder[PATH_MAX];           // of the base model of adapters; "": the run has none
    char base_digest[HASH128_DIGITS + 1]; // model_folder_digest of the base model
    // Requests
    struct deadline deadline; // --exit-after
    bool save_wanted;         // a signal asked for a checkpoint
    bool stopped;             // a signal or the deadline asked for the run's end
    // Several ranks
    struct parallel *parallel; // NULL: one rank
    struct collectives collectives;
    double comm_busy_s, comm_waited_s; // seconds of the collectives up to the last finished step
    uint64_t comm_sent_bytes;          // bytes that collectives sent up to the last finished step
    uint64_t comm_sent_by_step[2];     // bytes that collectives sent up to the end of a step
};

enum { EXIT_STOPPED = 3 }; // exit status of a run that was asked to stop before its last step

// Records EVENT_START on the device, from which the next step's time counts. No step may be in flight.
static void step_starts(struct run *r) {
    device_event_record(&r->dev, EVENT_START);
    r->step_begins = EVENT_START;
}

static bool stop_asked(void) { return signals_stop_requested() != 0; }
enum { STOP_SIGNALS = 128 };
// Returns the signal that asked this rank to stop, plus STOP_SIGNALS * rank, or 0 if none did.
static int stop_asked_here(const struct run *r) {
    const int signal = signals_stop_requested();
    return signal ? signal + STOP_SIGNALS * r->config->rank : 0;
}
// Returns the largest stop_asked_here of any rank, which has signal and rank in it, or 0. Every rank calls this.
static int stop_asked_of_any(struct run *r) {
    return parallel_largest(r->parallel, stop_asked_here(r), "agreement on whether to stop");
}

// Whether a loader's data are finetuning examples, packed into rows; false for NULL.
static bool has_rows(const struct dataloader *loader) {
    return loader && dataloader_files_format(loader) == TOKENS_FINETUNE;
}
// Reads this rank's next micro-batch into r->inputs, ->targets and ->document_starts, which the next call overwrites.
static struct batch read_batch(struct run *r, struct dataloader *loader) {
    const struct token_batch to = {r->inputs, r->targets, r->document_starts};
    struct batch batch = batch_of(r->inputs, r->targets);
    dataloader_read_batch(loader, to, r->config->training.micro_batch_size);
    batch.document_starts = r->document_starts;
    return batch;
}
