// Verdicts of checks that the run's own process makes, kept in --out so that later starts need not make them again.
#pragma once
#include "run/self_check.cuh" // self_check_read, self_check_find, self_check_append

#ifdef TARGET_CUDA
#include "runtime/files/hash.h" // hash64

// Returns a hash of the plan's bytes and of the options that starts share.
static uint64_t self_check_hash_run(const struct run *r) {
    char text[OPTION_TEXT];
    uint64_t digest = r->model->timeline.plan.peak_bytes;
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (!(config_rows[i].flags & (CONFIG_THIS_START | CONFIG_PER_RANK))) {
            option_text(text, &config_rows[i], r->config);
            digest = hash64(text, strlen(text), digest);
        }
    return digest;
}
// Returns the worst of all ranks' earlier verdicts: RIGHT, UNKNOWN (none), or WRONG (or begun). Every rank calls this.
static enum self_verdict_kind self_check_known(struct run *r, const char *key) {
    struct self_verdict verdict = {SELF_CHECK_UNKNOWN, "", 0, false};
    static const enum self_verdict_kind kinds[] = {SELF_CHECK_RIGHT, SELF_CHECK_UNKNOWN, SELF_CHECK_WRONG};
    if (r->config->device.self_check == CHECK_AUTO) {
        if (!r->self_check.is_read)
            self_check_read(r);
        self_check_find(&verdict, r->self_check.known, key);
    }
    const int here = verdict.kind == SELF_CHECK_RIGHT ? 0 : verdict.kind == SELF_CHECK_UNKNOWN ? 1 : 2;
    return kinds[parallel_largest(r->parallel, here, "earlier checks")];
}
// Keeps in --out that `what` is right, once all ranks have found so. Every rank calls this.
static void self_check_keep_right(struct run *r, const char *what, const char *key) {
    struct self_verdict verdict = {SELF_CHECK_RIGHT, "", 0, true};
    char *lines = NULL;
    parallel_barrier(r->parallel, what); // a rank that has found it wrong has ended
    if (!self_check_is_kept(&verdict, r->config))
        return;
    snprintf(verdict.text, sizeof verdict.text, "%s", what);
    self_check_add(&lines, &verdict, key);
    self_check_append(r, lines);
    free(lines);
}

#endif
