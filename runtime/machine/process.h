// Corrects what a process is started with: closed standard files, threads that spin too long, small stacks.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS
// Ends the libraries' time limit, since all have started when main begins. Under ulimit -v or -d, a process whose
// libraries take two seconds of CPU time to start ends with status 2 and a message, lest they wait for ever.
void libraries_have_started(void);

// Bytes of a stack that a thread needs, since an overflow ends the process without a word: flash attention's backward
// has tiles of 494 KiB there; callers' and libraries' frames, arguments and environment take a third of the rest.
enum { STACK_BYTES = 1 << 20 };

__BEGIN_DECLS
// Opens /dev/null in place of each of stdin, stdout and stderr that is closed: another file would take its number, and
// get what is printed. Ends the process with status 2 where /dev/null can't be opened.
void standard_files_open(void);
// Makes waiting OpenMP threads spin only briefly. Sets GOMP_SPINCOUNT, which gcc's OpenMP reads before main, and starts
// the process anew, with main's argv. By default they spin for 10 ms or more, and may take a core from the thread that
// they wait for: beside two busy processes on two cores a step took three times as long. Returns only if GOMP_SPINCOUNT
// (as after the new start) or OMP_WAIT_POLICY is set, on more than 8 CPUs (not measured), or if it can't start anew.
void spin_briefly(char *const *argv);
// Ends the process with status 2 if the soft limit of the main thread's stack (ulimit -s) is below STACK_BYTES.
void stack_check_limit(void);
// Returns the bytes of the calling thread's stack; STACK_BYTES where they are not known.
size_t stack_bytes_here(void);
__END_DECLS
