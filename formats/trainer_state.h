// trainer_state.json of a checkpoint: where the run stands, what its data was, and the options that it was given. All
// that a run needs, besides the parameters and the optimizer's moments, to go on as if it had never stopped.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/text/options.h"       // struct options
#include <jansson.h>                    // json_t
#include <stdbool.h>                    // bool
#include <stdint.h>                     // uint64_t
#include <stdio.h>                      // FILE
#include <sys/cdefs.h>                  // __BEGIN_DECLS

// A token shard, as far as it must be the same when the run goes on.
struct trainer_file {
    const char *name; // without its folder, which may be another by then
    uint64_t tokens;
};
// From this epoch on, the data is the first `files` of the shards: those added later join in at the next epoch.
struct trainer_data_change {
    uint64_t first_epoch;
    int files;
};

struct trainer_state {
    int64_t step;         // finished steps
    int64_t skipped;      // of which updated nothing
    uint64_t samples;     // position in the data's order
    uint64_t micro_steps; // the counter of dropout's random numbers
    double best_val_loss; // NAN before the first validation
    int64_t best_val_step;
    bool validation_due;   // at this step: a signal came before the validation's end
    const char *precision; // bf16 or fp32
    struct trainer_file *files;
    int num_files;
    struct trainer_data_change *changes;
    int num_changes;
    json_t *root; // holds the names and the options of a state that was read, whose three pointers are owned; or NULL
};

__BEGIN_DECLS
// Options are written as a user would: `asked` by those that were `given`, `resolved` by all. Errors stay in `out`.
void trainer_state_write(FILE *out, const struct trainer_state *state, const struct options *options, const void *asked,
                         const bool *given, const void *resolved);
// Reads a state from the file's text, of which it needs nothing afterwards. Returns NULL, and the caller frees the
// state, or what is wrong, in `error`, beginning with `name`, and nothing is held.
const char *trainer_state_parse(struct trainer_state *state, const unsigned char *data, uint64_t bytes,
                                const char *name, struct error_text *error);
// The state of a checkpoint's folder that was verified; one that can't be read ends the program.
struct trainer_state trainer_state_open(const char *folder);
void trainer_state_free(struct trainer_state *state);
// An option's text, by its name with underscores, among those "given" or all of them, "resolved"; NULL: none.
const char *trainer_state_option(const struct trainer_state *state, const char *which, const char *option);
__END_DECLS
