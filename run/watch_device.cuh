// Watches waits for a GPU: if one takes long, a warning names what was enqueued last, and the run goes on.
#pragma once
#include "kernels/device.cuh"         // struct device, device_is_gpu
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/launched.h" // launched_last
#include "run/long_wait.h"            // long_wait_open
#include "runtime/machine/say.h"      // say_warning
#include <stdlib.h>                   // getenv, strtod

static const double DEVICE_WATCH_SECONDS = 300;

// Warns that the host has waited `seconds` for the GPU, and names what was enqueued last.
static void warn_host_waits(double seconds, const void *unused) {
    char names[512];
    say_warning(
        "the GPU has kept the host for %g s. Enqueued last, the newest first: %s. Where it never ends, a run with "
        "CUDA_LAUNCH_BLOCKING=1 in the environment and --cuda-graphs=false stops at the culprit, and --self-check "
        "always judges attention's kernels",
        seconds, launched_last(names, sizeof names));
}
// Warns that allocating or loading the model has taken `seconds` so far.
static void warn_loading_is_slow(double seconds, const void *unused) {
    say_warning("the model is not loaded after %g s: its files are read slowly, or the GPU has hung", seconds);
}
// Begins to watch allocating or loading the model, until long_wait_end. watch: or NULL.
static void watch_loading(struct long_wait *watch) {
    if (!watch)
        return;
    const struct long_wait_limit limit = {watch->limit.seconds, warn_loading_is_slow, NULL};
    long_wait_begin_within(watch, &limit);
}
// Opens a watch, for long_wait_close; NULL without GPU or memory. A bad TRAIN_GPT_WATCH_SECONDS ends the program.
static struct long_wait *watch_device(const struct device *dev) {
    const char *const text = getenv("TRAIN_GPT_WATCH_SECONDS");
    char *end = NULL;
    const double seconds = text ? strtod(text, &end) : DEVICE_WATCH_SECONDS;
    if (!(seconds > 0 && seconds < 1e9) || (end && *end))
        fail("TRAIN_GPT_WATCH_SECONDS=%s in the environment: expected seconds above 0", text);
    const struct long_wait_limit limit = {seconds, warn_host_waits, NULL};
    return device_is_gpu(dev) ? long_wait_open(limit) : NULL;
}
