// Who a process is in its job, by what each launcher leaves in the environment; contradictions are refused.
#include "runtime/machine/error.h" // under test: fail
#include "runtime/net/launch.h"    // under test
#include "test/fails.h"            // assert_error
#include "test/testing.h"          // cmocka

// Calls launch_find with only these variables set. variables: "NAME=VALUE NAME=VALUE"; a name without "=" is set and
// empty.
static const char *find(struct launch *launch, const char *rendezvous, const char *variables,
                        struct error_text *error) {
    char copy[1024], *rest = NULL;
    const char *const output = getenv("CMOCKA_MESSAGE_OUTPUT"); // each line that the test itself prints depends on it
    char *const kept = output ? strdup(output) : NULL;
    assert_int_equal(clearenv(), 0);
    if (kept)
        assert_int_equal(setenv("CMOCKA_MESSAGE_OUTPUT", kept, 1), 0);
    free(kept);
    snprintf(copy, sizeof copy, "%s", variables);
    for (char *one = strtok_r(copy, " ", &rest); one; one = strtok_r(NULL, " ", &rest)) {
        char *const equals = strchr(one, '=');
        if (equals)
            *equals = '\0';
        assert_int_equal(setenv(one, equals ? equals + 1 : "", 1), 0);
    }
    return launch_find(launch, rendezvous, error);
}

// The part of Slurm's environment that the tasks of a step share.
#define STEP "SLURM_JOB_ID=4711 SLURM_STEP_ID=3 SLURM_STEP_NODELIST=node[003-008,11],x7 SLURM_STEP_NUM_TASKS="
#define OMPI "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
enum { STEP_PORT = 20000 + (4711 * 37 + 3) % 10007 };

struct launch_case {
    const char *rendezvous, *variables;
    struct launch expected;
};
static const struct launch_case cases[] = {
    // A process by itself: started by nobody, by a launcher of one, in a batch script, in a shell that asked for
    // nothing.
    {"", "", {LAUNCH_SINGLE, 0, 1, 0, 1, "", 0}},
    {"",
     "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0",
     {LAUNCH_SINGLE, 0, 1, 0, 1, "", 0}},
    {"", "PMI_RANK=0 PMI_SIZE=1", {LAUNCH_SINGLE, 0, 1, 0, 1, "", 0}},
    {"", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0", {LAUNCH_SINGLE, 0, 1, 0, 1, "", 0}},
    {"", "SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_JOB_ID=7 SLURM_NODELIST=a[1-2]", {LAUNCH_SINGLE, 0, 1, 0, 1, "", 0}},
    {"", "WORLD_SIZE=1 RANK=0", {LAUNCH_SINGLE, 0, 1, 0, 1, "", 0}},
    {"node1:29500", "WORLD_SIZE=1 RANK=0 LOCAL_RANK=0", {LAUNCH_SINGLE, 0, 1, 0, 1, "", 0}},
    // mpirun. A script's WORLD_SIZE for other programs does not matter, nor does Slurm around it.
    {"", OMPI, {LAUNCH_MPI, 5, 8, 1, 4, "", 0}},
    {"", OMPI "WORLD_SIZE=8", {LAUNCH_MPI, 5, 8, 1, 4, "", 0}},
    {"", OMPI STEP "2 SLURM_PROCID=1 SLURM_LOCALID=0", {LAUNCH_MPI, 5, 8, 1, 4, "", 0}},
    {"", "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", {LAUNCH_MPI, 3, 4, 1, 2, "", 0}},
    {"", "PMI_RANK=3 PMI_SIZE=4", {LAUNCH_MPI, 3, 4, 0, 1, "", 0}},
    {"",
     "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 " STEP "2 SLURM_PROCID=1 SLURM_LOCALID=0",
     {LAUNCH_MPI, 3, 4, 1, 2, "", 0}},
    // srun
    {"",
     STEP "11 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=4(x2),3",
     {LAUNCH_SLURM, 9, 11, 1, 3, "node003", STEP_PORT}},
    {"",
     STEP "11 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2),3",
     {LAUNCH_SLURM, 5, 11, 1, 4, "node003", STEP_PORT}},
    {"",
     STEP "8 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS_PER_NODE=4 WORLD_SIZE=8",
     {LAUNCH_SLURM, 5, 8, 1, 4, "node003", STEP_PORT}},
    {"",
     STEP "2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=4",
     {LAUNCH_SLURM, 1, 2, 1, 2, "node003", STEP_PORT}},
    {"", STEP "2 SLURM_PROCID=1", {LAUNCH_SLURM, 1, 2, 0, 1, "node003", STEP_PORT}},
    {"",
     STEP "2 SLURM_PROCID=1 SLURM_LOCALID=1 PMI_RANK=1 PMI_SIZE=2",
     {LAUNCH_SLURM, 1, 2, 1, 2, "node003", STEP_PORT}},
    {"",
     "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=18446744073709551615 SLURM_STEP_NODELIST=alpha,beta",
     {LAUNCH_SLURM, 0, 2, 0, 1, "alpha", 20000 + (int)(18446744073709551615u % 10007 * 37 % 10007)}},
    {"",
     "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=rack[2,4-5]n[07-09]-ib,z",
     {LAUNCH_SLURM, 0, 2, 0, 1, "rack2n07-ib", 20037}},
    // --rendezvous
    {"node1:29500",
     "RANK=3 WORLD_SIZE=16 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8",
     {LAUNCH_RENDEZVOUS, 3, 16, 3, 8, "node1", 29500}},
    {"[::1]:29500", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", {LAUNCH_RENDEZVOUS, 1, 2, 1, 2, "::1", 29500}},
    {"10.0.0.1:1", "RANK=1 WORLD_SIZE=2", {LAUNCH_RENDEZVOUS, 1, 2, 0, 1, "10.0.0.1", 1}},
    {"h:65535", OMPI "RANK=1 WORLD_SIZE=2", {LAUNCH_RENDEZVOUS, 1, 2, 0, 1, "h", 65535}},
    {"h:65535", OMPI "WORLD_SIZE=2", {LAUNCH_RENDEZVOUS, 5, 8, 1, 4, "h", 65535}},
    {"h:65535", STEP "2 SLURM_PROCID=1 WORLD_SIZE=2", {LAUNCH_RENDEZVOUS, 1, 2, 0, 1, "h", 65535}},
};
static void launches(void **state) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct launch_case *const c = &cases[i];
        struct launch launch;
        struct error_text error;
        const char *const problem = find(&launch, c->rendezvous, c->variables, &error);
        if (problem || launch.kind != c->expected.kind || launch.rank != c->expected.rank ||
            launch.ranks != c->expected.ranks || launch.local_rank != c->expected.local_rank ||
            launch.local_ranks != c->expected.local_ranks || launch.port != c->expected.port ||
            strcmp(launch.host, c->expected.host) != 0)
            fail_msg("'%s' '%s': kind %d, rank %d of %d, local %d of %d, '%s' %d: %s", c->rendezvous, c->variables,
                     (int)launch.kind, launch.rank, launch.ranks, launch.local_rank, launch.local_ranks, launch.host,
                     launch.port, problem ? problem : "no error");
    }
}

// Checks a process whose job has one rank, but whose output goes through mpirun.
static void by_mpirun(void **state) {
    static const char *const mpirun[] = {OMPI, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "PMI_RANK=0 PMI_SIZE=1",
                                         OMPI STEP "2 SLURM_PROCID=1"};
    static const char *const others[] = {"", "RANK=0 WORLD_SIZE=1", STEP "1 SLURM_PROCID=0", STEP "2 SLURM_PROCID=1",
                                         STEP "2 SLURM_PROCID=1 PMI_RANK=1 PMI_SIZE=2"};
    struct launch launch;
    struct error_text error;
    for (size_t i = 0; i < sizeof mpirun / sizeof *mpirun; i++) {
        find(&launch, "", mpirun[i], &error);
        assert_true(launched_by_mpirun());
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        find(&launch, "", others[i], &error);
        assert_false(launched_by_mpirun());
    }
}

static void refused(void **state) {
    static const char *const wrong[][3] = {
        // rendezvous, variables, a part of the message
        {"", "WORLD_SIZE=2 RANK=0", "WORLD_SIZE=2"},
        {"", "WORLD_SIZE=2 RANK=0", "--rendezvous"},
        {"", "WORLD_SIZE=two", "WORLD_SIZE=two"},
        {"node1:29500", "", "RANK and WORLD_SIZE"},
        {"node1:29500", "WORLD_SIZE=2", "RANK and WORLD_SIZE"},
        {"node1:29500", "RANK=0", "WORLD_SIZE is not set"},
        {"node1:29500", "RANK=2 WORLD_SIZE=2", "RANK=2 in the environment does not fit WORLD_SIZE=2"},
        {"node1:29500", "RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0"},
        {"node1:29500", "RANK=-1 WORLD_SIZE=2", "RANK=-1"},
        {"node1:29500", "RANK=+1 WORLD_SIZE=2", "RANK=+1"},
        {"node1:29500", "RANK=1x WORLD_SIZE=2", "RANK=1x"},
        {"node1:29500", "RANK WORLD_SIZE=2", "RANK= "},
        {"node1:29500", "RANK=1 WORLD_SIZE=2147483648", "WORLD_SIZE=2147483648"},
        {"node1:29500", "RANK=1 WORLD_SIZE=99999999999999999999", "WORLD_SIZE=99999999999999999999"},
        {"node1:29500", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", "LOCAL_RANK=1"},
        {"node1:29500", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE"},
        {"node1:29500", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=one", "LOCAL_RANK=one"},
        {"", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK is not set"},
        {"", "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_RANK=2"},
        {"", "PMI_SIZE=2 PMI_RANK=7", "PMI_RANK=7"},
        {"", STEP "2", "SLURM_PROCID is not set"},
        {"", STEP "2 SLURM_PROCID=2", "SLURM_PROCID=2"},
        {"", STEP "4 SLURM_PROCID=2 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=2(x2)", "SLURM_LOCALID=2"},
        {"", STEP "4 SLURM_PROCID=2 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=2(x2)", "SLURM_STEP_TASKS_PER_NODE=2(x2)"},
        {"", STEP "4 SLURM_PROCID=2 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2,", "SLURM_STEP_TASKS_PER_NODE=2,"},
        {"", STEP "4 SLURM_PROCID=2 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x", "SLURM_STEP_TASKS_PER_NODE=2(x"},
        {"", STEP "4 SLURM_PROCID=2 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x2", "SLURM_STEP_TASKS_PER_NODE=2(x2"},
        {"", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_STEP_NODELIST=a", "SLURM_JOB_ID is not set"},
        {"", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1_2 SLURM_STEP_NODELIST=a", "SLURM_JOB_ID=1_2"},
        {"", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1", "SLURM_STEP_NODELIST is not set"},
        {"", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=a[1-2", "NODELIST=a[1-2"},
        {"", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=a[]", "NODELIST=a[]"},
        {"", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=a]", "NODELIST=a]"},
        {"", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=,a", "NODELIST=,a"},
        {"node1", "RANK=1 WORLD_SIZE=2", "--rendezvous node1:"},
        {":29500", "RANK=1 WORLD_SIZE=2", "expected HOST:PORT"},
        {"node1:", "RANK=1 WORLD_SIZE=2", "expected HOST:PORT"},
        {"node1:0", "RANK=1 WORLD_SIZE=2", "expected HOST:PORT"},
        {"node1:65536", "RANK=1 WORLD_SIZE=2", "expected HOST:PORT"},
        {"node1:http", "RANK=1 WORLD_SIZE=2", "expected HOST:PORT"},
        {"::1:29500", "RANK=1 WORLD_SIZE=2", "brackets"},
        {"[]:29500", "RANK=1 WORLD_SIZE=2", "expected HOST:PORT"},
        {"[::1]", "RANK=1 WORLD_SIZE=2", "brackets"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct launch launch;
        struct error_text error;
        assert_error(find(&launch, wrong[i][0], wrong[i][1], &error), wrong[i][2]);
    }
}

// Checks that a name longer than its room is refused, not cut: half a name may be another host's.
static void long_names(void **state) {
    char name[600], list[700];
    struct launch launch;
    struct error_text error;
    memset(name, 'a', sizeof name);
    for (int length = 254; length <= 257; length++) {
        snprintf(list, sizeof list, "%.*s:29500", length, name);
        const char *problem = find(&launch, list, "RANK=1 WORLD_SIZE=2", &error);
        assert_int_equal(problem == NULL, length <= 255);
        assert_true(problem || strlen(launch.host) == (size_t)length);
        snprintf(list, sizeof list, STEP "2 SLURM_PROCID=1 SLURM_STEP_NODELIST=%.*s[1-2]", length - 1, name);
        problem = find(&launch, "", list, &error);
        assert_int_equal(problem == NULL, length <= 255);
        assert_true(problem || (strlen(launch.host) == (size_t)length && launch.host[length - 1] == '1'));
    }
}

// Makes a mistake, whose message says whose it is where a job has several ranks.
static void make_mistake(void *variables) {
    struct launch launch;
    struct error_text error;
    find(&launch, "", (const char *)variables, &error);
    fail("no such file");
}
static void whose_mistake(void **state) {
    static const char *const said[][2] = {
        {"", "train_gpt: no such file"},
        {"RANK=0 WORLD_SIZE=1", "train_gpt: no such file"},
        {"SLURM_PROCID=0 SLURM_NTASKS=4", "train_gpt: no such file"},
        {"RANK=0 WORLD_SIZE=2", "train_gpt: rank 0: no such file"},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", "train_gpt: rank 1: no such file"},
        {"PMI_RANK=0 PMI_SIZE=2", "train_gpt: rank 0: no such file"},
        {STEP "4 SLURM_PROCID=0", "train_gpt: rank 0: no such file"},
    };
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        assert_fails(make_mistake, (void *)(uintptr_t)said[i][0], said[i][1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(launches),   cmocka_unit_test(by_mpirun),     cmocka_unit_test(refused),
        cmocka_unit_test(long_names), cmocka_unit_test(whose_mistake),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
