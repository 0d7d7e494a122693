// MPI's start and end. All is here without HAVE_MPI too: opening then says that the build has none. Calls come from one
// thread at a time.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

__BEGIN_DECLS
// Before any other call. The rank and ranks are those of the mpirun that started the process, or 0 of 1. Returns NULL
// or a text, as does mpi_broadcast.
const char *mpi_open(int *rank, int *ranks, struct error_text *error);
// From rank 0 to all, at the start; bytes fit an int.
const char *mpi_broadcast(void *data, size_t bytes, struct error_text *error);
// Returns when all ranks have called it.
void mpi_close(void);
// What a call's error code means, as a text.
const char *mpi_error(int code, const char *call, struct error_text *error);
// For --version: the library, and the version of MPI's standard; "" where the build has no MPI.
void mpi_describe(char *text, size_t bytes);
__END_DECLS
