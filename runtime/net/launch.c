#include "runtime/net/launch.h"
#include <errno.h>  // errno
#include <limits.h> // INT_MAX
#include <stdint.h> // uint64_t
#include <stdio.h>  // snprintf
#include <stdlib.h> // strtoull, getenv
#include <string.h> // memset, strchr

// The ports at which rank 0 of a Slurm step may listen: below those that Linux gives to outgoing connections (from
// 32768 on). Their number is prime, so that jobs with consecutive numbers, and the steps of a job, get different ones.
enum { LAUNCH_FIRST_PORT = 20000, LAUNCH_PORTS = 10007 };

// Parses a text of nothing but digits, up to `most`. False, and *number undefined, where it is no such number.
static bool launch_parse_number(uint64_t *number, const char *text, uint64_t most) {
    char *end = NULL;
    if (text[0] < '0' || text[0] > '9') // strtoull would take a sign or a space
        return false;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    *number = value;
    return errno == 0 && *end == '\0' && value <= most;
}

// *number = the environment variable `name`, 0 to INT_MAX. If it is not set: `otherwise` (negative: that is an error).
static const char *launch_number(int *number, const char *name, int64_t otherwise, struct error_text *error) {
    const char *const text = getenv(name);
    uint64_t value = 0;
    *number = (int)otherwise;
    if (!text)
        return otherwise < 0 ? error_format(error, "the environment variable %s is not set", name) : NULL;
    if (!launch_parse_number(&value, text, INT_MAX))
        return error_format(error, "%s=%s in the environment is not a number from 0 to %d", name, text, INT_MAX);
    *number = (int)value;
    return NULL;
}

// The environment variables of a launcher. The two local ones may be unset.
struct launch_variables {
    const char *rank, *ranks, *local_rank, *local_ranks;
};

// Sets rank, ranks and local_rank from the launcher's variables, and checks rank. An unset local_rank variable means 0.
static const char *launch_ranks(struct launch *launch, const struct launch_variables *names, struct error_text *error) {
    const char *problem = launch_number(&launch->rank, names->rank, -1, error);
    if (!problem)
        problem = launch_number(&launch->ranks, names->ranks, -1, error);
    if (problem)
        return problem;
    if (launch->rank >= launch->ranks)
        return error_format(error,
                            "%s=%d in the environment does not fit %s=%d: the ranks of a job are 0 to its size - 1",
                            names->rank, launch->rank, names->ranks, launch->ranks);
    return launch_number(&launch->local_rank, names->local_rank, 0, error);
}

static const char *launch_check_local(const struct launch *launch, const struct launch_variables *names,
                                      struct error_text *error) {
    if (launch->local_rank >= launch->local_ranks)
        return error_format(error,
                            "%s=%d in the environment does not fit %s, by which this host has %d of the job's ranks",
                            names->local_rank, launch->local_rank, names->local_ranks, launch->local_ranks);
    if (launch->local_ranks > launch->ranks)
        return error_format(error,
                            "%s in the environment says that this host has %d ranks, of %d in the whole job (%s)",
                            names->local_ranks, launch->local_ranks, launch->ranks, names->ranks);
    return NULL;
}

// Sets and checks the four rank fields by the launcher's variables. If local_ranks is not set, it is local_rank + 1.
static const char *launch_by_variables(struct launch *launch, const struct launch_variables *names,
                                       struct error_text *error) {
    const char *problem = launch_ranks(launch, names, error);
    if (!problem)
        problem = launch_number(&launch->local_ranks, names->local_ranks, launch->local_rank + 1, error);
    return problem ? problem : launch_check_local(launch, names, error);
}

// The number of tasks on a step's node (from 0) by a text: "4(x2),3" means 4, 4 and 3. 0: malformed or too short.
static int launch_tasks_of_node(const char *text, int node) {
    while (*text) {
        unsigned tasks = 0, times = 1;
        int length = 0;
        if (*text < '0' || *text > '9' || sscanf(text, "%9u%n", &tasks, &length) != 1)
            return 0;
        text += length;
        length = 0;
        if (*text == '(' && (sscanf(text, "(x%9u)%n", &times, &length) != 1 || length == 0))
            return 0;
        text += length;
        if (node < (int)times)
            return (int)tasks;
        node -= (int)times;
        if (*text && (*text != ',' || !*++text))
            return 0;
    }
    return 0;
}

// host (host_bytes) = the first host of a list: node003 of "node[003-008,11],x7". False: none, malformed or too long.
static bool launch_first_host(char *host, size_t host_bytes, const char *list) {
    size_t length = 0;
    while (*list && *list != ',') {
        const char *from = list;
        size_t bytes = 1;
        if (*list == '[') {
            const char *const end = strchr(list, ']');
            if (!end)
                return false;
            from = list + 1;
            bytes = strcspn(from, "-,]");
            if (bytes == 0)
                return false;
            list = end;
        } else if (*list == ']')
            return false;
        list++;
        if (length + bytes >= host_bytes)
            return false;
        memcpy(host + length, from, bytes);
        length += bytes;
    }
    host[length] = '\0';
    return length > 0;
}

// Sets launch->local_ranks to the step's tasks on this node, or to local_rank + 1 if not known. Checks local_rank.
static const char *launch_slurm_local(struct launch *launch, const struct launch_variables *names,
                                      struct error_text *error) {
    struct launch_variables local = *names;
    if (!getenv(local.local_ranks))
        local.local_ranks = "SLURM_NTASKS_PER_NODE";
    const char *const tasks = getenv(local.local_ranks);
    int node = 0;
    const char *const problem = launch_number(&node, "SLURM_NODEID", 0, error);
    if (problem)
        return problem;
    // SLURM_NTASKS_PER_NODE is one number for all nodes, and may be more than the step has tasks.
    const bool of_step = local.local_ranks == names->local_ranks;
    launch->local_ranks = !tasks ? launch->local_rank + 1 : launch_tasks_of_node(tasks, of_step ? node : 0);
    if (tasks && launch->local_ranks == 0)
        return error_format(error, "%s=%s in the environment does not say how many tasks node %d has",
                            local.local_ranks, tasks, node);
    if (!of_step && launch->local_ranks > launch->ranks)
        launch->local_ranks = launch->ranks;
    return launch_check_local(launch, &local, error);
}

// *id = the number in `text`, the value of Slurm's variable `name`. text NULL: it is not set, which is an error.
static const char *launch_slurm_id(uint64_t *id, const char *name, const char *text, struct error_text *error) {
    if (!text)
        return error_format(error, "the environment variable %s is not set", name);
    return launch_parse_number(id, text, UINT64_MAX)
               ? NULL
               : error_format(error, "%s=%s in the environment is not a number", name, text);
}

// Sets rank 0's address, from three variables that are the same on every rank.
static const char *launch_slurm_address(struct launch *launch, struct error_text *error) {
    const char *const nodes = getenv("SLURM_STEP_NODELIST");
    const char *const step_text = getenv("SLURM_STEP_ID");
    uint64_t job = 0, step = 0;
    const char *problem = launch_slurm_id(&job, "SLURM_JOB_ID", getenv("SLURM_JOB_ID"), error);
    if (!problem)
        problem = launch_slurm_id(&step, "SLURM_STEP_ID", step_text ? step_text : "0", error);
    if (problem)
        return problem;
    if (!nodes)
        return error_format(error, "the environment variable SLURM_STEP_NODELIST is not set");
    if (!launch_first_host(launch->host, sizeof launch->host, nodes))
        return error_format(error, "SLURM_STEP_NODELIST=%s in the environment does not name a host", nodes);
    launch->port = LAUNCH_FIRST_PORT + (int)((job % LAUNCH_PORTS * 37 + step % LAUNCH_PORTS) % LAUNCH_PORTS);
    return NULL;
}

// Sets the four rank fields from the Slurm step's variables, and rank 0's address if the step has several ranks.
static const char *launch_by_slurm(struct launch *launch, struct error_text *error) {
    static const struct launch_variables names = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                                                  "SLURM_STEP_TASKS_PER_NODE"};
    const char *problem = launch_ranks(launch, &names, error);
    if (!problem)
        problem = launch_slurm_local(launch, &names, error);
    if (!problem && launch->ranks > 1)
        problem = launch_slurm_address(launch, error);
    return problem;
}

// Whether MPICH's mpirun started this process: it sets PMI_SIZE, but srun --mpi=pmi2 does too. In a Slurm step only
// MPI_LOCALRANKID tells, since MPICH's mpirun starts its own helpers by srun, one per node.
static bool launch_is_mpich(void) {
    return getenv("PMI_SIZE") && (getenv("MPI_LOCALRANKID") || !getenv("SLURM_STEP_NUM_TASKS"));
}

bool launched_by_mpirun(void) { return getenv("OMPI_COMM_WORLD_SIZE") || launch_is_mpich(); }

// Sets kind, the rank fields and, for srun, rank 0's address. Without mpirun or srun, kind stays LAUNCH_SINGLE.
static const char *launch_by_launcher(struct launch *launch, struct error_text *error) {
    static const struct launch_variables open_mpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                                     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
    static const struct launch_variables mpich = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
    if (launched_by_mpirun()) {
        launch->kind = LAUNCH_MPI;
        return launch_by_variables(launch, getenv("OMPI_COMM_WORLD_SIZE") ? &open_mpi : &mpich, error);
    }
    if (getenv("SLURM_STEP_NUM_TASKS")) {
        launch->kind = LAUNCH_SLURM;
        return launch_by_slurm(launch, error);
    }
    return NULL;
}

// Parses HOST:PORT, where HOST is a name, an IPv4 address, or an IPv6 address in brackets, into launch->host and port.
static const char *launch_address(struct launch *launch, const char *text, struct error_text *error) {
    const char *const colon = strrchr(text, ':');
    const char *from = text, *to = colon;
    uint64_t port = 0;
    if (colon && *text == '[' && colon > text + 1 && colon[-1] == ']') {
        from = text + 1;
        to = colon - 1;
    } else if (colon && memchr(text, ':', (size_t)(colon - text)))
        return error_format(error, "--rendezvous %s: an IPv6 address stands in brackets, as in [::1]:29500", text);
    if (!colon || from == to || (size_t)(to - from) >= sizeof launch->host ||
        !launch_parse_number(&port, colon + 1, 65535) || port == 0)
        return error_format(error,
                            "--rendezvous %s: expected HOST:PORT, the host of rank 0 and a port from 1 to 65535 that "
                            "is free there, as in node1:29500",
                            text);
    snprintf(launch->host, sizeof launch->host, "%.*s", (int)(to - from), from);
    launch->port = (int)port;
    return NULL;
}

static const struct launch_variables launch_torchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};

// Sets kind, the rank fields by torchrun's variables or else by mpirun or srun, and `rendezvous` as rank 0's address.
static const char *launch_by_rendezvous(struct launch *launch, const char *rendezvous, struct error_text *error) {
    const char *problem;
    if (getenv("RANK"))
        problem = launch_by_variables(launch, &launch_torchrun, error);
    else {
        problem = launch_by_launcher(launch, error);
        if (!problem && launch->kind == LAUNCH_SINGLE)
            return error_format(error,
                                "--rendezvous %s: needs RANK and WORLD_SIZE (and LOCAL_RANK, where a host has several "
                                "ranks) in the environment, or mpirun or srun, to know which rank this is",
                                rendezvous);
    }
    launch->kind = LAUNCH_RENDEZVOUS;
    return problem ? problem : launch_address(launch, rendezvous, error);
}

// Returns an error if WORLD_SIZE says that there are more ranks: without --rendezvous each would run a job of its own.
static const char *launch_check_single(struct error_text *error) {
    int ranks = 1;
    const char *const problem = launch_number(&ranks, launch_torchrun.ranks, 1, error);
    if (problem || ranks <= 1)
        return problem;
    return error_format(error,
                        "WORLD_SIZE=%d in the environment says that this is one of several ranks; give --rendezvous "
                        "HOST:PORT, where rank 0 listens, or start them by mpirun or srun, or unset WORLD_SIZE",
                        ranks);
}

const char *launch_find(struct launch *launch, const char *rendezvous, struct error_text *error) {
    memset(launch, 0, sizeof *launch);
    launch->ranks = launch->local_ranks = 1;
    const char *problem =
        *rendezvous ? launch_by_rendezvous(launch, rendezvous, error) : launch_by_launcher(launch, error);
    if (!problem && launch->kind == LAUNCH_SINGLE)
        problem = launch_check_single(error);
    if (!problem && launch->ranks == 1) {
        memset(launch, 0, sizeof *launch);
        launch->ranks = launch->local_ranks = 1;
    }
    return problem;
}
