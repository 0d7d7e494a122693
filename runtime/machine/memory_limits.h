// The host's memory: how much this process may still allocate, and how much it uses.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Returns the bytes that this process may still allocate: the least of what the machine has available and may commit,
// what the cgroups (v1 and v2) leave, and what RLIMIT_AS and RLIMIT_DATA leave. SIZE_MAX: no limit is known.
size_t memory_available_bytes(void);

// Returns the bytes of this process's resident set now; 0 if unknown.
size_t memory_resident_bytes(void);
size_t memory_resident_peak_bytes(void);
__END_DECLS
