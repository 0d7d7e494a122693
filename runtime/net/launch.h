// Who this process is among those of its job, from what its launcher left in the environment.
//
//   --rendezvous HOST:PORT  RANK and WORLD_SIZE (LOCAL_RANK, LOCAL_WORLD_SIZE), which torchrun sets too, or, without
//                           RANK, those of mpirun or srun below; rank 0 listens at HOST:PORT
//   mpirun                  Open MPI's OMPI_COMM_WORLD_*, or MPICH's PMI_RANK and PMI_SIZE; rank 0 tells by MPI where
//   srun                    SLURM_* of a job step; rank 0 listens on its first host, at a port made of the job's number
//   else                    alone
//
// A batch script has SLURM_PROCID and SLURM_NTASKS too and is none of its ranks: only a step has SLURM_STEP_NUM_TASKS.
// One rank, however it was launched, is alone: it needs nobody.
#pragma once
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

enum launch_kind { LAUNCH_ALONE, LAUNCH_MPI, LAUNCH_SLURM, LAUNCH_RENDEZVOUS };

struct launch {
    enum launch_kind kind;
    int rank, ranks;             // of the job
    int local_rank, local_ranks; // on this host
    char host[256];              // where rank 0 listens (SLURM, RENDEZVOUS); "" under MPI, where rank 0 tells by MPI
    int port;
};

__BEGIN_DECLS
// `rendezvous`: the value of --rendezvous, "" where it is not given. Returns NULL, or a text where variables contradict
// each other.
const char *launch_find(struct launch *launch, const char *rendezvous, struct error_text *error);
// Whether mpirun started this process, alone or with others. What the process prints then goes by mpirun to mpirun's
// own output: Open MPI gives each rank a pseudo-terminal for that, which does not mean that there is a screen at its
// end.
bool launch_is_by_mpirun(void);
__END_DECLS
