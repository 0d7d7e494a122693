// The stacks of threads: an overflow ends a process without a word, so that too small ones are refused at the start.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

// Bytes that a thread needs: the backward pass of flash attention has tiles of 494 KiB on its stack; the frames around
// it, those of the libraries, and the arguments and environment of the process take a third of the rest.
enum { STACK_BYTES = 1 << 20 };

__BEGIN_DECLS
// Ends the process with status 2 where the limit of the main thread's stack (ulimit -s) is below STACK_BYTES.
void stack_check_limit(void);
// The bytes of the calling thread's stack.
size_t stack_bytes_here(void);
__END_DECLS
