// The forms that options give a model, one table for all tests of models. Each option that a form adds to its base
// changes the loss or the parameters. Tests of accumulation, recomputation, FP8, offload and adapters go through these
// forms. An option that gives the block another form gets a row here.
#pragma once
#include "test/setup.h" // GPT2, LLAMA, MQA, SMALL

#define ROTARY                                                                                                         \
    SMALL "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 "             \
          "--ffn-hidden-size 56 --normalization RMSNorm --position-embedding-type rope --activation swiglu "           \
          "--add-bias-linear=false "
#define NEOX SMALL "--num-layers 3 --hidden-size 48 --num-attention-heads 3 --position-embedding-type rope "

// Which tests take a form, beside the tests that take all forms. EMULATED: the offload test takes it on the emulator
// too, whose threads are fibers. LESS: the offload test takes it under every second policy.
enum { FORM_IN_FP8 = 1, FORM_OFFLOADED = 2, FORM_OFFLOADED_EMULATED = 4, FORM_OFFLOADED_LESS = 8 };
// `added` has values at which a mistake shows: windows shorter than the prompt that end at no tile's border,
// multipliers far from 1, caps that bend scores, an even and an odd number of layers of a kind. '|' stands between
// parts that each change the model by themselves. "": the form is its base.
struct form {
    const char *name, *base, *added;
    unsigned taken_by;
};
static const struct form forms[] = {
    {"gpt2", GPT2, "", FORM_IN_FP8 | FORM_OFFLOADED | FORM_OFFLOADED_EMULATED},
    {"llama", LLAMA, "", FORM_IN_FP8 | FORM_OFFLOADED},
    {"mqa", MQA, "", 0},
    {"gpt2 without dropout", GPT2, "--hidden-dropout 0 | --attention-dropout 0", FORM_IN_FP8},
    {"llama3", ROTARY, "--rope-scaling-type llama3 --rope-scaling-factor 4 --rope-original-max-position-embeddings 16",
     0},
    {"yarn", ROTARY, "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-original-max-position-embeddings 8", 0},
    {"window", ROTARY, "--window-size 11", 0},
    {"window of one", ROTARY, "--window-size 0,0 --window-attn-skip-freq 1,0,1", 0},
    {"qwen3", ROTARY, "--qk-layernorm | --untie-embeddings-and-output-weights",
     FORM_IN_FP8 | FORM_OFFLOADED | FORM_OFFLOADED_EMULATED | FORM_OFFLOADED_LESS},
    {"smollm3", ROTARY, "--no-rope-freq 0,1,0 | --window-size 9 --window-attn-skip-freq 0,1,1", 0},
    {"olmo2", ROTARY, "--norm-placement post | --qk-layernorm --qk-layernorm-width full", FORM_IN_FP8 | FORM_OFFLOADED},
    {"gemma2", ROTARY,
     "--norm-placement sandwich | --apply-layernorm-1p | --activation geglu | --window-size 7 --window-attn-skip-freq 2 "
     "| --attn-logit-softcapping 1.5 | --final-logit-softcapping 2 | --softmax-scale 0.4 | --embedding-multiplier 6.9",
     FORM_IN_FP8 | FORM_OFFLOADED},
    {"gemma3", ROTARY,
     "--norm-placement sandwich | --apply-layernorm-1p | --activation geglu | --window-size 7 --window-attn-skip-freq 3 "
     "--rotary-base-local 100 | --qk-layernorm | --rotary-base 5000",
     0},
    {"granite", ROTARY,
     "--softmax-scale 0.1 | --embedding-multiplier 3 | --residual-multiplier 0.22 | --logit-multiplier 0.3 | --add-qkv-bias "
     "| --add-attention-proj-bias",
     FORM_IN_FP8},
    {"gpt-neox", NEOX,
     "--rotary-percent 0.25 | --activation gelu_erf | --parallel-residual "
     "| --untie-embeddings-and-output-weights",
     FORM_IN_FP8 | FORM_OFFLOADED},
    {"parallel residual, multiplier", ROTARY, "--parallel-residual | --residual-multiplier 0.5", 0},
    {"layer norm 1p after", GPT2, "--norm-placement post | --apply-layernorm-1p | --residual-multiplier 0.7", 0},
    {"documents", ROTARY, "--separate-documents", 0},
    {"documents and window", GPT2, "--separate-documents | --window-size 5 --window-attn-skip-freq 2",
     FORM_OFFLOADED | FORM_OFFLOADED_LESS},
};
enum { FORMS = sizeof forms / sizeof *forms, FORMS_IN_FULL = 3 /* the first, which are held to every policy */ };
enum { FORM_OPTIONS = 768 };

// Writes a form's options to text (FORM_OPTIONS bytes), without part `left_out` (from 0) of what the form adds; -1:
// with all parts. Returns whether the form has such a part.
static bool form_write(char *text, const struct form *form, int left_out) {
    size_t at = (size_t)snprintf(text, FORM_OPTIONS, "%s ", form->base);
    int part = 0;
    for (const char *c = form->added; *c && at + 1 < FORM_OPTIONS; c++) {
        part += *c == '|';
        if (*c != '|' && part != left_out)
            text[at++] = *c;
    }
    text[at] = 0;
    return *form->added && left_out <= part;
}
// Returns all options of a form of the table, in a buffer that no other form shares.
static const char *form_options(const struct form *form) {
    static char options[FORMS][FORM_OPTIONS];
    char *text = options[form - forms];
    form_write(text, form, -1);
    return text;
}
