// Corrects what a process is started with: closed standard files, threads that spin too long, small stacks.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS
// Ends the watch over the start of libraries, when main begins. Under ulimit -v or -d, a process whose libraries take
// two seconds of CPU time to start ends with status 2 and a message: they would wait for memory without end.
void libraries_have_started(void);

// Bytes of a stack that a thread needs, since an overflow ends the process without a word: flash attention's backward
// has tiles of 494 KiB there; callers' and libraries' frames, arguments and environment take a third of the rest.
enum { STACK_BYTES = 1 << 20 };

__BEGIN_DECLS
// Opens /dev/null in place of each of stdin, stdout and stderr that is closed: another file would take its number, and
// get what is printed. Ends the process with status 2 where /dev/null can't be opened.
void standard_files_open(void);
// Sets GOMP_SPINCOUNT and starts the process anew, with main's argv: gcc's OpenMP reads the variable before main
// begins. By default a waiting thread spins for 10 ms or more, and may take a core from the thread that it waits for:
// beside two busy processes on two cores a step took three times as long. Only returns if GOMP_SPINCOUNT (as after the
// new start) or OMP_WAIT_POLICY is set, on more than 8 CPUs (not measured), or if no new start is possible.
void spin_briefly(char *const *argv);
// Ends the process with status 2 if the soft limit of the main thread's stack (ulimit -s) is below STACK_BYTES.
void stack_check_limit(void);
// Returns the bytes of the calling thread's stack; STACK_BYTES where they are not known.
size_t stack_bytes_here(void);
__END_DECLS
