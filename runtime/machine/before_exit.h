// Holds what a process has to finish where it ends because of an error: one function, which knows what is under way.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Sets the function (NULL: none) that waits up to `seconds` for what is under way, in place of a former one. Every
// exit() calls it, with 120 s, and before_exit_finish does: from any thread and perhaps more than once.
void before_exit_set(void (*finish)(double seconds));
// Calls before_exit_set's function, if one is set, which waits up to `seconds`. For use before _exit(), which does not.
void before_exit_finish(double seconds);
__END_DECLS
