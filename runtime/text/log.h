// A run's output: rows of the start-up report, the progress line, and log.jsonl with an object for each step. In a
// terminal the progress line is drawn again in place, cut to the width; in a pipe or file, and under mpirun, whose
// ranks have no terminal, it is a plain line every so many steps. A full disk is reported once and stops nothing.
#pragma once
#include "runtime/text/json.h" // struct json
#include <limits.h>            // PATH_MAX
#include <stdbool.h>           // bool
#include <stddef.h>            // size_t
#include <stdint.h>            // int64_t
#include <stdio.h>             // FILE
#include <sys/cdefs.h>         // __BEGIN_DECLS

// Says how the casts of a step changed the values of one linear layer, over the layers in FP8 and all ranks: the shares
// that were limited to the format's largest number, or made zero, of inputs, weights and gradients of outputs. In
// log.jsonl: "fp8": {"qkv": {"input": [saturated, flushed], "weight": [...], "gradient": [...]}, "fc": ...}
enum { LOG_FP8_OPERANDS = 3 };
struct log_fp8 {
    const char *linear;
    double saturated[LOG_FP8_OPERANDS], flushed[LOG_FP8_OPERANDS];
};

// The numbers of a step. An unknown rate is NAN, which is null in log.jsonl and left out of the progress line.
struct log_step {
    int64_t step;    // finished steps: 1 for the first
    int64_t tokens;  // tokens trained on since the run's start, including this step
    int64_t targets; // of this step, over all ranks: those that count; in log.jsonl where they are not all
    int64_t all_targets;
    int batch; // sequences of this step; 0: not in log.jsonl
    double loss, lr, grad_norm;
    double step_ms, tokens_per_second;
    double mfu;      // model FLOPs over the device's peak, 0 to 1: attention below the diagonal only, no recomputation
    double mfu_palm; // mfu by PaLM's convention, attention at full length: may exceed 1
    int64_t peak_bytes;
    bool has_val_loss; // a validation followed this step, and val_loss is set
    double val_loss;
    bool has_comm;             // there are several ranks; the next fields are set:
    int64_t comm_bytes;        // bytes that this rank sent
    double comm_ms;            // time in which collectives ran, including waits for other ranks
    double comm_exposed_ms;    // time of comm_ms in which the training waited
    int num_fp8;               // 0: nothing is in FP8
    const struct log_fp8 *fp8; // [num_fp8], the caller's; logged with the steps that have a progress line in a pipe
};

struct log { // used only by log.c
    char path[PATH_MAX];
    int file;           // log.jsonl, -1: none
    int64_t good_bytes; // length of the file up to the end of its last complete line
    bool failed;        // a failure to write was reported
    FILE *line;         // memory stream, in which a line is built
    char *line_text;
    size_t line_bytes;
    struct event_file *events; // of --tensorboard-dir; NULL: none
    bool terminal;             // the progress line is drawn in place
    bool drawn;                // a progress line without its newline is on the screen
    int every;
    int64_t total_steps;
    int64_t timed_from;  // the step after which the clock of the ETA started; -1: not yet
    double timed_from_s; // time at which the clock of the ETA started
};

enum { LOG_NUMBER = 32 }; // bytes of a number in words

__BEGIN_DECLS
// Prints a row of the start-up report on stdout, escaped as by say.
void log_row(const char *key, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *log_bytes(char text[LOG_NUMBER], int64_t bytes);     // 3.25 GiB
const char *log_count(char text[LOG_NUMBER], int64_t n);         // 124,439,808
const char *log_digits(char text[LOG_NUMBER], double value);     // 0.5321; 388.1; 10550: no exponent from 0.0001 on
const char *log_duration(char text[LOG_NUMBER], double seconds); // 01:02:03; 100 hours are 100:00:00

// Creates a folder and its parents where missing. If it can't, ends the program, naming `option` (without dashes).
void log_make_folder(const char *option, const char *path);
// Sets *log. With has_file (on the first rank) makes the folder and opens FOLDER/log.jsonl, cut at the first object of
// a step after first_step. For first_step 0 a former file becomes log.jsonl.old. What can't be made ends the program.
// total_steps: the last one. every: steps (0: 1) between progress lines in a pipe, with `plain` or without has_file.
void log_open(struct log *log, const char *folder, int64_t total_steps, int every, int64_t first_step, bool has_file,
              bool plain);
// Opens an event file in `folder`, which it makes, for what log.jsonl gets. Does nothing for "" or without log.jsonl.
void log_open_events(struct log *log, const char *folder, int64_t first_step);
// Logs a finished step: its object in log.jsonl, if there is that file, and its progress line, if drawn or due.
void log_step(struct log *log, const struct log_step *s);
// Logs {"step": step, "val_loss": loss} for a step whose object was logged without it. Without log.jsonl does nothing.
void log_val_loss(struct log *log, int64_t step, double loss);
// Logs {"step": step, key: {...}}; `write`, given `context`, writes the inner members. Without log.jsonl does nothing.
void log_object(struct log *log, int64_t step, const char *key, void (*write)(struct json *json, const void *context),
                const void *context);
// Ends the progress line and prints a text, escaped as by say, and a newline, on stdout but in no file.
void log_event(struct log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Ends the progress line. To be called before something else is printed.
void log_end_line(struct log *log);
void log_close(struct log *log);
__END_DECLS
