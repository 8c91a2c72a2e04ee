/* The clock of one process, stepped by the seconds in the file that CLOCK_OFFSET names. Preloaded.

   As on a machine whose clock is set, CLOCK_MONOTONIC goes on. Waits until a moment of the stepped
   clock are translated back, because the kernel knows nothing of the step. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Seconds since 1970 are larger than this, and seconds since the start of a machine smaller. */
#define SINCE_1970 1000000000

static long offset(void) {
    const char *path = getenv("CLOCK_OFFSET");
    char text[32] = "";
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    int status = syscall(SYS_gettimeofday, now, zone);
    if (!status) now->tv_sec += offset();
    return status;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

static struct timespec real(const struct timespec *until) {
    struct timespec moment = *until;
    if (moment.tv_sec > SINCE_1970) moment.tv_sec -= offset();
    return moment;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!wait) *(void **)&wait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!wait) *(void **)&wait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moment = real(until);
    return wait(condition, mutex, &moment);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*wait)(sem_t *, const struct timespec *);
    if (!wait) *(void **)&wait = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moment = real(until);
    return wait(semaphore, &moment);
}
