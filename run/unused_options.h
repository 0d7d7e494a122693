// Reports given options that others make useless. Where the model would be another, config_resolve ends the program.
#pragma once
#include "config/config.h" // struct config
#include <stdio.h>         // printf
#include <string.h>        // strcmp

// Prints a note for each option that the user gave, to another value than its default, and that does nothing here.
static void report_unused_options(const struct config *c) {
    const struct config *const asked = c->asked ? c->asked : c; // before auto's choice took its place
    const bool samples = config_samples(c);
    const bool documents = c->data.reset_attention_mask || c->data.reset_position_ids || c->data.eod_mask_loss;
    const bool decays = c->training.lr_decay_style != LR_DECAY_CONSTANT,
               wsd = c->training.lr_decay_style == LR_DECAY_WSD;
    static const char decay[] = "another --lr-decay-style than constant", several[] = "several ranks",
                      sampling[] = "--sample-every, --generate or --chat";
    const struct {
        int row;
        bool used;
        const char *needs;
    } options[] = {
        {CONFIG_ROW(training.min_lr), decays, decay},
        {CONFIG_ROW(training.lr_decay_steps), decays, decay},
        {CONFIG_ROW(training.lr_wsd_decay_steps), wsd, "--lr-decay-style WSD"},
        {CONFIG_ROW(training.lr_wsd_decay_style), wsd, "--lr-decay-style WSD"},
        {CONFIG_ROW(states.allow_lossy_states),
         asked->recompute.recompute_granularity == RECOMPUTE_AUTO || *c->checkpoint != '\0',
         "--recompute-granularity auto"},
        {CONFIG_ROW(data.document_delimiter), documents, "--separate-documents"},
        {CONFIG_ROW(attention.flash_kernels), c->device.device == DEVICE_CUDA, "a GPU"},
        {CONFIG_ROW(evaluation.val_steps), *c->data.val_data != '\0', "--val-data"},
        {CONFIG_ROW(evaluation.sample_tokens), samples, sampling},
        {CONFIG_ROW(evaluation.sample_count), samples, sampling},
        {CONFIG_ROW(evaluation.temperature), samples, sampling},
        {CONFIG_ROW(evaluation.top_k), samples && c->evaluation.temperature > 0,
         samples ? "a --temperature above 0" : sampling},
        {CONFIG_ROW(evaluation.top_p), samples && c->evaluation.temperature > 0,
         samples ? "a --temperature above 0" : sampling},
        {CONFIG_ROW(trackers.wandb_name), *c->trackers.wandb_project != '\0', "--wandb-project"},
        {CONFIG_ROW(trackers.mlflow_experiment), *c->trackers.mlflow_tracking_uri != '\0', "--mlflow-tracking-uri"},
        {CONFIG_ROW(processes.zero_stage), c->ranks > 1, several},
        {CONFIG_ROW(processes.grad_reduce_in_bf16), c->ranks > 1, several},
        {CONFIG_ROW(processes.check_replicas), c->ranks > 1, several},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        const struct option_row *row = &config_rows[options[i].row];
        char text[OPTION_TEXT], name[OPTION_NAME];
        const char *value = option_text(text, row, asked);
        if (c->given[options[i].row] && !options[i].used && strcmp(value, row->default_text) != 0)
            printf("note: --%s %s does nothing in this run: it needs %s\n", option_display(name, row->name), value,
                   options[i].needs);
    }
}
