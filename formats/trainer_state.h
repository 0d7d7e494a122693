// trainer_state.json of a checkpoint: progress, data and options, with which a run goes on as if it had never stopped.
#pragma once
#include "formats/sample_order.h"       // struct data_change
#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/text/options.h"       // struct options
#include <jansson.h>                    // json_t
#include <stdbool.h>                    // bool
#include <stdint.h>                     // uint64_t
#include <stdio.h>                      // FILE
#include <sys/cdefs.h>                  // __BEGIN_DECLS

// A token shard as the run had it. When the run goes on, the shard must be as it was.
struct trainer_file {
    const char *name; // without its folder, which may change
    uint64_t tokens;
    uint64_t digest; // token_file_digest; 0: not known, as of states of older programs
};
// A set of shards, as a mixture has several (formats/mixture.h). Its files come after the former sets' in `files`.
struct trainer_part {
    const char *name; // in messages; "": the only part
    uint64_t weight;
    uint64_t before; // samples of it that were taken before the state's data_start
    int num_files;
    struct data_change *changes; // (num_changes) only first_epoch and files are set
    int num_changes;
};

struct trainer_state {
    int64_t step;         // finished steps
    int64_t skipped;      // steps that updated nothing
    int64_t empty;        // of these, steps whose batch had no token with loss
    uint64_t samples;     // position in the data's order
    uint64_t micro_steps; // the counter of dropout's random numbers
    double best_val_loss; // NAN before the first validation
    int64_t best_val_step;
    bool validation_due;   // this step's validation was stopped by a signal
    const char *precision; // bf16 or fp32
    // the base model's folder and model_folder_digest (run/model_folder.h), of a checkpoint of adapters; else NULL
    const char *base_folder, *base_digest;
    struct trainer_file *files;
    int num_files;
    uint64_t data_start; // position at which the run began with these sets and weights; 0: it always had them
    struct trainer_part *parts;
    int num_parts;
    json_t *root; // set by reading, and owned, as files, parts and changes then are: holds names and options; else NULL
};

__BEGIN_DECLS
// Writes the state, and the options: "given" has values of `asked` where given[row], "resolved" all of `resolved`.
void trainer_state_write(FILE *out, const struct trainer_state *state, const struct options *options, const void *asked,
                         const bool *given, const void *resolved);
// Parses the text of a trainer_state.json. Returns NULL, and the caller then frees *state; or returns what is wrong,
// and *state is zeroed. The text may be freed after the call.
const char *trainer_state_parse(struct trainer_state *state, const unsigned char *data, uint64_t bytes,
                                const char *name, struct error_text *error);
// Reads a checkpoint folder's trainer_state.json; trainer_state_free frees the state. A failure ends the program.
struct trainer_state trainer_state_read(const char *folder);
// Frees and zeroes a state that trainer_state_parse or trainer_state_read filled.
void trainer_state_free(struct trainer_state *state);
// Returns the text of an option in a state that was read, which owns the text. which: "given" (by the user) or
// "resolved" (all options). option: its name, with underscores. NULL if it is not there.
const char *trainer_state_option(const struct trainer_state *state, const char *which, const char *option);
__END_DECLS
