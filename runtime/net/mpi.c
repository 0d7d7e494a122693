#include "runtime/net/mpi.h"
#include <stdio.h>  // snprintf
#include <string.h> // strcspn

#ifdef HAVE_MPI
#define OMPI_SKIP_MPICXX 1 // C++ gets the C interface too
#define MPICH_SKIP_MPICXX 1
#include <mpi.h> // MPI_Init_thread

const char *mpi_error(int code, const char *call, struct error_text *error) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return error_format(error, "%s: %s", call, text);
}

const char *mpi_open(int *rank, int *ranks, struct error_text *error) {
    int provided = 0;
    const int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    if (code != MPI_SUCCESS)
        return mpi_error(code, "MPI_Init_thread", error);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (provided < MPI_THREAD_SERIALIZED)
        return error_format(error, "this MPI can't be called from several threads, which needs MPI_THREAD_SERIALIZED");
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, ranks);
    return NULL;
}

const char *mpi_broadcast(void *data, size_t bytes, struct error_text *error) {
    const int code = MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    return code == MPI_SUCCESS ? NULL : mpi_error(code, "MPI_Bcast", error);
}

void mpi_close(void) { MPI_Finalize(); }

void mpi_describe(char *text, size_t bytes) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(library, &length);
    library[strcspn(library, ",\n")] = 0; // MPICH's text has many lines, Open MPI's one line with commas
    snprintf(text, bytes, "%s; the standard's version %d.%d", library, MPI_VERSION, MPI_SUBVERSION);
}

#else

const char *mpi_error(int code, const char *call, struct error_text *error) {
    return error_format(error, "%s: this build has no MPI", call);
}
const char *mpi_open(int *rank, int *ranks, struct error_text *error) {
    return error_format(error,
                        "this build has no MPI; install one (its mpicc) and build again, or start by srun or with "
                        "--rendezvous HOST:PORT");
}
const char *mpi_broadcast(void *data, size_t bytes, struct error_text *error) {
    return error_format(error, "this build has no MPI");
}
void mpi_close(void) {}
void mpi_describe(char *text, size_t bytes) { snprintf(text, bytes, "%s", ""); }

#endif
