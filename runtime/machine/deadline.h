// Deadlines, of a wait or of a run (--exit-after MINUTES), by one monotonic clock, in seconds.
#pragma once
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

struct deadline {
    double at_s; // time of deadline_clock_s; infinite: no deadline
};

__BEGIN_DECLS
// Returns the time of the one clock, CLOCK_MONOTONIC, in seconds: only differences have a meaning.
double deadline_clock_s(void);
// Returns the deadline `minutes` after start_s (deadline_clock_s); for 0 minutes or less: no deadline.
struct deadline deadline_after_minutes(double start_s, double minutes);
// Returns the seconds left: negative once the deadline has passed, infinite without a deadline.
double deadline_left_s(struct deadline deadline);
// Whether work of `seconds`, begun now, would end by the deadline; true without a deadline.
bool deadline_allows(struct deadline deadline, double seconds);
__END_DECLS
