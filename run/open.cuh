// Opens and closes what a run works with: the device, the plan of the model's memory, the data.
#pragma once
#include "config/config_file.h"       // config_write_json
#include "run/adapter_targets.cuh"    // adapters_resolve
#include "run/check_deadline.cuh"     // deadline_begin
#include "run/fp8_report.cuh"         // fp8_attention_passes
#include "run/other_tokenizer.h"      // check_tokenizers
#include "run/plan_page.cuh"          // plan_write_picture, plan_write_page
#include "run/plan_report.cuh"        // plan_write_json
#include "run/planned_gpu.cuh"        // planned_capability
#include "run/ranks.cuh"              // threads_to_take, check_same_data
#include "run/run.cuh"                // struct run
#include "run/self_measure.cuh"       // self_check_attention, self_measure
#include "run/utilization.cuh"        // gpt_measure_peak
#include "runtime/machine/say.h"      // say_warning
#include "runtime/machine/process.h"  // stack_bytes_here
#include "runtime/machine/text_add.h" // text_add
#include <omp.h>                      // omp_set_num_threads

// Ends the program where the device or its library can't multiply FP8 matrices as the run's training needs.
static void check_fp8(const struct run *r) {
    const struct config *c = r->config;
    const enum fp8_granularity scaling = c->fp8.fp8_recipe == FP8_RECIPE_BLOCKWISE ? FP8_1X128 : FP8_PER_TENSOR;
    char text[256];
    int first, end;
    config_fp8_layers(c, &first, &end);
    const char *refusal = end > first ? matmul_fp8_refusal(text, sizeof text, scaling, &r->dev) : NULL;
    if (refusal)
        fail("%s", refusal);
}
// Adds attention's FP8 passes, if any, to the report's row of attention. Ends the program if this run can't do them.
static void check_fp8_attention(struct run *r, enum attention_backend backend) {
    const struct config *c = r->config;
    static const char option[] = "--fp8-dot-product-attention";
    static const struct timed_check check = {"FP8 attention by cuDNN", "leave out --fp8-dot-product-attention"};
    const struct attention_shape shape = attention_shape_of(c, c->training.micro_batch_size, c->model.seq_length);
    const char *refused[ATTENTION_BACKENDS_COUNT];
    char reason[256];
    int first, end;
    config_fp8_layers(c, &first, &end);
    if (end == first || config_attention_in_fp8(c) == FP8_ATTENTION_NONE)
        return;
    if (backend == ATTENTION_UNFUSED)
        fail("%s needs flash or fused attention beside it, and this run has unfused (%s); leave %s out", option,
             r->attention.reason, option);
    if (device_is_gpu(&r->dev) && attention_switched_off("NVTE_FUSED_ATTN"))
        fail("%s is cuDNN's, which NVTE_FUSED_ATTN=0 in the environment switches off; unset it or leave %s out", option,
             option);
    if (!self_check_fp8_attention(r, fp8_attention_demands_of(c), refused))
        fail("%s, by cuDNN, %s; install another cuDNN, or leave %s out", option, refused[ATTENTION_FUSED], option);
    fp8_attention_unavailable_reason(reason, sizeof reason, shape, fp8_attention_demands_of(c), &r->dev);
    if (*reason)
        fail("%s %s; or leave %s out", option, reason, option);
    deadline_begin(r, &check, 0);
    fp8_attention_check(reason, sizeof reason, shape, fp8_attention_demands_of(c), &r->dev);
    long_wait_end(r->device_watch);
    if (*reason)
        fail("%s, by %s: %s; install another cuDNN, or leave %s out", option, fp8_attention_describe(&r->dev), reason,
             option);
    text_add(r->attention.reason, sizeof r->attention.reason, "; %s by %s", fp8_attention_passes(c),
             fp8_attention_describe(&r->dev));
}
// Ends the program where the run draws text, and attention's kernels of decoding are wrong. Every rank calls this.
static void check_decoding(struct run *r) {
    const bool trains = config_trains(r->config);
    const char *const refused = self_check_decoding(r);
    if (refused)
        fail("decoding attention, which --%s needs, %s; %s, or install another driver",
             trains ? "sample-every" : config_option_against_training(r->config), refused,
             trains ? "leave --sample-every out" : "start with --device cpu");
}
// Ends the process with advice and EXIT_USAGE if it exits while starting *threads (an int) threads; 0: it starts none.
static void explain_threads(int status, void *threads) {
    if (*(const int *)threads == 0)
        return;
    say_warning(
        "OpenMP can't start %d threads: lower --threads, unset OMP_STACKSIZE, or raise the limits of processes and "
        "memory (ulimit -u, ulimit -v)",
        *(const int *)threads);
    _exit(EXIT_USAGE);
}
// Starts OpenMP's threads on the CPU, but not with --plan. Ends the program if they don't start or have small stacks.
static void check_threads(const struct run *r) {
    const struct config *c = r->config;
    size_t least = SIZE_MAX;
    if (c->device.device != DEVICE_CPU || c->memory.plan)
        return;
    int *const threads = (int *)malloc(sizeof *threads); // read when the process ends: freed by no one
    if (!threads || on_exit(explain_threads, threads) != 0)
        fail("out of memory");
    *threads = r->dev.threads;
#pragma omp parallel reduction(min : least)
    least = omp_get_thread_num() > 0 ? stack_bytes_here() : SIZE_MAX; // the first is the main thread
    *threads = 0;
    if (least < STACK_BYTES)
        fail("OMP_STACKSIZE gives threads stacks of %zu KiB, and at least %d KiB are needed; unset it or raise it",
             least >> 10, STACK_BYTES >> 10);
}
// Opens the device and its watch, except in a plan, and the matmul library; close_run closes all. On the CPU starts
// OpenMP's threads, except in a plan. Ends the program if one of these fails, or if the run's FP8 is not supported.
static void open_device(struct run *r) {
    const struct config *c = r->config;
    r->dev.threads = threads_to_take(r);
    omp_set_dynamic(0); // oneDNN's fp32 products are wrong where a parallel region gets fewer threads than it asked for
    omp_set_num_threads(r->dev.threads);
    check_threads(r);
    r->dev.planned = planned_capability(c);
    if (!c->memory.plan) {
        device_open(&r->dev, r->parallel ? r->parallel->launch.local_rank : 0,
                    collectives_kind_of(c, &r->dev) == COLLECTIVES_HOST);
        r->device_watch = watch_device(&r->dev);
    }
    r->dev.matmul = matmul_create(&r->dev);
    check_fp8(r);
}

static enum attention_backend backend_of_option(enum config_backend backend) {
    switch (backend) {
    case BACKEND_AUTO: return ATTENTION_AUTO;
    case BACKEND_FLASH: return ATTENTION_FLASH;
    case BACKEND_UNFUSED: return ATTENTION_UNFUSED;
    case BACKEND_FUSED: return ATTENTION_FUSED;
    }
    __builtin_unreachable();
}
static enum flash_kernels kernels_of_option(enum config_flash_kernels kernels) {
    switch (kernels) {
    case KERNELS_AUTO: return FLASH_KERNELS_AUTO;
    case KERNELS_WGMMA: return FLASH_KERNELS_WGMMA;
    case KERNELS_MMA: return FLASH_KERNELS_MMA;
    }
    __builtin_unreachable();
}
// Returns the last rank that has not chosen fused, if another rank has; else -1. Each such rank but rank 0 warns. It
// lacks cuDNN; the options and environment that choose flash or unfused are equal on all ranks. Every rank calls this.
static int rank_without_fused(struct run *r, const struct attention_choice *choice) {
    const bool fused = choice->backend == ATTENTION_FUSED;
    const int rank = r->config->rank;
    const int without = parallel_largest(r->parallel, fused ? -1 : rank, "agreement on attention by cuDNN");
    if (!parallel_largest(r->parallel, fused, "agreement on attention by cuDNN"))
        return -1;
    if (!fused && rank > 0) // the report is rank 0's
        say_warning("rank %d, attention: %s", rank, choice->reason);
    return without;
}
// Whether the self-check accepts all ranks' choices; if not, sets refused[] to why. *judged: the choice accepted last,
// or ATTENTION_AUTO. Checks neither that again nor fused, which passes_with_flash judges. Every rank calls this.
static bool passes_self_check(struct run *r, enum attention_backend choice, enum attention_backend *judged,
                              const char **refused) {
    const bool is_new = parallel_largest(r->parallel, choice != *judged, "the self-check");
    if (is_new && choice != ATTENTION_FUSED && !self_check_attention(r, choice, refused))
        return false;
    *judged = choice;
    return true;
}
// Whether the self-check accepts flash, with which fused is compared and to which it leaves calls with windows, and
// fused, unless a child has timed it; if not, sets refused[] to why. Every rank calls this.
static bool passes_with_flash(struct run *r, struct attention_demands *demands) {
    return self_check_attention(r, ATTENTION_FLASH, demands->refused) &&
           (demands->fastest == ATTENTION_FUSED || self_check_attention(r, ATTENTION_FUSED, demands->refused));
}
// Returns attention_choose's result, under a deadline: it may compare fused with flash in this process.
static struct attention_choice choose_in_time(struct run *r, enum attention_backend wanted,
                                              struct attention_shape shape, struct attention_demands demands) {
    static const struct timed_check check = {"attention by cuDNN", "--attention-backend flash does not ask for it"};
    deadline_begin(r, &check, 0);
    const struct attention_choice choice = attention_choose(wanted, shape, demands, &r->dev);
    long_wait_end(r->device_watch);
    return choice;
}
// Chooses the backend that --attention-backend names or, for auto, the fastest that all ranks can use and none finds
// wrong on its GPU. not_fused: why auto leaves fused out, or NULL. Ends the program if none is left. The device must be
// open, except in a plan. Every rank calls this.
static struct attention_choice choose_attention(struct run *r, const char *not_fused) {
    const struct config *c = r->config;
    const struct attention_shape shape = attention_shape_of(c, c->training.micro_batch_size, c->model.seq_length);
    struct attention_demands demands;
    char without_fused[96];
    memset(&demands, 0, sizeof demands);
    demands.refused[ATTENTION_FUSED] = not_fused;
    demands.dropout = c->model.attention_dropout;
    demands.documents = c->data.reset_attention_mask ? config_documents_option(c)
                        : *c->evaluation.eval_tasks  ? "--eval-tasks"
                        : *c->evaluation.perplexity  ? "--perplexity"
                                                     : NULL;
    demands.any_order = !c->attention.deterministic_mode;
    demands.kernels = kernels_of_option(c->attention.flash_kernels);
    const enum attention_backend wanted = backend_of_option(c->attention.attention_backend);
    enum attention_backend judged = ATTENTION_AUTO;
    bool may_fuse = false, measured = wanted != ATTENTION_AUTO;
    for (;;) {
        if (!may_fuse && parallel_largest(r->parallel, attention_may_check_fused(wanted, shape, demands, &r->dev),
                                          "attention by cuDNN"))
            may_fuse = passes_with_flash(r, &demands);
        const struct attention_choice choice = choose_in_time(r, wanted, shape, demands);
        const int without = rank_without_fused(r, &choice);
        if (without >= 0) {
            snprintf(without_fused, sizeof without_fused, "rank %d does not take it, and ranks compute alike", without);
            demands.refused[ATTENTION_FUSED] = without_fused;
        } else if (passes_self_check(r, choice.backend, &judged, demands.refused)) {
            const enum self_measure_result result =
                measured ? SELF_MEASURE_NOTHING : self_measure(r, choice.backend, &demands);
            if (result == SELF_MEASURE_NOTHING)
                return choice;
            measured = result == SELF_MEASURE_DONE;
        } else if (choice.backend == demands.fastest)
            self_measure_forget(&demands);
    }
}

// Returns limits_of, less reserves for collectives not open yet and for free memory that varies; a budget has none.
static struct fit_limits limits_of_choice(struct run *r) {
    enum { COLLECTIVES_RESERVE_BYTES = 512 << 20 };
    struct fit_limits limits = limits_of(r);
    const bool comes = r->parallel && !r->connected && !DEVICE_MEMORY_IS_HOSTS;
    const size_t reserve = comes ? COLLECTIVES_RESERVE_BYTES : 0;
    if (r->config->recompute.memory_budget == 0 && limits.device != SIZE_MAX)
        limits.device -= limits.device / FIT_VARIES + reserve;
    if (limits.both != SIZE_MAX)
        limits.both -= limits.both / FIT_VARIES;
    return limits;
}
// Replaces --recompute-granularity auto in r->own, and what auto chooses with it, by a choice that fits (r->chosen). If
// the run doesn't train, the granularity becomes none. Ends the program where nothing fits. Every rank calls this.
static void choose_fit(struct run *r) {
    if (config_trains(r->own))
        r->chosen = fit_choose(&r->fit, r->own, limits_of_choice(r), &r->rates, r->parallel);
    else
        r->own->recompute.recompute_granularity = RECOMPUTE_NONE;
}
// Resolves --fp8-weight-cache auto by free memory, equally on all ranks. Every rank calls this.
static void choose_fp8_weight_cache(struct run *r) {
    struct config *own = r->own;
    if (own->fp8.fp8_weight_cache != FP8_CACHE_AUTO || own->fp8.fp8_format == FP8_FORMAT_NONE)
        return;
    int lacks = !fit_caches_fp8_weights(&r->fit, limits_of_choice(r));
    if (r->parallel)
        lacks = parallel_largest(r->parallel, lacks, "agreement on keeping FP8 weights");
    own->fp8.fp8_weight_cache = lacks ? FP8_CACHE_OFF : FP8_CACHE_ALWAYS;
}
// Makes a training run's chunks of logits larger where memory is free, equally on all ranks, and sets r->chunk_grew.
// r->own keeps the size for a resumed run: other chunks round sums otherwise. Every rank calls this.
static void choose_loss_chunk(struct run *r) {
    struct config *own = r->own;
    const int64_t planned = loss_chunk(own, model_shape_of(own, sizeof(floatX), false).Vp, &r->dev);
    int64_t tokens = config_trains(own) ? fit_loss_chunk(&r->fit, limits_of_choice(r)) : 0;
    tokens = tokens > 0 ? tokens : planned;
    if (r->parallel && config_trains(own))
        tokens = -parallel_largest(r->parallel, (int)-tokens, "agreement on the chunks of logits");
    r->chunk_grew = tokens > planned;
    if (r->chunk_grew || (device_is_gpu(&r->dev) && config_trains(own) && !own->memory.plan))
        own->memory.loss_chunk_tokens = (int)tokens;
}
// Sets a step's predicted times and copied bytes in r->model's plan, by r->rates (flops above 0), if the run trains.
static void predict_step(struct run *r) {
    struct plan_prediction *p = &r->model->timeline.plan.predicted;
    const struct fit_time time = fit_predict(r->model, &r->rates);
    const double tokens = (double)r->config->training.global_batch_size * r->config->model.seq_length;
    if (time.step_s <= 0)
        return;
    p->step_ms = 1e3 * time.step_s;
    p->micro_step_ms = 1e3 * time.micro_step_s;
    p->update_ms = 1e3 * time.update_s;
    p->tokens_per_s = tokens / time.step_s;
    p->to_host_bytes = time.moved_bytes[TRANSFER_TO_HOST];
    p->to_device_bytes = time.moved_bytes[TRANSFER_TO_DEVICE];
    p->rates = r->rates.source;
}

// Plans a model for the options as a new r->model, and predicts its step if rates are known. Doesn't free an old model.
static void create_model(struct run *r) {
    r->model = gpt_create(r->config, fit_policy(&r->fit), r->attention.backend, &r->dev);
    if (r->rates.flops > 0)
        predict_step(r);
}
// Writes the plan to the files of --plan-json and --plan-picture, on rank 0, or ends the program if it can't.
static void write_plan(struct run *r) {
    size_t budget[MEMORY_COUNT];
    if (r->config->rank != 0)
        return;
    budgets_of(r, false, budget);
    if (*r->config->memory.plan_json)
        plan_write_json(&r->model->timeline.plan, r->config->memory.plan_json);
    if (*r->config->memory.plan_picture)
        plan_write_picture(&r->model->timeline.plan, budget, r->config->memory.plan_picture);
}
// Chooses by free memory what options leave open, and plans a new r->model; frees no old one. Every rank calls this.
static void choose_plan(struct run *r) {
    if (r->config->recompute.recompute_granularity == RECOMPUTE_AUTO)
        choose_fit(r);
    choose_fp8_weight_cache(r);
    choose_loss_chunk(r);
    create_model(r);
}
// Sets r->rates, by measurements where no data sheet has them, under a deadline. r->fit is set.
static void find_rates(struct run *r) {
    const struct config *c = r->config;
    static const struct timed_check check = {
        "the measurement of this GPU's rates",
        "any --recompute-granularity but auto needs none, and --bus-gbps says how fast copies are"};
    deadline_begin(r, &check, 0);
    r->rates = fit_rates_of(c, c->memory.plan ? 0 : fit_least_bytes(&r->fit), &r->dev);
    long_wait_end(r->device_watch);
}
// Whether auto chose fused, flash can run, and on some rank even the least plan with fused exceeds the memory that is
// free for a choice. Every rank calls this.
static bool fused_exceeds_memory(struct run *r) {
    const struct config *c = r->config;
    const bool least = c->recompute.recompute_granularity == RECOMPUTE_AUTO && config_trains(c);
    char no_flash[128];
    if (r->attention.backend != ATTENTION_FUSED || c->attention.attention_backend != BACKEND_AUTO)
        return false;
    const struct fit fit = fit_of(c, ATTENTION_FUSED, &r->dev);
    const struct fit_limits limits = limits_of_choice(r);
    const bool fits =
        least ? fit_least_bytes(&fit) <= limits.device : fit_is_within(fit_peaks(&fit, fit_policy(&fit)), limits);
    flash_unavailable_reason(no_flash, sizeof no_flash,
                             attention_shape_of(c, c->training.micro_batch_size, c->model.seq_length), &r->dev);
    return parallel_largest(r->parallel, !fits && !*no_flash, "memory for attention by cuDNN");
}
// Chooses attention's backend and what options leave open (in r->own), and plans r->model; allocates none. Writes
// --plan-json and --plan-picture. Ends the program if --plan exceeds budgets. Needs open_device. All ranks call this.
static void plan_model(struct run *r) {
    const struct config *c = r->config;
    adapters_resolve(r->own);
    r->attention = choose_attention(r, NULL);
    if (fused_exceeds_memory(r))
        r->attention = choose_attention(r, "a plan with its workspace exceeds the memory");
    check_fp8_attention(r, r->attention.backend);
    check_decoding(r);
    r->fit = fit_of(c, r->attention.backend, &r->dev);
    if (c->memory.plan || (c->recompute.recompute_granularity == RECOMPUTE_AUTO && config_trains(c)))
        find_rates(r);
    r->asked = *c;
    choose_plan(r);
    if (c->memory.plan)
        fit_check(&r->fit, fit_bytes_of(&r->model->timeline.plan), limits_of(r));
    write_plan(r);
}

// Chooses by free memory and plans r->model anew, once, if old choices don't fit on some rank. Every rank calls this.
static void plan_again(struct run *r) {
    const bool by_auto = r->asked.recompute.recompute_granularity == RECOMPUTE_AUTO && config_trains(r->config);
    const bool caches =
        r->asked.fp8.fp8_weight_cache == FP8_CACHE_AUTO && r->own->fp8.fp8_weight_cache == FP8_CACHE_ALWAYS;
    const bool chose = by_auto || caches || r->chunk_grew; // on all ranks or on none
    int exceeds = chose && !fit_is_within(fit_bytes_of(&r->model->timeline.plan), limits_of(r));
    if (r->parallel && chose)
        exceeds = parallel_largest(r->parallel, exceeds, "agreement on whether the plan fits");
    if (!exceeds)
        return;
    gpt_destroy(r->model);
    *r->own = r->asked;
    choose_plan(r);
    r->planned_again = true;
    write_plan(r);
}
// Connects the ranks, allocates r->model and sets initial values; load_model follows. Where choices by free memory no
// longer fit, plans again first (plan_again). Ends the program for a plan that doesn't fit. Every rank calls this.
static void allocate_model(struct run *r) {
    connect_ranks(r);
    plan_again(r);
    fit_check(&r->fit, fit_bytes_of(&r->model->timeline.plan), limits_of(r));
    watch_loading(r->device_watch);
    gpt_allocate(r->model);
    long_wait_end(r->device_watch);
    if (r->parallel)
        gpt_connect(r->model, &r->collectives);
}

// Returns how documents are told apart in a loader's files. delimiter: the end-of-text token, or -1 if none is known;
// --eod-token overrides it. Ends the program where a needed token is unknown, or a token is outside the vocabulary.
static struct document_rule document_rule_of(const struct config *c, const struct dataloader *loader, int delimiter) {
    struct document_rule rule = {BOUNDARY_NONE, c->data.eod_token >= 0 ? c->data.eod_token : delimiter,
                                 c->data.eod_mask_loss};
    switch (dataloader_files_format(loader)) {
    case TOKENS_FINETUNE: rule.boundary = BOUNDARY_BITS; return rule;
    case TOKENS_LLMC:
    case TOKENS_MEGATRON: break;
    }
    switch (c->data.document_delimiter) {
    case DELIMITER_AUTO:
        rule.boundary = dataloader_files_format(loader) == TOKENS_MEGATRON ? BOUNDARY_INDEX : BOUNDARY_FIRST;
        break;
    case DELIMITER_FIRST: rule.boundary = BOUNDARY_FIRST; break;
    case DELIMITER_LAST: rule.boundary = BOUNDARY_LAST; break;
    }
    if (rule.boundary != BOUNDARY_INDEX && rule.delimiter < 0)
        fail("documents can't be separated: no end-of-text token is known; give it as --eod-token ID, or put the "
             "tokenizer.json or vocabulary.bin of the data beside it");
    if (rule.delimiter >= c->model.vocab_size)
        fail("the end-of-text token %d is outside the vocabulary of %d: change --eod-token or --vocab-size",
             rule.delimiter, c->model.vocab_size);
    return rule;
}
static bool separates_documents(const struct config *c) {
    return c->data.reset_attention_mask || c->data.reset_position_ids || c->data.eod_mask_loss;
}
// Makes loaders separate documents, if options or finetuning shards ask; allocates r->document_starts. Ends the program
// if nothing tells documents apart; beside finetuning shards, each sample is one. Ends it, too, if only validation has
// such shards, without --reset-attention-mask. If options ask, the vocabulary is open. Every rank calls this.
static void separate_documents(struct run *r) {
    const struct config *c = r->config;
    struct dataloader *loaders[] = {r->train, r->val};
    if (has_rows(r->val) && r->train && !has_rows(r->train) && !c->data.reset_attention_mask)
        fail("--val-data has examples packed into rows, which must not see each other, and --train-data has not; add "
             "--separate-documents");
    if (!separates_documents(c) && !has_rows(r->train) && !has_rows(r->val))
        return;
    // Ranks must not tell documents apart differently, and the tokenizer may be beside the data of one rank only.
    const int delimiter =
        parallel_largest(r->parallel, r->vocabulary.end_of_text, "agreement on the end-of-text token");
    const bool may_be_one = has_rows(r->train) && delimiter < 0 && c->data.eod_token < 0 && !c->data.eod_mask_loss;
    for (int i = 0; i < 2; i++)
        if (loaders[i] && (separates_documents(c) || has_rows(loaders[i])) &&
            !(may_be_one && dataloader_files_format(loaders[i]) == TOKENS_LLMC))
            dataloader_separate_documents(loaders[i], document_rule_of(c, loaders[i], delimiter));
    r->document_starts = (int32_t *)calloc((size_t)c->training.micro_batch_size * (size_t)c->model.seq_length,
                                           sizeof *r->document_starts);
    if (!r->document_starts)
        fail("out of memory for a batch of %d sequences of %d tokens", c->training.micro_batch_size,
             c->model.seq_length);
}

// Opens the token shards as r->train and r->val (NULL: not used), and allocates a micro-batch; close_run frees all.
// Ends the job if ranks' shards differ, or are of another tokenizer than the model's. Every rank calls this.
static void open_data(struct run *r) {
    const struct config *c = r->config;
    const size_t batch = (size_t)c->training.micro_batch_size * (size_t)c->model.seq_length;
    enum { BATCHES_AHEAD = 4 };
    if (config_trains(c))
        r->train = dataloader_open(c->data.train_data, c->model.seq_length, c->training.seed, true, c->model.vocab_size,
                                   c->rank, c->ranks, c->training.micro_batch_size, BATCHES_AHEAD, "--train-data");
    if (*c->data.val_data && !config_generates(c))
        r->val = dataloader_open(c->data.val_data, c->model.seq_length, 0, false, c->model.vocab_size, c->rank,
                                 c->ranks, c->training.micro_batch_size, 0, "--val-data");
    if (r->val && r->val->mixture.count > 1)
        r->val_losses = (double *)calloc((size_t)r->val->mixture.count, sizeof *r->val_losses);
    r->inputs = (int32_t *)calloc(batch, sizeof *r->inputs);
    r->targets = (int32_t *)calloc(batch, sizeof *r->targets);
    if (!r->inputs || !r->targets || (r->val && r->val->mixture.count > 1 && !r->val_losses))
        fail("out of memory for a batch of %d sequences of %d tokens", c->training.micro_batch_size,
             c->model.seq_length);
    check_same_data(r);
    check_tokenizers(r);
}

// Writes the resolved options to config.json in --out, which exists, on rank 0. Ends the program where it can't.
static void write_config(const struct config *c) {
    char path[PATH_MAX];
    if (c->rank > 0)
        return;
    if ((size_t)snprintf(path, sizeof path, "%s/config.json", c->data.out) >= sizeof path)
        fail("--out %s: the name is too long", c->data.out);
    config_write_json(c, path);
}

// Writes plan.html, for scripts/report.py, into --out, which exists, on rank 0. Only warns where it can't.
static void write_plan_page(struct run *r) {
    char path[PATH_MAX];
    size_t budget[MEMORY_COUNT];
    if (r->config->rank > 0 ||
        (size_t)snprintf(path, sizeof path, "%s/plan.html", r->config->data.out) >= sizeof path || is_pipe(path))
        return;
    FILE *const file = fopen(path, "w");
    bool written = file != NULL;
    if (file) {
        budgets_of(r, false, budget);
        plan_write_page(file, &r->model->timeline.plan, budget);
        written = !ferror(file);
        written = fclose(file) == 0 && written;
    }
    if (!written)
        say_warning("%s: cannot be written: %s; the run goes on without a picture of its memory", path,
                    strerror(errno));
}

// Sets r->peak_flops, for utilization, to a known GPU's data sheet, or else to what a large matmul reaches, which sets
// peak_is_measured and overwrites the allocated model's activations. Call this before the first step.
static void find_peak(struct run *r) {
    r->peak_flops = device_data_sheet_flops(&r->dev);
    r->peak_is_measured = r->peak_flops <= 0;
    if (r->peak_is_measured)
        r->peak_flops = gpt_measure_peak(r->model);
}

// Closes and frees what the run has opened, except tasks and log. r->model is planned. Waits for a save.
static void close_run(struct run *r) {
    saver_close(&r->saver);
    dataloader_close(r->train);
    dataloader_close(r->val);
    vocabulary_close(&r->vocabulary);
    tokenizer_free(&r->tokenizer);
    if (r->model->zero.collectives)
        collectives_close(&r->collectives, &r->dev);
    gpt_destroy(r->model);
    long_wait_close(r->device_watch);
    matmul_destroy(r->dev.matmul);
    attention_close(&r->dev);
    device_close(&r->dev);
    free(r->val_losses);
    free(r->inputs);
    free(r->targets);
    free(r->document_starts);
    free(r->samples);
    sampler_close(&r->sampler);
    free(r->prompt_tokens);
    free(r->self_check.known);
    free(r->self_check.found);
}
