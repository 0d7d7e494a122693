// The verdict of a run's self-check (run/self_check.cuh).
#pragma once
#include "attention.cuh" // ATTENTION_BACKENDS_COUNT

enum self_verdict_kind {
    SELF_CHECK_NOT_MADE,
    SELF_CHECK_RIGHT,
    SELF_CHECK_WRONG,
    SELF_CHECK_UNKNOWN, // the child came to no verdict, as where it could not open the GPU
    SELF_CHECK_BEGUN    // by a start that has not ended it
};
struct self_verdict {
    enum self_verdict_kind kind;
    char text[240];
    double seconds; // that the check took; 0: the verdict is known from before
    bool lasts;     // it is kept for later starts; WRONG that does not last: the check was late
};
struct self_measured {
    double ms[ATTENTION_BACKENDS_COUNT];          // forward and backward of a layer; 0: not measured
    char left_out[ATTENTION_BACKENDS_COUNT][320]; // why a backend was not timed; "": it was, or may not be chosen
    char missing[256];                            // why measuring failed; "": it did not, or was not tried
    double seconds;                               // that measuring took; 0: known from before, or not tried
};
struct self_check {
    bool is_read;             // the file in --out has been read
    char *known;              // lines of verdicts: the file's, then this start's; NULL: none
    char *found;              // lines to add to the file; NULL: none
    double seconds;           // of all checks
    struct self_verdict last; // of our own kernels, or UNKNOWN
    struct self_measured measured;
    bool lacked_room;        // for a check of casts or copies
    unsigned graphs_checked; // bits 1 << kind of micro-step, whose graphs need no check (any more) in this start
    char refused[ATTENTION_BACKENDS_COUNT][320]; // why a backend may not be chosen; "": it may
};
