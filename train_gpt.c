// train_gpt: the program that trains a GPT, evaluates it or generates text with it. This file is compiled several
// times. Without ENGINE it is main, which reads the options and calls one copy of the engine. With ENGINE defined, as
// train_cpu_fp32, it is the copy for this target and precision: floatX is the copy's number type, and its entry point
// is named ENGINE. A suffix of the name tells a higher level of instruction sets.
#include "config/resolve.h" // config_read, config_resolve
#include "run/engine.h"     // the copies of the engine

#ifndef ENGINE

#include "run/choose_engine.h"       // which copy of the engine
#include "run/list_values.h"         // --preset and --plan-gpu without a value
#include "run/merge.h"               // --lora-merge
#include "run/out_lock.h"            // one run at a time in --out
#include "run/start.h"               // options of a model's folder or of a checkpoint
#include "run/version.h"             // --version
#include "runtime/machine/error.h"   // fail
#include "runtime/machine/process.h" // libraries_have_started, standard_files_open, spin_briefly
#include <poll.h>                    // poll
#include <stdio.h>                   // printf
#include <unistd.h>                  // STDOUT_FILENO

// Whether stdout is a pipe or a socket whose other end is closed.
static bool reader_is_gone(void) {
    struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
    return poll(&out, 1, 0) > 0 && (out.revents & (POLLERR | POLLHUP)) != 0;
}

// Ends the program if the plan, or the result of a run that does not train, could not be written to stdout. It is no
// error if the reader, such as head, has closed its pipe. The message can't tell why an earlier write failed.
static void check_printed(const struct config *config) {
    const bool prints_result = config->memory.plan || !config_trains(config);
    errno = 0;
    if (!prints_result || (fflush(stdout) == 0 && !ferror(stdout)))
        return;
    const int reason = errno;
    if (reason != EPIPE && (reason != 0 || !reader_is_gone()))
        fail("the standard output cannot be written: %s", reason ? strerror(reason) : "an earlier write failed");
}

// Prints what --version adds: the commit, the compiler, the CPU engines and GPU architectures of this build, and the
// versions of the libraries and of the GPU driver that are loaded on this machine.
static void describe_build(void) {
    version_print();
    cuda_print_build();
}

int main(int argc, char **argv) {
    libraries_have_started();
    standard_files_open();
    if (argc == 3 && strcmp(argv[1], SELF_CHECK_ARGUMENT) == 0)
        return cuda_self_check(argv[2]);
    stack_check_limit();
    spin_briefly(argv);
    const struct config_answers answers = {describe_build, list_values};
    struct config config = config_read(argc, argv, &answers);
    struct parallel parallel;
    start_ranks(&config, &parallel);
    config.samples_of_epochs = start_samples_of_epochs;
    out_of_resume(&config);
    if (config_trains(&config) && !config.memory.plan)
        out_lock(&config);
    start_find(&config);
    const struct config asked = config;
    config_resolve(&config);
    config.asked = &asked;
    start_check(&config);
    start_check_ranks(&config);
    if (*config.finetuning.lora_merge && !config.memory.plan)
        return merge_adapters(&config);
    const int status = choose_engine(&config)(&config);
    if (config.parallel)
        parallel_close(&parallel);
    check_printed(&config);
    return status;
}

#else

#include "run/chat.cuh"         // talking to the model
#include "run/generate.cuh"     // prompts, samples, tokens to text
#include "run/check_parts.cuh"  // casts and copies on known numbers
#include "run/eval_tasks.cuh"   // tasks
#include "run/open.cuh"         // device, plan, data
#include "run/out_lock.h"       // one run at a time in --out
#include "run/perplexity.cuh"   // perplexity of texts
#include "run/ranks.cuh"        // several processes
#include "run/report.cuh"       // the start-up report
#include "run/resume.cuh"       // a run's state from and to checkpoints
#include "run/plan_report.cuh"  // the plan as tables
#include "run/plan_summary.cuh" // the plan in ten lines
#include "run/run.cuh"          // struct run
#include "run/self_measure.cuh" // attention judged and timed before it is used
#include "run/train.cuh"        // the training loop
#include "run/tune.cuh"         // the matrix products' algorithms
#include "run/validate.cuh"     // validation

// Trains the planned model, from opening the data to the last checkpoint. Returns EXIT_FAILURE if a checkpoint failed,
// EXIT_STOPPED if the run ended before --train-steps, unless by --early-stop, else EXIT_SUCCESS. Every rank calls this.
static int run_training(struct run *r) {
    const struct config *c = r->config;
    open_data(r);
    open_vocabulary(r);
    separate_documents(r);
    if (*c->evaluation.eval_tasks)
        open_tasks(r);
    open_training_samples(r);
    allocate_model(r);
    load_model(r);
    out_lock_new(r->own);
    log_open(&r->log, c->data.out, c->training.train_steps, c->data.log_every, r->first_step, c->rank == 0,
             launched_by_mpirun());
    log_open_events(&r->log, c->trackers.tensorboard_dir, r->first_step);
    write_config(c);
    write_plan_page(r);
    follower_start(&r->follower, c, r->first_step == 0);
    open_saver(r);
    self_check_save(r);
    watched(r, tune_matmuls);
    watched(r, check_parts);
    graphs_recall(r);
    watched(r, find_peak);
    report(r);
    if (r->finished >= c->training.train_steps)
        log_event(&r->log, "step %d of --train-steps %d: nothing is left to do", r->finished, c->training.train_steps);
    const int stop = stop_asked_of_any(r);
    if (stop)
        log_event(&r->log, "%s: the run ends before its first step; there is nothing to save",
                  strsignal(stop % STOP_SIGNALS));
    else {
        repeat_validation(r);
        mend_best(r);
        train(r);
    }
    finish_save(r);
    report_epochs_trained(r);
    parallel_barrier(r->parallel, "the last checkpoint"); // a launcher may end all ranks when the first one ends
    log_close(&r->log);
    follower_end(&r->follower);
    const bool ended = r->finished >= c->training.train_steps || stops_early(r);
    return r->save_failed ? EXIT_FAILURE : ended ? EXIT_SUCCESS : EXIT_STOPPED;
}

// Loads the planned model, and prints its validation loss and the scores that were asked for. Returns EXIT_STOPPED
// after a signal, else EXIT_SUCCESS. Every rank calls this.
static int run_evaluation(struct run *r) {
    const struct config *c = r->config;
    open_data(r);
    if (separates_documents(c))
        open_vocabulary(r);
    separate_documents(r);
    if (*c->evaluation.eval_tasks)
        open_tasks(r);
    allocate_model(r);
    load_model(r);
    report(r);
    const int status = r->val ? evaluate_only(r) : EXIT_SUCCESS;
    if (status != EXIT_SUCCESS || (r->tasks && !score_tasks(r, 0)) || !score_texts(r))
        return EXIT_STOPPED;
    return EXIT_SUCCESS;
}

// Loads the model; prints each prompt and up to new_tokens tokens more. Returns the exit status. Every rank calls this.
static int run_generation(struct run *r, int new_tokens) {
    allocate_model(r);
    load_model(r);
    return generate_only(r, new_tokens);
}

// Loads the model, and chats: an answer has at most new_tokens tokens. One rank only. Returns the exit status.
static int run_chat(struct run *r, int new_tokens) {
    allocate_model(r);
    load_model(r);
    return chat_only(r, new_tokens);
}

// Prints the memory plan, made earlier, or its summary, as --plan asks; trains nothing. Returns the exit status.
static int run_plan(const struct run *r) {
    if (r->config->memory.plan == PLAN_SUMMARY) {
        plan_summary(r);
        return EXIT_SUCCESS;
    }
    report(r);
    size_t transfer_bytes[TRANSFER_DIRECTIONS];
    gpt_step_transfer_bytes(r->model, transfer_bytes);
    plan_print(&r->model->timeline.plan, transfer_bytes, !device_is_gpu(&r->dev), stdout);
    return EXIT_SUCCESS;
}

int ENGINE(const struct config *config) {
    struct run r;
    struct config own = *config;
    memset(&r, 0, sizeof r);
    r.config = r.own = &own;
    r.parallel = config->parallel;
    r.schedule = config_schedule(config);
    r.deadline = deadline_after_minutes(deadline_clock_s(), config->checkpoints.exit_after);
    signals_install();
    if (*config->evaluation.generate && !config->memory.plan) { // the prompts' lengths decide how much is planned
        open_vocabulary(&r);
        open_tokenizer(&r, "generate");
        read_prompts(&r, &own);
    }
    if (config->evaluation.chat)
        chat_sizes(&own);
    if (config->evaluation.chat && !config->memory.plan) {
        open_vocabulary(&r);
        open_tokenizer(&r, "chat");
    }
    open_device(&r);
    plan_model(&r);
    const int status = config->memory.plan            ? run_plan(&r)
                       : *config->evaluation.generate ? run_generation(&r, config->evaluation.sample_tokens)
                       : config->evaluation.chat      ? run_chat(&r, config->evaluation.sample_tokens)
                       : config->evaluation.eval_only ? run_evaluation(&r)
                                                      : run_training(&r);
    close_tasks(&r);
    close_run(&r);
    return status;
}

#ifdef TARGET_CUDA
#include "run/libraries.cuh" // libraries_print
#define NAME(engine, suffix) engine##suffix
#define NAME_OF(engine, suffix) NAME(engine, suffix)
const char *NAME_OF(ENGINE, _unavailable_reason)(void) { return device_unavailable_reason(); }
void NAME_OF(ENGINE, _libraries)(void) { libraries_print(); }
int NAME_OF(ENGINE, _self_check)(const char *request) { return self_check_or_measure_serve(request); }
#endif

#endif
