// Holds the one function that finishes what is under way when a process ends because of an error.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Sets the function that waits up to `seconds` for what is under way, in place of a former one; NULL: none. Every
// exit() calls it, with 120 s, and so does before_exit_finish: from any thread, perhaps more than once.
void before_exit_set(void (*finish)(double seconds));
// Calls the function of before_exit_set, if there is one, to wait up to `seconds`. _exit() itself would not call it.
void before_exit_finish(double seconds);
__END_DECLS
