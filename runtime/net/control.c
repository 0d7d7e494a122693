// The thread that owns a rank's control connections, the exchanges that it performs, and the calls of other threads.
#include "runtime/net/control.h"
#include <errno.h>       // errno
#include <poll.h>        // poll
#include <pthread.h>     // pthread_mutex_lock
#include <stdio.h>       // snprintf
#include <stdlib.h>      // malloc, on_exit
#include <string.h>      // memcpy, strerror
#include <sys/eventfd.h> // eventfd
#include <time.h>        // clock_gettime
#include <unistd.h>      // read, write, getpid, _exit

#include "runtime/machine/before_exit.h"  // before_exit_finish
#include "runtime/machine/signals.h"      // signals_start_thread
#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/machine/error.h"        // fail, EXIT_USAGE
#include "runtime/net/control_internal.h" // struct control
#include "runtime/net/sockets.h"          // socket_listen

enum {
    START_S = 300, // timeout for all ranks to connect where the user gave none: hosts and containers start slowly
    CLOSE_S = 2,   // timeout for all to close after the last goodbye
};
static const double HEARTBEAT_S = 0.25; // between heartbeats, or an eighth of the timeout where that is less

static void copy_name(char name[CONTROL_NAME], const char *text) { snprintf(name, CONTROL_NAME, "%s", text); }

// Wakes the thread, from any other, so that it serves what the caller has changed under the mutex.
static void control_wake(struct control *c) {
    const uint64_t one = 1;
    while (write(c->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

// ---- exchanges, in the thread ----

// Returns memory of `bytes`, which may be 0; free() frees it. Ends the job where there is none.
static void *control_allocate(struct control *c, size_t bytes) {
    void *const memory = malloc(bytes + 1);
    if (!memory)
        control_end_out_of_memory(c, bytes);
    return memory;
}

// Returns the bytes of the result of this rank's exchange. The caller holds the mutex.
static size_t control_result_bytes(const struct control *c) {
    return c->exchange.operation == CONTROL_ALL_GATHER ? (size_t)c->ranks * c->exchange.bytes : c->exchange.bytes;
}

// Whether `other` contributes to this rank's exchange; if not, programs or options differ. The caller holds the mutex.
static bool control_is_same_exchange(const struct control *c, const struct control_frame *other) {
    return other->number == c->exchanges && other->bytes == c->exchange.bytes &&
           other->operation == c->exchange.operation &&
           strncmp(other->report.exchange, c->exchange.name, CONTROL_NAME) == 0;
}

// Lets the thread that waits for the exchange go on. The caller holds the mutex.
static void control_exchange_done(struct control *c) {
    c->exchange.pending = false;
    pthread_cond_broadcast(&c->exchange_done);
}

// Completes rank 0's exchange if all others have contributed, and sends them the result. Frees the former result, which
// they must have received before. A contribution to another exchange ends the job. The caller holds the mutex.
static void control_complete(struct control *c) {
    const struct control_exchange *const x = &c->exchange;
    const size_t bytes = control_result_bytes(c);
    for (int r = 1; r < c->ranks; r++)
        if (!c->links[r].contributed)
            return;
    free(c->result);
    c->result = control_allocate(c, bytes);
    if (bytes > 0)
        memcpy(c->result, x->mine, x->bytes);
    for (int r = 1; r < c->ranks; r++) {
        struct control_link *const link = &c->links[r];
        if (!control_is_same_exchange(c, &link->contribution))
            control_end_mismatch(c, r);
        if (x->operation == CONTROL_ALL_GATHER && x->bytes > 0)
            memcpy((char *)c->result + (size_t)r * x->bytes, link->contribution_data, x->bytes);
        free(link->contribution_data);
        link->contribution_data = NULL;
        link->contributed = false;
    }
    control_send(c, CONTROL_RESULT, 0, c->result, bytes);
    if (bytes > 0)
        memmove(x->all, c->result, bytes);
    control_exchange_done(c);
}

// Queues the contribution of a rank other than 0. exchange.mine must stay until it is sent. The caller holds the mutex.
static void control_queue_contribution(struct control *c) {
    struct control_exchange *const x = &c->exchange;
    struct control_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = CONTROL_CONTRIBUTION;
    frame.operation = x->operation;
    frame.number = c->exchanges;
    frame.bytes = x->bytes;
    frame.payload_bytes = x->operation == CONTROL_ALL_GATHER ? x->bytes : 0;
    frame.report = c->links[c->rank].report;
    frame.report.exchanges = c->exchanges;
    memcpy(frame.report.exchange, x->name, CONTROL_NAME);
    frame.report.in_exchange = true;
    frame.report.patient = x->patient;
    frame.report.exchange_s = 0;
    control_link_add(&c->links[0], &frame, x->mine);
    x->sent = true;
}

// Does what it can for the exchange, goodbye or exit that callers ask for. Takes the mutex. False: the thread must end.
static bool control_serve(struct control *c) {
    bool all_said_goodbye = true;
    pthread_mutex_lock(&c->mutex);
    if (c->exchange.pending && c->rank == 0)
        control_complete(c);
    else if (c->exchange.pending && !c->exchange.sent)
        control_queue_contribution(c);
    const bool closing = c->closing;
    const int exit_status = c->exit_status;
    pthread_mutex_unlock(&c->mutex);
    if (exit_status) {
        control_send(c, CONTROL_ABORT, exit_status, NULL, 0);
        return false;
    }
    for (int r = 1; r < c->ranks && c->rank == 0; r++)
        all_said_goodbye = all_said_goodbye && c->links[r].said_goodbye;
    if (closing && all_said_goodbye && !c->links[c->rank].said_goodbye) {
        c->links[c->rank].said_goodbye = true;
        control_send(c, CONTROL_GOODBYE, 0, NULL, 0);
    }
    return !c->all_closed && !(c->rank == 0 && c->links[0].said_goodbye);
}

// ---- receiving ----

// Whether the frame that came from rank r, links[r].in, is one that r may send now. Rank 0 sends results, others send
// contributions, even before rank 0 begins the exchange. Takes the mutex.
static bool control_frame_is_allowed(struct control *c, int r) {
    const struct control_frame *const frame = &c->links[r].in;
    const bool from_0 = r == 0;
    uint64_t result_bytes = 0;
    bool awaits_result = false;
    switch ((enum control_type)frame->type) {
    case CONTROL_HEARTBEAT:
    case CONTROL_GOODBYE: return frame->payload_bytes == 0;
    case CONTROL_ABORT: // has the status with which to end
        return frame->payload_bytes == 0 && frame->operation >= 1 && frame->operation <= 255;
    case CONTROL_CONTRIBUTION:
        return !from_0 && !c->links[r].contributed && frame->payload_bytes <= CONTROL_MAX_BYTES &&
               frame->payload_bytes == (frame->operation == CONTROL_ALL_GATHER ? frame->bytes : 0);
    case CONTROL_RESULT:
        pthread_mutex_lock(&c->mutex);
        awaits_result = c->exchange.pending && c->exchange.sent;
        result_bytes = control_result_bytes(c);
        pthread_mutex_unlock(&c->mutex);
        return from_0 && awaits_result && frame->payload_bytes == result_bytes;
    case CONTROL_WELCOME: return false; // it was received at the start
    }
    return false;
}

// Ends the job if rank r may not send the frame links[r].in. Terminates its names, for printing. Takes the mutex.
static void control_check_frame(struct control *c, int r) {
    struct control_report *const report = &c->links[r].in.report;
    report->collective[CONTROL_NAME - 1] = report->exchange[CONTROL_NAME - 1] = '\0';
    if (!control_frame_is_allowed(c, r))
        control_end_wrong_frame(c, r);
}

// Sets where a payload is received: a contribution in new memory, a result in the exchange's `all`. Takes the mutex.
static void control_place_payload(struct control *c, struct control_link *link) {
    if (c->rank == 0) {
        link->in_payload = link->contribution_data = control_allocate(c, link->in.payload_bytes);
        return;
    }
    pthread_mutex_lock(&c->mutex); // the caller waits in the exchange, so its memory stays valid
    link->in_payload = c->exchange.all;
    pthread_mutex_unlock(&c->mutex);
}

// Does what rank r's checked frame asks for, and stores its report. An abort ends this process; on rank 0, the job.
static void control_handle(struct control *c, int r) {
    struct control_link *const link = &c->links[r];
    link->report = link->in.report;
    switch ((enum control_type)link->in.type) {
    case CONTROL_HEARTBEAT: // carries only the report
    case CONTROL_WELCOME:   // comes only at the start
        break;
    case CONTROL_CONTRIBUTION:
        link->contribution = link->in;
        link->contributed = true;
        break;
    case CONTROL_RESULT:
        pthread_mutex_lock(&c->mutex);
        control_exchange_done(c);
        pthread_mutex_unlock(&c->mutex);
        break;
    case CONTROL_GOODBYE:
        link->said_goodbye = true;
        c->all_closed = c->rank != 0;
        break;
    case CONTROL_ABORT:
        if (c->rank == 0)
            control_end_lost_rank(c, r, (int)link->in.operation);
        before_exit_finish(ABORT_SAVE_S);
        _exit((int)link->in.operation);
    }
}

// Receives and handles the frames of a rank that have arrived. A connection closed without a goodbye ends the job.
static void control_receive(struct control *c, int r) {
    struct control_link *const link = &c->links[r];
    while (!c->all_closed) {
        switch (control_link_receive(link)) {
        case CONTROL_NOTHING: return;
        case CONTROL_HEAD:
            control_check_frame(c, r);
            control_place_payload(c, link);
            break;
        case CONTROL_WHOLE:
            control_check_frame(c, r);
            control_handle(c, r);
            break;
        case CONTROL_CLOSED:
            if (!link->said_goodbye)
                control_end_lost_rank(c, r, EXIT_FAILURE);
            control_link_close(link);
            return;
        }
    }
}

// ---- the thread ----

// Calls c->poll, queues a heartbeat, and ends the job if a rank is silent or late (control_watch). Reads the clock only
// once, first: after a suspension in here, ranks whose frames are not read yet would look late by a later time.
static void control_beat(struct control *c) {
    const double now_s = deadline_clock_s(), gap_s = now_s - c->heartbeat_s;
    c->suspended_s = c->timeout_s > 0 && gap_s > 0.5 * c->timeout_s ? gap_s : 0;
    c->heartbeat_s = now_s;
    pthread_mutex_lock(&c->poll_mutex);
    if (c->poll)
        c->poll(c->poll_context);
    pthread_mutex_unlock(&c->poll_mutex);
    control_report_own(c);
    control_send(c, CONTROL_HEARTBEAT, 0, NULL, 0);
    control_watch(c);
}

// Waits until something arrives, can be sent or is asked for, or a heartbeat is due. Then receives what has arrived.
static void control_wait(struct control *c) {
    uint64_t count;
    c->polls[0].fd = c->wake;
    c->polls[0].events = POLLIN;
    for (int r = 0; r < c->ranks; r++) {
        c->polls[1 + r].fd = c->links[r].socket;
        c->polls[1 + r].events = (short)(POLLIN | (c->links[r].waiting > 0 ? POLLOUT : 0));
    }
    if (poll(c->polls, (nfds_t)(1 + c->ranks), socket_poll_ms(c->heartbeat_s + c->heartbeat_interval_s)) <= 0)
        return;
    while (read(c->wake, &count, sizeof count) < 0 && errno == EINTR)
        ;
    for (int r = 0; r < c->ranks; r++)
        if (c->links[r].socket >= 0 && c->polls[1 + r].revents & ~POLLOUT)
            control_receive(c, r);
}

// Runs the thread until control_serve says that it must end. argument: the struct control.
static void *control_run(void *argument) {
    struct control *const c = (struct control *)argument;
    while (control_serve(c)) {
        if (deadline_clock_s() >= c->heartbeat_s + c->heartbeat_interval_s)
            control_beat(c);
        for (int r = 0; r < c->ranks; r++)
            control_link_send(&c->links[r]);
        control_wait(c);
    }
    if (c->rank == 0 || !c->all_closed) // the others where they exit with an error
        control_flush_and_drain(c, CLOSE_S);
    return NULL;
}

static const char *control_start_thread(struct control *c, struct error_text *error) {
    const int problem = signals_start_thread(&c->thread, control_run, c);
    return problem
               ? error_format(error, "rank %d: no thread for the control connections: %s", c->rank, strerror(problem))
               : NULL;
}

// ---- opening ----

const char *control_listen(struct control_address *address, int *listener, struct error_text *error) {
    memset(address, 0, sizeof *address);
    *listener = socket_listen(NULL, 0);
    if (*listener < 0)
        return error_format(error, "rank 0 cannot listen for the other ranks: %s", strerror(errno));
    socket_address_own(&address->at, *listener);
    return random_bytes_of_system(address->key, sizeof address->key)
               ? NULL
               : error_format(error, "no random number for the job: %s", strerror(errno));
}

// Opens rank 0's listening socket at the launch's port. Listens at the launch's address if that is numeric and this
// host's, else at all addresses, since a name may mean another address here than on other hosts.
static const char *control_listen_at(struct control *c, const struct launch *launch, struct error_text *error) {
    c->listener = socket_listen(launch->host, launch->port);
    if (c->listener < 0 && errno == EADDRNOTAVAIL)
        c->listener = socket_listen(NULL, launch->port);
    if (c->listener < 0)
        return error_format(error,
                            "rank 0 cannot listen at port %d of this host: %s; give another by --rendezvous HOST:PORT",
                            launch->port, strerror(errno));
    return NULL;
}

// Closes the connections, but not the listener, and frees c. No thread or exit function (at_exit) may use c anymore.
static void control_free(struct control *c) {
    for (int r = 0; r < c->ranks && c->links; r++) {
        control_link_close(&c->links[r]);
        free(c->links[r].contribution_data);
    }
    if (c->wake >= 0)
        close(c->wake);
    free(c->result);
    free(c->peers);
    free(c->links);
    free(c->polls);
    pthread_mutex_destroy(&c->mutex);
    pthread_mutex_destroy(&c->poll_mutex);
    pthread_cond_destroy(&c->exchange_done);
    free(c);
}

// Fills in the zeroed c, without sockets or a thread. control_free frees c, after an error too. address NULL: launch's.
static const char *control_prepare(struct control *c, const struct launch *launch,
                                   const struct control_address *address, int listener, double timeout_s,
                                   struct error_text *error) {
    c->rank = launch->rank;
    c->ranks = launch->ranks;
    c->timeout_s = timeout_s;
    c->heartbeat_interval_s = timeout_s > 0 && timeout_s / 8 < HEARTBEAT_S ? timeout_s / 8 : HEARTBEAT_S;
    pthread_mutex_init(&c->mutex, NULL);
    pthread_mutex_init(&c->poll_mutex, NULL);
    pthread_cond_init(&c->exchange_done, NULL);
    c->pid = getpid();
    c->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->peers = (struct control_peer *)calloc((size_t)c->ranks, sizeof *c->peers);
    c->links = (struct control_link *)calloc((size_t)c->ranks, sizeof *c->links);
    c->polls = (struct pollfd *)calloc((size_t)c->ranks + 1, sizeof *c->polls);
    for (int r = 0; r < c->ranks && c->links; r++)
        c->links[r].socket = -1;
    c->listener = listener;
    if (address)
        c->address = *address;
    else {
        snprintf(c->address.at.host, sizeof c->address.at.host, "%s", launch->host);
        c->address.at.port = launch->port;
    }
    memcpy(c->key.job, c->address.key, sizeof c->key.job);
    memcpy(c->key.secret, launch->secret, sizeof c->key.secret);
    if (!c->peers || !c->links || !c->polls || c->wake < 0)
        return error_format(error, "rank %d: out of memory or files for %d ranks", c->rank, c->ranks);
    return NULL;
}

// Connects the ranks. If rank 0 fails, it tells the ranks that have connected, and they exit in here.
static const char *control_connect(struct control *c, double start_s, struct error_text *error) {
    int status = 0;
    const char *const problem =
        c->rank == 0 ? control_gather_ranks(c, start_s, error) : control_join_rank_0(c, start_s, &status, error);
    if (status)
        _exit(status); // rank 0 has printed why
    if (c->rank == 0) {
        if (!problem)
            control_send(c, CONTROL_WELCOME, 0, c->peers, (size_t)c->ranks * sizeof *c->peers);
        else {
            control_send(c, CONTROL_ABORT, EXIT_USAGE, NULL, 0); // with which callers fail
            control_flush_and_drain(c, CLOSE_S);
        }
    }
    return problem;
}

// Passes the status of a failed exit, as fail's, through rank 0 to the other ranks, which exit with it: a launcher
// returns the first that is not 0. Does nothing for status 0, in a child, or after control_close. argument: c->at_exit.
static void control_on_exit(int status, void *argument) {
    struct control *const c = *(struct control **)argument;
    struct timespec until;
    if (!c || c->pid != getpid() || status == 0)
        return;
    if (pthread_equal(pthread_self(), c->thread)) {
        control_abort_others(c, status);
        return;
    }
    pthread_mutex_lock(&c->mutex);
    c->exit_status = status;
    pthread_mutex_unlock(&c->mutex);
    control_wake(c);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += CLOSE_S + 1;
    pthread_timedjoin_np(c->thread, NULL, &until);
}

// Makes exit() call control_on_exit until control_close. Does nothing when out of memory.
static void control_register_exit(struct control *c) {
    c->at_exit = (struct control **)malloc(sizeof *c->at_exit);
    if (!c->at_exit)
        return;
    *c->at_exit = c;
    on_exit(control_on_exit, c->at_exit);
}

// Opens the connections as control_open does. start_s: within how many seconds all ranks must have connected.
static const char *control_open_within(struct control **control, const struct launch *launch,
                                       const struct control_address *address, int listener, double timeout_s,
                                       double start_s, struct error_text *error) {
    *control = NULL;
    if (launch->ranks == 1)
        return NULL;
    struct control *const c = (struct control *)calloc(1, sizeof *c);
    if (!c)
        return error_format(error, "rank %d: out of memory for the control connections", launch->rank);
    const char *problem = control_prepare(c, launch, address, listener, timeout_s, error);
    if (!problem && c->rank == 0 && !address)
        problem = control_listen_at(c, launch, error);
    if (!problem)
        problem = control_connect(c, start_s, error);
    c->heartbeat_s = deadline_clock_s();
    for (int r = 0; r < c->ranks && c->links; r++)
        c->links[r].heard_s = c->heartbeat_s;
    if (!problem)
        problem = control_start_thread(c, error);
    if (problem) {
        control_free(c);
        return problem;
    }
    control_register_exit(c);
    *control = c;
    return NULL;
}

const char *control_open(struct control **control, const struct launch *launch, const struct control_address *address,
                         int listener, double timeout_s, struct error_text *error) {
    const double start_s = timeout_s > 0 ? timeout_s : (double)START_S;
    return control_open_within(control, launch, address, listener, timeout_s, start_s, error);
}

struct handshake_key control_key(const struct control *c) {
    struct handshake_key none;
    memset(&none, 0, sizeof none);
    return c ? c->key : none;
}

void control_close(struct control *c) {
    if (!c)
        return;
    pthread_mutex_lock(&c->mutex);
    c->closing = true;
    pthread_mutex_unlock(&c->mutex);
    control_wake(c);
    pthread_join(c->thread, NULL);
    if (c->at_exit)
        *c->at_exit = NULL; // the registered exit function still points there, so it is not freed
    control_free(c);
}

// ---- what callers ask for ----

// Hands the exchange to the thread and waits until it is done. The thread uses `all` and `mine` until then.
static void control_exchange_run(struct control *c, enum control_operation operation, void *all, const void *mine,
                                 size_t bytes, const char *what, bool patient) {
    struct control_exchange *const x = &c->exchange;
    pthread_mutex_lock(&c->mutex);
    x->operation = operation;
    x->all = all;
    x->mine = mine;
    x->bytes = bytes;
    x->patient = patient;
    x->sent = false;
    x->since_s = deadline_clock_s();
    copy_name(x->name, what);
    x->pending = true;
    c->exchanges++;
    pthread_mutex_unlock(&c->mutex);
    control_wake(c);
    pthread_mutex_lock(&c->mutex);
    while (x->pending)
        pthread_cond_wait(&c->exchange_done, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
}

void control_all_gather(struct control *c, void *all, const void *mine, size_t bytes, const char *what, bool patient) {
    if (bytes > CONTROL_MAX_BYTES)
        fail("%s: %zu bytes of a rank, of at most %llu in an exchange", what, bytes,
             (unsigned long long)CONTROL_MAX_BYTES);
    if (c)
        control_exchange_run(c, CONTROL_ALL_GATHER, all, mine, bytes, what, patient);
    else if (bytes > 0)
        memmove(all, mine, bytes);
}

void control_broadcast(struct control *c, void *data, size_t bytes, const char *what, bool patient) {
    if (c)
        control_exchange_run(c, CONTROL_BROADCAST, data, data, bytes, what, patient);
}

// Waits until all ranks have called it with an equal `what`, for messages. patient: no timeout. c NULL: does not wait.
void control_barrier(struct control *c, const char *what, bool patient) {
    control_all_gather(c, NULL, NULL, 0, what, patient);
}

void control_collective_begun(struct control *c, const char *name) {
    if (!c)
        return;
    pthread_mutex_lock(&c->mutex);
    if (c->collectives_begun == c->collectives_done)
        c->collective_since_s = deadline_clock_s();
    copy_name(c->names[c->collectives_begun++ % CONTROL_IN_FLIGHT], name);
    pthread_mutex_unlock(&c->mutex);
}

void control_collective_done(struct control *c) {
    if (!c)
        return;
    pthread_mutex_lock(&c->mutex);
    c->collectives_done++;
    c->collective_since_s = deadline_clock_s(); // start of the next one's time, if it has begun
    pthread_mutex_unlock(&c->mutex);
}

void control_set_poll(struct control *c, void (*poll)(void *context), void *context) {
    if (!c)
        return;
    pthread_mutex_lock(&c->poll_mutex);
    c->poll = poll;
    c->poll_context = context;
    pthread_mutex_unlock(&c->poll_mutex);
}
