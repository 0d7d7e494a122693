// trainer_state.json: what is accepted is valid, and is written and read again as the same state.
#include "formats/trainer_state.h" // under test
#include "test/fuzz/fuzz.h"        // fuzz_require
#include <math.h>                  // isnan

static void check(const struct trainer_state *state) {
    fuzz_require(state->step >= 0 && state->skipped <= state->step && state->best_val_step <= state->step);
    fuzz_require(strcmp(state->precision, "bf16") == 0 || strcmp(state->precision, "fp32") == 0);
    fuzz_require(state->num_files >= 1 && state->num_parts >= 1 && state->data_start <= state->samples);
    int files = 0;
    uint64_t weights = 0;
    for (int p = 0; p < state->num_parts; p++) {
        const struct trainer_part *part = &state->parts[p];
        fuzz_require(part->num_changes >= 1 && part->changes[0].first_epoch == 0);
        for (int i = 1; i < part->num_changes; i++)
            fuzz_require(part->changes[i].first_epoch > part->changes[i - 1].first_epoch &&
                         part->changes[i].files > part->changes[i - 1].files);
        fuzz_require(part->changes[part->num_changes - 1].files == part->num_files);
        files += part->num_files;
        weights += part->weight;
    }
    fuzz_require(files == state->num_files && weights >= 1);
    trainer_state_option(state, "given", "lr");
    trainer_state_option(state, "resolved", "seed");
}

static void write_again(const struct trainer_state *state) {
    static const struct options none = {NULL, 0, "", "", "", ""};
    struct trainer_state again;
    struct error_text error;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    fuzz_require(out);
    trainer_state_write(out, state, &none, NULL, NULL, NULL);
    fclose(out);
    fuzz_require(!trainer_state_parse(&again, (unsigned char *)text, bytes, "again", &error));
    fuzz_require(again.step == state->step && again.skipped == state->skipped && again.samples == state->samples);
    fuzz_require(again.micro_steps == state->micro_steps && again.validation_due == state->validation_due);
    fuzz_require(again.best_val_loss == state->best_val_loss ||
                 (isnan(again.best_val_loss) && isnan(state->best_val_loss)));
    fuzz_require(!again.base_folder == !state->base_folder && !again.base_digest == !again.base_folder);
    if (state->base_folder)
        fuzz_require(strcmp(again.base_folder, state->base_folder) == 0 &&
                     strcmp(again.base_digest, state->base_digest) == 0);
    fuzz_require(again.num_files == state->num_files && again.num_parts == state->num_parts &&
                 again.data_start == state->data_start);
    for (int i = 0; i < again.num_files; i++)
        fuzz_require(strcmp(again.files[i].name, state->files[i].name) == 0 &&
                     again.files[i].tokens == state->files[i].tokens);
    for (int p = 0; p < again.num_parts; p++) {
        const struct trainer_part *was = &state->parts[p], *is = &again.parts[p];
        const bool plain = again.num_parts == 1 && again.data_start == 0; // its name and weight are not written
        fuzz_require(plain || (strcmp(is->name, was->name) == 0 && is->weight == was->weight));
        fuzz_require(plain || is->before == was->before);
        fuzz_require(is->num_files == was->num_files && is->num_changes == was->num_changes);
        for (int i = 0; i < is->num_changes; i++)
            fuzz_require(is->changes[i].files == was->changes[i].files &&
                         is->changes[i].first_epoch == was->changes[i].first_epoch);
    }
    trainer_state_free(&again);
    free(text);
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct trainer_state state;
    const char *problem = trainer_state_parse(&state, data, bytes, "state", error);
    if (!problem) {
        check(&state);
        write_again(&state);
        trainer_state_free(&state);
    }
    return problem;
}
