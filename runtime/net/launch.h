// This process's rank in its job, from the launcher's environment variables.
//   --rendezvous HOST:PORT  RANK and WORLD_SIZE (LOCAL_RANK, LOCAL_WORLD_SIZE), which torchrun sets too, or, without
//                           RANK, mpirun's or srun's below; rank 0 listens at HOST:PORT
//   mpirun                  Open MPI's OMPI_COMM_WORLD_*, or MPICH's PMI_RANK and PMI_SIZE; rank 0 tells by MPI where
//   srun                    SLURM_* of a job step; rank 0 listens on its first host, at a port made of the job's number
//   else                    one rank
// A batch script has SLURM_PROCID and SLURM_NTASKS too but is no rank: only a step has SLURM_STEP_NUM_TASKS.
#pragma once
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/net/sha256.h"         // SHA256_BYTES

enum launch_kind { LAUNCH_SINGLE, LAUNCH_MPI, LAUNCH_SLURM, LAUNCH_RENDEZVOUS };

struct launch {
    enum launch_kind kind;
    int rank, ranks;             // of the job
    int local_rank, local_ranks; // on this host
    char host[256];              // where rank 0 listens (SLURM, RENDEZVOUS); "" under MPI, where rank 0 tells by MPI
    int port;
    unsigned char secret[SHA256_BYTES]; // the hash of the secret that all ranks share; zeros: none
};

__BEGIN_DECLS
// Fills in *launch, with zeros as its secret. A job of one rank is LAUNCH_SINGLE, however it was launched. rendezvous:
// the option's value; "": not given. Returns NULL or the problem.
const char *launch_find(struct launch *launch, const char *rendezvous, struct error_text *error);
// Sets launch->secret to the hash of a secret of 16 to 4096 bytes, without white space around it: from the file or, if
// file is "", from the variable TRAIN_GPT_SECRET. If that is not set either: zeros. Returns NULL or the problem.
const char *launch_read_secret(struct launch *launch, const char *file, struct error_text *error);
// Whether any process that reaches rank 0's port could join: no secret is shared, by the user or by MPI.
bool launch_has_no_secret(const struct launch *launch);
// Whether mpirun started this process, as the only one or with others. mpirun then passes on what the process prints:
// Open MPI gives each rank a pseudo-terminal for that, so that a terminal does not mean that there is a screen.
bool launched_by_mpirun(void);
__END_DECLS
