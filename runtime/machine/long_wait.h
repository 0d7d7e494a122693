// A watch over waits that should be short: a thread says so where one takes long.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

struct long_wait;

__BEGIN_DECLS
// Starts the watch; NULL where there is no memory or no thread for it, and then nothing is watched. say_it: called by the
// watch's thread, once a wait that takes longer than `seconds`. long_wait_close frees the watch; NULL is allowed in all.
struct long_wait *long_wait_open(double seconds, void (*say_it)(double seconds));
void long_wait_close(struct long_wait *watch);
// Called around a wait, by one thread.
void long_wait_begin(struct long_wait *watch);
void long_wait_end(struct long_wait *watch);
__END_DECLS
