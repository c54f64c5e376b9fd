/* Preloaded, it makes a process's clocks gain DRIFT_PPM from SINCE_NS of the monotonic clock on, and
   shifts its system clock forward by AHEAD_NS. As on a host whose oscillator is too fast, both
   clocks gain alike. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

#define SECOND 1000000000LL

typedef int (*clock_function)(clockid_t, struct timespec *);

static long long read_variable(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    clock_function true_clock = (clock_function)dlsym(RTLD_NEXT, "clock_gettime");
    int failed = true_clock(id, now);
    if (failed || (id != CLOCK_REALTIME && id != CLOCK_MONOTONIC))
        return failed;
    struct timespec steady;
    true_clock(CLOCK_MONOTONIC, &steady);
    long long past = steady.tv_sec * SECOND + steady.tv_nsec - read_variable("SINCE_NS");
    long long ns = now->tv_nsec + past / 1000000 * read_variable("DRIFT_PPM");
    if (id == CLOCK_REALTIME)
        ns += read_variable("AHEAD_NS");
    now->tv_sec += ns / SECOND;
    now->tv_nsec = ns % SECOND;
    return 0;
}
