// The control connections: every rank to rank 0, for small exchanges between all ranks, and for the watch over the job.
//
// A thread in each rank owns its connections. What the others do reaches rank 0 as a heartbeat, several times a second,
// and rank 0 decides:
//   - a connection closes without a goodbye: that rank died, was killed, or ended itself
//   - a collective, or an exchange that is not patient, is unfinished for longer than the timeout
//   - a rank's heartbeats are missing for longer than the timeout: it is stopped, or its host is gone
// Then it prints one line that names the rank and what it was in, tells the others, and all end by _exit, since whatever
// they were in may never return. When rank 0 itself ends or falls silent the others notice, and rank 1 prints the line.
// A process that is stopped (SIGSTOP) can't end itself: it does when it goes on, or by the launcher, which kills what
// remains of a job when one of its processes has failed.
//
// An exchange goes to rank 0 and comes back from there, so none is done before every rank has begun it. A patient one may
// wait for as long as the others live.
#pragma once
#include <limits.h>      // INT_MAX
#include <pthread.h>     // pthread_create
#include <signal.h>      // sigfillset
#include <stdarg.h>      // va_list
#include <stdlib.h>      // malloc, on_exit
#include <sys/eventfd.h> // eventfd

#include "runtime/net/control_start.h" // control_gather_ranks
#include "runtime/net/launch.h"        // struct launch

enum {
    CONTROL_IN_FLIGHT = 1024, // collectives begun and not done whose names are kept
    CONTROL_START_S = 300,    // for all ranks to come, where there is no timeout: hosts and containers take their time
    CONTROL_NAMED = 4,        // ranks that a line describes; it counts the others
    CONTROL_EXIT_S = 2,       // at most, for all to close after the last goodbye
};
static const double CONTROL_BEAT_S = 0.25; // between heartbeats, or an eighth of the timeout where that is less
static const double CONTROL_ABORT_S = 0.5; // at most, for an abort to reach the others: one of them may be stopped

enum control_operation { CONTROL_ALL_GATHER, CONTROL_BROADCAST };

// What this rank's caller has asked for.
struct control_exchange {
    bool pending, sent, patient;
    enum control_operation operation;
    void *all;
    const void *mine;
    size_t bytes;
    double since_s;
    char name[CONTROL_NAME];
};

struct control {
    int rank, ranks; // 1: nothing else is used
    double timeout_s, beat_s;
    struct control_address address; // under MPI: from control_listen on rank 0, brought to the others by the caller
    int listener;                   // until all have come
    struct control_peer *peers;     // (ranks), who they are
    struct control_link *links;     // (ranks); rank 0's to each other one, the others' [0]; [rank]'s report is its own
    struct pollfd *polls;           // (1 + ranks)
    pthread_t thread;
    int wakes; // an eventfd: there is something new under the mutex
    // the thread's own
    double beaten_s, stopped_s; // the last heartbeat; how long this process itself stood still before that
    void *result;               // of the last exchange, which may still be on its way to some
    bool over;                  // all have said goodbye
    // shared
    pthread_mutex_t mutex; // over what follows
    pthread_cond_t done;
    struct control_exchange exchange;
    uint64_t exchanges;
    uint64_t collectives_begun, collectives_done;
    char names[CONTROL_IN_FLIGHT][CONTROL_NAME];
    double collective_since_s; // when the oldest unfinished one became that
    bool closing, exiting;
    pthread_mutex_t poll_mutex; // over these two, and held while the one runs
    void (*poll)(void *context);
    void *poll_context;
    // at exit
    struct control **at_exit; // NULL in it once this is closed
    pid_t pid;                // not of a child
};

static void control_name(char name[CONTROL_NAME], const char *text) { snprintf(name, CONTROL_NAME, "%s", text); }

static void control_wake(struct control *c) {
    const uint64_t one = 1;
    while (write(c->wakes, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

// ---- the line that says why the job ends ----

struct control_line {
    char text[1024];
    size_t length;
};

__attribute__((format(printf, 2, 3))) static void control_say(struct control_line *line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line->text + line->length, sizeof line->text - line->length, format, arguments);
    va_end(arguments);
    line->length += length > 0 ? (size_t)length : 0;
    if (line->length >= sizeof line->text)
        line->length = sizeof line->text - 1;
}

static void control_say_rank(struct control *c, struct control_line *line, int r) {
    control_say(line, "%d (host %s, pid %d", r, c->peers[r].host, c->peers[r].pid);
    const double silent_s = r == c->rank ? 0 : deadline_clock_s() - c->links[r].heard_s;
    if (silent_s > 4 * c->beat_s)
        control_say(line, ", silent for %.3g s", silent_s);
    control_say(line, ")");
}

// Of some ranks: the first few, and how many.
struct control_ranks {
    int first[CONTROL_NAMED];
    int n;
};
static void control_ranks_add(struct control_ranks *ranks, int r) {
    if (ranks->n < CONTROL_NAMED)
        ranks->first[ranks->n] = r;
    ranks->n++;
}
static void control_say_ranks(struct control *c, struct control_line *line, const struct control_ranks *ranks) {
    control_say(line, ranks->n == 1 ? "rank " : "ranks ");
    for (int i = 0; i < ranks->n && i < CONTROL_NAMED; i++) {
        control_say(line, i ? ", " : "");
        control_say_rank(c, line, ranks->first[i]);
    }
    if (ranks->n > CONTROL_NAMED)
        control_say(line, " and %d more", ranks->n - CONTROL_NAMED);
}

// Without stdio, whose locks another thread may hold, and without waiting for a reader that is gone.
static void control_print(struct control_line *line) {
    struct pollfd out = {STDERR_FILENO, POLLOUT, 0};
    line->length = line->length < sizeof line->text - 1 ? line->length : sizeof line->text - 2;
    line->text[line->length++] = '\n';
    if (poll(&out, 1, 1000) == 1 && write(STDERR_FILENO, line->text, line->length) < 0)
        return; // nobody is left to tell
}

// ---- the end ----

// Waits until all has been sent and the others have closed: an end with unread bytes could take back what was sent.
static void control_drain(struct control *c, double seconds) {
    const double until_s = deadline_clock_s() + seconds;
    char dropped[4096];
    for (;;) {
        int open = 0;
        for (int r = 0; r < c->ranks; r++) {
            struct control_link *const link = &c->links[r];
            control_link_send(link);
            if (link->socket >= 0 && link->waiting == 0 && !link->shut) {
                shutdown(link->socket, SHUT_WR);
                link->shut = true;
            }
            ssize_t received = 1;
            while (link->socket >= 0 && received > 0)
                received = recv(link->socket, dropped, sizeof dropped, 0);
            if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR))
                control_link_close(link);
            c->polls[r].fd = link->socket;
            c->polls[r].events = (short)(POLLIN | (link->waiting > 0 ? POLLOUT : 0));
            open += link->socket >= 0;
        }
        if (open == 0 || deadline_clock_s() >= until_s)
            return;
        poll(c->polls, (nfds_t)c->ranks, socket_poll_ms(until_s));
    }
}

static void control_send_to_all(struct control *c, enum control_type type, const void *payload, size_t payload_bytes) {
    struct control_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = type;
    frame.report = c->links[c->rank].report;
    frame.payload_bytes = payload_bytes;
    for (int r = 0; r < c->ranks; r++)
        if (r != c->rank)
            control_link_add(&c->links[r], &frame, payload);
}

// Rank 0 says it to all and ends last. When rank 0 is gone, rank 1 says it, and the others wait for that: the first end
// of a process may be that of all, by the launcher.
__attribute__((noreturn)) static void control_end(struct control *c, struct control_line *line) {
    control_say(line, "; the job ends");
    if (c->rank <= 1)
        control_print(line);
    else
        socket_sleep_s(0.5);
    if (c->rank == 0) {
        control_send_to_all(c, CONTROL_ABORT, NULL, 0);
        control_drain(c, CONTROL_ABORT_S);
    }
    _exit(EXIT_FAILURE);
}

// ---- what the ranks are doing ----

// What this one is doing, now.
static void control_look(struct control *c) {
    struct control_report *const own = &c->links[c->rank].report;
    pthread_mutex_lock(&c->mutex);
    const double now_s = deadline_clock_s();
    const uint64_t begun = c->collectives_begun, done = c->collectives_done;
    const uint64_t shown = begun > done ? done : begun > 0 ? begun - 1 : 0; // the oldest unfinished, else the last
    own->begun = begun;
    own->done = done;
    own->exchanges = c->exchanges;
    own->in_exchange = c->exchange.pending;
    own->patient = c->exchange.patient;
    own->collective_s = begun > done ? now_s - c->collective_since_s : 0;
    own->exchange_s = c->exchange.pending ? now_s - c->exchange.since_s : 0;
    memcpy(own->collective, c->names[shown % CONTROL_IN_FLIGHT], CONTROL_NAME);
    memcpy(own->exchange, c->exchange.name, CONTROL_NAME);
    pthread_mutex_unlock(&c->mutex);
}

// One that is to be named: the nth of the collectives or of the exchanges.
struct control_place {
    uint64_t number; // 0: none
    const char *name;
    bool exchange;
    double for_s;
};
static void control_say_place(struct control_line *line, const struct control_place *place) {
    control_say(line, "'%s' (%s %llu)", place->name, place->exchange ? "exchange" : "collective",
                (unsigned long long)place->number);
}

// The first that some rank is in; of the others than `but`, or of it alone.
static struct control_place control_unfinished(const struct control *c, int but, bool it_alone) {
    struct control_place collective = {0, NULL, false, 0}, exchange = {0, NULL, true, 0};
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        if ((r == but) != it_alone)
            continue;
        if (report->begun > report->done && (!collective.number || report->done + 1 < collective.number)) {
            collective.number = report->done + 1;
            collective.name = report->collective;
        }
        if (report->in_exchange && (!exchange.number || report->exchanges < exchange.number)) {
            exchange.number = report->exchanges;
            exchange.name = report->exchange;
        }
    }
    return collective.number ? collective : exchange;
}

// The last that was begun by any.
static struct control_place control_last(const struct control *c) {
    struct control_place collective = {0, NULL, false, 0}, exchange = {0, NULL, true, 0};
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        if (report->begun > collective.number) {
            collective.number = report->begun;
            collective.name = report->collective;
        }
        if (report->exchanges > exchange.number) {
            exchange.number = report->exchanges;
            exchange.name = report->exchange;
        }
    }
    return collective.number ? collective : exchange;
}

// Where a rank was lost: during what the others are in, else what it was in itself when it was last heard, else after
// the last thing that there was.
static void control_say_where(const struct control *c, struct control_line *line, int lost) {
    struct control_place place = control_unfinished(c, lost, false);
    if (!place.number)
        place = control_unfinished(c, lost, true);
    const bool during = place.number;
    if (!during)
        place = control_last(c);
    control_say(line, place.number ? during ? " during " : " after " : " at the start");
    if (place.number)
        control_say_place(line, &place);
}

__attribute__((noreturn)) static void control_rank_ended(struct control *c, int r) {
    struct control_line line = {"", 0};
    const double gap_s = deadline_clock_s() - c->beaten_s, stopped_s = gap_s > c->stopped_s ? gap_s : c->stopped_s;
    control_look(c);
    control_say(&line, "train_gpt: ");
    if (c->timeout_s > 0 && stopped_s > c->timeout_s) {
        control_say(&line, "rank %d (host %s, pid %d) was stopped for %.3g s, in which the others ended", c->rank,
                    c->peers[c->rank].host, c->peers[c->rank].pid, stopped_s);
    } else {
        control_say(&line, "rank %d (host %s, pid %d) ended", r, c->peers[r].host, c->peers[r].pid);
        control_say_where(c, &line, r);
    }
    control_end(c, &line);
}

// ---- the watch ----

static void control_find_silent(struct control *c) {
    struct control_ranks silent = {{0}, 0};
    const double before_s = deadline_clock_s() - c->timeout_s;
    for (int r = 0; r < c->ranks; r++)
        if (c->links[r].socket >= 0 && c->links[r].heard_s < before_s)
            control_ranks_add(&silent, r);
    if (silent.n == 0)
        return;
    struct control_line line = {"", 0};
    control_say(&line, "train_gpt: ");
    control_say_ranks(c, &line, &silent);
    control_say(&line, silent.n == 1 ? " is stopped or cut off" : " are stopped or cut off");
    control_say_where(c, &line, silent.first[0]);
    control_end(c, &line);
}

// The first that a rank has been in for longer than the timeout.
static struct control_place control_overdue(const struct control *c, bool exchange) {
    struct control_place overdue = {0, NULL, exchange, 0};
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        const bool in = exchange ? report->in_exchange && !report->patient : report->begun > report->done;
        const double for_s = exchange ? report->exchange_s : report->collective_s;
        const uint64_t number = exchange ? report->exchanges : report->done + 1;
        if (!in || for_s <= c->timeout_s || (overdue.number && overdue.number < number))
            continue;
        overdue.for_s = overdue.number == number && overdue.for_s > for_s ? overdue.for_s : for_s;
        overdue.number = number;
        overdue.name = exchange ? report->exchange : report->collective;
    }
    return overdue;
}

static void control_find_overdue(struct control *c, bool exchange) {
    const struct control_place place = control_overdue(c, exchange);
    struct control_ranks missing = {{0}, 0}, in = {{0}, 0};
    struct control_line line = {"", 0};
    if (!place.number)
        return;
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        if ((exchange ? report->exchanges : report->begun) < place.number)
            control_ranks_add(&missing, r);
        else if (exchange ? report->exchanges == place.number && report->in_exchange : report->done < place.number)
            control_ranks_add(&in, r);
    }
    control_say(&line, "train_gpt: ");
    if (missing.n > 0) {
        control_say_ranks(c, &line, &missing);
        control_say(&line, missing.n == 1 ? " has not reached " : " have not reached ");
        control_say_place(&line, &place);
        control_say(&line, ", in which the other ranks have waited for %.3g s", place.for_s);
    } else {
        control_say_place(&line, &place);
        control_say(&line, " was begun by all ranks and after %.3g s is unfinished on ", place.for_s);
        control_say_ranks(c, &line, &in);
    }
    control_end(c, &line);
}

// After what has come was read. Not where this process itself stood still for long: then all look late.
static void control_watch(struct control *c) {
    if (c->timeout_s <= 0 || c->stopped_s > 0)
        return;
    control_find_silent(c);
    if (c->rank != 0)
        return;
    control_find_overdue(c, false);
    control_find_overdue(c, true);
}

static void control_beat(struct control *c) {
    const double now_s = deadline_clock_s(), gap_s = now_s - c->beaten_s;
    c->stopped_s = c->timeout_s > 0 && gap_s > 0.5 * c->timeout_s ? gap_s : 0;
    c->beaten_s = now_s;
    pthread_mutex_lock(&c->poll_mutex);
    if (c->poll)
        c->poll(c->poll_context);
    pthread_mutex_unlock(&c->poll_mutex);
    control_look(c);
    control_send_to_all(c, CONTROL_ALIVE, NULL, 0);
    control_watch(c);
}

// ---- exchanges, in the thread ----

static void *control_allocate(struct control *c, size_t bytes) {
    void *const memory = malloc(bytes + 1);
    if (memory)
        return memory;
    struct control_line line = {"", 0};
    control_say(&line, "train_gpt: rank %d: out of memory for an exchange of %zu bytes", c->rank, bytes);
    control_end(c, &line);
}

static size_t control_result_bytes(const struct control *c) {
    return c->exchange.operation == CONTROL_ALL_GATHER ? (size_t)c->ranks * c->exchange.bytes : c->exchange.bytes;
}

static void control_say_exchange(struct control_line *line, uint32_t operation, const char *name, uint64_t number,
                                 uint64_t bytes) {
    control_say(line, "the %s of '%s' (exchange %llu, %llu bytes)",
                operation == CONTROL_ALL_GATHER ? "all-gather" : "broadcast", name, (unsigned long long)number,
                (unsigned long long)bytes);
}

// All ranks must be in the same exchange: else they run different programs, or were given different options.
static void control_check_same(struct control *c, int r) {
    const struct control_frame *const other = &c->links[r].contribution;
    if (other->number == c->exchanges && other->bytes == c->exchange.bytes &&
        other->operation == c->exchange.operation &&
        strncmp(other->report.exchange, c->exchange.name, CONTROL_NAME) == 0)
        return;
    struct control_line line = {"", 0};
    control_say(&line, "train_gpt: rank ");
    control_say_rank(c, &line, r);
    control_say(&line, " is in ");
    control_say_exchange(&line, other->operation, other->report.exchange, other->number, other->bytes);
    control_say(&line, " while rank 0 is in ");
    control_say_exchange(&line, c->exchange.operation, c->exchange.name, c->exchanges, c->exchange.bytes);
    control_end(c, &line);
}

static void control_exchange_done(struct control *c) {
    c->exchange.pending = false;
    pthread_cond_broadcast(&c->done);
}

// On rank 0, when all have contributed: the last exchange's result has reached them, or they would not be in this one.
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
        control_check_same(c, r);
        if (x->operation == CONTROL_ALL_GATHER && x->bytes > 0)
            memcpy((char *)c->result + (size_t)r * x->bytes, link->contribution_data, x->bytes);
        free(link->contribution_data);
        link->contribution_data = NULL;
        link->contributed = false;
    }
    control_send_to_all(c, CONTROL_RESULT, c->result, bytes);
    if (bytes > 0)
        memmove(x->all, c->result, bytes);
    control_exchange_done(c);
}

// On the others.
static void control_contribute(struct control *c) {
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

// Does what the caller's thread has asked for, as far as it can be done now. False: the thread's work is over.
static bool control_serve(struct control *c) {
    bool all_left = true;
    pthread_mutex_lock(&c->mutex);
    if (c->exchange.pending && c->rank == 0)
        control_complete(c);
    else if (c->exchange.pending && !c->exchange.sent)
        control_contribute(c);
    const bool closing = c->closing, exiting = c->exiting;
    pthread_mutex_unlock(&c->mutex);
    if (exiting) {
        control_send_to_all(c, CONTROL_ABORT, NULL, 0);
        return false;
    }
    for (int r = 1; r < c->ranks && c->rank == 0; r++)
        all_left = all_left && c->links[r].left;
    // left: of this rank's own, that its goodbye has been sent
    if (closing && all_left && !c->links[c->rank].left) {
        c->links[c->rank].left = true;
        control_send_to_all(c, CONTROL_GOODBYE, NULL, 0);
    }
    return !c->over && !(c->rank == 0 && c->links[0].left);
}

// ---- what comes ----

static void control_place_payload(struct control *c, struct control_link *link) {
    if (c->rank == 0) {
        link->in_payload = link->contribution_data = control_allocate(c, link->in.payload_bytes);
        return;
    }
    pthread_mutex_lock(&c->mutex); // the caller waits in the exchange, so its memory stays
    link->in_payload = c->exchange.all;
    pthread_mutex_unlock(&c->mutex);
}

static void control_take(struct control *c, struct control_link *link) {
    link->report = link->in.report;
    switch (link->in.type) {
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
        link->left = true;
        c->over = c->rank != 0;
        break;
    case CONTROL_ABORT: _exit(EXIT_FAILURE);
    default: // a heartbeat: its report was all
        break;
    }
}

static void control_hear(struct control *c, int r) {
    struct control_link *const link = &c->links[r];
    while (!c->over) {
        switch (control_link_receive(link)) {
        case CONTROL_NOTHING: return;
        case CONTROL_HEAD: control_place_payload(c, link); break;
        case CONTROL_WHOLE: control_take(c, link); break;
        case CONTROL_CLOSED:
            if (!link->left)
                control_rank_ended(c, r);
            control_link_close(link); // it had said goodbye
            return;
        }
    }
}

// ---- the thread ----

// Until something comes, something that waits can be sent, the caller asks for something, or the next heartbeat is due.
static void control_wait(struct control *c) {
    uint64_t wakes;
    c->polls[0].fd = c->wakes;
    c->polls[0].events = POLLIN;
    for (int r = 0; r < c->ranks; r++) {
        c->polls[1 + r].fd = c->links[r].socket;
        c->polls[1 + r].events = (short)(POLLIN | (c->links[r].waiting > 0 ? POLLOUT : 0));
    }
    if (poll(c->polls, (nfds_t)(1 + c->ranks), socket_poll_ms(c->beaten_s + c->beat_s)) <= 0)
        return;
    while (read(c->wakes, &wakes, sizeof wakes) < 0 && errno == EINTR)
        ;
    for (int r = 0; r < c->ranks; r++)
        if (c->links[r].socket >= 0 && c->polls[1 + r].revents & ~POLLOUT)
            control_hear(c, r);
}

static void *control_run(void *argument) {
    struct control *const c = (struct control *)argument;
    while (control_serve(c)) {
        if (deadline_clock_s() >= c->beaten_s + c->beat_s)
            control_beat(c);
        for (int r = 0; r < c->ranks; r++)
            control_link_send(&c->links[r]);
        control_wait(c);
    }
    if (c->rank == 0)
        control_drain(c, CONTROL_EXIT_S);
    return NULL;
}

// All signals are blocked in it, so that they arrive in the thread that trains.
static const char *control_start_thread(struct control *c, struct error_text *error) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // a new thread has its maker's mask
    const int problem = pthread_create(&c->thread, NULL, control_run, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return problem
               ? error_format(error, "rank %d: no thread for the control connections: %s", c->rank, strerror(problem))
               : NULL;
}

// ---- opening ----

// Rank 0 under MPI, first of all: c->address is then what the others need in theirs.
static inline const char *control_listen(struct control *c, struct error_text *error) {
    memset(c, 0, sizeof *c);
    c->listener = socket_listen(NULL, 0);
    if (c->listener < 0)
        return error_format(error, "rank 0 cannot listen for the other ranks: %s", strerror(errno));
    socket_address_own(&c->address.at, c->listener);
    if (getrandom(&c->address.token, sizeof c->address.token, 0) != (ssize_t)sizeof c->address.token)
        c->address.token = ((uint64_t)getpid() << 32) ^ (uint64_t)(1e9 * deadline_clock_s());
    return NULL;
}

// Rank 0 elsewhere. Where the address is this host's own in digits, nobody else is let in; a name may mean, here, another
// address than it does elsewhere.
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

static void control_free(struct control *c) {
    for (int r = 0; r < c->ranks && c->links; r++) {
        control_link_close(&c->links[r]);
        free(c->links[r].contribution_data);
    }
    if (c->wakes >= 0)
        close(c->wakes);
    free(c->result);
    free(c->peers);
    free(c->links);
    free(c->polls);
    pthread_mutex_destroy(&c->mutex);
    pthread_mutex_destroy(&c->poll_mutex);
    pthread_cond_destroy(&c->done);
}

// All but the connections.
static const char *control_prepare(struct control *c, const struct launch *launch, double timeout_s,
                                   struct error_text *error) {
    const struct control_address address = c->address;
    const int listener = c->listener;
    memset(c, 0, sizeof *c);
    c->rank = launch->rank;
    c->ranks = launch->ranks;
    c->timeout_s = timeout_s;
    c->beat_s = timeout_s > 0 && timeout_s / 8 < CONTROL_BEAT_S ? timeout_s / 8 : CONTROL_BEAT_S;
    pthread_mutex_init(&c->mutex, NULL);
    pthread_mutex_init(&c->poll_mutex, NULL);
    pthread_cond_init(&c->done, NULL);
    c->pid = getpid();
    c->wakes = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->peers = (struct control_peer *)calloc((size_t)c->ranks, sizeof *c->peers);
    c->links = (struct control_link *)calloc((size_t)c->ranks, sizeof *c->links);
    c->polls = (struct pollfd *)calloc((size_t)c->ranks + 1 + CONTROL_STRANGERS, sizeof *c->polls);
    for (int r = 0; r < c->ranks && c->links; r++)
        c->links[r].socket = -1;
    if (launch->kind == LAUNCH_MPI) {
        c->address = address;
        c->listener = listener;
    } else {
        snprintf(c->address.at.host, sizeof c->address.at.host, "%s", launch->host);
        c->address.at.port = launch->port;
    }
    if (!c->peers || !c->links || !c->polls || c->wakes < 0)
        return error_format(error, "rank %d: out of memory or files for %d ranks", c->rank, c->ranks);
    return NULL;
}

// Until all ranks know that all have come.
static const char *control_meet(struct control *c, double start_s, struct error_text *error) {
    struct control_start *const s = (struct control_start *)calloc(1, sizeof *s);
    if (!s)
        return error_format(error, "out of memory");
    bool ended = false;
    s->rank = c->rank;
    s->ranks = c->ranks;
    s->address = c->address;
    s->peers = c->peers;
    s->links = c->links;
    s->polls = c->polls;
    s->listener = c->listener;
    control_start_own(s);
    c->peers[c->rank] = s->own.who;
    const char *const problem =
        c->rank == 0 ? control_gather_ranks(s, start_s, error) : control_join_rank_0(s, start_s, &ended, error);
    free(s);
    if (ended)
        _exit(EXIT_FAILURE); // rank 0 has said why
    if (c->rank == 0) {
        control_send_to_all(c, problem ? CONTROL_ABORT : CONTROL_WELCOME, problem ? NULL : c->peers,
                            problem ? 0 : (size_t)c->ranks * sizeof *c->peers);
        if (problem)
            control_drain(c, CONTROL_EXIT_S);
    }
    return problem;
}

// A rank 0 that ends by a message of its own (runtime/machine/error.h) takes the others along: its message is enough.
static void control_on_exit(int status, void *argument) {
    struct control *const c = *(struct control **)argument;
    struct timespec until;
    if (!c || c->rank != 0 || c->pid != getpid() || status == 0)
        return;
    if (pthread_equal(pthread_self(), c->thread)) {
        control_send_to_all(c, CONTROL_ABORT, NULL, 0);
        control_drain(c, CONTROL_ABORT_S);
        return;
    }
    pthread_mutex_lock(&c->mutex);
    c->exiting = true;
    pthread_mutex_unlock(&c->mutex);
    control_wake(c);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += CONTROL_EXIT_S + 1;
    pthread_timedjoin_np(c->thread, NULL, &until);
}

static const char *control_open_within(struct control *c, const struct launch *launch, double timeout_s, double start_s,
                                       struct error_text *error) {
    if (launch->ranks == 1) {
        memset(c, 0, sizeof *c);
        c->ranks = 1;
        return NULL;
    }
    const char *problem = control_prepare(c, launch, timeout_s, error);
    if (!problem && c->rank == 0 && launch->kind != LAUNCH_MPI)
        problem = control_listen_at(c, launch, error);
    if (!problem)
        problem = control_meet(c, start_s, error);
    c->beaten_s = deadline_clock_s();
    for (int r = 0; r < c->ranks && c->links; r++)
        c->links[r].heard_s = c->beaten_s;
    if (!problem)
        problem = control_start_thread(c, error);
    if (problem) {
        control_free(c);
        return problem;
    }
    c->at_exit = (struct control **)malloc(sizeof *c->at_exit);
    if (c->at_exit) {
        *c->at_exit = c;
        on_exit(control_on_exit, c->at_exit);
    }
    return NULL;
}

// Connects this rank with rank 0; c stays where it is. timeout_s: of what has one, and of the start; 0: none, and five
// minutes for the start. Where rank 0 gives up the start, the others end, since it says why. Returns NULL or a text.
static inline const char *control_open(struct control *c, const struct launch *launch, double timeout_s,
                                       struct error_text *error) {
    return control_open_within(c, launch, timeout_s, timeout_s > 0 ? timeout_s : (double)CONTROL_START_S, error);
}

// Says goodbye, and returns when all ranks have: the end of one is then no death to another.
static inline void control_close(struct control *c) {
    if (c->ranks == 1)
        return;
    pthread_mutex_lock(&c->mutex);
    c->closing = true;
    pthread_mutex_unlock(&c->mutex);
    control_wake(c);
    pthread_join(c->thread, NULL);
    if (c->at_exit)
        *c->at_exit = NULL; // the exit's own still points at it, so it stays
    control_free(c);
    c->ranks = 1;
}

// ---- what a caller asks for; one at a time ----

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
    control_name(x->name, what);
    x->pending = true;
    c->exchanges++;
    pthread_mutex_unlock(&c->mutex);
    control_wake(c);
    pthread_mutex_lock(&c->mutex);
    while (x->pending)
        pthread_cond_wait(&c->done, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
}

// all (ranks, bytes): every rank's own, in their order; mine may be its place in it. `what` names it where the job ends in it.
static inline void control_all_gather(struct control *c, void *all, const void *mine, size_t bytes, const char *what,
                                      bool patient) {
    if (c->ranks > 1)
        control_exchange_run(c, CONTROL_ALL_GATHER, all, mine, bytes, what, patient);
    else if (bytes > 0)
        memmove(all, mine, bytes);
}

// Rank 0's data, to all; returns on no rank before all are there.
static inline void control_broadcast(struct control *c, void *data, size_t bytes, const char *what, bool patient) {
    if (c->ranks > 1)
        control_exchange_run(c, CONTROL_BROADCAST, data, data, bytes, what, patient);
}

static inline void control_barrier(struct control *c, const char *what, bool patient) {
    control_all_gather(c, NULL, NULL, 0, what, patient);
}

// The data path's collectives, watched: the nth begins, the nth is done. All ranks begin the same ones in the same order.
static inline void control_collective_begun(struct control *c, const char *name) {
    if (c->ranks == 1)
        return;
    pthread_mutex_lock(&c->mutex);
    if (c->collectives_begun == c->collectives_done)
        c->collective_since_s = deadline_clock_s();
    control_name(c->names[c->collectives_begun++ % CONTROL_IN_FLIGHT], name);
    pthread_mutex_unlock(&c->mutex);
}

static inline void control_collective_done(struct control *c) {
    if (c->ranks == 1)
        return;
    pthread_mutex_lock(&c->mutex);
    c->collectives_done++;
    c->collective_since_s = deadline_clock_s(); // of the next, if it has begun
    pthread_mutex_unlock(&c->mutex);
}

// Called by the thread before each heartbeat, to look for what is done; NULL: nothing is. The one before no
// longer runs when this returns, and what it looked at may go.
static inline void control_set_poll(struct control *c, void (*poll)(void *context), void *context) {
    if (c->ranks == 1)
        return;
    pthread_mutex_lock(&c->poll_mutex);
    c->poll = poll;
    c->poll_context = context;
    pthread_mutex_unlock(&c->poll_mutex);
}
