/* Push and pull between one server and W workers, or rounds of W workers, in plain C: processes, a
 * header word for each side, two gradient buffers a worker. It waits, reads and publishes as mpips
 * does, and does nothing else: no checkpoint, no ledger, no second rule, no failure that it would
 * survive.
 *
 *     cc -O3 -march=native plain_c.c -o plain_c && ./plain_c WORK BYTES WORKERS STEPS REPEATS
 *
 * WORK is push+pull or round.
 *
 * Prints the seconds of each repeat, after one to warm up.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 1 << 12 }; /* numbers that are summed at once */

typedef struct {
    _Alignas(64) _Atomic long v; /* a cache line each */
} word;

static size_t numbers;
static int workers, in_rounds;
static long steps;
static float *params, *gradients; /* of worker w and step s: row 2 * w + s % 2 */
static word *pushed, *applied, *begun, *committed, *there;
static double *spans; /* begin and end of each rank */

static int ranks(void) { return workers + !in_rounds; } /* no server in rounds */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *share(size_t bytes) {
    int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE;
    void *found = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (found == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return found;
}

static void idle(int *looks) {
    if (++*looks > 50) {
        sched_yield();
        *looks = 0;
    } else {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

static int next_push(int first) {
    for (int i = 0; i < workers; i++) {
        int w = (first + i) % workers;
        long sent = atomic_load_explicit(&pushed[w].v, memory_order_acquire);
        if (sent > atomic_load_explicit(&applied[w].v, memory_order_relaxed))
            return w;
    }
    return -1;
}

static void serve(void) {
    int first = 0, looks = 0;
    for (long version = 0; version < steps * workers;) {
        int w = next_push(first);
        if (w < 0) {
            idle(&looks);
            continue;
        }
        long number = atomic_load(&applied[w].v) + 1;
        const float *g = gradients + (2 * w + number % 2) * numbers;
        atomic_store(&begun->v, ++version);
        for (size_t i = 0; i < numbers; i++)
            params[i] -= 1e-9f * g[i];
        atomic_store(&committed->v, version);
        atomic_store_explicit(&applied[w].v, number, memory_order_release);
        first = (w + 1) % workers;
        looks = 0;
    }
}

static void compute(int w) {
    float *replica = malloc(4 * numbers);
    if (!replica)
        _exit(1);
    for (long s = 1; s <= steps; s++) {
        int looks = 0;
        while (atomic_load(&applied[w].v) < s - 2)
            idle(&looks);
        (void)atomic_load(&committed->v); /* both are read, for a pull that would not be torn */
        memcpy(replica, params, 4 * numbers);
        (void)atomic_load(&begun->v);
        float *g = gradients + (2 * w + s % 2) * numbers;
        for (size_t i = 0; i < numbers; i++)
            g[i] = replica[i] * 0.5f;
        atomic_store_explicit(&pushed[w].v, s, memory_order_release);
    }
    free(replica);
}

static void meet(int w, long turn) {
    atomic_store_explicit(&pushed[w].v, turn, memory_order_release);
    for (int i = 0, looks = 0; i < workers;)
        if (atomic_load_explicit(&pushed[i].v, memory_order_acquire) >= turn)
            i++;
        else
            idle(&looks);
}

static void rounds(int w) {
    size_t begin = numbers * w / workers, end = numbers * (w + 1) / workers;
    float *sum = calloc(BLOCK, sizeof(float));
    if (!sum)
        _exit(1);
    for (long turn = 0; turn < 2 * steps; turn += 2) {
        meet(w, turn + 1);
        for (size_t at = begin; at < end; at += BLOCK) {
            size_t count = end - at < BLOCK ? end - at : BLOCK;
            const float *g = gradients + at;
            for (size_t i = 0; i < count; i++)
                sum[i] = 0.5f * g[i] + 0.5f * g[numbers + i];
            for (int k = 2; k < workers; k++)
                for (size_t i = 0; i < count; i++)
                    sum[i] += 0.5f * g[k * numbers + i];
            for (size_t i = 0; i < count; i++)
                params[at + i] -= 1e-9f * sum[i];
        }
        meet(w, turn + 2);
    }
    free(sum);
}

static void run(int rank) {
    struct sched_param none = {0};
    int looks = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sched_setscheduler(0, SCHED_BATCH, &none);
    atomic_fetch_add(&there->v, 1);
    while (atomic_load(&there->v) < ranks())
        idle(&looks);
    spans[2 * rank] = now();
    if (in_rounds)
        rounds(rank);
    else if (rank)
        compute(rank - 1);
    else
        serve();
    spans[2 * rank + 1] = now();
    _exit(0); /* what stdout holds is the parent's */
}

static double repeat(void) {
    double begin, end;
    int status;
    memset(pushed, 0, workers * sizeof(word));
    memset(applied, 0, workers * sizeof(word));
    atomic_store(&there->v, 0);
    for (int rank = 0; rank < ranks(); rank++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("fork");
            exit(1);
        }
        if (!pid)
            run(rank);
    }
    for (int rank = 0; rank < ranks(); rank++)
        if (wait(&status) < 0 || status) {
            fprintf(stderr, "a rank ended with status %d\n", status);
            exit(1); /* which ends the others */
        }
    begin = spans[0], end = spans[1];
    for (int rank = 1; rank < ranks(); rank++) {
        begin = spans[2 * rank] < begin ? spans[2 * rank] : begin;
        end = spans[2 * rank + 1] > end ? spans[2 * rank + 1] : end;
    }
    return end - begin;
}

int main(int count, char **words) {
    in_rounds = count == 6 && !strcmp(words[1], "round");
    if (count != 6 || (!in_rounds && strcmp(words[1], "push+pull")) || atol(words[2]) < 4 ||
        atoi(words[3]) < 1 + in_rounds || atol(words[4]) < 1 || atoi(words[5]) < 1) {
        fprintf(stderr, "usage: %s push+pull|round BYTES WORKERS STEPS REPEATS, with at least 4 "
                        "bytes, 1 worker (2 in rounds), 1 step and 1 repeat\n", *words);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    numbers = atol(words[2]) / 4, workers = atoi(words[3]), steps = atol(words[4]);
    params = share(4 * numbers), gradients = share(8 * numbers * workers);
    pushed = share(workers * sizeof(word)), applied = share(workers * sizeof(word));
    begun = share(sizeof(word)), committed = share(sizeof(word)), there = share(sizeof(word));
    spans = share(2 * (workers + 1) * sizeof(double));
    for (size_t i = 0; i < numbers; i++)
        params[i] = 1;
    for (int i = 0, repeats = atoi(words[5]); i <= repeats; i++) {
        double seconds = repeat();
        if (i)
            printf("%.9f\n", seconds);
    }
    return 0;
}
