// MPI's start and end. Without HAVE_MPI, mpi_open and mpi_broadcast return an error. One thread at a time may call.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

__BEGIN_DECLS
// Starts MPI; only mpi_describe may come before. *rank, *ranks: as mpirun started them, else 0, 1. NULL or the problem.
const char *mpi_open(int *rank, int *ranks, struct error_text *error);
// data (bytes) = rank 0's data; every rank calls it. bytes must fit an int. Returns NULL or the problem.
const char *mpi_broadcast(void *data, size_t bytes, struct error_text *error);
// Ends MPI, which mpi_open began; returns when all ranks have called it.
void mpi_close(void);
// Formats into `error` what `code` means, which MPI's function `call` returned. Returns the text.
const char *mpi_error(int code, const char *call, struct error_text *error);
// text (bytes) = the library and the version of MPI's standard, cut where too long; "" where the build has no MPI.
void mpi_describe(char *text, size_t bytes);
__END_DECLS
