// All that a run consists of, which train_gpt.c and its rooms run/resume.cuh and run/generate.cuh pass along.
#pragma once
#include "attention.cuh"              // struct attention_choice
#include "dataloader.h"               // struct dataloader
#include "run/fit.cuh"                // struct fit
#include "run/model.cuh"              // struct gpt
#include "run/save.cuh"               // struct saver
#include "runtime/machine/deadline.h" // --exit-after
#include "runtime/text/log.h"         // struct log
#include "runtime/schedule.h"         // struct schedule
#include "runtime/machine/signals.h"  // save, stop
#include "formats/tokenizer.h"        // text to tokens
#include "formats/vocabulary.h"       // tokens to text

struct run {
    const struct config *config;
    struct device dev;
    struct attention_choice attention;
    struct fit fit;
    struct gpt *model;
    struct dataloader *train, *val;
    struct vocabulary vocabulary;
    struct tokenizer tokenizer; // generation's
    struct schedule schedule;
    struct log log;
    int32_t *inputs, *targets; // (micro batch, T) of the current micro-batch
    int32_t *samples;          // (sequences, sample_tokens + 1), the prompt included
    int *prompt_tokens;        // (sequences) tokens of each prompt
    double peak_flops;         // what MFU is held against, in flop/s of one rank; 0: not known
    bool peak_is_measured;     // on this machine, so that a faster step raises it; else by the data sheet
    int skipped;               // steps not taken because of a NaN or Inf
    // Up to DEVICE_RUNS_AHEAD steps are enqueued whose results are not known yet.
    int enqueued, finished;   // steps
    uint64_t first_sample[2]; // of a step, by the parity of its number
    double lr[2];
    double last_finish; // seconds_now() when the last step's results came
    int64_t peak_bytes; // of the device's memory, as last asked
    // Checkpoints
    struct saver saver;
    int first_step; // of this start; the samples before it:
    uint64_t samples_before;
    double best_val_loss; // NAN: none yet
    int best_val_step;
    bool validation_due; // of the last finished step: a signal came before its end
    struct deadline deadline;
    double slowest_step; // seconds
    // Several ranks
    struct parallel *parallel; // NULL: there is one
    struct collectives collectives;
    double comm_busy_s, comm_waited_s;              // of the collectives, up to the last finished step
    uint64_t comm_sent_bytes, comm_sent_by_step[2]; // the same; up to the end of a step, by the parity of its number
    bool save_wanted, stopped;                      // asked for by a signal or the deadline; the run ended early
    bool save_failed;                               // the last one
};

enum { EXIT_STOPPED = 3 }; // the run was asked to stop before its last step, and saved

// A signal asked this process for the run's end.
static bool stop_asked(void) { return signals_stop_requested() != 0; }
// The signal that asked this rank to stop, and the rank, as one number: 0 where none did.
enum { STOP_SIGNALS = 128 };
static int stop_asked_here(const struct run *r) {
    const int signal = signals_stop_requested();
    return signal ? signal + STOP_SIGNALS * r->config->rank : 0;
}
// The same of any rank. All call this, and get the same answer.
static int stop_asked_of_any(struct run *r) {
    return parallel_largest(r->parallel, stop_asked_here(r), "agreement on whether to stop");
}
